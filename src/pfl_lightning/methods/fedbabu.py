"""FedBABU: a feature extractor trained under a random classifier."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings, Phase, in_classifier
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.settings import Unpack


class FedBABU(FedPer):
    """Trains and averages the feature extractor alone; the classifier stays random until fine-tuning.

    The fine-tuning is a part of evaluation: of all layers, with the local optimizer at the round's learning rate, on a
    copy. The net decides which layers are the classifier (``head: last | all_fc``).
    Source: Oh, Kim and Yun, 2022, Algorithm 1 (https://arxiv.org/abs/2106.06042). The official code averages feature
    extractors with equal weights; here they count by their clients' samples.

    Args:
        finetune_epochs: passes over a client's training data before its evaluation; 0 evaluates without.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``finetune_epochs`` is negative.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, finetune_epochs: int = 5, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if finetune_epochs < 0:
            raise MisconfigurationException(
                f"model.finetune_epochs={finetune_epochs} must be 0 (no fine-tuning) or more, such as 5."
            )
        self.finetune_epochs = finetune_epochs

    def local_phases(self) -> list[Phase]:
        """Train the shared parameters alone."""
        # whatever travels is trained, also where a subclass shares more or less
        return [Phase("body", trains=self.is_shared)]

    def evaluation_phases(self) -> list[Phase]:
        """Fine-tune all parameters."""
        return [Phase("finetune", epochs=self.finetune_epochs)] if self.finetune_epochs else []

    def joining_phases(self) -> list[Phase]:
        """Fine-tune the classifier alone, for the same number of epochs."""
        return [Phase("head", in_classifier, self.finetune_epochs)] if self.finetune_epochs else []
