"""What an update will look like, found out without a client: by a client module that receives, and trains nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import personal_entries
from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split
from pfl_lightning.engines import Job
from pfl_lightning.messages import Message, detached, tree_map
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks import MultiLabel, NextToken, Segmentation, Task


class Sketch:
    """A source of random samples, as far as can be known without any: of each class, where there are classes, two.

    Args:
        task: what is predicted.
        shape: of an input.
    """

    def __init__(self, task: Task, shape: tuple[int, ...]) -> None:
        self.task, self.shape = task, shape

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """The same samples for all."""
        n = self.size(0, split)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, *self.shape, generator=generator)
        y = torch.arange(n) % self.task.outputs
        if isinstance(self.task, NextToken):
            x = y = y[:, None].expand(n, *self.shape)
        elif isinstance(self.task, Segmentation):
            y = y[:, None, None].expand(n, *self.shape[1:])
        elif not self.task.has_classes:
            y = torch.ones(n, self.task.outputs, dtype=torch.int64 if isinstance(self.task, MultiLabel) else x.dtype)
        return [Samples(x.to(device), y.to(device)) for _ in clients]

    def size(self, client: int, split: Split) -> int:
        """How many there are."""
        return 2 * min(self.task.outputs, 1000)


class Sketches:
    """The looks of updates, each found out once.

    Args:
        modules: the client modules, by architecture; left as they are.
    """

    def __init__(self, modules: Sequence[ClientModule]) -> None:
        self._modules = modules
        self._known: dict[tuple[int, str], Message] = {}
        # what stays with a client is at its site; it looks like what it began with
        self._personal = [detached(personal_entries(module, module.state_dict())) for module in modules]

    def keys(self, clients: int) -> int:
        """What integers in updates count: classes or clients, whichever are more."""
        return max(self._modules[0].task.outputs, clients)

    def update(self, architecture: int, job: Job) -> Message:
        """What the update of a job looks like.

        Args:
            architecture: the client's.
            job: has its payload.

        Raises:
            MisconfigurationException: if that can't be found out.
        """
        look = architecture, str(tree_map(lambda t: t.to("meta"), job.payload))
        if look not in self._known:
            try:
                self._known[look] = self._made(architecture, job)
            except Exception as error:
                name = type(self._modules[architecture]).__name__
                raise MisconfigurationException(
                    f"model={name}: what its updates look like can't be found out by an upload without training "
                    f"({type(error).__name__}: {error}), and without that nothing is taken from sites; take another."
                ) from error
        return self._known[look]

    @torch.no_grad()
    def _made(self, architecture: int, job: Job) -> Message:
        module = self._modules[architecture]
        shape = tuple(cast(FederatedDataModule, job.data.source).input_shape)
        data = ClientData(Sketch(module.task, shape), job.client, module.device, cast(torch.dtype, module.dtype))
        with isolate_rng(), as_it_was(module):
            module.eval()
            vars(module).update(client_id=job.client, round=job.round, steps_done=1)
            module.receive(self._personal[architecture], job.payload, data)
            update: Message = detached(module.upload(data))
        return update


@contextmanager
def as_it_was(module: ClientModule) -> Iterator[None]:
    """Puts a module's tensors and modes back afterwards."""
    tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        with kept_modes(module):
            yield
    finally:
        for name, tensor in tensors.items():
            # a download may have given a buffer another size
            tensor.data = before[name]
