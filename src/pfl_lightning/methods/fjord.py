"""FjORD: clients train widths up to their capacity in turn, so each narrow net is a good net alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.heterofl import PartAverage, narrow_nets
from pfl_lightning.nets import CNN, Narrow, NetFactory
from pfl_lightning.nets.base import ModuleFactory
from pfl_lightning.nets.narrow import CONVOLUTIONS
from pfl_lightning.server import Aggregator
from pfl_lightning.settings import Unpack


class FjORD(FedAvg):
    r"""Draws a width for each step, up to the client's capacity: ordered dropout.

    Client k has a net of the width :math:`w_k`, the first units of each layer. A step draws :math:`w` from the widths
    up to :math:`w_k`, all equally likely, and trains the first :math:`\lceil w K \rceil` of a layer's K units. With
    self-distillation the whole net of the client learns from the targets in each step, and the drawn part from the
    whole:

    .. math::

        L = \mathrm{CE}(f_w(x), y) \qquad \text{or} \qquad
        L = \mathrm{CE}(f_{w_k}(x), y) + \mathrm{CE}(f_w(x), \mathrm{softmax}(f_{w_k}(x)))

    without a gradient through the target. The server takes the mean of each entry over the clients with this entry, by
    their numbers of training samples. Running statistics of batch norms move by batches of the client's whole width
    alone; the baseline below keeps statistics for each width, which narrower parts need for predictions of their own.

    The paper has no released code; two of its authors contributed the baseline ``fjord`` of adap/flower, which agrees
    in steps and averages, with both weights of the distillation at 1.
    Source: Horvath et al., 2021 (https://arxiv.org/abs/2102.13451).

    Args:
        net: builds the whole net.
        widths: shares of the net's width, as of `HeteroFL`: capacities of clients, and choices of each step.
        distil: whether the drawn part learns from the client's whole net.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a width is out of its range, or the net can't be narrowed or has a layer whose
            statistics are over units, such as a layer norm.
    """

    requires = frozenset({"classes"})

    kept: Tensor

    # `net` is the whole net's, and not the clients' as in the settings
    def __init__(  # type: ignore[misc]
        self,
        net: list[NetFactory] | NetFactory | ModuleFactory = CNN,
        *args: Any,
        widths: tuple[float, ...] = (1.0, 0.5, 0.25),
        distil: bool = False,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(narrow_nets("FjORD", net, widths, False), *args, **kwargs)
        self.distil = distil
        for name, layer in self.net.named_modules():
            if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)):
                raise MisconfigurationException(
                    f"model.net={type(self.net).__name__} has {name}, a {type(layer).__name__}, whose statistics would "
                    "be over units that a step leaves out; take a net with batch norms or none, or model=HeteroFL."
                )
        self.layers = [
            name for name, layer in self.net.named_modules() if isinstance(layer, (nn.Linear, *CONVOLUTIONS))
        ]
        self.norms = [name for name, layer in self.net.named_modules() if isinstance(layer, BatchNorm)]
        own = cast(Narrow, self.nets[self._architecture]).width
        # the client's own width first
        choices = sorted({width for width in widths if width <= own}, reverse=True)
        # by how many inputs each layer of these widths has, a row for each width; the same in each process
        self.register_buffer("kept", torch.stack([self._inputs(width) for width in choices]), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of a part of a width drawn for the batch, and with self-distillation the whole net's too."""
        x, target = batch
        # a row a sample, since engines that fill up batches draw by rows; the first one is a sample of every client
        rows = torch.zeros_like(target, dtype=self.kept.dtype)[:, None].expand(-1, len(self.kept))
        drawn = F.gumbel_softmax(rows, hard=True)[0]
        if not self.distil:
            with self.part(drawn):
                return super().training_step(batch, batch_idx)
        # first, as running statistics of the whole width mustn't change between its forward and its backward pass
        with self.part(drawn):
            logits = self.net(x)
        features = self.net.features(x)
        whole = self.net.classifier(features)
        taught = F.cross_entropy(logits, whole.detach().softmax(1))
        return {"loss": self.loss(features, whole, target) + taught}

    @contextmanager
    def part(self, drawn: Tensor) -> Iterator[None]:
        """Zero each layer's inputs beyond a width, inside this context.

        A part's outputs are those of the whole net with zeros for all other inputs, and so are the gradients;
        tensors of all draws have equal shapes.

        Args:
            drawn: 1 for the drawn width and 0 for the client's others, ``[widths]``.
        """
        counts = drawn @ self.kept
        norms = [self.net.get_submodule(name) for name in self.norms]
        own = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
        with ExitStack() as after:
            for name, count in zip(self.layers, counts, strict=True):
                hook = partial(first, count=count)
                after.callback(self.net.get_submodule(name).register_forward_pre_hook(hook).remove)
            # copies, as the backward pass needs what the norms have seen
            for norm, name, buffer in own:
                setattr(norm, name, buffer.clone())
                after.callback(setattr, norm, name, buffer)
            yield
            moved = [getattr(norm, name) for norm, name, _ in own]
        for (_, _, buffer), new in zip(own, moved, strict=True):
            # batches of a narrower part have other statistics
            buffer.copy_(torch.where(drawn[0] > 0, new, buffer))

    def _inputs(self, width: float) -> Tensor:
        """Return how many inputs the layers of a net of some width have, ``[layers]``."""
        narrow = Narrow(cast(Narrow, self.nets[0]).net, width)
        # initial weights are of no use here
        with isolate_rng():
            layers = dict(narrow(self.input_shape, self.num_classes).named_modules())
        return torch.tensor([float(size_of(layers[name])) for name in self.layers])

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of each entry over the clients with this entry, weighted by their samples."""
        return PartAverage(by_class=False)


def size_of(layer: nn.Module) -> int:
    """Return the number of a layer's inputs, or of its input channels."""
    return cast(int, layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def first(layer: nn.Module, inputs: tuple[Tensor, ...], count: Tensor) -> Tensor:
    """Return a layer's inputs with zeros behind the first ones.

    Args:
        layer: a linear layer or a convolution.
        inputs: its inputs, one tensor.
        count: how many to keep.
    """
    (x,) = inputs
    there = torch.arange(size_of(layer), device=x.device) < count
    return x * there if isinstance(layer, nn.Linear) else x * there.view(-1, *[1] * (x.dim() - 2))
