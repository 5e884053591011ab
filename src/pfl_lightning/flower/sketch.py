"""Work out templates of updates without clients: a client module receives, trains nothing, and uploads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import personal_entries
from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split
from pfl_lightning.engines import Job
from pfl_lightning.messages import Message, detached, tree_map
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks import MultiLabel, NextToken, Preference, Segmentation, Survival, Task


class Sketch:
    """Source of made-up samples for a task: random inputs, and two samples of each class.

    Args:
        task: the task.
        shape: shape of an input.
    """

    def __init__(self, task: Task, shape: tuple[int, ...]) -> None:
        self.task, self.shape = task, shape

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """Return the same samples for each client."""
        n = self.size(0, split)
        # a generator of its own, since the run's random numbers may not depend on templates
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, *self.shape, generator=generator)
        y = torch.arange(n) % self.task.outputs
        if isinstance(self.task, NextToken):
            x = y = y[:, None].expand(n, *self.shape)
        elif isinstance(self.task, Preference):
            x = y[:, None, None].expand(n, *self.shape)
            return [Samples(x, {"tokens": x, "reference": torch.zeros(n, 2)}).to(device) for _ in clients]
        elif isinstance(self.task, Segmentation):
            y = y.view(n, *[1] * len(self.shape[1:])).expand(n, *self.shape[1:])
        elif self.task.reconstructs:
            y = x
        elif not self.task.has_classes:
            # as many columns as targets have, which outputs outnumber where a target has several
            columns = 2 if isinstance(self.task, Survival) else getattr(self.task, "quantities", self.task.outputs)
            y = torch.ones(n, columns, dtype=torch.int64 if isinstance(self.task, MultiLabel) else x.dtype)
        return [Samples(x.to(device), y.to(device)) for _ in clients]

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples, two a class."""
        # a vocabulary may have 100,000 classes, and a template needs few samples
        return 2 * min(self.task.outputs, 1000)


class Sketches:
    """Templates of updates, each worked out once.

    Args:
        modules: the client modules, by architecture; left unchanged.
    """

    def __init__(self, modules: Sequence[ClientModule]) -> None:
        self._modules = modules
        self._templates: dict[tuple[int, tuple[str, ...], str, bool], Message] = {}
        # personal parameters are at sites; initial ones have the same shapes
        self._personal = [detached(personal_entries(module, module.state_dict())) for module in modules]

    def keys(self, clients: int) -> int:
        """Return the number of possible integer keys in updates: the classes or the clients, whichever are more."""
        return max(self._modules[0].task.outputs, clients)

    def update(self, architecture: int, job: Job) -> Message:
        """Return a template of the update for a job: an update of the same names, types and shapes.

        Args:
            architecture: index of the client's architecture.
            job: the client's job, with the payload.

        Raises:
            MisconfigurationException: if an upload without training fails.
        """
        module = self._modules[architecture]
        vars(module).update(client_id=job.client, round=job.round)
        # by the payload's shapes too, which decide the shapes of updates in some methods, by the names that travel,
        # which change from round to round in RoLoRA, and by whether the round is the last, in which CCVR reports
        payload, last = str(tree_map(lambda t: t.to("meta"), job.payload)), job.round + 1 == module.num_rounds
        look = architecture, tuple(module.shared_state()), payload, last
        if look not in self._templates:
            try:
                self._templates[look] = self._made(architecture, job)
            except Exception as error:
                name = type(module).__name__
                raise MisconfigurationException(
                    f"model={name}: what its updates look like can't be found out by an upload without training "
                    f"({type(error).__name__}: {error}), and without that nothing is taken from sites; take another."
                ) from error
        return self._templates[look]

    @torch.no_grad()
    def _made(self, architecture: int, job: Job) -> Message:
        module = self._modules[architecture]
        shape = tuple(cast(FederatedDataModule, job.data.source).input_shape)
        data = ClientData(Sketch(module.task, shape), job.client, module.device, cast(torch.dtype, module.dtype))
        with isolate_rng(), as_it_was(module):
            module.eval()
            # as after a step, since methods divide by the number of steps
            module.become(job.client, job.round, self._personal[architecture], job.payload, data, steps_done=1)
            update: Message = tree_map(look_of, module.upload(data))
        return update


def look_of(tensor: Tensor) -> Tensor:
    """Return zeros of a tensor's type and shape, of which one is in memory: a template of a large net stays small."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@contextmanager
def as_it_was(module: ClientModule) -> Iterator[None]:
    """Restore a module's tensors and modes at the end of the context."""
    tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.data for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        # the copy is what changes, and goes: the tensors themselves may be mapped from a file
        tensor.data = before[name].clone()
    try:
        with kept_modes(module):
            yield
    finally:
        for name, tensor in tensors.items():
            # not copied into: a download may have given a buffer another size
            tensor.data = before[name]
