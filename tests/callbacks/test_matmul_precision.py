"""Precision of float32 products, which holds for a run alone."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit, make_client
from pfl_lightning.callbacks import MatmulPrecision
from pfl_lightning.methods import FedAvg


def now():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


SEEN = set()


class Looking(FedAvg):
    """Tells what holds in its steps, and may fail in one."""

    fails = False

    def training_step(self, batch, batch_idx):
        SEEN.add(now())
        if self.fails:
            raise ValueError("a step of the user's")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("precision", "expected"), [("highest", ("highest", False)), ("high", ("high", True)), ("medium", ("medium", True))]
)
def test_it_holds_in_steps_and_no_longer(precision, expected):
    before = now()
    SEEN.clear()
    fit(make_client(Looking), callbacks=[MatmulPrecision(precision)])
    assert {expected} == SEEN and now() == before


def test_after_an_error_the_process_has_its_own_again(monkeypatch):
    before = now()
    monkeypatch.setattr(Looking, "fails", True)
    with pytest.raises(ValueError, match="a step of the user's"):
        fit(make_client(Looking), callbacks=[MatmulPrecision("medium")])
    assert now() == before


def test_other_words_are_refused():
    with pytest.raises(MisconfigurationException, match="precision='tf32' must be one of highest, high, medium"):
        MatmulPrecision("tf32")
