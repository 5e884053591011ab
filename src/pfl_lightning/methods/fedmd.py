"""FedMD: clients with any networks agree on logits for public samples.

Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch, Phase
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.public_answers import PublicAnswers, PublicSettings, check_answers, travelling_inputs
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import Unpack, check_least


class FedMD(PublicAnswers, Local):
    r"""Keeps the whole model on the client, and fits the mean logits of all clients, then the client's own samples.

    The first phase minimises the mean absolute error :math:`\lvert z - \bar z \rvert` over samples and classes, the
    second the cross-entropy. Then the client sends its logits for the public samples, in evaluation mode. In a client's
    first round the second phase is longer, and the first is left out if there are no mean logits yet: the paper trains
    until convergence, and the official code for up to 25 epochs with early stopping, which is left out here. The
    official code first trains on the labels of the public samples, which are unused here.

    The paper draws other public samples for each round; here all of the server's samples are used, the same in each
    round. The paper's batch sizes and numbers of epochs could not be verified.
    Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).

    Args:
        initial_epochs: passes over the own samples in a client's first round, at least 1; None takes the trainer's
            ``local_epochs`` or ``local_steps``, as later rounds do.
        **kwargs: the arguments of `PublicAnswers` and of `FedAvg`.

    Raises:
        MisconfigurationException: if a number is out of range.
    """

    begun: Tensor

    def __init__(self, *args: Any, initial_epochs: int | None = 25, **kwargs: Unpack[PublicSettings]) -> None:
        super().__init__(*args, **kwargs)
        check_least("model", **{} if initial_epochs is None else {"initial_epochs": (initial_epochs, 1)})
        self.initial_epochs = initial_epochs
        # an entry of the state, since one module runs all clients in turn
        self.register_buffer("begun", torch.tensor(False))

    def local_phases(self) -> list[Phase]:
        """Distil, then train on private samples, for more epochs in the client's first round."""
        # the distillation, if there are targets, then the private phase
        *taught, private = super().local_phases()
        return [*taught, private if self.begun else Phase(epochs=self.initial_epochs)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy, or in the first phase the distance from the mean logits."""
        if self.phase.name != "distill":
            return super().training_step(batch, batch_idx)
        x, consensus = batch
        return {"loss": F.l1_loss(self.answer(x), consensus)}

    def answer(self, x: Tensor) -> Tensor:
        """Return logits, in float32 or better."""
        z: Tensor = self.net(x)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def upload(self, data: ClientData) -> Message:
        """Return the logits, and note the end of the client's first round."""
        if self.steps_done:
            self.begun.fill_(True)
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return a server with the mean of the logits."""
        return Consensus()


class Consensus(Aggregator):
    """Sends the plain mean of the last round's answers to all clients, for public samples.

    The public samples are those of the data module's ``server_samples``; their labels are unused. They travel in stored
    form if clients can make the net's inputs of it, and aren't part of the state. A client keeps them: they travel to
    it once, and the mean of the answers in each round.
    Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).

    Raises:
        MisconfigurationException: at setup, if the server has no samples.
    """

    needs = frozenset({"predictions"})
    sends = frozenset({"public", "targets"})
    sends_once = frozenset({"public"})
    sums_only = True

    def setup(self, server: Server) -> None:
        """Read the public samples; start without a mean."""
        self.summed = server.summed
        self.public = travelling_inputs(server.data, self.name)
        self.state["consensus"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take the mean of the round's answers; log the mean distance of the answers from the mean."""
        if not updates:
            return {}
        # under the name of the payload's entry
        answers = [{"targets": update["predictions"]} for update in updates.values()]
        self.state["consensus"] = mean = weighted_mean(answers, [1 / len(answers)] * len(answers))
        if self.summed:
            # how far answers are apart is nothing that their sum tells
            return {}
        apart = [float((answer["targets"] - mean["targets"]).abs().mean()) for answer in answers]
        return {"disagreement": sum(apart) / len(apart)}

    def download(self, client: int) -> Message:
        """Return the public samples, and the mean answers if any."""
        for answers in self.state["consensus"].values():
            check_answers(answers, self.public)
        return {"public": self.public, **self.state["consensus"]}
