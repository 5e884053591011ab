"""Audits of a guarantee by canaries: a lower bound on epsilon in one run."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.sample_exchange import SampleExchange
from pfl_lightning.client import ClientModule
from pfl_lightning.data import Samples
from pfl_lightning.engines import Outcome
from pfl_lightning.engines.steps import step_values
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Message, StateDict, Updates, tensors, tree_map
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.privacy import DPAverage
from pfl_lightning.privacy.audit import audited_epsilon
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Classification

Unit: TypeAlias = Literal["client", "sample"]

CONFIDENCE = 0.95
RIDGE = 0.1
"""Weight of the penalty in the regression of a client's change on gradients of norm 1."""


class CanaryAudit(SampleExchange):
    r"""Bounds the :math:`\epsilon` of a run from below, by canaries and a coin for each.

    With a correct guarantee the bound is above the guaranteed :math:`\epsilon` with a probability of 5 % at most. A
    bound above refutes the guarantee, for instance where clipping is left out by a bug. The bound by the rounds so far
    is in each row of the record as ``privacy/audited_epsilon``, and in the summary as ``audit``. In a run without a
    guarantee the bound is not compared with anything.

    * ``client``: canaries are further clients. In each round every included canary sends the global model, changed
      along a direction orthogonal to all other canaries and to the clients of the round, by ``scale`` times the
      clipping bound of ``DPAverage`` or, without ``DPAverage``, times the largest change of a client. A canary's score
      is the global model's movement along the canary's directions. With ``Poisson``, canaries take part in rounds at
      the clients' rate.
    * ``sample``: canaries replace some of the clients' training samples, with large orthogonal noise as inputs and a
      wrong target. Under ``trainer.example_privacy`` an excluded canary has inputs of NaN, which add nothing to any
      step; otherwise the original sample stays. A canary's score is the canary's part in the client's changes, by a
      regression on samples' gradients. Metrics of training are left out of the record, as canaries falsify them.

    Canaries change the models, and so all metrics: use an audited run for the audit alone. Give the guarantee a small
    delta such as 1e-5, as guesses on m canaries tell little where m times delta is near 1.
    Sources: Steinke, Nasr and Jagielski, 2023 (https://arxiv.org/abs/2305.08846); Andrew et al., 2024
    (https://arxiv.org/abs/2302.03098).

    Args:
        canaries: number of canaries m, at least 10; 100 canaries can show an :math:`\epsilon` of at most 3.1, and 1000
            of at most 5.3.
        unit: ``client`` or ``sample``; None takes the unit of the run's guarantee, and ``client`` without a guarantee.
        scale: norm of a client's canary divided by the clipping bound, or standard deviation of a canary's inputs
            divided by the deviation of samples; above 0. Only canaries above the bound show missing clipping.

    Raises:
        MisconfigurationException: if a value is out of its range; before the first round, if the run can't be audited.
    """

    is_attack = True
    """Marks settings to compare with the checkpoint's when a run is resumed."""

    def __init__(self, canaries: int = 100, unit: Unit | None = None, scale: float = 10.0) -> None:
        if isinstance(canaries, bool) or not isinstance(canaries, int) or canaries < 10:
            raise MisconfigurationException(f"CanaryAudit: canaries={canaries} must be 10 or more, such as 100.")
        if unit not in (None, "client", "sample"):
            raise MisconfigurationException(f"CanaryAudit: unit={unit!r} must be 'client' or 'sample', or left out.")
        if not 0 < scale < math.inf:
            raise MisconfigurationException(f"CanaryAudit: scale={scale} must be above 0 and finite, such as 10.")
        self.canaries, self.unit, self.scale = canaries, unit, scale
        self.scores = np.zeros(canaries)
        self.labels: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the canaries' scores so far and their classes, for resuming."""
        return {"scores": self.scores.tolist(), "labels": self.labels}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with earlier scores."""
        self.scores, self.labels = np.array(state_dict["scores"]), list(state_dict["labels"])

    # Preparation

    def audited(self, federation: Federation) -> Unit:
        """Return the audited unit: the setting, or else the unit of the guarantee."""
        if self.unit is not None:
            return self.unit
        return "client" if federation.options.example_privacy is None else "sample"

    def included(self, federation: Federation) -> NDArray[np.bool_]:
        """Return the coins of all canaries ``[m]``, a function of the run's seed."""
        # of no round, so that a canary is in all rounds or in none
        rng = np.random.default_rng(derive_seed(cast(int, federation.seed), "canary coins"))
        return rng.random(self.canaries) < 0.5

    def of_client(self, federation: Federation, client: int) -> NDArray[np.int64]:
        """Return the numbers of the canaries among a client's samples, ascending."""
        return np.arange(client, self.canaries, federation.data.num_clients)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse runs without a way to an audit, and put canaries among the samples."""
        federation = cast(Federation, pl_module)
        unit, data, client = self.audited(federation), federation.data, federation.client
        if data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: CanaryAudit changes models for an audit, in simulations, and the clients of these "
                "data are at sites; leave it out."
            )
        if federation.options.local_privacy is not None:
            raise MisconfigurationException(
                "trainer.callbacks: CanaryAudit sends updates of its own, without the noise of trainer.local_privacy; "
                "leave one of the two out."
            )
        if "weights" not in client.sends or "weights" not in federation.aggregator.sends:
            raise MisconfigurationException(
                f"trainer.callbacks: CanaryAudit looks at models that clients receive and send, and "
                f"{type(client).__name__} with {federation.aggregator.name} doesn't exchange weights both ways; take "
                "a method such as FedAvg."
            )
        # before samples are exchanged, as checks look at clients' own
        check = self._check_clients if unit == "client" else self._check_samples
        check(federation)
        if unit == "sample":
            self._label(federation)
            blank = federation.options.example_privacy is not None

            def exchange(samples: Samples, client: int) -> Samples:
                # clients that join later have no canaries
                return self.exchanged(samples, client, federation, blank) if client < data.num_clients else samples

            self.exchange_samples(data, exchange)
        rank_zero_warn(
            f"CanaryAudit: {self.canaries} canaries change the models of this run, and so all of its metrics; it "
            "bounds epsilon, and is for nothing else."
        )

    def _check_clients(self, federation: Federation) -> None:
        model, needs = federation.aggregator.global_model(), federation.aggregator.needs
        size = sum(model[name].numel() for name in directions_of(federation.client, model).values())
        if beyond := sorted(needs - {"weights", "num_samples"}):
            raise MisconfigurationException(
                f"CanaryAudit: unit='client' sends weights, and {federation.aggregator.name} needs {beyond[0]} too; "
                "take a server such as DPAverage."
            )
        if size < (least := self.canaries + federation.data.num_clients):
            raise MisconfigurationException(
                f"CanaryAudit: canaries={self.canaries} need a direction each beside {federation.data.num_clients} "
                f"clients, a global model of {least} parameters, and this one has {size}; take fewer, or a larger net."
            )

    def _check_samples(self, federation: Federation) -> None:
        data = federation.data
        if federation.aggregator.guarantee:
            raise MisconfigurationException(
                f"CanaryAudit: unit='sample' looks at clients' changes, which {federation.aggregator.name} doesn't "
                "hide from the server; take unit='client'."
            )
        if not data.resident or data.drifts:
            raise MisconfigurationException(
                "CanaryAudit: unit='sample' changes samples that a client has all at once and in all rounds; take "
                "data.resident=true, and neither data.drift nor data.input_drift."
            )
        for client in range(data.num_clients):
            size, own = data.size(client, "train"), len(self.of_client(federation, client))
            if size <= own:
                raise MisconfigurationException(
                    f"CanaryAudit: canaries={self.canaries} put {own} in the place of samples of client {client}, "
                    f"which has {size}; take fewer."
                )
        phases = [phase for module in federation.architectures for phase in cast(ClientModule, module).local_phases()]
        if federation.options.example_privacy is not None and any(phase.stays for phase in phases):
            # without bounds on gradients NaN would end these phases
            raise MisconfigurationException(
                "CanaryAudit: unit='sample' leaves NaN in the places of samples, and "
                f"model={type(federation.client).__name__} trains a personal model without bounds on gradients; audit "
                "FedAvg with the same settings."
            )
        if not all(tensor.is_floating_point() for tensor in tensors(data.part(0, "train").x)):
            raise MisconfigurationException(
                f"CanaryAudit: unit='sample' makes inputs of noise, and those of {type(data).__name__} are integers; "
                "take unit='client'."
            )

    # Canaries of samples

    def exchanged(self, samples: Samples, client: int, federation: Federation, blank: bool) -> Samples:
        """Return a client's training samples and canaries, as one split.

        Args:
            samples: the client's own.
            client: the client's id.
            federation: the federation.
            blank: True for NaN in the place of an excluded canary; False keeps the sample.
        """
        own = self.of_client(federation, client)
        rows, canaries = self.crafted(samples, client, federation)
        # the place is left empty and not removed, as a client's number of samples counts as public
        there = torch.from_numpy(self.included(federation)[own]).to(rows.device)

        def chosen(values: Tensor, canary: Tensor, missing: bool) -> Tensor:
            kept = torch.full_like(canary, math.nan) if missing else values[rows]
            changed = values.clone()
            changed[rows] = torch.where(there.view(-1, *[1] * (canary.dim() - 1)), canary, kept)
            return changed

        return Samples(
            mapped(partial(chosen, missing=blank), samples.x, canaries.x),
            mapped(partial(chosen, missing=False), samples.y, canaries.y),
        )

    def crafted(self, samples: Samples, client: int, federation: Federation) -> tuple[Tensor, Samples]:
        """Return the places of canaries among a client's samples, and the canaries.

        Args:
            samples: the client's own.
            client: the client's id.
            federation: the federation.
        """
        own = self.of_client(federation, client)
        generator = torch.Generator().manual_seed(derive_seed(cast(int, federation.seed), "canary samples", client))
        rows = torch.randperm(len(samples), generator=generator)[: len(own)]

        def noise(values: Tensor) -> Tensor:
            drawn = torch.randn(len(own), values[0].numel(), generator=generator)
            if len(own) <= drawn.shape[1]:
                # inputs that are orthogonal give gradients of the first layer that are so, too
                drawn = torch.linalg.qr(drawn.T).Q.T * math.sqrt(drawn.shape[1])
            return drawn.view(len(own), *values.shape[1:]).to(values) * (self.scale * values.std())

        x, y = tree_map(noise, samples.x), samples.take(rows).y
        if isinstance(y, Tensor):
            y = noise(y) if y.is_floating_point() else y
            if own[-1] < len(self.labels):
                y = torch.tensor(self.labels)[own].to(y)
        return rows.to(next(tensors(samples.y)).device), Samples(x, y)

    @torch.no_grad()
    def _label(self, federation: Federation) -> None:
        """Give each canary the least likely class under the initial model, for a large gradient."""
        if self.labels or not isinstance(federation.data.task, Classification):
            return
        labels = torch.zeros(self.canaries, dtype=torch.int64)
        for client in range(federation.data.num_clients):
            if len(own := self.of_client(federation, client)):
                module = cast(ClientModule, federation.architectures[federation.architecture_of(client)])
                with undisturbed(), kept_modes(module):
                    module.eval()
                    x = self.crafted(federation.data.part(client, "train"), client, federation)[1].x
                    placed = Samples(x, labels[own]).to(module.device, cast(torch.dtype, module.dtype))
                    labels[own] = module(placed.x).argmin(1).cpu()
        self.labels = labels.tolist()

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Drop the metrics of training, falsified by canaries and by NaN."""
        # NaN makes a mean NaN, and a mean with canaries isn't the clients' own
        if self.audited(federation) == "sample":
            outcome.metrics.clear()

    def _score_samples(self, federation: Federation, updates: Updates) -> None:
        """Add each canary's part in the change of the model by a client."""
        for client, update in updates.items():
            if len(own := self.of_client(federation, client)) and client < federation.data.num_clients:
                gradients, change = self._seen(federation, client, update)
                # a ridge and no pseudo-inverse, which would blow the noise up where gradients are nearly alike
                gram = gradients @ gradients.T + RIDGE * torch.eye(len(gradients), dtype=torch.float64)
                self.scores[own] += torch.linalg.solve(gram, gradients @ change).numpy()[: len(own)]

    def _seen(self, federation: Federation, client: int, update: Message) -> tuple[Tensor, Tensor]:
        """Return gradients of a client's samples under the received model, and the client's change, backwards.

        Args:
            federation: the federation.
            client: the client's id.
            update: the client's update.

        Returns:
            Gradients of norm 1 ``[n, d]``, canaries before all other samples, and the change ``[d]``; in float64 on the
            CPU.
        """
        engine, job = federation.engines[federation.architecture_of(client)], federation.job(client)
        module = engine.module
        with undisturbed():
            engine.become(job)
            samples = self.own_samples(federation.data, client)
            rows, canaries = self.crafted(samples, client, federation)
            kept = torch.ones(len(samples), dtype=torch.bool, device=rows.device)
            kept[rows] = False
            # samples too, since a client's change is mostly theirs
            every = Samples.joined([canaries, samples.take(kept.nonzero().flatten())])
            every = every.to(engine.device, cast(torch.dtype, module.dtype))
            sent = update["weights"]
            places = {n: p for n, p in module.named_parameters() if n in sent and p.requires_grad}
            change = flat({name: job.payload["weights"][name].cpu() - sent[name].cpu() for name in places})
            gradients = []
            for x, y in every.chunks(1):
                with torch.enable_grad(), engine.forward_context():
                    loss = step_values(module, (x, y), 0)["loss"]
                found = torch.autograd.grad(loss, [*places.values()], allow_unused=True, materialize_grads=True)
                gradient = flat(dict(zip(places, found, strict=True))).cpu()
                unit = gradient / gradient.norm().clamp(min=1e-12)
                gradients.append(torch.nan_to_num(unit, posinf=0.0, neginf=0.0))
        return torch.stack(gradients), change

    # Canaries of clients

    def _send_clients(self, federation: Federation, updates: Updates) -> None:
        """Add the updates of included canaries of the round."""
        model, aggregator = federation.aggregator.global_model(), federation.aggregator
        first = directions_of(federation.client, model)
        names = list(dict.fromkeys(first.values()))
        start = flat({name: model[name] for name in names})
        changes = [flat({name: update["weights"][name] for name in names}) - start for update in updates.values()]
        generator = torch.Generator().manual_seed(derive_seed(cast(int, federation.seed), "canary", federation.round))
        drawn = torch.randn(len(start), self.canaries, generator=generator, dtype=torch.float64)
        # orthogonal to one another and to what clients send, so that scores see no other's change
        columns = torch.cat([torch.stack(changes, 1), drawn], 1) if changes else drawn
        self._directions = torch.linalg.qr(torch.nan_to_num(columns)).Q[:, -self.canaries :]
        self._start = start
        # larger than the bound, as a canary within the bound is the same with clipping and without
        norms = [float(change.norm()) for change in changes]
        bound = aggregator.state["clip"] if isinstance(aggregator, DPAverage) else max(norms, default=1.0) or 1.0
        sampling = federation.options.sampling(federation.data.num_clients)
        rate = 1.0 if sampling is None else sampling.rate
        # a guarantee with amplification by sampling holds only for canaries sampled at the same rate
        present = torch.rand(self.canaries, generator=generator).numpy() < rate
        samples = [int(update["num_samples"]) for update in updates.values() if "num_samples" in update]
        cap = getattr(aggregator, "sample_cap", None) or max(samples, default=1)
        shapes = {name: model[name] for name in names}
        for number in (self.included(federation) & present).nonzero()[0].tolist():
            moved = split(start + self.scale * bound * self._directions[:, number], shapes)
            weights = {**model, **{name: moved[own] for name, own in first.items()}}
            update: Message = {"weights": weights}
            if "num_samples" in aggregator.needs:
                update["num_samples"] = torch.tensor(cap)
            # ids above those of all clients and newcomers
            updates[federation.data.newcomers.stop + number] = update

    def _score_clients(self, federation: Federation) -> None:
        """Add how far the global model went along each canary's direction."""
        model = federation.aggregator.global_model()
        names = list(dict.fromkeys(directions_of(federation.client, model).values()))
        moved = flat({name: model[name] for name in names}) - self._start
        # a diverged model must not make NaN of the scores of earlier rounds
        self.scores += torch.nan_to_num(self._directions.T @ moved).numpy()

    # Rounds

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Score canaries among samples, or send canaries' updates."""
        if self.audited(federation) == "sample":
            self._score_samples(federation, updates)
        else:
            self._send_clients(federation, updates)

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Write the bound by the rounds so far into the round's record."""
        unit = self.audited(federation)
        if unit == "client":
            self._score_clients(federation)
        claim = federation.privacy()
        claim = claim if claim.get("unit") == unit else {}
        coins = self.included(federation)
        # over all rounds so far: each row's bound has the confidence alone; the best of several rows hasn't
        bound = audited_epsilon(self.scores, coins, claim.get("delta", 0.0), CONFIDENCE)
        federation.metrics |= {"privacy/audited_epsilon": bound, "privacy/canaries": self.canaries}
        federation.audit = {
            "audited_epsilon": bound,
            "confidence": CONFIDENCE,
            "unit": unit,
            "epsilon": claim.get("epsilon"),
            "delta": claim.get("delta", 0.0),
            "canaries": self.canaries,
            "included": int(coins.sum()),
            "models_changed": True,
        }

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the bound beside the claim."""
        if not (found := cast(Federation, pl_module).audit):
            return
        bound, claim = found["audited_epsilon"], found["epsilon"]
        told = (
            f"CanaryAudit: epsilon of a {found['unit']} is at least {bound:.2f} (95 %), at delta {found['delta']:.2g}"
        )
        if claim is None:
            rank_zero_info(f"{told}; there is no guarantee to compare with.")
        elif bound > claim:
            rank_zero_warn(f"{told}, above the {claim:.2f} that is claimed: the guarantee doesn't hold.")
        else:
            rank_zero_info(f"{told}, within the {claim:.2f} that is claimed.")


def directions_of(client: ClientModule, model: StateDict) -> dict[str, str]:
    """Return the parameters of a global model by name, each with the first name of the tensor.

    Args:
        client: the client module.
        model: entries of its ``state_dict``.
    """
    first: dict[int, str] = {}
    named = client.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(tensor), name) for name, tensor in named if name in model}


def flat(entries: StateDict) -> Tensor:
    """Return entries as one vector in float64, on the same device."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in entries.values()])


def split(vector: Tensor, like: StateDict) -> StateDict:
    """Return a vector as entries of given shapes and types."""
    parts = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {n: part.view(t.shape).to(t.dtype) for (n, t), part in zip(like.items(), parts, strict=True)}


def mapped(function: Callable[[Tensor, Tensor], Tensor], one: Any, other: Any) -> Any:
    """Return a tree with a function applied to the tensors in the same places of two trees."""
    others = iter(tensors(other))
    return tree_map(lambda tensor: function(tensor, next(others)), one)
