"""FedPer: a shared body under personal classifiers."""

from pfl_lightning.client import Phase, in_body, in_classifier
from pfl_lightning.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """The feature extractor is averaged, the classifier never leaves its client; both are trained together.

    What counts as the classifier is the net's choice (``head: last | all_fc``). A client that hasn't taken part yet
    has the common initial classifier. Takes the arguments of `FedAvg`.
    Source: Arivazhagan et al., 2019, Algorithms 1 and 2 (https://arxiv.org/abs/1912.00818).
    """

    client_level = True
    example_level = True

    def is_shared(self, name: str) -> bool:
        """Everything but the classifier."""
        return super().is_shared(name) and in_body(name)

    def joining_phases(self) -> list[Phase]:
        """The classifier alone: the features are found."""
        return [Phase("head", trains=in_classifier)]
