"""Steps of plain nets, linear layers with ReLU between them, for all clients without ``vmap`` and without autograd."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.vmap.block import Block
from pfl_lightning.engines.vmap.compiled import Values
from pfl_lightning.engines.vmap.layers import linear_of_stacks, log_softmax, softmax_minus_one_hot
from pfl_lightning.internals.of_torch import entry_tables, has_hooks
from pfl_lightning.messages import StateDict
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.nets.mlp import FlattenQuantities
from pfl_lightning.tasks import Classification


class Dense(NamedTuple):
    """A linear layer.

    Args:
        weight: name of the weight.
        bias: name of the bias; None without one.
        relu: whether a ReLU follows.
    """

    weight: str
    bias: str | None
    relu: bool = False


class DenseNet:
    """A net of linear layers and ReLU, trained by `ClientModule.training_step` with plain cross-entropy.

    Three quarters of such a net's step with ten clients are overhead of ``vmap``, autograd and calls of modules. The
    operations here are those of the general way in the same order, so results have the same bits.

    Args:
        layers: the linear layers, in order.
        trained: names of the parameters to differentiate with respect to.
        squares: whether a step also returns the square of its loss.
    """

    def __init__(self, layers: list[Dense], trained: list[str], squares: bool) -> None:
        self.layers = layers
        self.trained = trained
        self.squares = squares
        wanted = [place for place, layer in enumerate(layers) if {layer.weight, layer.bias} & set(trained)]
        self.first = min(wanted, default=len(layers))
        """The first trained layer, where backward ends; the number of layers if none is trained."""

    @classmethod
    def of(
        cls, module: ClientModule, precision: Precision, slots: Slots, block: Block, trained: list[str]
    ) -> "DenseNet | None":
        """Return a client module's net; None if any part of the net or of its training step is of another kind.

        Args:
            module: the client module.
            precision: the Trainer's precision plugin.
            slots: the module's slots.
            block: the clients.
            trained: names of the trained parameters.
        """
        own_step = any(overrides(module, hook) for hook in ("training_step", "loss", "task_loss"))
        # Types are compared exactly, here and below, because a subclass may compute something else.
        if (
            own_step
            or isinstance(module.net, LightningNet)
            or type(module.task) is not Classification
            or "_class_weights" in block.entries
        ):
            return None
        x, y = block.samples
        # Other precisions compute under autocast, or with scaled losses.
        if not str(precision.precision).startswith(("32", "64")):
            return None
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return None
        names = {(id(slot.table), slot.key): slot.name for slot in slots.all if slot.tensor is not None}
        layers: list[Dense] = []
        flat = x.dim() == 2
        for layer in (*leaves_of(module.net.features), *leaves_of(module.net.classifier)):
            table = id(entry_tables(layer)[0])
            if has_hooks(layer) or "forward" in vars(layer):
                return None
            if type(layer) is nn.Linear and flat and (table, "weight") in names:
                layers.append(Dense(names[table, "weight"], names.get((table, "bias"))))
                if (layers[-1].bias is None) != (layer.bias is None):
                    # A parameter common to all clients is in no stack.
                    return None
            elif type(layer) is nn.ReLU and layers:
                layers[-1] = layers[-1]._replace(relu=True)
            elif isinstance(layer, nn.Flatten) and type(layer) in (nn.Flatten, FlattenQuantities):
                flat = True
                if (layer.start_dim, layer.end_dim) != (1, -1):
                    return None
            else:
                return None
        used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
        types = {x.dtype, *(block.entries[name].dtype for name in used)}
        # With tied weights a gradient is a sum over layers.
        if len(set(used)) < len(used) or len(types) > 1 or not x.is_floating_point() or y.dim() != 1:
            return None
        net = cls(layers, trained, "loss_squared" in module.requested)
        return net if net.first < len(layers) else None

    def differentiate(
        self, entries: StateDict, x: Tensor, target: Tensor, counts: Tensor | None, share: float
    ) -> Values:
        """Return a step's values, and a share of the loss's gradients by the trained parameters.

        Args:
            entries: parameters, a row per client.
            x: inputs ``[clients, n, ...]``.
            target: class numbers ``[clients, n]``.
            counts: each client's number of samples ``[clients]``, beyond which samples have no influence; None if all
                samples count.
            share: factor of the gradients.
        """
        outputs = [x.flatten(2)]
        for weight, bias, relu in self.layers:
            output = linear_of_stacks(outputs[-1], entries[weight], None if bias is None else entries[bias])
            outputs.append(output.relu_() if relu else output)
        log_p, target = log_softmax(outputs[-1]), target[:, :, None]
        losses, n = log_p.gather(2, target), target.shape[1]
        factors: Tensor | float
        if counts is None:
            loss, factors = losses.sum((1, 2)) / -n, share / n
        else:
            weights = (torch.arange(n, device=counts.device) < counts[:, None]).to(log_p.dtype) / counts[:, None]
            loss, factors = (-losses.squeeze(2) * weights).sum(1), (weights * share)[:, :, None]
        values = {"loss": loss, **({"loss_squared": loss.square()} if self.squares else {})}
        return values, self._backward(entries, outputs, softmax_minus_one_hot(log_p, target).mul_(factors))

    def _backward(self, entries: StateDict, outputs: list[Tensor], gradient: Tensor) -> StateDict:
        """Return the gradients by the trained parameters.

        Args:
            entries: parameters, a row per client.
            outputs: the input, and each layer's output.
            gradient: the gradient by the last output, which is changed.
        """
        gradients: StateDict = {}
        for place in range(len(self.layers) - 1, self.first - 1, -1):
            weight, bias, relu = self.layers[place]
            if relu:
                # the operation of autograd, which takes a fifth of a comparison and a masked fill
                torch.ops.aten.threshold_backward.grad_input(gradient, outputs[place + 1], 0, grad_input=gradient)
            if weight in self.trained:
                gradients[weight] = torch.bmm(gradient.mT, outputs[place])
            if bias in self.trained:
                gradients[bias] = gradient.sum(1)
            if place > self.first:
                gradient = torch.bmm(gradient, entries[weight])
        return {name: gradients[name] for name in self.trained if name in gradients}


def leaves_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested sequences in order; other containers are yielded themselves.

    Args:
        module: a layer, or a sequence of modules.
    """
    if type(module) is nn.Sequential and not has_hooks(module):
        for part in module:
            yield from leaves_of(part)
    else:
        yield module
