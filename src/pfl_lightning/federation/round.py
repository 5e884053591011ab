"""One round of a federation: choose clients, send payloads, train, take updates, aggregate."""

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial

from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.engines import ClientMetrics, ClientState, Job, Outcome
from pfl_lightning.federation.checkpoint import is_storable, storable
from pfl_lightning.federation.evaluation import over_clients
from pfl_lightning.federation.messages import Arrivals, accepted, check_payload
from pfl_lightning.federation.stages import Federated, Plan, Stage
from pfl_lightning.messages import Message, is_finite, keep_own, num_bytes
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server.base import check_buffers, checked_logs

NUMBER_BYTES = 8
"""Bytes counted for a number that a client reports to the selection."""


class Round:
    """A round, from the choice of its clients to the aggregation of their updates.

    Evaluation and record follow in Lightning's own loop. What a stage adds (`Stage`) comes in between.

    Args:
        federation: the federation; only `aggregate` changes what a checkpoint has of it.
        clients: ids of all clients.
    """

    def __init__(self, federation: Federated, clients: list[int]) -> None:
        self.federation, self.clients = federation, clients
        self.aggregator, self.options, self.data = federation.aggregator, federation.options, federation.data
        self.away = frozenset[int]().union(*(engine.absent for engine in federation.engines))
        """Clients out of reach."""
        self._stages = federation.stages

    def run(self) -> None:
        """Run the round."""
        plan = self.choose()
        self.federation.call("on_round_start", plan.cohort)
        outcomes = self.train(plan)
        taken = self.take(plan, outcomes)
        self.aggregate(plan, taken)

    def _with_hook(self, hook: str) -> list[Stage]:
        """Return the stages with a hook of their own, as others would cost a call per client."""
        default = getattr(Stage, hook)
        return [stage for stage in self._stages if getattr(type(stage), hook) is not default]

    # Choose

    def choose(self) -> Plan:
        """Return who takes part, and begin the round's row of the record."""
        federation, clients, start = self.federation, self.clients, time.perf_counter()
        if self.data.go_to(federation.round + 1):
            self.options.cohort.sizes = federation.sizes(clients, "train")
            # samples have moved, so the kept metrics are of samples that the clients no longer hold
            federation.evaluations.after.clear()
        if federation.drawn[0] != federation.round:
            federation.further_bytes = [0, 0]
        plan = self._plan()
        federation.evaluations.results = {}
        # the columns of every round, in their order
        federation.metrics = {
            "round": federation.round + 1,
            "clients": 0,
            "clients_diverged": 0,
            "clients_refused": 0,
            "clients_absent": 0,
            "cohort": " ".join(map(str, plan.cohort)),
            **({"absent": ""} if self._tells_absent else {}),
            "lr": federation.trainer.optimizers[0].param_groups[0]["lr"],
            "bytes/up": 0,
            "bytes/down": 0,
            "local/steps": 0,
            "local/samples": 0,
            "time/train": time.perf_counter() - start,
        }
        return plan

    def _plan(self) -> Plan:
        """Return the course of the round: unless a stage has another plan, the updates of the whole cohort arrive."""
        federation = self.federation
        there = [client for client in self.clients if client not in self.away]
        size = min(self.options.cohort_size(len(self.clients)), len(there))
        for stage in self._with_hook("on_plan"):
            if (plan := stage.on_plan(federation, there, size)) is not None:
                return plan
        if federation.drawn[0] == federation.round:
            cohort = federation.drawn[1]
        else:
            # one client stands for all where one trains on all samples
            cohort = self.clients[:1] if federation.client.pools else federation.cohort(there, size)
        return Plan(cohort, cohort)

    @property
    def _tells_absent(self) -> bool:
        """True if rounds may lack clients of their cohort, so that the record names these."""
        return self.data.at_sites or bool(self._with_hook("on_plan"))

    # Send and train

    def train(self, plan: Plan) -> dict[int, Outcome]:
        """Return the outcomes of the clients that answer, by id.

        Args:
            plan: who takes part.
        """
        federation, start = self.federation, time.perf_counter()
        outcomes: dict[int, Outcome] = {}
        listeners, trainer = federation.listeners("on_client_fit_end"), federation.trainer
        arrived, turns = sorted(plan.arrived), self.aggregator.turns(plan.cohort, federation.round)
        arrivals = self._arrivals(arrived) if turns is None else None
        handed: Message = {}
        for together in by_start(arrived, plan) if turns is None else [[client] for client in turns]:
            for engine, own in federation.engines_of(together):
                for outcome in engine.complete("training", self._jobs(own, plan, handed)):
                    client = outcome.client
                    # refused clients gave no usable result; callbacks shall not record it
                    if not outcome.refused:
                        for ended in listeners:
                            ended(trainer, federation, client, outcome)
                        if turns is not None and outcome.finite:
                            handed = {"weights": outcome.update["weights"]}
                    outcomes[client] = outcome if arrivals is None else arrivals.added(outcome)
        federation.metrics["time/train"] += time.perf_counter() - start
        return outcomes

    def _jobs(self, clients: list[int], plan: Plan, handed: Message) -> Iterator[Job]:
        """Yield the job of each client of a cohort, and count the bytes sent.

        Args:
            clients: the clients' ids.
            plan: who takes part.
            handed: entries from another client that replace the payload's.
        """
        federation, splits = self.federation, self.options.splits_after
        listeners, senders = federation.listeners("on_client_fit_start"), self._with_hook("on_send")
        # sites change their updates themselves
        changing = [] if self.data.at_sites else self._with_hook("on_upload")
        finish = partial(self._as_sent, changing) if changing else None
        previous: dict[str, object] | None = None
        size, pools = 0, federation.client.pools
        for client in clients:
            for started in listeners:
                started(federation.trainer, federation, client)
            if (begun := plan.sent.get(client)) is None:
                job = federation.job(client, splits)
            else:
                # the state is the same as at the start, since no other training of the client ends in between
                state, _ = federation.received(client)
                seed = derive_seed(federation.seed or 0, "train", begun["round"], client)
                job = federation.job(client, splits, (state, begun["payload"]))
                job = job._replace(round=begun["round"], seed=seed, lr_factor=begun["lr_factor"])
            if handed:
                job = job._replace(payload=job.payload | handed)
            if pools:
                job = job._replace(data=self.data.pooled(client))
            for stage in senders:
                job = stage.on_send(federation, job)
            sent = job.travelling
            # most methods send every client the same tensors; check and measure them once
            if previous is None or sent.keys() != previous.keys() or any(sent[k] is not previous[k] for k in previous):
                check_payload(job.payload, client, self.aggregator, federation.shared_of(client))
                previous, size = sent, num_bytes(sent)
            # what has travelled earlier is counted already
            if begun is None:
                federation.metrics["bytes/down"] += size
            yield job if finish is None else job._replace(finish=finish)

    def _as_sent(self, stages: list[Stage], outcome: Outcome, job: Job) -> Outcome:
        """Return a client's outcome with the update that leaves the client, such as a compressed one."""
        module = self.federation.client_modules[self.federation.architecture_of(outcome.client)]
        for stage in stages:
            outcome = stage.on_upload(outcome, job, module)
        return outcome

    def _arrivals(self, clients: list[int]) -> Arrivals | None:
        """Return what adds the round's weights up as they come; None to collect the updates.

        Args:
            clients: ids of the clients whose updates arrive.
        """
        federation = self.federation
        # whoever looks at single updates needs all of them; and where clients may miss, the mean of those that answer
        # has the bits of a round without the others, which a sum that expects all can't give
        may_miss = any(engine.may_miss_clients for engine in federation.engines)
        if may_miss or self._with_hook("on_collect") or federation.listeners("on_aggregate_start"):
            return None
        return Arrivals(self.aggregator, lambda: federation.sizes(clients, "train"), lambda: federation.shared_now)

    # Take

    def take(self, plan: Plan, outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
        """Return the outcomes to aggregate, by client id, and write their metrics into the round's row.

        Refused, diverged and malformed outcomes are left out, counted in the row and warned of.

        Args:
            plan: who takes part.
            outcomes: of the clients that answered.
        """
        federation, round, expected = self.federation, self.federation.round + 1, len(plan.arrived)
        for setting in self.options.stages.values():
            setting.spend(federation, plan.cohort, outcomes)
        for stage in self._with_hook("on_collect") if plan.cohort else ():
            outcomes = stage.on_collect(federation, plan.cohort, outcomes)
        absent = sorted(self.away | set(plan.cohort) - outcomes.keys())
        # Under a privacy guarantee the run must not stop because of divergence: stopping would reveal something about
        # the clients.
        private, ends = bool(self.aggregator.guarantee), not federation.publishable
        method, label = type(federation.client).__name__, self.data.client_label
        nets = {client: federation.architecture_of(client) for client in outcomes if self.aggregator.takes_narrow}
        # once for each net, but for the first one, of which `shared_now` is
        of_net = {net: client for client, net in nets.items() if net}
        shared = {net: federation.shared_of(client) for net, client in of_net.items()}
        parts = {client: shared[net] for client, net in nets.items() if net}
        taken, diverged = accepted(
            outcomes, self.aggregator, method, federation.shared_now, round, expected if ends else 0, label, parts
        )
        refused = len(outcomes) - diverged - len(taken)
        if expected and not private and len(taken) < self.options.min_clients:
            rank_zero_warn(
                f"round {round} leaves the federation as it is: {len(taken)} updates are fewer than "
                f"trainer.min_clients={self.options.min_clients}."
            )
            taken = {}
        if silent := expected - len(outcomes):
            rank_zero_warn(f"round {round}: {silent} of the round's clients gave nothing.")
        # a client whose method doesn't train has an update but no training metrics
        trained = {client: outcome.metrics for client, outcome in taken.items() if outcome.metrics}
        means = over_clients(ClientMetrics.of(trained), federation.sizes(trained, "train"))
        federation.metrics |= {
            **({"absent": " ".join(map(str, absent))} if self._tells_absent else {}),
            "clients": len(taken),
            "clients_diverged": diverged,
            "clients_refused": refused,
            "clients_absent": len(absent),
            "bytes/up": num_bytes([outcome.update for outcome in taken.values()]),
            "local/steps": sum(outcome.steps for outcome in taken.values()),
            "local/samples": sum(outcome.samples for outcome in taken.values()),
            **{f"train/{name}": value for name, value in means.items()},
        }
        if (loss := federation.metrics.get("train/loss")) is not None:
            federation.show("train/loss", loss, on_bar=True)
        federation.evaluations.keep_initial(self.clients, taken)
        return taken

    # Aggregate

    def aggregate(self, plan: Plan, taken: dict[int, Outcome]) -> None:
        """Aggregate the updates, and commit the new states of clients and stages.

        Args:
            plan: who took part.
            taken: the outcomes to aggregate, by client id.
        """
        federation, aggregator = self.federation, self.aggregator
        updates = {client: outcome.update for client, outcome in taken.items()}
        for stage in self._with_hook("on_deliver"):
            updates = stage.on_deliver(federation, plan, updates)
        federation.call("on_aggregate_start", updates)
        start = time.perf_counter()
        # changes since the last aggregation are due to these hooks, which evaluations call too
        federation.remembered.check("download or global_model")
        logs = checked_logs(aggregator.aggregate(updates, federation.round), aggregator.name)
        if federation.trainer.world_size > 1 and aggregator.is_secure:
            # each rank has drawn noise of its own
            logs, aggregator.state = federation.trainer.strategy.broadcast((logs, aggregator.state))
        # looked for only where there is batch norm, as a server without a model of its own may compute one
        if any(name.endswith("running_var") for name in federation.shared):
            check_buffers(aggregator.global_model(), federation.shared, updates, aggregator.name)
        keep_own(aggregator.state, updates)
        federation.remembered.check("aggregate")
        # client states change only here, after aggregation, so that an interrupted round leaves no client half-updated
        private = bool(federation.publishable)
        for client, outcome in taken.items():
            federation.clients[client] = self._sound(client, outcome.state, private)
            if self.options.splits_after:
                federation.evaluations.after[client] = outcome.after
        self._remember(taken, plan.took)
        for setting in self.options.stages.values():
            setting.end(federation)
        federation.keep_storable()
        down, up = federation.further_bytes
        federation.metrics["bytes/down"] += down
        federation.metrics["bytes/up"] += up
        federation.metrics["time/aggregate"] = time.perf_counter() - start
        federation.metrics |= {f"server/{name}": value for name, value in logs.items()}
        federation.metrics |= {f"privacy/{name}": value for name, value in federation.privacy().items()}
        federation.call("on_aggregate_end", logs)

    def _sound(self, client: int, state: ClientState, private: bool) -> ClientState:
        """Return a client's state in types that checkpoints take, and warn where it isn't finite.

        Args:
            client: the client's id.
            state: the state after training.
            private: whether the client's updates count though its state isn't finite, as under a privacy guarantee.
        """
        if private and not is_finite(state.personal):
            # the update still counts: leaving it out would reveal something about the samples without noise
            rank_zero_warn(
                f"round {self.federation.round + 1}: what stays with client {self.data.client_label(client)} became "
                "NaN or infinite; try a smaller learning rate."
            )
        entries = vars(state)
        # most states are empty
        if not any(entries.values()) or is_storable(entries):
            return state
        return ClientState(**storable(entries, f"client {client}'s state"))

    def _remember(self, taken: Mapping[int, Outcome], took: Mapping[int, float]) -> None:
        """Give the selection the reports of the clients whose updates are aggregated.

        Args:
            taken: their outcomes by id.
            took: seconds by id on a simulated clock, in place of measured ones.
        """
        asks = sorted(self.options.cohort.asks)
        reports: dict[int, dict[str, float]] = {client: {} for client in taken}
        for client, outcome in taken.items() if asks else ():
            values = outcome.metrics | {"seconds": took.get(client, outcome.seconds)}
            # only finite numbers, whatever a site may report
            reports[client] = {name: values[name] for name in asks if math.isfinite(values.get(name, math.nan))}
            self.federation.further_bytes[1] += NUMBER_BYTES * len(reports[client])
        self.options.cohort.remember(reports, self.federation.round)


def by_start(arrived: list[int], plan: Plan) -> list[list[int]]:
    """Return the clients to train in groups with the same round of their start, as engines expect it.

    Args:
        arrived: ids of the clients whose updates arrive.
        plan: who takes part.
    """
    if not plan.sent:
        return [arrived]
    groups: dict[int, list[int]] = {}
    for client in arrived:
        groups.setdefault(plan.sent[client]["round"], []).append(client)
    return [groups[round] for round in sorted(groups)]
