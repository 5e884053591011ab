"""The server's connection to sites: find each client's node, send messages about clients, and collect answers."""

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
from pfl_lightning.data.client_names import client_label
from pfl_lightning.flower.template import Refused, plain
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.messages import digest

Answer: TypeAlias = tuple[int, RecordDict]
"""A client's id, and the content of the site's message, which may hold answers about the site's other clients too."""

VERSION = version("pfl-lightning")
MOST_SAMPLES = 1 << 31
"""Largest number of samples of a client in one split."""
SIZES = {"train": 0, "val": 0, "test": 0}
HELLO = {"version": "", "initial": "", "inputs": "", "clients": {0: SIZES}}
"""Template of a site's greeting: version, fingerprints of the initial model and of the settings that make inputs of
rows, and sample counts by client and split."""
GONE = (3, 4, 5)
"""Flower's error codes for a message, a reply or a node that is unavailable at the moment."""


@dataclass
class Sent:
    """A sent message without a reply yet.

    Args:
        node: id of the receiving node.
        clients: ids of the clients in the message; empty for a greeting.
    """

    node: int
    clients: list[int] = field(default_factory=list)


class Link:
    """Knows the node of each client, and exchanges messages with nodes.

    A node claims clients in a greeting. The claim counts if the server's list of keys agrees or, without a list, if no
    node with another key has claimed the same clients. A client of a lost node is asked again at the same node, or at
    a new node with the same key.

    Args:
        grid: Flower's grid of nodes.
        clients: number of clients in the federation.
        initial: fingerprint of the initial model, equal at all sites.
        keys: for each node's public key the permitted client ids, with the largest number of samples of each client in
            a split; None permits any client without an earlier claim by another key, with up to `MOST_SAMPLES`.
        timeout: seconds for which a phase of a round waits for sites.
        poll: seconds between two looks for replies.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        initial: str,
        keys: Mapping[str, Mapping[int, int]] | None = None,
        timeout: float = 600.0,
        poll: float = 0.2,
        names: Sequence[str] = (),
    ) -> None:
        self.names = names
        self.grid, self.clients, self.initial, self.keys = grid, clients, initial, keys
        self.timeout, self.poll = timeout, poll
        self.sizes: dict[int, dict[str, int]] = {}
        """Numbers of samples by client and split, fixed by the first greeting."""
        self.times_asked: Counter[int] = Counter()
        """Messages of the last phase by client, more than one where a lost site has come back."""
        self._node_of: dict[int, int] = {}
        self._key_of: dict[int, str] = {}
        self._greeted: set[int] = set()
        # of the first site, as the server may have no rows of its own
        self._inputs: tuple[int, str] | None = None
        self._sent: dict[str, Sent] = {}

    def label(self, client: int) -> str:
        """Return a client's id for messages, followed by the client's name."""
        return client_label(client, self.names)

    def wait(self, seconds: float) -> None:
        """Wait until every client has a site.

        Args:
            seconds: the longest wait.

        Raises:
            MisconfigurationException: if a client has no site by the end.
        """
        # a monotonic clock, as the machine's own clock can be set while the server waits
        end = time.monotonic() + seconds
        while len(self._node_of) < self.clients and time.monotonic() < end:
            self._greet(self._nodes())
            if not any(True for _ in self._replies()):
                time.sleep(self.poll)
        if missing := sorted(set(range(self.clients)) - self._node_of.keys()):
            raise MisconfigurationException(
                f"no site has said within {seconds:.0f} s that it has clients {', '.join(map(self.label, missing))} of "
                f"data.num_clients={self.clients}; start it, or register its key."
            )

    def ask(self, kind: str, group: str, jobs: Mapping[int, Any], payloads: Mapping[int, Any]) -> Iterator[Answer]:
        """Send each client's job to the client's site, and yield answers until all are in or time is out.

        Args:
            kind: Flower's type of the messages.
            group: a name of the messages for Flower's log, such as the round's number.
            jobs: the settings of each client's work, by client.
            payloads: the server's payload for each client, by client.
        """
        open_ = set(jobs)
        self.times_asked.clear()
        end = time.monotonic() + self.timeout
        while open_ and time.monotonic() < end:
            # at each look, so that a site can come back, or turn up as a new node, in the middle of a phase
            alive = self._nodes()
            self._greet(alive)
            # nobody is asked twice at once: training twice would cost the site a second round
            on_the_way = {client for sent in self._sent.values() for client in sent.clients}
            batches: dict[int, list[int]] = {}
            for client in sorted(open_ - on_the_way):
                if self._node_of.get(client) in alive:
                    batches.setdefault(self._node_of[client], []).append(client)
            # one message per node: equal tensors of several clients' payloads travel once in a message
            for node, clients in batches.items():
                records = {"jobs": {client: jobs[client] for client in clients}}
                records |= {f"{client}/payload": payloads[client] for client in clients}
                self._push(Sent(node, clients), pack(records), kind, group)
                self.times_asked.update(clients)
            heard = False
            for sent, reply in self._replies():
                heard = True
                for client in set(sent.clients) & open_:
                    # without a reply the client stays open, and is asked again
                    if reply is not None:
                        open_.discard(client)
                        yield client, reply
            if open_ and not heard:
                time.sleep(self.poll)
        # an answer after the time-out is of an old phase, and must not pass for one of the next
        self._sent = {message: sent for message, sent in self._sent.items() if not sent.clients}

    def node(self, client: int) -> int:
        """Return the id of a client's last known node; a KeyError means that no node has claimed the client."""
        return self._node_of[client]

    def _nodes(self) -> dict[int, str]:
        """Return the public keys of all connected nodes, by node id."""
        return {node.node_id: node.public_key.decode() for node in self.grid.get_nodes()}

    def _greet(self, alive: Mapping[int, str]) -> None:
        """Ask new nodes for their clients; a node that was gone counts as new."""
        # a node can have restarted with other settings in between
        self._greeted &= alive.keys()
        for node in alive.keys() - self._greeted:
            self._greeted.add(node)
            hello = {"hello": {"version": VERSION, "num_clients": self.clients}}
            self._push(Sent(node), pack(hello), MessageType.QUERY, "hello")

    def _push(self, sent: Sent, content: RecordDict, kind: str, group: str) -> None:
        message = Message(content, dst_node_id=sent.node, message_type=kind, group_id=group, ttl=self.timeout)
        for name in self.grid.push_messages([message]):
            # Flower gives None for a message to a node that has just left; a job then goes out again at the next look
            if name is not None:
                self._sent[name] = sent

    def _replies(self) -> Iterator[tuple[Sent, RecordDict | None]]:
        """Yield sent messages with the contents of replies, None for a reply that Flower has given up."""
        if not self._sent:
            return
        for reply in self.grid.pull_messages(list(self._sent)):
            sent = self._sent.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                # greeted again when it is back, as it may have other clients then
                if reply.error.code in GONE:
                    self._greeted.discard(sent.node)
                yield from self._failed(sent, reply.error.code, reply.error.reason or "")
            elif sent.clients:
                yield sent, reply.content
            else:
                self._heard(sent.node, reply.content)

    def _failed(self, sent: Sent, code: int, reason: str) -> Iterator[tuple[Sent, RecordDict | None]]:
        about = f" with clients {', '.join(map(self.label, sent.clients))}" if sent.clients else ""
        rank_zero_warn(f"node {sent.node}{about}: Flower's error {code}: {plain(reason, 300)}")
        # an app that failed would fail again, so that only a lost message or node is worth a second try
        yield sent, None if code in GONE or not sent.clients else failure("its site's app failed")

    def _heard(self, node: int, content: RecordDict) -> None:
        """Check a node's greeting, and record the node's clients; warn of a wrong greeting, and record no client."""
        try:
            check_failure(content)
            # a greeting has no tensors, so that not one byte of tensors is read from an unknown node
            hello = unpack(content, "hello", HELLO, self.clients, limit=0)
            if hello["version"] != VERSION:
                raise Refused(f"it has pfl-lightning {shown(hello['version'])} and the server {VERSION}.")
            # personal parameters never travel, and would differ from the start
            if hello["initial"] != self.initial:
                raise Refused("its initial model is another than the server's; give both the same versions of torch.")
            self._check_inputs(hello["inputs"])
            key = self._nodes().get(node, "")
            for client, sizes in hello["clients"].items():
                self._check_claim(node, key, client, sizes)
        except Refused as refusal:
            rank_zero_warn(f"node {node} is refused: {refusal}")
            return
        self._inputs = self._inputs or (node, hello["inputs"])
        for client, sizes in hello["clients"].items():
            self._node_of[client], self._key_of[client], self.sizes[client] = node, key, sizes
        rank_zero_info(f"node {node} has clients {', '.join(map(self.label, sorted(hello['clients'])))}.")

    def _check_inputs(self, inputs: str) -> None:
        """Refuse a node that makes other inputs or class numbers of the same rows than the first node.

        Args:
            inputs: the greeting's fingerprints by the setting's name.

        Raises:
            Refused: with the settings that differ.
        """
        if self._inputs is None or self._inputs[1] == inputs:
            return
        node, first = self._inputs
        names = sorted({each.partition("=")[0] for each in set(inputs.split()) ^ set(first.split())})
        raise Refused(
            f"its data.{plain(', data.'.join(names), 100)} makes other inputs or classes of the same rows than that of "
            f"node {node}; give all sites the same."
        )

    def _check_claim(self, node: int, key: str, client: int, sizes: dict[str, int]) -> None:
        """Refuse a node's claim of a client with another holder, or with other numbers of samples than before.

        Raises:
            Refused: with the reason.
        """
        own = dict.fromkeys(range(self.clients), MOST_SAMPLES) if self.keys is None else self.keys.get(key, {})
        if client not in own:
            raise Refused(
                f"it says that it has client {self.label(client)}, which the server's list gives to another key."
            )
        holder = self._node_of.get(client)
        if holder not in (None, node):
            # a site that starts anew gets another node id, and keeps the key
            if key != self._key_of[client]:
                raise Refused(f"it says that it has client {self.label(client)}, which a node with another key has.")
            if holder in self._nodes():
                raise Refused(f"it says that it has client {self.label(client)}, which node {holder} has.")
        for split, size in sizes.items():
            if not 0 <= size <= own[client]:
                limit = f"0 to {own[client]}" + ("" if self.keys is None else ", as the server's list says")
                raise Refused(
                    f"it claims {shown(size)} {split} samples of client {self.label(client)}, which may have {limit}."
                )
        # a client's weight in the average is by samples, and must not grow in the middle of a run
        if self.sizes.get(client, sizes) != sizes:
            raise Refused(f"client {self.label(client)} has other numbers of samples than it had at first.")


def initial_of(modules: Sequence[ClientModule]) -> str:
    """Return a fingerprint of the initial models, equal at the server and at sites with the same models.

    Args:
        modules: the client modules, one per architecture, with initial weights.
    """
    return digest([module.state_dict() for module in modules])


def failure(reason: str) -> RecordDict:
    """Return the content of a message with a reason in the place of answers.

    Args:
        reason: one sentence.
    """
    return pack({"failure": {"reason": reason}})


def check_failure(content: RecordDict) -> None:
    """Refuse a site's message with a reason in the place of answers.

    Raises:
        Refused: with the site's reason.
    """
    if names(content) == ["failure"]:
        raise Refused(plain(unpack(content, "failure", {"reason": ""}, limit=0)["reason"]))
