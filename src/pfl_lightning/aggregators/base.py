"""The server side of a method: its base class, and what it knows before the first round."""

from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.messages import Message, StateDict, Updates, detached
from pfl_lightning.selection import Sampling

AnyAggregator = TypeVar("AnyAggregator", bound="Aggregator")


@dataclass(frozen=True)
class Server:
    """What a server knows before the first round.

    Args:
        num_clients: clients of the federation, with ids ``0 .. num_clients - 1``.
        weights: the common initial model, as far as clients share it.
        module: a client module to run nets through, best with ``torch.func.functional_call`` and weights of the
            server's own. It stands on the device of the clients, while `Aggregator.state` is on the CPU, and engines
            train in it: what an aggregator leaves in it is overwritten. Its `ClientModule.new_net` gives further nets.
        data: the data module; its ``server_data`` is the server's own public or proxy set, if there is one.
        seed: seed of the federation; draw from ``derive_seed(seed, NAME, round)``.
        rounds: how many there shall be; None where that isn't known.
        sampling: how cohorts are drawn; None where that depends on clients, or isn't known.
        deployed: whether clients are sites of a deployment, all of which know the seed.
        summed: whether updates are stand-ins, each the mean of all: the same sums, and of no client's own.
    """

    num_clients: int
    weights: StateDict
    module: ClientModule
    data: FederatedDataModule
    seed: int
    rounds: int | None = None
    sampling: Sampling | None = None
    deployed: bool = False
    summed: bool = False

    def parameter_names(self, remove_duplicate: bool = True) -> list[str]:
        """Names of the parameters that clients share: entries of `weights` without buffers.

        Args:
            remove_duplicate: whether a tied parameter has its first name alone, as where models are compared, or all
                its names, as where each entry of `weights` is changed.
        """
        parameters = self.module.named_parameters(remove_duplicate=remove_duplicate)
        return [name for name, _ in parameters if name in self.weights]

    def first_names(self) -> dict[str, str]:
        """The first name of each parameter that clients share, by all its names."""
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        parameters = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in parameters if name in self.weights}

    def kept_entries(self) -> StateDict:
        """Copies of the entries that clients keep to themselves, for running nets that `weights` don't fill.

        Take them in `Aggregator.setup`: later on the module holds those of whoever trained last.
        """
        known = self.weights.keys() | self.module.common_names
        kept: StateDict = detached({n: t for n, t in self.module.state_dict().items() if n not in known})
        return kept


def checked_logs(logs: Any, name: str) -> dict[str, float]:
    """Return what an ``aggregate`` returned, if it is a dict of numbers for the record.

    Args:
        logs: what it returned.
        name: of the aggregator.

    Raises:
        MisconfigurationException: if it is none.
    """
    if not isinstance(logs, dict):
        raise MisconfigurationException(
            f"{name}.aggregate returned a {type(logs).__name__}; return a dict of numbers for the record, or {{}}."
        )
    return logs


class Aggregator:
    """A method's server side: takes the updates of a round, leaves each client's next payload.

    The base class sends nothing and learns nothing: the server of clients that don't communicate. A method overrides
    `aggregate` and `download`, keeps all that it remembers in `state` (tensors, numbers, strings, and dicts and
    lists of them: it goes into the checkpoint as it is, and another type is refused in the first round; NumPy's numbers
    become Python's) and names the entries it `needs` from an update and `sends` in a payload, so that a pair of client
    and aggregator that doesn't fit is refused before the first round.
    """

    needs: frozenset[str] = frozenset()
    """Entries that it reads from updates; an instance may set its own by its settings."""
    sends: frozenset[str] = frozenset()
    """Entries of its payloads."""
    sends_once: frozenset[str] = frozenset()
    """Entries of its payloads that never change, and that clients keep: they travel to a client in the rounds up to the
    first whose update the server takes. `download` gives them in any case."""
    requires: frozenset[str] = frozenset()
    """What it can't do without, as `ClientModule.requires`."""
    caches: frozenset[str] = frozenset()
    """Attributes besides `state` that may change after `setup`, as they are made from `state` alone."""

    sums_only: bool = True
    """Whether updates count by sums over clients alone, of their entries or of these times ``num_samples``: what secure
    aggregation gives a server, which sees no client's own. Each class says so itself: one that doesn't may look at
    more."""

    example_level: bool = False
    """Whether it learns of clients by their weights alone, as ``trainer.example_privacy`` needs it; each class says so
    itself."""
    publishable: tuple[str, ...] = ()
    """Columns of the record that its guarantee covers, as patterns; those of ``test/global_`` are of samples that no
    client holds."""
    guarantee: str = ""
    """Of whom it guarantees differential privacy: of a ``client``, or of nobody. Each class says so itself; updates
    then have only what it `needs`, and only client modules that fit are taken."""

    fixed_sizes: bool = False
    """Whether it takes the clients' numbers of samples once, before the first round; refused where these change."""
    meets_newcomers: bool = False
    """Whether what a new client receives depends on what it is like: it then makes one round of local work that
    nothing is kept of but its update, for `welcome`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.sums_only = vars(cls).get("sums_only", False)
        cls.example_level = vars(cls).get("example_level", False)
        cls.guarantee = vars(cls).get("guarantee", "")

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """What records and checkpoints call it."""
        return type(self).__name__

    def setup(self, server: Server) -> None:
        """Fills `state` before the first round; on resume the checkpoint's state replaces it.

        Args:
            server: the server's knowledge; keep a reference to what later rounds need of it.
        """

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes a round's updates.

        Args:
            updates: by client id, sorted by it; only clients that took part and did not diverge. Pair by id: a
                rule that pairs lists by position is wrong. If it is empty, the state stays as it is.
            round: the round's number, from 0.

        Returns:
            Numbers for the round's record, logged as ``server/NAME``.
        """
        return {}

    def download(self, client: int) -> Message:
        """What a client receives now.

        It is asked for often (training, evaluation, counting, checkpoints), so let it be pure and cheap: tensors of
        `state` are returned as they are, and the client copies them.
        """
        return {}

    def welcome(self, client: int, update: Message | None) -> Message:
        """What a new client receives, of whom the server has never heard; by default what any client does.

        Override it where `download` looks the client up. It changes nothing: the newcomer is no client afterwards.

        Args:
            client: its id, from the number of clients up.
            update: what the newcomer has sent, from its last local work; None where it has sent nothing yet. If
                `meets_newcomers`, it has sent something before it receives what counts.

        Raises:
            MisconfigurationException: if there is nothing that it could receive.
        """
        return self.download(client)

    def global_model(self) -> StateDict:
        """The server's one model, as far as it has one; empty where every model is somebody's own."""
        return {}

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """What it guarantees of the rounds so far, as numbers and texts for the record; empty without a guarantee.

        Args:
            final: whether the run is over, so that it may take seconds.
        """
        return {}

    def count_lost(self, rounds: int) -> None:
        """Told when a run goes on from a checkpoint: rounds were made after it, and are made again.

        Args:
            rounds: how many there may have been, at least 0.
        """

    def find(self, kind: type[AnyAggregator]) -> AnyAggregator | None:
        """Itself if it is of a kind, else None; `AggregatorList` looks into its server sides, and the first counts."""
        return self if isinstance(self, kind) else None
