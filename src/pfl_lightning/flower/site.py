"""A site: which clients of the federation it has, and what it lets the server have of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split
from pfl_lightning.flower.remote_data import check_drift
from pfl_lightning.flower.template import Refused
from pfl_lightning.messages import Message
from pfl_lightning.tasks import Task

ALWAYS = frozenset({"weights", "num_samples"})
"""Entries of updates that every site sends: what FedAvg needs."""


class Site:
    """A site's clients under their ids in the federation.

    It is a source of their samples, as a data module is.

    Args:
        data: the site's data module, set up: with its own clients only, in the order of ``clients``, or with those of
            the whole federation.
        clients: their ids.
        allow: entries of updates that may be sent beside ``weights`` and ``num_samples``, such as ``class_counts``.

    Raises:
        MisconfigurationException: if the ids aren't those of clients of the data, or the data are the site's own and
            become inputs in a way that depends on rows of all sites.
    """

    def __init__(self, data: FederatedDataModule, clients: Sequence[int], allow: Iterable[str] = ()) -> None:
        check_drift(data)
        self.data = data
        self.allow = ALWAYS | frozenset(allow)
        own = range(data.num_clients) if len(clients) == data.num_clients else clients
        if not clients or len(set(clients)) < len(clients) or not set(own) <= set(range(data.num_clients)):
            raise MisconfigurationException(
                f"clients={' '.join(map(str, clients))!r} don't fit the site's data, which have {data.num_clients} "
                "clients; name each of these once by its id in the federation, or some of them by their own."
            )
        if len(own) == data.num_clients and (reason := data.needs_all_clients):
            raise MisconfigurationException(reason)
        self._own = dict(zip(clients, own, strict=True))

    @classmethod
    def of(cls, settings: Mapping[str, Any], data: FederatedDataModule) -> "Site":
        """A site as its node is configured.

        Args:
            settings: Flower's ``node_config``: ``clients`` are ids, such as ``"0 3"``; ``allow``, such as
                ``"class_counts prototypes"``.
            data: the site's data module, set up.

        Raises:
            MisconfigurationException: if there are no such settings.
        """
        words = str(settings.get("clients", "")).split()
        if not words or not all(word.isdecimal() for word in words):
            raise MisconfigurationException(
                f"clients={' '.join(words)!r} are no ids of clients; give the site's, such as "
                "--node-config 'clients=\"0 3\"'."
            )
        return cls(data, list(map(int, words)), str(settings.get("allow", "")).split())

    @property
    def clients(self) -> list[int]:
        """Ids in the federation of the clients that are here."""
        return list(self._own)

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.data.task

    def client(self, client: int) -> ClientData:
        """A client's data, under its id in the federation.

        Args:
            client: its id.

        Raises:
            Refused: if it isn't here.
        """
        self._local(client)
        return ClientData(self, client)

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """One split of each client, as of a data module."""
        return self.data.parts([self._local(client) for client in clients], split, device)

    def size(self, client: int, split: Split) -> int:
        """Number of samples in one split of one client."""
        return self.data.size(self._local(client), split)

    def sizes(self) -> dict[int, dict[str, int]]:
        """Numbers of samples, by client and split."""
        return {client: {split: self.size(client, split) for split in get_args(Split)} for client in self._own}

    def check_method(self, module: ClientModule) -> None:
        """Refuses a method whose updates would have more than this site sends.

        Args:
            module: the client module, with what the server has ``requested``.

        Raises:
            Refused: if they would, or the server asks for what the method doesn't offer.
        """
        name = type(module).__name__
        if unknown := sorted(module.requested - module.offers - module.tells):
            raise Refused(f"the server asks for {' and '.join(unknown)}, which {name} doesn't offer.")
        self._check(module.sends | module.requested, name)

    def check_update(self, update: Message, method: str) -> None:
        """Refuses to send an update that has more than this site sends.

        Args:
            update: what a client would send.
            method: name of its client module.

        Raises:
            Refused: if it has.
        """
        self._check(update.keys(), method)

    def _check(self, entries: Iterable[str], method: str) -> None:
        if kept := sorted(set(entries) - self.allow):
            raise Refused(
                f"{method} sends {' and '.join(kept)}, which this site keeps to itself; its operator can allow "
                f"{'it' if len(kept) == 1 else 'them'} by --node-config 'allow=\"{' '.join(kept)}\"'."
            )

    def _local(self, client: int) -> int:
        if client not in self._own:
            raise Refused(f"client {client!r:.20} isn't at this site.")
        return self._own[client]
