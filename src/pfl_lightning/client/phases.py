"""Phases of local training: what is trained in them, for how long, on which samples."""

from collections.abc import Callable
from dataclasses import dataclass

from pfl_lightning.data import Samples

CLASSIFIER = "net.classifier."
"""What the names of the classifier's entries begin with."""


def everything(name: str) -> bool:
    """Selects every parameter."""
    return True


def in_classifier(name: str) -> bool:
    """Selects what belongs to the classifier."""
    return name.startswith(CLASSIFIER)


def in_body(name: str) -> bool:
    """Selects all other parameters."""
    return not in_classifier(name)


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with one set of trained parameters and one optimizer.

    Args:
        name: what the client module's hooks read in ``self.phase`` to tell phases apart; each has one of its own.
        trains: selects the trained parameters by name; the others stand still, and so does what has
            ``requires_grad=False`` from the start. Running statistics of frozen layers still move.
        epochs: passes over the training data.
        steps: batches, over as many passes as they take, in the place of ``epochs``; where neither is given, the
            Trainer's ``local_epochs`` or ``local_steps`` hold.
        data: samples to train on in the place of the client's own, such as public ones with what a server says of
            them; on the client module's device. ``data.last_batch`` is of the client's own: of these none is left out.
        batch_size: samples a batch; None takes the data module's.
        scheduled: whether the schedule of the learning rate holds; if not, it is the configured one in each round.
        stays: whether nothing that it trains reaches others, be it through what other phases make of it:
            ``trainer.example_privacy`` then leaves it as it is.
    """

    name: str = "train"
    trains: Callable[[str], bool] = everything
    epochs: int | None = None
    steps: int | None = None
    data: Samples | None = None
    batch_size: int | None = None
    scheduled: bool = True
    stays: bool = False
