"""FedDistill: clients share mean outputs by class, and no weights."""

from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.class_vectors import ClassVectors, class_means
from pfl_lightning.methods.local import Local
from pfl_lightning.server import Aggregator, ClassMeans
from pfl_lightning.settings import Unpack


class FedDistill(Local):
    r"""Keeps every client's model, and distils the other clients' mean outputs by class.

    Minimises :math:`\mathrm{CE}(z, y) + \gamma\,\mathrm{CE}(z, G_{-k}[y])`, where the soft target :math:`G_{-k}[c]` is
    the mean over the other clients of :math:`F_k[c]`, a client's mean output for its own samples of class c. A sample
    of a class without other clients adds nothing to the second term.

    The paper averages outputs over the steps of training; here the trained model's outputs for the training samples are
    averaged, in evaluation mode, without earlier weights and dropout.
    Source: Jeong et al., 2018, Federated Distillation (https://arxiv.org/abs/1811.11479).

    Args:
        gamma: weight of the distillation, at least 0; 0 is `Local` bit for bit.
        target: the averaged outputs: ``prob`` are the softmax of the logits; ``raw_logits`` are the logits, taken as if
            they were probabilities, as in PFLlib, with a loss that has no lower bound.
        **kwargs: the arguments of `Local`.

    Raises:
        MisconfigurationException: if ``gamma`` is negative.
    """

    requires = frozenset({"classes"})

    sends = needs = frozenset({"outputs"})

    def __init__(
        self,
        *args: Any,
        gamma: float = 1.0,
        target: Literal["prob", "raw_logits"] = "prob",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not gamma >= 0:
            raise MisconfigurationException(f"model.gamma={gamma} must be 0 (which is Local) or more, such as 1.")
        self.gamma = gamma
        self.target = target
        self.outputs = ClassVectors(self.num_classes, self.num_classes)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the other clients' mean outputs."""
        self.outputs.take(payload["outputs"])

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return cross-entropy plus the distillation."""
        loss = super().loss(features, logits, target)
        if self.gamma == 0:
            return loss
        # a class without other clients has an all-zero target, which adds nothing to the cross-entropy
        return loss + self.gamma * F.cross_entropy(logits, self.outputs.vectors[target])

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return :math:`F_k`, the mean output for each of the client's classes."""
        return {"outputs": class_means(self._output, data, self.num_classes)}

    def _output(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits.softmax(1) if self.target == "prob" else logits

    def configure_aggregator(self) -> Aggregator:
        """Return a mean of the other clients' outputs, for each client."""
        return ClassMeans(entry="outputs", weighted=False, exclude_self=True)
