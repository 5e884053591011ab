"""The server's side: `FederatedTrainer.fit` as ever, with an engine whose clients are at sites."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from flwr.serverapp import Grid
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.callbacks import ChannelsLast, FederatedCallback
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.engines import Engine, LocalWork
from pfl_lightning.federation.federation import Federation
from pfl_lightning.flower.link import Link, initial_of
from pfl_lightning.flower.remote import Remote
from pfl_lightning.flower.remote_data import remote_data
from pfl_lightning.flower.sums import Summing
from pfl_lightning.privacy import DPAverage
from pfl_lightning.trainer import FederatedTrainer


class States(FederatedCallback):
    """Knows which of clients' states at sites the server may ask for again: its own, and those of its checkpoints.

    Before the first round it also has the engine find out what updates look like, and tells records what rounds take.
    """

    def __init__(self) -> None:
        self._federation: Federation | None = None
        self._folders: set[Path] = set()
        self._saved: dict[Path, tuple[int, dict[int, str]]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes note of the federation, and of where checkpoints are."""
        federation = self._federation = cast(Federation, pl_module)
        callbacks = cast(list[Any], trainer.checkpoint_callbacks)
        self._folders = {Path(callback.dirpath) for callback in callbacks if getattr(callback, "dirpath", None)}
        for client in range(min(len(federation.architectures), federation.data.num_clients)):
            self._engine.look(federation.job(client))

    @property
    def _engine(self) -> Remote:
        return cast(Remote, cast(Federation, self._federation).engines[0])

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Begins a row of the record."""
        self._engine.begin_round()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds to the row what sites took, before it is recorded."""
        cast(Federation, pl_module).metrics |= self._engine.taken

    on_train_epoch_end = on_validation_end

    def live(self) -> Mapping[int, set[str]]:
        """Names of the states by client."""
        names: dict[int, set[str]] = {}
        federation = cast(Federation, self._federation)
        for client, state in federation.clients.items():
            names.setdefault(client, set()).add(state.kept or "")
        for path in [path for folder in self._folders for path in folder.glob("*.ckpt")]:
            for client, name in self._names_in(path).items():
                names.setdefault(client, set()).add(name)
        return {client: own - {""} for client, own in names.items()}

    def _names_in(self, path: Path) -> dict[int, str]:
        """Those in a checkpoint, which is read when it is new."""
        written = path.stat().st_mtime_ns
        if self._saved.get(path, (0, {}))[0] != written:
            clients = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["federation"]["clients"]
            self._saved[path] = written, {client: state.get("kept") or "" for client, state in clients.items()}
        return self._saved[path][1]


def serve(
    grid: Grid,
    trainer: FederatedTrainer,
    client: ClientModule,
    data: FederatedDataModule,
    aggregator: Aggregator | None = None,
    ckpt_path: str | None = None,
    keys: Mapping[str, Mapping[int, int]] | None = None,
    timeout: float = 600.0,
    patience: float = 600.0,
    max_norm: float | None = None,
    poll: float = 0.2,
) -> Federation:
    """Fits a federation whose clients are at sites.

    Args:
        grid: Flower's.
        trainer: says how rounds are made; its engine is that of sites.
        client: the client module.
        data: as configured, not set up; the server needs the number of clients, the task and the shape of inputs.
        aggregator: the server side, in the place of the client module's own.
        ckpt_path: as for `FederatedTrainer.fit`.
        keys: which clients a node may have, by its public key, and the most samples that each may claim in a split;
            None lets any registered node have those of nobody else.
        timeout: seconds that a phase of a round waits for its sites.
        patience: seconds in which every client must have a site at first.
        max_norm: how far an update may be from the payload at most, as a norm; None refuses none, and warns of one far
            above the round's median.
        poll: seconds between two looks for answers.

    Returns:
        The federation after its last round.

    Raises:
        MisconfigurationException: if it can't be deployed, or clients have no site.
    """
    refuse_what_acts_here_alone(trainer)
    private = trainer.rounds.example_privacy and trainer.rounds.example_privacy.deployed()
    if max_norm is not None and trainer.rounds.secure_sum is not None:
        raise MisconfigurationException(
            f"max-norm={max_norm:g} looks at single updates, which trainer.secure_sum hides; leave it out, and set "
            "trainer.secure_sum.range, to which sites hold their own updates."
        )
    # other networks of a list are made when they are asked for
    with isolate_rng():
        initial = initial_of(client.architectures())
    link = Link(grid, data.num_clients, initial, keys, timeout, poll)
    data = remote_data(data, link.sizes)
    link.wait(patience)
    states = States()

    def engines(modules: Sequence[ClientModule], work: LocalWork, precision: Precision) -> list[Engine]:
        federation = cast(Federation, trainer.lightning_module)
        compression, summing = trainer.rounds.compression, summing_of(federation)
        engine = Remote(
            modules, work, precision, link, federation.architecture_of, states.live, max_norm, compression, summing
        )
        return [engine for _ in modules]

    trainer.rounds = replace(trainer.rounds, engine=engines, compile=False, example_privacy=private)
    trainer.callbacks.insert(0, states)  # type: ignore[attr-defined]
    trainer.fit(client, datamodule=data, aggregator=aggregator, ckpt_path=ckpt_path)
    return cast(Federation, trainer.lightning_module)


def summing_of(federation: Federation) -> Summing | None:
    """Return how a federation's updates are summed; None where the server takes each of them."""
    settings, aggregator = federation.options.secure_sum, federation.aggregator
    if settings is None:
        return None
    private = aggregator.find(DPAverage)
    noise = None if private is None else private.noise_share(deployed=True)
    return Summing(settings, "num_samples" in aggregator.needs, noise)


def refuse_what_acts_here_alone(trainer: FederatedTrainer) -> None:
    """Refuses settings that would have to act at sites, and can't."""
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"trainer.devices={trainer.world_size}: clients train at their sites; take 1 for the server."
        )
    if any(isinstance(callback, ChannelsLast) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            "trainer.callbacks=ChannelsLast acts on the server's own nets, and clients train at their sites; leave it "
            "out."
        )
