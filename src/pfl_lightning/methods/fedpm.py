r"""FedPM: the net's weights are random and stay so, and clients learn which of them to keep.

Source: Isik et al., 2023 (https://arxiv.org/abs/2209.15328). Symbols: w are the fixed weights, s the scores,
:math:`\theta = \sigma(s)` the probability that a weight is kept, and b a mask drawn with it.
"""

import math
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedcac import packed, unpacked
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import Unpack, check_choices


class FedPM(FedAvg):
    r"""Trains scores of fixed random weights, and sends one mask drawn by them, a bit for each weight.

    Each training step draws a mask :math:`b \sim \mathrm{Bernoulli}(\theta)` and computes the loss of
    :math:`b \odot w`; the gradient in :math:`\theta` is that in b times :math:`\theta`, as in the official code. After
    training the client draws the mask that it sends, by the run's seed, the round and its id: a mask hides its
    probabilities from nobody who knows the seed, as the server does. The server side is `BetaMean`. Parameters that the
    net has frozen have no score, and buffers, such as running statistics, stay with the client.

    Scores need a larger learning rate than weights: the official code trains them by Adam with 0.1. Where classes are
    skewed and clients few, it stays far below `FedAvg` (docs/results.md, "Newer methods"): the mean of ten masks has
    eleven values and nothing of the rounds before, and a single mask adds its own chance to each prediction.
    Source: Isik et al., 2023 (https://arxiv.org/abs/2209.15328); BerivanIsik/sparse-random-networks@cf6b549.

    Args:
        init: the fixed weights: ``signed`` gives linear layers and convolutions the values
            :math:`\pm e / \sqrt{\text{inputs of a unit}}` with random signs, biases too, as the official code does; all
            other layers, or all with ``net``, have the net's own initial weights.
        predict: predictions by one mask (``sample``), which is drawn with the same random numbers in every evaluation
            of every run, or by the expected weights :math:`\theta \odot w` (``mean``).
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is none of its choices.
    """

    sends = frozenset({"masks"})
    offers = frozenset()

    def __init__(
        self,
        *args: Any,
        init: Literal["signed", "net"] = "signed",
        predict: Literal["sample", "mean"] = "sample",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_choices("model", init=(init, ("signed", "net")), predict=(predict, ("sample", "mean")))
        self.predict = predict
        w = trained_parameters(self, "net")
        if init == "signed":
            draw_signs(self.net)
        # frozen parameters are common: they exist once for all clients, and never travel
        self.net.requires_grad_(False)
        self.common_names |= {f"net.{name}" for name, _ in self.net.named_parameters(remove_duplicate=False)}
        self.names = list(w)
        self.scores = nn.ParameterDict({key(name): nn.Parameter(torch.randn_like(t)) for name, t in w.items()})
        # the same numbers in every evaluation, so that predictions can be repeated
        generator = torch.Generator().manual_seed(0)
        self.draws = Frozen((name, torch.rand(t.shape, generator=generator)) for name, t in w.items())

    def is_shared(self, name: str) -> bool:
        """Share the scores, which the server computes from masks."""
        return name.startswith("scores.")

    def is_personal(self, name: str) -> bool:
        """Keep the net's buffers."""
        return name in self._buffer_names

    def probabilities(self) -> StateDict:
        r"""Return :math:`\theta`, by name in the net."""
        return {name: self.scores[key(name)].sigmoid() for name in self.names}

    def masked(self, masks: StateDict) -> StateDict:
        """Return the net's weights times masks, by name in the net.

        Args:
            masks: masks by name.
        """
        return {name: masks[name] * self.net.get_parameter(name) for name in self.names}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss of weights with a drawn mask."""
        masks = {}
        for name, theta in self.probabilities().items():
            kept = (torch.rand(theta.shape, dtype=theta.dtype, device=theta.device) < theta).to(theta.dtype)
            # of value 0 and slope theta
            slope = theta.square() / 2
            masks[name] = kept + (slope - slope.detach())
        return {"loss": loss_at(self, self.net, self.masked(masks), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by one mask, or by expected weights."""
        masks = self.probabilities()
        if self.predict == "sample":
            draws = self.draws.tensors()
            masks = {name: (draws[name] < theta).to(theta.dtype) for name, theta in masks.items()}
        logits: Tensor = functional_call(self.net, self.masked(masks), (x,))
        return logits

    def upload(self, data: ClientData) -> Message:
        """Return a mask drawn by the trained scores, eight bits in a byte."""
        # from the turn's seed and not from its stream, whose place after training depends on the engine
        generator = torch.Generator().manual_seed(derive_seed(torch.initial_seed(), "fedpm"))
        theta = self.probabilities()
        draws = {name: torch.rand(t.shape, generator=generator).to(t.device) for name, t in theta.items()}
        return {"masks": {key(name): packed(draws[name] < t) for name, t in theta.items()}}

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of masks."""
        return BetaMean()


class BetaMean(Aggregator):
    r"""Sends scores of the mean mask: the mode of a Beta distribution over each weight's probability.

    .. math:: \alpha \leftarrow \alpha + \sum_k b_k, \qquad \beta \leftarrow \beta + \sum_k (1 - b_k), \qquad
        \theta = \frac{\alpha - 1}{\alpha + \beta - 2}, \qquad s = \ln\frac{\theta}{1 - \theta}

    from :math:`\alpha = \beta = 1`, with equal clients: the mean of the masks since then. Bits count as
    :math:`\epsilon` and :math:`1 - \epsilon`, as in the official code; otherwise a weight that all keep or drop would
    have an infinite score, and never change again.
    Source: Isik et al., 2023 (https://arxiv.org/abs/2209.15328); BerivanIsik/sparse-random-networks@cf6b549.

    Args:
        epsilon: :math:`\epsilon`, above 0 and below 0.5.
        reset: number of rounds after which :math:`\alpha` and :math:`\beta` begin anew, at least 1; the official code
            takes 1.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    needs = frozenset({"masks"})
    sends = frozenset({"weights"})

    def __init__(self, epsilon: float = 0.01, reset: int = 1) -> None:
        super().__init__()
        if not 0 < epsilon < 0.5:
            raise MisconfigurationException(
                f"aggregator.epsilon={epsilon} must be above 0 and below 0.5, such as 0.01."
            )
        if reset < 1:
            raise MisconfigurationException(f"aggregator.reset={reset} must be 1 or more rounds.")
        self.epsilon, self.reset = epsilon, reset

    def setup(self, server: Server) -> None:
        """Start from the common initial scores, without masks."""
        self.server = server
        self.state |= {"weights": server.weights, "kept": {}, "masks": 0}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Count the masks, and compute the scores; log the mean probability."""
        if not updates:
            return {}
        if round % self.reset == 0:
            self.state |= {"kept": {}, "masks": 0}
        self.state["masks"] += len(updates)
        scores, total = {}, 0.0
        for name, old in self.state["weights"].items():
            bits = [unpacked(u["masks"][name.removeprefix("scores.")], old.numel()) for u in updates.values()]
            # bits are clipped after the sum, which comes to the same
            ones = torch.stack(bits).sum(0, dtype=torch.float64).reshape(old.shape)
            kept = self.state["kept"].get(name, 0) + ones
            self.state["kept"][name] = kept
            share = kept / self.state["masks"]
            theta = self.epsilon + (1 - 2 * self.epsilon) * share
            # not in the type of `old`: with precision=64-true the initial scores are float32
            scores[name] = theta.logit().to(self.server.dtype)
            total += float(share.sum())
        self.state["weights"] = scores
        return {"kept": total / sum(t.numel() for t in scores.values())}

    def download(self, client: int) -> Message:
        """Return the scores."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """Return the scores."""
        scores: StateDict = self.state["weights"]
        return scores


def key(name: str) -> str:
    """Return a parameter's name without dots, which names of scores can't have.

    Args:
        name: the name in the net.
    """
    return name.replace(".", "/")


@torch.no_grad()
def draw_signs(net: nn.Module) -> None:
    r"""Give linear layers and convolutions weights and biases of one size, :math:`e / \sqrt{n}`, with random signs.

    Args:
        net: the net; the n inputs of a unit are those of the layer's weight.
    """
    for layer in net.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or isinstance(layer, nn.Embedding):
            continue
        size = math.e / math.sqrt(weight[0].numel())
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.copy_(torch.where(torch.rand_like(parameter) < 0.5, -size, size))
