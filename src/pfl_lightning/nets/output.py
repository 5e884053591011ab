"""The output layer of a network, with a row a class, and the width of the features."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net


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
    found = [path for path in linear if path == "net.classifier" or path.startswith("net.classifier.")]
    # two layers with as many outputs as classes: a guess would average the wrong one in silence
    if len(found) != 1:
        raise MisconfigurationException(
            f"the net's classifier has {len(found)} linear layers with {num_classes} outputs, and not one that gives "
            "the logits; name it by output_layer, such as 'net.classifier.0'."
        )
    return found[0]


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
