"""The check of image shapes."""

from lightning.fabric.utilities.exceptions import MisconfigurationException


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
