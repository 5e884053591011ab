r"""APFL: predictions by a mixture of a personal model and the global one, whose share is learned too.

Source: Deng, Kamani and Mahdavi, 2020 (https://arxiv.org/abs/2003.13461). Symbols: w is the model that travels, v the
personal one, :math:`\alpha` its share in the mixture, f a batch's loss.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import functional_call, grad

from pfl_lightning.choices import check_choices
from pfl_lightning.client import Batch
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.functional import loss_at, trainable
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net


class APFL(PersonalNet, FedAvg):
    r"""Trains w as `FedAvg` does, and v and the share by the loss of the mixture, in which w stands still.

    .. math::

        w \leftarrow w - \eta \nabla f(w), \qquad v \leftarrow v - \eta \nabla_v f(\bar v), \qquad
        \alpha \leftarrow \mathrm{clip}_{[0,1]}\left(\alpha - \eta_\alpha \frac{\partial}{\partial \alpha} f(\bar v)
        \right)

    All three are at the same point. The mixture :math:`\bar v` is of outputs, :math:`\alpha z_v + (1 - \alpha) z_w`, as
    in the official code (FedTorch), or of parameters, as in the paper; clients are evaluated by the same mixture with
    the w that they receive, and by that alone until they have taken part. v and :math:`\alpha` never leave their
    client; v starts from the common initial model.

    The official code moves :math:`\alpha` by a surrogate of its derivative, and pulls it to 0 with a further term;
    here it is the derivative. It takes v's step at the w after its step. Its parameters begin with a share of 0.5 and
    don't adapt it unless they are told to (``adaptive: false``); which of the two the paper's tables had could not be
    verified.
    Source: Deng et al., 2020, Algorithm 1 (https://arxiv.org/abs/2003.13461).

    Args:
        alpha: the share of the personal model at the start, in [0, 1]; 1 without ``adaptive`` is `Local`.
        adaptive: whether clients learn their shares.
        alpha_lr: :math:`\eta_\alpha`, at least 0; None takes the learning rate.
        alpha_per: whether the share moves once a ``round``, on the first batch, as in the official code, or each
            ``step``.
        mix: what is mixed: ``outputs`` or ``parameters``.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    logs = FedAvg.logs | {"alpha"}
    client_level = True

    personal: Net
    alpha: Tensor

    def __init__(
        self,
        alpha: float = 0.5,
        adaptive: bool = True,
        alpha_lr: float | None = None,
        alpha_per: Literal["round", "step"] = "round",
        mix: Literal["outputs", "parameters"] = "outputs",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= alpha <= 1:
            raise MisconfigurationException(f"model.alpha={alpha} must be from 0 to 1, such as 0.5.")
        if alpha_lr is not None and not alpha_lr >= 0:
            raise MisconfigurationException(f"model.alpha_lr={alpha_lr} must be 0 or more, or null for the local rate.")
        check_choices("model", alpha_per=(alpha_per, ("round", "step")), mix=(mix, ("outputs", "parameters")))
        self.adaptive, self.alpha_lr, self.alpha_per, self.mix = adaptive, alpha_lr, alpha_per, mix
        self.make_personal(self.net)  # v
        self.register_buffer("alpha", torch.tensor(float(alpha)))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The losses of w and of the mixture, whose gradients are of different parameters; moves the share."""
        x, target = batch
        features = self.net.features(x)
        z = self.net.classifier(features)
        loss = self.loss(features, z, target)
        if self.mix == "outputs":
            own = self.personal.features(x)
            parts = {"features": own, "v": self.personal.classifier(own), "w": z.detach()}
        else:
            parts = {"v": trainable(self.personal), "buffers": dict(self.personal.named_buffers())}

        def mixed(alpha: Tensor, parts: dict[str, Any]) -> Tensor:
            if self.mix == "outputs":
                return self.loss(parts["features"], alpha * parts["v"] + (1 - alpha) * parts["w"], target)
            return loss_at(self, self.personal, self.mixture(alpha, parts["v"]) | parts["buffers"], batch)

        alpha = self.alpha.clone()
        personal = mixed(alpha, parts)
        if self.adaptive and (self.alpha_per == "step" or batch_idx == 0):
            rate = self.learning_rate if self.alpha_lr is None else self.alpha_lr
            slope = grad(mixed)(alpha, tree_map(lambda t: t.detach().clone(), parts))
            self.alpha.copy_((alpha - rate * slope).clamp(0, 1))
        return {"loss": loss + personal, "alpha": alpha}

    def mixture(self, alpha: Tensor, v: StateDict) -> StateDict:
        """The mixed parameters, by their names in the net; w gets no gradient."""
        w = dict(self.net.named_parameters())
        return {name: alpha * own + (1 - alpha) * w[name].detach() for name, own in v.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the mixture, as soon as there is a personal model."""
        outputs: Tensor
        if not self.has_personal:
            outputs = self.net(x)
        elif self.mix == "outputs":
            outputs = self.alpha * self.personal(x) + (1 - self.alpha) * self.net(x)
        else:
            outputs = functional_call(self.personal, self.mixture(self.alpha, trainable(self.personal)), (x,))
        return outputs
