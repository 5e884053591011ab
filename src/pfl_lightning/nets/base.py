"""The base class of networks: a feature extractor and a classifier."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

Head: TypeAlias = Literal["last", "all_fc"]
"""The classifier's layers: the ``last`` linear layer, or ``all_fc`` fully connected layers."""


class Net(nn.Module):
    """A network in two parts, ``classifier(features(x))``, which personalised methods share or keep separately.

    It wraps any pair of modules; subclasses build the papers' networks from the shape of the data.

    Args:
        features: maps inputs ``[n, *input_shape]`` to features ``[n, d]``.
        classifier: maps features ``[n, d]`` to logits ``[n, num_classes]``.
    """

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[n, num_classes]``.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        logits: Tensor = self.classifier(self.features(x))
        return logits


NetFactory: TypeAlias = Callable[[tuple[int, ...], int], Net]
"""Builds a net from the input shape (without the batch) and the number of classes; a `Net` subclass is one."""
if TYPE_CHECKING:
    AnyModule: TypeAlias = nn.Module
else:

    class AnyModule(ABC):
        """Any ``nn.Module``, as the type that the command line expects.

        The command line's help lists all known subclasses of a type, of ``nn.Module`` some eight hundred.
        """

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            """Return whether a class is a module's."""
            return issubclass(other, nn.Module)

        @abstractmethod
        def forward(self, *inputs: Any) -> Any:
            """Compute outputs; abstract, so that the help doesn't list this class either."""


# beside `NetFactory`: the command line reads files, and this package's names, only where it expects a `Net`
ModuleFactory: TypeAlias = Callable[[tuple[int, ...], int], AnyModule]
"""Builds any module in the same way, which is then cut at its output layer, as by `cut_net`."""


def checked_list(net: list[NetFactory] | NetFactory | ModuleFactory) -> list[ModuleFactory]:
    """Return the builders of a federation's networks as a list, checked; a module becomes a builder of copies.

    Args:
        net: a builder or a module, or a list of these.

    Raises:
        MisconfigurationException: if there is none, or one is neither.
    """
    if net == []:
        raise MisconfigurationException("model.net=[] has no network; give one, or a list of some.")
    nets = net if isinstance(net, list) else [net]
    for each in nets:
        if not callable(each):
            raise MisconfigurationException(
                f"model.net={each!r} builds no network; give a class of pfl_lightning.nets, such as CNN, a function "
                "of input_shape and num_classes, or a module."
            )
        check_call(each)
    # a module may be given to several client modules, and each needs weights of its own
    return [partial(copied, each) if isinstance(each, nn.Module) else each for each in nets]


def check_call(build: Callable[..., Any]) -> None:
    """Check that a builder takes the two arguments that it is called with.

    Args:
        build: a class, a function or a module.

    Raises:
        MisconfigurationException: if it takes other ones, such as none.
    """
    if isinstance(build, nn.Module):
        return
    try:
        signature = inspect.signature(build)
    # some builders that are written in C have none
    except (ValueError, TypeError):
        return
    try:
        signature.bind((), 0)
    except TypeError:
        name = getattr(build, "__name__", type(build).__name__)
        raise MisconfigurationException(
            f"model.net={name} is called with input_shape and num_classes, and takes {name}{signature}; give a "
            "function of the two that builds it, or the built module."
        ) from None


def copied(module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a copy of a built module, with the same weights.

    Args:
        module: the module.
        input_shape: unused, as the module is built.
        num_classes: unused likewise.
    """
    return deepcopy(module)


def checked_net(net: Net) -> Net:
    """Return a net with both parts, and with parameters to train.

    Args:
        net: the net.

    Raises:
        MisconfigurationException: if it lacks ``features`` or ``classifier``, or all parameters are frozen.
    """
    if not all(isinstance(getattr(net, part, None), nn.Module) for part in ("features", "classifier")):
        raise MisconfigurationException(
            f"model.net={type(net).__name__} has no modules for features and classifier; give one of "
            "pfl_lightning.nets that builds them, or a function that does."
        )
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise MisconfigurationException(
            f"model.net={type(net).__name__} has no parameter to train, as all have requires_grad=False; leave some of "
            "it trainable, such as the classifier."
        )
    return net


def cut(body: list[nn.Module], dense: list[nn.Module], head: Head) -> tuple[nn.Sequential, nn.Sequential]:
    """Divide a network's layers into features and classifier.

    Args:
        body: the layers up to the flattening, including it.
        dense: the fully connected layers and their activations; the last one gives the logits.
        head: ``last`` gives the classifier the last layer only, ``all_fc`` all of ``dense``.

    Raises:
        MisconfigurationException: if ``head`` is neither.
    """
    if head not in get_args(Head):
        raise MisconfigurationException(f"model.net.head={head!r} must be one of {', '.join(get_args(Head))}.")
    # in both cases the same modules in the same order: the cut changes no initial weight and no output
    if head == "all_fc":
        return nn.Sequential(*body), nn.Sequential(*dense)
    return nn.Sequential(*body, *dense[:-1]), nn.Sequential(dense[-1])


def find_output_layer(client: nn.Module, num_classes: int, name: str | None = None) -> str:
    """Return the dotted name of the linear layer with a row a class, which gives the logits.

    Args:
        client: a client module; the search is in its ``net.classifier``.
        num_classes: number of rows of the layer.
        name: the layer's name, where the search doesn't find exactly one, such as ``net.classifier.0``.

    Raises:
        MisconfigurationException: if there is no such layer, or more than one.
    """
    linear: dict[str, nn.Linear] = {
        path: module
        for path, module in client.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    }
    if name is not None:
        if name in linear:
            return name
        raise MisconfigurationException(
            f"output_layer={name!r} is no linear layer with {num_classes} outputs; "
            f"choose from {', '.join(map(repr, linear)) or 'none in this net'}."
        )
    # a layer with as many outputs inside the features isn't the output layer
    paths = [path for path in linear if path == "net.classifier" or path.startswith("net.classifier.")]
    # two layers with as many outputs as classes: a guess would average the wrong one in silence
    if len(paths) != 1:
        raise MisconfigurationException(
            f"the net's classifier has {len(paths)} linear layers with {num_classes} outputs, and not one that gives "
            "the logits; name it by output_layer, such as 'net.classifier.0'."
        )
    return paths[0]


def feature_size(net: Net) -> int:
    """Return the width d of a net's features ``[n, d]``, the inputs of the classifier's first linear layer.

    Args:
        net: the net.

    Raises:
        MisconfigurationException: if the classifier has no linear layer.
    """
    # read from the classifier, since a run of the features would need an input and could draw random numbers
    for layer in net.classifier.modules():
        if isinstance(layer, nn.Linear):
            return layer.in_features
    raise MisconfigurationException(
        "the net's classifier has no linear layer, whose inputs would be the features; use a net with nn.Linear in it."
    )


def check_images(net: str, input_shape: tuple[int, ...], side: int = 1) -> tuple[int, int, int]:
    """Return channels, height and width of images, and refuse images too small for a network.

    Args:
        net: the network's name.
        input_shape: ``(channels, height, width)``.
        side: the smallest number of pixels a side.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < side:
        size = f" of at least {side} x {side} pixels" if side > 1 else ""
        raise MisconfigurationException(
            f"net {net} takes images{size}, not input_shape={tuple(input_shape)}; net MLP takes any shape."
        )
    channels, height, width = input_shape
    return channels, height, width
