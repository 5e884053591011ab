"""Client modules with the other networks of a list."""

from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.client.arguments import made_again
from pfl_lightning.seeds import derive_seed

Made = TypeVar("Made")


def made_with_others(made: Made, arguments: tuple[list[Any], dict[str, Any]], nets: list[Any]) -> list[Made]:
    """Objects like one that was made with a list of networks, one for each further network of the list.

    Each draws its weights from a stream of its own, so that those of the first one stay.

    Args:
        made: the object.
        arguments: what it was made with, as `arguments_of_init` gives it.
        nets: the list.
    """
    others = []
    for index, net in enumerate(nets[1:], start=1):
        with isolate_rng():
            torch.manual_seed(derive_seed(torch.initial_seed(), "net", index))
            others.append(made_again(made, arguments, nets, net))
    return others
