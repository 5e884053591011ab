"""Narrow copies of a network, for clients that can train only a part of it."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.nets.any_module import as_net
from pfl_lightning.nets.base import ModuleFactory, Net, NetFactory
from pfl_lightning.nets.inputs import candidates
from pfl_lightning.nets.modes import kept_modes

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


class Narrow:
    r"""Builds a network whose hidden layers have a share of the width.

    A layer of K units or channels keeps :math:`\lceil w K \rceil`. Inputs and outputs keep their size. The weights are
    the first ones of the whole network, so that a narrow network is a part of it. Linear, convolutional and embedding
    layers, batch, layer and group norms become narrow.

    >>> from pfl_lightning.nets import MLP
    >>> Narrow(MLP, 0.5)((1, 8, 8), 10).classifier
    Sequential(
      (0): Linear(in_features=32, out_features=10, bias=True)
    )

    Args:
        net: builds the whole network.
        width: w, above 0 and at most 1; 1 gives the whole network.
        scale: whether training divides the outputs of narrow layers by w, by which their sums over inputs have the size
            of the whole network's; the scaler of Diao et al., 2021 (https://arxiv.org/abs/2010.01264).

    Raises:
        MisconfigurationException: if the width is out of its range; in use, if the network can't be narrowed.
    """

    def __init__(self, net: NetFactory | ModuleFactory, width: float, scale: bool = True) -> None:
        if not 0 < width <= 1:
            raise MisconfigurationException(f"width={width} must be above 0 and at most 1, such as 0.5.")
        self.net, self.width, self.scale = net, width, scale

    def __call__(self, input_shape: tuple[int, ...], num_classes: int) -> Net:
        """Return the narrow network.

        Args:
            input_shape: shape of one sample, without the batch.
            num_classes: number of outputs.
        """
        net = as_net(self.net(input_shape, num_classes), input_shape, num_classes)
        if self.width < 1:
            whole = deepcopy(net)
            _Cut(net, self.width, self.scale).run(whole, input_shape)
        return net


def units_taken(whole: int, own: int, block: int = 1, turn: int = 0) -> Tensor:
    r"""Return the places that a narrow layer has of a whole one's dimension: of K units, those from :math:`-t \bmod K`.

    >>> units_taken(4, 2), units_taken(4, 2, turn=1), units_taken(8, 4, block=2, turn=1)
    (tensor([0, 1]), tensor([3, 0]), tensor([6, 7, 0, 1]))

    Args:
        whole: the dimension's size in the whole network.
        own: its size in the narrow one.
        block: how many places belong to a unit; K is ``whole // block``.
        turn: t, by how many units the part has moved.
    """
    if whole == own:
        return torch.arange(whole)
    units = torch.arange(own // block).sub(turn).remainder(whole // block)
    return (units[:, None] * block + torch.arange(block)).flatten()


def places_of(
    entries: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], blocks: Mapping[str, int], turn: int = 0
) -> dict[str, tuple[Tensor, ...]]:
    """Return where a narrow network's entries are in the whole one's: the places in each dimension, by name.

    Args:
        entries: the entries of the whole network.
        shapes: the narrow network's shapes, by name.
        blocks: how many inputs belong to a unit, as by `blocks_of`.
        turn: by how many units the part has moved; see `units_taken`.
    """
    return {
        name: tuple(
            units_taken(whole, own, blocks.get(name, 1) if dim == 1 else 1, turn)
            for dim, (whole, own) in enumerate(zip(entries[name].shape, shape, strict=True))
        )
        for name, shape in shapes.items()
    }


def taken(entry: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """Return a part of an entry, as a tensor of its own; a single number as it is.

    Args:
        entry: the entry of the whole network.
        places: its places in each dimension.
    """
    for dim, chosen in enumerate(places):
        entry = entry.index_select(dim, chosen.to(entry.device))
    return entry


def blocks_of(net: nn.Module) -> dict[str, int]:
    """Return how many inputs of a narrow layer belong to one unit of the layer before, by the name of its weight.

    Behind a flattening a channel of 4 x 4 pixels is 16 inputs. Layers with one input a unit are left out.

    Args:
        net: a network, or a module with one.
    """
    blocks = ((name, getattr(layer, "inputs_per_unit", 1)) for name, layer in net.named_modules())
    return {f"{name}.weight": block for name, block in blocks if block != 1}


class Scaler:
    """Divides a layer's outputs by its width in training; a forward hook, since a layer more would rename all others.

    Args:
        width: the share of the width.
    """

    def __init__(self, width: float) -> None:
        self.width = width

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Return the scaled outputs."""
        return output / self.width if layer.training else output


class _Cut:
    """Cuts a network's layers in the order of their calls, by which each one's inputs are known.

    Args:
        net: the network, which changes.
        width: the share of the width.
        scale: whether layers get a `Scaler`.
    """

    def __init__(self, net: Net, width: float, scale: bool) -> None:
        self.net, self.width, self.scale = net, width, scale
        self.layers = {name: layer for name, layer in net.named_modules() if any(True for _ in layer.parameters(False))}
        linear = [name for name, layer in self.layers.items() if isinstance(layer, nn.Linear)]
        names = [name for name in linear if name.startswith("classifier")]
        if not names:
            raise self._refused("its classifier has no linear layer, whose outputs would stay as they are")
        self.output = names[-1]
        self.units = 0
        """Units of the whole network's layer that was called last."""
        self.called: set[str] = set()

    def _refused(self, reason: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"model.net={type(self.net).__name__} can't be narrowed to a width of {self.width}: {reason}; give a "
            "list of networks of the same layers, each built by its own widths."
        )

    def run(self, whole: Net, input_shape: tuple[int, ...]) -> None:
        """Cut all layers.

        Args:
            whole: a copy of the network, which is overwritten.
            input_shape: shape of one sample, without the batch.

        Raises:
            MisconfigurationException: if a layer is of another kind, isn't called, or the network fails afterwards.
        """
        shared = len(list(self.net.parameters())) < len(list(self.net.named_parameters(remove_duplicate=False)))
        if shared:
            raise self._refused("two of its layers share a parameter")
        with kept_modes(self.net), torch.no_grad():
            self.net.eval()
            x, shape = self._tried(input_shape)
            hooks = [
                layer.register_forward_pre_hook(lambda layer, inputs, name=name: self._cut(name, layer, inputs[0]))
                for name, layer in self.layers.items()
            ]
            try:
                outputs = self.net(x)
            except MisconfigurationException:
                raise
            except Exception as error:
                raise self._refused(f"its forward raised {type(error).__name__}: {error}") from error
            finally:
                for hook in hooks:
                    hook.remove()
            if missed := self.layers.keys() - self.called:
                raise self._refused(f"its layer {min(missed)} isn't called")
            if outputs.shape != shape:
                raise self._refused(f"its outputs became {list(outputs.shape[1:])} in place of {list(shape[1:])}")
            self._check(whole.eval().double(), x)

    def _check(self, whole: Net, x: Any) -> None:
        """Check that the narrow network is a part of the whole one, also after a turn.

        The whole network then has the narrow one's outputs, if no other unit is an input of a layer. A concatenation,
        for example, puts one layer's first units behind all of another's.

        Args:
            whole: the whole network, which is overwritten.
            x: inputs.
        """
        narrow = deepcopy(self.net).double()
        for net in (whole, narrow):
            # their statistics are over all units
            for name, layer in list(net.named_modules()):
                if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)):
                    net.set_submodule(name, nn.Identity())
        entries, own = whole.state_dict(), narrow.state_dict()
        random = torch.Generator().manual_seed(0)
        for name, places in places_of(entries, {n: t.shape for n, t in own.items()}, blocks_of(narrow), turn=1).items():
            entry = entries[name]
            if entry.dim() > 1:
                # initial weights may be 0, or so small that all outputs are alike
                entry.copy_(torch.randn(entry.shape, generator=random) / entry[0].numel() ** 0.5)
            own[name].copy_(taken(entry, places))
            if entry.dim() > 1 and not isinstance(self.layers[name.rpartition(".")[0]], nn.Embedding):
                others = torch.ones(entry.shape[1], dtype=torch.bool)
                others[places[1]] = False
                entry[:, others] = 0
        x = x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        given, expected = narrow(x), whole(x)
        if (given - expected).abs().max() > 1e-6 * given.abs().max():
            raise self._refused("its layers' units are joined or put into another order, as by a concatenation")

    def _tried(self, input_shape: tuple[int, ...]) -> tuple[Any, torch.Size]:
        """Return inputs that the network takes, and the shape of its outputs."""
        problem: Exception | None = None
        for x in candidates(input_shape):
            try:
                return x, self.net(x).shape
            except Exception as error:
                problem = problem or error
        raise self._refused(f"its forward raised {type(problem).__name__}: {problem}")

    def _cut(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Cut a layer that is about to be called.

        Args:
            name: the layer's name.
            layer: the layer.
            x: its inputs, from layers that are narrow already.
        """
        if name in self.called:
            return
        self.called.add(name)
        keep = name == self.output
        if isinstance(layer, nn.Linear):
            before, after = self._inputs(name, layer.in_features, x.shape[-1]), self._outputs(layer.out_features, keep)
            self._take(layer, weight=(after, before), bias=(after,))
            self.units, layer.in_features, layer.out_features = layer.out_features, before, after
        elif isinstance(layer, CONVOLUTIONS):
            self._cut_convolution(name, layer, x.shape[1], keep)
        elif isinstance(layer, nn.Embedding):
            after = self._outputs(layer.embedding_dim, keep)
            self._take(layer, weight=(layer.num_embeddings, after))
            self.units, layer.embedding_dim = layer.embedding_dim, after
        elif isinstance(layer, (BatchNorm, nn.GroupNorm)):
            units = x.shape[1]
            self._take(layer, weight=(units,), bias=(units,), running_mean=(units,), running_var=(units,))
            if isinstance(layer, BatchNorm):
                layer.num_features = units
            elif units % layer.num_groups:
                raise self._refused(f"its group norm {name} has {layer.num_groups} groups for {units} channels")
            else:
                layer.num_channels = units
        elif isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
            self._take(layer, weight=(x.shape[-1],), bias=(x.shape[-1],))
            layer.normalized_shape = (x.shape[-1],)
        else:
            raise self._refused(f"nothing says how its layer {name}, a {type(layer).__name__}, becomes narrow")
        if self.scale and isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and not keep:
            layer.register_forward_hook(Scaler(self.width))

    def _cut_convolution(self, name: str, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, channels: int, keep: bool) -> None:
        """Cut a convolution; one with a group a channel keeps its groups."""
        if layer.groups not in (1, layer.in_channels):
            raise self._refused(f"its convolution {name} has {layer.groups} groups")
        before = self._inputs(name, layer.in_channels, channels)
        after = self._outputs(layer.out_channels, keep)
        if layer.groups > 1:
            after = layer.out_channels // layer.groups * before
        self._take(layer, weight=(after, 1 if layer.groups > 1 else before), bias=(after,))
        layer.groups = before if layer.groups > 1 else 1
        self.units, layer.in_channels, layer.out_channels = layer.out_channels, before, after

    def _outputs(self, units: int, keep: bool) -> int:
        """Return the number of units of a narrow layer."""
        return units if keep else math.ceil(self.width * units)

    def _inputs(self, name: str, whole: int, given: int) -> int:
        """Return the number of inputs of a narrow layer, and note how many belong to a unit of the layer before.

        Args:
            name: the layer's name.
            whole: the number in the whole network.
            given: the number that arrives.
        """
        if given == whole:
            return whole
        block = whole // self.units if self.units and whole % self.units == 0 else 1
        if given != self._outputs(whole // block, False) * block:
            raise self._refused(f"its layer {name} receives {given} inputs, which are no share of {whole}")
        self.layers[name].inputs_per_unit = block
        return given

    @staticmethod
    def _take(layer: nn.Module, **sizes: tuple[int, ...]) -> None:
        """Replace a layer's parameters and buffers by their first entries.

        Args:
            layer: the layer.
            **sizes: the new size in the leading dimensions, by name.
        """
        for name, size in sizes.items():
            if (tensor := getattr(layer, name, None)) is None:
                continue
            part = tensor.detach()[tuple(slice(n) for n in size)].clone()
            if isinstance(tensor, nn.Parameter):
                part = nn.Parameter(part, requires_grad=tensor.requires_grad)
            setattr(layer, name, part)
