"""A federation as a LightningModule: one epoch of Lightning's loop is one round."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.aggregators.base import checked_logs
from pfl_lightning.client.common import shared_entries, trained_parameters
from pfl_lightning.contract.messages import check_payload, sound_updates
from pfl_lightning.engines import ClientState, Job, Outcome
from pfl_lightning.engines.base import given_modes, release
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.accepted_updates import enough, finite, unrefused
from pfl_lightning.federation.base import FederationBase
from pfl_lightning.federation.checkpoint import storable
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.federation.metrics import new_row, training_metrics
from pfl_lightning.messages import StateDict, is_finite, keep_own, num_bytes
from pfl_lightning.privacy.dp_sgd import PUBLISHABLE, composed


class Federation(FederationBase):
    """Run the rounds of a federation: an epoch with a single batch, which holds the ids of all clients.

    `FederatedTrainer` makes the federation from a client module; the arguments are those of `FederationBase`.
    """

    _first_factor = 1.0

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

    # Training

    def training_step(self, clients: list[int], batch_idx: int) -> None:
        """Run one round.

        Args:
            clients: ids of all clients.
            batch_idx: always 0.
        """
        # Lightning runs training_step under autocast, which would also change aggregation and optimizer steps; engines
        # enter autocast for forward passes only.
        on_gpu = self.device.type == "cuda"
        with isolate_rng(include_cuda=on_gpu), torch.autocast(self.device.type, enabled=False):
            self._run_round(clients)
        self.release_modes()

    def _run_round(self, clients: list[int]) -> None:
        """Choose the cohort, train, aggregate, and step the learning rate schedule."""
        self._read_rate()
        start = time.perf_counter()
        if self.data.go_to(self.round + 1):
            self.options.cohort.sizes = self.sizes(clients, "train")
            # Samples have moved, so the kept metrics are of samples that the clients no longer hold.
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
                # Refused clients gave no usable result; callbacks shall not record it.
                if not outcome.refused:
                    for ended in listeners:
                        ended(self.trainer, self, outcome.client, outcome)
        self.metrics["time/train"] = time.perf_counter() - start + choosing
        for client, outcome in sorted(outcomes.items()):
            if outcome.releases:
                self.spent[client] = composed(self.spent.get(client, []), outcome.releases)
        if (private := self.options.example_privacy) is not None:
            # Stop before the server sees an update that would exceed the privacy budget.
            private.check_spent(self.spent, self.sizes(self.spent, "train"), self.round)
        taken = self._taken(outcomes, len(cohort))
        self.evaluations.keep_initial(clients, taken)
        self._aggregate(taken)
        self.round += 1
        if (scheduler := self.lr_schedulers()) is not None:
            # The step changes no weight, as there are no gradients. It only prevents torch's warning about schedules
            # that step before their optimizer.
            self.trainer.optimizers[0].step()
            scheduler.step()  # type: ignore[union-attr]
            self._read_rate()

    def _jobs(self, clients: list[int]) -> Iterator[Job]:
        """Yield the job of each client of a cohort, and count the bytes sent."""
        listeners = self._listeners("on_client_fit_start")
        known: dict[str, Any] | None = None
        size = 0
        for client in clients:
            for started in listeners:
                started(self.trainer, self, client)
            job = self.job(client, self.options.splits_after)
            sent = job.travelling
            # Most methods send every client the same tensors; check and measure them once.
            if known is None or sent.keys() != known.keys() or any(sent[k] is not known[k] for k in known):
                check_payload(job.payload, client, self.aggregator, self._shared)
                known, size = sent, num_bytes(sent)
            self.metrics["bytes/down"] += size
            yield job

    def _read_rate(self) -> None:
        """Read the round's learning rate, as a factor of the initial one, from the scheduled optimizer."""
        group = self.trainer.optimizers[0].param_groups[0]
        moved = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0
        self.lr_factor = moved * self._first_factor

    def _taken(self, outcomes: dict[int, Outcome], expected: int) -> dict[int, Outcome]:
        """Return the outcomes to aggregate, and write their metrics into the round's row.

        Refused, diverged and malformed outcomes are left out, counted in the row and warned of.

        Args:
            outcomes: the outcomes of the round by client id.
            expected: the number of clients in the cohort.
        """
        round = self.round + 1
        accepted = unrefused(outcomes, round)
        # Under a privacy guarantee the run must not stop because of divergence: stopping would reveal something about
        # the clients.
        private = bool(self.aggregator.guarantee)
        ends = not private and self.options.example_privacy is None
        sound = finite(accepted, round, expected if ends else 0)
        updates = {client: outcome.update for client, outcome in sound.items()}
        # Read now and not at set-up: the Trainer's precision may have changed the weights' dtype.
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
            # The same place where self.log writes; self.log itself takes as long as a training step of many small nets.
            self.trainer.callback_metrics["train/loss"] = torch.tensor(loss)
            self.trainer.progress_bar_metrics["train/loss"] = loss
        return taken

    def _aggregate(self, taken: dict[int, Outcome]) -> None:
        """Aggregate the updates, and commit the new client states."""
        updates = {client: outcome.update for client, outcome in taken.items()}
        self.call("on_aggregate_start", updates)
        start = time.perf_counter()
        with self._remembered.aggregation():
            logs = checked_logs(self.aggregator.aggregate(updates, self.round), self.aggregator.name)
            keep_own(self.aggregator.state, updates)
        # Client states change only here, after aggregation, so that an interrupted round leaves no client half-updated.
        for client, outcome in taken.items():
            own = vars(outcome.state)
            if self.options.example_privacy is not None and not is_finite(outcome.state.personal):
                # The update still counts: leaving it out would reveal something about the samples without noise.
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
        """Return the privacy guarantee of the rounds so far, by the aggregator or DP-SGD; empty without one.

        Args:
            final: whether to add the tighter bound, which takes longer to compute.
        """
        if (private := self.options.example_privacy) is not None:
            return private.statement(self.spent, self.sizes(self.spent, "train"))
        return self.aggregator.privacy(final)

    @property
    def publishable(self) -> tuple[str, ...]:
        """Name patterns of the record's columns under the privacy guarantee; empty without a guarantee."""
        return PUBLISHABLE if self.options.example_privacy is not None else self.aggregator.publishable

    def privacy_of(self, client: int) -> dict[str, float]:
        """Return the ``epsilon`` spent on a client's samples by DP-SGD; empty without ``trainer.example_privacy``."""
        if (private := self.options.example_privacy) is None:
            return {}
        return {"epsilon": private.epsilon_of(self.spent.get(client, []), self.data.size(client, "train"))}

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        """Start the clock."""
        self._evaluation_start = time.perf_counter()

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode, after recording each submodule's mode for the engines."""
        for module in self._architectures:
            given_modes(module)
            module.eval()

    def on_validation_model_train(self) -> None:
        """Restore the recorded modes."""
        self.release_modes()

    on_test_model_eval, on_test_model_train = on_validation_model_eval, on_validation_model_train

    def release_modes(self) -> None:
        """Restore the modes of client modules as given by the user; submodules frozen by ``eval()`` stay frozen."""
        for module in self._architectures:
            release(module)

    def validation_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluate all clients on the validation splits, with ``trainer.test_every_round`` also on the test splits."""
        self.evaluations.evaluate(clients, self.options.validation_splits)

    def test_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluate all clients on the test splits."""
        self.evaluations.evaluate(clients, ("test",))

    def on_validation_epoch_end(self) -> None:
        """Summarise the evaluation over clients into the round's row of metrics, for loggers and callbacks."""
        summary = self.evaluations.summary()
        if "val" not in self.evaluations.results:
            # ModelCheckpoint needs its metric in every round, also when no client could be evaluated.
            summary[f"val/{self.monitor.metric}"] = math.nan
        self._end_evaluation(summary)

    def on_train_batch_end(self, outputs: Any, clients: list[int], batch_idx: int) -> None:
        """Evaluate the test splits if ``test_every_round`` is set and Lightning skips validation.

        Lightning skips the loop if no client has validation samples, or with ``limit_val_batches=0``.
        """
        if not self.options.test_every_round or self.round % (self.trainer.check_val_every_n_epoch or 1):
            return
        if not self.trainer.limit_val_batches or not len(self.data.val_dataloader()):
            self.on_validation_epoch_start()
            self.evaluations.evaluate(clients, ("test",))
            self._end_evaluation(self.evaluations.summary())

    def _end_evaluation(self, summary: dict[str, float]) -> None:
        """Add the server's model, the time and the summary to the row, and log the summary."""
        if self._fitting:
            if self.options.test_every_round:
                summary |= self.test_global()
            self.metrics |= summary | {"time/evaluate": time.perf_counter() - self._evaluation_start}
        self._log_summary(summary)

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
            values = self.engines[0].evaluate_model(model or self.initial[0] | own, samples)
        return {f"test/global_{name}": value for name, value in own_values(values).items()}

    def _log_summary(self, summary: dict[str, float]) -> None:
        """Log a summary; the progress bar shows the monitored metric only."""
        # While fitting, `RoundLogger` writes the whole row at the end of the round, so Lightning's loggers are skipped
        # here.
        for name, value in summary.items():
            shown = name.endswith((f"/{self.monitor.metric}", f"/global_{self.monitor.metric}"))
            bar, logger = shown and self._fitting, not self._fitting
            self.log(name, value, prog_bar=bar, logger=logger, on_step=False, on_epoch=True, batch_size=1)

    # Callbacks

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of `FederatedCallback` on every callback with a method of this name.

        Args:
            hook: the hook's name.
            *args: arguments after the trainer and the federation.
        """
        for method in self._listeners(hook):
            method(self.trainer, self, *args)

    def _listeners(self, hook: str) -> list[Callable[..., Any]]:
        """Return the callbacks' own methods for a hook, without empty defaults, which would cost a call per client."""
        methods = (getattr(callback, hook, None) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        # Named as text, because the file of `FederatedCallback` imports this one.
        nothing = "pfl_lightning.callbacks.base"
        return [method for method in methods if method and getattr(method, "__module__", "") != nothing]
