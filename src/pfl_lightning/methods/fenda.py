"""FENDA-FL: a personal feature extractor beside the shared one, under a personal classifier of both."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.methods.copies import separate
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.nets import Net, feature_size
from pfl_lightning.settings import Unpack, check_choices

SHARED = "net.features."
"""Prefix of the names of the shared body's entries."""


class TwoBodies(Net):
    """A net with a second feature extractor, ``classifier(join(local(x), features(x)))``.

    Args:
        features: the shared body, which maps inputs ``[n, *input_shape]`` to features ``[n, d]``.
        classifier: maps joined features to outputs.
        local: the personal body, like the shared one.
        join: ``concatenate`` or ``sum``.
    """

    def __init__(self, features: nn.Module, classifier: nn.Module, local: nn.Module, join: str) -> None:
        super().__init__(features, classifier)
        self.local = local
        self.join = join

    def joined(self, personal: Tensor, shared: Tensor) -> Tensor:
        """Return the classifier's input.

        Args:
            personal: features ``[n, ..., d]`` of the personal body.
            shared: features ``[n, ..., d]`` of the shared body.
        """
        return personal + shared if self.join == "sum" else torch.cat([personal, shared], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by both bodies."""
        logits: Tensor = self.classifier(self.joined(self.local(x), self.features(x)))
        return logits


class FENDA(FedPer):
    r"""Averages one feature extractor, and keeps another one and the classifier.

    .. math:: \mathrm{logits} = \varphi_k([\theta_k(x), \theta(x)])

    Trains all three by the task's loss alone. The personal :math:`\theta_k` has the architecture of the shared
    :math:`\theta`, the net's features, and random initial weights of its own, since two equal bodies would learn the
    same; a net that is given as a built module has equal ones. With ``join="concatenate"`` the classifier's first
    linear layer is replaced by one of twice as many inputs. The released code also has constrained forms: `PerFCL`,
    and two with a cosine or a contrast between the bodies, which are left out.
    Source: Tavakoli et al., 2023 (https://arxiv.org/abs/2309.16825); VectorInstitute/FL4Health@ce141b9, by its authors.

    Args:
        join: the classifier's input: both features one after the other (``concatenate``), or their ``sum``; with a sum
            and a :math:`\theta_k` of zeros it is `FedPer`.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``join`` is none of its choices, or the classifier has no linear layer.
    """

    client_level = True
    example_level = True

    def __init__(
        self, *args: Any, join: Literal["concatenate", "sum"] = "concatenate", **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        check_choices("model", join=(join, ("concatenate", "sum")))
        # theta_k
        local, common = separate(self, self.net.features)
        # other initial weights: two equal bodies would get equal gradients
        fresh = self.new_net().features.state_dict()
        local.load_state_dict({name: t for name, t in fresh.items() if name not in common}, strict=False)
        classifier = self.net.classifier
        if join == "concatenate":
            # refuses a net without a linear layer to widen
            feature_size(self.net)
            classifier = widened(classifier)
        self.net: TwoBodies = TwoBodies(self.net.features, classifier, local, join)
        self.common_names |= {f"net.local.{name}" for name in common}

    def is_shared(self, name: str) -> bool:
        """Share the shared body."""
        return super().is_shared(name) and name.startswith(SHARED)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss by both bodies."""
        x, target = batch
        return {"loss": self.joint_loss(self.net.local(x), self.net.features(x), target)}

    def joint_loss(self, personal: Tensor, shared: Tensor, target: Any) -> Tensor:
        """Return the task's loss of the joined features.

        Args:
            personal: features ``[n, ..., d]`` of the personal body.
            shared: features ``[n, ..., d]`` of the shared body.
            target: the task's targets.
        """
        features = self.net.joined(personal, shared)
        return self.loss(features, self.net.classifier(features), target)

    def joining_phases(self) -> list[Phase]:
        """Train the personal parts alone: the shared feature extractor is finished."""
        return [Phase("personal", trains=lambda name: not name.startswith(SHARED))]


def widened(classifier: nn.Module) -> nn.Module:
    """Return a classifier whose first linear layer takes twice as many inputs; all other layers are the same objects.

    >>> widened(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))[0]
    Linear(in_features=8, out_features=8, bias=True)

    Args:
        classifier: the classifier, with at least one linear layer; changed in place.
    """
    name, old = next((n, layer) for n, layer in classifier.named_modules() if isinstance(layer, nn.Linear))
    wide = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
    if not name:
        return wide
    parent, _, last = name.rpartition(".")
    setattr(classifier.get_submodule(parent), last, wide)
    return classifier
