"""A federation as a LightningModule: one epoch of Lightning's loop is one round."""

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.client.common import (
    common_parameters,
    personal_entries,
    shared_entries,
    trained_parameters,
    whole_model,
)
from pfl_lightning.client.hooks import check_hooks
from pfl_lightning.client.joined_clients import IDENTITY, joined_models
from pfl_lightning.client.module import ClientModule, base_digest, complete, loadable
from pfl_lightning.contract.attributes import Remembered
from pfl_lightning.contract.guarantee import check_guarantee
from pfl_lightning.contract.pairing import (
    check_common,
    check_finite,
    check_pair,
    check_requirements,
    check_split,
    check_task,
    check_tells,
    check_tied,
)
from pfl_lightning.data import ClientData, FederatedDataModule, Split, TargetScale
from pfl_lightning.data.description import fingerprint
from pfl_lightning.data.record_columns import in_columns, in_rows
from pfl_lightning.data.target_scale import saved_scale
from pfl_lightning.engines import ClientMetrics, ClientState, Engine, Job, Sequential
from pfl_lightning.engines.base import AnyClient, given_modes, release
from pfl_lightning.engines.client_metrics import by_split
from pfl_lightning.engines.evaluation import POOLED, own_values
from pfl_lightning.engines.threads import threads_for
from pfl_lightning.federation.checkpoint import (
    check_rows,
    check_same,
    is_storable,
    other_rows,
    pair_clients,
    saved_states,
    storable,
    subject,
    warn_of_rows,
)
from pfl_lightning.federation.evaluation import Evaluations, undisturbed
from pfl_lightning.federation.messages import check_entries, check_payload
from pfl_lightning.federation.options import FederationOptions
from pfl_lightning.federation.prediction import (
    Batch,
    Predictions,
    Recipe,
    become,
    kept_recipe,
    no_samples,
    predicted,
    warn_of_trained,
)
from pfl_lightning.federation.resuming import (
    Settings,
    changes,
    check_rounds,
    check_settings,
    preprocessing_of,
    rounds_of,
    settings_of,
)
from pfl_lightning.federation.round import NUMBER_BYTES, Round
from pfl_lightning.federation.stages import Declares, Part, Stage, refuse_pairs
from pfl_lightning.messages import Message, StateDict, detached, num_bytes
from pfl_lightning.methods.registry import method_of
from pfl_lightning.runs.client_states import DiskStates
from pfl_lightning.runs.folder import STATES, run_folder
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import RoundStart
from pfl_lightning.server.aggregator_list import parts_of
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.server.weighted_average import WeightedAverage
from pfl_lightning.tasks.base import UNDEFINED

WORTH_ADVICE = 10.0
"""Seconds of evaluation from which a line says how it would take less time."""
FEW = 100
"""Number of clients that the line advises to evaluate."""


class Federation(LightningModule):
    """Run the rounds of a federation: an epoch with a single batch, which holds the ids of all clients.

    `FederatedTrainer` makes the federation from a client module. The ``state_dict`` is the global model, under the
    client module's own names, so that a checkpoint loads into the client module. The rest of the federation is in the
    checkpoint's entry ``federation``.

    Args:
        client: the client module that runs every client; with several architectures, one module of each is made.
        aggregator: the server side; None takes the client module's own.
        options: the Trainer's federated settings.

    Raises:
        MisconfigurationException: if client and aggregator don't fit together.
    """

    def __init__(self, client: ClientModule, aggregator: Aggregator | None, options: FederationOptions) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.client = client
        # One module per architecture and not one per client: clients' states are swapped in and out of it.
        self.architectures = nn.ModuleList(client.architectures())
        self.aggregator = aggregator if aggregator is not None else client.configure_aggregator()
        # of its own, as stages keep what they have counted, and a setting may serve several federations
        copies: dict[str, Any] = deepcopy(options.stages)
        self.options = options = replace(options, **copies)
        self.round = 0
        self.lr_factor = self._first_factor = 1.0
        self.seed: int | None = None
        self.initial: list[StateDict] = []
        self.start: StateDict = {}
        self.clients: MutableMapping[int, ClientState] = {}
        self.metrics: dict[str, Any] = {}
        # Bytes beside those of the updates and of their payloads: sent to clients asked by the selection, or whose
        # update comes in a later round or never; and reported up.
        self.further_bytes = [0, 0]
        check_hooks(client)
        self.monitor = options.monitored(client)
        self.evaluations = Evaluations(
            options, self.engines_of, self.job, self.received, self.received_by_all, self.sizes, client, self.monitor
        )
        self.settings: Settings = {}
        self.trained: dict[str, Any] = {}
        """Identity of the clients, for pairing with a checkpoint: ``names``, ``sizes``, the ``partition``'s
        fingerprint, digests of ``rows`` and ``settings``."""
        self._met: FederatedDataModule | None = None
        self.resume_changed = self.changed = False
        # Seconds of evaluation, training and aggregation in the rounds with an evaluation.
        self._times = [0.0, 0.0, 0.0]
        self._advised = False
        self._welcomed: set[int] = set()
        self.drawn: tuple[int, list[int]] = -1, []
        self.joined: dict[str, Mapping[str, Any]] = {}
        """Trained models of clients that joined afterwards, by name, or by id in digits; see `kept_model`."""
        self.audit: dict[str, Any] = {}
        """Result of an audit of the guarantee, for the summary; empty unless a callback audits."""
        check_finite(client, self.aggregator)
        check_guarantee(client, self.aggregator, options.min_clients)
        refuse_pairs([*options.parts, *self._parts()])
        for module in self.client_modules:
            module.settle_common()
        for stage in options.stages.values():
            stage.check(self)
        check_pair(client, self.aggregator)
        check_requirements(client, self.aggregator)
        check_tells(client, options.cohort)
        for module in self.client_modules:
            check_tied(module)
            check_split(module)
            module.requested = (module.offers & self.aggregator.needs) | options.cohort.asks
            module.withheld = module.sends - self.aggregator.needs if self.aggregator.guarantee else frozenset()
        self.save_hyperparameters(dict(client.hparams))

    @cached_property
    def method(self) -> str:
        """The method's name in the literature, or else the class names of client module and aggregator."""
        return method_of(self.client, self.aggregator)

    @property
    def client_modules(self) -> list[ClientModule]:
        """The client module of each architecture."""
        return cast(list[ClientModule], list(self.architectures))

    @property
    def stages(self) -> list[Stage]:
        """The stages of a round: those of the Trainer's settings, and callbacks."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return [*self.options.stages.values(), *(each for each in callbacks if isinstance(each, Stage))]

    def _parts(self) -> list[Declares]:
        """Return what client module and server do to rounds, and exclude."""
        client, server = self.client, self.aggregator
        parts: list[Declares] = []
        setting = f"aggregator={server.name}"
        if server.guarantee:
            doesn_t = "guarantees privacy of clients, which doesn't cover that"
            parts.append(Part(setting, {"sum level": "noises sums of updates"}, {"chooses": doesn_t}))
        if any(type(part).turns is not Aggregator.turns for part in parts_of(server)):
            excluded = {
                "clock": "has clients train in turns; leave it out",
                "edits": "has handed them on by then",
            }
            parts.append(Part(setting, {"turns": "has clients train in turns"}, excluded))
        if server.fixed_sizes:
            reason = "reads their numbers of samples only before the first round; take another method, such as FedAvg"
            parts.append(Part(setting, excludes={"moves": reason}))
        if client.pools:
            reason = "trains on the samples of all clients in one place; run it in a simulation without, or take FedAvg"
            one = {
                "sites": reason,
                "sums": reason,
                "clock": "trains in one place; leave it out",
                "after": "has one model for all; take before",
            }
            parts.append(Part(f"model={type(client).__name__}", {"pools": "trains on all samples in one place"}, one))
        return parts

    def _parts_of_data(self) -> list[Declares]:
        """Return what the data do to rounds, and exclude."""
        data = self.data
        if not (data.redivides or data.input_drift):
            return []
        drift = f"data.drift={sorted(data.drift)}" if data.drift else f"data={type(data).__name__} with its division_at"
        moves = {"moves": "moves samples between clients"}
        if not data.redivides:
            return [Part("data.input_drift", {"changes": "changes samples over the rounds"})]
        fitted = Part(
            "preprocessing by data.standardize=client, data.preprocessing.by=client or data.standardize_target=client",
            excludes={"moves": "scales a sample by the statistics of its first client; take table"},
        )
        # targets may be fitted by client where inputs are by table
        is_own = data.fitted_on == "each client" or data.preprocessing.get("standardize_target") == "client"
        return [Part(drift, moves), *([fitted] if is_own else [])]

    def architecture_of(self, client: int) -> int:
        """Return the index in ``architectures`` of a client's net.

        New clients, whose ids follow the federation's, take the architectures of the first clients in turn.
        """
        num_clients = self.data.num_clients
        return self.client.architecture_of(client % num_clients, num_clients)

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""
        return cast(FederatedDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    def sizes(self, clients: Iterable[int], split: Split) -> dict[int, int]:
        """Return the number of samples of each client in a split, by id."""
        return self.data.sizes(clients, split)

    @property
    def is_fitting(self) -> bool:
        """Whether rounds are run, and not an evaluation alone."""
        return bool(self.trainer.state.fn == TrainerFn.FITTING)

    @cached_property
    def engines(self) -> list[Engine]:
        """The engine of each architecture, or one engine for all.

        Made at the first use, when Lightning has moved the modules to their device.
        """
        try:
            return self.options.engines(self.client_modules, self.data, self.trainer, self._sums())
        except AttributeError as error:
            # nn.Module answers an AttributeError inside a property with "no attribute 'engines'", which hides the
            # cause.
            raise RuntimeError(f"{type(self.client).__name__} can't be set up: {error}") from error

    def _sums(self) -> Literal["samples", "uniform"] | None:
        """Return how the server weights clients, if it and the callbacks need nothing but sums over clients."""
        parts = list(parts_of(self.aggregator))
        by_samples = {"num_samples" in part.needs for part in parts}
        options = self.options
        readers = [*self.listeners("on_client_fit_end"), *self.listeners("on_aggregate_start")]
        if (
            not all(part.sums_only for part in parts)
            or len(by_samples) > 1
            or any(stage.reads_updates for stage in options.stages.values())
            or self.aggregator.turns([0], 0) is not None
            # each update counts by its own staleness
            or any(part.reads_arrivals for part in parts)
            or any(getattr(cast(Any, reader).__self__, "reads_updates", True) for reader in readers)
        ):
            return None
        return "samples" if by_samples == {True} else "uniform"

    def engines_of(self, clients: Sequence[int]) -> Iterable[tuple[Engine, list[int]]]:
        """Return pairs of an engine and its clients."""
        if len(set(self.engines)) == 1:
            return [(self.engines[0], list(clients))]
        own: dict[Engine, list[int]] = {engine: [] for engine in self.engines}
        for client in clients:
            own[self.engines[self.architecture_of(client)]].append(client)
        return own.items()

    def setup(self, stage: str) -> None:
        """Check the parts, take the common initial model and prepare the server, once per federation.

        Lightning calls this again for each fit, validation and test; later calls only check the settings and the data.
        """
        for module in self.client_modules:
            self.options.check(module, self.data)
            # The check runs the net on a batch; a small net is faster in one thread.
            with threads_for(module):
                check_task(module, self.data)
            module.num_rounds = self.trainer.max_epochs or 1
        # settings come first among the stages
        callbacks = self.stages[len(self.options.stages) :]
        if self.is_deployed and (acts := [each for each in callbacks if type(each).on_upload is not Stage.on_upload]):
            raise MisconfigurationException(
                f"{acts[0].setting} changes updates at clients, which are at sites, and would run here; give a "
                "trainer.compression, which sites have as well."
            )
        refuse_pairs([*self.options.parts, *self._parts(), *self._parts_of_data(), *callbacks])
        if self.data.input_drift and self.client.pools and not self.data.resident:
            raise MisconfigurationException(
                "data.input_drift changes each client's batches, and data.resident=false reads those of all clients "
                f"as one for {type(self.client).__name__}; take resident=true."
            )
        self._check_fitted()
        if self.is_fitting:
            clients, here = range(self.data.num_clients), self.data.resident and not self.data.at_sites
            targets = (self.data.part(client, "train").y for client in clients) if here else None
            self.data.task.check_training(self.data.batch_size, targets)
        if self.is_fitting and self.seed is None:
            # Data that another federation has tested keep that one's preprocessing, which a new federation fits anew.
            self.data.adopt({}, [])
        self.data.go_to(max(1, self.round))
        self.client.check_optimizers(cast(int, self.trainer.max_epochs) if self.is_fitting else 0)
        rounds = rounds_of(self.options, self.trainer, self.data.num_clients, self.aggregator, self.data)
        self.settings = settings_of(self.client_modules, self.aggregator, self.data, rounds)
        if self.seed is not None:
            if self.data is not self._met:
                self._meet(self.trained)
                if self.is_fitting:
                    check_rows(self.trained, self.data)
            # A later fit or evaluation continues with this state; only another data module is paired anew.
            return
        self._keep_trained({})
        # Ranks may have different seeds, so all take the first rank's seed and initial weights. A single process spares
        # a second copy of frozen weights, which may be nearly all of a net.
        several = self.trainer.world_size > 1
        self.seed, states = self.trainer.strategy.broadcast(
            (torch.initial_seed(), [whole_model(module, several) for module in self.client_modules])
        )
        pairs = list(zip(self.client_modules, states, strict=True))
        if several:
            for module, state in pairs:
                module.assign({name: state[name] for name in common_parameters(module)})
        self.initial = [personal_entries(module, state) for module, state in pairs]
        shared = [shared_entries(module, state) for module, state in pairs]
        check_common(self.client_modules, shared, self.aggregator.takes_narrow)
        self.shared = shared[0]
        self._set_up_server(self.seed)
        self._say_if_stale()
        # A method whose server keeps no global model, such as Local, shows the initial weights in its place.
        whole = self.aggregator.global_model()
        self.start = {name: tensor for name, tensor in self.shared.items() if name not in whole}
        self.clients = self._kept({})
        for client in self.data.newcomers:
            # Ask the server for new clients' payloads now: an aggregator without `welcome` is refused before the rounds
            # are spent.
            self.welcome(client)

    def _keep_trained(self, saved: Mapping[str, Any]) -> None:
        """Record names, sizes, partition and settings of this federation's clients.

        Args:
            saved: a checkpoint's entry ``federation``; entries missing here are taken from the current data module.
        """
        data = self._met = self.data
        self.trained = {
            "names": data.client_names[: data.num_clients],
            "sizes": list(self.sizes(range(data.num_clients), "train").values()),
            "partition": fingerprint(data),
            "rows": self._digests(),
            "settings": self.settings,
            "preprocessing": data.preprocessing,
        }
        self.trained |= {name: saved[name] for name in self.trained if name in saved}

    def warn_of_test_rows(self, clients: Sequence[int]) -> None:
        """Warn of clients whose test rows are others than when the federation was trained.

        Args:
            clients: ids of clients that predict for their test rows.
        """
        warn_of_rows(self.trained, self.data, "test", clients)

    def _digests(self) -> Tensor | None:
        """Return digests of the first round's splits, by which a checkpoint knows its clients' rows again."""
        with self.data.at_round(1):
            return self.data.split_digests()

    def _meet(self, saved: Mapping[str, Any]) -> bool:
        """Pair the data module's clients with a federation's clients.

        Args:
            saved: the checkpoint's entry ``federation``, or ``trained`` of this federation.

        Returns:
            Whether the clients' ids have changed.

        Raises:
            MisconfigurationException: if the clients can't be paired, or the kept metrics are of other samples.
        """
        # Strangers among the data's clients are new clients, also for predictions.
        newcomers = getattr(self.trainer, "joins", False) or self.trainer.state.fn == TrainerFn.PREDICTING
        use = "fit" if self.is_fitting else "join" if newcomers else "test"
        # The checkpoint's sizes and fingerprint are of the first division; later ones of a drift follow from it.
        with self.data.at_round(1):
            changed = pair_clients(saved, self.data, use)
        if use != "fit" and (lines := changes(*preprocessing_of(saved.get("preprocessing", {}), self.data))):
            rank_zero_warn(
                f"{subject(saved)}'s model has learned from inputs that were made otherwise ({lines[0]}); give it the "
                "data that it was trained with."
            )
        self._met, when = self.data, self.options.evaluate
        others = other_rows(saved, self.data)
        is_other = others is not None and bool(others.any())
        if use == "test" and when != "before" and (is_other or saved["partition"] != fingerprint(self.data)):
            raise MisconfigurationException(
                f"trainer.evaluate={when} shows metrics kept from clients' training, and data holds other samples "
                "now; take evaluate=before."
            )
        if use == "test":
            split: Split = "val" if self.trainer.state.fn == TrainerFn.VALIDATING else "test"
            warn_of_rows(saved, self.data, split, range(self.data.num_clients))
        return changed

    def _check_fitted(self) -> None:
        """Refuse preprocessing whose statistics leak samples past a guarantee of privacy.

        Means or vocabularies fitted on all clients' samples change every client's inputs, and so the training, past any
        bound. Statistics of one client's own samples are covered by a client-level guarantee, but not by a sample-level
        one.
        """
        fitted = self.data.fitted_on
        guarantee = f"aggregator={self.aggregator.name}" if self.aggregator.guarantee else ""
        levels = {level: part.setting for part in self.options.stages.values() for level in part.does}
        per_sample, guarantee = levels.get("sample level", ""), levels.get("update level", guarantee)
        if fitted == "nothing" or not (per_sample or (guarantee and fitted == "all clients")):
            return
        setting = per_sample or guarantee
        remedies = "constants known beforehand, such as data.standardize={age: [50, 12]}, categories and classes"
        own = ", or data.standardize=client or data.preprocessing.by=client"
        if (rows := self.data.preprocessing.get("standardize_target")) in ("table", "client"):
            remedies += ", and a target's mean and deviation in data.standardize_target, or null there"
            own += " with data.standardize_target=client" * (rows == "table")
        raise MisconfigurationException(
            f"data={type(self.data).__name__} fits its preprocessing on samples of {fitted}, which {setting} doesn't "
            f"bound; give {remedies}{'' if per_sample else own}, or take data without any."
        )

    def _say_if_stale(self) -> None:
        """Log a line if updates are stale and the server takes them as fresh, or if it weighs updates never stale."""
        if not self.is_fitting:
            return
        reads = any(part.reads_arrivals for part in parts_of(self.aggregator))
        name = self.aggregator.name
        stale = next((stage.setting for stage in self.options.stages.values() if "stale" in stage.does), "")
        if stale and not reads:
            rank_zero_info(
                f"{stale}: aggregator={name} takes updates from older models like new ones; "
                "FedBuff and FedAsync weigh them by their staleness."
            )
        # a server of narrow nets reads them only to know which part a late update is of
        if reads and not stale and not self.is_deployed and not self.aggregator.takes_narrow:
            rank_zero_info(
                f"aggregator={name}: no update is ever stale, as all clients of a round train from the same model; set "
                "trainer.schedule=Asynchronous, as in --config schedules/fedbuff."
            )

    def _kept(self, states: MutableMapping[int, ClientState]) -> MutableMapping[int, ClientState]:
        """Return clients' states in the storage named by ``trainer.client_states``."""
        if self.options.client_states != "disk" or not (states or self.is_fitting):
            # Made only for a fit or for existing states: an evaluation that is refused early shall leave no folder
            # behind.
            return states
        run = run_folder(self.trainer)
        return DiskStates(run and run / STATES, states)

    def _set_up_server(self, seed: int) -> None:
        """Prepare the aggregator and the client selection for a seed."""
        clients, rounds = self.data.num_clients, self.trainer.max_epochs or -1
        num_rounds, sampling = None if rounds < 0 else rounds, self.options.sampling(clients)
        summed = any("sums" in stage.does for stage in self.options.stages.values())
        self.seed = seed
        self.aggregator.setup(
            Server(clients, self.shared, self.client, self.data, seed, num_rounds, sampling, self.is_deployed, summed)
        )
        self.remembered = Remembered(self.aggregator, self.architectures)
        self.options.cohort.setup(self.sizes(range(self.data.num_clients), "train"))
        for stage in self.options.stages.values():
            stage.begin(self)
        self.keep_storable()

    def keep_models(self, stored: Callable[[Any], Any]) -> None:
        """Keep the initial model and the server's state as another storage returns them.

        Args:
            stored: returns a record with the same tensors elsewhere, such as in a file.
        """
        kept = stored({"shared": self.shared, "initial": self.initial, "start": self.start})
        self.shared, self.initial, self.start = kept["shared"], kept["initial"], kept["start"]
        self.aggregator.state = stored(self.aggregator.state)

    def keep_storable(self) -> None:
        """Convert NumPy scalars in the state of server and selection; refuse types without a way back from checkpoints.

        The running state is converted too, not only the saved one, so that a resumed run continues with the same bits.
        """
        owners: list[tuple[Any, str]] = [
            (self.aggregator, self.aggregator.name),
            (self.options.cohort, "trainer.cohort"),
        ]
        for owner, name in owners:
            if not is_storable(owner.state):
                owner.state = storable(owner.state, f"{name}.state")
        # converted in the running state, as above
        for stage in self.options.stages.values():
            if not is_storable(state := stage.state_dict()):
                stage.load_state_dict(storable(state, f"{stage.setting}.state"))

    def job(
        self, client: int, evaluate: tuple[Split, ...] = (), received: tuple[ClientState, Message] | None = None
    ) -> Job:
        """Return a client's work in the coming round.

        Args:
            client: the client's id.
            evaluate: the splits to evaluate on after training.
            received: the result of `received` for the client, if known.
        """
        state, payload = received or self.received(client)
        seed = derive_seed(cast(int, self.seed), "train", self.round, client)
        check_entries(payload, client, self.aggregator, self.client)
        # A client with a state has taken part before, and so has received the entries that travel once.
        once = self.aggregator.sends_once
        data, has_once = self.data.client(client), bool(once) and client in self.clients
        order_seed = derive_seed(cast(int, self.seed), "epochs", client) if self.options.steps_continue else None
        return Job(client, self.round, state, payload, data, seed, self.lr_factor, evaluate, once, has_once, order_seed)

    def received(self, client: int) -> tuple[ClientState, Message]:
        """Return a client's state and present payload.

        Args:
            client: the client's id.
        """
        # A client that has never trained has no state yet and begins with the initial personal entries.
        if (state := self.clients.get(client)) is None:
            state = ClientState(self.initial[self.architecture_of(client) if len(self.initial) > 1 else 0])
        return state, self._payload(client)

    def received_by_all(self) -> tuple[ClientState, Message] | None:
        """Return the common state and payload of all clients; None where clients differ or may differ."""
        if len(self.initial) > 1 or self.initial[0]:
            return None
        payload = self._payload_of_all()
        return None if payload is None else (ClientState(), payload)

    def _payload_of_all(self) -> Message | None:
        """Return the common payload of all clients; None where clients differ or may differ."""
        if self._welcomed:
            return None
        try:
            return self.aggregator.download(cast(int, AnyClient()))
        # of any type: the server's code tells clients apart in its own way, and says so where it is asked for one
        except Exception:
            return None

    def _payloads(self) -> list[dict[str, Any]]:
        """Return each different payload once, with the runs of ids of the clients that receive it.

        Entries that no client's model depends on are left out.
        """
        clients, kept = self.data.num_clients, self.client.model_needs
        if kept == frozenset():
            return [{"clients": [[0, clients]], "payload": {}}]
        if (common := self._payload_of_all()) is not None:
            return [{"clients": [[0, clients]], "payload": common}]
        found: dict[tuple[object, ...], dict[str, Any]] = {}
        for client in range(clients):
            payload = {name: entry for name, entry in self._payload(client).items() if kept is None or name in kept}
            # by identity: what a server gives several clients is one object, which the kept payload keeps alive
            key = (*payload, *map(id, payload.values()))
            runs = found.setdefault(key, {"clients": [], "payload": payload})["clients"]
            if runs and runs[-1][1] == client:
                runs[-1][1] += 1
            else:
                runs.append([client, client + 1])
        return [*found.values()]

    def _payload(self, client: int) -> Message:
        """Return a client's payload: a newcomer's for a client that has joined and not taken part so far."""
        is_new = client in self._welcomed and client not in self.clients
        return self.welcome(client) if is_new else self.aggregator.download(client)

    def grow(self, names: Sequence[str]) -> None:
        """Let clients at sites join from the coming round on, with the next ids; each first gets a newcomer's payload.

        Args:
            names: names of the new clients.
        """
        first = self.data.num_clients
        cast(Any, self.data).grow(names)
        clients = self.data.num_clients
        self._welcomed.update(range(first, clients))
        self.trained["names"] = self.data.client_names
        self.trained["sizes"] = [*self.trained["sizes"], *[0] * (clients - first)]
        self.trained["partition"] = fingerprint(self.data)
        self.options.cohort.sizes = self.sizes(range(clients), "train")
        # cohorts count a share of all clients, which a resumed run compares
        rounds = rounds_of(self.options, self.trainer, clients, self.aggregator, self.data)
        self.settings = settings_of(self.client_modules, self.aggregator, self.data, rounds)
        self.trained["settings"] = self.settings

    def welcome(self, client: int, update: Message | None = None) -> Message:
        """Return the server's payload for a new client.

        Args:
            client: the client's id.
            update: the update that the new client has sent, if any.

        Raises:
            MisconfigurationException: if the server has no payload for unknown clients.
        """
        try:
            payload = self.aggregator.welcome(client, update)
        # An aggregator that looks up a client by id fails like this when the id is new.
        except (LookupError, StopIteration) as error:
            raise MisconfigurationException(
                f"data.new_clients={self.data.new_clients}: aggregator {self.aggregator.name} has no payload for an "
                "unknown client; take 0, or implement the aggregator's welcome(client, update)."
            ) from error
        check_entries(payload, client, self.aggregator, self.client)
        check_payload(payload, client, self.aggregator, self.shared_of(client))
        return payload

    # Training

    def configure_optimizers(self) -> Any:
        """Return an optimizer and schedule for the round's learning rate alone; clients have their own optimizers."""
        made = self.client.configured()
        rate = made.rates[0]
        # The schedule's own first factor: 1, except for schedules such as OneCycleLR that replace the optimizer's
        # initial rate.
        self._first_factor = made.optimizer.param_groups[0].get("initial_lr", rate) / rate if rate else 1.0
        return (
            made.optimizer if made.scheduler is None else {"optimizer": made.optimizer, "lr_scheduler": made.scheduler}
        )

    def on_train_start(self) -> None:
        """Let go of the states of other ranks' clients, which a checkpoint has brought along."""
        # not on loading: engines are for modules that Lightning has moved to their device
        if self.options.client_states == "rank":
            self.clients = self.engines[0].own_states(self.clients)

    def training_step(self, clients: list[int], batch_idx: int) -> None:
        """Run one round.

        Args:
            clients: ids of all clients.
            batch_idx: always 0.
        """
        # Lightning runs training_step under autocast, which would also change aggregation and optimizer steps; engines
        # enter autocast for forward passes only.
        device = self.device.type
        # a context that switches off what is off already costs a tenth of a millisecond
        plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        with isolate_rng(include_cuda=device == "cuda"), plain:
            self._read_rate()
            Round(self, clients).run()
            self.round += 1
            if (scheduler := self.lr_schedulers()) is not None:
                # The step changes no weight, as there are no gradients. It only prevents torch's warning about
                # schedules that step before their optimizer.
                self.trainer.optimizers[0].step()
                scheduler.step()  # type: ignore[union-attr]
                self._read_rate()
        self.release_modes()

    @property
    def shared_now(self) -> StateDict:
        """The entries that clients share, in their types of now: the Trainer's precision may have changed them."""
        return shared_entries(self.client, self.client.state_dict())

    def shared_of(self, client: int) -> StateDict:
        """Return entries of the names and shapes that a client shares: the initial ones, or those of a narrow net.

        Args:
            client: the client's id.
        """
        if not self.aggregator.takes_narrow or not (index := self.architecture_of(client)):
            return self.shared
        module = self.client_modules[index]
        return shared_entries(module, module.state_dict())

    def coming(self, away: Collection[int]) -> dict[int, Job]:
        """Return the jobs of the coming round by client, whose cohort is drawn by this; empty where clients take turns.

        Args:
            away: ids of the clients out of reach.
        """
        clients = range(self.data.num_clients)
        self.further_bytes = [0, 0]
        there = [client for client in clients if client not in away]
        cohort = self.cohort(there, min(self.options.cohort_size(len(clients)), len(there)))
        if self.aggregator.turns(cohort, self.round) is not None:
            return {}
        self.drawn = self.round, cohort
        return {client: self.job(client, self.options.splits_after) for client in cohort}

    def cohort(self, clients: Sequence[int], size: int, draw: int = 0) -> list[int]:
        """Return the sorted client ids of the round's cohort.

        Where a guarantee counts on secret cohorts, they come from the operating system, and else from the run's seed.

        Args:
            clients: ids of all clients within reach.
            size: the number of clients to choose.
            draw: number of the draw in the round, from 0; an asynchronous round may have several.

        Raises:
            MisconfigurationException: if the selection returns an id twice or an unknown id.
        """
        stream: random.Random = random.SystemRandom()
        if not (secret := self.aggregator.hides_cohorts):
            # The stream depends on seed and round alone, so that a resumed run draws the same cohorts.
            key = (self.round, draw) if draw else (self.round,)
            stream = random.Random(derive_seed(cast(int, self.seed), "cohort", *key))
        chosen = sorted(self.options.cohort.choose(RoundStart(self.round, clients, size, stream, self._losses)))
        if secret:
            # each rank has drawn a cohort of its own
            chosen = self.trainer.strategy.broadcast(chosen)
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(clients):
            raise MisconfigurationException(
                f"trainer.cohort={type(self.options.cohort).__name__} chose clients {' '.join(map(str, chosen))} in "
                f"round {self.round + 1}; its choose() must return ids from 0 to {len(clients) - 1}, each at most once."
            )
        return chosen

    def _losses(self, clients: Sequence[int]) -> dict[int, float]:
        """Return the training losses of the received models, by client id.

        Raises:
            MisconfigurationException: under a guarantee of privacy that doesn't cover them.
        """
        asks = {"asks": "asks clients for losses of their training samples"}
        asking = Part(f"trainer.cohort={type(self.options.cohort).__name__}", asks)
        refuse_pairs([asking, *self.options.stages.values()])

        def job_of(client: int, splits: tuple[Split, ...]) -> Job:
            job = self.job(client, splits)
            self.further_bytes[0] += num_bytes(job.travelling)
            return job

        measured = by_split(self.evaluations.measure(clients, ("train",), job_of))
        # For a method that trains before evaluation, the received model's own loss is under "train_received".
        received = measured.get("train_received", measured.get("train", ClientMetrics()))
        losses = dict(zip(received, received.column("loss").tolist(), strict=True))
        self.further_bytes[1] += NUMBER_BYTES * len(losses)
        # NaN has no place in an order; such clients count as silent.
        return {client: loss for client, loss in losses.items() if not math.isnan(loss)}

    def count_lost(self, cohorts: Sequence[Sequence[int]]) -> None:
        """Count rounds missing in the checkpoint, of models seen elsewhere perhaps.

        Args:
            cohorts: the clients of each of these rounds.
        """
        self.aggregator.count_lost(len(cohorts))
        for stage in self.options.stages.values():
            stage.count_lost(self, cohorts)

    @property
    def is_deployed(self) -> bool:
        """Whether clients are at sites."""
        return self.options.is_deployed

    def _read_rate(self) -> None:
        """Read the round's learning rate, as a factor of the initial one, from the scheduled optimizer."""
        group = self.trainer.optimizers[0].param_groups[0]
        moved = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0
        self.lr_factor = moved * self._first_factor

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """Return the privacy guarantee of the rounds so far, by the aggregator or DP-SGD; empty without one.

        Args:
            final: whether to add the tighter bound, which takes longer to compute.
        """
        statement = self.aggregator.privacy(final)
        for stage in self.options.stages.values():
            statement = stage.statement(self, statement)
        return statement

    @property
    def publishable(self) -> tuple[str, ...]:
        """Name patterns of the record's columns under the privacy guarantee; empty without a guarantee."""
        stages = self.options.stages.values()
        return next((stage.publishable for stage in stages if stage.publishable), self.aggregator.publishable)

    def privacy_of(self, clients: Iterable[int]) -> list[dict[str, float]]:
        """Return each client's ``epsilon``, where the guarantee is of each client by itself.

        Args:
            clients: the clients' ids.
        """
        stages = self.options.stages.values()
        return [
            {name: value for stage in stages for name, value in stage.of_client(self, client).items()}
            for client in clients
        ]

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        """Start the clock."""
        self._evaluation_start = time.perf_counter()

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode, after recording each submodule's mode for the engines."""
        for module in self.client_modules:
            given_modes(module)
            module.eval()

    def on_validation_model_train(self) -> None:
        """Restore the recorded modes."""
        self.release_modes()

    on_test_model_eval, on_test_model_train = on_validation_model_eval, on_validation_model_train
    on_predict_model_eval = on_validation_model_eval

    def release_modes(self) -> None:
        """Restore the modes of client modules as given by the user; submodules frozen by ``eval()`` stay frozen."""
        for module in self.client_modules:
            release(module)

    def validation_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluate clients on the validation splits, with ``trainer.test_every_round`` also on the test splits.

        All clients, or in a fit the round's sample by ``trainer.evaluate_clients``.
        """
        self._evaluate_round(clients, self.options.validation_splits)

    def _evaluate_round(self, clients: Sequence[int], splits: tuple[Split, ...]) -> None:
        """Evaluate the clients of a round's evaluation.

        Args:
            clients: ids of all clients.
            splits: the splits to evaluate on.
        """
        if self.is_fitting:
            seed = derive_seed(cast(int, self.seed), "evaluate", self.round)
            clients = self.evaluations.sample(clients, splits, seed)
        self.evaluations.evaluate(clients, splits)

    def test_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluate all clients on the test splits."""
        self.evaluations.evaluate(clients, ("test",))

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> Predictions:
        """Return the predictions of one client's model, the same model as in an evaluation.

        Args:
            batch: the client's id or name, inputs, names of the classes, the targets' scale, and labels of the
                predictions.
            batch_idx: number of the batch.
        """
        client, *given = batch
        return predicted(self._recipe_of(client), *given)

    def model_of(self, client: int | str) -> ClientModule:
        """Return a copy of one client's model, the same model as in an evaluation.

        Args:
            client: the client's id, or one from the number of clients up for a newcomer.
        """
        recipe = self._recipe_of(client)
        try:
            with undisturbed():
                become(recipe)
                # Lightning leaves the Trainer out of copies
                model = deepcopy(recipe.engine.module)
            model.target_scale = self._scale_of(client)
        finally:
            self.release_modes()
        release(model)
        return model

    def _scale_of(self, client: int | str) -> TargetScale | None:
        """Return the scale of a client's targets, where the client may be in the data of an earlier join alone."""
        if isinstance(client, str) and (kept := self.joined.get(client)):
            return saved_scale(kept["inputs"], kept["local"])
        return self.data.target_scale(client)

    def _recipe_of(self, client: int | str) -> Recipe:
        """Return how a client's model is made.

        The reference engine serves all settings: a single client leaves other engines nothing to do at once.

        Args:
            client: the client's id, or the name of one that joined afterwards and isn't in the data.

        Raises:
            MisconfigurationException: if the model is at a site, or a new client's would need an update of its own.
        """
        data = self.data
        if data.at_sites:
            raise MisconfigurationException(
                f"client={client}: its samples and personal entries are at its site; predict there, by pfl-lightning "
                "predict --state-dir."
            )
        warn_of_trained(self.options.evaluate)
        kept = self._joined(client)
        if not kept and (own := self.clients.get(cast(int, client))) is not None and own.kept is not None:
            raise MisconfigurationException(
                f"client={client}: its state is on {own.kept}, by trainer.client_states=rank; take a model from a "
                "checkpoint, in one process."
            )
        index = kept["architecture"] if kept else self.architecture_of(cast(int, client))
        engine = Sequential(self.client_modules[index], self.options.work(data), self.trainer.precision_plugin)
        if kept:
            return kept_recipe(engine, kept, self._samples(client))
        if client >= data.num_clients:  # type: ignore[operator]
            return Recipe(engine, self._first_job(cast(int, client)), adapts=False)
        return Recipe(engine, self.job(cast(int, client), ("test",)))

    def _joined(self, client: int | str) -> Mapping[str, Any] | None:
        """Return the kept model of a client that joined afterwards; None of others."""
        data = self.data
        if not isinstance(client, str):
            if client not in data.newcomers:
                return None
            client = str(data.client_name(client))
        return self.joined.get(client)

    def _samples(self, client: int | str) -> ClientData:
        """Return the samples of a new client, none where the data don't know it."""
        if client in self.data.newcomers:
            return ClientData(self.data, cast(int, client))
        return no_samples(self.client, "a new client")

    def _first_job(self, client: int) -> Job:
        """Return the job of a client that never trained, with the payload of a newcomer."""
        if self.aggregator.meets_newcomers:
            raise MisconfigurationException(
                f"aggregator {self.aggregator.name} makes a new client's model from an update of its own, so there is "
                "none before the client has trained; let it join by trainer.join."
            )
        if client in self.data.newcomers:
            # somebody may take it for a model that has joined
            rank_zero_info(
                f"client {self.data.client_label(client)}: the model that a new client receives, before any training "
                "of its own; trainer.join keeps a trained one."
            )
        state = ClientState(self.initial[self.architecture_of(client)])
        seed = derive_seed(cast(int, self.seed), "join", self.round, client)
        samples, payload = self._samples(client), self.welcome(client)
        return Job(client, self.round, state, payload, samples, seed, self.lr_factor, ("test",))

    def on_validation_epoch_end(self) -> None:
        """Summarise the evaluation over clients into the round's row of metrics, for loggers and callbacks."""
        summary = self.evaluations.summary()
        if "val" not in self.evaluations.results:
            # ModelCheckpoint needs its metric in every round, also when no client could be evaluated.
            summary[f"val/{self.monitor.metric}"] = math.nan
        elif self.is_fitting:
            self._check_monitor(summary)
        self._end_evaluation(summary)

    def _check_monitor(self, summary: Mapping[str, float]) -> None:
        """Refuse a monitored metric that the targets of all clients leave undefined: no round would be the best.

        Args:
            summary: the round's metrics over clients.

        Raises:
            MisconfigurationException: if all clients with validation samples were evaluated, and none has a value.
        """
        metric, results = self.monitor.metric, self.evaluations.results["val"]
        if metric not in UNDEFINED or metric not in results.names or not np.isnan(results.column(metric)).all():
            return
        held = [client for client, size in self.sizes(range(self.data.num_clients), "val").items() if size]
        if not held or not all(client in results for client in held):
            return
        pooled = f"val/{metric}{POOLED}"
        known = not math.isnan(summary.get(pooled, math.nan))
        others = [f"{pooled}, of all clients' samples", "loss"] if known else ["loss"]
        raise MisconfigurationException(
            f"trainer.monitor=val/{metric} has no value at any client: of each client with validation samples, "
            f"{UNDEFINED[metric]}; take {', or '.join(others)}."
        )

    def on_train_batch_end(self, outputs: Any, clients: list[int], batch_idx: int) -> None:
        """Evaluate the test splits if ``test_every_round`` is set and Lightning skips validation.

        Lightning skips the loop if no client has validation samples, or with ``limit_val_batches=0``.
        """
        if not self.options.test_every_round or self.round % (self.trainer.check_val_every_n_epoch or 1):
            return
        if not self.trainer.limit_val_batches or not len(self.data.val_dataloader()):
            self.on_validation_epoch_start()
            self._evaluate_round(clients, ("test",))
            self._end_evaluation(self.evaluations.summary())

    def _end_evaluation(self, summary: dict[str, float]) -> None:
        """Add the server's model, the time and the summary to the row, and log the summary."""
        if self.is_fitting:
            if self.options.test_every_round:
                summary |= self.test_global()
            summary |= self.evaluations.margins(range(self.data.num_clients))
            self.metrics |= summary | {"time/evaluate": time.perf_counter() - self._evaluation_start}
            self._advise()
        self._log_summary(summary)

    def _advise(self) -> None:
        """Say once how evaluations would take less time, if they take more than half of the rounds' time."""
        # Lightning's sanity check evaluates before the first round.
        of_round = [self.metrics.get(f"time/{part}", 0.0) for part in ("evaluate", "train", "aggregate")]
        self._times = [*map(sum, zip(self._times, of_round, strict=True))]
        evaluating, total = self._times[0], sum(self._times)
        if self._advised or self.engines[0].trains_ahead or self.options.evaluate == "after":
            return
        if not WORTH_ADVICE < evaluating > total / 2:
            return
        self._advised = True
        sampled = f"trainer.evaluate_clients={FEW}, which evaluates {FEW} of the clients in each round, or "
        rank_zero_info(
            f"evaluation has taken {evaluating / total:.0%} of the rounds' time; that is less with "
            + (sampled if self.options.evaluation_size(self.data.num_clients) > FEW else "")
            + f"trainer.check_val_every_n_epoch={5 * (self.trainer.check_val_every_n_epoch or 1)}."
        )

    def on_test_epoch_end(self) -> None:
        """Log the summary over clients and the test metrics of the server's model."""
        self._log_summary(self.evaluations.summary() | self.test_global())

    def test_global(self, model: StateDict | None = None) -> dict[str, float]:
        """Return the metrics of the server's model on the central test set, as ``test/global_METRIC``.

        Empty without a central test set, or if the server doesn't hold a whole model.

        Args:
            model: the ``state_dict`` to test; None takes the server's current model.
        """
        own = self.aggregator.global_model()
        whole = all(f"net.{name}" in own for name in trained_parameters(self.client, "net"))
        samples = self.data.central_data() if whole else None
        if samples is None:
            return {}
        with undisturbed():
            scale = self.data.target_scale(None)
            values = self.engines[0].evaluate_model(model or self.initial[0] | own, samples, scale)
        return {f"test/global_{name}": value for name, value in own_values(values).items()}

    def _log_summary(self, summary: dict[str, float]) -> None:
        """Give a summary to callbacks and, beside a fit, to loggers; the progress bar shows the monitored metric."""
        for name, value in summary.items():
            if not self.is_fitting:
                self.log(name, value, on_step=False, on_epoch=True, batch_size=1)
                continue
            self.show(name, value, name.endswith((f"/{self.monitor.metric}", f"/global_{self.monitor.metric}")))

    def show(self, name: str, value: float, on_bar: bool) -> None:
        """Give a value of the round to callbacks, and to the progress bar; `RoundLogger` gives loggers the whole row.

        Args:
            name: the value's name.
            value: the value.
            on_bar: whether the progress bar has it.
        """
        # the same places where self.log writes, which takes as long as a training step of many small nets
        self.trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.float32, device=self.device)
        if on_bar:
            self.trainer.progress_bar_metrics[name] = value

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the global model under the client module's names, completed by the common initial weights.

        Frozen weights are left out with ``trainer.checkpoint_common=False``.
        """
        return self.global_model(self._saves_common)

    def global_model(self, common: bool) -> StateDict:
        """Return the global model under the client module's names; entries that no server has are the initial ones.

        Args:
            common: whether frozen weights are among them.
        """
        others = self.start | self.initial[0] | self.aggregator.global_model()
        # only what nobody else has is copied: a copy of all would be one more large net in memory
        whole = whole_model(self.client, common, others) | others
        return {name: whole[name] for name in {**self.client.state_dict(), **whole} if name in whole}

    @property
    def _saves_common(self) -> bool:
        """Whether checkpoints hold frozen weights, which they can't if these are quantised."""
        common = [module.common_names - loadable(module).keys() for module in self.client_modules]
        return self.options.checkpoint_common and not any(common)

    @cached_property
    def _base(self) -> list[str]:
        """Fingerprints of the architectures' frozen weights, which never change."""
        return [base_digest(module, common_parameters(module).keys()) for module in self.client_modules]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a global model into the client module.

        Raises:
            MisconfigurationException: if the weights are of another net.
        """
        try:
            return self.client.load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise MisconfigurationException(f"ckpt_path: the checkpoint holds another net: {reason}") from error

    @property
    def identity(self) -> dict[str, Any]:
        """The entries that are the same in all checkpoints of this federation."""
        own = {**self.trained, "method": self.method, "seed": self.seed}
        return {name: own[name] for name in IDENTITY}

    def federation_state(self) -> dict[str, Any]:
        """Return the complete state, from which another process can continue the run bit for bit."""
        whole = self._saves_common
        return {
            "method": self.method,
            **{name: self.trained[name] for name in ("names", "sizes", "partition", "rows")},
            "round": self.round,
            "lr_factor": self.lr_factor,
            "seed": self.seed,
            "initial": self.initial,
            "start": self.start,
            # The first architecture's common parameters are part of the global model already.
            "common": {k: detached(common_parameters(m)) for k, m in enumerate(self.client_modules) if k and whole},
            **({} if whole else {"base": self._base}),
            "aggregator": self.aggregator.state,
            "cohort": self.options.cohort.state,
            "stages": {name: kept for name, stage in self.options.stages.items() if (kept := stage.state_dict())},
            "clients": saved_states(self._all_states()),
            "after": dict(sorted(self.evaluations.after.items())),
            # Not needed for resuming: `load_from_checkpoint(path, client=3)` builds a client's model from them without
            # the aggregator.
            "payloads": self._payloads(),
            "newcomer": self._newcomer_payload(),
        }

    def _all_states(self) -> Mapping[int, ClientState]:
        """Return all clients' states; on ranks other than the first, those of other ranks may be names alone."""
        states: Mapping[int, ClientState] = self.clients
        if self.options.client_states == "rank":
            # one call for all architectures, whose engines share the ranks
            states = self.engines[0].collected(states)
        return states

    def _newcomer_payload(self) -> Message:
        """Return the payload of an unknown client, by which a checkpoint alone predicts for one; empty without one."""
        kind = type(self.aggregator)
        # An author's own `download` may note each client that it sees, which a checkpoint must not cause.
        same_for_all = kind.download is WeightedAverage.download
        if self.aggregator.meets_newcomers or not (same_for_all or kind.welcome is not Aggregator.welcome):
            return {}
        try:
            return self.welcome(self.data.num_clients + len(self.data.newcomers))
        # a server that looks clients up, and so can't welcome any, is no reason to lose a checkpoint
        except MisconfigurationException:
            return {}

    def load_federation_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved state of a federation of the same method.

        Args:
            state: the checkpoint's entry ``federation``, with the data module's ``preprocessing`` beside.

        Raises:
            MisconfigurationException: if the checkpoint's clients are not those of the data module.
        """
        # clients that joined an earlier part of the run beyond the number of the settings
        later = state["names"][self.data.num_clients :] if self.data.at_sites else []
        if later and len(state["names"]) <= self.data.most_clients:
            self.grow(later)
        if self._meet(state) or state["seed"] != self.seed:
            # Servers draw random numbers from the run's seed, here the checkpoint's and not this process's.
            self._set_up_server(state["seed"])
        self._keep_trained(state)
        self.data.go_to(max(1, state["round"]))
        sizes = self.sizes(range(self.data.num_clients), "train")
        self.evaluations.load(state)
        self.round, self.lr_factor = state["round"], state["lr_factor"]
        self.seed, self.initial, self.start = state["seed"], state["initial"], state["start"]
        self.aggregator.state = state["aggregator"]
        self.options.cohort.setup(sizes)
        # Merged, as a changed selection may lack entries; those keep their initial values.
        self.options.cohort.state |= state["cohort"]
        for name, stage in self.options.stages.items():
            # a stage that the run began without begins here
            if name in state["stages"]:
                stage.load_state_dict(state["stages"][name])
        for architecture, entries in state["common"].items():
            self.client_modules[architecture].assign(entries)
        self.clients = {client: ClientState(**saved) for client, saved in state["clients"].items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation to a checkpoint, and refuse entries of types that can't be read back.

        Lightning calls this hook last, when callbacks and loops have added their states.

        Raises:
            MisconfigurationException: if an entry, such as a callback's state, could not be read back.
        """
        state = {**self.federation_state(), "settings": self.settings}
        columns: list[Tensor] = []
        checkpoint["federation"] = {name: in_columns(entry, columns) for name, entry in state.items()}
        for name in checkpoint:
            checkpoint[name] = storable(checkpoint[name], name, settings="hyper_parameters" in name)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the federation from a checkpoint.

        Raises:
            MisconfigurationException: if the checkpoint is of no federation, another method, net, data, or settings.
        """
        if "federation" not in checkpoint:
            raise MisconfigurationException("ckpt_path: the checkpoint is not of a federation.")
        # a reader other than `read_checkpoint` leaves columns
        checkpoint["federation"] = in_rows(checkpoint["federation"])
        check_same(checkpoint["federation"], self.method)
        for architecture, module in enumerate(self.client_modules):
            complete(module, checkpoint, architecture)
        # a run whose data prepare nothing, or another class of data, leaves no such entry
        fitted = checkpoint.get(type(self.data).__qualname__, {}).get("preprocessing") or {}
        state = checkpoint["federation"] | {"preprocessing": fitted}
        if self.options.client_states == "disk":
            # With client_states=disk the checkpoint is memory-mapped, and its file can't be freed while one tensor
            # still refers to it; so these small entries are copied.
            small = ("initial", "start", "aggregator", "stages", "rows")
            state = state | deepcopy({name: state[name] for name in small})
        self.load_federation_state(state)
        self.clients = self._kept(self.clients)
        if not self.is_fitting and (path := self.trainer.ckpt_path):
            self.joined = dict(joined_models(path, state))
        if self.is_fitting:
            then, now = preprocessing_of(fitted, self.data)
            check_rounds(self.round, self.trainer.max_epochs)
            # Fails for another net even with resume_changed=true: no run could continue with different weights.
            self.load_state_dict(checkpoint["state_dict"])
            # other settings are told before other rows, and these before fitted values, which depend on rows
            if not (has_changed := bool(changes(state["settings"], self.settings))):
                check_rows(state, self.data)
            state = {**state, "settings": state["settings"] | then}
            self.changed = check_settings(state, self.settings | now, self.resume_changed)
            if has_changed:
                check_rows(state, self.data)

    def on_fit_end(self) -> None:
        """Load the global model into the client module."""
        # Frozen weights, which are in place, aren't copied once more.
        self.client.load_state_dict({**loadable(self.client), **self.global_model(common=False)})
        self.client.target_scale = self.data.target_scale(None)

    # Callbacks

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of `FederatedCallback` on every callback with a method of this name.

        Args:
            hook: the hook's name.
            *args: arguments after the trainer and the federation.
        """
        for method in self.listeners(hook):
            method(self.trainer, self, *args)

    def listeners(self, hook: str) -> list[Callable[..., Any]]:
        """Return the callbacks' own methods for a hook, without empty defaults, which would cost a call per client."""
        methods = []
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            method = getattr(callback, hook, None)
            if method and getattr(method, "does_nothing", False) is not True:
                methods.append(method)
        return methods
