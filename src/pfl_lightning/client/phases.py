"""Phases of local training: the parameters to train, the number of steps, and the samples."""

from collections.abc import Callable
from dataclasses import dataclass

from pfl_lightning.data import Samples

CLASSIFIER = "net.classifier."
"""Prefix of the names of the classifier's entries."""


def everything(name: str) -> bool:
    """Return True: select every parameter."""
    return True


def in_classifier(name: str) -> bool:
    """Select the parameters of the classifier."""
    # the names are those of the client module, whose `net` has `features` and `classifier`
    return name.startswith(CLASSIFIER)


def in_body(name: str) -> bool:
    """Select all parameters outside the classifier."""
    return not in_classifier(name)


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with one set of trained parameters and one optimizer.

    Args:
        name: unique name, which hooks of the client module read as ``self.phase.name`` to tell phases apart.
        trains: selects the trained parameters by name. All others stand still, and so does a parameter with
            ``requires_grad=False`` from the start. Running statistics of frozen layers still move.
        epochs: passes over the training data.
        steps: number of optimizer steps, over as many passes as that takes; replaces ``epochs``. Without either, the
            trainer's ``local_epochs`` or ``local_steps`` hold.
        data: samples to train on instead of the client's own, such as public samples with targets from the server; on
            the client module's device. The data module's ``last_batch`` and ``trainer.limit_train_batches`` don't apply
            to them: none is left out.
        batch_size: samples a batch; None takes the data module's.
        scheduled: whether the learning rate follows ``lr_scheduler``; if False, each round uses the configured rate.
        stays: whether nothing that this phase trains ever leaves the client, not even through a later phase.
            ``trainer.example_privacy`` then adds no noise to its steps.
    """

    name: str = "train"
    trains: Callable[[str], bool] = everything
    epochs: int | None = None
    steps: int | None = None
    data: Samples | None = None
    batch_size: int | None = None
    scheduled: bool = True
    stays: bool = False
