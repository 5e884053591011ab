"""LG-FedAvg: personal features under a shared classifier."""

from pfl_lightning.client import in_classifier
from pfl_lightning.methods.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """The classifier is averaged, the feature extractor never leaves its client; both are trained together.

    The mirror of `FedPer`, so that clients may have different feature extractors, as long as their features have one
    width. What counts as the classifier is the net's choice (``head: last | all_fc``). A client that hasn't taken part
    yet has the common initial feature extractor. Takes the arguments of `FedAvg`.

    Classifiers count by their clients' samples; in the official code they count equally, and all clients start from a
    model that `FedAvg` has trained before.
    Source: Liang et al., 2020, Algorithm 1 (https://arxiv.org/abs/2001.01523).
    """

    client_level = True
    example_level = True

    def is_shared(self, name: str) -> bool:
        """The classifier alone."""
        return super().is_shared(name) and in_classifier(name)
