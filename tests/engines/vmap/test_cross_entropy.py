"""Cross-entropy under vmap: torch's values in fewer operations, and its own where classes may be ignored."""

from collections import Counter

import pytest
import torch
from torch.func import grad_and_value, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from federations import blobs, fit, make_client
from pfl_lightning.engines.vmap.dropout import Streams
from pfl_lightning.methods.fedavg import FedAvg


class Names(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Ignoring(FedAvg):
    """Learns without the first sample of a batch, by the number that torch ignores."""

    def training_step(self, batch, batch_idx):
        x, target = batch
        first = torch.arange(len(target)) == (0 if len(target) > 1 else -1)
        return {"loss": F.cross_entropy(self.net(x), target.masked_fill(first, -100))}


def streams():
    return Streams(torch.default_generator, [torch.default_generator.get_state()])


@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "bf16-mixed"])
def test_a_batch_s_own_classes_give_torch_s_loss_and_gradients_in_fewer_operations(autocast):
    dtype = torch.bfloat16 if autocast else torch.float64
    logits, target = torch.randn(4, 6, 5, dtype=dtype), torch.randint(5, (4, 6))
    mode = streams()

    def own(logits, target):
        mode.classes = target
        return F.cross_entropy(logits, target)

    with torch.autocast("cpu", enabled=autocast):
        with Names() as plain:
            expected = vmap(grad_and_value(F.cross_entropy))(logits, target)
        with mode, Names() as names:
            found = vmap(grad_and_value(own))(logits, target)
    assert found[1].dtype == expected[1].dtype == (torch.float32 if autocast else dtype)
    torch.testing.assert_close(found, expected)
    assert names.count["where"] == 0 < plain.count["where"]


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"ignore_index": 1}, {"reduction": "sum"}], ids=str)
def test_with_settings_it_is_torch_s_own(settings):
    logits, target = torch.randn(3, 6, 5, dtype=torch.float64), torch.randint(5, (3, 6))
    mode = streams()

    def own(logits, target):
        mode.classes = target
        return F.cross_entropy(logits, target, **settings)

    with mode:
        found = vmap(own)(logits, target)
    torch.testing.assert_close(found, vmap(lambda x, y: F.cross_entropy(x, y, **settings))(logits, target))


def test_what_a_step_ignores_by_itself_stays_ignored():
    ends = [
        fit(make_client(Ignoring), blobs(), engine=engine, precision="64-true")
        for engine in ("sequential", "vectorised")
    ]
    assert [row["clients_diverged"] for row in ends[1].rows] == [0, 0, 0]
    torch.testing.assert_close(dict(ends[0].weights), dict(ends[1].weights), atol=1e-9, rtol=1e-9)
