"""The base class of aggregators, and the server's knowledge before the first round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.messages import Message, RunningMean, StateDict, Updates, detached
from pfl_lightning.selection import Sampling
from pfl_lightning.settings import as_call

AnyAggregator = TypeVar("AnyAggregator", bound="Aggregator")


@dataclass(frozen=True)
class Server:
    """The server's knowledge before the first round.

    Args:
        num_clients: number of clients, with ids ``0 .. num_clients - 1``.
        weights: the shared entries of the common initial model.
        module: a client module to run nets through, best by ``torch.func.functional_call`` with weights of the server's
            own. It is on the clients' device, while `Aggregator.state` is on the CPU. Engines train in it, so that
            whatever an aggregator writes into it is overwritten. `ClientModule.new_net` builds further nets.
        data: the data module; ``data.server_data`` is the server's own public or proxy set, if there is one.
        seed: the federation's seed; draw random numbers from ``derive_seed(seed, NAME, round)``.
        rounds: planned number of rounds; None if unknown.
        sampling: how cohorts are drawn; None if that depends on clients or is unknown.
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

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the server computes for its clients: theirs, or float32 where theirs has fewer digits.

        Ask for it in each round: before the first one the module, as `weights`, is float32 also with precision=64-true.
        """
        return torch.promote_types(cast(torch.dtype, self.module.dtype), torch.float32)

    def parameter_names(self, remove_duplicate: bool = True) -> list[str]:
        """Return the names of the shared parameters: the entries of `weights` without buffers.

        Args:
            remove_duplicate: whether a tied parameter counts under its first name alone, as comparisons of models need
                it; if False, under all of its names, as a change of each entry of `weights` needs it.
        """
        # in the module's order, which is the same in every process and run
        parameters = self.module.named_parameters(remove_duplicate=remove_duplicate)
        return [name for name, _ in parameters if name in self.weights]

    def first_names(self) -> dict[str, str]:
        """Return the first name of each shared parameter, by every name of the parameter.

        A tied parameter, such as an embedding that is also the output layer, has several names.
        """
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        parameters = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in parameters if name in self.weights}

    def kept_entries(self) -> StateDict:
        """Return copies of the entries outside `weights`, as needed to run a net on the server.

        Call it in `Aggregator.setup`: later on, the module holds the entries of the last client trained in it.
        """
        # common entries are in the module itself, for every client the same
        known = self.weights.keys() | self.module.common_names
        kept: StateDict = detached({n: t for n, t in self.module.state_dict().items() if n not in known})
        return kept


def checked_logs(logs: Any, name: str) -> dict[str, float]:
    """Return the result of an ``aggregate``, checked to be a dict.

    Args:
        logs: the result.
        name: the aggregator's name.

    Raises:
        MisconfigurationException: if it is no dict.
    """
    if not isinstance(logs, dict):
        raise MisconfigurationException(
            f"{name}.aggregate returned a {type(logs).__name__}; return a dict of numbers for the record, or {{}}."
        )
    return logs


def check_buffers(model: StateDict, initial: StateDict, updates: Updates, name: str) -> None:
    """Check that a new global model's counters are whole numbers, and that no rule made a variance negative.

    Args:
        model: the global model, or a part of it.
        initial: shared entries of the initial model.
        updates: updates by client id. A variance that a client sent as negative is the client's, whoever it is, and
            must not end the others' federation.
        name: the aggregator's name.

    Raises:
        MisconfigurationException: if a counter became a fraction, or a variance negative.
    """
    for entry, first in initial.items():
        if entry not in model:
            continue
        now, fault = model[entry], ""
        if not first.is_floating_point() and now.is_floating_point():
            fault = f"{now.dtype} in place of {first.dtype}"
        elif entry.endswith("running_var") and bool((now < 0).any()):
            sent = [update["weights"][entry] for update in updates.values() if entry in update.get("weights", {})]
            fault = "" if any(bool((tensor < 0).any()) for tensor in sent) else f"{now.min():.3g}, less than 0"
        if fault:
            raise MisconfigurationException(
                f"{name}.aggregate left {entry!r}, a buffer of the net, as {fault}: weights has buffers too; change "
                "entries for server.parameter_names(remove_duplicate=False) alone, and average the others by "
                "super().aggregate."
            )


class Aggregator:
    """A method's server side: takes the updates of a round, and gives each client's next payload.

    The base class sends nothing and learns nothing: it serves clients that don't communicate. A method overrides
    `aggregate` and `download`. It keeps all of its memory in `state` (tensors, numbers, strings, and dicts and lists of
    them, which go into the checkpoint as they are; other types are refused in the first round, and NumPy's numbers
    become Python's). It names the entries that it `needs` from an update and `sends` in a payload, so that an
    aggregator which doesn't fit its clients is refused before the first round.
    """

    def __repr__(self) -> str:
        return as_call(self)

    needs: frozenset[str] = frozenset()
    """Entries that it reads from updates; an instance may set its own, depending on its settings."""
    sends: frozenset[str] = frozenset()
    """Entries of its payloads."""
    sends_once: frozenset[str] = frozenset()
    """Entries of its payloads that never change and that clients keep.

    Each travels to a client until the server has taken a first update of that client. `download` returns them always.
    """
    requires: frozenset[str] = frozenset()
    """Requirements on the task, as `ClientModule.requires`."""
    caches: frozenset[str] = frozenset()
    """Attributes beside `state` that may change after `setup`, because they are computed from `state` alone."""

    sums_only: bool = True
    """True if it uses nothing of the updates but sums over clients, of entries or of entries times ``num_samples``.

    Secure aggregation gives a server these sums and no client's own update. It isn't inherited: each class sets it,
    since a subclass may look at single updates.
    """

    example_level: bool = False
    """True if it learns about clients from weights alone, or from class counts too; not inherited.

    ``trainer.example_privacy`` needs it."""
    publishable: tuple[str, ...] = ()
    """Columns of the record that its privacy guarantee covers, as patterns; columns ``test/global_*`` are of samples
    that no client holds.
    """
    guarantee: str = ""
    """The unit of its differential privacy: ``client``, or empty without a guarantee. It isn't inherited.

    With a guarantee, updates have only the entries it `needs`, and only client modules that fit are taken.
    """

    fixed_sizes: bool = False
    """True if it reads the clients' numbers of samples once, before the first round; refused where they change."""
    fixed_clients: bool = False
    """True if it reads the number of clients once, before the first round; clients then can't be added later on."""
    fixed_rounds: bool = False
    """True if its rounds depend on the planned number of rounds; a resumed run with another number is then refused."""
    meets_newcomers: bool = False
    """True if a newcomer's payload depends on an update of the newcomer's own.

    The newcomer then does one round of local work, of which nothing but the update is kept, for `welcome`.
    """

    is_secure: bool = False
    """True if it draws random numbers from the operating system, which are others in each process."""
    hides_cohorts: bool = False
    """True if its guarantee counts on cohorts that follow from nothing that others have, such as the run's seed."""

    reads_arrivals: bool = False
    """True if it reads the entry ``arrival`` of updates, which ``trainer.schedule`` adds at the server.

    The entry has ``place``, the place in the round's order of arrival from 0; ``staleness``, the number of the server's
    steps since the client's start; and ``weights``, from which the client started.
    """

    takes_narrow: bool = False
    """True if clients' nets may be narrow copies of the first one, with parts of its entries under the same names.

    `download` then returns the client's part.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # claims about privacy hold for the code of one class: a subclass's code may break them, so it must claim them
        # anew
        cls.sums_only = vars(cls).get("sums_only", False)
        cls.example_level = vars(cls).get("example_level", False)
        cls.guarantee = vars(cls).get("guarantee", "")

    def __init__(self) -> None:
        # here, and not in the class, where all aggregators of a process would share it
        self.state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Name in records and checkpoints."""
        return type(self).__name__

    def setup(self, server: Server) -> None:
        """Fill `state` before the first round; a resumed run takes the checkpoint's instead.

        Args:
            server: the server's knowledge; keep a reference to the parts that later rounds need.
        """

    def turns(self, clients: Sequence[int], round: int) -> list[int] | None:
        """Return a round's clients in the order of their turns; None, the default, trains all from their own payloads.

        In turns, each client receives the ``weights`` that the client before it sent, in place of its payload's.

        Args:
            clients: ids of the round's clients.
            round: the round's number, from 0.
        """
        return None

    def running_mean(self, sizes: Mapping[int, int]) -> RunningMean | None:
        """Return what adds the weights of a round up as they come; None, the default, to get each client's own.

        The mean then is in place of each client's ``weights`` in `aggregate`, and no more than one client's weights
        are in memory. Only a server that does nothing but average may ask for it. It isn't asked in a deployment, under
        secure sums, and where a callback looks at updates.

        Args:
            sizes: the expected clients' numbers of training samples, by id.
        """
        return None

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take a round's updates.

        Args:
            updates: updates by client id, in the order of the ids, of clients that took part and didn't diverge. Pair
                them by id and never by position. Without any, leave the state as it is.
            round: the round's number, from 0.

        Returns:
            Numbers for the round's record, logged as ``server/NAME``.
        """
        return {}

    def download(self, client: int) -> Message:
        """Return a client's payload.

        Training, evaluation, accounting and checkpoints all call it, so let it be cheap and change nothing: return
        tensors of `state` as they are, and the client copies them.

        Evaluations first ask with a stand-in for all clients, at which every look raises. A payload that doesn't depend
        on the client is then made once, and clients that keep nothing of their own are evaluated together.

        Args:
            client: the client's id.
        """
        return {}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the payload of a newcomer, a client unknown to the server; by default as for any client.

        Override it where `download` looks the client up. It changes nothing: the newcomer doesn't become a client.

        Args:
            client: the newcomer's id, from the number of clients up.
            update: the newcomer's update from its last local work; None before the first. With `meets_newcomers`, the
                payload that counts comes after an update.

        Raises:
            MisconfigurationException: if there is no payload for newcomers.
        """
        return self.download(client)

    def global_model(self) -> StateDict:
        """Return the server's one model, or the shared part of it; empty where every client has a model of its own."""
        return {}

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """Return the privacy guarantee of the rounds so far for the record, as numbers and texts; empty without one.

        Args:
            final: whether the run is over, so that a computation of some seconds is allowed.
        """
        return {}

    def noise_share(self, deployed: bool) -> Any:
        """Return the noise that each client adds under ``trainer.secure_sum``, a `NoiseShare`; None adds none.

        Args:
            deployed: whether clients are sites of a deployment.
        """
        return None

    def check_sums(self) -> None:
        """Refuse ``trainer.secure_sum``, under which it learns sums over clients and no client's own update.

        Raises:
            MisconfigurationException: if it doesn't claim `sums_only`, or a setting asks for more.
        """
        if not self.sums_only:
            raise MisconfigurationException(
                f"aggregator={type(self).__name__} doesn't say of itself, by sums_only = True in its own class, that "
                "it needs sums over clients alone, which is all that trainer.secure_sum gives; take one that does, "
                "such as WeightedAverage."
            )

    def count_lost(self, rounds: int) -> None:
        """Account for rounds which ran after the loaded checkpoint, and will be run again.

        A privacy guarantee must count them: their results were released.

        Args:
            rounds: the largest possible number of such rounds, 0 or more.
        """

    def find(self, kind: type[AnyAggregator]) -> AnyAggregator | None:
        """Return this aggregator if it is of a class, else None; `AggregatorList` searches its parts.

        Args:
            kind: the class.
        """
        # pictures look for a method's aggregator in this way, without knowing of lists
        return self if isinstance(self, kind) else None
