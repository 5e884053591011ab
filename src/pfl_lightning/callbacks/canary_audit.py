"""Audits of a guarantee by canaries: lower bounds on epsilon in one run."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.sample_exchange import SampleExchange
from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.data import Samples
from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Message, StateDict, Updates, tensors, tree_map
from pfl_lightning.privacy import DPSGD, DPAverage, Release
from pfl_lightning.privacy.accountant import bounded_epsilon
from pfl_lightning.privacy.audit import audited_epsilon, audited_noise
from pfl_lightning.seeds import derive_seed

Unit: TypeAlias = Literal["client", "sample"]

CONFIDENCE = 0.95
"""Of the bound by guesses."""
GAUSSIAN_CONFIDENCE = 0.99
"""Of the bound by Gaussian noise, which comes near to the truth, so that it is nearer to a false alarm too."""
ENTRIES = 2**16
"""Most parameters that a sample's canary moves: more of them cost memory, and tell no more."""


class Directions(NamedTuple):
    """What canaries among a client's samples move in a round.

    Args:
        names: of the parameters that clients with one architecture train and send.
        entries: places in these, one after another ``[k]``.
        units: orthogonal directions of norm 1 in these places, one for each canary of a client ``[j, k]``.
    """

    names: list[str]
    entries: Tensor
    units: Tensor

    def along(self, tensors: StateDict) -> Tensor:
        """Return how far tensors lie along each direction ``[j]``."""
        whole = torch.cat([tensors[name].reshape(-1) for name in self.names])
        return self.units.to(whole) @ whole[self.entries.to(whole.device)]


class CanaryAudit(SampleExchange):
    r"""Bounds the :math:`\epsilon` of a run from below, by canaries and a coin for each.

    Each canary moves a model along a direction of its own, orthogonal to those of all others, and its score is how far
    the model went. Two bounds follow. One above the guaranteed :math:`\epsilon` refutes the guarantee, for instance
    where clipping is left out by a bug, or noise is too small:

    * ``audited_epsilon``, by guesses of the coins, assumes nothing, and needs many canaries. It is above a right
      guarantee with a probability of 5 % at most.
    * ``audited_epsilon_gaussian`` assumes that noise is Gaussian and that models move in proportion to it, by plain
      SGD. It is what the accountant gives, by the declared steps and sampling, for the most noise that the scores
      allow, and above a right guarantee with a probability of 1 % at most.

    The bounds by the rounds so far are in each row of the record under ``privacy/``, and in the summary as ``audit``.
    In a run without a guarantee the first is not compared with anything, and there is no second.

    * ``client``: canaries are further clients. In each round every included canary sends the global model, changed
      along its direction, which is orthogonal to what the clients of the round send too, by ``scale`` times the
      clipping bound of ``DPAverage`` or, without ``DPAverage``, times the largest change of a client. With ``Poisson``,
      canaries take part in rounds at the clients' rate.
    * ``sample``: canaries stand in the places of some of the clients' training samples. The loss of a canary is linear
      in the parameters that its client sends, so that its gradient is its direction, ``scale`` times as long as the
      clipping bound. Under ``trainer.example_privacy`` the place of an excluded canary is empty, and adds nothing to
      any step; otherwise the original sample is there, and an included canary adds its gradient to the batch's. What
      is scored is what clients send. Metrics of training are left out of the record, as canaries falsify them.

    Canaries change the models, and so all metrics: use an audited run for the audit alone. Give the guarantee a small
    delta such as 1e-5, as guesses on m canaries tell little where m times delta is near 1.
    Sources: Steinke, Nasr and Jagielski, 2023 (https://arxiv.org/abs/2305.08846); Nasr et al., 2023
    (https://arxiv.org/abs/2302.07956), for canaries that are gradients; Andrew et al., 2024
    (https://arxiv.org/abs/2302.03098), for random directions in one run.

    Args:
        canaries: number of canaries m, at least 10; guesses on 100 can show an :math:`\epsilon` of at most 3.0, and on
            1000 of at most 5.3.
        unit: ``client`` or ``sample``; None takes the unit of the run's guarantee, and ``client`` without a guarantee.
        scale: norm of a canary's change or gradient divided by the clipping bound, or by 1 where a gradient has none;
            above 0. Only canaries above the bound show missing clipping.

    Raises:
        MisconfigurationException: if a value is out of its range; before the first round, if the run can't be audited.
    """

    is_attack = True
    does = MappingProxyType({"edits": "changes single updates"})
    excludes = MappingProxyType(
        {
            "sums": "changes single updates, which are summed by then",
            "update level": "sends updates of its own, without that noise",
        }
    )
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
        self.result: dict[str, Any] = {}
        self._moved: dict[int, Directions] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the canaries' scores and what was found so far, for resuming."""
        return {"scores": self.scores.tolist(), "found": self.result}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with earlier scores."""
        self.scores, self.result = np.array(state_dict["scores"]), dict(state_dict["found"])

    # Preparation

    def audited(self, federation: Federation) -> Unit:
        """Return the audited unit: the setting, or else the unit of the guarantee."""
        if self.unit is not None:
            return self.unit
        return "client" if federation.options.example_privacy is None else "sample"

    def of_client(self, client: int) -> NDArray[np.int64]:
        """Return the numbers of the canaries among a client's samples, ascending."""
        return np.flatnonzero(self.owners == client)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse runs without a way to an audit, and put canaries among the samples."""
        federation = cast(Federation, pl_module)
        self.seed = cast(int, federation.seed)
        # of no round, so that a canary is in all rounds or in none
        self.coins = np.random.default_rng(derive_seed(self.seed, "canary coins")).random(self.canaries) < 0.5
        unit, data, client = self.audited(federation), federation.data, federation.client
        if data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: CanaryAudit changes models for an audit, in simulations, and the clients of these "
                "data are at sites; leave it out."
            )
        if "weights" not in client.sends or "weights" not in federation.aggregator.sends:
            raise MisconfigurationException(
                f"trainer.callbacks: CanaryAudit looks at models that clients receive and send, and "
                f"{type(client).__name__} with {federation.aggregator.name} doesn't exchange weights both ways; take "
                "a method such as FedAvg."
            )
        if unit == "client":
            self._check_clients(federation)
        else:
            # before samples are exchanged, as it looks at clients' own
            self._check_samples(federation)
            self.exchange_samples(data, self.exchanged)
            # evaluations may train too, also those of a finished run
            self._draw(federation)
            for place, module in enumerate(federation.architectures):
                # on the object, where engines see that the step is another than the class's
                client = cast(ClientModule, module)
                vars(client)["training_step"] = partial(self.step, client, place, client.training_step)
        # a finished run that is resumed has no further round
        federation.audit = self.result
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
        """Refuse data without room for canaries, and deal them out to clients."""
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
        sizes = np.array([data.size(client, "train") for client in range(data.num_clients)])
        # in turn, and one sample stays with each client
        dealt = [np.flatnonzero(sizes > 1 + turn) for turn in range(int(sizes.max()) - 1)]
        self.owners: NDArray[np.int64] = np.concatenate([*dealt, np.zeros(0, np.int64)])[: self.canaries]
        if len(self.owners) < self.canaries:
            raise MisconfigurationException(
                f"CanaryAudit: canaries={self.canaries} stand in the places of training samples, and the clients have "
                f"{len(self.owners)} beside one each; take fewer."
            )
        most = int(np.bincount(self.owners).max())
        for module in federation.architectures:
            if (size := sum(entry.numel() for entry in moved_by(cast(ClientModule, module)).values())) < most:
                raise MisconfigurationException(
                    f"CanaryAudit: canaries={self.canaries} put {most} into one client, which need a direction each, "
                    f"and a client trains and sends {size} parameters; take fewer, or a larger net."
                )
        parts = [data.part(client, "train").x for client in range(data.num_clients) if sizes[client]]
        if not all(tensor.is_floating_point() for tensor in tensors(parts[0])):
            raise MisconfigurationException(
                f"CanaryAudit: unit='sample' marks canaries by a number in their inputs, and those of "
                f"{type(data).__name__} are integers; take unit='client'."
            )
        # above what samples have there, so that none is taken for a canary; the last mark is of excluded ones
        top = max(float(first_entries(next(tensors(x))).max()) for x in parts)
        self.marks = top + max(2.0**-6, abs(top) * 2.0**-8) * torch.arange(1, most + 2)
        self.blank = federation.options.example_privacy is not None
        self.norm = self.scale * cast(DPSGD, federation.options.example_privacy).clip if self.blank else self.scale

    # Canaries of samples

    def exchanged(self, samples: Samples, client: int) -> Samples:
        """Return a client's training samples, with a mark in the first input of each canary.

        Args:
            samples: the client's own.
            client: the client's id.
        """
        own = self.of_client(client)
        if not len(own):
            return samples
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "canary samples", client))
        rows = torch.randperm(len(samples), generator=generator)[: len(own)]
        there = torch.from_numpy(self.coins[own])
        marked = next(tensors(samples.x)).clone(memory_format=torch.contiguous_format)
        # the place is left empty and not removed, as a client's number of samples counts as public
        marks = torch.where(there, self.marks[: len(own)], self.marks[-1])
        first_entries(marked)[rows.to(marked.device)] = marks.to(marked)
        leaves = iter([marked])
        return Samples(tree_map(lambda leaf: next(leaves, leaf), samples.x), samples.y)

    def step(self, module: ClientModule, place: int, own: Callable[..., Any], batch: Batch, index: int) -> Any:
        """Return what ``training_step`` returns, with canaries' losses in the places of samples'.

        Args:
            module: the client module.
            place: its place among the architectures.
            own: its ``training_step``.
            batch: inputs and targets.
            index: the batch's number.
        """
        returned = own(batch, index)
        values = {"loss": returned} if isinstance(returned, Tensor) else dict(returned)
        first = first_entries(next(tensors(batch[0])))
        marked = first[:, None] == self.marks.to(first)
        along = self._moved[place].along(dict(module.named_parameters()))
        loss = values["loss"]
        if self.blank and len(first) == 1:
            # a private step takes gradients of one sample at a time; a personal model's is outside of the guarantee
            loss = torch.where(marked.any(), 0.0, loss)
        values["loss"] = loss + self.norm * (marked[:, :-1].to(along) @ along).sum() / len(first)
        return values

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Draw the directions of samples' canaries, which are others in each round."""
        if self.audited(federation) == "sample":
            self._draw(federation)

    def _draw(self, federation: Federation) -> None:
        for place, module in enumerate(federation.architectures):
            client = cast(ClientModule, module)
            entries = moved_by(client)
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "canary", federation.round, place))
            size = sum(entry.numel() for entry in entries.values())
            chosen = torch.randperm(size, generator=generator)[:ENTRIES]
            drawn = torch.randn(len(chosen), len(self.marks) - 1, generator=generator)
            units = torch.linalg.qr(drawn).Q.T
            self._moved[place] = Directions(
                list(entries), chosen.to(client.device), units.to(client.device, cast(torch.dtype, client.dtype))
            )

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Drop the metrics of training, falsified by canaries."""
        if self.audited(federation) == "sample":
            outcome.metrics.clear()

    def _score_samples(self, federation: Federation, updates: Updates) -> None:
        """Add how far each client's upload went along its canaries' directions, backwards, as steps go."""
        for client, update in updates.items():
            own = self.of_client(client)
            received, sent = federation.job(client).payload["weights"], update["weights"]
            directions = self._moved[federation.architecture_of(client)]
            change = {name: (received[name].cpu() - sent[name].cpu()).double() for name in directions.names}
            # by the expected size of a batch, which steps are divided by, so that clients' scores have one unit
            size = federation.data.size(client, "train")
            rates = [release.rate * size for release in self._steps(federation, client)]
            moved = directions._replace(units=directions.units.cpu()).along(change).numpy()[: len(own)]
            self.scores[own] += np.nan_to_num(moved) * (rates[0] if rates else 1.0)

    def _steps(self, federation: Federation, client: int) -> list[Release]:
        """Return a client's private steps so far."""
        private = federation.options.example_privacy
        if private is None:
            return []
        counts = private.counts_release
        return [r for r in private.spent.get(client, []) if r._replace(steps=1) != counts]

    # Canaries of clients

    def _send_clients(self, federation: Federation, updates: Updates) -> None:
        """Add the updates of included canaries of the round."""
        model, aggregator = federation.aggregator.global_model(), federation.aggregator
        first = directions_of(federation.client, model)
        names = list(dict.fromkeys(first.values()))
        start = flat({name: model[name] for name in names})
        changes = [flat({name: update["weights"][name] for name in names}) - start for update in updates.values()]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "canary", federation.round))
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
        for number in (self.coins & present).nonzero()[0].tolist():
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
        releases = self._releases(federation) if claim else [[] for _ in self.coins]
        steps = np.array([sum(release.steps for release in own) for own in releases], dtype=np.float64)
        hits = np.array([sum(release.steps * release.rate for release in own) for own in releases])
        delta = claim.get("delta", 0.0)
        # over all rounds so far: each row's bound has the confidence alone; the best of several rows hasn't
        bound = audited_epsilon(self.scores / np.sqrt(np.maximum(steps, 1)), self.coins, delta, CONFIDENCE)
        gaussian: dict[str, Any] = {}
        if steps.any():
            z = audited_noise(self.scores, self.coins, steps, hits / np.maximum(steps, 1), GAUSSIAN_CONFIDENCE)
            gaussian = {
                "audited_epsilon_gaussian": self._epsilon(federation, z, claim),
                "audited_noise_multiplier": z,
                "confidence_gaussian": GAUSSIAN_CONFIDENCE,
            }
        federation.metrics |= {"privacy/audited_epsilon": bound, "privacy/canaries": self.canaries}
        if gaussian:
            federation.metrics["privacy/audited_epsilon_gaussian"] = gaussian["audited_epsilon_gaussian"]
        self.result = federation.audit = {
            "audited_epsilon": bound,
            **gaussian,
            "confidence": CONFIDENCE,
            "unit": unit,
            "epsilon": claim.get("epsilon"),
            "delta": delta,
            "noise_multiplier": claim.get("noise_multiplier"),
            "canaries": self.canaries,
            "included": int(self.coins.sum()),
            "models_changed": True,
        }

    def _releases(self, federation: Federation) -> list[list[Release]]:
        """Return what each canary has taken part in so far, as it is counted; empty where nobody counts so."""
        if self.audited(federation) == "sample":
            by_client = {int(client): self._steps(federation, int(client)) for client in np.unique(self.owners)}
            return [by_client[int(client)] for client in self.owners]
        aggregator = federation.aggregator
        counted = aggregator.state["releases"] if isinstance(aggregator, DPAverage) else []
        return [[Release(*release) for release in counted]] * self.canaries

    def _epsilon(self, federation: Federation, z: float, claim: Mapping[str, Any]) -> float:
        """Return the epsilon that the accountant gives for a noise multiplier.

        Args:
            federation: the federation.
            z: the multiplier; infinity has an epsilon of 0.
            claim: the guarantee.
        """
        if z == math.inf:
            return 0.0
        aggregator, private = federation.aggregator, cast(DPSGD | None, federation.options.example_privacy)
        if private is None:
            made = [release._replace(noise_multiplier=z) for release in self._releases(federation)[0]]
            return bounded_epsilon(made, claim["delta"], cast(DPAverage, aggregator).epsilon)
        sizes = federation.sizes(private.spent, "train")
        # who has spent most by the claimed noise, of which all clients' epsilons are known already
        most = max(sizes, key=lambda client: private.epsilon_of(private.spent[client], sizes[client]))
        made = [release._replace(noise_multiplier=z) for release in self._steps(federation, most)]
        return private.epsilon_of(made, sizes[most])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the bounds beside the claim."""
        if not (result := self.result):
            return
        bounds = {
            name: result[key]
            for key, name in (("audited_epsilon", "by guesses"), ("audited_epsilon_gaussian", "by Gaussian noise"))
            if key in result
        }
        lower = " and ".join(f"{bound:.2f} {name}" for name, bound in bounds.items())
        line = f"CanaryAudit: epsilon of a {result['unit']} is at least {lower}, at delta {result['delta']:.2g}"
        if (claim := result["epsilon"]) is None:
            rank_zero_info(f"{line}; there is no guarantee to compare with.")
        elif max(bounds.values()) > claim:
            rank_zero_warn(f"{line}, and {claim:.2f} is claimed: the guarantee doesn't hold.")
        else:
            rank_zero_info(f"{line}, within the {claim:.2f} that is claimed.")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the data module its own samples back, and client modules their own step."""
        super().teardown(trainer, pl_module, stage)
        for module in cast(Federation, pl_module).architectures:
            vars(module).pop("training_step", None)


def moved_by(module: ClientModule) -> dict[str, Tensor]:
    """Return the parameters that a client trains and sends, by name."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and module.is_shared(n)}


def first_entries(x: Tensor) -> Tensor:
    """Return the first number of each sample ``[n]``; of a contiguous tensor a view."""
    return x.reshape(len(x), -1)[:, 0]


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
