"""The server's part of secure sums: four messages per round and client, none with a client's own update."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import MessageType, RecordDict
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.engines import Job
from pfl_lightning.flower.journal import Again
from pfl_lightning.flower.link import Link
from pfl_lightning.flower.masks import bound, fingerprint, ids, session, unmasked
from pfl_lightning.flower.template import Refused, check_type, plain
from pfl_lightning.flower.wire import unpack
from pfl_lightning.messages import Message
from pfl_lightning.privacy.secure_sum import (
    COMMITMENT_BYTES,
    KEYS_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    Encoding,
    NoiseShare,
    SecureSum,
    Unsummable,
    enough_to_sum,
)

Answer = TypeVar("Answer")

STEPS = {step: f"{MessageType.QUERY}.{step}" for step in ("offer", "share", "reveal")}
"""Flower's message types of the steps beside training, by step."""
OFFER = {"keys": torch.zeros(KEYS_BYTES, dtype=torch.uint8), "seed": torch.zeros(COMMITMENT_BYTES, dtype=torch.uint8)}
SEALED = torch.zeros(SEALED_BYTES, dtype=torch.uint8)
SHARE = torch.zeros(SHARE_BYTES, dtype=torch.uint8)
SIGNATURE = 400
"""Largest number of characters of a signature."""


class Summing(NamedTuple):
    """The settings of a deployment's secure sum, and the clients' noise.

    Args:
        settings: the settings of ``trainer.secure_sum``.
        weighted: True if the mean is weighted by clients' numbers of training samples.
        noise: each client's share of the noise of differential privacy; None without noise.
    """

    settings: SecureSum
    weighted: bool
    noise: NoiseShare | None


class Exchange:
    """Sends the messages of a round's sum to sites, and removes masks from the sum.

    Args:
        link: the connection to the sites.
        summing: the settings of the sum.
        round: the round's number, from 0.
        answered: returns a client's answer, given a message's content and the client's id; raises `Refused` if the
            site gives a reason in place of an answer.
    """

    def __init__(
        self, link: Link, summing: Summing, round: int, answered: Callable[[RecordDict, int], dict[str, Any]]
    ) -> None:
        self.link, self.summing, self.round, self.answered = link, summing, round, answered
        self.refused: dict[int, Refused] = {}
        self.keys: dict[int, bytes] = {}
        self.seeds: dict[int, bytes] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}
        self.signatures: dict[int, str] = {}
        """Hexadecimal signatures of all keys by client, where sites have keys; sites check them."""
        self.asked = 0
        self.seconds = 0.0

    @property
    def clients(self) -> list[int]:
        """Return the ids of all clients with shared secrets, ascending."""
        return sorted(self.sealed)

    def begin(self, clients: list[int]) -> bool:
        """Have clients exchange keys and shares of secrets; return False, with a warning, if too few clients answer.

        Args:
            clients: ids of the round's clients.
        """
        start = time.perf_counter()
        for client, offer in self._ask("offer", {client: {} for client in clients}, self._offer):
            self.keys[client], self.seeds[client] = offer
        # the threshold is a part of all clients asked: dropping clients must not lower the number for a sum
        self.asked = len(clients)
        begun = self._enough(len(self.keys))
        if begun:
            shown = {"keys": {client: tensor(key) for client, key in self.keys.items()}}
            for client, boxes in self._ask("share", dict.fromkeys(self.keys, shown), self._boxes):
                self.sealed[client] = boxes
            begun = self._enough(len(self.sealed))
        self.seconds += time.perf_counter() - start
        return begun

    def _enough(self, left: int) -> bool:
        """Return True if enough of the round's clients are left for a sum, else warn and return False."""
        return enough_to_sum(left, self.asked, self.summing.settings, self.round + 1)

    def encoding(self, like: Message, jobs: Mapping[int, Job]) -> Encoding:
        """Return the encoding of the round's updates as vectors of whole numbers.

        Args:
            like: an update's template.
            jobs: the jobs of the round's clients, by id.
        """
        # the maximum over all clients asked, as each site gets this number before anybody knows who drops out
        most = max(self.link.sizes[client]["train"] for client in jobs) if self.summing.weighted else None
        return Encoding(self.summing.settings, like, len(self.sealed), most, self.summing.noise)

    def begun_before(self, sent: int) -> Again | None:
        """Return why the round can have no sum, if enough of its clients have helped with another one of its model.

        Args:
            sent: number of clients with a vector.
        """
        least = self.summing.settings.least(self.asked)
        # as many as could make a sum by themselves, so that a few bad sites can't say so for all
        reasons = [reason for _, reason in sorted(self.refused.items()) if isinstance(reason, Again)]
        return reasons[0] if sent < least <= len(reasons) else None

    def end(
        self, encoding: Encoding, hidden: Mapping[int, Tensor], received: Message, row: Mapping[str, Any]
    ) -> tuple[dict[int, Message], int]:
        """Return the mean in place of each client's update, and the number of clipped entries.

        Without enough clients or shares, warn, and return no update.

        Args:
            encoding: the round's encoding.
            hidden: masked vectors ``[length]``, by client.
            received: the payload of the round, to which the mean change is added where clients add noise.
            row: what each client was told about its work, alike for all.
        """
        start, settings = time.perf_counter(), self.summing.settings
        # sites would refuse to reveal shares for so few clients, so that they aren't asked
        if not self._enough(len(hidden)):
            return {}, 0
        # sealed shares go to sites only now, so that a site keeps no secrets but its own while it trains
        boxes = {client: {k: tensor(own[client]) for k, own in self.sealed.items() if k != client} for client in hidden}
        payloads = {client: {"sealed": own} for client, own in boxes.items()}
        shares = dict(self._ask("reveal", payloads, self._shares, sent=ids(hidden)))
        try:
            # the secrets were shared among all clients with keys, and their threshold depends on this number
            least = settings.least(len(self.keys))
            context = bound(session(self.round, self.keys), row, received)
            total = unmasked(hidden, shares, self.keys, self.seeds, self.sealed, least, context)
            samples = {client: self.link.sizes[client]["train"] for client in hidden}
            # sites add up clipped entries in the vector's first number
            return dict(encoding.stand_ins(total, samples, received)), int(total[0])
        except (Refused, Unsummable) as reason:
            rank_zero_warn(f"round {self.round + 1} has no sum: {str(reason).removesuffix('.')}.")
            return {}, 0
        finally:
            self.seconds += time.perf_counter() - start

    def _ask(
        self, step: str, payloads: Mapping[int, Message], read: Callable[[RecordDict, int], Answer], **row: Any
    ) -> Iterator[tuple[int, Answer]]:
        """Yield each client's answer to one step, and keep the reason of each refused answer."""
        jobs = {client: {"round": self.round, "sent": "", **row} for client in payloads}
        for client, content in self.link.ask(STEPS[step], str(self.round + 1), jobs, payloads):
            try:
                answer = self.answered(content, client)
                if step == "share":
                    # passed on to all sites, so that one can't fill their messages
                    signature = answer.get("signature", "")
                    check_type(signature, str, "answer.signature")
                    self.signatures[client] = plain(signature, SIGNATURE)
                yield client, read(content, client)
            except Refused as reason:
                self.link.useless.add(client)
                self.refused[client] = reason
                if step == "reveal":
                    # only a warning: the client's vector is in the sum, and other clients' shares may be enough
                    rank_zero_warn(f"round {self.round + 1}: client {client} has revealed no shares: {reason}")

    def _offer(self, content: RecordDict, client: int) -> tuple[bytes, bytes]:
        # both have fixed sizes, so that a site can't fill the server's memory
        offer = unpack(content, f"{client}/offer", OFFER, limit=KEYS_BYTES + COMMITMENT_BYTES)
        return data(offer["keys"]), data(offer["seed"])

    def _boxes(self, content: RecordDict, client: int) -> dict[int, bytes]:
        # a client keeps the share for itself
        return self._of_clients(content, f"{client}/sealed", SEALED, sorted(self.keys.keys() - {client}))

    def _shares(self, content: RecordDict, client: int) -> dict[int, bytes]:
        return self._of_clients(content, f"{client}/shares", SHARE, self.clients)

    def _of_clients(self, content: RecordDict, name: str, like: Tensor, clients: list[int]) -> dict[int, bytes]:
        """Return the parts of a client's record by id, exactly one for each id in ``clients``.

        Raises:
            Refused: if a part is missing, or one too many.
        """
        # a template with integers as keys accepts a part of the ids, and a sum needs each
        sent = unpack(content, name, dict.fromkeys(clients, like), self.link.clients, len(clients) * len(like))
        if sorted(sent) != clients:
            raise Refused(f"{name} is of clients {ids(sent)} and should be of {ids(clients)}.")
        return {client: data(part) for client, part in sent.items()}


def tensor(data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor for the wire."""
    return torch.tensor(list(data), dtype=torch.uint8)


def data(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor from the wire."""
    return tensor.numpy().tobytes()


def told_alike(jobs: Mapping[int, Job]) -> dict[int, Job]:
    """Return the jobs with the payload that most clients have, of all with the same number that of the smallest id.

    Sites derive masks from the payload, so that those of clients with other payloads would stay in the sum.

    Args:
        jobs: of the round, by client.
    """
    prints: dict[tuple[Any, ...], bytes] = {}
    alike: dict[bytes, dict[int, Job]] = {}
    for client, job in sorted(jobs.items()):
        # most servers give all clients the same tensors, so that a model is read once
        same = tuple((name, id(entry)) for name, entry in job.payload.items())
        if same not in prints:
            prints[same] = fingerprint(job.payload)
        alike.setdefault(prints[same], {})[client] = job
    return max(alike.values(), key=len)
