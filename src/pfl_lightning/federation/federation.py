"""The federation: the one module that Lightning's loop drives, round by round."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.aggregators.base import checked_logs
from pfl_lightning.client.common import shared_entries, trained_parameters
from pfl_lightning.contract.messages import check_payload, sound_updates
from pfl_lightning.engines import ClientState, Job, Outcome
from pfl_lightning.engines.base import given_modes, release
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.base import FederationBase
from pfl_lightning.federation.checkpoint import storable
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.federation.metrics import new_row, training_metrics
from pfl_lightning.federation.outcomes import enough, finite, summed, unrefused
from pfl_lightning.messages import StateDict, is_finite, keep_own, num_bytes
from pfl_lightning.privacy import DPAverage
from pfl_lightning.privacy.dp_sgd import PUBLISHABLE, composed
from pfl_lightning.privacy.secure_sum import NoiseShare, drawn_share


class Federation(FederationBase):
    """Clients and a server, for Lightning's fit loop: a round is an epoch with one batch, the ids of all clients.

    ``FederatedTrainer`` makes it from a client module. Takes the arguments of `FederationBase`.
    """

    _first_factor = 1.0

    def configure_optimizers(self) -> Any:
        """Return the optimizer that carries the round's learning rate, and its schedule; engines read the rate."""
        made = self.client.configured()
        rate = made.rates[0]
        # 1 but for schedules that set rates of their own, such as OneCycleLR
        self._first_factor = made.optimizer.param_groups[0].get("initial_lr", rate) / rate if rate else 1.0
        return (
            made.optimizer if made.scheduler is None else {"optimizer": made.optimizer, "lr_scheduler": made.scheduler}
        )

    # Training

    def training_step(self, clients: list[int], batch_idx: int) -> None:
        """Runs one round."""
        # Lightning wraps this in autocast; only forward passes belong there, and engines enter it for each
        on_gpu = self.device.type == "cuda"
        with isolate_rng(include_cuda=on_gpu), torch.autocast(self.device.type, enabled=False):
            self._run_round(clients)
        self.release_modes()

    def _run_round(self, clients: list[int]) -> None:
        self._read_rate()
        start = time.perf_counter()
        if self.data.go_to(self.round + 1):
            self.options.cohort.sizes = self.sizes(clients, "train")
            # measured on samples that clients don't hold any more
            self.evaluations.after.clear()
        size = self.options.cohort_size(len(clients))
        cohort = self.participation.cohort(clients, size, cast(int, self.seed), self.round)
        choosing = time.perf_counter() - start
        self.evaluations.results = {}
        self.metrics = new_row(self.round + 1, cohort, self.trainer.optimizers[0].param_groups[0]["lr"])
        self.call("on_round_start", cohort)
        outcomes: dict[int, Outcome] = {}
        listeners = self._listeners("on_client_fit_end")
        start = time.perf_counter()
        for engine, own in self.engines_of(cohort):
            for outcome in engine.complete("training", self._jobs(own)):
                outcomes[outcome.client] = outcome
                if not outcome.refused:
                    for ended in listeners:
                        ended(self.trainer, self, outcome.client, outcome)
        self.metrics["time/train"] = time.perf_counter() - start + choosing
        for client, outcome in sorted(outcomes.items()):
            if outcome.releases:
                self.spent[client] = composed(self.spent.get(client, []), outcome.releases)
        if (private := self.options.example_privacy) is not None:
            # before the server gets it
            private.check_spent(self.spent, self.sizes(self.spent, "train"), self.round)
        outcomes, sums = self._summed(outcomes, cohort)
        taken = self._taken(outcomes, len(cohort))
        self.metrics |= sums | {"bytes/down": self.metrics["bytes/down"] + sums.get("bytes/down", 0)}
        self.evaluations.keep_initial(clients, taken)
        self._aggregate(taken)
        self.round += 1
        if (scheduler := self.lr_schedulers()) is not None:
            # moves nothing, as there are no gradients; torch warns of schedules that step before their optimizer
            self.trainer.optimizers[0].step()
            scheduler.step()  # type: ignore[union-attr]
            self._read_rate()

    def _summed(self, outcomes: dict[int, Outcome], cohort: list[int]) -> tuple[dict[int, Outcome], dict[str, Any]]:
        """Return the outcomes with sums in the place of updates, where the server learns these alone, and a record."""
        settings, engine = self.options.secure_sum, self.engines[0]
        if settings is None or not cohort:
            return outcomes, {}
        if engine.sums is not None:
            return outcomes, engine.sums
        private = self.aggregator.find(DPAverage)
        noise = None if private is None else private.noise_share(self._deployed)

        def draw(client: int, count: int) -> Tensor:
            return drawn_share(cast(NoiseShare, noise), count, self.job(client).seed)

        sizes, weighted = self.sizes(cohort, "train"), "num_samples" in self.aggregator.needs
        received = self.aggregator.download(cohort[0])
        return summed(outcomes, settings, sizes, weighted, received, noise, draw, self.round + 1)

    def _jobs(self, clients: list[int]) -> Iterator[Job]:
        listeners = self._listeners("on_client_fit_start")
        known: dict[str, Any] | None = None
        size = 0
        for client in clients:
            for started in listeners:
                started(self.trainer, self, client)
            job = self.job(client, self.options.splits_after)
            sent = job.travelling
            # what many are sent is looked at once
            if known is None or sent.keys() != known.keys() or any(sent[k] is not known[k] for k in known):
                check_payload(job.payload, client, self.aggregator, self._shared)
                known, size = sent, num_bytes(sent)
            self.metrics["bytes/down"] += size
            yield job

    def _read_rate(self) -> None:
        """Takes the round's learning rate from the optimizer that the schedule moves."""
        group = self.trainer.optimizers[0].param_groups[0]
        moved = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0
        self.lr_factor = moved * self._first_factor

    def _taken(self, outcomes: dict[int, Outcome], expected: int) -> dict[int, Outcome]:
        """The outcomes that the aggregator gets, with their metrics in the row; others are warned of and counted."""
        round = self.round + 1
        accepted = unrefused(outcomes, round)
        # under a guarantee the run goes on whoever diverged: that it ends would tell of clients
        private = bool(self.aggregator.guarantee)
        ends = not private and self.options.example_privacy is None
        sound = finite(accepted, round, expected if ends else 0)
        updates = {client: outcome.update for client, outcome in sound.items()}
        # as they stand, under the Trainer's precision
        shared = shared_entries(self.client, self.client.state_dict())
        usable = sound_updates(updates, self.aggregator, type(self.client).__name__, shared)
        taken = {client: sound[client] for client in usable}
        if expected and not private:
            taken = enough(taken, round, self.options.min_clients)
        if absent := expected - len(outcomes):
            rank_zero_warn(f"round {round}: {absent} of the round's clients gave nothing.")
        self.metrics |= {
            "clients_diverged": len(accepted) - len(sound),
            "clients_refused": len(outcomes) - len(accepted) + len(sound) - len(usable),
            "clients_absent": absent,
            **training_metrics(taken, self.sizes(taken, "train")),
        }
        if (loss := self.metrics.get("train/loss")) is not None:
            # where `self.log` would have put it, which takes as long as a step of many small nets
            self.trainer.callback_metrics["train/loss"] = torch.tensor(loss)
            self.trainer.progress_bar_metrics["train/loss"] = loss
        return taken

    def _aggregate(self, taken: dict[int, Outcome]) -> None:
        updates = {client: outcome.update for client, outcome in taken.items()}
        self.call("on_aggregate_start", updates)
        start = time.perf_counter()
        with self._remembered.aggregation():
            logs = checked_logs(self.aggregator.aggregate(updates, self.round), self.aggregator.name)
            keep_own(self.aggregator.state, updates)
        # states change here and not while clients train: an interrupted round leaves none behind
        for client, outcome in taken.items():
            own = vars(outcome.state)
            if self.options.example_privacy is not None and not is_finite(outcome.state.personal):
                # its upload counts all the same, as this tells of samples without noise
                rank_zero_warn(
                    f"round {self.round + 1}: what stays with client {client} became NaN or infinite; try a smaller "
                    "learning rate."
                )
            kept = storable(own, f"client {client}'s state")
            self.clients[client] = outcome.state if kept is own else ClientState(**kept)
            if self.options.splits_after:
                self.evaluations.after[client] = outcome.after
        self.participation.remember(taken, self.round)
        self._keep_storable()
        self.metrics["bytes/down"] += self.participation.sent
        self.metrics["bytes/up"] += self.participation.told
        self.metrics["time/aggregate"] = time.perf_counter() - start
        self.metrics |= {f"server/{name}": value for name, value in logs.items()}
        self.metrics |= {f"privacy/{name}": value for name, value in self.privacy().items()}
        self.call("on_aggregate_end", logs)

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """What is guaranteed of the rounds so far, by the aggregator or by clients' training; empty if nothing is.

        Args:
            final: whether to add the tighter bound too, where that takes longer.
        """
        if (private := self.options.example_privacy) is not None:
            return private.statement(self.spent, self.sizes(self.spent, "train"))
        statement = self.aggregator.privacy(final)
        if statement and (summed := self.options.secure_sum) is not None:
            statement["assumes"] = (
                f"in each round, {summed.honest:.3g} of the clients stay until its end and tell nobody their noise"
            )
        return statement

    @property
    def publishable(self) -> tuple[str, ...]:
        """Columns of the record that a guarantee covers, as patterns; empty without a guarantee."""
        return PUBLISHABLE if self.options.example_privacy is not None else self.aggregator.publishable

    def privacy_of(self, client: int) -> dict[str, float]:
        """The ``epsilon`` of a client's samples, where its training is private."""
        if (private := self.options.example_privacy) is None:
            return {}
        return {"epsilon": private.epsilon_of(self.spent.get(client, []), self.data.size(client, "train"))}

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        """Starts the clock."""
        self._evaluation_start = time.perf_counter()

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode, and keep the modes that client modules were given in for the engines."""
        for module in self._architectures:
            given_modes(module)
            module.eval()

    def on_validation_model_train(self) -> None:
        """Put the modes back."""
        self.release_modes()

    on_test_model_eval, on_test_model_train = on_validation_model_eval, on_validation_model_train

    def release_modes(self) -> None:
        """Put the modes of all client modules back as they were given: what was frozen by ``eval()`` stays so."""
        for module in self._architectures:
            release(module)

    def validation_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluates all clients on their validation splits; on their test splits too where rounds ask."""
        self.evaluations.evaluate(clients, self.options.validation_splits)

    def test_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluates all clients on their test splits."""
        self.evaluations.evaluate(clients, ("test",))

    def on_validation_epoch_end(self) -> None:
        """Summarises over clients into the round's row of metrics and for callbacks."""
        summary = self.evaluations.summary()
        if "val" not in self.evaluations.results:
            # checkpoints want to know it, of a round in which no client could be asked too
            summary[f"val/{self.monitor.metric}"] = math.nan
        self._end_evaluation(summary)

    def on_train_batch_end(self, outputs: Any, clients: list[int], batch_idx: int) -> None:
        """Test a round where rounds are tested and Lightning has nothing to validate: it skips its loop then."""
        if not self.options.test_every_round or self.round % (self.trainer.check_val_every_n_epoch or 1):
            return
        if not self.trainer.limit_val_batches or not len(self.data.val_dataloader()):
            self.on_validation_epoch_start()
            self.evaluations.evaluate(clients, ("test",))
            self._end_evaluation(self.evaluations.summary())

    def _end_evaluation(self, summary: dict[str, float]) -> None:
        if self._fitting:
            if self.options.test_every_round:
                summary |= self.test_global()
            self.metrics |= summary | {"time/evaluate": time.perf_counter() - self._evaluation_start}
        self._log_summary(summary)

    def on_test_epoch_end(self) -> None:
        """Summarises over clients, and tests the server's model."""
        self._log_summary(self.evaluations.summary() | self.test_global())

    def test_global(self, model: StateDict | None = None) -> dict[str, float]:
        """Metrics of the server's model on the central test set, as ``test/global_METRIC``; empty without the two.

        Args:
            model: a ``state_dict`` that holds it; None takes the server's own.
        """
        own = self.aggregator.global_model()
        whole = all(f"net.{name}" in own for name in trained_parameters(self.client, "net"))
        samples = self.data.central_data() if whole else None
        if samples is None:
            return {}
        with undisturbed():
            values = self.engines[0].evaluate_model(model or self.initial[0] | own, samples)
        return {f"test/global_{name}": value for name, value in own_values(values).items()}

    def _log_summary(self, summary: dict[str, float]) -> None:
        # while fitting, loggers get the whole record of the round at once, from a callback
        for name, value in summary.items():
            shown = name.endswith((f"/{self.monitor.metric}", f"/global_{self.monitor.metric}"))
            bar, logger = shown and self._fitting, not self._fitting
            self.log(name, value, prog_bar=bar, logger=logger, on_step=False, on_epoch=True, batch_size=1)

    # Callbacks

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of ours on the callbacks that have it, subclasses of `FederatedCallback` or not.

        Args:
            hook: its name.
            *args: what it gets after the trainer and the federation.
        """
        for method in self._listeners(hook):
            method(self.trainer, self, *args)

    def _listeners(self, hook: str) -> list[Callable[..., Any]]:
        """The methods of callbacks for a hook, without those that do nothing, which would do so for each client."""
        methods = (getattr(callback, hook, None) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        # `FederatedCallback`'s own, whose file imports this one
        nothing = "pfl_lightning.callbacks.base"
        return [method for method in methods if method and getattr(method, "__module__", "") != nothing]
