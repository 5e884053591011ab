"""FedAWA-L: FedAWA with separate weights for each layer.

Source: FedAWA, CVPR 2025 (https://arxiv.org/abs/2503.15842).
"""

from typing import Literal

from torch import Tensor

from pfl_lightning.messages import StateDict, Updates, weighted_mean
from pfl_lightning.methods.fedawa import FedAWA, FedAWASettings
from pfl_lightning.settings import Unpack


class FedAWAL(FedAWA):
    r"""Layer-wise `FedAWA`: each group of parameters g has weights :math:`\lambda_g = \operatorname{softmax}(T_g)`.

    One optimizer steps on the sum of the groups' objectives; each logit is in its own group's objective alone. A buffer
    takes the weights of the parameter before it, which is of its own module if that has any. A group whose parameters
    didn't move, such as a frozen layer, keeps its weights. With one group it is `FedAWA`.

    The released code doesn't have it, so the meaning of a layer is a setting. ``state["group_shares"]`` holds the
    weights by group and client, ``state["shares"]`` their means over groups, weighted by numbers of parameters.
    Source: FedAWA, CVPR 2025 (https://arxiv.org/abs/2503.15842).

    Args:
        group: the unit with weights of its own: each ``module`` that has parameters, weight and bias together; each
            ``tensor``; or each ``block``, a module with a matrix or a kernel among its parameters and the modules
            without one that follow it, such as a convolution and its normalisation.
        **kwargs: the arguments of `FedAWA`.
    """

    example_level = True
    takes_gamma = True

    def __init__(
        self, group: Literal["module", "tensor", "block"] = "module", **kwargs: Unpack[FedAWASettings]
    ) -> None:
        super().__init__(**kwargs)
        self.group = group

    def grouping(self, shared: StateDict) -> dict[str, list[str]]:
        """Return the names of shared entries by group, in order.

        Args:
            shared: the shared entries, by name.
        """
        modules = {name: name.rpartition(".")[0] for name in shared if name in self.parameters}
        if self.group == "tensor":
            keys = {name: name for name in modules}
        else:
            with_kernel = {module for name, module in modules.items() if shared[name].ndim > 1}
            starts = with_kernel if self.group == "block" else set(modules.values())
            keys = {name: module for name, module in modules.items() if module in starts}
        # an entry without a key goes to the group before it; the first entries go to the first group
        key = next(iter((keys or modules).values()))
        groups: dict[str, list[str]] = {}
        for name in shared:
            key = keys.get(name, key)
            groups.setdefault(key, []).append(name)
        return groups

    def mix(self, updates: Updates, weights: Tensor) -> None:
        """Average each group by the group's weights.

        Args:
            updates: updates by client id.
            weights: lambda, ``[G, K]``, in the order of the updates.
        """
        # one number a client for the record: the mean over groups by size
        means = (self.sizes / self.sizes.sum()) @ weights
        group_shares: dict[str, dict[int, float]] = {}
        mixed: StateDict = {}
        for (group, names), row in zip(self.groups.items(), weights.tolist(), strict=True):
            group_shares[group] = dict(zip(updates, row, strict=True))
            mixed |= weighted_mean([update["weights"] for update in updates.values()], row, names)
        self.move(mixed)
        self.state |= {"shares": dict(zip(updates, means.tolist(), strict=True)), "group_shares": group_shares}
