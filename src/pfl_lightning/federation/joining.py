"""New clients join a federation that is over: they receive what the server has, do their own local work, and stay new.

Nothing of them is aggregated, and nothing of the federation changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.data import Split
from pfl_lightning.engines import ClientState, Job, Outcome
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.base import FederationBase
from pfl_lightning.federation.evaluation import Metrics
from pfl_lightning.federation.options import is_count
from pfl_lightning.messages import Message, is_finite
from pfl_lightning.runs.tables import text_table
from pfl_lightning.seeds import derive_seed

SPLITS: dict[Split, str] = {"test": "new", "val": "new_val"}
"""The splits that new clients are evaluated on, by what their metrics are called."""


@dataclass(frozen=True)
class Joined:
    """What became of new clients.

    Args:
        metrics: over them, on test ``new_received/METRIC`` of what they received and ``new/METRIC`` of what they made
            of it; on val ``new_val_received/METRIC`` and ``new_val/METRIC``.
        clients: each one's own on test, by id.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[int, dict[str, float]] = field(default_factory=dict)


def join(federation: FederationBase, epochs: int | None = None, rounds: int = 1) -> Joined:
    """Lets all new clients join, each for itself.

    In a round a client receives what the server has for it, and does the method's own local work, with its upload hook;
    what stays with clients stays with it until the next one. Of a method without anything personal several rounds are
    one, as each starts from the same received model: give it ``epochs``. The learning rate is that of the round that
    would follow.

    Args:
        federation: after some rounds, on its device.
        epochs: passes of each phase over a client's own samples, in the place of what the method makes; None is that.
        rounds: how often a client receives and works, at least 1.

    Raises:
        MisconfigurationException: before anybody trains, if there are no new clients, if the server has nothing for
            them, or if a number is less than 1.
    """
    for name, value in (("epochs", epochs), ("rounds", rounds)):
        if value is not None and not is_count(value):
            raise MisconfigurationException(f"{name}={value} must be at least 1.")
    newcomers = federation.data.newcomers
    if not newcomers:
        raise MisconfigurationException(
            f"data.new_clients={federation.data.new_clients} leaves nobody to join; take a number of clients, or a "
            "share such as 0.2, before the federation is trained, or data with names that it doesn't know."
        )
    payloads = {client: federation.welcome(client) for client in newcomers}
    initial = {client: ClientState(federation.initial[federation.architecture_of(client)]) for client in newcomers}
    with isolate_rng(), torch.inference_mode(False), torch.enable_grad():
        if federation.aggregator.meets_newcomers:
            payloads = answers(federation, local_work(federation, payloads, initial, "meet"))
        received = federation.evaluations.measure(
            newcomers,
            tuple(SPLITS),
            lambda client, splits: job_of(federation, client, initial[client], payloads[client], "join", 0, splits),
        )
        states = initial
        with joining_phases(federation, epochs):
            for round in range(rounds):
                outcomes = local_work(federation, payloads, states, "join", round)
                states = {client: outcome.state for client, outcome in outcomes.items()}
                if round + 1 < rounds:
                    payloads = answers(federation, outcomes)
    if diverged := [c for c, outcome in outcomes.items() if not (outcome.finite and is_finite(outcome.state.personal))]:
        rank_zero_warn(f"the loss or the weights of new clients {', '.join(map(str, diverged))} became NaN or infinite")
    whole = overrides(federation.client, "joining_phases")
    return reported(
        federation,
        {client: unadapted(metrics) for client, metrics in received.items()},
        {client: unadapted(outcome.after) if whole else outcome.after for client, outcome in outcomes.items()},
    )


def joined_row(federation: FederationBase, epochs: int | None, rounds: int) -> dict[str, float]:
    """Lets all new clients join; gives their metrics, also to the loggers, and prints a table.

    Args:
        federation: as for `join`.
        epochs: the same.
        rounds: the same.
    """
    metrics = join(federation, epochs, rounds).metrics
    for logger in federation.trainer.loggers:
        logger.log_metrics(metrics, step=federation.round)
        logger.save()
    names = [name.removeprefix("new/") for name in metrics if name.startswith("new/")]
    # a model that became NaN has counts of clients that have a metric, which the received one lacks
    cells = [
        [name, *(f"{metrics.get(f'{when}/{name}', math.nan):.4g}" for when in ("new_received", "new"))]
        for name in names
    ]
    rank_zero_only(print)(text_table([["new clients, test", "received", "joined"], *cells]))
    return metrics


def local_work(
    federation: FederationBase,
    payloads: Mapping[int, Message],
    states: Mapping[int, ClientState],
    purpose: str,
    round: int = 0,
) -> dict[int, Outcome]:
    """A round of the new clients, by id."""
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
    federation: FederationBase,
    client: int,
    state: ClientState,
    payload: Message,
    purpose: str,
    round: int,
    splits: tuple[Split, ...],
) -> Job:
    """A new client's work, in one of the rounds that would follow."""
    round += federation.round
    seed = derive_seed(int(federation.seed or 0), purpose, round, client)
    return Job(client, round, state, payload, federation.data.client(client), seed, federation.lr_factor, splits)


def answers(federation: FederationBase, outcomes: Mapping[int, Outcome]) -> dict[int, Message]:
    """What the server has for new clients who have sent something, by id."""
    return {client: federation.welcome(client, outcomes[client].update) for client in sorted(outcomes)}


@contextmanager
def joining_phases(federation: FederationBase, epochs: int | None) -> Iterator[None]:
    """Lets the client modules go through their `ClientModule.joining_phases` in the place of their local phases."""
    modules = [module for module in federation.architectures if isinstance(module, ClientModule)]
    for module in modules:
        vars(module)["local_phases"] = phases_of(module, epochs)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["local_phases"]


def phases_of(module: ClientModule, epochs: int | None) -> Callable[[], list[Phase]]:
    """A hook in the place of ``local_phases``, which stands aside while it asks for these."""

    def phases() -> list[Phase]:
        hook = vars(module).pop("local_phases")
        try:
            found = module.joining_phases()
        finally:
            vars(module)["local_phases"] = hook
        if epochs is None:
            return found
        return [phase if phase.data is not None else replace(phase, epochs=epochs, steps=None) for phase in found]

    return phases


def unadapted(metrics: Metrics) -> Metrics:
    """Metrics without what the phases of an evaluation make of a model.

    >>> unadapted({"test": {"acc": 0.9}, "test_received": {"acc": 0.5}, "val": {"acc": 0.7}})
    {'test': {'acc': 0.5}, 'val': {'acc': 0.7}}
    """
    return {split: metrics.get(f"{split}_received", metrics[split]) for split in SPLITS if split in metrics}


def reported(federation: FederationBase, received: Mapping[int, Metrics], joined: Mapping[int, Metrics]) -> Joined:
    """The metrics of new clients under their names, over them and of each."""
    metrics: dict[str, float] = {}
    clients: dict[int, dict[str, float]] = {client: {} for client in sorted(joined)}
    for split, name in SPLITS.items():
        for column, results in ((f"{name}_received", received), (name, joined)):
            known = {client: results[client][split] for client in clients if split in results[client]}
            summary = federation.evaluations.summary_of(split, known)
            metrics |= {value.replace(split, column, 1): summary[value] for value in summary}
            if split == "test":
                for client, values in known.items():
                    clients[client] |= {f"{column}/{metric}": value for metric, value in own_values(values).items()}
    return Joined(metrics, clients)
