"""KT-pFL: clients with any networks teach each other by predictions on public samples, mixed for each client.

Source: Zhang et al., 2021 (https://arxiv.org/abs/2111.02862). Symbols: K clients, z_l client l's logits for the public
samples, p_l = softmax(z_l / T) its predictions, c [K, K] the knowledge coefficients, q_k the targets of client k.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.growing_epochs import GrowingEpochs
from pfl_lightning.methods.knowledge_coefficients import KnowledgeCoefficients
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.public_answers import PublicAnswers, PublicSettings, check_answers, travelling_inputs
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import Unpack


class KnowledgeTransfer(PublicAnswers, GrowingEpochs, Local):
    r"""Keeps the whole model on the client; trains on public samples with the server's targets, then on private ones.

    The first phase minimises :math:`\mathrm{KL}(q_k \Vert \mathrm{softmax}(z / T))` on the public samples, the mean
    over samples; the second the cross-entropy on the client's own. Then the client sends its predictions for the public
    samples, in evaluation mode. A client without earlier predictions has no targets, and begins with the second phase.
    Its server side is `KTpFL`.

    The official code divides the KL by the number of classes too. The implementation in FedClassAvg's code distils, by
    ``distill=mse`` at T = 1, predictions that were made at T = 10 for other images than those in training; here both
    have the same T and the same images.

    Args:
        temperature: T, above 0.
        distill: the loss of the first phase: ``kl`` as above, or ``mse``, the mean square of
            :math:`\mathrm{softmax}(z / T) - q_k` over samples and classes.
        **kwargs: the arguments of `PublicAnswers` and of `GrowingEpochs`.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    def __init__(
        self,
        *args: Any,
        temperature: float = 10.0,
        distill: Literal["kl", "mse"] = "kl",
        **kwargs: Unpack[PublicSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not temperature > 0:
            raise MisconfigurationException(f"model.temperature={temperature} must be above 0, such as 10.")
        self.temperature = temperature
        self.distill = distill

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy, or in the first phase the distance from :math:`q_k`."""
        if self.phase.name != "distill":
            return super().training_step(batch, batch_idx)
        x, q = batch
        z = self.tempered(x)
        if self.distill == "kl":
            # q are probabilities, not logits, and kl_div takes 0 log 0 as 0
            return {"loss": F.kl_div(z.log_softmax(1), q, reduction="batchmean")}
        return {"loss": F.mse_loss(z.softmax(1), q)}

    def tempered(self, x: Tensor) -> Tensor:
        """Return logits over T, in float32 or better.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        z: Tensor = self.net(x)
        return z.to(torch.promote_types(z.dtype, torch.float32)) / self.temperature

    def answer(self, x: Tensor) -> Tensor:
        """Return the predictions :math:`p_k`."""
        return self.tempered(x).softmax(1)

    def configure_aggregator(self) -> Aggregator:
        """Return a server with knowledge coefficients."""
        return KTpFL()


class KTpFL(KnowledgeCoefficients):
    r"""Sends each client a personal mix of all clients' predictions as targets, :math:`q_k = \sum_l c_{kl}\, p_l`.

    The mix is of the last predictions of all clients so far. The public samples are those of the data module's
    ``server_samples``, the same in each round; their labels are unused. They travel in stored form, one byte a colour
    and pixel, if clients can make the net's inputs of it, and aren't part of the state. They travel in each round, as
    the comparison in FedClassAvg's paper counts them; `Consensus` sends them once.
    Source: Zhang et al., 2021 (https://arxiv.org/abs/2111.02862). Takes the arguments of `KnowledgeCoefficients`.

    Raises:
        MisconfigurationException: if a number is negative; at setup, if the server has no samples.
    """

    needs = frozenset({"predictions"})
    sends = frozenset({"public", "targets"})
    meets_newcomers = True

    def setup(self, server: Server) -> None:
        """Read the public samples; start without predictions."""
        super().setup(server)
        self.public = travelling_inputs(server.data, "KTpFL")
        self.state["predictions"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take the round's predictions, and update the knowledge coefficients."""
        if not updates:
            return {}
        answers = {client: update["predictions"] for client, update in updates.items()}
        self.state["predictions"] = self.state["predictions"] | answers
        # [n, samples * classes]: mean squared errors of mixes follow from inner products of these rows
        p = torch.stack(list(answers.values())).flatten(1).double()
        return self.learn(list(answers), p @ p.T / p.shape[1])

    def download(self, client: int) -> Message:
        """Return the public samples, and :math:`q_k` if the client has sent predictions before."""
        predictions = self.state["predictions"]
        if client not in predictions:
            return {"public": self.public}
        check_answers(predictions[client], self.public)
        # in a fixed order, so that sums don't depend on who answered first
        known = sorted(predictions)
        mix = weighted_mean([{"targets": predictions[k]} for k in known], self.shares(client, known).tolist())
        return {"public": self.public, **mix}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the public samples, and after the newcomer's own predictions the mean of all predictions.

        Coefficients begin as this mean.
        """
        if update is None:
            return {"public": self.public}
        # a newcomer has no row of coefficients, and takes the initial one, with all clients and itself alike
        answers = [*self.state["predictions"].values(), update["predictions"]]
        return {"public": self.public, "targets": torch.stack(answers).mean(0)}
