"""FML: a personal model and the shared model teach each other."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import divergence
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.settings import Unpack


class FML(PersonalNet, FedAvg):
    r"""Deep mutual learning of a personal model v and a shared "meme" model w.

    .. math::

        L_v = \alpha\,\mathrm{CE}(v) + (1 - \alpha)\,\mathrm{KL}(p_w \Vert p_v), \qquad
        L_w = \beta\,\mathrm{CE}(w) + (1 - \beta)\,\mathrm{KL}(p_v \Vert p_w)

    Only w travels. Neither model receives a gradient of the other's loss, and divergences are means over samples; in
    PFLlib and HtFLlib both models receive both gradients, and divergences are smaller by the number of classes. Clients
    count equally, and are evaluated by v once they have taken part. Here both have the same architecture; v starts from
    the common initial model.
    Source: Shen et al., 2020 (https://arxiv.org/abs/2006.16765); the defaults are its official code's.

    Args:
        alpha: weight of the cross-entropy in v's loss, in [0, 1]; 1 makes v `Local`'s.
        beta: weight of the cross-entropy in w's loss, in [0, 1]; 1 makes w `FedAvg`'s.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``alpha`` or ``beta`` is out of its range.
    """

    logs = FedAvg.logs | {"personal_loss"}
    client_level = True

    requires = frozenset({"classes"})
    personal: Net

    def __init__(self, *args: Any, alpha: float = 0.5, beta: float = 0.5, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value <= 1:
                raise MisconfigurationException(f"model.{name}={value} must be from 0 to 1, such as 0.5.")
        self.alpha, self.beta = alpha, beta
        self.make_personal(self.net)  # v

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of both losses, and v's loss for the record."""
        x, target = batch
        features = [net.features(x) for net in (self.net, self.personal)]
        w, v = self.net.classifier(features[0]), self.personal.classifier(features[1])
        loss_w = self.beta * self.loss(features[0], w, target) + (1 - self.beta) * divergence(v, w)
        loss_v = self.alpha * self.loss(features[1], v, target) + (1 - self.alpha) * divergence(w, v)
        # one backward pass for both: `divergence` detaches the teacher, so each loss has a gradient in its own model
        # alone
        return {"loss": loss_w + loss_v, "personal_loss": loss_v}

    def configure_aggregator(self) -> Aggregator:
        """Return the unweighted mean of the meme models."""
        return WeightedAverage(weighting="uniform")
