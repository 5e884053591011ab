"""FedDF: distillation of the ensemble of clients' models into the mean model, on unlabelled samples.

Source: Lin et al., 2020 (https://arxiv.org/abs/2006.07242). Symbols: :math:`z_k(x)` are the logits of client k's
model, :math:`z(x)` those of the global one.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from pfl_lightning.data import Samples, epoch_order
from pfl_lightning.messages import StateDict, Updates, detached
from pfl_lightning.methods.public_answers import samples_at_server
from pfl_lightning.methods.server_optimizer import server_optimizer
from pfl_lightning.nets.batch_norm import on_batch_statistics, smallest_batch
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Server, WeightedAverage
from pfl_lightning.settings import check_choices, check_least


class FedDF(WeightedAverage):
    r"""Averages models, and distils the clients' models into the mean on the server's samples.

    .. math::

        w \leftarrow \sum_k p_k w_k, \qquad \text{then}\ \min_w\ \mathrm{mean}_x\
        \mathrm{KL}\big(\mathrm{softmax}(\mathrm{mean}_k z_k(x)) \,\Vert\, \mathrm{softmax}(z(x))\big)

    The teachers are the round's models, fixed, in evaluation mode, with equal weights. The global model's BatchNorm
    layers normalise by batches and update their running statistics; dropout is off. The optimizer is new in each round,
    and its learning rate falls to 0 by a cosine. Personal entries are the common initial ones. In a round with one
    client there is no distillation.

    The official code plans 10,000 steps in a round, and stops when 1,000 of them bring nothing on labelled validation
    samples; here the number of steps is fixed. It can also leave out clients below chance, and has students of several
    networks, each the mean of its own group; here all clients have one network.
    Source: Lin et al., 2020 (https://arxiv.org/abs/2006.07242), whose official code has the other defaults.

    Args:
        server_steps: steps on the server's samples in a round, at least 0; 0 is `WeightedAverage` bit for bit.
        batch_size: samples a step, at least 1; at least 2 for nets with BatchNorm.
        ensemble: the average of the teachers: of ``logits``, or of ``probabilities``, another choice of the official
            code, which gives the gradient of the mean of the teachers' divergences.
        optimizer: builds the server's optimizer; None takes ``Adam(lr=0.001)``.

    Raises:
        MisconfigurationException: if an argument is out of its range; at setup, if the server has no samples.
    """

    requires = frozenset({"classes"})

    def __init__(
        self,
        server_steps: int = 200,
        batch_size: int = 128,
        ensemble: Literal["logits", "probabilities"] = "logits",
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__()
        check_least("aggregator", server_steps=(server_steps, 0), batch_size=(batch_size, 1))
        check_choices("aggregator", ensemble=(ensemble, ("logits", "probabilities")))
        self.server_steps, self.batch_size, self.ensemble = server_steps, batch_size, ensemble
        self.optimizer = server_optimizer(optimizer or (lambda params: Adam(params, lr=0.001)), lr=0.001)

    def setup(self, server: Server) -> None:
        """Start from the common initial model, and read the samples."""
        super().setup(server)
        self.server, self.names = server, server.parameter_names()
        self.smallest_batch = smallest_batch(server.module)
        if self.batch_size < self.smallest_batch:
            raise MisconfigurationException("aggregator.batch_size=1 gives BatchNorm no statistics; take 2 or more.")
        self.state["personal"] = server.kept_entries()
        self.samples = samples_at_server(server.data, self.name)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average and distil; log the first and the last divergence."""
        super().aggregate(updates, round)
        # one model is its own ensemble, and has nothing to teach
        if len(updates) < 2 or not self.server_steps or len(self.samples) < self.smallest_batch:
            return {}
        module = self.server.module
        # uploads may be in half precision, in which small steps would be lost
        dtype = torch.promote_types(cast(torch.dtype, module.dtype), torch.float32)
        samples = self.samples.to(module.device, dtype)

        def filled(weights: StateDict) -> StateDict:
            entries = (self.state["personal"] | dict(weights)).items()
            return {n: t.to(module.device, dtype if t.is_floating_point() else None, copy=True) for n, t in entries}

        # the teachers are fixed, so that one pass over all samples is enough
        answers = torch.stack([self.answers(filled(update["weights"]), samples) for update in updates.values()])
        taught = answers.mean(0).softmax(1) if self.ensemble == "logits" else answers.softmax(2).mean(0)
        student = filled(self.state["weights"])
        # a tied parameter is one tensor under all of its names, so that it has one gradient
        student |= {name: student[first] for name, first in self.server.first_names().items()}
        trained = [student[name].requires_grad_() for name in self.names]
        optimizer = self.optimizer(trained)
        scheduler = CosineAnnealingLR(optimizer, self.server_steps)
        losses = []
        for rows in islice(self.batches(round), self.server_steps):
            with on_batch_statistics(module):
                z = functional_call(module, student, (samples.take(rows).x,))
            loss = F.kl_div(z.log_softmax(1), taught[rows.to(taught.device)], reduction="batchmean")
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        # back to the type of each entry, and to the CPU, where aggregators keep their state
        entries, averaged = detached(student), self.state["weights"]
        self.state["weights"] = {name: entries[name].to(tensor.dtype) for name, tensor in averaged.items()}
        return {"first_divergence": float(losses[0]), "last_divergence": float(losses[-1])}

    @torch.no_grad()
    def answers(self, model: StateDict, samples: Samples) -> Tensor:
        """Return a model's logits ``[n, C]`` for samples, in evaluation mode.

        Args:
            model: entries of the model, by name.
            samples: the samples, on the module's device.
        """
        module = self.server.module
        with kept_modes(module):
            module.eval()
            return torch.cat([functional_call(module, model, (x,), tie_weights=False) for x, _ in samples.chunks()])

    def batches(self, round: int) -> Iterator[Tensor]:
        """Yield the rows of batches without end, in a new order for each pass over the samples.

        Args:
            round: the round's number, which seeds the order.
        """
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "feddf", round))
        while True:
            order = epoch_order(len(self.samples), self.batch_size, "keep", generator)
            yield from (rows for rows in torch.split(order, self.batch_size) if len(rows) >= self.smallest_batch)
