"""Names of clients in warnings, errors and pictures."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, make_client, make_trainer
from pfl_lightning.data import TensorData
from pfl_lightning.data.client_names import axis_label
from pfl_lightning.methods import FedAvg
from pfl_lightning.plots import plot_partition
from pfl_lightning.plots.aggregation import plot_weight_heatmaps
from pfl_lightning.plots.similarity import plot_peer_counts
from pfl_lightning.tasks import Classification

NAMES = ["Bremen", "Erfurt", "Ulm"]


def towns():
    x = torch.randn(36, 6, generator=torch.Generator().manual_seed(0))
    return TensorData(x, torch.arange(36) % 3, Classification(3), client=sorted(NAMES * 12), val_fraction=0.0)


class Fails(FedAvg):
    def training_step(self, batch, batch_idx):
        if self.client_id == 1:
            raise ValueError("no")
        return super().training_step(batch, batch_idx)


class Diverges(FedAvg):
    def loss(self, features, logits, target):
        return super().loss(features, logits, target) * (torch.nan if self.client_id == 2 else 1)


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_an_error_of_a_client_tells_the_name(engine, tmp_path):
    with pytest.raises(ValueError, match="no") as error:
        make_trainer(tmp_path, engine=engine, max_rounds=1).fit(make_client(Fails), towns())
    assert any("of client 1 (Erfurt) in round 1" in note for note in error.value.__notes__)


def test_an_error_of_a_client_without_name_tells_the_id(tmp_path):
    with pytest.raises(ValueError, match="no") as error:
        make_trainer(tmp_path, max_rounds=1).fit(make_client(Fails), blobs())
    assert any("of client 1 in round 1" in note for note in error.value.__notes__)


def test_a_client_that_diverges_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"clients 2 \(Ulm\)"):
        make_trainer(tmp_path, max_rounds=1).fit(make_client(Diverges), towns())


@pytest.mark.parametrize(
    "figure",
    [
        lambda: plot_partition(torch.ones(3, 4), NAMES),
        lambda: plot_weight_heatmaps([1, 2], torch.ones(2, 3) / 3, torch.ones(2, 3) / 3, NAMES),
        lambda: plot_peer_counts(torch.ones(3, 3), [0, 0, 0], NAMES),
    ],
)
def test_axes_have_names(figure):
    assert [text.get_text() for text in figure().axes[0].get_yticklabels()] == NAMES


def test_axes_without_names_have_ids():
    assert [text.get_text() for text in plot_partition(torch.ones(3, 4)).axes[0].get_yticklabels()] == ["0", "1", "2"]
    assert len(axis_label(0, ["x" * 100])) == 16


def test_a_test_with_a_stranger_is_refused_by_name(tmp_path):
    trainer, model = make_trainer(tmp_path, max_rounds=1), make_client()
    trainer.fit(model, towns())
    x, y = torch.zeros(8, 6), torch.arange(8) % 3
    other = TensorData(x, y, Classification(3), client=["Brehmen"] * 8, val_fraction=0.0)
    with pytest.raises(MisconfigurationException, match="Brehmen"):
        trainer.test(model, other)
