"""Low-rank adapters in any net, without further packages."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Net, NetFactory
from pfl_lightning.nets.cnn import CNN


class Adapted(Net):
    r"""A net whose features are frozen, with a trained low-rank adapter beside each linear layer and convolution.

    A layer with the frozen weights :math:`W_0` computes :math:`W_0 x + s B A x` with :math:`s = \alpha / r`, where A is
    random and B is 0 at first, so that the net begins as without adapters. The classifier is trained whole. Names of
    parameters are those of ``peft``, whose models (docs/nets.md) the methods for adapters take as well.

    >>> [name for name, p in Adapted((1, 28, 28), 10).features.named_parameters() if p.requires_grad][:2]
    ['0.lora_A.default.weight', '0.lora_B.default.weight']

    Source: Hu et al., 2022 (https://arxiv.org/abs/2106.09685).

    Args:
        input_shape: shape of one sample, without the batch.
        num_classes: number of classes.
        net: builds the net that gets adapters, best with trained weights.
        rank: r, at least 1.
        alpha: :math:`\alpha`, above 0.

    Raises:
        MisconfigurationException: if a value is out of its range, or the features have no layer that could be adapted.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        net: NetFactory = CNN,
        rank: int = 8,
        alpha: float = 16.0,
    ) -> None:
        if rank < 1:
            raise MisconfigurationException(f"model.net.rank={rank} must be 1 or more, such as 8.")
        if not alpha > 0:
            raise MisconfigurationException(f"model.net.alpha={alpha} must be above 0, such as 16.")
        base = net(input_shape, num_classes)
        # frozen parameters are common: held once for all clients, and never sent
        base.features.requires_grad_(False)
        # in a list, since layers are replaced on the way
        for path, layer in list(base.features.named_modules()):
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
                # the features may be a single layer
                if path:
                    base.features.set_submodule(path, LowRank(layer, rank, alpha))
                else:
                    base.features = LowRank(layer, rank, alpha)
        super().__init__(base.features, base.classifier)
        if not any(isinstance(layer, LowRank) for layer in self.features.modules()):
            raise MisconfigurationException(
                f"model.net.net={type(base).__name__} has no linear layer or convolution below its classifier, beside "
                "which an adapter could stand; take a deeper net, such as CNN."
            )


class LowRank(nn.Module):
    """A frozen layer with a low-rank adapter beside it, under the names of ``peft``.

    Args:
        layer: the linear layer or convolution.
        rank: r.
        alpha: the scale times r.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = layer
        first: nn.Module
        second: nn.Linear | nn.Conv2d
        if isinstance(layer, nn.Linear):
            first, second = nn.Linear(layer.in_features, rank, False), nn.Linear(rank, layer.out_features, False)
        else:
            sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            first = nn.Conv2d(layer.in_channels, rank, *sizes, bias=False, padding_mode=layer.padding_mode)  # type: ignore[arg-type]
            second = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(second.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": first}), nn.ModuleDict({"default": second})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs and the adapter's, added.

        Args:
            x: the layer's inputs.
        """
        added: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        output: Tensor = self.base_layer(x) + self.scaling["default"] * added
        return output
