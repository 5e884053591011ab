"""Flower's grid in one process, without sockets: for tests of everything but the network."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

CRASHED, GONE = 8, 5
"""Flower's codes for an app that ended, and for a node that isn't there."""


class LocalGrid(Grid):
    """Answers each message at once, by the app of the node that it is for.

    Every message goes through Flower's own deflate and inflate, as it would to another machine.

    Args:
        app: of all nodes.
        nodes: the configuration of each, by id.
        keys: public keys of nodes; by default each has one of its own.
        spoil: changes what a node answers, before it is sent: gets the node, the kind and the reply's content.
        run_config: of the app.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, dict[str, Any]],
        keys: Mapping[int, str] | None = None,
        spoil: Callable[[int, str, RecordDict], None] = lambda node, kind, content: None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_config = dict(run_config or {})
        self.app, self.nodes, self.spoil = app, nodes, spoil
        self.keys = dict(keys or {node: f"key of {node}" for node in nodes})
        self.memories: dict[int, RecordDict] = {}
        self.away: set[int] = set()
        self.silent: set[int] = set()
        self.loses: dict[int, str] = {}
        """The kind of the next answer of a node that gets lost."""
        self.asked: list[tuple[str, int]] = []
        self.bytes = 0
        self.max_rounds: int | None = None
        """The rounds of the app, which sites have from the server's configuration."""
        self._replies: dict[str, Message] = {}
        # whoever makes messages is a task to Flower
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node not in self.away]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node].encode()) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            name = message.object_id
            vars(message.metadata)["_message_id"] = name
            received = self._sent(message)
            self.asked.append((message.metadata.message_type, message.metadata.dst_node_id))
            if (reply := self._reply(received)) is not None:
                vars(reply.metadata)["_message_id"] = reply.object_id
                self._replies[name] = self._sent(reply)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node in self.away:
            return Message(Error(code=GONE, reason="gone"), reply_to=message)
        config, state = self.nodes[node], self.memories.setdefault(node, RecordDict())
        context = Context(run_id=1, node_id=node, node_config=config, state=state, run_config=self.run_config)
        # a site is another process, where nothing of the server's is set
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                reply = self.app(message, context)
        except Exception as error:
            return Message(Error(code=CRASHED, reason=repr(error)), reply_to=message)
        finally:
            torch.set_default_dtype(default)
        if node in self.silent:
            return None
        if self.loses.get(node) == message.metadata.message_type:
            del self.loses[node]
            return None
        self.spoil(node, message.metadata.message_type, reply.content)
        return reply

    def _sent(self, message: Message) -> Message:
        """The message as it arrives."""
        # two of the same content would else be one
        name, contents = (
            message.metadata.message_id or message.object_id,
            {key: part.deflate() for key, part in get_all_nested_objects(message).items()},
        )
        self.bytes += sum(map(len, contents.values()))
        arrived = inflate_object_from_contents(message.object_id, contents)
        vars(arrived.metadata)["_message_id"] = name
        return arrived
