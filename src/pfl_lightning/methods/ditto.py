"""Ditto: a global model as in federated averaging, and beside it a personal one that is held near to it."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, Phase
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import proximal
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net


class Ditto(PersonalNet, FedAvg):
    r"""Trains a personal model beside the global one, and is evaluated by it.

    .. math:: \min_{v_k}\; h_k(v_k; w^t) = F_k(v_k) + \frac{\lambda}{2}\,\lVert v_k - w^t \rVert^2

    The personal model :math:`v_k` goes on from its last state, at first from the common initial model, and never leaves
    its client; it is as large as what is trained of the net. The global model :math:`w^t` travels and is trained as by
    `FedAvg`. A client that hasn't taken part yet is evaluated by the received model.

    Both start from :math:`w^t`, so that their order is free but for the random stream, which they draw from in turn.
    Here the personal phase is the first: with ``personal_lambda=0`` the personal models are those of `Local` bit for
    bit. The global model is the same for every ``personal_lambda``, and that of `FedAvg` with other batches, since
    it draws them after the personal one. Each phase has an optimizer of its own, and the trained loss in the record is
    the mean over both.

    Source: Li et al., 2021, Algorithm 1 (https://arxiv.org/abs/2012.04221). Its official code trains both on the same
    batches and averages clients equally. In PFLlib the weight is ``mu``, which is 0 unless it is set: local training.

    Args:
        personal_lambda: :math:`\lambda`, at least 0; the official code takes 1, or chooses among 0.1, 1 and 2.
        personal_epochs: passes of the personal model over the training data, at least 1; None takes as many as the
            global one makes, by the Trainer's ``local_epochs`` or ``local_steps``.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True
    example_level = True

    personal: Net

    def __init__(self, personal_lambda: float = 1.0, personal_epochs: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
        """The personal model's phase, in which the net still is the received one, then the global model's."""
        return [
            Phase("personal", lambda name: name.startswith("personal."), self.personal_epochs, stays=True),
            Phase("global", lambda name: name.startswith("net.")),
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The local objective of the global model, or h_k."""
        if self.phase.name == "global":
            return super().training_step(batch, batch_idx)
        x, target = batch
        features = self.personal.features(x)
        loss = self.loss(features, self.personal.classifier(features), target)
        if self.personal_lambda > 0:
            personal, net = (trained_parameters(self, path).values() for path in ("personal", "net"))
            loss = loss + self.personal_lambda * proximal(personal, net)
        return {"loss": loss}
