"""The server's connection to sites: find each client's node, send messages about clients, and collect answers."""

import ctypes
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pfl_lightning.client import ClientModule
from pfl_lightning.data.client_names import client_label, distinct
from pfl_lightning.flower.first_exchange import TOLD, FirstExchange, pieces
from pfl_lightning.flower.greeting import check_settings, fingerprint
from pfl_lightning.flower.template import Refused, plain
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.messages import digest
from pfl_lightning.selection.base import enough
from pfl_lightning.settings import is_count

Answer: TypeAlias = tuple[int, RecordDict]
"""A client's id, and the content of the site's message, which may hold answers about the site's other clients too."""

VERSION = version("pfl-lightning")
MOST_SAMPLES = 1 << 31
"""Largest number of samples of a client in one split."""
SIZES = {"train": 0, "val": 0, "test": 0}
HELLO = {"version": "", "initial": "", "settings": {str: str}, "secret": "", "clients": {0: SIZES}, "new": {str: SIZES}}
"""Template of a site's greeting: version, fingerprint of the initial model, settings that decide a guarantee or a
result, a secret by which the site is known after a restart, and sample counts by client and split, of clients with a
name that the app doesn't have by this name."""
LONGEST = 100
"""Largest number of characters in the name of a client that joins."""
Keys: TypeAlias = Mapping[str, Mapping[int | str, int]]
"""For each public key, the permitted clients with the largest number of samples of each in a split: ids, or names of
clients that may join later."""
NODE_GONE = 5
"""Flower's error code for a node without heartbeats."""
FIRST = "query.first"
"""Flower's type of the question before the first round."""
AGAIN, LEAST_AGAIN = 3.0, 60.0
"""A site is asked again after so many times the longest answer of its phase or of the last phase of this kind, and
after so many seconds at least; each further time after as much more."""
UNKNOWN_AGAIN = 0.25
"""Share of the time-out after which a site is asked again where no site has answered yet."""
HEARTBEATS = 2
"""Number of intervals between heartbeats for which Flower takes a silent node for connected."""
TOO_LATE = 2
"""Number of answers in a row that came too late to count, from which the server gives advice."""
CRASHED, CRASHES = 8, 3
"""Flower's error code for an app that has ended without a word, as where it took too long to start on a busy machine,
and the number of times after which nobody asks again."""
GONE = (3, 4, NODE_GONE)
"""Flower's error codes for a message, a reply or a node that is unavailable at the moment."""


@dataclass(frozen=True)
class Quorum:
    """The clients that a start and a phase of a round wait for, and for how long.

    Args:
        min_available: clients with a site before the first round, at least 1; 0 is all of the federation.
        min_results: share of the clients asked, above 0.0 and up to 1.0, whose answers are enough to end a phase; a
            whole number from 1 up counts clients of a full round's training, and evaluations take the same share.
        grace: seconds for further answers once there are enough, 0 or more.
        wait_for_lost: seconds for a lost site to come back, 0 or more; until then its clients still take part, and a
            phase waits for them.
        late_rounds: a late answer counts in the client's next training if asked for at most this many rounds earlier; 0
            drops late answers.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    min_available: int = 0
    min_results: int | float = 1.0
    grace: float = 30.0
    wait_for_lost: float = 0.0
    late_rounds: int = 0

    def __post_init__(self) -> None:
        share = self.min_results
        if not is_count(share) and not (isinstance(share, float) and 0 < share <= 1):
            raise MisconfigurationException(
                f"min-results={share} must be a number of clients from 1 up, or a share above 0.0 and up to 1.0."
            )
        for name in ("min_available", "late_rounds"):
            if (value := getattr(self, name)) != 0 and not is_count(value):
                raise MisconfigurationException(f"{name.replace('_', '-')}={value} must be a whole number from 0 up.")
        for name in ("grace", "wait_for_lost"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise MisconfigurationException(
                    f"{name.replace('_', '-')}={value} must be a number of seconds from 0 up, such as 30."
                )

    def enough(self, asked: int, cohort: int) -> int:
        """Return the number of answers that ends a phase.

        >>> Quorum(min_results=0.8).enough(10, cohort=20), Quorum(min_results=8).enough(100, cohort=10)
        (8, 80)

        Args:
            asked: number of clients asked in the phase.
            cohort: number of clients in a full round.
        """
        return enough(self.min_results, asked, cohort)


@dataclass
class Sent:
    """A sent message without a reply yet.

    Args:
        node: id of the receiving node.
        clients: ids of the clients in the message; empty for a greeting.
        kind: Flower's type of the message.
        round: the round's number, from 1; 0 for a greeting.
        expires: time on the monotonic clock after which no reply counts.
        late: whether the message's phase is over.
        pushed: time on the monotonic clock at which the message went out.
        again: whether its clients have been asked again, as the answer may be lost.
    """

    node: int
    clients: list[int] = field(default_factory=list)
    kind: str = MessageType.QUERY
    round: int = 0
    expires: float = math.inf
    late: bool = False
    pushed: float = 0.0
    again: bool = False


class Link:
    """Knows the node of each client, and exchanges messages with nodes.

    A node claims clients in a greeting. The claim counts if the server's list of keys agrees or, without a list, if no
    other site has claimed the same clients; a site is known by its key, or by a secret in its folder of states. A
    client at no connected node is lost, and no phase waits for it longer than the quorum says.

    Args:
        grid: Flower's grid of nodes.
        clients: number of clients in the federation.
        initial: fingerprint of the initial model, equal at all sites.
        keys: returns the permitted clients of each node's public key, and is called for each greeting; None permits any
            client without an earlier claim by another site, with up to `MOST_SAMPLES`.
        timeout: seconds for which a phase of a round waits for sites.
        poll: seconds between two looks for replies.
        names: names of the clients by id; empty for clients known by ids alone.
        quorum: the answers that are enough to end a phase.
        cohort: number of clients in a full round; None is all.
        most: largest number of clients, with those that join by name; 0 is the number of clients.
        first: the exchange before the first round; None for none.
        settings: the server's settings, from `settings_told`, which sites must have too.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        initial: str,
        keys: Callable[[], Keys] | None = None,
        timeout: float = 600.0,
        poll: float = 0.2,
        names: Sequence[str] = (),
        quorum: Quorum | None = None,
        cohort: int | None = None,
        most: int = 0,
        first: FirstExchange | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.names = list(names)
        """Names by id; the server's data module has the same list, and adds the clients that join."""
        self.grid, self.founders, self.initial, self.keys = grid, clients, initial, keys
        self.most, self.first, self.settings = most or clients, first, settings
        self.timeout, self.poll = timeout, poll
        self.quorum, self.cohort = quorum or Quorum(), cohort or clients
        self.sizes: dict[int, dict[str, int]] = {}
        """Numbers of samples by client and split, fixed by the first greeting."""
        self.expected: dict[int, int] = {}
        """Numbers of training samples by client in an earlier part of the run, from its checkpoint."""
        self.times_asked: Counter[int] = Counter()
        """Messages of the last phase by client, more than one where a lost site has come back."""
        self.took: dict[int, float] = {}
        """Seconds from the begin of the last phase to each client's answer."""
        self.useless: set[int] = set()
        """Clients whose answer of the last phase was of no use, as its reader says; it doesn't count as one."""
        self.trained: dict[int, float] = {}
        """The same of the last training, for the record: a round may have evaluations behind it."""
        self.seen: dict[int, float] = {}
        """Time of the system's clock at which each node last gave a sign of life: a heartbeat, or a reply."""
        self.late: dict[int, int] = {}
        """Clients whose last answers came too late to count, and by how many rounds."""
        self.takes_late = True
        """Whether the federation may take late answers, as `Quorum.late_rounds` says."""
        self.asked_again: set[int] = set()
        """Clients asked again for a lost answer since this set was last emptied."""
        self.refusals: dict[int, str] = {}
        """Reason of each node whose last greeting was refused."""
        self.claims: dict[int, str] = {}
        """The clients of each such node, as far as it has named them."""
        self.one_by_one = False
        """Whether replies are fetched one after another, so that no two large ones are in memory at once."""
        self.on_look: Callable[[], None] = lambda: None
        """Called at each look for replies, in the thread of the server."""
        self.bounded: set[int] = set()
        """Clients for which the server's list sets a largest number of samples."""
        self._node_of: dict[int, int] = {}
        # also of clients that have left, whose answers of before still count
        self._last_node: dict[int, int] = {}
        self._key_of: dict[int, str] = {}
        self._secret_of: dict[int, str] = {}
        self._lost: dict[int, float] = {}
        self._kept: dict[int, tuple[int, RecordDict]] = {}
        self._greeted: set[int] = set()
        # by node; the first site's say how rows become inputs, as the server may have no rows of its own
        self._settings_of: dict[int, Mapping[str, str]] = {}
        self._sent: dict[str, Sent] = {}
        # the phase at work: its kind, round, begin, and clients without an answer
        self._kind, self._round, self._begun = "", 0, 0.0
        self._open: set[int] = set()
        # the longest answer of the last phase of each kind, in seconds from its question
        self._longest: dict[str, float] = {}
        self._too_late: Counter[int] = Counter()
        self._crashes: Counter[int] = Counter()
        # greetings with unknown names, which count from the next round on
        self._waiting: dict[int, tuple[list[str], RecordDict]] = {}

    @property
    def clients(self) -> int:
        """Return the number of clients, with those that have joined."""
        return len(self.names) or self.founders

    def label(self, client: int) -> str:
        """Return a client's id for messages, followed by the client's name."""
        return client_label(client, self.names)

    def wait(self, seconds: float, least: int | None = None, since: str = "") -> None:
        """Wait until enough clients have a site.

        Args:
            seconds: the longest wait.
            least: the number of clients; None is the quorum's for a start.
            since: the moment of the run for the error, such as ``round 3``; empty for the start.

        Raises:
            MisconfigurationException: if fewer clients have a site by the end.
        """
        # a monotonic clock, as the machine's own clock can be set while the server waits
        end = time.monotonic() + seconds
        least = least or self.quorum.min_available or self.clients
        self.look()
        while len(self.present) < least and time.monotonic() < end:
            time.sleep(self.poll)
            self.look()
        missing = sorted(set(range(self.clients)) - set(self.present))
        if len(missing) > self.clients - least:
            named = ", ".join(map(self.label, missing))
            if since:
                raise MisconfigurationException(
                    f"patience={seconds:.0f}: {since} needs {least} of data.num_clients={self.clients}, and no site "
                    f"has clients {named} any more; start their sites, and go on by ckpt-path=last."
                )
            raise MisconfigurationException(
                f"no site has said within {seconds:.0f} s that it has clients {named} of data.num_clients="
                f"{self.clients}; start it, or register its key"
                + ("." if self.quorum.min_available else ", or let min-available be lower.")
            )

    def newcomers(self) -> list[str]:
        """Return the names of clients that want to join, at connected nodes, in the order of their greetings."""
        asked = dict.fromkeys(name for names, _ in self._waiting.values() for name in names)
        return [name for name in asked if name not in self.names]

    def admit(self) -> None:
        """Let the sites of clients that have got ids meanwhile have these clients."""
        for node in list(self._waiting):
            self._heard(node, self._waiting.pop(node)[1])

    @property
    def present(self) -> list[int]:
        """Return the clients at a connected node, or lost for less than `Quorum.wait_for_lost` seconds, ascending."""
        return [client for client in range(self.clients) if not self._is_lost(client)]

    @property
    def busy(self) -> set[int]:
        """Return the clients at work on a message whose phase is over."""
        return {client for sent in self._sent.values() if sent.late for client in sent.clients}

    def waiting(self) -> tuple[int, float, list[int]]:
        """Return the round at work, its phase's seconds so far, and the clients that it waits for; none in between."""
        if not self._kind:
            return 0, 0.0, []
        # evaluations are of the model after their round, with which the next one begins
        round = self._round - (self._kind == MessageType.EVALUATE)
        return round, time.monotonic() - self._begun, sorted(self._open)

    def look(self) -> None:
        """Greet new nodes, and read the replies that have come between phases."""
        self._look()
        for sent, reply in self._replies():
            self._come_late(sent, reply)

    def ask(self, kind: str, group: str, jobs: Mapping[int, Any], payloads: Mapping[int, Any]) -> Iterator[Answer]:
        """Send each client's job to the client's site, and yield answers until enough are in or time is out.

        Flower drops an answer that the SuperLink couldn't take, so that a silent site is asked again; a site that has
        answered gives the same answer again.

        Args:
            kind: Flower's type of the messages.
            group: the round's number from 1, as Flower's log shows it.
            jobs: the settings of each client's work, by client.
            payloads: the server's payload for each client, by client.
        """
        open_, round = set(jobs), int(group)
        self.times_asked.clear()
        self.took.clear()
        self.useless.clear()
        begun = time.monotonic()
        self._kind, self._round, self._begun, self._open = kind, round, begun, open_
        longest = 0.0
        enough, until = self.quorum.enough(len(jobs), self.cohort), begun + self.timeout
        for client, late in self._late_answers(kind, round, open_):
            self._answered(client, open_, begun)
            yield client, late
        while True:
            # at each look, so that a site can come back, or turn up as a new node, in the middle of a phase
            alive = self._look()
            self._give_up(max(longest, self._longest.get(kind, 0.0)) or self.timeout * UNKNOWN_AGAIN / AGAIN)
            # nobody is asked twice at once: training twice would cost the site a second round
            on_the_way = {client for sent in self._sent.values() if not sent.again for client in sent.clients}
            batches: dict[int, list[int]] = {}
            for client in sorted(open_ - on_the_way):
                if self._node_of.get(client) in alive:
                    batches.setdefault(self._node_of[client], []).append(client)
            # one message per node: equal tensors of several clients' payloads travel once in a message
            for node, clients in batches.items():
                records = {"jobs": {client: jobs[client] for client in clients}}
                records |= {f"{client}/payload": payloads[client] for client in clients}
                now = time.monotonic()
                self._push(Sent(node, clients, kind, round, now + self.timeout, pushed=now), pack(records), group)
                self.times_asked.update(clients)
            heard = False
            for sent, reply in self._replies():
                heard = True
                if sent.late:
                    self._come_late(sent, reply)
                    for client, late in self._late_answers(kind, round, open_):
                        self._answered(client, open_, begun)
                        yield client, late
                    continue
                if reply is not None:
                    longest = max(longest, time.monotonic() - sent.pushed)
                for client in set(sent.clients) & open_:
                    # without a reply the client stays open, and is asked again
                    if reply is not None:
                        # nobody has to answer a further question of the same phase
                        self._forget_messages(client)
                        self._answered(client, open_, begun)
                        yield client, reply
                if self.one_by_one and reply is not None:
                    reply.clear()
                    give_back()
            # after the replies, as a site may have answered before it went
            open_ -= {client for client in open_ if self._is_lost(client)}
            now = time.monotonic()
            # a site that fails at once must not end the phase for slower ones that work
            useful = sorted(took for client, took in self.took.items() if client not in self.useless)
            if 0 < enough <= len(useful):
                until = min(until, begun + useful[enough - 1] + self.quorum.grace)
            if not open_ or now >= until:
                break
            if not heard:
                time.sleep(min(self.poll, until - now))
        if kind == MessageType.TRAIN:
            self.trained = dict(self.took)
        self._kind, self._longest[kind] = "", longest or self._longest.get(kind, 0.0)
        # a site at work on an earlier phase isn't asked anew before it answers, and its answer must not pass for one
        # of the next phase
        for sent in self._sent.values():
            sent.late = bool(sent.clients)

    def _answered(self, client: int, open_: set[int], begun: float) -> None:
        """Note that a client has answered, and the seconds since the phase began."""
        open_.discard(client)
        self.took[client] = time.monotonic() - begun
        if self._kind == MessageType.TRAIN:
            self._too_late.pop(client, None)
            self.late.pop(client, None)

    def _give_up(self, longest: float) -> None:
        """Mark questions whose answer seems lost, so that their clients are asked again.

        Args:
            longest: seconds of the longest answer to compare with.
        """
        now = time.monotonic()
        for sent in self._sent.values():
            times = max((self.times_asked[client] for client in sent.clients), default=1)
            if sent.late or not sent.clients or now - sent.pushed < times * max(LEAST_AGAIN, AGAIN * longest):
                continue
            sent.again = True
            self.asked_again.update(sent.clients)

    def node(self, client: int) -> int:
        """Return the id of a client's last known node; a KeyError means that no node has claimed the client."""
        return self._last_node[client]

    def greeted_with(self, client: int) -> str:
        """Return a fingerprint of the settings in the greeting of a client's site."""
        return fingerprint(self._settings_of[self.node(client)])

    def greet_again(self, client: int) -> None:
        """Greet a client's site at the next look: its SuperNode may have been started again unseen."""
        self._greeted.discard(self.node(client))

    def sites(self) -> list[dict[str, Any]]:
        """Return the nodes with clients: id, clients, whether connected, and the time of the last connection."""
        nodes: dict[int, list[int]] = {}
        for client, node in self._node_of.items():
            nodes.setdefault(node, []).append(client)
        return [
            {
                "node": str(node),
                "clients": [self.label(client) for client in sorted(clients)],
                # also where a round waits for a lost site
                "present": not any(client in self._lost for client in clients),
                "seen": self.seen.get(node),
            }
            for node, clients in sorted(nodes.items(), key=lambda item: min(item[1]))
        ]

    def _is_lost(self, client: int) -> bool:
        """Return True for a client without a site, or at a site lost for longer than `Quorum.wait_for_lost`."""
        since = self._lost.get(client)
        gone = since is not None and time.monotonic() - since >= self.quorum.wait_for_lost
        return gone or client not in self._node_of

    def _nodes(self) -> dict[int, str]:
        """Return the public keys of all connected nodes, by node id, and note when each was last heard."""
        alive = {}
        for node in self.grid.get_nodes():
            alive[node.node_id] = node.public_key.decode()
            # Flower calls a dead node connected until its heartbeats have lapsed
            is_known = 0 < node.heartbeat_interval < node.online_until
            heard = node.online_until - HEARTBEATS * node.heartbeat_interval if is_known else time.time()
            self.seen[node.node_id] = max(heard, self.seen.get(node.node_id, 0.0))
        return alive

    def _look(self) -> dict[int, str]:
        """Greet new nodes, and note clients that are lost; return the public keys of all connected nodes."""
        alive = self._nodes()
        self._greet(alive)
        now = time.monotonic()
        lost = {client for client, node in self._node_of.items() if node not in alive} - self._lost.keys()
        self._lost |= dict.fromkeys(lost, now)
        if lost:
            # a refused node may have claimed a client of the lost one
            self._greeted -= self.refusals.keys()
        # Flower drops an expired message, and its client can be asked anew
        self._sent = {name: sent for name, sent in self._sent.items() if not (sent.late and now >= sent.expires)}
        self.on_look()
        return alive

    def _greet(self, alive: Mapping[int, str]) -> None:
        """Ask new nodes for their clients; a node that was gone counts as new."""
        # a node can have restarted with other settings in between
        self._greeted &= alive.keys()
        # the answer to a greeting can be lost too
        now, greetings = time.monotonic(), [sent for sent in self._sent.values() if sent.round == 0]
        for sent in greetings:
            times = sum(other.node == sent.node for other in greetings)
            if not sent.again and now - sent.pushed >= times * LEAST_AGAIN:
                sent.again = True
                self._greeted.discard(sent.node)
        self._waiting = {node: greeting for node, greeting in self._waiting.items() if node in alive}
        for node in alive.keys() - self._greeted:
            self._greeted.add(node)
            if self.first is not None and not self.first.agreed:
                self._push(Sent(node, kind=FIRST, pushed=now), pack({"first": self.first.question()}), "first")
                continue
            agreed = pieces("" if self.first is None else self.first.agreed)
            hello = {"hello": {"version": VERSION, "num_clients": self.clients, "agreed": agreed}}
            self._push(Sent(node, pushed=now), pack(hello), "hello")

    def _push(self, sent: Sent, content: RecordDict, group: str) -> None:
        message = Message(content, dst_node_id=sent.node, message_type=sent.kind, group_id=group, ttl=self.timeout)
        for name in self.grid.push_messages([message]):
            # Flower gives None for a message to a node that has just left; a job then goes out again at the next look
            if name is not None:
                self._sent[name] = sent
        if self.one_by_one:
            content.clear()
            give_back()

    def _replies(self) -> Iterator[tuple[Sent, RecordDict | None]]:
        """Yield sent messages with the contents of replies, None for a reply that Flower has given up."""
        if not self._sent:
            return
        for reply in self._pulled():
            sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
            # a greeting before it in the same list may have moved the message's clients to another node
            if sent is None:
                continue
            if reply.has_error():
                # greeted again when it is back, as it may have other clients then
                if reply.error.code in GONE:
                    self._greeted.discard(sent.node)
                if reply.error.code == NODE_GONE:
                    for client in sent.clients:
                        # a client that has moved to another node meanwhile is not lost
                        if self._node_of.get(client) == sent.node:
                            self._lost.setdefault(client, time.monotonic())
                if reply.error.code == CRASHED and not sent.clients and self._crashes[sent.node] < CRASHES:
                    self._crashes[sent.node] += 1
                    self._greeted.discard(sent.node)
                yield from self._failed(sent, reply.error.code, reply.error.reason or "")
                continue
            self._crashes.pop(sent.node, None)
            self.seen[sent.node] = time.time()
            if sent.clients:
                yield sent, reply.content
                continue
            self._sent = {
                name: other for name, other in self._sent.items() if (other.node, other.round) != (sent.node, 0)
            }
            if sent.kind == FIRST:
                self._heard_first(sent.node, reply.content)
            else:
                self._heard(sent.node, reply.content)

    def _pulled(self) -> Iterator[Message]:
        """Yield the replies that have come."""
        names = list(self._sent)
        for some in [[name] for name in names] if self.one_by_one else [names]:
            replies = list(self.grid.pull_messages(some))
            while replies:
                # held here no longer than by the caller
                yield replies.pop(0)

    def _failed(self, sent: Sent, code: int, reason: str) -> Iterator[tuple[Sent, RecordDict | None]]:
        about = f" with clients {', '.join(map(self.label, sent.clients))}" if sent.clients else ""
        rank_zero_warn(f"node {sent.node}{about}: Flower's error {code}: {plain(reason, 300)}")
        # an app that failed would fail again, so that only a lost message or node is worth a second try
        again = code in GONE or (code == CRASHED and all(self.times_asked[each] < CRASHES for each in sent.clients))
        yield sent, None if again or not sent.clients else failure("its site's app failed")

    def _come_late(self, sent: Sent, reply: RecordDict | None) -> None:
        """Keep the reply to a training message whose phase is over, where late answers count."""
        if reply is None:
            return
        # the answer to a further question of the same phase is the same one, and would count twice
        for client in sent.clients:
            self._forget_messages(client)
        if sent.kind != MessageType.TRAIN:
            return
        # it would count in the training at work, or in the next one
        rounds = self._round - sent.round + (self._kind != MessageType.TRAIN)
        if rounds > self.quorum.late_rounds:
            self._advise(sent.clients, rounds)
        if self.quorum.late_rounds:
            self._kept |= dict.fromkeys(sent.clients, (sent.round, reply))

    def _advise(self, clients: Sequence[int], rounds: int) -> None:
        """Say what would count the answers of clients that come too late again and again, once a client.

        Args:
            clients: clients with an answer that comes too late.
            rounds: by how many rounds.
        """
        self._too_late.update(clients)
        slow = [client for client in clients if self._too_late[client] >= TOO_LATE]
        if new := [client for client in slow if client not in self.late]:
            rank_zero_warn(f"answers of client {', '.join(map(self.label, new))} {self.lateness(rounds)}")
        self.late |= dict.fromkeys(slow, rounds)

    def lateness(self, rounds: int) -> str:
        """Return by how many rounds answers come too late, and the setting by which they would count."""
        cure = f"late-rounds={rounds} would count them." if self.takes_late else "a longer grace would wait for them."
        return f"come {rounds} {'round' if rounds == 1 else 'rounds'} late and don't count; {cure}"

    def _late_answers(self, kind: str, round: int, open_: Collection[int]) -> list[Answer]:
        """Return the kept replies about open clients in a training phase, and forget those that are too old."""
        if kind != MessageType.TRAIN:
            return []
        oldest = round - self.quorum.late_rounds
        self._kept = {client: kept for client, kept in self._kept.items() if kept[0] >= oldest}
        return [(client, self._kept.pop(client)[1]) for client in sorted(self._kept.keys() & set(open_))]

    def _heard_first(self, node: int, content: RecordDict) -> None:
        """Take a site's answer before the first round; warn of a wrong answer, and do without it."""
        first = cast(FirstExchange, self.first)
        try:
            check_failure(content)
            answer = unpack(content, "first", TOLD, limit=0)
            if not 0 < answer["clients"] <= self.most:
                raise Refused(f"it says that it has {shown(answer['clients'])} clients, of {self.most} in all.")
            # asked for the next step, or greeted
            self._greeted -= set(first.take(node, answer))
        except Refused as refusal:
            self._refuse(node, content, refusal)

    def _refuse(self, node: int, content: RecordDict, refusal: Refused) -> None:
        """Note and say that a site's greeting is refused, with the clients that it claims."""
        self.refusals[node] = str(refusal)
        self.claims[node] = self._claimed(node, content)
        site = f"site of clients {self.claims[node]} at " if self.claims[node] else ""
        rank_zero_warn(f"{site}node {node} is refused: {refusal}")

    def _claimed(self, node: int, content: RecordDict) -> str:
        """Return the clients that a site has or says it has, for messages; an empty text if nobody knows."""
        if known := [self.label(client) for client, other in sorted(self._node_of.items()) if other == node]:
            return ", ".join(known)
        # of another version, or of a site that lies: any part may be missing
        with suppress(Refused, KeyError, TypeError, AttributeError):
            if "hello" in names(content):
                hello = unpack(content, "hello", limit=0)
                own = range(self.clients)
                claimed = [self.label(client) if client in own else shown(client) for client in hello["clients"]]
                return plain(", ".join([*claimed, *map(str, hello.get("new", ()))]), LONGEST)
            return plain(unpack(content, "site", {"clients": ""}, limit=0)["clients"], LONGEST)
        return ""

    def _heard(self, node: int, content: RecordDict) -> None:
        """Check a node's greeting, and record the node's clients; warn of a wrong greeting, and record no client."""
        try:
            check_failure(content)
            # a greeting has no tensors, so that not one byte of tensors is read from an unknown node
            hello = unpack(content, "hello", limit=0)
            # before the form, which another version may have changed
            if isinstance(hello, dict) and hello.get("version", VERSION) != VERSION:
                raise Refused(f"it has pfl-lightning {shown(hello['version'])} and the server {VERSION}.")
            hello = unpack(content, "hello", HELLO, self.clients, limit=0)
            # personal parameters never travel, and would differ from the start
            if hello["initial"] != self.initial:
                raise Refused("its initial model is another than the server's; give both the same versions of torch.")
            first = next(iter(self._settings_of.items()), (node, hello["settings"]))
            check_settings(hello["settings"], self.settings, first)
            key, secret = self._nodes().get(node, ""), hello["secret"]
            own = {name: sizes for name, sizes in hello["new"].items() if name in self.names}
            claimed = hello["clients"] | {self.names.index(name): sizes for name, sizes in own.items()}
            permitted = None if self.keys is None else self.keys().get(key, {})
            for client, sizes in claimed.items():
                self._check_claim(node, key, secret, client, sizes, permitted)
            new = [name for name in hello["new"] if name not in own]
            self._check_new(new, {name: hello["new"][name] for name in new}, permitted)
        except Refused as refusal:
            self._refuse(node, content, refusal)
            # a site that comes back with other settings takes part no longer
            for client in [client for client, other in self._node_of.items() if other == node]:
                self._forget_messages(client)
                del self._node_of[client]
            return
        self.refusals.pop(node, None)
        self._waiting.pop(node, None)
        if new:
            self._waiting[node] = new, content
        self._settings_of[node] = hello["settings"]
        # a restarted site may have fewer clients than before, and the others may turn up at another site
        for client in [client for client, other in self._node_of.items() if other == node]:
            if client not in claimed:
                self._forget_messages(client)
                del self._node_of[client]
                rank_zero_info(f"node {node} has client {self.label(client)} no longer.")
        for client, sizes in claimed.items():
            if self._node_of.get(client) != node:
                self._forget_messages(client)
            self._node_of[client], self._key_of[client], self._secret_of[client] = node, key, secret
            if cast(int, self._most(client, permitted)) < MOST_SAMPLES:
                self.bounded.add(client)
            self.sizes[client], self._last_node[client] = sizes, node
            self._lost.pop(client, None)
        if claimed:
            rank_zero_info(f"node {node} has clients {', '.join(map(self.label, sorted(claimed)))}.")
        if new:
            rank_zero_info(f"node {node} has new clients {', '.join(new)}, from the next round on.")

    def _forget_messages(self, client: int) -> None:
        """Forget messages about a client at a former node, where nobody will answer them."""
        for sent in self._sent.values():
            if client in sent.clients:
                sent.clients.remove(client)
        self._sent = {name: sent for name, sent in self._sent.items() if sent.clients or sent.round == 0}

    def _most(self, client: int, permitted: Mapping[int | str, int] | None) -> int | None:
        """Return the largest number of samples that a client may claim; None if the node may not have the client."""
        if permitted is None:
            return MOST_SAMPLES
        return permitted.get(client, permitted.get(self.names[client] if client < len(self.names) else client))

    def _check_new(
        self, new: Sequence[str], sizes: Mapping[str, dict[str, int]], permitted: Mapping[int | str, int] | None
    ) -> None:
        """Refuse new clients without a place, with an impossible name, or with more samples than permitted.

        Args:
            new: their names.
            sizes: numbers of samples by name and split.
            permitted: the clients of the node's key; None permits all.

        Raises:
            Refused: with the reason.
        """
        others = set(self.newcomers()).difference(new)
        for place, name in enumerate(new, self.clients + len(others) + 1):
            # a number would pass for an id elsewhere, and commas part names
            if not 0 < len(name) <= LONGEST or name != plain(name) or "," in name or name.isdecimal():
                raise Refused(f"it says that it has a client {shown(name)}, which can't be a name.")
            if place > self.most:
                raise Refused(
                    f"it says that it has a client {name!r}, which the app's names lack, and max-clients={self.most} "
                    "has no place for a new one."
                )
            if permitted is not None and name not in permitted:
                raise Refused(
                    f"it says that it has a client {name!r}, which the server's list doesn't give to its key."
                )
            check_amounts(name, sizes[name], MOST_SAMPLES if permitted is None else permitted[name], self.keys is None)
        try:
            distinct([*self.names, *sorted(others), *new], "new ones")
        except MisconfigurationException as error:
            raise Refused(f"of the clients that it says it has, {error}.") from None

    def _check_claim(
        self,
        node: int,
        key: str,
        secret: str,
        client: int,
        sizes: dict[str, int],
        permitted: Mapping[int | str, int] | None,
    ) -> None:
        """Refuse a node's claim of a client with another holder, or with other numbers of samples than before.

        Raises:
            Refused: with the reason.
        """
        most = self._most(client, permitted)
        if most is None:
            raise Refused(
                f"it says that it has client {self.label(client)}, which the server's list gives to another key."
            )
        holder = self._node_of.get(client)
        if holder not in (None, node):
            # a site that starts anew gets another node id, and has its key again or, without one, its folder of states
            is_same = key == self._key_of[client] or (secret != "" and secret == self._secret_of[client])
            # the server's list may give a client to two keys
            if not is_same and (self.keys is None or client not in self._lost):
                raise Refused(
                    f"it says that it has client {self.label(client)}, which another site has; a site that has moved "
                    "needs its former key, or its former state-dir."
                )
        check_amounts(self.label(client), sizes, most, permitted is None)
        # a client's weight in the average is by samples, and must not grow in the middle of a run
        earlier = self.expected.get(client, sizes["train"])
        if self.sizes.get(client, sizes) != sizes or sizes["train"] != earlier:
            raise Refused(f"client {self.label(client)} has other numbers of samples than it had at first.")


def check_amounts(label: str, sizes: Mapping[str, int], most: int, by_default: bool) -> None:
    """Refuse a client's numbers of samples out of their range.

    Args:
        label: the client, for messages.
        sizes: numbers of samples by split.
        most: the largest permitted number.
        by_default: whether no list of the server's sets this number.

    Raises:
        Refused: with the first wrong number.
    """
    for split, size in sizes.items():
        if not 0 <= size <= most:
            limit = f"0 to {most}" + ("" if by_default else ", as the server's list says")
            raise Refused(f"it claims {shown(size)} {split} samples of client {label}, which may have {limit}.")


def give_back() -> None:
    """Return the memory of large messages to the system."""
    # parts of them are in cycles, and what is freed glibc would keep for itself
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def initial_of(modules: Sequence[ClientModule]) -> str:
    """Return a fingerprint of the initial models, equal at the server and at sites with the same models.

    Args:
        modules: the client modules, one per architecture, with initial weights.
    """
    return digest([module.state_dict() for module in modules])


def failure(reason: str, clients: str = "") -> RecordDict:
    """Return the content of a message with a reason in place of answers.

    Args:
        reason: one sentence.
        clients: the clients of the site that fails, as its own settings name them.
    """
    return pack({"failure": {"reason": reason}, "site": {"clients": clients}})


def check_failure(content: RecordDict) -> None:
    """Refuse a site's message with a reason in place of answers.

    Raises:
        Refused: with the site's reason.
    """
    if "failure" in names(content):
        raise Refused(plain(unpack(content, "failure", {"reason": ""}, limit=0)["reason"]))
