"""KT-pFL "+weight": knowledge coefficients mix models instead of predictions.

Source: Jang et al., 2022, section 4.3 (https://arxiv.org/abs/2210.14226). Symbols: c [K, K] the knowledge coefficients,
w_l the model of client l.
"""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import Message, Updates, weighted_means
from pfl_lightning.methods.knowledge_coefficients import KnowledgeCoefficients
from pfl_lightning.server import Server, WeightedAverage, client_weights, inner_products


class KTpFLWeight(KnowledgeCoefficients, WeightedAverage):
    r"""Sends each client a personal mix of all clients' models, :math:`\bar w_k = \sum_l c_{kl}\, w_l`.

    KT-pFL "+weight" of the FedClassAvg paper (https://arxiv.org/abs/2210.14226), for clients with one network and
    without public samples; its code isn't released. The coefficients are learned as in `KTpFL`, from the models'
    parameters instead of predictions. Mixes are over the clients of the round; absent clients keep their last mix, and
    a client that never took part receives the plain mean of the last round's models, which is also the global model.
    Floating buffers are mixed with the same coefficients. Takes the arguments of `KnowledgeCoefficients`.

    Raises:
        MisconfigurationException: if a number is negative; at setup, if clients share no parameters.
    """

    example_level = True
    needs = sends = frozenset({"weights"})

    def setup(self, server: Server) -> None:
        """Start from the common initial model for every client."""
        super().setup(server)
        self.parameters = server.parameter_names()
        if not self.parameters:
            raise MisconfigurationException(
                f"aggregator KTpFLWeight compares the parameters that clients share, and model "
                f"{type(server.module).__name__} shares none; take model FedAvg or GrowingEpochs."
            )
        self.state["models"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Update the knowledge coefficients by the round's models, and mix the models."""
        if not updates:
            return {}
        clients, models = list(updates), [update["weights"] for update in updates.values()]
        # the global model, and the payload of clients that never took part
        self.average(updates, client_weights(updates, "uniform"))
        size = sum(self.state["weights"][name].numel() for name in self.parameters)
        # inner products over the number of parameters: the mean squared error of the paper's objective needs no more
        logs = self.learn(clients, inner_products(models, self.parameters) / size)
        mixes = weighted_means(models, [self.shares(client, clients).tolist() for client in clients])
        self.state["models"] = self.state["models"] | dict(zip(clients, mixes, strict=True))
        return logs

    def download(self, client: int) -> Message:
        """Return the client's mix."""
        return {"weights": self.state["models"].get(client, self.state["weights"])}
