"""FedSA-LoRA: the factors A are averaged, and each client keeps its own B."""

from typing import Any

from pfl_lightning.client import in_classifier
from pfl_lightning.methods.fedit import AdapterSettings, FedIT
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.server.adapters import is_second
from pfl_lightning.settings import Unpack


class FedSALoRA(FedIT):
    r"""Trains both factors of each adapter, averages A, and keeps B and the classifier with their client.

    A client's layer is :math:`W_0 + s B_k \bar A`; no product is averaged. By the paper's observation, A learns what is
    common to clients and B what is their own. A client that has not trained yet has B = 0, which is the model without
    adapters. Source: Guo et al., 2025 (https://arxiv.org/abs/2410.01463); Pengxin-Guo/FedSA-LoRA@fc276b5.

    Args:
        keep_classifier: whether each client keeps its own classifier too, as in the official code for classification.
            It makes no difference where the classifier is frozen, as in most language models.
        **kwargs: the arguments of `FedIT`.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, keep_classifier: bool = True, **kwargs: Unpack[AdapterSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.keep_classifier = keep_classifier

    def is_shared(self, name: str) -> bool:
        """Share everything but B and the classifier."""
        own = is_second(name) or (self.keep_classifier and in_classifier(name))
        return super().is_shared(name) and not own

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of A, weighted by numbers of training samples."""
        return WeightedAverage()
