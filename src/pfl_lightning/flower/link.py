"""The sites as the server knows them: which node has which client, and what is asked of them."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from reprlib import repr as shown
from typing import Any, TypeAlias

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pfl_lightning.client import ClientModule
from pfl_lightning.flower.template import Refused, plain
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.messages import digest

Answer: TypeAlias = tuple[int, RecordDict]
"""A client's id, and the content of its site's message, which may hold those of others too."""

VERSION = version("pfl-lightning")
MOST_SAMPLES = 1 << 31
"""Samples that a client has in a split at most."""
SIZES = {"train": 0, "val": 0, "test": 0}
HELLO = {"version": "", "initial": "", "clients": {0: SIZES}}
"""What a site says of itself: its version, a fingerprint of the initial model, and its clients' numbers of samples."""
GONE = (3, 4, 5)
"""Flower's codes for a message, a reply or a node that is not there now."""


@dataclass
class Sent:
    """A message on its way.

    Args:
        node: whom it is for.
        clients: about whom; none for a greeting.
    """

    node: int
    clients: list[int] = field(default_factory=list)


class Link:
    """The sites, as the server knows them.

    A node says which clients it has, and is believed if the server's list of keys agrees, or if nobody else has them.
    A client whose node is gone is asked again where it turns up: at the same node, or at another one by the same key.

    Args:
        grid: Flower's.
        clients: how many there are.
        initial: fingerprint of the initial model, which a site must share.
        keys: which clients a node may have, by its public key, and how many samples each of them may claim in a split;
            None lets every registered node have any that no other key has had, with up to `MOST_SAMPLES`.
        timeout: seconds that a phase of a round waits for its sites.
        poll: seconds between two looks.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        initial: str,
        keys: Mapping[str, Mapping[int, int]] | None = None,
        timeout: float = 600.0,
        poll: float = 0.2,
    ) -> None:
        self.grid, self.clients, self.initial, self.keys = grid, clients, initial, keys
        self.timeout, self.poll = timeout, poll
        self.sizes: dict[int, dict[str, int]] = {}
        """Numbers of samples by client and split, as they were told first."""
        self.times_asked: Counter[int] = Counter()
        """Messages of the last phase by client: a site that comes back is asked again."""
        self._node_of: dict[int, int] = {}
        self._key_of: dict[int, str] = {}
        self._greeted: set[int] = set()
        self._sent: dict[str, Sent] = {}

    def wait(self, seconds: float) -> None:
        """Waits until every client has a site.

        Args:
            seconds: how long.

        Raises:
            MisconfigurationException: if some have none then.
        """
        end = time.monotonic() + seconds
        while len(self._node_of) < self.clients and time.monotonic() < end:
            self._greet(self._nodes())
            if not any(True for _ in self._replies()):
                time.sleep(self.poll)
        if missing := sorted(set(range(self.clients)) - self._node_of.keys()):
            raise MisconfigurationException(
                f"no site has said within {seconds:.0f} s that it has clients {', '.join(map(str, missing))} of "
                f"data.num_clients={self.clients}; start it, or register its key."
            )

    def ask(self, kind: str, group: str, jobs: Mapping[int, Any], payloads: Mapping[int, Any]) -> Iterator[Answer]:
        """Each client's answer; none of a client whose site doesn't answer in time.

        Args:
            kind: Flower's type of the messages.
            group: what they are about, for Flower's log.
            jobs: what is told to each client's site, by client.
            payloads: what each client is sent.
        """
        open_ = set(jobs)
        self.times_asked.clear()
        end = time.monotonic() + self.timeout
        while open_ and time.monotonic() < end:
            alive = self._nodes()
            self._greet(alive)
            on_the_way = {client for sent in self._sent.values() for client in sent.clients}
            batches: dict[int, list[int]] = {}
            for client in sorted(open_ - on_the_way):
                if self._node_of.get(client) in alive:
                    batches.setdefault(self._node_of[client], []).append(client)
            for node, clients in batches.items():
                records = {"jobs": {client: jobs[client] for client in clients}}
                records |= {f"{client}/payload": payloads[client] for client in clients}
                self._push(Sent(node, clients), pack(records), kind, group)
                self.times_asked.update(clients)
            heard = False
            for sent, reply in self._replies():
                heard = True
                for client in set(sent.clients) & open_:
                    if reply is not None:
                        open_.discard(client)
                        yield client, reply
            if open_ and not heard:
                time.sleep(self.poll)
        # an answer that comes later is nobody's
        self._sent = {message: sent for message, sent in self._sent.items() if not sent.clients}

    def node(self, client: int) -> int:
        """The node that a client was at last, which has been heard of."""
        return self._node_of[client]

    def _nodes(self) -> dict[int, str]:
        """Nodes that are there, with their public keys."""
        return {node.node_id: node.public_key.decode() for node in self.grid.get_nodes()}

    def _greet(self, alive: Mapping[int, str]) -> None:
        """Asks nodes that are new who they have; one that was gone is new again."""
        self._greeted &= alive.keys()
        for node in alive.keys() - self._greeted:
            self._greeted.add(node)
            hello = {"hello": {"version": VERSION, "num_clients": self.clients}}
            self._push(Sent(node), pack(hello), MessageType.QUERY, "hello")

    def _push(self, sent: Sent, content: RecordDict, kind: str, group: str) -> None:
        message = Message(content, dst_node_id=sent.node, message_type=kind, group_id=group, ttl=self.timeout)
        for name in self.grid.push_messages([message]):
            if name is not None:
                self._sent[name] = sent

    def _replies(self) -> Iterator[tuple[Sent, RecordDict | None]]:
        """What has come in, with what it answers; None where Flower says that it can't come."""
        if not self._sent:
            return
        for reply in self.grid.pull_messages(list(self._sent)):
            sent = self._sent.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                if reply.error.code in GONE:
                    self._greeted.discard(sent.node)
                yield from self._failed(sent, reply.error.code, reply.error.reason or "")
            elif sent.clients:
                yield sent, reply.content
            else:
                self._heard(sent.node, reply.content)

    def _failed(self, sent: Sent, code: int, reason: str) -> Iterator[tuple[Sent, RecordDict | None]]:
        about = f" with clients {', '.join(map(str, sent.clients))}" if sent.clients else ""
        rank_zero_warn(f"node {sent.node}{about}: Flower's error {code}: {plain(reason, 300)}")
        # what an app can't do now it can't do in a moment either
        yield sent, None if code in GONE or not sent.clients else failure("its site's app failed")

    def _heard(self, node: int, content: RecordDict) -> None:
        """Takes a node's word for who is there, as far as it may be taken."""
        try:
            check_failure(content)
            hello = unpack(content, "hello", HELLO, self.clients, limit=0)
            if hello["version"] != VERSION:
                raise Refused(f"it has pfl-lightning {shown(hello['version'])} and the server {VERSION}.")
            if hello["initial"] != self.initial:
                raise Refused("its initial model is another than the server's; give both the same versions of torch.")
            key = self._nodes().get(node, "")
            for client, sizes in hello["clients"].items():
                self._check_claim(node, key, client, sizes)
        except Refused as refusal:
            rank_zero_warn(f"node {node} is refused: {refusal}")
            return
        for client, sizes in hello["clients"].items():
            self._node_of[client], self._key_of[client], self.sizes[client] = node, key, sizes
        rank_zero_info(f"node {node} has clients {', '.join(map(str, sorted(hello['clients'])))}.")

    def _check_claim(self, node: int, key: str, client: int, sizes: dict[str, int]) -> None:
        """Refuses a client at a node that isn't its own, or with other data than it had."""
        own = dict.fromkeys(range(self.clients), MOST_SAMPLES) if self.keys is None else self.keys.get(key, {})
        if client not in own:
            raise Refused(f"it says that it has client {client}, which the server's list gives to another key.")
        holder = self._node_of.get(client)
        if holder not in (None, node):
            if key != self._key_of[client]:
                raise Refused(f"it says that it has client {client}, which a node with another key has.")
            if holder in self._nodes():
                raise Refused(f"it says that it has client {client}, which node {holder} has.")
        for split, size in sizes.items():
            if not 0 <= size <= own[client]:
                limit = f"0 to {own[client]}" + ("" if self.keys is None else ", as the server's list says")
                raise Refused(f"it claims {shown(size)} {split} samples of client {client}, which may have {limit}.")
        if self.sizes.get(client, sizes) != sizes:
            raise Refused(f"client {client} has other numbers of samples than it had at first.")


def initial_of(modules: Sequence[ClientModule]) -> str:
    """Fingerprint of the models that all begin with, which sites and server compare.

    Args:
        modules: the client modules, one a network, as made.
    """
    return digest([module.state_dict() for module in modules])


def failure(reason: str) -> RecordDict:
    """A message's content in the place of answers that can't be given.

    Args:
        reason: a sentence.
    """
    return pack({"failure": {"reason": reason}})


def check_failure(content: RecordDict) -> None:
    """Looks whether a site has given a reason in the place of its answers.

    Raises:
        Refused: with the reason, if so.
    """
    if names(content) == ["failure"]:
        raise Refused(plain(unpack(content, "failure", {"reason": ""}, limit=0)["reason"]))
