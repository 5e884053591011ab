r"""FedLoGe: features trained under a fixed sparse classifier, and two heads on these with realigned class vectors.

Source: Xiao et al., 2024 (https://arxiv.org/abs/2401.08977). Symbols: z are a sample's features of width d, C the
number of classes, :math:`\psi` the fixed classifier ``[d, C]``, :math:`\phi` the global head and :math:`\phi_k` client
k's own, with the class vectors :math:`\phi_c` and :math:`\phi_{kc}`.
"""

import math
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings, Forward
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedetf import check_simplex, simplex
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import feature_size, find_output_layer
from pfl_lightning.settings import Unpack

PASSES = 100
"""Projections in the making of a sparse simplex; with 60% of zeros, later ones turn vectors by less than a degree."""


def sparse_simplex(size: int, num_classes: int, sparsity: float) -> Tensor:
    """Return unit class vectors ``[d, C]`` with zeros at random places, and angles near a simplex's.

    Matrices with the angles of a simplex and matrices with the zeros are two sets; each pass goes to the nearest matrix
    of the first set, and then of the second one. It is the same in each call, and so at all clients and sites, without
    being sent.

    >>> frame = sparse_simplex(20, 3, 0.6)
    >>> (frame == 0).sum(0), torch.allclose(frame.T @ frame, 1.5 * torch.eye(3) - 0.5, atol=1e-5)
    (tensor([12, 12, 12]), True)

    Args:
        size: width d, at least C.
        num_classes: C, at least 2.
        sparsity: the share of zeros in each vector, rounded down to whole entries, in [0, 1); 0 is `fedetf.simplex`.
    """
    frame, zeros = simplex(size, num_classes), int(sparsity * size)
    if not zeros:
        return frame
    # a permutation in each column, and so as many zeros in each vector, of which none is 0 as a whole
    order = torch.rand(size, num_classes, generator=torch.Generator().manual_seed(0)).argsort(0)
    keep = (order >= zeros).double()
    # the root of a simplex's matrix of products
    root = math.sqrt(num_classes / (num_classes - 1)) * (torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes)
    wide = F.normalize(keep * frame, dim=0)
    for _ in range(PASSES):
        u, _, v = torch.linalg.svd(wide @ root, full_matrices=False)
        wide = F.normalize(keep * (u @ v @ root), dim=0)
    return wide.float()


class FedLoGe(PersonalNet, FedAvg):
    r"""Trains features under the fixed classifier, and a global and a personal head on the features as they are.

    .. math::

        L = \mathrm{CE}(\psi^T z,\, y) + \mathrm{CE}(\phi(\overline z),\, y) + \mathrm{CE}(\phi_k(\overline z),\, y)

    A bar stops the gradient: features learn from the first term alone, and heads from theirs. The class vectors of
    :math:`\psi` have one length and nearly equal angles whatever the classes' frequencies, and most entries are 0.
    Features and :math:`\phi`, the net's classifier, are averaged; :math:`\phi_k` stays, and begins as a copy of the
    initial classifier.

    Class vectors of rare classes are short in trained heads. Predictions take these lengths from the global head, or
    multiply them by the client's; b are the biases of :math:`\phi`:

    .. math::

        \text{all: } s\,\frac{\phi_c^T z}{\lVert \phi_c \rVert} + b_c, \qquad
        \text{client k: } \lVert \phi_{kc} \rVert\, \phi_c^T z + b_c + \phi_{kc}(z)

    The first is that of the global model (``test/global_acc``), and of clients that haven't taken part yet.

    The official evaluation of clients rules out the classes that have no samples in the client's test data, by test
    labels, which no client has in use; here all classes are predicted. It realigns after the last round alone, and
    evaluates the global model by :math:`\psi` before. Its :math:`\psi` has a random bias that nothing trains, and here
    none. It draws zeros among all entries, and mends angles by 10,000 steps of Adam; projections, as here, come nearer
    to a simplex in a hundredth of the time. Personal heads begin there at random.
    Source: Xiao et al., 2024 (https://arxiv.org/abs/2401.08977); ZackZikaiXiao/FedLoGe@f4cac52.

    Args:
        sparsity: the share of zeros in :math:`\psi`, in [0, 1); 0 is the simplex of `FedETF`.
        norm: length of the vectors of :math:`\psi`, above 0.
        scale: s, above 0.
        realign: whether predictions change the lengths; if not, they are :math:`\phi(z)` and
            :math:`\phi(z) + \phi_k(z)`.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, the net's classifier isn't one linear layer, or
            features are fewer than classes.
    """

    client_level = True

    requires = frozenset({"classes", "vector features"})

    frame: Tensor

    def __init__(
        self,
        *args: Any,
        sparsity: float = 0.6,
        norm: float = 0.1,
        scale: float = 1.7,
        realign: bool = True,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= sparsity < 1:
            raise MisconfigurationException(f"model.sparsity={sparsity} must be 0 or more and below 1, such as 0.6.")
        for name, value in (("norm", norm), ("scale", scale)):
            if not 0 < value < math.inf:
                raise MisconfigurationException(f"model.{name}={value} must be above 0, such as 1.")
        self.scale, self.realign = scale, realign
        # a single layer may stand in a Sequential
        layers = [layer for layer in self.net.classifier.modules() if not list(layer.children())]
        if len(layers) > 1 or not isinstance(layers[0], nn.Linear):
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__} has a classifier of several layers, and FedLoGe realigns one "
                "linear layer; take a net with that, such as CNN."
            )
        size, self.layer = feature_size(self.net), find_output_layer(self, self.num_classes)
        check_simplex(size, self.num_classes, f"model.net={type(self.net).__name__}")
        self.make_personal(self.net.classifier)  # phi_k
        # the same in every client and never in a payload, so that nothing has to keep it
        self.register_buffer("frame", norm * sparse_simplex(size, self.num_classes, sparsity), persistent=False)

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the losses of the fixed classifier and of both heads."""
        z = features.detach()
        heads = super().loss(z, self.net.classifier(z), target) + self.task_loss(self.personal(z), target)
        return self.task_loss(features @ self.frame, target) + heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both heads together, or of the global head before the first training."""
        return self.by_both(x) if self.has_personal else self.by_common(x)

    def by_common(self, x: Tensor) -> Tensor:
        """Return the outputs of the global head, with class vectors of one length.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        z, head = self.net.features(x), cast(nn.Linear, self.get_submodule(self.layer))
        # a class vector of length 0 stays 0, and its class has the bias alone
        weight = self.scale * F.normalize(head.weight) if self.realign else head.weight
        return F.linear(z, weight, head.bias)

    def by_both(self, x: Tensor) -> Tensor:
        """Return the outputs of both heads together, with the lengths of the client's class vectors in the global one.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        z, head = self.net.features(x), cast(nn.Linear, self.get_submodule(self.layer))
        own = cast(nn.Linear, self.get_submodule(self.layer.replace("net.classifier", "personal")))
        weight = head.weight * own.weight.norm(dim=1, keepdim=True) if self.realign else head.weight
        logits: Tensor = F.linear(z, weight, head.bias) + self.personal(z)
        return logits

    def predicting_module(self) -> nn.Module:
        """Return both heads on the features, or the global head."""
        return Forward(self, self.by_both if self.has_personal else self.by_common)
