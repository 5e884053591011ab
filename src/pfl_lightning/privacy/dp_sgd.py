"""Differential privacy of samples: batches, bounds and noise of local steps."""

import math
import random
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import Batch
from pfl_lightning.contract.guarantee import BOUNDED
from pfl_lightning.data import FederatedDataModule, Samples
from pfl_lightning.engines import LocalWork, Outcome
from pfl_lightning.engines.errors import computed
from pfl_lightning.engines.sequential import Sequential, Step
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import step_values
from pfl_lightning.engines.vmap.block import Block
from pfl_lightning.engines.vmap.checks import SharedAttributes
from pfl_lightning.federation.stages import ConfiguredStage, Federated
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.nets.batch_norm import smallest_batch
from pfl_lightning.privacy.accountant import Release, accountant_of, bounded_epsilon, check_range, least_noise, within
from pfl_lightning.privacy.example_blocks import PoissonPlan, PrivateDifferentiator
from pfl_lightning.privacy.example_steps import Draws, ExampleGradients, Values, noised, without_examples
from pfl_lightning.privacy.noise import (
    Source,
    discrete_laplace,
    grid_of,
    nearest,
    secure_members,
    secure_normal,
    secure_seed,
)
from pfl_lightning.privacy.settings import check_one, check_spent
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator
from pfl_lightning.server.aggregator_list import parts_of
from pfl_lightning.settings import check_choices, is_count

OWNER = "trainer.example_privacy"
ADJACENCY = "add or remove: a sample of one client is there or isn't; how many samples clients have is public"
NOT_COVERED_COLUMNS = {
    "train metrics, which a simulation shows to its reader and sites keep": ("train*",),
    "val and test metrics of clients, and what is chosen by them": ("val*", "test*", "lr"),
    "how many clients were refused or absent and why, and local work, which tells too": (
        "clients_refused",
        "clients_absent",
        "absent",
        "local/*",
    ),
    "seconds": ("time/*",),
}
"""Columns of the record that tell of samples beside what clients send, by what they are."""
NOT_COVERED = "; ".join(
    [
        "how many samples clients have; phases that stay with their client, and evaluation",
        *NOT_COVERED_COLUMNS,
        "clients.csv; checkpoints, which hold personal states",
    ]
)
SEEDED = "; who knows the run's seed, from which batches and noise are drawn"
PUBLISHABLE = ("round", "clients", "clients_diverged", "cohort*", "bytes/*", "server/*", "privacy/*", "test/global_*")
"""Columns of the record that the guarantee covers, as patterns; who has how many samples counts as public."""


COUNTS = ", or add noise to the counts by example_privacy.counts_epsilon"


@dataclass(frozen=True)
class DPSGD(ConfiguredStage):
    r"""Bounds each sample's gradient and adds Gaussian noise to their sum, in each step of a client's training.

    .. math::

        g = \frac{1}{q n} \left( \sum_{i \in B} \nabla \ell_i \min(1, C / \|\nabla \ell_i\|) + z C \xi \right), \qquad
        \xi \sim \mathcal{N}(0, I)

    is the gradient that the client's optimizer gets. Each of the client's n samples is in the batch B by itself with
    probability :math:`q = \min(1, \text{batch\_size} / n)`, so that batches differ in size; one of nobody is noise.
    There are as many steps as there would be batches. What a client sends then is differentially private in each of its
    samples, against the server as well. Source: Abadi et al., 2016 (https://arxiv.org/abs/1607.00133).

    With a target ``epsilon`` z is the least noise, the same for all, with which no client goes beyond it, even if it is
    in every round of ``trainer.max_rounds``. Mostly the client with the fewest samples decides, and others spend less.

    ``noise="seeded"`` draws batches and noise from the run's seed, so that a run can be repeated: a simulation, as
    everybody who knows the seed knows the noise. ``secure`` draws both from the operating system and keeps neither;
    gradients and noise then lie on a grid (`pfl_lightning.privacy.noise`), and a run that goes on counts the rounds
    that no checkpoint has.

    Args:
        noise_multiplier: z, at least 0, such as 1; 0 is no noise and no guarantee. Either it or ``epsilon``.
        clip: C, the largest norm of one sample's gradient, above 0.
        delta: above 0 and below one over the samples of any client; None is a tenth of one over each client's own.
        samples_at_once: gradients of single samples that are held at a time, at least 1; None holds those of a batch.
        epsilon: the :math:`\epsilon` that each client's samples may have of all rounds together, above 0.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.
        counts_epsilon: the :math:`\epsilon` of the class counts that a client sends in a round, above 0, for servers
            that need them: discrete Laplace noise at the client, of the probability :math:`\propto e^{-\epsilon|k|}`;
            negative counts become 0. None refuses such servers.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    noise_multiplier: float | None = None
    clip: float = 1.0
    delta: float | None = None
    samples_at_once: int | None = None
    epsilon: float | None = None
    noise: Source | None = None
    counts_epsilon: float | None = None
    _spent: dict[int, list[Release]] = field(default_factory=dict, init=False, repr=False, compare=False)

    setting = OWNER
    publishable = PUBLISHABLE
    does = MappingProxyType({"sample level": "guarantees privacy of samples"})
    excludes = MappingProxyType(
        {
            "sum level": "guarantees it for another unit, so that there is no one epsilon for both; take one of them",
            "chooses": "doesn't cover that",
            "asks": "doesn't cover what is told without noise; take Uniform, Poisson or Availability",
            "moves": "keeps a privacy budget for each client's own samples",
            "continues": "draws batches anew in each round; leave it out",
        }
    )

    def __post_init__(self) -> None:
        z, target, clip = self.noise_multiplier, self.epsilon, self.clip
        delta, at_once = self.delta, self.samples_at_once
        check_one(OWNER, z, target)
        if z is not None:
            check_range(f"{OWNER}.noise_multiplier", z, 0 <= z < math.inf, "0 or more, such as 1")
        if target is not None:
            check_range(f"{OWNER}.epsilon", target, 0 < target < math.inf, "above 0, such as 8")
        check_range(f"{OWNER}.clip", clip, 0 < clip < math.inf, "above 0, such as 1")
        if delta is not None:
            check_range(f"{OWNER}.delta", delta, 0 < delta < 1, "above 0 and below 1, such as 1e-5")
        if at_once is not None:
            check_range(f"{OWNER}.samples_at_once", at_once, at_once >= 1, "at least 1")
        if self.noise is not None:
            check_choices(OWNER, noise=(self.noise, ("seeded", "secure")))
        if (counts := self.counts_epsilon) is not None:
            check_range(f"{OWNER}.counts_epsilon", counts, 1e-6 <= counts <= 100, "from 1e-6 to 100, such as 0.5")
            if target is not None:
                raise MisconfigurationException(
                    f"{OWNER}.counts_epsilon={counts} and {OWNER}.epsilon={target}: a target is shared out to steps "
                    "alone; give noise_multiplier."
                )

    @property
    def is_secure(self) -> bool:
        """Return whether batches and noise come from the operating system."""
        return self.noise == "secure"

    @property
    def grid(self) -> float | None:
        """Return the grid's step for bounded gradients and their noise; None rounds neither."""
        return grid_of(self.noise_multiplier * self.clip) if self.is_secure and self.noise_multiplier else None

    def deployed(self) -> "DPSGD":
        """Return the settings for clients at sites, with noise from the operating system.

        Raises:
            MisconfigurationException: if the noise shall be from a seed, or depends on clients of other sites.
        """
        if self.noise == "seeded":
            raise MisconfigurationException(
                f"{OWNER}.noise=seeded draws noise from the run's seed, which everybody in a deployment knows; take "
                "secure."
            )
        if self.epsilon is not None:
            raise MisconfigurationException(
                f"{OWNER}.epsilon={self.epsilon} asks for noise by the sizes of all clients, and a site knows its own; "
                "give noise_multiplier, such as the one that a simulation with this target records."
            )
        return replace(self, noise="secure")

    def check_delta(self, sizes: Iterable[int]) -> None:
        """Refuse a delta at which a whole sample could be given away.

        Args:
            sizes: samples of each client.

        Raises:
            MisconfigurationException: if it could.
        """
        if self.delta is not None and self.delta * (largest := max(sizes, default=0)) >= 1:
            raise MisconfigurationException(
                f"trainer.example_privacy.delta={self.delta} must be below 1 / {largest}, one over the samples of the "
                "largest client; leave it out to take a tenth of one over each client's own."
            )

    # A stage of the round

    @property
    def spent(self) -> Mapping[int, list[Release]]:
        """The private steps of each client so far, by id."""
        return self._spent

    def check_options(self, options: Any) -> None:
        """Refuse settings in conflict with bounds of single samples."""
        if clip := options.gradient_clip_val:
            raise MisconfigurationException(
                f"trainer.gradient_clip_val={clip} clips what {OWNER} has bounded already; leave it out, and set "
                "example_privacy.clip."
            )
        limit, accumulate = options.limit_train_batches, options.accumulate_grad_batches
        if accumulate > 1 or limit != 1 or is_count(limit):
            many = ("accumulate_grad_batches", accumulate) if accumulate > 1 else ("limit_train_batches", limit)
            raise MisconfigurationException(
                f"trainer.{many[0]}={many[1]} counts batches of an epoch, and {OWNER} draws each batch anew from all "
                "samples; leave it out, and set data.batch_size and trainer.local_steps."
            )
        epochs = options.local_epochs
        if not (epochs is None or is_count(epochs) or (isinstance(epochs, float) and epochs == int(epochs))):
            raise MisconfigurationException(
                f"trainer.local_epochs={epochs} is no whole number for all clients, and {OWNER} counts batches of "
                "whole epochs; give one, or trainer.local_steps."
            )
        if options.compile:
            raise MisconfigurationException(
                f"trainer.compile=true compiles steps of whole batches, and {OWNER} takes them by samples; leave it "
                "out."
            )
        if options.is_deployed:
            self.deployed()

    def check(self, federation: Federated) -> None:
        """Refuse clients and servers by which samples count otherwise than through noisy steps."""
        check_example_level(federation.client, federation.aggregator, self.counts_epsilon is not None)

    def check_data(self, client: ClientModule, data: FederatedDataModule) -> None:
        """Refuse samples that depend on each other, by the data or in the net."""
        self.check_delta(data.size(k, "train") for k in range(data.num_clients))
        if getattr(data, "packing", False):
            raise MisconfigurationException(
                "data.packing=true puts several conversations into a sample, by the lengths of all of a client's, "
                f"so that one more moves others to other samples; {OWNER} needs data.packing=false."
            )
        if any(getattr(layer, "gradient_checkpointing", False) is True for layer in client.modules()):
            raise MisconfigurationException(
                f"{OWNER} takes the gradient of each sample by itself, and model.net.gradient_checkpointing=true "
                "computes layers again for a whole batch; take false."
            )
        if any(getattr(layer, "chunk_tokens", None) for layer in client.modules()):
            raise MisconfigurationException(
                f"{OWNER} takes the gradient of each sample by itself, and model.net.chunk_tokens computes logits "
                "again for a whole batch; take null."
            )
        if smallest_batch(client) > 1:
            raise MisconfigurationException(
                f"{OWNER} bounds what each sample does, and model.net={type(client.net).__name__} has BatchNorm, where "
                "samples meet; take a net with GroupNorm, or with none."
            )

    def work(
        self, work: LocalWork, modules: Sequence[ClientModule], data: FederatedDataModule, trainer: Trainer
    ) -> LocalWork:
        """Return the settings of local training with private steps, and with noise for the target if there is one."""
        precision = trainer.precision_plugin.precision
        if precision not in ("32-true", "64-true", "bf16-mixed"):
            reason = (
                f"scales losses of whole batches, and {OWNER} takes them by samples"
                if precision == "16-mixed"
                else f"doesn't keep weights in single precision, which {OWNER} needs for bounds and noise"
            )
            raise MisconfigurationException(
                f"trainer.precision={precision} {reason}; take 32-true, bf16-mixed or 64-true."
            )
        if self.is_secure and any(module.device.type == "mps" for module in modules):
            raise MisconfigurationException(
                f"{OWNER}.noise=secure needs float64, which Apple's GPUs lack; take seeded, or trainer.accelerator=cpu."
            )
        if self.epsilon is None:
            return replace(work, example_privacy=self)
        rounds = trainer.max_epochs or 1
        # the smallest first, who mostly need the most noise
        sizes = sorted({data.size(client, "train") for client in range(data.num_clients)})
        plans = [
            (samples, [Release(1.0, d.rate, d.steps * rounds) for d in private_draws(work, phases, samples)])
            for phases in [module.local_phases() for module in modules]
            for samples in sizes
        ]
        return replace(work, example_privacy=self.calibrated(plans))

    def begin(self, federation: Federated) -> None:
        """Begin with nothing spent."""
        self._spent.clear()

    def spend(self, federation: Federated, cohort: Sequence[int], outcomes: Mapping[int, Outcome]) -> None:
        """Count the private steps of a round, and stop before the server sees an update beyond the target."""
        self._count(federation, cohort, outcomes)
        if self.epsilon is not None:
            # epsilon is known only after a round; then the round's uploads are dropped
            spent = self._largest(self._spent, federation.sizes(self._spent, "train"))
            check_spent(OWNER, self.epsilon, spent, federation.round)

    def count_lost(self, federation: Federated, cohorts: Sequence[Sequence[int]]) -> None:
        """Count rounds without a checkpoint; seeded noise is drawn again as before, and counts once."""
        for cohort in cohorts if self.is_secure else ():
            self._count(federation, cohort, {}, lost=True)

    def _count(
        self, federation: Federated, cohort: Sequence[int], outcomes: Mapping[int, Outcome], lost: bool = False
    ) -> None:
        """Count the private steps of a round, of each client as often as the engine asked for them.

        Args:
            federation: the federation.
            cohort: the clients of the round.
            outcomes: of the clients that answered; of others nobody knows how far they came, so that all counts.
            lost: whether another process made the round, of which this engine knows nothing.
        """
        for engine, clients in federation.engines_of(cohort):
            for client in clients:
                releases = outcomes[client].releases if client in outcomes else ()
                size = federation.data.size(client, "train")
                phases = engine.module.local_phases()
                once = releases or cast(DPSGD, engine.work.example_privacy).releases(engine.work, phases, size)
                times = 1 if lost else engine.times_asked(client)
                made = [release._replace(steps=times * release.steps) for release in once]
                if made:
                    self._spent[client] = composed(self._spent.get(client, []), made)

    def state_dict(self) -> dict[str, Any]:
        """Return the private steps of each client."""
        return {"spent": {client: list(map(list, releases)) for client, releases in sorted(self._spent.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's private steps."""
        self._spent.clear()
        self._spent.update({k: [Release(*each) for each in releases] for k, releases in state["spent"].items()})

    def statement(self, federation: Federated, guarantee: dict[str, Any]) -> dict[str, Any]:
        """Return the guarantee of the rounds so far."""
        return self.guarantee_of(self._spent, federation.sizes(self._spent, "train"))

    def of_client(self, federation: Federated, client: int) -> dict[str, float]:
        """Return the client's epsilon."""
        return {"epsilon": self.epsilon_of(self._spent.get(client, []), federation.data.size(client, "train"))}

    # Bounds and noise

    def calibrated(self, plans: Iterable[tuple[int, Sequence[Release]]]) -> "DPSGD":
        """Return the settings with noise in place of the target.

        Args:
            plans: how many samples a client has and what it would spend at a noise multiplier of 1, for each client.

        Raises:
            MisconfigurationException: if no noise reaches the target.
        """
        # one search mostly: the smallest client comes first, and the others stay within
        target, z = cast(float, self.epsilon), 0.0
        for samples, releases in plans:
            noised = [Release(z, rate, steps) for _, rate, steps in releases]
            if not within(target, self.delta_of(samples), noised):
                z = least_noise(target, self.delta_of(samples), releases)
        return replace(self, noise_multiplier=z, epsilon=None)

    def _largest(self, spent: Mapping[int, Sequence[Release]], sizes: Mapping[int, int]) -> float:
        return max((self.epsilon_of(releases, sizes[client]) for client, releases in spent.items()), default=0.0)

    def drawn(self, samples: int, rate: float, generator: torch.Generator) -> Tensor:
        """Return the rows of a client's batch, rising, int64.

        Args:
            samples: n.
            rate: q.
            generator: the client's, on the CPU; of no use to secure batches.
        """
        if self.is_secure:
            return secure_members(samples, rate)
        return (torch.rand(samples, generator=generator) < rate).nonzero().flatten()

    def drawn_noise(self, entries: Collection[Tensor], generator: torch.Generator) -> Tensor:
        """Draw the noise of a step, flat ``[numbers of all entries]``.

        Seeded noise is in float64 where entries are, else in float32; secure noise is in float64 always.

        Args:
            entries: the trained entries.
            generator: the client's, on the CPU; of no use to secure noise.
        """
        size = sum(entry.numel() for entry in entries)
        # noise finer than the grid would show in the last bits of a sum
        if self.grid is not None:
            return nearest(secure_normal(size) * (cast(float, self.noise_multiplier) * self.clip), self.grid)
        # a float64 sum would show its last digits beneath noise of float32
        dtype = torch.float64 if any(entry.dtype == torch.float64 for entry in entries) else torch.float32
        drawn = torch.randn(size, generator=generator, dtype=dtype)
        return drawn * (cast(float, self.noise_multiplier) * self.clip)

    @property
    def counts_release(self) -> Release | None:
        r"""Return the release by which a round's class counts are counted; None without class counts.

        A pure :math:`\epsilon` is no worse than a Gaussian mechanism of noise multiplier
        :math:`1 / 2\Phi^{-1}(1 / (1 + e^{-\epsilon}))`: both have the same worst error where type I and II are equal,
        and the Gaussian's curve of errors, which is convex, lies below the two straight lines of the other one (Dong,
        Roth and Su, 2022, https://arxiv.org/abs/1905.02383).
        """
        if self.counts_epsilon is None:
            return None
        return Release(-1 / (2 * NormalDist().inv_cdf(1 / (1 + math.exp(self.counts_epsilon)))))

    def noisy_counts(self, counts: Tensor, seed: int) -> Tensor:
        """Return class counts with discrete Laplace noise, negative ones as 0, int64 ``[num_classes]``.

        Args:
            counts: samples of each class.
            seed: of the client's round; of no use to secure noise.
        """
        # integers alone: a sum of doubles would tell of the count by its last bits
        below = secrets.randbelow if self.is_secure else random.Random(derive_seed(seed, "class counts")).randrange
        drawn = [discrete_laplace(cast(float, self.counts_epsilon), below) for _ in range(len(counts))]
        return (counts + torch.tensor(drawn, dtype=counts.dtype, device=counts.device)).clamp(min=0)

    # In engines

    def expected_samples(self, work: LocalWork, phase: Phase, samples: int) -> int:
        """Return the expected number of samples in all batches of a phase.

        Args:
            work: the settings of local training.
            phase: the phase.
            samples: the client's number of samples.
        """
        return Draws.of(work, phase, samples).samples

    def releases(self, work: LocalWork, phases: Sequence[Phase], samples: int) -> list[Release]:
        """Return the releases of a client's round: private steps, and class counts where these are sent.

        Args:
            work: the settings of local training, with this DP-SGD.
            phases: the phases of the client's training.
            samples: the client's number of samples.
        """
        # a phase that stays with its client reaches nobody
        z = cast(float, self.noise_multiplier)
        made = [Release(z, drawn.rate, drawn.steps) for drawn in private_draws(work, phases, samples)]
        return made if self.counts_release is None else [*made, self.counts_release]

    def train_phase(
        self,
        engine: Sequential,
        part: Samples,
        phase: Phase,
        parameters: dict[str, nn.Parameter],
        optimizer: Optimizer,
        generator: torch.Generator,
    ) -> list[Step]:
        """Train one client by private steps; an empty batch logs no values.

        Args:
            engine: the engine, whose module is the client.
            part: the client's training samples.
            phase: the phase.
            parameters: the trained parameters by name.
            optimizer: the phase's optimizer.
            generator: draws batches and noise.
        """
        slots = Slots(engine.module)
        draws = Draws.of(engine.work, phase, len(part))
        gradients = ExampleGradients(engine.module, slots, list(parameters), self, engine.forward_context)
        if self.is_secure:
            # dropout's masks go by places in the batch, so that one sample more would change the others' known masks
            engine.seed_generators(secure_seed())
        # Views of the parameters' memory, so each step sees the optimizer's changes.
        entries = slots.current()
        steps: list[Step] = []

        def alone(batch: Batch, index: int) -> None:
            with engine.forward_context():
                step_values(engine.module, batch, index)

        for index in range(draws.steps):
            # Poisson sampling: each sample joins independently, so batches vary in size and may be empty.
            rows = self.drawn(len(part), draws.rate, generator)
            # Drawn for an empty batch too: a step without noise would reveal that no sample was drawn.
            noise = self.drawn_noise(parameters.values(), generator)
            sums: StateDict = {}
            totals: Values = {}
            if size := len(rows):
                chosen = part.take(rows)
                batch, taken = (chosen.x, chosen.y), torch.ones(size, device=engine.device)
                sums, totals = computed(
                    partial(gradients.sums, entries, batch, taken, index),
                    partial(alone, batch, index),
                    partial(without_examples, engine.module),
                )
            steps.append((size, {name: total / size for name, total in totals.items()}))
            for name, gradient in noised(sums, noise, parameters, draws.expected).items():
                parameters[name].grad = gradient
            engine.adjust(parameters)
            optimizer.step()
        return steps

    def block_steps(
        self,
        engine: Sequential,
        attributes: SharedAttributes,
        slots: Slots,
        phase: Phase,
        block: Block,
        parameters: dict[str, nn.Parameter],
    ) -> tuple[PoissonPlan, Iterator[Callable[[], StateDict]]]:
        """Return the private steps of a block of clients: how many there are, and a function for each one's gradients.

        Args:
            engine: the engine of one client.
            attributes: the module's attributes, which steps leave alone.
            slots: the module's slots.
            phase: the phase.
            block: the clients, largest first.
            parameters: the trained parameters by name.
        """
        plan = PoissonPlan(self, engine.work, phase, block, parameters)
        private = PrivateDifferentiator(engine, attributes, self, slots, block, parameters)
        steps = enumerate(plan.steps(engine.device))
        return plan, (partial(private.gradients, step, index) for index, step in steps)

    def noised_update(self, update: Message, seed: int) -> Message:
        """Return an update with noise in its class counts, if there shall be any.

        Args:
            update: the upload.
            seed: of the client's round.
        """
        if self.counts_epsilon is None or "class_counts" not in update:
            return update
        return {**update, "class_counts": self.noisy_counts(update["class_counts"], seed)}

    def epsilon_of(self, releases: Sequence[Release], samples: int) -> float:
        r"""Return the :math:`\epsilon` of a client's samples.

        Args:
            releases: the client's steps and class counts so far.
            samples: how many the client has.
        """
        delta = self.delta_of(samples)
        value = bounded_epsilon(releases, delta, self.epsilon)
        steps, counts = self._apart(releases)
        # for few rounds plain composition is smaller than the Gaussian bound
        return min(value, bounded_epsilon(steps, delta, self.epsilon) + counts) if counts else value

    def delta_of(self, samples: int) -> float:
        r"""Return the :math:`\delta` of a client's samples, by their number."""
        # one over the samples would let one sample be given away whole
        return 0.1 / samples if self.delta is None else self.delta

    def _apart(self, releases: Sequence[Release]) -> tuple[list[Release], float]:
        """Return the steps of a client, and the epsilon of the class counts by themselves."""
        counts = self.counts_release
        number = sum(release.steps for release in releases if release._replace(steps=1) == counts)
        # earlier counts with another counts_epsilon stay Gaussian: a larger epsilon, never a smaller
        steps = [release for release in releases if release._replace(steps=1) != counts]
        return steps, number * (self.counts_epsilon or 0.0)

    def guarantee_of(self, spent: Mapping[int, Sequence[Release]], sizes: Mapping[int, int]) -> dict[str, Any]:
        r"""Return the guarantee of the steps so far, and a list of all outside; :math:`\epsilon` is the largest.

        Args:
            spent: the steps of each client.
            sizes: samples of each client.
        """
        apart = [self._apart(releases) for releases in spent.values()]
        amplified = any(release.rate < 1 for releases in spent.values() for release in releases)
        value = self._largest(spent, sizes)
        counts = {
            "counts_epsilon": self.counts_epsilon,
            "counts_epsilon_total": max((total for _, total in apart), default=0.0),
        }
        return {
            "unit": "sample",
            "epsilon": value,
            "delta": max((self.delta_of(sizes[client]) for client in spent), default=self.delta),
            "adjacency": ADJACENCY,
            "sampling": "Poisson, rate batch_size over a client's samples",
            "noise_multiplier": min((z for steps, _ in apart for z, _, _ in steps), default=None),
            "releases": max((sum(release.steps for release in steps) for steps, _ in apart), default=0),
            **(counts if self.counts_epsilon is not None else {}),
            "accountant": accountant_of(amplified, value, self.epsilon),
            "noise": "secure" if self.is_secure else "seeded: a simulation",
            "not_covered": NOT_COVERED if self.is_secure else NOT_COVERED + SEEDED,
        }


def composed(releases: Sequence[Release], further: Sequence[Release]) -> list[Release]:
    """Return releases in a row, with equal ones counted together.

    >>> composed([Release(1.0, 0.5, 4)], [Release(1.0, 0.5, 2), Release(1.0, 1.0, 1)])
    [Release(noise_multiplier=1.0, rate=0.5, steps=6), Release(noise_multiplier=1.0, rate=1.0, steps=1)]
    """
    steps: dict[tuple[float, float], int] = {}
    for z, rate, count in (*releases, *further):
        steps[z, rate] = steps.get((z, rate), 0) + count
    return [Release(z, rate, count) for (z, rate), count in steps.items()]


def private_draws(work: LocalWork, phases: Sequence[Phase], samples: int) -> list[Draws]:
    """Return the draws of a client's round in phases with an influence on the upload.

    Args:
        work: the settings of local training.
        phases: the phases of the client's training.
        samples: the client's number of samples.
    """
    draws = [Draws.of(work, phase, samples) for phase in phases if not phase.stays]
    return [drawn for drawn in draws if drawn.steps]


def check_example_level(client: ClientModule, aggregator: Aggregator, noisy_counts: bool = False) -> None:
    """Refuse settings against ``trainer.example_privacy``: samples may count through noisy steps alone.

    Args:
        client: the client module.
        aggregator: the aggregator.
        noisy_counts: whether clients add noise to class counts.

    Raises:
        MisconfigurationException: if a setting would break it.
    """
    setting = OWNER
    if noisy_counts and "class_counts" not in aggregator.needs:
        raise MisconfigurationException(
            f"{setting}.counts_epsilon is of class counts, for which aggregator={aggregator.name} doesn't ask; leave "
            "it out."
        )
    if client.task.samples_meet:
        raise MisconfigurationException(
            f"{setting} bounds the gradient of each sample's own loss, and the loss of task {client.task} compares "
            "samples of a batch; take a task without, such as Survival(bins=[...])."
        )
    if getattr(client.task, "class_weights", None) == "balanced":
        raise MisconfigurationException(
            f"task.class_weights=balanced counts a client's samples without noise, and {setting} would not cover it; "
            f"give {client.task.outputs} numbers known beforehand, or leave it out."
        )
    name = type(client).__name__
    if not client.sends:
        raise MisconfigurationException(
            f"model={name} sends nothing, so there is nothing to protect; leave {setting} out."
        )
    # an aggregator's needs too: the client's `offers` are sent on demand, and aren't in `sends`
    if further := without_noise(client.sends | aggregator.needs, client, noisy_counts):
        raise MisconfigurationException(
            f"{setting} adds noise to training alone, and {' and '.join(further)}, which model={name} sends to "
            f"aggregator={aggregator.name}, tells of samples as they are; take a method that sends weights, such as "
            f"FedAvg, FedPer or Ditto{COUNTS if further == ['class_counts'] else ''}."
        )
    # never inherited: a subclass may use samples in another way, or several in one loss
    own = "example_level" in vars(type(client)) and client.example_level
    others = [type(part).__name__ for part in parts_of(aggregator) if not part.example_level]
    for kind in ([] if own else [name]) + others:
        raise MisconfigurationException(
            f"{setting}: {kind} doesn't set example_level = True in its own class, which claims that it learns of "
            "samples by private steps alone; take a method that does, such as FedAvg, FedPer or Ditto."
        )


def without_noise(entries: Iterable[str], client: ClientModule, noisy_counts: bool) -> list[str]:
    """Return entries of updates that would tell of samples without noise under ``trainer.example_privacy``, sorted.

    Args:
        entries: names of entries.
        client: the client module.
        noisy_counts: whether clients add noise to class counts.
    """
    # what follows from private steps costs no further privacy
    follows = vars(type(client)).get("follows", frozenset())
    return sorted(set(entries) - BOUNDED - follows - ({"class_counts"} if noisy_counts else set()))


def learns_without_noise(client: ClientModule) -> bool:
    """Return True if a client's own model learns of training samples without noise under ``trainer.example_privacy``.

    Such a model stays with its client, and metrics of it, on whatever samples, would tell of the training samples.

    Args:
        client: the client module.
    """
    return any(phase.stays for phase in client.local_phases()) or overrides(client, "evaluation_phases")
