"""Alternate training: the classifier on frozen features, then the features under the frozen classifier."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings, Phase, in_body, in_classifier
from pfl_lightning.methods.feature_alignment import FeatureAlignment
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


class AlternateTraining(FedAvg):
    """Trains the classifier alone, then the feature extractor alone, in each round.

    It is the "+A" of FedReMa (https://arxiv.org/abs/2411.01825). Each phase has an optimizer of its own.

    Args:
        head_epochs: passes over the training data in the classifier's phase; None takes the trainer's ``local_epochs``
            or ``local_steps``, as the other phase does, which makes twice the training of `FedAvg`.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``head_epochs`` is less than 1.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, head_epochs: int | None = None, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if head_epochs is not None and head_epochs < 1:
            raise MisconfigurationException(
                f"model.head_epochs={head_epochs} must be 1 or more, or null for as long as the features are trained."
            )
        self.head_epochs = head_epochs

    def local_phases(self) -> list[Phase]:
        """Train the classifier, then the feature extractor."""
        return [Phase("head", in_classifier, self.head_epochs), Phase("body", in_body)]


# in this order, so that `configure_aggregator` is that of `FeatureAlignment`
class AlternateAlignment(FeatureAlignment, AlternateTraining):
    """Alternate training with feature alignment, the "+A&F" of FedReMa.

    Only the features' phase draws features to prototypes: in the classifier's phase features stand still, and the
    alignment has no gradient. Takes the arguments of `AlternateTraining` and of `FeatureAlignment`.
    """
