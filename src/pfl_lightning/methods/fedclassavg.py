"""FedClassAvg: a shared classifier over any networks, and a contrastive term for comparable features.

Source: Jang et al., 2022 (https://arxiv.org/abs/2210.14226). Symbols: F_k client k's feature extractor, phi_k its
classifier, phi_g the received one, x' and x'' two random views of a sample x.
"""

from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings, in_classifier
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.losses import supervised_contrastive
from pfl_lightning.methods.random_views import random_views
from pfl_lightning.settings import Unpack


class FedClassAvg(FedAvg):
    r"""Shares the classifier alone, over feature extractors that may differ from client to client.

    Minimises equation 4 of the paper,

    .. math::

        \mathrm{SupCon}\big([F_k(x'), F_k(x'')], y\big) + \mathrm{CE}\big(\varphi_k(F_k(x')), y\big)
        + \rho\,\lVert \varphi_k - \varphi_g \rVert_2

    where SupCon is `supervised_contrastive` on the classifier's input, and the norm is over all weights and biases of
    the classifier, not squared. Classifiers are averaged by samples, `WeightedAverage`; the best nets are those with
    features of one width, such as `ResNet18Features`. Each term can be left out: the paper's ablation is
    ``contrastive=False, rho=0`` ("CA"), ``contrastive=False`` ("+PR") and ``rho=0`` ("+CL"). Without the contrastive
    term clients train on x itself, or with ``views`` on one random view of it. This control is missing in the paper; it
    separates the effect of the term from that of the views; ``share=nothing`` is `Local` on them. Views are made for
    photographs: on small pictures such as digits they take many more rounds, most of all with ``share=all``, where one
    model has to fit all clients.

    The paper names no temperature. The defaults are those of supervised contrastive learning (Khosla et al., 2020,
    https://arxiv.org/abs/2004.11362), with which the contrastive term is of the size of cross-entropy and any optimizer
    works. The official code has ``tau=100, base_tau=0.07, normalize=False``: the term is then some 6,900 at the start,
    in proportion to ``tau / base_tau``; plain SGD ends at chance, and Adam, which the official code has, follows this
    term alone for some hundred epochs (``configs/paper/fedclassavg_official.yaml``).

    Both views go through the net together, as in the official code: BatchNorm normalises over both. "+weight", whose
    code isn't released, is this objective with ``share=all``.
    Source: Jang et al., 2022 (https://arxiv.org/abs/2210.14226).

    Args:
        rho: weight of the proximal term, at least 0; 0 leaves it out. The paper takes 0.1, on Fashion-MNIST 0.4662.
        prox: the proximal term: ``l2`` as above; ``l2sq``, its square; ``mse_half`` as in the official code, half the
            sum over tensors of the mean square, whose gradient is some thousand times smaller.
        contrastive: whether to use the contrastive term, which needs images.
        tau: temperature of the contrastive term, above 0.
        base_tau: scale of the contrastive term, above 0.
        normalize: whether the contrastive term is of features of length 1.
        share: the averaged part: the ``classifier``, ``all`` of one network that all clients have ("+weight"), or
            ``nothing``; the proximal term is on the classifier in any case.
        views: whether clients train on a random view of each image where there is no contrastive term.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a number is out of its range, or the inputs aren't images.
    """

    logs = FedAvg.logs | {"contrast"}
    client_level = True

    requires = frozenset({"classes", "vector features"})

    def __init__(
        self,
        *args: Any,
        rho: float = 0.1,
        prox: Literal["l2", "l2sq", "mse_half"] = "l2",
        contrastive: bool = True,
        tau: float = 0.07,
        base_tau: float = 0.07,
        normalize: bool = True,
        share: Literal["classifier", "all", "nothing"] = "classifier",
        views: bool = False,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not rho >= 0:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (no proximal term) or more, such as 0.1.")
        if not (tau > 0 and base_tau > 0):
            raise MisconfigurationException(
                f"model.tau={tau} and model.base_tau={base_tau} must be above 0, such as 0.07 both."
            )
        reader, input_shape = "contrastive" if contrastive else "views", self.input_shape
        if (contrastive or views) and (len(input_shape) != 3 or input_shape[0] not in (1, 3)):
            raise MisconfigurationException(
                f"model.{reader}=true takes random views of images with 1 or 3 channels, not of "
                f"input_shape={tuple(input_shape)}; give {reader}=false."
            )
        self.rho = rho
        self.prox = prox
        self.contrastive = contrastive
        self.contrast = partial(supervised_contrastive, tau=tau, base_tau=base_tau, normalize=normalize)
        self.share = share
        self.views = views
        self.received = Frozen(trained_parameters(self, "net.classifier").items())  # phi_g

    def is_shared(self, name: str) -> bool:
        """Share the classifier, everything, or nothing."""
        # share=all is "+weight"; share=nothing is Local with this loss
        shared = {"classifier": in_classifier(name), "all": True, "nothing": False}[self.share]
        return super().is_shared(name) and shared

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and copy the received classifier."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net.classifier").items())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy on the first views, plus the contrastive and the proximal term."""
        x, target = batch
        # `loss` adds the proximal term in both cases
        if not self.contrastive:
            return super().training_step((random_views(x) if self.views else x, target), batch_idx)
        # one pass for both views, so that BatchNorm sees them together
        features = self.net.features(random_views(torch.cat([x, x])))
        contrast = self.contrast(features, target.repeat(2))
        # cross-entropy on the first views alone, as in equation 4
        first = features[: len(target)]
        return {"loss": contrast + self.loss(first, self.net.classifier(first), target), "contrast": contrast}

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return cross-entropy plus the proximal term."""
        loss = super().loss(features, logits, target)
        return loss if self.rho == 0 else loss + self.rho * self.proximity()

    def proximity(self) -> Tensor:
        """Return the distance of the classifier from the received one, by the setting ``prox``."""
        own = trained_parameters(self, "net.classifier").values()
        pairs = list(zip(own, self.received.buffers(), strict=True))
        if self.prox == "mse_half":
            return 0.5 * torch.stack([F.mse_loss(own, anchor) for own, anchor in pairs]).sum()
        difference = torch.cat([(own - anchor).flatten() for own, anchor in pairs])
        # PyTorch's norm has the gradient 0 at 0, and not NaN
        distance: Tensor = torch.linalg.vector_norm(difference)
        return distance if self.prox == "l2" else difference.square().sum()
