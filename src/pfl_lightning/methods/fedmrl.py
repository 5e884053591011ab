r"""FedMRL: a shared small net and a personal net predict by one representation, the small one by its first numbers.

Source: Yi et al., 2024 (https://arxiv.org/abs/2406.00488). Symbols: :math:`G, g` are the shared net's features and
classifier, :math:`F_k, f_k` client k's, :math:`P_k` its projection, m the width of shared features.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.module import frozen_names
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net, NetFactory, feature_size
from pfl_lightning.nets.any_module import as_net
from pfl_lightning.nets.base import checked_list, checked_net
from pfl_lightning.settings import Unpack, check_least

SHARED = "net.small."
"""Prefix of the names of the shared net's entries."""


class Nested(Net):
    """A net whose classifier reads a projection of its own features and of those of a smaller net.

    Args:
        features: :math:`F_k`, which maps inputs ``[n, *input_shape]`` to features ``[n, ..., d]``.
        classifier: :math:`f_k`, which maps representations ``[n, ..., d]`` to outputs.
        small: the shared net, with features ``[n, ..., m]``.
        size: d.
        small_size: m, at most d.
    """

    def __init__(self, features: nn.Module, classifier: nn.Module, small: Net, size: int, small_size: int) -> None:
        super().__init__(features, classifier)
        self.small = small
        self.projection = nn.Linear(small_size + size, size)
        self.small_size = small_size

    def represent(self, x: Tensor) -> Tensor:
        """Return representations ``[n, ..., d]``.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        z: Tensor = self.projection(torch.cat([self.small.features(x), self.features(x)], -1))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by the whole representation."""
        outputs: Tensor = self.classifier(self.represent(x))
        return outputs


class FedMRL(FedAvg):
    r"""Averages a small net, and keeps a personal net of any architecture with a projection of the features of both.

    .. math:: z = P_k [G(x), F_k(x)], \qquad L = \ell\big(f_k(z), y\big) + \omega\, \ell\big(g(z_{1 \ldots m}), y\big)

    All parts learn from both terms. G and g travel; a client predicts by :math:`f_k(z)`. Clients may have different
    nets, and each has the first of them, or ``small``, as the shared net beside its own.

    The rule is the paper's. In the released code a round's trained small nets are one object, so that their mean is the
    last client's; HtFLlib loses each trained projection, and counts clients alike, as
    ``WeightedAverage(weighting="uniform")`` does. Here clients count by their training samples, and in the released
    code by held-out ones too. It clips the gradients of small net, net and projection at the norm 50, each for itself
    (``trainer.gradient_clip_val`` clips all together), and the momentum of small net and projection passes from one
    client to the next there. Its script for equal nets overwrites g by the first columns of :math:`f_k` at every step,
    which the paper doesn't have, and which isn't here.
    Source: Yi et al., 2024 (https://arxiv.org/abs/2406.00488); LipingYi/FedMRL@8b90f41; TsingZ0/HtFLlib@e959261.

    Args:
        small: builds the shared net, whose features are no wider than any client's; None takes the first of ``net``, as
            the official code does with its smallest net.
        omega: :math:`\omega`, at least 0; with 0 the shared classifier g doesn't learn.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``omega`` is negative, shared features are wider than personal ones, or features
            have no known width.
    """

    logs = FedAvg.logs | {"small_loss"}
    client_level = True
    example_level = True

    net: Nested

    def __init__(
        self,
        *args: Any,
        small: NetFactory | None = None,
        omega: float = 1.0,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_least("model", omega=(omega, 0))
        self.omega = omega
        shape, outputs = self._build.args[-2:]
        builder = self.nets[0] if small is None else checked_list(small)[0]
        shared = checked_net(as_net(builder(shape, outputs), shape, outputs))
        size, small_size = feature_size(self.net), feature_size(shared)
        if small_size > size:
            raise MisconfigurationException(
                f"model.small={type(shared).__name__} has {small_size} features, and "
                f"model.net={type(self.net).__name__} {size}; give a shared net with {size} features or fewer."
            )
        self.net = Nested(self.net.features, self.net.classifier, shared, size, small_size)
        self.common_names = frozen_names(self, "net")
        # the shared net's running statistics are what the setting `buffers` is about
        self._buffer_names |= {f"{SHARED}{name}" for name, _ in shared.named_buffers()}

    def is_shared(self, name: str) -> bool:
        """Share the small net."""
        return super().is_shared(name) and name.startswith(SHARED)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of both losses, and the small net's for the record."""
        x, target = batch
        z = self.net.represent(x)
        small = self.task_loss(self.net.small.classifier(z[..., : self.net.small_size]), target)
        return {"loss": self.loss(z, self.net.classifier(z), target) + self.omega * small, "small_loss": small}
