"""FedLESAM: local steps along the gradient at a point in the direction from which the global model has come.

Source: Fan et al., 2024 (https://arxiv.org/abs/2405.18890). Symbols: x is the received model, x_old the one that the
client received when it last took part, and w the client's model in training.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import loss_at, trainable
from pfl_lightning.settings import Unpack


class FedLESAM(FedAvg):
    r"""Sharpness-aware minimisation with the worst point nearby estimated from two received models.

    .. math:: w \leftarrow w - \eta \nabla F_k(w + e), \qquad e = \rho\,\frac{x_{old} - x}{\lVert x_{old} - x \rVert}

    The global model has come down the global loss from :math:`x_{old}` to x, so that the way back goes up, whereas
    `FedSAM` goes up the client's own loss. A batch takes one pass, and not two. The norm is over all parameters
    together. The client keeps :math:`x_{old}`, which is the common initial model at first: where both are equal, as in
    a first round, e is 0.

    In the official code the server sends its last step in place of :math:`x_{old} - x`, which is the same where all
    clients take part, and the length is divided by the sum of the norms of all tensors, which makes e shorter. It clips
    the gradient's norm at 10 (``trainer.gradient_clip_val``). The variants on top of SCAFFOLD and FedDyn are left out.
    Source: Fan et al., 2024 (https://arxiv.org/abs/2405.18890); MediaBrain-SJTU/FedLESAM@d6663cc.

    Args:
        rho: :math:`\rho`, the distance to the worst point, at least 0; 0 is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``rho`` is negative.
    """

    client_level = True

    def __init__(self, *args: Any, rho: float = 0.1, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= rho < math.inf:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (which is FedAvg) or more, such as 0.1.")
        self.rho = rho
        own = trained_parameters(self, "net").items()
        self.received, self.last = Frozen(own), Frozen(own, persistent=True)  # x and x_old

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, with a copy of the parameters as x."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss at w + e, with e as a constant: the gradient in w is then the gradient at w + e."""
        if self.rho == 0:
            return super().training_step(batch, batch_idx)
        x = self.received.tensors()
        back = {name: old - x[name] for name, old in self.last.tensors().items()}
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in back.values()]))
        # the smallest number keeps two equal models from 0 / 0
        way = self.rho / (length + torch.finfo(length.dtype).tiny)
        w = trainable(self.net)
        there = {name: weight + way * back[name] if name in back else weight for name, weight in w.items()}
        return {"loss": loss_at(self, self.net, there, batch)}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and keep x for the client's next round."""
        self.last.take(self.received.tensors().items())
        return super().upload(data)
