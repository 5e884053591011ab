"""What a federation consists of, where it stands between two rounds, and what a checkpoint holds of it."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.client.common import common_parameters, personal_entries, shared_entries, whole_model
from pfl_lightning.client.hooks import check_hooks
from pfl_lightning.client.module import ClientModule
from pfl_lightning.contract.aggregator_memory import Remembered
from pfl_lightning.contract.guarantee import check_example_level, check_guarantee
from pfl_lightning.contract.messages import check_entries, check_payload
from pfl_lightning.contract.pairing import check_common, check_finite, check_pair, check_split, check_tied
from pfl_lightning.contract.sums import check_sums
from pfl_lightning.contract.task import check_requirements, check_task
from pfl_lightning.data import FederatedDataModule, Split
from pfl_lightning.data.description import fingerprint
from pfl_lightning.engines import ClientState, Engine, Job
from pfl_lightning.engines.threads import threads_for
from pfl_lightning.federation.checkpoint import check_same, pair_clients, saved_states, storable
from pfl_lightning.federation.evaluation import Evaluations
from pfl_lightning.federation.options import FederationOptions
from pfl_lightning.federation.participation import Participation, check_tells
from pfl_lightning.federation.resuming import (
    Settings,
    changes,
    check_rounds,
    check_settings,
    flat,
    rounds_of,
    settings_of,
)
from pfl_lightning.messages import Message, StateDict, detached
from pfl_lightning.methods.registry import method_of
from pfl_lightning.privacy import Release
from pfl_lightning.runs.client_states import DiskStates
from pfl_lightning.runs.folder import STATES, run_folder
from pfl_lightning.seeds import derive_seed


class FederationBase(LightningModule):
    """The clients and the server of a federation, without its rounds, which `Federation` adds.

    Its ``state_dict`` is the global model's, under the client module's own names, so that a checkpoint loads into the
    client module; the rest of the federation is in the checkpoint under ``federation``.

    Args:
        client: the client module that every client is run through; with several nets, one of each is made.
        aggregator: the server side; None takes the client module's own.
        options: how rounds are made.

    Raises:
        MisconfigurationException: if client and aggregator don't fit together.
    """

    def __init__(self, client: ClientModule, aggregator: Aggregator | None, options: FederationOptions) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.client = client
        # one resident module an architecture, not one a client
        self.architectures = nn.ModuleList(client.architectures())
        self.aggregator = aggregator if aggregator is not None else client.configure_aggregator()
        self.options = options
        self.round = 0
        self.lr_factor = 1.0
        self.seed: int | None = None
        self.initial: list[StateDict] = []
        self.start: StateDict = {}
        self.clients: MutableMapping[int, ClientState] = {}
        self.metrics: dict[str, Any] = {}
        check_hooks(client)
        self.monitor = options.monitored(client)
        self.evaluations = Evaluations(options, self.engines_of, self.job, self.sizes, client.task, self.monitor)
        self.participation = Participation(options.cohort, self.evaluations.measure, self.job)
        self.settings: Settings = {}
        self.trained: dict[str, Any] = {}
        """What clients are paired by: their ``names`` and ``sizes``, the ``partition``'s fingerprint, ``settings``."""
        self._met: FederatedDataModule | None = None
        self.resume_changed = self.changed = False
        self.spent: dict[int, list[Release]] = {}
        check_finite(client, self.aggregator)
        check_guarantee(client, self.aggregator, options.min_clients)
        if options.example_privacy is not None:
            check_example_level(client, self.aggregator, options.cohort)
        if options.secure_sum is not None:
            check_sums(client, self.aggregator)
        check_pair(client, self.aggregator)
        check_requirements(client, self.aggregator)
        check_tells(client, options.cohort)
        for module in self._architectures:
            module.settle_common()
            check_tied(module)
            check_split(module)
            module.requested = (module.offers & self.aggregator.needs) | options.cohort.asks
            module.withheld = module.sends - self.aggregator.needs if self.aggregator.guarantee else frozenset()
        self.save_hyperparameters(dict(client.hparams))

    @property
    def method(self) -> str:
        """The literature's name of client module and aggregator, or else their own."""
        return method_of(self.client, self.aggregator)

    @property
    def _architectures(self) -> list[ClientModule]:
        return cast(list[ClientModule], list(self.architectures))

    def architecture_of(self, client: int) -> int:
        """Which of the ``architectures`` a client has; new clients take those of the first ones."""
        num_clients = self.data.num_clients
        return self.client.architecture_of(client % num_clients, num_clients)

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""
        return cast(FederatedDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    def sizes(self, clients: Iterable[int], split: Split) -> dict[int, int]:
        """Numbers of samples that clients have in a split, by id."""
        data = self.data
        return {client: data.size(client, split) for client in clients}

    @property
    def _fitting(self) -> bool:
        return bool(self.trainer.state.fn == TrainerFn.FITTING)

    @cached_property
    def engines(self) -> list[Engine]:
        """What runs the clients of each module, perhaps one for all; made when the modules stand on their device."""
        try:
            return self.options.engines(self._architectures, self.data, self.trainer)
        except AttributeError as error:
            # of which `nn.Module` would say no more than that this property isn't there
            raise RuntimeError(f"{type(self.client).__name__} can't be set up: {error}") from error

    def engines_of(self, clients: Sequence[int]) -> Iterable[tuple[Engine, list[int]]]:
        """All engines, each with those of the clients that it runs."""
        own: dict[Engine, list[int]] = {engine: [] for engine in self.engines}
        for client in clients if len(own) > 1 else ():
            own[self.engines[self.architecture_of(client)]].append(client)
        return own.items() if len(own) > 1 else [(self.engines[0], list(clients))]

    def setup(self, stage: str) -> None:
        """Takes the common initial model and prepares the server, once."""
        for module in self._architectures:
            self.options.check(module, self.data)
            with threads_for(module):
                check_task(module, self.data)
            module.num_rounds = self.trainer.max_epochs or 1
        if self.data.drifts:
            self._check_drift()
        self._check_fitted()
        self.data.go_to(max(1, self.round))
        self.client.check_optimizers(cast(int, self.trainer.max_epochs) if self._fitting else 0)
        rounds = rounds_of(self.options, self.trainer, self.data.num_clients)
        self.settings = settings_of(self._architectures, self.aggregator, self.data, rounds)
        if self.options.secure_sum is not None and rounds["attacks"]:
            raise MisconfigurationException(
                f"trainer.callbacks={rounds['attacks'][0].split()[0]} changes single updates, and trainer.secure_sum "
                "has summed them by then; leave one of the two out."
            )
        if self.seed is not None:
            if self.data is not self._met:
                self._meet(self.trained)
            return
        self._keep_trained({})
        # every rank goes on with what the first one has drawn
        self.seed, states = self.trainer.strategy.broadcast(
            (torch.initial_seed(), [whole_model(module) for module in self._architectures])
        )
        pairs = list(zip(self._architectures, states, strict=True))
        for module, state in pairs:
            module.assign({name: state[name] for name in common_parameters(module)})
        self.initial = [personal_entries(module, state) for module, state in pairs]
        shared = [shared_entries(module, state) for module, state in pairs]
        check_common(self._architectures, shared)
        self._shared = shared[0]
        self._set_up_server(self.seed)
        # where every model is somebody's own, a global model has still to be shown: the one that all began with
        whole = self.aggregator.global_model()
        self.start = {name: tensor for name, tensor in self._shared.items() if name not in whole}
        self.clients = self._kept({})
        for client in self.data.newcomers:
            # now, and not when all rounds are done
            self.welcome(client)

    def _keep_trained(self, saved: Mapping[str, Any]) -> None:
        """Keep what tells the federation's clients from those of another data module.

        Args:
            saved: a checkpoint's entry ``federation``; what it lacks is taken of this data module.
        """
        data = self._met = self.data
        self.trained = {
            "names": data.client_names[: data.num_clients],
            "sizes": list(self.sizes(range(data.num_clients), "train").values()),
            "partition": fingerprint(data),
            "settings": self.settings,
        }
        self.trained |= {name: saved[name] for name in self.trained if name in saved}

    def _meet(self, saved: Mapping[str, Any]) -> bool:
        """Pair the clients of the data module with those of a federation; return whether their ids have changed.

        Raises:
            MisconfigurationException: if they can't be paired, or metrics are kept that are of other samples.
        """
        use = "fit" if self._fitting else "join" if getattr(self.trainer, "joins", False) else "test"
        # by the first division, as later ones of a drift follow from it
        with self.data.at_round(1):
            changed = pair_clients(saved, self.data, use)
        self._met, when = self.data, self.options.evaluate
        if use == "test" and when != "before" and "partition" in saved and saved["partition"] != fingerprint(self.data):
            raise MisconfigurationException(
                f"trainer.evaluate={when} shows metrics that were kept when clients trained, and data holds other "
                "samples than then; take before."
            )
        return changed

    def _check_fitted(self) -> None:
        """Refuse inputs that were made by what a guarantee of privacy hides.

        One client's samples then change the inputs of others, and so the whole training, past every bound. A client's
        own statistics are within what the guarantee of clients bounds, and not within that of samples.
        """
        fitted, per_sample = self.data.fitted_on, self.options.example_privacy is not None
        if fitted == "nothing" or not (per_sample or (self.aggregator.guarantee and fitted == "all clients")):
            return
        setting = "trainer.example_privacy" if per_sample else f"aggregator={self.aggregator.name}"
        remedies = "constants that come from elsewhere, as by data.standardize={age: [50, 12]}, categories and classes"
        raise MisconfigurationException(
            f"data={type(self.data).__name__} makes inputs by the samples of {fitted}, past the bound of {setting}; "
            f"give {remedies}{'' if per_sample else ', or data.standardize=client'}, or take data that need none."
        )

    def _check_drift(self) -> None:
        """Refuse what counts on the samples that clients held before the first round, where these change."""
        name = type(self.data).__name__
        setting = f"data.drift={sorted(self.data.drift)}" if self.data.drift else f"data={name} with its division_at"
        if self.options.example_privacy is not None:
            raise MisconfigurationException(
                f"{setting} moves samples between clients, and trainer.example_privacy counts what each client spends "
                "on its own; leave one out."
            )
        if self.data.fitted_on == "each client":
            raise MisconfigurationException(
                f"{setting} moves samples between clients, and data.standardize=client scales each by its first "
                "holder's; take table."
            )
        if self.aggregator.fixed_sizes:
            raise MisconfigurationException(
                f"{setting} changes the clients' numbers of samples, which aggregator {self.aggregator.name} takes "
                "once, before the first round; take another method, such as FedAvg."
            )

    def _kept(self, states: MutableMapping[int, ClientState]) -> MutableMapping[int, ClientState]:
        """Return clients' states where the Trainer keeps them."""
        if self.options.client_states != "disk" or not (states or self._fitting):
            # an evaluation that is refused before it has states shall leave no folder
            return states
        run = run_folder(self.trainer)
        return DiskStates(run and run / STATES, states)

    def _set_up_server(self, seed: int) -> None:
        clients, rounds = self.data.num_clients, self.trainer.max_epochs or -1
        known, sampling = None if rounds < 0 else rounds, self.options.sampling(clients)
        summed = self.options.secure_sum is not None
        self.aggregator.setup(
            Server(clients, self._shared, self.client, self.data, seed, known, sampling, self._deployed, summed)
        )
        self._remembered = Remembered(self.aggregator, self.architectures)
        self.options.cohort.setup(self.sizes(range(self.data.num_clients), "train"))
        self._keep_storable()

    @property
    def _deployed(self) -> bool:
        """Whether clients are at sites, of which an engine is made that no name or class says."""
        return not isinstance(self.options.engine, (str, type))

    def _keep_storable(self) -> None:
        """Turn NumPy's numbers in what server and cohort remember; refuse what no checkpoint could give back.

        The running state is turned, and not only the saved one: a resumed run goes on with the same bits.
        """
        for owner, name in ((self.aggregator, self.aggregator.name), (self.options.cohort, "trainer.cohort")):
            state = owner.state
            if (kept := storable(state, f"{name}.state")) is not state:
                owner.state = kept

    def job(self, client: int, evaluate: tuple[Split, ...] = ()) -> Job:
        """A client's work in the coming round.

        Args:
            client: its id.
            evaluate: the splits to evaluate on.
        """
        state = self.clients.get(client) or ClientState(self.initial[self.architecture_of(client)])
        seed = derive_seed(cast(int, self.seed), "train", self.round, client)
        payload = self.aggregator.download(client)
        check_entries(payload, client, self.aggregator, self.client.needs, type(self.client).__name__)
        once = self.aggregator.sends_once
        data, has_once = self.data.client(client), bool(once) and client in self.clients
        return Job(client, self.round, state, payload, data, seed, self.lr_factor, evaluate, once, has_once)

    def welcome(self, client: int, update: Message | None = None) -> Message:
        """What the server has for a new client.

        Args:
            client: its id.
            update: what it has sent, if it has sent something.

        Raises:
            MisconfigurationException: if the server has nothing for clients whom it doesn't know.
        """
        try:
            payload = self.aggregator.welcome(client, update)
        except (LookupError, StopIteration) as error:
            raise MisconfigurationException(
                f"data.new_clients={self.data.new_clients}: aggregator {self.aggregator.name} has nothing for a client "
                "that it doesn't know; take 0, or let its welcome(client, update) say what new clients receive."
            ) from error
        check_entries(payload, client, self.aggregator, self.client.needs, type(self.client).__name__)
        check_payload(payload, client, self.aggregator, self._shared)
        return payload

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The global model, under the client module's names; what it leaves out is the common initial one."""
        return whole_model(self.client) | self.start | self.initial[0] | self.aggregator.global_model()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes a global model.

        Raises:
            MisconfigurationException: if it is another net's.
        """
        try:
            return self.client.load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise MisconfigurationException(f"ckpt_path: the checkpoint holds another net: {reason}") from error

    def federation_state(self) -> dict[str, Any]:
        """Everything that a later process needs to go on as if nothing had happened."""
        clients = range(self.data.num_clients)
        return {
            "method": self.method,
            **{name: self.trained[name] for name in ("names", "sizes", "partition")},
            "round": self.round,
            "lr_factor": self.lr_factor,
            "seed": self.seed,
            "initial": self.initial,
            "start": self.start,
            # the first module's are in the global model
            "common": {k: detached(common_parameters(m)) for k, m in enumerate(self._architectures) if k},
            "aggregator": self.aggregator.state,
            "spent": {client: list(map(list, releases)) for client, releases in sorted(self.spent.items())},
            "cohort": self.options.cohort.state,
            "clients": saved_states(self.clients),
            "after": dict(sorted(self.evaluations.after.items())),
            # not for resuming: they let one client's model be loaded without the aggregator
            "payloads": {client: self.aggregator.download(client) for client in clients},
        }

    def load_federation_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this method.

        Raises:
            MisconfigurationException: if its clients are others than those of data.
        """
        if self._meet(state) or state["seed"] != self.seed:
            # what the server draws is a function of the run's seed, not of the process's
            self._set_up_server(state["seed"])
        self._keep_trained(state)
        self.data.go_to(max(1, state["round"]))
        sizes = self.sizes(range(self.data.num_clients), "train")
        self.evaluations.load(state)
        self.round, self.lr_factor = state["round"], state["lr_factor"]
        self.seed, self.initial, self.start = state["seed"], state["initial"], state["start"]
        self.aggregator.state = state["aggregator"]
        self.spent = {k: [Release(*each) for each in releases] for k, releases in state.get("spent", {}).items()}
        self.options.cohort.setup(sizes)
        # another choice than the run had, or an earlier version's, begins without what it would remember
        self.options.cohort.state |= state.get("cohort", {})
        for architecture, entries in state.get("common", {}).items():
            self._architectures[architecture].assign(entries)
        self.clients = {client: ClientState(**saved) for client, saved in state["clients"].items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation, and look at the types of everything in the checkpoint, which is complete by now.

        Raises:
            MisconfigurationException: if something in it, such as a callback's state, could not be read back.
        """
        checkpoint["federation"] = {**self.federation_state(), "settings": self.settings}
        for name in checkpoint:
            checkpoint[name] = storable(checkpoint[name], name, settings="hyper_parameters" in name)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the federation."""
        if "federation" not in checkpoint:
            raise MisconfigurationException("ckpt_path: the checkpoint is not of a federation.")
        state = checkpoint["federation"]
        check_same(state, self.method)
        if self.options.client_states == "disk":
            # the file of a mapped checkpoint stays on the disk, replaced or not, for as long as a tensor is in it
            state = state | deepcopy({name: state[name] for name in ("initial", "start", "aggregator")})
        self.load_federation_state(state)
        self.clients = self._kept(self.clients)
        # none in those of earlier versions, and of data that fit nothing
        fitted = checkpoint.get(type(self.data).__qualname__, {}).get("preprocessing")
        then, now = (flat("data.preprocessing", each if fitted else {}) for each in (fitted, self.data.preprocessing))
        # a column that has no vocabulary any more, or has one now, has changed too
        then, now = dict.fromkeys(now) | then, dict.fromkeys(then) | now
        if self._fitting:
            check_rounds(self.round, self.trainer.max_epochs)
            # another net is no change that a run could go on with
            self.load_state_dict(checkpoint["state_dict"])
            if "settings" in state:
                state = {**state, "settings": state["settings"] | then}
            self.changed = check_settings(state, self.settings | now, self.resume_changed)
        elif lines := changes(then, now):
            rank_zero_warn(
                f"ckpt_path: the checkpoint's model has learned from inputs that were made otherwise ({lines[0]}); "
                "give it the data that it was trained with."
            )

    def on_fit_end(self) -> None:
        """Leaves the global model in the client module."""
        self.client.load_state_dict(self.state_dict())
