"""Cyclic weight transfer: the model goes from client to client."""

from collections.abc import Sequence
from typing import Literal

from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import check_choices


class CyclicTransfer(Aggregator):
    r"""Hands one model from client to client, each of which trains it in its turn; averages nothing.

    With the clients :math:`k_1, k_2` to :math:`k_m` of a round in their order,
    :math:`w_{k_i} = \mathrm{train}_{k_i}(w_{k_{i-1}})`, and :math:`w_{k_m}` begins the next round. A client whose model
    diverges is left out: the next one takes the model before it. The server sees each model on its way, and the clients
    of a round wait for each other, so that a round takes m times as long as with clients at once. FLamby calls a single
    client's turn a round: R of its rounds with M clients are R / M rounds here.
    Source: Chang et al., 2018, cyclical weight transfer (https://doi.org/10.1093/jamia/ocy017).

    Args:
        order: ``drawn`` anew in each round, as in FLamby, or ``fixed``, by the clients' ids.
    """

    needs = frozenset({"weights"})
    sends = frozenset({"weights"})

    def __init__(self, order: Literal["drawn", "fixed"] = "drawn") -> None:
        super().__init__()
        check_choices("aggregator", order=(order, ("drawn", "fixed")))
        self.order = order

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        self.seed = server.seed
        self.state["weights"] = server.weights

    def turns(self, clients: Sequence[int], round: int) -> list[int]:
        """Return the clients in the order of their turns, a function of seed and round."""
        if self.order == "fixed":
            return sorted(clients)
        # by a number of each client's own, so that the others keep their order when one is left out
        return sorted(clients, key=lambda client: derive_seed(self.seed, "cyclic", round, client))

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Keep the model of the last client."""
        if updates:
            self.state["weights"] = updates[self.turns(list(updates), round)[-1]]["weights"]
        return {}

    def download(self, client: int) -> Message:
        """Return the model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """Return the model."""
        weights: StateDict = self.state["weights"]
        return weights
