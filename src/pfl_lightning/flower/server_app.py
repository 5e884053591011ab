"""The server's side of a deployment: `FederatedTrainer.fit` with an engine for clients at sites."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from flwr.serverapp import Grid
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from pfl_lightning.callbacks import ChannelsLast, FederatedCallback, MatmulPrecision
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.data.description import fingerprint
from pfl_lightning.data.files import saved_by_torch
from pfl_lightning.data.record_columns import in_rows
from pfl_lightning.engines import Engine, LocalWork
from pfl_lightning.federation.federation import Federation
from pfl_lightning.flower.client_app import guards
from pfl_lightning.flower.first_exchange import FirstExchange, check_kinds
from pfl_lightning.flower.greeting import settings_told
from pfl_lightning.flower.link import Keys, Link, Quorum, initial_of
from pfl_lightning.flower.progress import Progress
from pfl_lightning.flower.remote import Remote
from pfl_lightning.flower.remote_data import remote_data
from pfl_lightning.flower.sums import Summing
from pfl_lightning.privacy.dp_sgd import learns_without_noise
from pfl_lightning.selection.availability import Availability
from pfl_lightning.server import Aggregator
from pfl_lightning.server.aggregator_list import parts_of
from pfl_lightning.settings import is_count
from pfl_lightning.trainer import FederatedTrainer


class States(FederatedCallback):
    """Track the client states at sites to keep: the states of this run and of the run's checkpoints.

    Before the first round the callback also has the engine work out templates of updates. In each round it lets sites
    join, waits until there are enough, and adds the engine's measurements, such as bytes and seconds, to the record.

    Args:
        link: the connection to the sites.
        patience: seconds in a round for enough clients to have a site.
        together: whether validations go with the next round's training.
    """

    def __init__(self, link: Link, patience: float, together: bool = False) -> None:
        self._link, self._patience, self._together = link, patience, together
        self._federation: Federation | None = None
        self._warned: set[int] = set()
        self._folders: set[Path] = set()
        self._saved: dict[Path, tuple[int, dict[int, str]]] = {}
        self._run_name = secrets.token_hex(8)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's name under secure sums, by which sites know a round that comes again after resuming."""
        federation = self._federation
        summed = federation is not None and federation.options.secure_sum is not None
        return {"run_name": self._run_name} if summed else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the name of a resumed run."""
        self._run_name = state_dict["run_name"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the federation and the checkpoint folders, and work out a template of each architecture's update."""
        federation = self._federation = cast(Federation, pl_module)
        # a user's own checkpoint callback may have no folder
        callbacks = cast(list[Any], trainer.checkpoint_callbacks)
        self._folders = {Path(callback.dirpath) for callback in callbacks if getattr(callback, "dirpath", None)}
        # clients may have joined an earlier part of the run
        self._link.cohort = federation.options.cohort_size(federation.data.num_clients)
        # a client without a site so far may have had one before the run was resumed
        self._link.expected = {client: size for client, size in enumerate(federation.trained["sizes"]) if size}
        self._keep_on_disk(federation)
        self._engine.run_name = self._run_name
        # a method without a template fails here, before any site has worked
        for client in range(min(len(federation.architectures), federation.data.num_clients)):
            self._engine.look(federation.job(client))

    def _keep_on_disk(self, federation: Federation) -> None:
        """Put the nets, the initial model and the server's state into files if they are large, mapped into memory.

        A server reads them and trains in none, so that its memory is free for messages.
        """
        client = federation.client
        modules = [*federation.architectures, *(net for net in client.nets if isinstance(net, nn.Module))]
        for module in modules:
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            stored = self._engine.stored({name: tensor.data for name, tensor in held.items()})
            for name, tensor in held.items():
                tensor.data = stored[name]
        federation.keep_models(self._engine.stored)

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: Mapping[str, float]) -> None:
        """Put the server's new state into a file if it is large."""
        federation.aggregator.state = self._engine.stored(federation.aggregator.state)

    @property
    def _engine(self) -> Remote:
        return cast(Remote, cast(Federation, self._federation).engines[0])

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let sites join before the round's cohort is drawn, and wait until there are enough for the round."""
        federation = cast(Federation, pl_module)
        before = federation.data.num_clients
        self._take_in(federation)
        self._link.wait(self._patience, federation.options.min_clients, f"round {federation.round + 1}")
        self._take_in(federation)
        self._engine.joined = range(before, federation.data.num_clients)
        sizes = federation.sizes(range(federation.data.num_clients), "train")
        # those of lost sites stay known
        known = federation.trained["sizes"]
        if any(size and size != known[client] for client, size in sizes.items()):
            federation.options.cohort.sizes = sizes
            federation.trained["sizes"] = [sizes[client] or size for client, size in enumerate(known)]
            federation.trained["partition"] = fingerprint(federation.data)
        if any("num_samples" in part.needs for part in parts_of(federation.aggregator)):
            self._warn_of_weight(sizes, federation.aggregator.name)

    def _warn_of_weight(self, sizes: Mapping[int, int], aggregator: str) -> None:
        """Warn, once per client, of a claimed number of samples that outweighs all others.

        Args:
            sizes: claimed numbers of training samples by client; 0 of those without a site.
            aggregator: the name of the server side that weighs by them.
        """
        client = outweighing(sizes)
        if client is None or client in self._warned or client in self._link.bounded:
            return
        self._warned.add(client)
        total = sum(sizes.values())
        rank_zero_warn(
            f"client {self._link.label(client)} claims {sizes[client]} of all {total} training samples, a share of "
            f"{sizes[client] / total:.3f}, which nothing proves, and {aggregator} weighs updates by such claims; give "
            "keys with max-samples, or take weighting=uniform."
        )

    def _take_in(self, federation: Federation) -> None:
        """Give newcomers their ids."""
        if new := self._link.newcomers():
            federation.grow(new)
            self._link.cohort = federation.options.cohort_size(federation.data.num_clients)
        self._link.admit()

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Begin the measurements of a round."""
        self._engine.begin_round()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the validation go with the next round's training, if there is a next round."""
        federation = cast(Federation, pl_module)
        goes_on = 0 < federation.round < (trainer.max_epochs or 0) and not trainer.should_stop
        # metrics after training come with the training anyway
        if self._together and goes_on and federation.options.evaluate != "after":
            self._engine.coming = federation.coming

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the engine's measurements of a round to the round's metrics, before loggers write the row."""
        self._engine.coming = None
        cast(Federation, pl_module).metrics |= self._engine.taken

    # rounds without an evaluation have no validation
    on_train_epoch_end = on_validation_end

    def live(self) -> Mapping[int, set[str]]:
        """Return the names of all states to keep, by client."""
        names: dict[int, set[str]] = {}
        federation = cast(Federation, self._federation)
        for client, state in federation.clients.items():
            names.setdefault(client, set()).add(state.kept or "")
        # a run resumed from any of these checkpoints asks sites for the states of that time
        for path in [path for folder in self._folders for path in folder.glob("*.ckpt")]:
            for client, name in self._names_in(path).items():
                names.setdefault(client, set()).add(name)
        return {client: own - {""} for client, own in names.items()}

    def _names_in(self, path: Path) -> dict[int, str]:
        """Return the names of states in a checkpoint, by client; read a file once after each change."""
        written = path.stat().st_mtime_ns
        if self._saved.get(path, (0, {}))[0] != written:
            # mapped into memory, as only names are read and weights are large
            clients = in_rows(saved_by_torch(path, "cpu", mapped=True)["federation"]["clients"])
            self._saved[path] = written, {client: state.get("kept") or "" for client, state in clients.items()}
        return self._saved[path][1]


def serve(
    grid: Grid,
    trainer: FederatedTrainer,
    client: ClientModule,
    data: FederatedDataModule,
    aggregator: Aggregator | None = None,
    ckpt_path: str | None = None,
    keys: Keys | Callable[[], Keys] | None = None,
    timeout: float = 600.0,
    patience: float = 600.0,
    max_norm: float | None = None,
    poll: float = 0.2,
    names: Sequence[str] = (),
    quorum: Quorum | None = None,
    status: Path | None = None,
    max_clients: int = 0,
    together: bool = False,
    first_exchange: Sequence[str] = (),
) -> Federation:
    """Train a federation of clients at sites.

    Args:
        grid: Flower's connection to the sites.
        trainer: the settings of rounds; an engine for sites replaces the trainer's own.
        client: the client module.
        data: the data module, not set up; the server needs the number of clients, the task and the shape of inputs.
        aggregator: the server side; None takes the client module's own.
        ckpt_path: as for `FederatedTrainer.fit`.
        keys: for each public key of a node, the allowed client ids, or names of clients that may join, and the largest
            number of samples per split; a function is called for each greeting. None lets any registered node have any
            client without a site.
        timeout: seconds to wait for sites in each phase of a round, above 0.
        patience: seconds for enough clients to get a site, at the start and in a round that has fewer than
            ``trainer.min_clients``.
        max_norm: largest Euclidean norm of an update minus the payload, above 0; None refuses none, and warns of an
            update far above the round's median.
        poll: seconds between two looks for answers.
        names: names of the clients by id, by which the record and checkpoints know them; empty for ids alone.
        quorum: the clients that a start and a phase wait for; None takes the defaults of `Quorum`.
        status: file for the state of sites and rounds, which ``pfl-lightning status`` shows; None writes none.
        max_clients: largest number of clients, up to which sites with further names may join while the federation runs;
            0 is the data's number.
        together: whether sites evaluate a round's model as they get it for the next round's training, by one message a
            round in place of two.
        first_exchange: what sites tell of their tables before the first round: ``classes``, ``categories``, ``scales``.

    Returns:
        The federation after its last round.

    Raises:
        MisconfigurationException: if settings or data can't be deployed, or a client has no site in time.
    """
    refuse_what_acts_here_alone(trainer)
    private = trainer.rounds.example_privacy and trainer.rounds.example_privacy.deployed()
    if private is not None and learns_without_noise(client):
        rank_zero_info(
            f"trainer.example_privacy: own models of {type(client).__name__}'s clients learn without noise, so that "
            "sites tell no metrics of them, and the record has none."
        )
    local = trainer.rounds.local_privacy and trainer.rounds.local_privacy.deployed()
    if local and trainer.limit_val_batches:
        raise MisconfigurationException(
            f"trainer.limit_val_batches={trainer.limit_val_batches:g} asks sites for metrics, and under "
            "trainer.local_privacy they send none; take 0, and data.central_test for samples of the server's own."
        )
    if max_norm is not None and trainer.rounds.secure_sum is not None:
        raise MisconfigurationException(
            f"max-norm={max_norm:g} looks at single updates, which trainer.secure_sum hides; leave it out, and set "
            "trainer.secure_sum.range, to which sites hold their own updates."
        )
    # making the further nets of a list must leave the run's random numbers as they are
    with isolate_rng():
        modules = client.architectures()
    initial = initial_of(modules)
    quorum = quorum or Quorum()
    check_quorum(quorum, trainer, client, aggregator, data.num_clients)
    if together:
        check_together(trainer, client, aggregator, quorum)
    if max_clients:
        check_joining(max_clients, trainer, client, aggregator, data.num_clients, names)
    first = None
    if first_exchange:
        check_exchange(first_exchange, trainer, client, aggregator, data)
        classes = data.task.outputs if data.task.has_classes else None
        first = FirstExchange(first_exchange, quorum.min_available or data.num_clients, classes, ckpt_path is not None)
    cohort = trainer.rounds.cohort_size(data.num_clients)
    keys_now = keys if keys is None or callable(keys) else lambda: keys
    trainer.rounds = replace(trainer.rounds, example_privacy=private, local_privacy=local)
    server = aggregator or client.configure_aggregator()
    settings = settings_told(trainer, modules, server, data)
    link = Link(
        grid, data.num_clients, initial, keys_now, timeout, poll, names, quorum, cohort, max_clients, first, settings
    )
    link.takes_late = not (together or private or local or server.guarantee or trainer.rounds.secure_sum is not None)
    # `wait` fills the sizes in, in the same dict
    data = remote_data(data, link.sizes, link.names, max_clients)
    progress, states = Progress(link, status, ckpt_path), States(link, patience, together)

    def engines(modules: Sequence[ClientModule], work: LocalWork, precision: Precision) -> list[Engine]:
        federation = cast(Federation, trainer.lightning_module)
        compression, summing = trainer.rounds.compression, summing_of(federation)
        root = trainer.default_root_dir
        engine = Remote(
            modules,
            work,
            precision,
            link,
            federation.architecture_of,
            states.live,
            max_norm,
            compression,
            summing,
            # files elsewhere, such as s3://, can't be mapped
            None if "://" in root else Path(root),
        )
        return [engine for _ in modules]

    trainer.rounds = replace(trainer.rounds, engine=engines, compile=False)
    # before other callbacks, which may read the round's metrics
    trainer.callbacks[:0] = [states, progress]  # type: ignore[attr-defined]
    with progress.ending():
        link.wait(patience)
        trainer.fit(client, datamodule=data, aggregator=aggregator, ckpt_path=ckpt_path)
    return cast(Federation, trainer.lightning_module)


def outweighing(sizes: Mapping[int, int]) -> int | None:
    """Return the client with more than half of all samples, or of two clients with more than three quarters.

    Beyond half, a mean by samples is nearer to this client's model than to that of all others; of two clients one has
    half or more anyway.

    >>> outweighing({0: 90, 1: 20, 2: 30}), outweighing({0: 60, 1: 40}), outweighing({0: 60, 1: 0})
    (0, None, None)

    Args:
        sizes: numbers of samples by client.
    """
    total, clients = sum(sizes.values()), sum(size > 0 for size in sizes.values())
    return next((client for client, size in sizes.items() if size > total * max(0.5, 1.5 / max(clients, 1))), None)


def check_quorum(
    quorum: Quorum, trainer: FederatedTrainer, client: ClientModule, aggregator: Aggregator | None, clients: int
) -> None:
    """Refuse a quorum that the method's server side or the guarantee doesn't allow.

    Args:
        quorum: the clients that a start and a phase wait for.
        trainer: the settings of rounds.
        client: the client module.
        aggregator: the server side; None takes the client module's own.
        clients: number of clients in the federation.

    Raises:
        MisconfigurationException: with the setting and what would work.
    """
    server = aggregator or client.configure_aggregator()
    least = quorum.min_available or clients
    if least > clients:
        raise MisconfigurationException(
            f"min-available={least} is more than data.num_clients={clients}; take at most that many."
        )
    if least < clients and (server.fixed_sizes or trainer.rounds.example_privacy is not None):
        reason = "trainer.example_privacy" if not server.fixed_sizes else f"aggregator {server.name}"
        raise MisconfigurationException(
            f"min-available={least} lets clients join after the first round, and {reason} needs all clients' numbers "
            "of samples before; take 0, which is all clients."
        )
    cohort = trainer.rounds.cohort_size(clients)
    share = quorum.min_results / cohort if is_count(quorum.min_results) else quorum.min_results
    # who answers first would push others out of the sum: one client would change it by more than its own bounded update
    if share < 1 and any(part.guarantee for part in parts_of(server)):
        raise MisconfigurationException(
            f"min-results={quorum.min_results} ends a round of {cohort} clients without the slow ones, which the "
            f"guarantee of aggregator {server.name} doesn't cover; take 1.0, which is all."
        )
    rounds = trainer.rounds
    private = server.guarantee or rounds.example_privacy is not None or rounds.local_privacy is not None
    if quorum.late_rounds and (private or trainer.rounds.secure_sum is not None):
        reason = "a guarantee of privacy" if private else "trainer.secure_sum"
        raise MisconfigurationException(
            f"late-rounds={quorum.late_rounds} counts an update in a later round, which {reason} doesn't allow; take 0."
        )


def check_together(
    trainer: FederatedTrainer, client: ClientModule, aggregator: Aggregator | None, quorum: Quorum
) -> None:
    """Refuse evaluations that go with the next round's training where a training ahead would count or cost more.

    Args:
        trainer: the settings of rounds.
        client: the client module.
        aggregator: the server side; None takes the client module's own.
        quorum: the answers that are enough to end a phase.

    Raises:
        MisconfigurationException: with the reason.
    """
    server = aggregator or client.configure_aggregator()
    reasons = {
        "trainer.example_privacy counts each training of a client": trainer.rounds.example_privacy is not None,
        "trainer.local_privacy counts each update of a client": trainer.rounds.local_privacy is not None,
        "trainer.secure_sum trains in steps of its own": trainer.rounds.secure_sum is not None,
        f"the guarantee of aggregator {server.name} counts each training": bool(server.guarantee),
        f"late-rounds={quorum.late_rounds} takes answers of earlier rounds": quorum.late_rounds > 0,
    }
    if reason := next((words for words, holds in reasons.items() if holds), None):
        raise MisconfigurationException(
            f"evaluate-with-training=true has clients train before the round begins, and {reason}; take false."
        )


def check_exchange(
    kinds: Sequence[str],
    trainer: FederatedTrainer,
    client: ClientModule,
    aggregator: Aggregator | None,
    data: FederatedDataModule,
) -> None:
    """Refuse an exchange before the first round under a guarantee, or where the server has samples of its own.

    Args:
        kinds: what is exchanged.
        trainer: the settings of rounds.
        client: the client module.
        aggregator: the server side; None takes the client module's own.
        data: the server's data module.

    Raises:
        MisconfigurationException: with the reason.
    """
    check_kinds(kinds)
    if reason := guards(trainer, aggregator or client.configure_aggregator()):
        raise MisconfigurationException(
            f"first-exchange={' '.join(kinds)!r} tells the server of clients' rows, which {reason} doesn't cover; "
            "leave it empty, and give classes, categories and scales in the configuration."
        )
    if data.public is not None or data.central_test is not None or data.server_fraction > 0:
        raise MisconfigurationException(
            f"first-exchange={' '.join(kinds)!r} is of sites' rows, and the server has samples of its own; give "
            "classes, categories and scales in the configuration."
        )


def check_joining(
    most: int,
    trainer: FederatedTrainer,
    client: ClientModule,
    aggregator: Aggregator | None,
    clients: int,
    names: Sequence[str],
) -> None:
    """Refuse clients that join beyond the number of the settings, where something depends on the number.

    Args:
        most: the largest number of clients.
        trainer: the settings of rounds.
        client: the client module.
        aggregator: the server side; None takes the client module's own.
        clients: number of clients before.
        names: names of the clients by id.

    Raises:
        MisconfigurationException: with the reason.
    """
    server = aggregator or client.configure_aggregator()
    if not is_count(most) or most < clients:
        raise MisconfigurationException(
            f"max-clients={most} must be at least data.num_clients={clients}, or 0, by which nobody joins."
        )
    if not names:
        raise MisconfigurationException(f"max-clients={most} lets clients join by name; give the others names too.")
    reasons = {
        f"aggregator {server.name}": server.fixed_sizes or server.fixed_clients,
        f"trainer.cohort={type(trainer.rounds.cohort).__name__}": isinstance(trainer.rounds.cohort, Availability),
        "model.net, a list of nets,": len(client.architectures()) > 1,
    }
    if reason := guards(trainer, server) or next((name for name, holds in reasons.items() if holds), ""):
        raise MisconfigurationException(
            f"max-clients={most} lets clients join during the run, and {reason} needs to know all clients before the "
            "first round; take 0, and a place in data.num_clients for each client that may come."
        )


def summing_of(federation: Federation) -> Summing | None:
    """Return the settings for secure sums of updates; None for a server with access to single updates."""
    settings, aggregator = federation.options.secure_sum, federation.aggregator
    if settings is None:
        return None
    return Summing(settings, "num_samples" in aggregator.needs, aggregator.noise_share(deployed=True))


def refuse_what_acts_here_alone(trainer: FederatedTrainer) -> None:
    """Refuse settings without an effect on clients at sites: several devices, `ChannelsLast` and `MatmulPrecision`."""
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"trainer.devices={trainer.world_size}: clients train at their sites; take 1 for the server."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (ChannelsLast, MatmulPrecision)):
            raise MisconfigurationException(
                f"trainer.callbacks={type(callback).__name__} acts on the server's own nets, and clients train at "
                "their sites; leave it out."
            )
