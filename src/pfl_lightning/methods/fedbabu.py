"""FedBABU: a body trained under a classifier that nobody touches until the model is used."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import Phase, in_classifier
from pfl_lightning.methods.fedper import FedPer


class FedBABU(FedPer):
    """Only the body is trained and averaged; the classifier keeps its random start until each client tunes the model.

    The fine-tuning is part of the evaluation: of all layers, by the local optimizer at the round's learning rate, and
    on a copy. What counts as the classifier is the net's choice (``head: last | all_fc``).
    Source: Oh, Kim and Yun, 2022, Algorithm 1 (https://arxiv.org/abs/2106.06042). The official code averages bodies
    with equal weights, here they count by their clients' samples.

    Args:
        finetune_epochs: passes over a client's training data before it is evaluated; 0 evaluates without.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``finetune_epochs`` is negative.
    """

    client_level = True
    example_level = True

    def __init__(self, finetune_epochs: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if finetune_epochs < 0:
            raise MisconfigurationException(
                f"model.finetune_epochs={finetune_epochs} must be 0 (no fine-tuning) or more, such as 5."
            )
        self.finetune_epochs = finetune_epochs

    def local_phases(self) -> list[Phase]:
        """One that trains what travels."""
        return [Phase("body", trains=self.is_shared)]

    def evaluation_phases(self) -> list[Phase]:
        """Fine-tuning of everything."""
        return [Phase("finetune", epochs=self.finetune_epochs)] if self.finetune_epochs else []

    def joining_phases(self) -> list[Phase]:
        """As long a fine-tuning, of the classifier alone."""
        return [Phase("head", in_classifier, self.finetune_epochs)] if self.finetune_epochs else []
