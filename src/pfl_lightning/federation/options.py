"""The Trainer's federated settings: participation, local training, engine and evaluation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Literal, TypeAlias, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import FederatedDataModule, Split
from pfl_lightning.data.batches import Limit
from pfl_lightning.data.memory import free_memory
from pfl_lightning.engines import ENGINES, Engine, EngineMaker, LocalWork, Sharded, Vectorised
from pfl_lightning.engines.evaluation import measured_names, metrics_of
from pfl_lightning.federation.stages import ConfiguredStage, Declares, Part, refuse_pairs
from pfl_lightning.messages import num_bytes
from pfl_lightning.nets.batch_norm import smallest_batch
from pfl_lightning.selection import Poisson, Sampling, Selection
from pfl_lightning.settings import check_choices, is_count
from pfl_lightning.tasks import Monitor

STAGES = {
    "schedule": "Asynchronous() of pfl_lightning.schedules",
    "example_privacy": "DPSGD(noise_multiplier=1) of pfl_lightning.privacy",
    "local_privacy": "PrivUnit(round_epsilon=8) of pfl_lightning.privacy",
    "compression": "TopK(0.01) of pfl_lightning.compression",
    "secure_sum": "SecureSum() of pfl_lightning.privacy",
}
"""Settings that add a stage to rounds, in the order of their calls, with an example of each."""
ClientStates: TypeAlias = Literal["memory", "device", "disk", "rank", "auto"]
"""Storage of clients' states between rounds: main memory, training device, files, the memory of the rank that trains
the client, or the device if a GPU has room."""
ByClient: TypeAlias = int | float | dict[str, float] | list[float] | None
"""A number for all clients; numbers by clients' names or ids; or a list with a number for each client."""
ROOM = 0.25
"""The largest share of free GPU memory that ``client_states="auto"`` gives to client states."""
MOST_LOCAL = 1_000_000
"""Largest number of local epochs, or of local steps, in a round."""
SMALL = 300_000
"""Number of parameters up to which, on a CPU, casts cost more than the faster arithmetic saves. An MLP of 159,010
parameters took 1.36 times as long under ``bf16-mixed``, one of 1,276,810 as long, and a CNN of 582,026 0.87 times."""


@dataclass(frozen=True)
class FederationOptions:
    """The Trainer's federated settings, by the names under which `FederatedTrainer` describes each.

    Raises:
        MisconfigurationException: if a value is out of range, or two settings exclude each other.
    """

    clients_per_round: int | float
    local_epochs: ByClient
    local_steps: int | None
    lr_factors: dict[str, float] | list[float] | None
    steps_continue: bool
    engine: str | type[Engine] | EngineMaker
    workers: int | None
    compile: bool
    evaluate: Literal["before", "after", "both"]
    test_every_round: bool
    evaluate_clients: int | float
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    client_states: ClientStates
    monitor: str | None
    min_clients: int
    cohort: Selection
    accumulate_grad_batches: int
    limit_train_batches: Limit
    checkpoint_common: bool
    checkpoint_every: int | None
    # stages, of rooms that this one doesn't know
    schedule: Any
    example_privacy: Any
    local_privacy: Any
    compression: Any
    secure_sum: Any

    def __post_init__(self) -> None:
        # 1 is one client or batch, and 1.0 all of them
        clients = "a number of clients from 1 up, or a fraction above 0.0 and up to 1.0"
        batches = "a number of batches from 1 up"
        self._check("clients_per_round", is_part, clients)
        self._check("evaluate_clients", is_part, clients)
        self._check("limit_train_batches", is_part, f"{batches}, or a share above 0.0 and up to 1.0")
        self._check("accumulate_grad_batches", is_count, f"{batches}, such as 4")
        words = "a number of rounds from 1 up, such as 10; leave it out to write files by the time that they take"
        self._check("checkpoint_every", is_count_or_none, words)
        for name in ("local_steps", "workers", "min_clients"):
            self._check(name, is_count_or_none, "at least 1, as an integer")
        words = "a number above 0, such as 2 or 0.5, or numbers by client, such as {'Bremen': 2} or [1, 0.5]"
        self._check("local_epochs", lambda value: value is None or all(map(is_above_zero, numbers_in(value))), words)
        words = "factors above 0 by client, such as {'Bremen': 0.5}, or a list of all clients' factors"
        is_given = isinstance(self.lr_factors, (Mapping, list))
        fits = self.lr_factors is None or (is_given and all(map(is_above_zero, numbers_in(self.lr_factors))))
        self._check("lr_factors", lambda value: fits, words)
        for name in ("local_epochs", "local_steps"):
            words = f"the number for one round, up to {MOST_LOCAL}, such as 5; this one would never end"
            self._check(name, lambda value: value is None or max(numbers_in(value)) <= MOST_LOCAL, words)
        words = "a number above 0, such as 1.0; leave it out to clip nothing"
        self._check("gradient_clip_val", lambda value: value is None or 0 <= value < inf, words)
        self._check(
            "cohort", lambda value: isinstance(value, Selection), "of pfl_lightning.selection, such as Uniform()"
        )
        for name, example in STAGES.items():
            words = f"an instance of its kind, such as {example}"
            self._check(name, lambda value: value is None or isinstance(value, ConfiguredStage), words)
        check_choices(
            "trainer",
            evaluate=(self.evaluate, ("before", "after", "both")),
            gradient_clip_algorithm=(self.gradient_clip_algorithm, ("norm", "value")),
            client_states=(self.client_states, get_args(ClientStates)),
            **({"engine": (self.engine, tuple(ENGINES))} if isinstance(self.engine, str) else {}),
        )
        if self.local_epochs is not None and self.local_steps is not None:
            raise MisconfigurationException(
                f"trainer.local_epochs={self.local_epochs} and trainer.local_steps={self.local_steps} "
                "exclude each other; give one of them."
            )
        if self.steps_continue and self.local_steps is None:
            raise MisconfigurationException(
                "trainer.steps_continue=true goes on within an epoch, and without trainer.local_steps rounds are whole "
                "epochs; give trainer.local_steps, or leave it out."
            )
        if self.compile and self.engine in ("sequential", "processes"):
            raise MisconfigurationException(
                f"trainer.compile=true compiles steps of many clients, and trainer.engine={self.engine!r} makes those "
                "of one; take engine='vectorised' or 'auto'."
            )
        for stage in self.stages.values():
            stage.check_options(self)
        refuse_pairs(self.parts)

    def _check(self, name: str, fits: Callable[[Any], bool], words: str) -> None:
        """Refuse a value that doesn't fit.

        Args:
            name: the setting's name.
            fits: returns whether a value does.
            words: what the value must be.
        """
        if not fits(value := getattr(self, name)):
            raise MisconfigurationException(f"trainer.{name}={value!r} must be {words}.")

    @property
    def stages(self) -> dict[str, ConfiguredStage]:
        """The stages of a round that settings add, by the setting's name, in the order of their calls."""
        found = {name: getattr(self, name) for name in STAGES}
        return {name: stage for name, stage in found.items() if stage is not None}

    @property
    def is_deployed(self) -> bool:
        """Whether clients are at sites, which an engine serves that neither a name nor a class describes."""
        return not isinstance(self.engine, (str, type))

    @property
    def parts(self) -> list[Declares]:
        """All settings with effects on rounds, or against those of others."""
        cohort, name = self.cohort, f"trainer.cohort={type(self.cohort).__name__}"
        parts: list[Declares] = [*self.stages.values()]
        if cohort.asks:
            asked = " and ".join(sorted(cohort.asks))
            parts.append(Part(name, {"asks": f"asks clients for {asked} of their training"}))
        if isinstance(cohort, Poisson):
            parts.append(Part(name, {"any number": "draws any number of clients"}))
        if self.steps_continue:
            reason = "needs each client's orders of samples, which begin anew there in each round; leave it out"
            continued = {"continues": "goes on within an epoch of each client's own order"}
            parts.append(Part("trainer.steps_continue=true", continued, {"sites": reason}))
        for name in ("local_epochs", "lr_factors"):
            if isinstance(value := getattr(self, name), (Mapping, list)):
                reason = "is read by each site for clients of its own; leave it out, or give a number for all"
                by_client = {"by client": "has clients train in different amounts"}
                parts.append(Part(f"trainer.{name}={value}", by_client, {"sites": reason}))
        if self.evaluate != "before":
            after = {"after": "shows each client's model after its own training"}
            parts.append(Part(f"trainer.evaluate={self.evaluate}", after))
        if self.is_deployed:
            parts.append(Part("the deployment", {"sites": "has clients at sites"}))
        return parts

    def monitored(self, client: ClientModule) -> Monitor:
        """Return the metric for selecting the best round: ``trainer.monitor``, or else the task's.

        Raises:
            MisconfigurationException: if the client module has no such metric, or if the metric doesn't say which
                direction is better.
        """
        if self.monitor is None:
            return Monitor(client.task.monitor, client.task.mode)
        name = self.monitor.removeprefix("val/")
        if name == "loss":
            return Monitor(name, "min")
        metrics = metrics_of(client)
        names = measured_names(metrics, pooled=True)
        if name not in names:
            own = ""
            if client.measures_itself:
                own = f", or name a value that {type(client.net).__name__} logs by data.task=OwnLoss(monitor={name!r}, "
                own += "mode='max')"
            raise MisconfigurationException(
                f"trainer.monitor={self.monitor!r} is not measured; choose from {', '.join([*names, 'loss'])}{own}."
            )
        better = metrics[name].higher_is_better
        if better is None:
            raise MisconfigurationException(
                f"trainer.monitor={self.monitor!r}: {type(metrics[name]).__name__} doesn't say whether more of it is "
                "better; set higher_is_better on its class."
            )
        return Monitor(name, "max" if better else "min")

    @property
    def engine_class(self) -> type[Engine] | EngineMaker:
        """The engine's class, or a function returning engines."""
        return ENGINES[self.engine] if isinstance(self.engine, str) else self.engine

    def cohort_size(self, num_clients: int) -> int:
        """Return the number of clients in a round's cohort."""
        return number_of(self.clients_per_round, num_clients)

    def updates(self, num_clients: int) -> int:
        """Return the number of updates for which a round waits."""
        size = self.cohort_size(num_clients)
        for stage in self.stages.values():
            size = stage.updates(size)
        return size

    def samples_trained(self, size: int, work: LocalWork, client: int) -> int:
        """Return the number of samples that a client's local training processes, each pass counted.

        Args:
            size: the client's number of training samples.
            work: the result of `work`.
            client: the client's id.
        """
        batch_size = work.batch_size
        if self.local_steps is not None:
            return self.local_steps * self.accumulate_grad_batches * min(batch_size, size)
        batches = ceil(size / batch_size)
        # a share is rounded down, as in the order of an epoch
        limit = self.limit_train_batches
        limit = int(limit) if is_count(limit) else max(1, int(limit * batches))
        # a fraction of an epoch's steps is rounded down, as in training
        extent, used = work.extent(Phase(), client), min(limit, batches)
        each, epoch = ceil(used / self.accumulate_grad_batches), min(size, limit * batch_size)
        if (most := extent.most_steps(each)) is None:
            return int(extent.epochs or 1) * epoch
        whole, rest = divmod(most, each)
        return whole * epoch + min(rest * self.accumulate_grad_batches * batch_size, epoch)

    def evaluation_size(self, num_clients: int) -> int:
        """Return the number of clients that each round evaluates."""
        return number_of(self.evaluate_clients, num_clients)

    def sampling(self, num_clients: int) -> Sampling | None:
        """Return the cohorts' sampling scheme for privacy accounting; None if the selection's class states none."""
        cohort = self.cohort
        return cohort.sampling(self.cohort_size(num_clients), num_clients) if cohort.states_sampling else None

    def work(self, data: FederatedDataModule) -> LocalWork:
        """Return the settings of a client's local training, without privacy and device, which `engines` adds.

        Raises:
            MisconfigurationException: if a setting by client names no client, or a list has another length.
        """
        epochs = self.local_epochs if isinstance(self.local_epochs, (int, float)) else 1
        # 2.0 is 2, also where epochs are counted
        epochs = int(epochs) if epochs == int(epochs) else epochs
        # Lightning takes gradient_clip_val=0 as no clipping.
        clip = self.gradient_clip_val or None
        size, last = data.batch_size, data.last_batch
        return LocalWork(
            epochs,
            self.local_steps,
            size,
            last,
            clip,
            self.gradient_clip_algorithm,
            accumulate=self.accumulate_grad_batches,
            limit=self.limit_train_batches,
            own_epochs=by_client("local_epochs", self.local_epochs, data),
            rates=by_client("lr_factors", self.lr_factors, data),
        )

    def engines(
        self,
        modules: Sequence[ClientModule],
        data: FederatedDataModule,
        trainer: Trainer,
        sums: Literal["samples", "uniform"] | None = None,
    ) -> list[Engine]:
        """Return an engine per client module; with several ranks, for a rank's share of the clients.

        Args:
            modules: the client modules, on their device.
            data: the clients' data.
            trainer: the Trainer, for precision and ranks.
            sums: the clients' weights where the server needs sums over clients alone, of which ranks then send theirs.

        Raises:
            MisconfigurationException: if precision, privacy and the states' storage don't go together.
        """
        precision, engine, ranks = trainer.precision_plugin, self.engine_class, trainer.world_size
        stays = stay_on_device(self.client_states, modules, data.num_clients, ranks)
        work = replace(self.work(data), keeps_on_device=stays)
        for stage in self.stages.values():
            work = stage.work(work, modules, data, trainer)
        if isinstance(engine, type):
            engines = [engine(module, work, precision, self.workers, self.compile) for module in modules]
            say_who_loses(engines)
        else:
            # A deployment's engine serves all architectures at once, so a function makes the engines.
            engines = list(engine(modules, work, precision))
        if ranks > 1 and self.client_states == "device":
            raise MisconfigurationException(
                f"trainer.client_states='device' leaves clients on the device where they trained, and of "
                f"trainer.devices={ranks} it is another one in each round; take client_states='memory'."
            )
        if ranks == 1:
            return engines
        own = self.client_states == "rank"
        return [Sharded(engine, trainer.global_rank, ranks, own, sums if own else None) for engine in engines]

    @property
    def splits_after(self) -> tuple[Split, ...]:
        """The splits to evaluate a client's model on after training: both, as metrics are kept for later rounds."""
        return () if self.evaluate == "before" else ("val", "test")

    @property
    def validation_splits(self) -> tuple[Split, ...]:
        """The splits to evaluate in each round."""
        return ("val", "test") if self.test_every_round else ("val",)

    def check(self, client: ClientModule, data: FederatedDataModule) -> None:
        """Refuse settings in conflict with the data or the net, before the first round.

        Args:
            client: a client module.
            data: the clients' data.

        Raises:
            MisconfigurationException: if a setting doesn't fit.
        """
        for name in ("clients_per_round", "evaluate_clients"):
            if number_of(part := getattr(self, name), data.num_clients) > data.num_clients:
                raise MisconfigurationException(
                    f"trainer.{name}={part} is more than data.num_clients={data.num_clients}; take at most that many, "
                    "or a fraction such as 0.5."
                )
        # refuses names of no client
        self.work(data)
        size = self.cohort_size(data.num_clients)
        self.cohort.check(self.clients_per_round, size, data.num_clients)
        engine = self.engine_class
        if not data.resident and isinstance(engine, type) and issubclass(engine, Vectorised):
            raise MisconfigurationException(
                "data.resident=false reads clients a batch at a time, and trainer.engine='vectorised' stacks all that "
                "they have; take sequential or processes."
            )
        for stage in self.stages.values():
            stage.check_size(size, data.num_clients)
            stage.check_data(client, data)
        if self.min_clients > self.updates(data.num_clients):
            raise MisconfigurationException(
                f"trainer.min_clients={self.min_clients} is more than the {self.updates(data.num_clients)} clients "
                "that take part in a round; take at most that many."
            )
        if data.batch_size < smallest_batch(client):
            raise MisconfigurationException(
                f"data.batch_size={data.batch_size} gives BatchNorm nothing to normalise over; take at least 2."
            )


def is_part(value: Any) -> bool:
    """Return whether a value is a number from 1 up, or a fraction above 0.0 and up to 1.0."""
    return is_count(value) or (isinstance(value, float) and 0 < value <= 1)


def is_above_zero(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf


def numbers_in(value: Any) -> list[Any]:
    """Return the numbers of a setting by client, or the one of all; at least one entry.

    >>> numbers_in({"Bremen": 2, "Ulm": 0.5}), numbers_in(3), numbers_in([])
    ([2, 0.5], [3], [None])

    Args:
        value: a number, a mapping or a list.
    """
    if isinstance(value, (Mapping, list)):
        return list(value.values() if isinstance(value, Mapping) else value) or [None]
    return [value]


def by_client(name: str, value: Any, data: FederatedDataModule) -> dict[int, float]:
    """Return the numbers of a setting by client's id; empty for a number for all.

    Args:
        name: the setting, for messages.
        value: the setting's value.
        data: the clients' data.

    Raises:
        MisconfigurationException: if a name is of no client, or a list has another length than there are clients.
    """
    if isinstance(value, list):
        if len(value) != data.num_clients:
            raise MisconfigurationException(
                f"trainer.{name}={value} has {len(value)} numbers for {data.num_clients} clients; give one for each, "
                "or a mapping from some clients' names or ids."
            )
        return dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {}
    try:
        return {data.client_id(client): number for client, number in value.items()}
    except MisconfigurationException as error:
        raise MisconfigurationException(f"trainer.{name}={dict(value)}: {error}") from None


def is_count_or_none(value: Any) -> bool:
    """Return whether a value is a number from 1 up, or None."""
    return value is None or is_count(value)


def number_of(part: int | float, num_clients: int) -> int:
    """Return a number of clients, given as a number or as a fraction of all, of which at least one is taken.

    >>> number_of(0.1, 25), number_of(3, 25)
    (2, 3)

    Args:
        part: an integer, or a fraction above 0.0 and up to 1.0.
        num_clients: number of all clients.
    """
    return part if isinstance(part, int) else max(1, round(part * num_clients))


def stay_on_device(where: str, modules: Sequence[ClientModule], clients: int, ranks: int) -> bool:
    """Return True if clients' states stay on the device where clients train.

    Args:
        where: the setting ``trainer.client_states``; for ``auto`` a line reports the choice and the reason.
        modules: the client modules, on their device.
        clients: the number of clients.
        ranks: the number of devices that train clients; with several, a client moves between devices from round to
            round.
    """
    device = modules[0].device
    if where != "auto" or device.type == "cpu" or ranks > 1:
        return where == "device"
    # With several architectures the largest counts for all clients.
    need, free = clients * max(map(bytes_of, modules)), free_memory(device)
    stays = need <= ROOM * free
    rank_zero_info(
        f"trainer.client_states='auto' keeps clients {f'on {device.type}' if stays else 'in memory'}: there they take "
        f"{need / 2**30:.2f} GiB, and on {device.type} {free / 2**30:.2f} GiB are free."
    )
    return stays


def bytes_of(module: ClientModule) -> int:
    """Return an upper bound of a client's state in bytes.

    The bound is the personal entries, plus two tensors per parameter (as Adam keeps) if optimizers last the whole run.
    """
    optimizers = 2 * num_bytes(list(module.parameters())) if module.optimizer_lifetime == "run" else 0
    return num_bytes(personal_entries(module, module.state_dict())) + optimizers


def say_who_loses(engines: Iterable[Engine]) -> None:
    """Log a line naming the nets slowed down by mixed precision on a CPU; GPUs weren't measured.

    Args:
        engines: the engines, with modules and precision.
    """
    losing = [engine for engine in engines if loses(engine)]
    if losing:
        nets = ", ".join(sorted({type(engine.module.net).__name__ for engine in losing}))
        precision = losing[0].precision.precision
        rank_zero_info(
            f"trainer.precision={precision!r}: on this CPU {nets} should train faster with '32-true', as casts take "
            "longer than what they save."
        )


def loses(engine: Engine) -> bool:
    """Return True if an engine's steps should be faster without mixed precision.

    Args:
        engine: the engine, with module and precision.
    """
    if not isinstance(engine.precision, MixedPrecision) or engine.module.device.type != "cpu":
        return False
    # Batched matrix products of the vectorised engine gain nothing from bfloat16 at any size.
    return type(engine) is Vectorised or sum(p.numel() for p in engine.module.parameters()) <= SMALL
