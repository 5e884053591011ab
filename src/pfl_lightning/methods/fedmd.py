"""FedMD: clients of any network agree on logits for public samples.

Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.aggregators import Aggregator, Server
from pfl_lightning.choices import check_least
from pfl_lightning.client import Batch, Phase
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.public_answers import PublicAnswers, check_answers, travelling_inputs


class FedMD(PublicAnswers, Local):
    r"""Keeps its whole model to itself; fits the mean logits of all, then its own samples.

    The first phase minimises the mean absolute error :math:`\lvert z - \bar z \rvert` over samples and classes, the
    second the cross-entropy. Then it sends its logits for the public samples, in evaluation mode. A client's first
    round has no first phase, where nobody has been heard of, and is longer: the paper trains until convergence, and
    the official code for up to 25 epochs, stopping early, which is left out here. There that is preceded by training on
    the labels of the public samples, which play no part here.

    The paper draws other public samples for each round; here they are all of the server's, the same in each round. Its
    sizes of batches, and how long it fits, could not be verified.
    Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).

    Args:
        initial_epochs: passes over its own samples in a client's first round, at least 1; None takes the Trainer's
            ``local_epochs`` or ``local_steps``, as later rounds do.
        **kwargs: the arguments of `PublicAnswers` and of `FedAvg`.

    Raises:
        MisconfigurationException: if a number is out of range.
    """

    begun: Tensor

    def __init__(self, initial_epochs: int | None = 25, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_least("model", **{} if initial_epochs is None else {"initial_epochs": (initial_epochs, 1)})
        self.initial_epochs = initial_epochs
        self.register_buffer("begun", torch.tensor(False))

    def local_phases(self) -> list[Phase]:
        """Distillation, then private training, longer at first."""
        *taught, private = super().local_phases()
        return [*taught, private if self.begun else Phase(epochs=self.initial_epochs)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Cross-entropy, or in the first phase the distance from the mean logits."""
        if self.phase.name != "distill":
            return super().training_step(batch, batch_idx)
        x, consensus = batch
        return {"loss": F.l1_loss(self.answer(x), consensus)}

    def answer(self, x: Tensor) -> Tensor:
        """Logits, in no less than single precision."""
        z: Tensor = self.net(x)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def upload(self, data: ClientData) -> Message:
        """The logits; notes that there was a first round."""
        if self.steps_done:
            self.begun.fill_(True)
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """The mean of the logits."""
        return Consensus()


class Consensus(Aggregator):
    """Teaches everybody the plain mean of what the clients of the last round answered to public samples.

    The public samples are those of the data module's ``server_samples``, whose labels play no part. They travel as they
    are stored, wherever clients can make the net's inputs of that, and are no part of the state. A client keeps them:
    they travel to it once, and the mean of the answers in each round.
    Source: Li and Wang, 2019 (https://arxiv.org/abs/1910.03581).

    Raises:
        MisconfigurationException: at setup, if the server has no samples.
    """

    needs = frozenset({"predictions"})
    sends = frozenset({"public", "targets"})
    sends_once = frozenset({"public"})
    sums_only = True

    def setup(self, server: Server) -> None:
        """Takes the public samples; nobody has answered yet."""
        self.summed = server.summed
        self.public = travelling_inputs(server.data, self.name)
        self.state["consensus"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes the mean of the round's answers, and logs how far they are from it."""
        if not updates:
            return {}
        answers = [{"targets": update["predictions"]} for update in updates.values()]
        self.state["consensus"] = mean = weighted_mean(answers, [1 / len(answers)] * len(answers))
        if self.summed:
            # how far answers are apart is nothing that their sum tells
            return {}
        apart = [float((answer["targets"] - mean["targets"]).abs().mean()) for answer in answers]
        return {"disagreement": sum(apart) / len(apart)}

    def download(self, client: int) -> Message:
        """The public samples, and the mean once there is one."""
        for answers in self.state["consensus"].values():
            check_answers(answers, self.public)
        return {"public": self.public, **self.state["consensus"]}
