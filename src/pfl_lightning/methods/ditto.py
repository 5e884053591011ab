"""Ditto: a global model as in federated averaging, beside a personal model near it."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import proximal
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net
from pfl_lightning.settings import Unpack


class Ditto(PersonalNet, FedAvg):
    r"""Trains a personal model beside the global one, and evaluates the client by the personal one.

    .. math:: \min_{v_k}\; h_k(v_k; w^t) = F_k(v_k) + \frac{\lambda}{2}\,\lVert v_k - w^t \rVert^2

    The personal model :math:`v_k` starts from the common initial model, continues from its last state in each round,
    and never leaves its client; it is as large as the trained part of the net. The global model :math:`w^t` travels and
    is trained as by `FedAvg`. Until a client takes part, the received model is evaluated.

    Both phases start from :math:`w^t`, so their order matters only for the random numbers, which they draw from one
    stream. Here the personal phase is the first: with ``personal_lambda=0`` the personal models are those of `Local`
    bit for bit. The global model doesn't depend on ``personal_lambda``, and is that of `FedAvg` with other batches,
    which it draws after the personal model's. Each phase has an optimizer of its own, and the recorded loss is the mean
    over both.

    Source: Li et al., 2021, Algorithm 1 (https://arxiv.org/abs/2012.04221). Its official code trains both models on the
    same batches and weights clients equally. In PFLlib, :math:`\lambda` is ``mu``, whose default of 0 is local
    training.

    Args:
        personal_lambda: :math:`\lambda`, at least 0; the official code takes 1, or chooses among 0.1, 1 and 2.
        personal_epochs: passes of the personal model over the training data, at least 1; None takes as many as the
            global model makes, by the trainer's ``local_epochs`` or ``local_steps``.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True
    example_level = True

    personal: Net

    def __init__(
        self,
        *args: Any,
        personal_lambda: float = 1.0,
        personal_epochs: int | None = None,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not personal_lambda >= 0:
            raise MisconfigurationException(
                f"model.personal_lambda={personal_lambda} must be 0 (which is Local) or more, such as 1."
            )
        if personal_epochs is not None and personal_epochs < 1:
            raise MisconfigurationException(
                f"model.personal_epochs={personal_epochs} must be 1 or more, or null for as many as the global model."
            )
        self.personal_lambda = personal_lambda
        self.personal_epochs = personal_epochs
        self.make_personal(self.net)  # v_k

    def local_phases(self) -> list[Phase]:
        """Train the personal model, with the net still as received, then the global model."""
        return [
            # nothing of v_k leaves the client, so private training adds no noise to this phase
            Phase("personal", lambda name: name.startswith("personal."), self.personal_epochs, stays=True),
            Phase("global", lambda name: name.startswith("net.")),
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the local objective of the global model, or :math:`h_k` in the personal phase."""
        if self.phase.name == "global":
            return super().training_step(batch, batch_idx)
        x, target = batch
        features = self.personal.features(x)
        loss = self.loss(features, self.personal.classifier(features), target)
        if self.personal_lambda > 0:
            personal, net = (trained_parameters(self, path).values() for path in ("personal", "net"))
            # h_k: the net is w^t in this phase, as no step of it has been made yet
            loss = loss + self.personal_lambda * proximal(personal, net)
        return {"loss": loss}
