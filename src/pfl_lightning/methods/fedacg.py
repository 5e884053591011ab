r"""FedACG: clients start from the server's model moved ahead along its momentum.

Source: Kim, Kim and Han, 2024 (https://arxiv.org/abs/2201.03172). Symbols: :math:`\theta` is the server's model, m its
momentum, :math:`w_k` client k's model after training, and :math:`p_k` the client's weight.
"""

import torch

from pfl_lightning.messages import StateDict
from pfl_lightning.methods.fedopt import check_decays
from pfl_lightning.server import Mean, Server, WeightedAverage, Weighting


class FedACG(WeightedAverage):
    r"""Sends the model moved ahead by the momentum, and takes the mean of what clients make of it.

    .. math::

        x = \theta + \lambda m, \qquad m \leftarrow \lambda m + \sum_k p_k (w_k - x), \qquad
        \theta \leftarrow \theta + m

    so that the new :math:`\theta` is the mean of the uploads, and m is how far it is from the mean before. Clients
    receive x, train by it, and are evaluated by it; the global model (``test/global_acc``) is :math:`\theta`. Running
    statistics are averaged, and not moved ahead. The client side is `FedProx`: its term
    :math:`\frac{\mu}{2} \lVert w - x \rVert^2` is the paper's with :math:`\beta = \mu`. Behind the noise of `DPAverage`
    it works as by itself, as changes are bounded from the x that clients received.

    The official code counts clients equally, and leaves out the half in front of the term, so that its weight of 0.001
    is a :math:`\mu` of 0.002. It moves all entries ahead, running statistics too.
    Source: Kim, Kim and Han, 2024, Algorithm 1 (https://arxiv.org/abs/2201.03172); geehokim/FedACG@62b6e95.

    Args:
        momentum: :math:`\lambda`, in [0, 1); 0 is `WeightedAverage` bit for bit.
        weighting: client weights: all alike (``uniform``), or by training ``samples``.
        mean: a rule instead of the mean of uploads, as for `WeightedAverage`.

    Raises:
        MisconfigurationException: if ``momentum`` is out of its range.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def __init__(self, momentum: float = 0.85, weighting: Weighting = "uniform", mean: Mean | None = None) -> None:
        super().__init__(weighting=weighting, mean=mean)
        check_decays(momentum=momentum)
        self.momentum = momentum

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without momentum."""
        super().setup(server)
        self.learnable = server.parameter_names(remove_duplicate=False)
        self.state["mean"] = server.weights

    def move(self, target: StateDict) -> None:
        r"""Take a mean as :math:`\theta`, and move the model for the clients ahead of it.

        Args:
            target: the mean of the uploads, or a rule's result, with buffers.
        """
        theta, sent = self.state["mean"], dict(target)
        if self.momentum:
            for name in filter(target.__contains__, self.learnable):
                # uploads may be in half precision, which has too few digits for differences
                mean = target[name].to(torch.promote_types(target[name].dtype, torch.float32))
                # lambda m + sum p_k (w_k - x) = mean - theta, as x = theta + lambda m
                m = mean - theta[name].to(mean)
                sent[name] = (mean + self.momentum * m).to(target[name].dtype)
        self.state |= {"mean": theta | target, "weights": self.state["weights"] | sent}

    def global_model(self) -> StateDict:
        r"""Return :math:`\theta`."""
        theta: StateDict = self.state["mean"]
        return theta
