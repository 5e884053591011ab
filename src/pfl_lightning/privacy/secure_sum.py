"""Sums of clients' updates as whole numbers modulo a power of two, for servers of secure aggregation.

The arithmetic is the same in a simulation and in a deployment, where masks that cancel in the sum hide each vector
(`pfl_lightning.flower.masks`): of the same updates both take the same sum, to the bit. Source: Bonawitz et al., 2017
(https://doi.org/10.1145/3133956.3133982).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.stages import ConfiguredStage, Federated, Plan
from pfl_lightning.messages import Message, Updates
from pfl_lightning.privacy.noise import clipped, secure_normal, seeded_normal
from pfl_lightning.server.aggregator_list import parts_of
from pfl_lightning.settings import check_choices

OWNER = "trainer.secure_sum"
COUNT = "num_samples"
"""Entry of updates that isn't summed: a site tells its numbers of samples when it greets the server."""
TAIL = 10.0
"""Standard deviations beyond which the random source draws no noise."""
FINEST = 256
"""Steps of the grid that the standard deviation of noise has at least, so that rounding the noise costs no privacy."""
KEYS_BYTES, COMMITMENT_BYTES, SHARE_BYTES = 64, 32, 32
"""Bytes of a client's two public keys, of a commitment to its seed, and of a share of a secret."""
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16
"""Bytes of two shares that are sealed for one client: nonce, shares, and tag."""


class Unsummable(ValueError):
    """An update or a sum is out of range; the text is a sentence."""


@dataclass(frozen=True)
class SecureSum(ConfiguredStage):
    r"""Has the server learn sums over a round's clients alone: secure aggregation.

    Entries become whole numbers, :math:`\lfloor v \, n_k / n_{\max} \, 2^b \rceil`, which are summed modulo
    :math:`2^{32}` or :math:`2^{64}`, whichever holds the sum of all clients. So a mean is rounded by
    :math:`2^{-b-1} m / \sum_k n_k / n_{\max}` at most. In a deployment each client hides its numbers by masks that
    cancel in the sum, and a server can take the masks of clients off who drop out with the help of those who stay
    (Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982); simulations take the same sum without masks. It
    is for aggregators that need sums alone (`Aggregator.sums_only`), and for `DPAverage`, to which each client then
    adds its share of the noise.

    Args:
        bits: b, binary digits behind the point, from 8 to 40.
        range: the largest absolute value that an entry of an update may have, above 0.
        overflow: whether an update with larger entries is left out (``refuse``), or these entries are bounded
            (``clip``), of which the record tells how many.
        threshold: share of a round's clients that have to stay until its end, above a half and up to 1; with fewer, or
            with one client, there is no sum. A server that follows the protocol, and colludes with fewer, learns
            nothing but the sum.
        honest: share of a round's clients who stay and don't tell the server their noise, above 0 and up to
            ``threshold``: so many shares of noise make up the whole of it. Only `DPAverage` adds noise.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    bits: int = 16
    range: float = 8.0
    overflow: Literal["refuse", "clip"] = "refuse"
    threshold: float = 2 / 3
    honest: float = 0.5
    _row: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    setting = OWNER
    reads_updates = True
    does = MappingProxyType({"sums": "hides single updates and adds whole vectors up"})
    excludes = MappingProxyType({"chooses": "doesn't cover that"})

    def __post_init__(self) -> None:
        check_choices(OWNER, overflow=(self.overflow, ("refuse", "clip")))
        limits = {
            "bits": (isinstance(self.bits, int) and 8 <= self.bits <= 40, "a number of binary digits from 8 to 40"),
            "range": (0 < self.range <= 2**20, "above 0 and at most 2^20, such as 8"),
            "threshold": (0.5 < self.threshold <= 1, "above 0.5 and at most 1, such as 0.67"),
            "honest": (0 < self.honest <= self.threshold, f"above 0 and at most threshold={self.threshold:.3g}"),
        }
        for name, (inside, words) in limits.items():
            if not inside:
                raise MisconfigurationException(f"{OWNER}.{name}={getattr(self, name)} must be {words}.")

    def least(self, clients: int) -> int:
        """Return how many of a round's clients have to stay until its end, at least 2.

        >>> [SecureSum().least(clients) for clients in (2, 3, 4, 10)]
        [2, 2, 3, 7]

        Args:
            clients: of the round.
        """
        return max(2, math.ceil(self.threshold * clients - 1e-9))

    # A stage of the round

    def check(self, federation: Federated) -> None:
        """Refuse clients that send nothing, and servers that look at single updates."""
        client, aggregator = federation.client, federation.aggregator
        if not client.sends:
            raise MisconfigurationException(
                f"model={type(client).__name__} sends nothing that could be summed; leave {OWNER} out."
            )
        parts = list(parts_of(aggregator))
        # one weight multiplies a whole update, before a sum that nobody can take apart
        if len({"num_samples" in part.needs for part in parts}) > 1:
            raise MisconfigurationException(
                f"aggregator={aggregator.name} counts clients by their samples for one entry and alike for another, "
                f"and {OWNER} makes one sum; give all the same weighting."
            )
        for part in parts:
            part.check_sums()

    def check_size(self, size: int, num_clients: int) -> None:
        """Refuse rounds of one client."""
        if size < 2:
            raise MisconfigurationException(
                f"trainer.clients_per_round={size} of data.num_clients={num_clients} is one client, whose update would "
                f"be the whole of {OWNER}; take at least 2, or better more."
            )

    def on_collect(
        self, federation: Federated, cohort: Sequence[int], outcomes: dict[int, Outcome]
    ) -> dict[int, Outcome]:
        """Return the outcomes with the mean in place of each update, as a deployment's server gets it.

        Masks cancel in a sum, so that a simulation has no need to draw any.
        """
        self._row.clear()
        # sites have summed theirs
        if (sums := federation.engines[0].sums) is not None:
            self._row.update(sums)
            return outcomes
        start, aggregator, clients = time.perf_counter(), federation.aggregator, len(cohort)
        sound = {k: outcome for k, outcome in sorted(outcomes.items()) if outcome.finite and not outcome.refused}
        taken = {k: outcome for k, outcome in outcomes.items() if k not in sound}
        if not sound:
            return taken
        like, noise = next(iter(sound.values())).update, aggregator.noise_share(federation.is_deployed)
        sizes, weighted = federation.sizes(cohort, "train"), "num_samples" in aggregator.needs
        received = aggregator.download(cohort[0])
        encoding = Encoding(self, like, clients, max(sizes.values()) if weighted else None, noise)
        total, sent = torch.zeros(encoding.length, dtype=torch.int64), []
        for client, outcome in sound.items():
            seed = 0 if noise is None else federation.job(client).seed
            try:
                # added at once: all vectors together would take as much as all updates
                total += encoding.vector(outcome.update, received, lambda n, s=seed: drawn_share(noise, n, s))  # type: ignore[misc]
                sent.append(client)
            except Unsummable as reason:
                taken[client] = outcome._replace(update={}, refused=str(reason))
        up, down = encoding.bytes_up(clients, len(sent)), encoding.bytes_down(clients, len(sent))
        self._row.update({"bytes/up": up, "bytes/down": down})
        if enough_to_sum(len(sent), clients, self, federation.round + 1):
            total = encoding.total([total])
            stand_ins = encoding.stand_ins(total, {client: sizes[client] for client in sent}, received)
            taken |= {client: sound[client]._replace(update=update) for client, update in stand_ins.items()}
            self._row["secure_sum/clipped"] = int(total[0])
        self._row["time/secure_sum"] = time.perf_counter() - start
        return taken

    def on_deliver(self, federation: Federated, plan: Plan, updates: Updates) -> Updates:
        """Return the updates, and record the bytes of keys, shares and vectors in place of updates' own."""
        row = federation.metrics
        row |= self._row | {"bytes/down": row["bytes/down"] + self._row.get("bytes/down", 0)}
        return updates

    def statement(self, federation: Federated, guarantee: dict[str, Any]) -> dict[str, Any]:
        """Return the aggregator's guarantee, with what it assumes of clients."""
        if not guarantee:
            return guarantee
        assumes = f"in each round, {self.honest:.3g} of the clients stay until its end and tell nobody their noise"
        return guarantee | {"assumes": assumes}


def enough_to_sum(sent: int, clients: int, settings: SecureSum, round: int) -> bool:
    """Return whether so many clients are left that their sum may be known, and warn if not.

    Args:
        sent: clients that have sent a vector.
        clients: of the round.
        settings: of the sum.
        round: the round's number, from 1.
    """
    if sent >= settings.least(clients):
        return True
    rank_zero_warn(
        f"round {round} has no sum: {sent} of {clients} clients are left, and {OWNER}.threshold="
        f"{settings.threshold:.3g} asks for {settings.least(clients)}."
    )
    return False


class NoiseShare(NamedTuple):
    r"""Noise of one client, a share of the noise in the sum of all clients.

    Args:
        clip: C, the largest norm of a change.
        multiplier: z, the noise multiplier of the sum, at least 0.
        secure: whether noise is drawn from the operating system; else from the seed of the client's round.
    """

    clip: float
    multiplier: float
    secure: bool

    def std(self, honest: float, clients: int) -> float:
        r"""Return the standard deviation of a share, :math:`z C / \sqrt{\lceil h m \rceil}`.

        Args:
            honest: h, the share of clients whose noise counts.
            clients: m, of the round.
        """
        return self.multiplier * self.clip / math.sqrt(max(1, math.ceil(honest * clients - 1e-9)))


def drawn_share(noise: NoiseShare, count: int, seed: int) -> Tensor:
    """Return standard normal numbers for a client's share of noise, float64 ``[count]``.

    Args:
        noise: says where they come from.
        count: how many.
        seed: of the client's round; not used for secure noise.
    """
    return secure_normal(count) if noise.secure else seeded_normal(count, seed, "noise share")


class Encoding:
    """Turns updates into vectors of whole numbers, and a sum of vectors into a mean.

    A vector has the number of clipped entries first, then the entries of integers, and then those of floating type, in
    the order of their names.

    Args:
        settings: of the sum.
        like: an update, of any values.
        clients: how many take part in the round.
        most: training samples of the client that has most of them; None counts all clients alike.
        noise: what each client adds, where the sum is to be differentially private.

    Raises:
        MisconfigurationException: if 64 bits can't hold the sum, noise would be too small for the grid, or updates have
            something else than tensors.
    """

    def __init__(
        self, settings: SecureSum, like: Message, clients: int, most: int | None = None, noise: NoiseShare | None = None
    ) -> None:
        self.settings, self.like, self.most, self.noise = settings, like, most, noise
        try:
            leaves = dict(leaves_of(like))
        except Unsummable as reason:
            raise MisconfigurationException(
                f"{OWNER} sums tensors: {reason}; let upload give tensors alone."
            ) from reason
        self.floats = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
        self.whole = {path: leaf for path, leaf in leaves.items() if path not in self.floats}
        self.length = 1 + sum(leaf.numel() for leaf in leaves.values())
        self.scale = 2.0**settings.bits
        self.std = 0.0 if noise is None else noise.std(settings.honest, clients)
        largest = settings.range if noise is None else noise.clip + TAIL * self.std
        # rounding adds less than a step
        self.bound = math.ceil(largest * self.scale) + 1
        needed = clients * max(self.bound, self.length)
        if needed >= 2**63 or largest * self.scale >= 2**53:
            raise MisconfigurationException(
                f"{OWNER}.bits={settings.bits}: sums of {clients} clients, of entries up to {largest:.3g}, don't fit "
                "in 64 bits; take fewer bits or a smaller range."
            )
        # on a fine grid the sum of rounded Gaussians is a Gaussian with rounding noise beside, which can only hide
        # more, up to exp(-2 pi^2 std^2) with std in steps (cf. Kairouz, Liu and Steinke, 2021, arXiv 2102.06387)
        if 0 < self.std * self.scale < FINEST:
            raise MisconfigurationException(
                f"{OWNER}.bits={settings.bits}: a client's noise, of standard deviation {self.std:.3g}, would be "
                f"rounded to less than {FINEST} steps; take "
                f"{settings.bits + math.ceil(math.log2(FINEST / (self.std * self.scale)))} bits."
            )
        # half the bytes on the wire, where this is enough
        self.dtype = torch.int32 if needed < 2**31 else torch.int64
        # the sum of all clients' counts has to fit as well
        self.largest_whole = (2 ** (31 if self.dtype == torch.int32 else 63) - 1) // clients

    @property
    def agreement(self) -> str:
        """Settings and noise as a text, equal wherever vectors can be added."""
        return f"{self.settings} {self.noise} {self.most} {self.length} {self.dtype}"

    def vector(
        self, update: Message, received: Message | None = None, draw: Callable[[int], Tensor] | None = None
    ) -> Tensor:
        r"""Return an update as whole numbers ``[length]``.

        Args:
            update: of one client.
            received: the payload that its training began with; only used where there is noise.
            draw: gives so many standard normal numbers, float64; only used where there is noise.

        Raises:
            Unsummable: if it has other entries than the round's, or values outside of the range.
        """
        leaves = dict(leaves_of(update))
        # adding entries of others would go unnoticed in the sum
        wanted = {**self.floats, **self.whole}
        looks = {path: (leaf.shape, leaf.is_floating_point()) for path, leaf in leaves.items()}
        if looks != {path: (leaf.shape, leaf.is_floating_point()) for path, leaf in wanted.items()}:
            raise Unsummable("its update has other entries, or other shapes, than the round's")
        whole = flat([leaves[path] for path in self.whole], torch.int64)
        if bool((whole.abs() > self.largest_whole).any()):
            raise Unsummable(f"its update counts beyond {self.largest_whole}, which a sum in {self.dtype} can't hold")
        values = flat([leaves[path] for path in self.floats], torch.float64)
        if self.noise is not None and received is not None and draw is not None:
            base = dict(leaves_of({name: received[name] for name in update if name != COUNT}))
            change = clipped(values - flat([base[path] for path in self.floats], torch.float64), self.noise.clip)
            # towards zero, which makes no norm larger
            numbers = torch.trunc(change * self.scale) + torch.round(self.std * draw(len(change)) * self.scale)
            outside = 0
        else:
            numbers, outside = self._in_range(values, self._share(update))
        return torch.cat([torch.tensor([outside]), whole, numbers.long()]).to(self.dtype)

    def _share(self, update: Message) -> float:
        """Return the weight of a client, above 0 and at most 1."""
        if self.most is None:
            return 1.0
        samples = int(update.get(COUNT, 0))
        if not 0 < samples <= self.most:
            raise Unsummable(f"it has {samples} training samples, where the round's clients have {self.most} at most")
        return samples / self.most

    def _in_range(self, values: Tensor, share: float) -> tuple[Tensor, int]:
        """Return values as multiples of the grid's step, and the number of clipped values."""
        limit = self.settings.range
        # not by `>`, which a NaN passes
        outside = int((~(values.abs() <= limit)).sum())
        if outside and (self.settings.overflow == "refuse" or bool(values.isnan().any())):
            raise Unsummable(
                f"its update has {outside} entries outside of {OWNER}.range={limit:g}, up to "
                f"{float(values.abs().max()):.3g}; a larger range takes them, or overflow=clip bounds them"
            )
        return torch.round(values.clamp(-limit, limit) * (share * self.scale)), outside

    def total(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return the sum of vectors modulo the ring's size ``[length]``, int64 with a sign.

        Args:
            vectors: of the ring's type.
        """
        # in 64 bits, whose overflow wraps as the narrow ring's does
        sum_ = torch.zeros(self.length, dtype=torch.int64)
        for vector in vectors:
            sum_ += vector
        return sum_.to(self.dtype).long()

    def stand_ins(self, total: Tensor, samples: Mapping[int, int], received: Message | None = None) -> Updates:
        """Return the mean in place of each client's update.

        Stand-ins have the same sums as the updates, so that an aggregator which needs sums alone works as ever.

        Args:
            total: of the clients' vectors.
            samples: training samples of each client in the sum, by id.
            received: the payload that changes are from, where there is noise.

        Raises:
            Unsummable: if no such clients' vectors have this sum.
        """
        count = len(samples)
        _, whole, numbers = torch.split(total, [1, *self._sizes])
        if bool((numbers.abs() > count * self.bound).any()) or bool((whole.abs() > count * self.largest_whole).any()):
            raise Unsummable("the sum is none of updates in their range: a client sent other numbers, or a wrong share")
        # sites have told samples in their greetings, so that these needn't be summed
        weight = float(count) if self.most is None else sum(samples.values()) / self.most
        values = numbers.double() / self.scale / weight
        if self.noise is not None and received is not None:
            base = dict(leaves_of({name: received[name] for name in self.like if name != COUNT}))
            values = values + flat([base[path] for path in self.floats], torch.float64)
        # counters are alike where clients make as many steps; a mean below the largest would be nobody's
        ceiling = -torch.div(-whole, count, rounding_mode="floor")
        entries = split(values, self.floats) | split(ceiling, self.whole)
        counts = {}
        if COUNT in self.like:
            kind = self.like[COUNT].dtype
            counts = {client: {COUNT: torch.tensor(own, dtype=kind)} for client, own in samples.items()}
        mean = rebuilt({name: part for name, part in self.like.items() if name != COUNT}, entries)
        return {client: {**mean, **counts.get(client, {})} for client in sorted(samples)}

    @property
    def _sizes(self) -> tuple[int, int]:
        return tuple(sum(leaf.numel() for leaf in leaves.values()) for leaves in (self.whole, self.floats))  # type: ignore[return-value]

    def bytes_up(self, clients: int, sent: int) -> int:
        """Return the bytes up of a round: keys, sealed shares, vectors, and shares of secrets.

        Args:
            clients: how many take part, all of whom have exchanged keys.
            sent: how many of them have sent a vector.
        """
        setup = clients * (KEYS_BYTES + COMMITMENT_BYTES + (clients - 1) * SEALED_BYTES)
        return setup + sent * (self.length * self.dtype.itemsize + clients * SHARE_BYTES)

    def bytes_down(self, clients: int, sent: int) -> int:
        """Return the bytes down of a round beside payloads: keys and sealed shares.

        Args:
            clients: how many take part, all of whom have exchanged keys.
            sent: how many of them have sent a vector.
        """
        return clients * clients * KEYS_BYTES + sent * (clients - 1) * SEALED_BYTES


def leaves_of(record: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield places and tensors of an update, by name, without the number of samples.

    Args:
        record: an update, or a part of one.
        path: place of the part.

    Raises:
        Unsummable: if it has something else than tensors.
    """
    if isinstance(record, Tensor):
        yield path, record
    elif isinstance(record, Mapping):
        for key in sorted(record, key=str):
            if path or key != COUNT:
                yield from leaves_of(record[key], (*path, key))
    elif isinstance(record, list | tuple):
        for index, part in enumerate(record):
            yield from leaves_of(part, (*path, index))
    else:
        raise Unsummable(f"its update has a {type(record).__name__} at {'.'.join(map(str, path))}, and no tensor")


def flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return tensors as one vector of a type, on the CPU."""
    return torch.cat([torch.zeros(0, dtype=dtype), *(t.detach().to("cpu", dtype).reshape(-1) for t in tensors)])


def split(vector: Tensor, leaves: Mapping[tuple[Any, ...], Tensor]) -> dict[tuple[Any, ...], Tensor]:
    """Return the parts of a vector by place, with shapes and types of given tensors."""
    parts = torch.split(vector, [leaf.numel() for leaf in leaves.values()])
    return {
        path: part.reshape(leaf.shape).to(leaf.dtype) for (path, leaf), part in zip(leaves.items(), parts, strict=True)
    }


def rebuilt(record: Any, entries: Mapping[tuple[Any, ...], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """Return a record of the same nesting, with other tensors by place."""
    if isinstance(record, Tensor):
        return entries[path]
    if isinstance(record, Mapping):
        return {key: rebuilt(part, entries, (*path, key)) for key, part in record.items()}
    return type(record)(rebuilt(part, entries, (*path, index)) for index, part in enumerate(record))
