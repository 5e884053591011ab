"""What a vectorised round computes, operation by operation: counted on the CPU, and held.

An operation is a kernel on a GPU, where each takes some microseconds to start. Only those that give floating numbers
count, as others, such as orders of samples, are made on the CPU wherever clients train.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from federations import Sizes, fit
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.methods import MOON, FedProx
from pfl_lightning.methods.fedamp import CloudProx
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.methods.wdr import WDR
from pfl_lightning.nets import CNN, MLP

COPIES = {"aten.clone.default", "aten.copy_.default", "aten._to_copy.default"}
LOOKS = {"aten.detach.default", "aten._unsafe_view.default", "aten.squeeze_.dim"}
"""Operations that start no kernel, though torch doesn't call them views."""


STEP = partial(SGD, lr=0.01, foreach=True)
"""As a GPU's by default: one operation for all parameters."""


class Images(FederatedDataModule):
    """Clients of given numbers of samples, or with so many that each makes ``steps`` full batches."""

    num_classes = 10

    def __init__(self, num_clients, steps, input_shape, batch_size, sizes=None):
        sizes = sizes or [steps * batch_size] * num_clients
        super().__init__(
            num_clients=num_clients, partitioner=Sizes(*sizes), batch_size=batch_size, test_fraction=0, val_fraction=0
        )
        self.input_shape, self.samples = input_shape, sum(sizes)

    def load(self):
        return torch.zeros(self.samples, *self.input_shape, dtype=torch.uint8), torch.arange(self.samples) % 10


# largest first, as log-normal sizes are: 40 steps by the first client, one by most
UNEQUAL = [max(1, 400 // place) for place in range(1, 101)]


class Operations(TorchDispatchMode):
    """Counts the operations that give floating numbers; those that only look at memory otherwise don't count."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        floating = isinstance(first, torch.Tensor) and first.is_floating_point() and not func.is_view
        # a factor that Python has: vmap makes it a tensor on the CPU
        number = str(func) == "aten._to_copy.default" and first.dim() == 0
        if str(func) not in LOOKS and not number and (floating or str(func).startswith("aten._foreach")):
            self.names[str(func)] += 1
        return result

    @property
    def copies(self):
        return sum(self.names[name] for name in COPIES)

    @property
    def launches(self):
        return self.names.total()


class Counting(FederatedCallback):
    """Counts what the second round does, up to its end on the server."""

    def on_round_start(self, trainer, federation, cohort):
        self.operations = Operations()
        self.operations.__enter__()

    def on_aggregate_end(self, trainer, federation, logs):
        self.operations.__exit__(None, None, None)


def counted(method, net, data):
    counting = Counting()
    torch.manual_seed(0)
    model = method(net=net, input_shape=data.input_shape, num_classes=10, optimizer=STEP)
    fit(model, data, engine="vectorised", max_rounds=2, limit_val_batches=0, callbacks=[counting])
    return counting.operations


@pytest.mark.parametrize(
    ("net", "data", "launches", "copies"),
    [
        # on a CPU the softmax of a step is two operations; of the unequal clients a plain loop makes 246 steps
        (CNN, partial(Images, 20, 15, (1, 16, 16), 1), 575, 6),
        (partial(MLP, hidden=(64,)), partial(Images, 100, 3, (1, 8, 8), 10), 90, 6),
        (partial(MLP, hidden=(64,)), partial(Images, 100, 0, (1, 8, 8), 10, UNEQUAL), 1360, 54),
    ],
    ids=["20 clients, 15 steps of a CNN", "100 clients, 3 steps of an MLP", "100 clients, 1 to 40 steps of an MLP"],
)
@pytest.mark.by_default("100 clients, 3 steps of an MLP")
def test_a_round_s_operations_are_few(net, data, launches, copies):
    operations = counted(FedAvg, net, data())
    assert launches / 2 < operations.launches <= launches, operations.names
    assert operations.copies <= copies, operations.names


@pytest.mark.parametrize("method", [FedProx, ControlVariates, MOON, WDR, CloudProx], ids=lambda m: m.__name__)
@pytest.mark.by_default("FedProx")
def test_hooks_of_a_method_s_own_run_once_for_all_clients(method):
    few, many = (counted(method, partial(MLP, hidden=(8,)), Images(n, 2, (1, 8, 8), 4)) for n in (10, 20))
    more = many.names - few.names
    # on the CPU each client's own entries become tensors of their own, and servers take updates one by one
    assert not more["aten.copy_.default"], more
    assert more.total() <= 10 * 12, more
