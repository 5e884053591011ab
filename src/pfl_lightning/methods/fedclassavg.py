"""FedClassAvg: networks of any kind, one shared classifier, and features that clients learn to tell apart alike.

Source: Jang et al., 2022 (https://arxiv.org/abs/2210.14226). Symbols: F_k client k's feature extractor, phi_k its
classifier, phi_g the received one, x' and x'' two random views of a sample x.
"""

from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch, in_classifier
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.losses import supervised_contrastive
from pfl_lightning.methods.random_views import random_views


class FedClassAvg(FedAvg):
    r"""Shares the classifier alone, so that clients may have different networks below it.

    Minimises equation 4 of the paper,

    .. math::

        \mathrm{SupCon}\big([F_k(x'), F_k(x'')], y\big) + \mathrm{CE}\big(\varphi_k(F_k(x')), y\big)
        + \rho\,\lVert \varphi_k - \varphi_g \rVert_2

    where SupCon is `supervised_contrastive` on the features as they enter the net's classifier, and the norm is of all
    its weights and biases, not squared. Classifiers are averaged by samples, `WeightedAverage`; the nets are best those
    that end in features of one width, such as `ResNet18Features`. Each of the terms can be left out: the paper's
    ablation is ``contrastive=False, rho=0`` ("CA"), ``contrastive=False`` ("+PR") and ``rho=0`` ("+CL"). Without the
    contrastive term clients learn x itself, or with ``views`` one random view of it: the control that the paper lacks,
    which tells what the term gains from what the views do; ``share=nothing`` is `Local` on them. Views are made for
    photographs: on small pictures such as digits they take many rounds more, most of all with ``share=all``, where one
    model has to fit everybody's.

    The paper names no temperature. The defaults are those of supervised contrastive learning (Khosla et al., 2020,
    https://arxiv.org/abs/2004.11362), with which the contrastive term is of the size of cross-entropy and learns under
    any optimizer. The official code's are ``tau=100, base_tau=0.07, normalize=False``: with them the term is some 6,900
    at the start, in proportion to ``tau / base_tau``, plain SGD ends at chance, and Adam, which the official code has,
    follows it alone for some hundred epochs (``configs/paper/fedclassavg_official.yaml``).

    Both views go through the net together, as in the official code: BatchNorm normalises by both. "+weight", whose code
    isn't released, is this objective with ``share=all``. Source: Jang et al., 2022 (https://arxiv.org/abs/2210.14226).

    Args:
        rho: weight of the proximal term, at least 0; 0 leaves it out. The paper takes 0.1, on Fashion-MNIST 0.4662.
        prox: the proximal term: ``l2`` as above; ``l2sq``, its square; ``mse_half`` as in the official code, half the
            sum over tensors of the mean of squares, whose gradient is some thousand times smaller.
        contrastive: whether there is a contrastive term; it needs images.
        tau: its temperature, above 0.
        base_tau: what it is scaled to, above 0.
        normalize: whether it is of features of length 1.
        share: what is averaged: the ``classifier``, ``all`` of one network that all clients have ("+weight"), or
            ``nothing``; the proximal term is on the classifier in any case.
        views: whether clients learn a random view of each image where there is no contrastive term.
        input_shape: as for `FedAvg`.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a number is out of its range, or there are no images to take views of.
    """

    logs = FedAvg.logs | {"contrast"}
    client_level = True

    requires = frozenset({"classes", "vector features"})

    def __init__(
        self,
        rho: float = 0.1,
        prox: Literal["l2", "l2sq", "mse_half"] = "l2",
        contrastive: bool = True,
        tau: float = 0.07,
        base_tau: float = 0.07,
        normalize: bool = True,
        share: Literal["classifier", "all", "nothing"] = "classifier",
        views: bool = False,
        input_shape: tuple[int, ...] = (1, 28, 28),
        **kwargs: Any,
    ) -> None:
        super().__init__(input_shape=input_shape, **kwargs)
        if not rho >= 0:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (no proximal term) or more, such as 0.1.")
        if not (tau > 0 and base_tau > 0):
            raise MisconfigurationException(
                f"model.tau={tau} and model.base_tau={base_tau} must be above 0, such as 0.07 both."
            )
        reader = "contrastive" if contrastive else "views"
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
        """The classifier, everything, or nothing."""
        shared = {"classifier": in_classifier(name), "all": True, "nothing": False}[self.share]
        return super().is_shared(name) and shared

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Remembers the received classifier."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net.classifier").items())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Cross-entropy on the first views, the contrastive term on both, and the proximal term."""
        x, target = batch
        if not self.contrastive:
            return super().training_step((random_views(x) if self.views else x, target), batch_idx)
        features = self.net.features(random_views(torch.cat([x, x])))
        contrast = self.contrast(features, target.repeat(2))
        first = features[: len(target)]
        return {"loss": contrast + self.loss(first, self.net.classifier(first), target), "contrast": contrast}

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy and the proximal term."""
        loss = super().loss(features, logits, target)
        return loss if self.rho == 0 else loss + self.rho * self.proximity()

    def proximity(self) -> Tensor:
        """R, how far the classifier is from the received one."""
        own = trained_parameters(self, "net.classifier").values()
        pairs = list(zip(own, self.received.buffers(), strict=True))
        if self.prox == "mse_half":
            return 0.5 * torch.stack([F.mse_loss(own, anchor) for own, anchor in pairs]).sum()
        difference = torch.cat([(own - anchor).flatten() for own, anchor in pairs])
        # torch gives the norm the gradient 0 at 0
        distance: Tensor = torch.linalg.vector_norm(difference)
        return distance if self.prox == "l2" else difference.square().sum()
