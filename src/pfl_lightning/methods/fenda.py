"""FENDA-FL: a personal feature extractor beside the shared one, under a personal classifier of both."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.methods.copies import add_copy
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.settings import Unpack, check_choices


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

    requires = frozenset({"vector features"})

    def __init__(
        self, *args: Any, join: Literal["concatenate", "sum"] = "concatenate", **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        check_choices("model", join=(join, ("concatenate", "sum")))
        self.join = join
        add_copy(self, "local", self.net.features)  # theta_k
        fresh = self.new_net().features.state_dict()
        own = {name: tensor for name, tensor in fresh.items() if f"local.{name}" not in self.common_names}
        self.local.load_state_dict(own, strict=False)
        if join == "concatenate":
            self.net.classifier = widened(self.net.classifier)

    def joined(self, personal: Tensor, shared: Tensor) -> Tensor:
        """Return the classifier's input.

        Args:
            personal: features ``[n, d]`` of the personal body.
            shared: features ``[n, d]`` of the shared body.
        """
        return personal + shared if self.join == "sum" else torch.cat([personal, shared], 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by both bodies."""
        logits: Tensor = self.net.classifier(self.joined(self.local(x), self.net.features(x)))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss by both bodies."""
        x, target = batch
        return {"loss": self.joint_loss(self.local(x), self.net.features(x), target)}

    def joint_loss(self, personal: Tensor, shared: Tensor, target: Any) -> Tensor:
        """Return the task's loss of the joined features.

        Args:
            personal: features ``[n, d]`` of the personal body.
            shared: features ``[n, d]`` of the shared body.
            target: the task's targets.
        """
        features = self.joined(personal, shared)
        return self.loss(features, self.net.classifier(features), target)

    def joining_phases(self) -> list[Phase]:
        """Train the personal parts alone: the shared feature extractor is finished."""
        return [Phase("personal", trains=lambda name: not name.startswith("net.features."))]


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
