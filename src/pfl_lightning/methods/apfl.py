r"""APFL: predictions by a mixture of a personal model and the global one, with a learned share.

Source: Deng, Kamani and Mahdavi, 2020 (https://arxiv.org/abs/2003.13461). Symbols: w is the model that travels, v the
personal model, :math:`\alpha` its share in the mixture, f a batch's loss.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call, grad

from pfl_lightning.client import Batch, ClientSettings, Forward
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.functional import loss_at, trainable
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net
from pfl_lightning.settings import Unpack, check_choices


class APFL(PersonalNet, FedAvg):
    r"""Trains w as `FedAvg` does, and v and the share by the mixture's loss with a fixed w.

    .. math::

        w \leftarrow w - \eta \nabla f(w), \qquad v \leftarrow v - \eta \nabla_v f(\bar v), \qquad
        \alpha \leftarrow \mathrm{clip}_{[0,1]}\left(\alpha - \eta_\alpha \frac{\partial}{\partial \alpha} f(\bar v)
        \right)

    All three gradients are taken at the same point. The mixture :math:`\bar v` is of outputs, :math:`\alpha z_v + (1 -
    \alpha) z_w`, as in the official code (FedTorch), or of parameters, as in the paper. Clients are evaluated by the
    same mixture with the received w, and by w alone until they take part. v and :math:`\alpha` never leave their
    client; v starts from the common initial model.

    The official code moves :math:`\alpha` by a surrogate of its derivative, with a further term that pulls it to 0;
    here it is the derivative. The official code steps v at the w after its step. Its default is a fixed share of 0.5
    (``adaptive: false``); whether the paper's tables have adaptive shares could not be verified.
    Source: Deng et al., 2020, Algorithm 1 (https://arxiv.org/abs/2003.13461).

    Args:
        alpha: initial share of the personal model, in [0, 1]; 1 without ``adaptive`` is `Local`.
        adaptive: whether clients learn their shares.
        alpha_lr: :math:`\eta_\alpha`, at least 0; None takes the learning rate.
        alpha_per: whether the share moves once a ``round``, on the first batch, as in the official code, or each
            ``step``.
        mix: the mixture's parts: ``outputs`` or ``parameters``.
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
        *args: Any,
        alpha: float = 0.5,
        adaptive: bool = True,
        alpha_lr: float | None = None,
        alpha_per: Literal["round", "step"] = "round",
        mix: Literal["outputs", "parameters"] = "outputs",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= alpha <= 1:
            raise MisconfigurationException(f"model.alpha={alpha} must be from 0 to 1, such as 0.5.")
        if alpha_lr is not None and not alpha_lr >= 0:
            raise MisconfigurationException(f"model.alpha_lr={alpha_lr} must be 0 or more, or null for the local rate.")
        check_choices("model", alpha_per=(alpha_per, ("round", "step")), mix=(mix, ("outputs", "parameters")))
        self.adaptive, self.alpha_lr, self.alpha_per, self.mix = adaptive, alpha_lr, alpha_per, mix
        self.make_personal(self.net)  # v
        self.register_buffer("alpha", torch.tensor(float(alpha)))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of w's loss and the mixture's, with gradients in w and v, and move the share."""
        x, target = batch
        features = self.net.features(x)
        z = self.net.classifier(features)
        loss = self.loss(features, z, target)
        if self.mix == "outputs":
            own = self.personal.features(x)
            # z_w is detached, so that the mixture's loss trains v alone
            parts = {"features": own, "v": self.personal.classifier(own), "w": z.detach()}
        else:
            parts = {"v": trainable(self.personal), "buffers": dict(self.personal.named_buffers())}

        def mixed(alpha: Tensor, parts: dict[str, Any]) -> Tensor:
            if self.mix == "outputs":
                return self.loss(parts["features"], alpha * parts["v"] + (1 - alpha) * parts["w"], target)
            return loss_at(self, self.personal, self.mixture(alpha, parts["v"]) | parts["buffers"], batch)

        # a copy for the graph, since the buffer is overwritten below
        alpha = self.alpha.clone()
        personal = mixed(alpha, parts)
        if self.adaptive and (self.alpha_per == "step" or batch_idx == 0):
            # the phase's current rate, which a schedule may have changed
            rate = self.learning_rate if self.alpha_lr is None else self.alpha_lr
            # the derivative in alpha alone; the copies keep this pass from moving running statistics again
            slope = grad(mixed)(alpha, tree_map(lambda t: t.detach().clone(), parts))
            self.alpha.copy_((alpha - rate * slope).clamp(0, 1))
        return {"loss": loss + personal, "alpha": alpha}

    def mixture(self, alpha: Tensor, v: StateDict) -> StateDict:
        r"""Return the mixed parameters, by name; w receives no gradient.

        Args:
            alpha: the share :math:`\alpha`.
            v: trained parameters of the personal model, by name.
        """
        # w and v have the same names, as v is a copy of the net
        w = dict(self.net.named_parameters())
        return {name: alpha * own + (1 - alpha) * w[name].detach() for name, own in v.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the mixture, or of the received model before the first training."""
        outputs: Tensor = self.mixed(x) if self.has_personal else self.net(x)
        return outputs

    def mixed(self, x: Tensor) -> Tensor:
        """Return the outputs of the mixture.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        outputs: Tensor
        if self.mix == "outputs":
            outputs = self.alpha * self.personal(x) + (1 - self.alpha) * self.net(x)
        else:
            # by name and not by `requires_grad`, which an export takes from all parameters
            entries = self.personal.named_parameters()
            v: StateDict = {name: own for name, own in entries if f"personal.{name}" not in self.common_names}
            outputs = functional_call(self.personal, self.mixture(self.alpha, v), (x,))
        return outputs

    def predicting_module(self) -> nn.Module:
        """Return the mixture, or the received model before the first training."""
        return Forward(self, self.mixed) if self.has_personal else self.net
