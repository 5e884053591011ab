"""Let new clients join a trained federation: receive from the server, train locally, and test before and after.

The server aggregates no update of new clients, and the federation's state doesn't change.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.joined_clients import IDENTITY, JOINED, KeptModels, is_same, read
from pfl_lightning.data import FederatedDataModule, Split
from pfl_lightning.data.client_names import client_id
from pfl_lightning.data.description import described
from pfl_lightning.engines import ClientMetrics, ClientState, Job, Outcome
from pfl_lightning.engines.client_metrics import by_client
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.checkpoint import storable
from pfl_lightning.federation.evaluation import Metrics
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.prediction import kept_model
from pfl_lightning.messages import Message, detached, is_finite
from pfl_lightning.runs.checkpoint_io import save
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.report import write_rows
from pfl_lightning.runs.tables import text_table
from pfl_lightning.runs.whole_files import replacing
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import is_count

SPLITS: dict[Split, str] = {"test": "new", "val": "new_val"}
"""Splits that new clients are evaluated on, with the prefix of their metrics' names."""

SHOWN = 20
"""Largest number of new clients that are printed one by one."""


@dataclass(frozen=True)
class Joined:
    """The results of new clients.

    Args:
        metrics: summaries over new clients: test metrics as ``new_received/METRIC`` before and ``new/METRIC`` after
            their local training, validation metrics as ``new_val_received/METRIC`` and ``new_val/METRIC``.
        clients: each new client's test metrics, by id.
        models: each new client's trained model, by name, or by id in digits where clients have no names; empty unless
            kept.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[int, dict[str, float]] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)


def join(
    federation: Federation,
    epochs: int | None = None,
    rounds: int = 1,
    names: Sequence[str] | str | None = None,
    keeps_models: bool = False,
) -> Joined:
    """Let every new client receive, train and be tested, independently of the other new clients.

    In each round a client receives the server's payload, runs the method's local training and builds its update; its
    personal state stays with it until the next round. For a method without personal state every round starts from the
    same received model, so use ``epochs`` rather than ``rounds``. The learning rate is that of the round after the
    last.

    Args:
        federation: a trained federation, on its device.
        epochs: passes over a client's samples in each phase; None takes the method's own number.
        rounds: rounds of receiving and training, at least 1.
        names: names of the new clients that join, or a single one; None takes all.
        keeps_models: whether the result has the trained models.

    Raises:
        MisconfigurationException: before any training, if there are no new clients, if a name is of no new client, if
            the server has no payload for them, or if a number is less than 1.
    """
    for name, value in (("epochs", epochs), ("rounds", rounds)):
        if value is not None and not is_count(value):
            raise MisconfigurationException(f"{name}={value} must be at least 1.")
    newcomers = joining_clients(federation.data, names)
    payloads = {client: federation.welcome(client) for client in newcomers}
    initial = {client: ClientState(federation.initial[federation.architecture_of(client)]) for client in newcomers}
    with isolate_rng(), torch.inference_mode(False), torch.enable_grad():
        # Such a server builds a new client's payload from an update of the same client, so new clients first train once
        # for that alone.
        if federation.aggregator.meets_newcomers:
            payloads = answers(federation, local_work(federation, payloads, initial, "meet"))
        evaluated = federation.evaluations.measure(
            newcomers,
            tuple(SPLITS),
            lambda client, splits: job_of(federation, client, initial[client], payloads[client], "join", 0, splits),
        )
        states = initial
        # Only the joining itself uses joining_phases; the evaluation above runs with the method's own phases.
        with joining_phases(federation, epochs):
            for round in range(rounds - 1):
                outcomes = local_work(federation, payloads, states, "join", round)
                states = {client: outcome.state for client, outcome in outcomes.items()}
                payloads = answers(federation, outcomes)
            with whole_states(federation) if keeps_models else nullcontext():
                outcomes = local_work(federation, payloads, states, "join", rounds - 1)
    if diverged := [c for c, outcome in outcomes.items() if not (outcome.finite and is_finite(outcome.state.personal))]:
        clients = ", ".join(map(federation.data.client_label, diverged))
        rank_zero_warn(f"the loss or the weights of new clients {clients} became NaN or infinite")
    # Joining phases make the whole personal model, so an adaptation before evaluation would count twice.
    whole = overrides(federation.client, "joining_phases")
    joined = reported(
        federation,
        {client: unadapted(metrics) for client, metrics in by_client(evaluated).items()},
        {client: unadapted(outcome.after) if whole else outcome.after for client, outcome in outcomes.items()},
    )
    if keeps_models:
        jobs = {
            client: job_of(federation, client, states[client], payloads[client], "join", rounds - 1, ())
            for client in outcomes
        }
        joined.models.update(models_of(federation, jobs, outcomes, adapts=not whole))
    return joined


@contextmanager
def whole_states(federation: Federation) -> Iterator[None]:
    """Let all of a client's model stay with the client inside this context, so that outcomes have whole models."""
    modules = [module for module in federation.architectures if isinstance(module, ClientModule)]
    for module in modules:
        # An instance attribute hides the class's method, as in `joining_phases`.
        vars(module)["is_personal"] = lambda name: True
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["is_personal"]


def models_of(
    federation: Federation, jobs: Mapping[int, Job], outcomes: Mapping[int, Outcome], adapts: bool
) -> dict[str, dict[str, Any]]:
    """Return the trained models of new clients, by name.

    Args:
        federation: the federation.
        jobs: the work of each client in its last round, by id.
        outcomes: the results of this work, with whole states.
        adapts: whether the method adapts a trained model once more before an evaluation.
    """
    data = federation.data
    # One copy for all clients, as many servers send everyone the same tensors.
    payloads = deepcopy({client: job.payload for client, job in jobs.items()})
    inputs = {type(data).__qualname__: data.state_dict()}
    models = {}
    for client, job in jobs.items():
        local = data.client_name(client)
        whole = ClientState(detached(outcomes[client].state.personal), is_trained=True)
        job = job._replace(payload=payloads[client], state=whole)
        architecture = federation.architecture_of(client)
        models[str(local)] = kept_model(job, architecture, local, inputs, adapts)
    return cast(dict[str, dict[str, Any]], storable(models, "the model of a new client", settings=True))


def joining_clients(data: FederatedDataModule, names: Sequence[str] | str | None) -> list[int]:
    """Return the ids of the new clients that join.

    Args:
        data: the data module, paired with the federation.
        names: names of the clients, or a single one; None takes all new clients.

    Raises:
        MisconfigurationException: if there are no new clients, or a name is of no new client.
    """
    if names is not None:
        named = [names] if isinstance(names, str) else list(names)
        chosen = sorted({client_id(name, data.client_names, data.newcomers.stop, "names") for name in named})
        if trained := [data.client_label(client) for client in chosen if client not in data.newcomers]:
            raise MisconfigurationException(
                f"names: client {', '.join(trained)} has trained in the federation, so it isn't new; leave it out, or "
                "test it by trainer.test."
            )
        if chosen:
            return chosen
    if not data.newcomers and data.client_names:
        raise MisconfigurationException(
            f"data.new_clients={data.new_clients} leaves nobody to join: all {data.num_clients} clients of data "
            "have trained; take data with a client of another name, or set data.new_clients before training."
        )
    if not data.newcomers or names is not None:
        given = f"data.new_clients={data.new_clients}" if names is None else f"names={names}"
        raise MisconfigurationException(
            f"{given} leaves nobody to join; before training set data.new_clients to a number of clients or a share "
            "such as 0.2, or take data with clients of unknown names."
        )
    return list(data.newcomers)


def print_joined(joined: Joined, data: FederatedDataModule, metric: str) -> None:
    """Print the test figures of new clients as a table; warn if there are none.

    Args:
        joined: the new clients' metrics.
        data: the data module.
        metric: the monitored metric, of which each client has a line.
    """
    whens = ("new_received", "new")

    def figures(metrics: Mapping[str, float], name: str) -> list[str]:
        # A NaN metric of the joined model adds a column with the number of clients that have a value, which the
        # received model lacks.
        return [f"{metrics.get(f'{when}/{name}', math.nan):.4g}" for when in whens]

    names = [name.removeprefix("new/") for name in joined.metrics if name.startswith("new/")]
    if not names:
        whose = ", ".join(map(data.client_label, joined.clients))
        rank_zero_warn(
            f"data.test_fraction={data.test_fraction} leaves new clients {whose} without test samples, so nothing "
            "tells how they fare; give them some."
        )
        return
    cells = [[name, *figures(joined.metrics, name)] for name in names]
    rank_zero_only(print)(text_table([["new clients, test", "received", "joined"], *cells]))
    # A client's name tells more than its id; the numbers of many clients are in the file.
    if data.client_names and len(joined.clients) <= SHOWN:
        rows = [[data.client_label(client), *figures(own, metric)] for client, own in joined.clients.items()]
        rank_zero_only(print)(text_table([[f"client, test {metric}", "received", "joined"], *rows]))


def joined_row(
    federation: Federation, epochs: int | None, rounds: int, names: Sequence[str] | str | None = None
) -> dict[str, float]:
    """Let new clients join, log their metrics, print a table, write ``clients.csv``, and return the metrics.

    Args:
        federation: a trained federation, on its device.
        epochs: passes over a client's samples in each phase; None takes the method's own number.
        rounds: rounds of receiving and training, at least 1.
        names: names of the new clients that join, or a single one; None takes all.
    """
    joined = join(federation, epochs, rounds, names, keeps_models=True)
    keep_models(federation, joined.models)
    metrics, data, metric = joined.metrics, federation.data, federation.monitor.metric
    for logger in federation.trainer.loggers:
        logger.log_metrics(metrics, step=federation.round)
        logger.save()
    print_joined(joined, data, metric)
    if folder := run_folder(federation.trainer):
        folder.mkdir(parents=True, exist_ok=True)
        rows = described(data, joined.clients)
        write_rows(folder / "clients.csv", [row | joined.clients[row["client"]] for row in rows])
    return metrics


def keep_models(federation: Federation, models: Mapping[str, dict[str, Any]]) -> None:
    """Keep the trained models of new clients for predictions: in memory, and in a file beside the checkpoint.

    Args:
        federation: the federation that they have joined.
        models: the result of `models_of`.
    """
    federation.joined |= models
    trainer = federation.trainer
    if (run := run_folder(trainer)) is None:
        return
    checkpoint = Path(trainer.ckpt_path or run / "checkpoints" / "last.ckpt")
    # The address of a remote store is no folder here.
    if checkpoint.parent.is_dir() and (reason := keep_joined(checkpoint, federation.identity, models)):
        rank_zero_warn(f"the new clients' models are in memory alone: {reason}.")


def keep_joined(checkpoint: Path | str, federation: Mapping[str, Any], models: KeptModels) -> str:
    """Write models beside a checkpoint, with the models of clients that joined before; return why not, or "".

    Args:
        checkpoint: a checkpoint of the federation, which may be missing.
        federation: the federation, as `joined_models` takes it.
        models: plain values and tensors.
    """
    file = Path(checkpoint).with_name(JOINED)
    own = {name: federation.get(name) for name in IDENTITY}
    try:
        earlier = read(file)
        if earlier and not is_same(earlier["federation"], own):
            return f"{file} is of another federation; move the checkpoint into a folder of its own"
        with replacing(file) as partial:
            save({"federation": own, "joined": {**earlier.get("joined", {}), **models}}, partial)
    except (OSError, MisconfigurationException) as error:
        return f"{file}: {error.strerror}" if isinstance(error, OSError) else str(error).removesuffix(".")
    return ""


def local_work(
    federation: Federation,
    payloads: Mapping[int, Message],
    states: Mapping[int, ClientState],
    purpose: str,
    round: int = 0,
) -> dict[int, Outcome]:
    """Train the new clients for one round; return their outcomes by id.

    Args:
        federation: the federation that runs the clients.
        payloads: the server's payload by client.
        states: each client's state.
        purpose: ``meet`` or ``join``, which separates the random streams of the two.
        round: rounds of joining done before.
    """
    return {
        outcome.client: outcome
        for engine, own in federation.engines_of(list(payloads))
        for outcome in engine.complete(
            "training",
            (
                job_of(federation, client, states[client], payloads[client], purpose, round, tuple(SPLITS))
                for client in own
            ),
        )
    }


def job_of(
    federation: Federation,
    client: int,
    state: ClientState,
    payload: Message,
    purpose: str,
    round: int,
    splits: tuple[Split, ...],
) -> Job:
    """Return a new client's job.

    Args:
        federation: the federation that runs the client.
        client: the client's id.
        state: the client's state.
        payload: the server's payload.
        purpose: ``meet`` or ``join``, which separates the random streams of the two.
        round: rounds of joining done before.
        splits: the splits to evaluate on.
    """
    round += federation.round
    seed = derive_seed(int(federation.seed or 0), purpose, round, client)
    return Job(client, round, state, payload, federation.data.client(client), seed, federation.lr_factor, splits)


def answers(federation: Federation, outcomes: Mapping[int, Outcome]) -> dict[int, Message]:
    """Return the server's next payloads for new clients after an update from each, by id."""
    return {client: federation.welcome(client, outcomes[client].update) for client in sorted(outcomes)}


@contextmanager
def joining_phases(federation: Federation, epochs: int | None) -> Iterator[None]:
    """Replace ``local_phases`` of the client modules by `ClientModule.joining_phases` inside this context."""
    modules = [module for module in federation.architectures if isinstance(module, ClientModule)]
    for module in modules:
        # An instance attribute hides the class's method for the duration of the context.
        vars(module)["local_phases"] = phases_of(module, epochs)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["local_phases"]


def phases_of(module: ClientModule, epochs: int | None) -> Callable[[], list[Phase]]:
    """Return a function to use as ``local_phases``, which returns the joining phases with ``epochs`` passes."""

    def phases() -> list[Phase]:
        # The default joining_phases calls local_phases, so the hook steps aside meanwhile; else the two would call each
        # other forever.
        hook = vars(module).pop("local_phases")
        try:
            joining = module.joining_phases()
        finally:
            vars(module)["local_phases"] = hook
        if epochs is None:
            return joining
        # A phase with its own data, such as a public set, isn't a pass over the client's samples.
        return [phase if phase.data is not None else replace(phase, epochs=epochs, steps=None) for phase in joining]

    return phases


def unadapted(metrics: Metrics) -> Metrics:
    """Return metrics of the models before an evaluation's own adaptation.

    >>> unadapted({"test": {"acc": 0.9}, "test_received": {"acc": 0.5}, "val": {"acc": 0.7}})
    {'test': {'acc': 0.5}, 'val': {'acc': 0.7}}
    """
    return {split: metrics.get(f"{split}_received", metrics[split]) for split in SPLITS if split in metrics}


def reported(federation: Federation, received: Mapping[int, Metrics], joined: Mapping[int, Metrics]) -> Joined:
    """Return the metrics of new clients under their final names, summarised and per client."""
    metrics: dict[str, float] = {}
    clients: dict[int, dict[str, float]] = {client: {} for client in sorted(joined)}
    for split, name in SPLITS.items():
        for column, results in ((f"{name}_received", received), (name, joined)):
            measured = {client: results[client][split] for client in clients if split in results[client]}
            summary = federation.evaluations.summary_of(split, ClientMetrics.of(measured))
            metrics |= {value.replace(split, column, 1): summary[value] for value in summary}
            if split == "test":
                for client, values in measured.items():
                    clients[client] |= {f"{column}/{metric}": value for metric, value in own_values(values).items()}
    return Joined(metrics, clients)
