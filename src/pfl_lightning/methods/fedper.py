"""FedPer: a shared feature extractor under personal classifiers."""

from pfl_lightning.client import Phase, in_body, in_classifier
from pfl_lightning.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """Averages the feature extractor, keeps each client's own classifier, and trains both together.

    The net decides which layers are the classifier (``head: last | all_fc``). A client has the common initial
    classifier until it takes part. Takes the arguments of `FedAvg`. Source: Arivazhagan et al., 2019, Algorithms 1 and
    2 (https://arxiv.org/abs/1912.00818).
    """

    client_level = True
    example_level = True

    def is_shared(self, name: str) -> bool:
        """Share everything but the classifier."""
        return super().is_shared(name) and in_body(name)

    def joining_phases(self) -> list[Phase]:
        """Train the classifier alone: the feature extractor is finished."""
        return [Phase("head", trains=in_classifier)]
