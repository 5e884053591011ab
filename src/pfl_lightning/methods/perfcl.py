"""PerFCL: FENDA's two bodies, drawn apart by contrasts with their own past and with the received one."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fenda import FENDA
from pfl_lightning.methods.frozen import FrozenModule
from pfl_lightning.methods.moon import model_contrast
from pfl_lightning.settings import Unpack


class PerFCL(FENDA):
    r"""Minimises :math:`\mathrm{CE} + \mu\,\ell(z; z^{recv}, z^{old}) + \gamma\,\ell(z_k; z_k^{old}, z^{recv})`.

    .. math:: \ell(a; p, n) = -\log\frac{e^{\cos(a, p)/\tau}}{e^{\cos(a, p)/\tau} + e^{\cos(a, n)/\tau}}

    as the mean over a batch. :math:`z` and :math:`z_k` are the features of the shared and the personal body in
    training, ``recv`` is the shared body as received, and ``old`` are both as they were after the client's last
    training. References are frozen, in evaluation mode. A client's first training has no contrast. Both old bodies stay
    with the client, whose state is larger by them, and grow stale while it stays away.
    Source: Zhang et al., 2023 (https://www.sciencedirect.com/science/article/pii/S0031320323002078), as ported to
    VectorInstitute/FL4Health@ce141b9 (``losses/perfcl_loss.py``, ``clients/perfcl_client.py``), whose pairs, weights
    and temperature these are; no code of its authors was found.

    Args:
        mu: :math:`\mu`, at least 0; with ``gamma`` at 0 too it is `FENDA` bit for bit.
        gamma: :math:`\gamma`, at least 0.
        tau: temperature of the cosines, above 0.
        **kwargs: the arguments of `FENDA`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    logs = FENDA.logs | {"contrast"}
    client_level = True
    example_level = True

    requires = frozenset({"vector features"})

    has_old: Tensor

    def __init__(
        self, *args: Any, mu: float = 1.0, gamma: float = 1.0, tau: float = 0.5, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed in (("mu", mu, mu >= 0), ("gamma", gamma, gamma >= 0), ("tau", tau, tau > 0)):
            if not allowed:
                raise MisconfigurationException(
                    f"model.{name}={value}: model.mu and model.gamma must be 0 or more, and model.tau above 0, such as "
                    "1, 1 and 0.5."
                )
        self.mu, self.gamma, self.tau = mu, gamma, tau
        # without contrasts a client keeps no copies
        self.contrasts = mu > 0 or gamma > 0
        if self.contrasts:
            common = common_parameters(self).values()
            # `old` belongs to the client and is kept with its state; `received` is made anew in each round
            self.received = FrozenModule(self.net.features, common=common)
            self.old = FrozenModule(self.net.features, persistent=True, common=common)
            self.old_local = FrozenModule(self.net.local, persistent=True, common=common)
            self.register_buffer("has_old", torch.tensor(False))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the shared body, and copy it as received."""
        super().on_download(payload, data)
        if self.contrasts:
            self.received.take_from(self.net.features)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss plus the contrasts, which the record has apart too."""
        if not self.contrasts:
            return super().training_step(batch, batch_idx)
        x, target = batch
        personal, shared, received = self.net.local(x), self.net.features(x), self.received(x)
        contrast = self.mu * model_contrast(shared, received, self.old(x), self.tau)
        contrast = contrast + self.gamma * model_contrast(personal, self.old_local(x), received, self.tau)
        # by `where` and not by `if`, so that many clients can run at once
        contrast = torch.where(self.has_old, contrast, 0)
        return {"loss": self.joint_loss(personal, shared, target) + contrast, "contrast": contrast}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the update, and keep both trained bodies as the old ones."""
        # a client without a batch has trained nothing to contrast with
        if self.contrasts and self.steps_done:
            self.old.take_from(self.net.features)
            self.old_local.take_from(self.net.local)
            self.has_old.fill_(True)
        return super().upload(data)
