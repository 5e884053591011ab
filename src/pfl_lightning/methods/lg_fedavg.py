"""LG-FedAvg: personal feature extractors under a shared classifier."""

from pfl_lightning.client import in_classifier
from pfl_lightning.methods.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """Averages the classifier, keeps each client's own feature extractor, and trains both together.

    The mirror image of `FedPer`. Clients may have different feature extractors, as long as their features have one
    width. The net decides which layers are the classifier (``head: last | all_fc``). A client has the common initial
    feature extractor until it takes part. Takes the arguments of `FedAvg`.

    Classifiers count by their clients' samples; in the official code they count equally, and all clients start from a
    model trained by `FedAvg`.
    Source: Liang et al., 2020, Algorithm 1 (https://arxiv.org/abs/2001.01523).
    """

    client_level = True
    example_level = True

    def is_shared(self, name: str) -> bool:
        """Share the classifier alone."""
        return super().is_shared(name) and in_classifier(name)
