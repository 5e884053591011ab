r"""FedEM: all clients share several models, and each client mixes their predictions by weights of its own.

Source: Marfoq et al., 2021 (https://arxiv.org/abs/2108.10252). Symbols: :math:`\theta_m` is learner m of M,
:math:`\pi_m` its weight at a client, :math:`q_{im}` its responsibility for sample i, :math:`\ell_{im}` its loss there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.client.at_once import anyone, at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, tree_map
from pfl_lightning.methods.copies import add_copy
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule
from pfl_lightning.nets import Net
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import Unpack


class FedEM(FedAvg):
    r"""Trains M learners on all samples, weighted by how likely each learner makes a sample, and predicts by a mixture.

    .. math::

        q_{im} = \frac{\pi_m e^{-\ell_{im}}}{\sum_j \pi_j e^{-\ell_{ij}}}, \qquad
        \pi_m \leftarrow \frac1n \sum_i q_{im}, \qquad
        \min_{\theta_m} \frac1n \sum_i q_{im} \ell_{im}, \qquad
        p(y \mid x) = \sum_m \pi_m\, p(y \mid x; \theta_m)

    In a round a client computes q and :math:`\pi` once, by the received learners in evaluation mode, and then trains
    all learners with these q. :math:`\pi` begins with 1/M each, and never leaves its client. The server averages each
    learner as `FedAvg` averages its model. Probabilities are mixed where the task has them, else outputs; see
    `Task.combined`. A squared error counts as :math:`\ell` of a normal distribution with variance 1/2, so that the
    scale of targets decides how hard samples are divided.

    Before its first training a client is evaluated by :math:`\pi` after one step from 1/M, and later by the
    :math:`\pi` of its last training. A new client trains no learner: each of the ``rounds`` of
    `FederatedTrainer.join` is one more step of q and :math:`\pi`. Payloads and uploads are M models, and a training
    client holds 2M: batches come without their numbers of rows, so the received learners compute q again in each step.

    As in the official code, learner m starts with a seed of its own, :math:`\ell` of a text is the mean over its
    positions, and class weights multiply :math:`\ell`. There each learner draws batches of its own, and clients outside
    of a round count in the mean with the model that they received; here all learners see the same batches, and
    ``trainer.gradient_clip_val`` bounds the gradient of all together.
    Source: Marfoq et al., 2021, Algorithm 1 (https://arxiv.org/abs/2108.10252).

    Args:
        num_learners: M, at least 1; 1 is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``num_learners`` is less than 1, or with more than 1 learner if the task or the
            net has no loss of a single sample, or all learners would begin with the same weights.
    """

    client_level = True

    pi: Tensor
    posterior: Tensor
    fitted: Tensor

    def __init__(self, *args: Any, num_learners: int = 3, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if num_learners < 1:
            raise MisconfigurationException(
                f"model.num_learners={num_learners} must be 1 (which is FedAvg) or more, such as 3."
            )
        self.num_learners = num_learners
        # a single learner needs no weights, and its client's state is as small as FedAvg's
        if num_learners == 1:
            return
        if self.task.samples_meet or isinstance(self.net, LightningNet):
            whose = f"task {self.task}" if self.task.samples_meet else f"model.net={self.net.features.name}"
            raise MisconfigurationException(
                f"model.num_learners={num_learners} needs a loss of each single sample, and {whose} has one of whole "
                "batches alone; take model.num_learners=1, or a method of loss and weights, such as FedAvg or FedPer."
            )
        for m in range(1, num_learners):
            add_copy(self, f"learner_{m}", self.net)
            self._redraw(m)
        common = common_parameters(self).values()
        for m, net in enumerate(self.learners()):
            self.add_module(f"received_{m}", FrozenModule(net, common=common))
        uniform = torch.full((num_learners,), 1 / num_learners)
        self.register_buffer("pi", uniform)
        # pi after the M-step: samples of this round are still weighted by the pi before it
        self.register_buffer("posterior", uniform.clone(), persistent=False)
        self.register_buffer("fitted", torch.tensor(False))

    def _redraw(self, m: int) -> None:
        """Draw initial weights for learner m, as equal learners would stay equal for ever.

        Raises:
            MisconfigurationException: if they are those of the first learner.
        """
        with isolate_rng():
            # a seed of its own, so that no other draw depends on the number of learners
            torch.manual_seed(derive_seed(torch.initial_seed(), "fedem", m))
            drawn = self.new_net().state_dict()
        own = {name: t for name, t in drawn.items() if f"net.{name}" not in self.common_names}
        first = self.net.state_dict()
        if all(torch.equal(tensor, first[name]) for name, tensor in own.items()):
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__} begins each of model.num_learners={self.num_learners} learners "
                "with the same weights; give a class or function that draws its weights."
            )
        self.assign({f"learner_{m}.{name}": tensor for name, tensor in own.items()})

    def learners(self) -> list[Net]:
        """Return the nets of all learners; the first is ``net``."""
        return [self.net, *(getattr(self, f"learner_{m}") for m in range(1, self.num_learners))]

    def received(self) -> list[FrozenModule]:
        """Return the learners as received at the start of the round, in evaluation mode always."""
        return [getattr(self, f"received_{m}") for m in range(self.num_learners)]

    def is_shared(self, name: str) -> bool:
        """Share the same entries of every learner."""
        learner, _, own = name.partition(".")
        return super().is_shared(f"net.{own}" if learner.startswith("learner_") else name)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the learners, and make one E- and M-step on the client's samples where they are needed."""
        super().on_download(payload, data)
        if self.num_learners == 1:
            return
        self.posterior.copy_(self.pi)
        # the weights of a client that has trained need no samples, so it predicts without them
        steps = torch.ones_like(self.fitted) if self.training_follows else ~self.fitted
        if data is not None and anyone(steps) and anyone(torch.as_tensor(data.size("train")) > 0):
            chunks = [(self.responsibilities(self.learners(), x, y), own) for x, y, own in data.marked_chunks()]
            q, own = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            # clients at once may have filling, and no samples at all
            mean = torch.where(own[:, None], q, 0).sum(0) / own.sum().clamp_min(1)
            self.posterior.copy_(torch.where(steps & own.any(), mean, self.pi))
        if self.training_follows:
            for frozen, net in zip(self.received(), self.learners(), strict=True):
                frozen.take_from(net)

    def responsibilities(self, nets: Sequence[Callable[[Any], Tensor]], x: Any, target: Any) -> Tensor:
        """Return q, the learners' shares in samples ``[n, M]``.

        Args:
            nets: the learners, in evaluation mode.
            x: inputs ``[n, ...]``.
            target: targets ``[n, ...]``.
        """
        losses = torch.stack([self.sample_errors(net(x), target)[0] for net in nets], 1)
        return (self.pi.log() - losses.to(self.pi)).softmax(1)

    def sample_errors(self, outputs: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        r"""Return each sample's mean error :math:`\ell_{im}` and the sum of its errors, both ``[n]``.

        The two differ where a sample has several errors, such as a text; without any, both are 0.

        Args:
            outputs: a learner's outputs ``[n, ...]``.
            target: targets ``[n, ...]``.
        """

        def of_one(outputs: Tensor, target: Any) -> tuple[Tensor, Tensor]:
            target = tree_map(lambda t: t[None], target)
            total = self.task_loss(outputs[None], target, "sum")
            return total / (total.new_zeros(()) + self.task.weight(target)).clamp_min(1), total

        # tasks reduce losses of a batch: a batch of one sample is the sample's own loss, for every task
        losses: tuple[Tensor, Tensor] = torch.vmap(of_one)(outputs, target)
        return losses

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum over learners of the losses weighted by q; each learner has a gradient of its own loss."""
        if self.num_learners == 1:
            return super().training_step(batch, batch_idx)
        x, target = batch
        q = self.responsibilities(self.received(), x, target).detach()
        errors = torch.stack([self.sample_errors(net(x), target)[1] for net in self.learners()], 1)
        return {"loss": (q * errors).sum() / self.task.weight(target)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the mixture of all learners."""
        if self.num_learners == 1:
            return super().forward(x)
        outputs = torch.stack([net(x) for net in self.learners()])
        # no branch on a tensor, so that engines can evaluate many clients at once
        return self.task.combined(outputs, torch.where(self.fitted, self.pi, self.posterior))

    def joining_phases(self) -> list[Phase]:
        """Return no phase, as new clients leave the learners still; a single learner is trained as in `FedAvg`."""
        return super().joining_phases() if self.num_learners == 1 else []

    @at_once
    def upload(self, data: ClientData) -> Message:
        r"""Return the learners, and keep the new :math:`\pi`."""
        if self.num_learners > 1:
            self.pi.copy_(self.posterior)
            self.fitted.fill_(True)
        return super().upload(data)
