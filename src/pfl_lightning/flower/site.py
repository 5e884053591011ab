"""A site's clients under their ids in the federation, and the site's limits on updates for the server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split, TargetScale
from pfl_lightning.data.client_names import client_id, compared, is_integer
from pfl_lightning.flower.greeting import fingerprint
from pfl_lightning.flower.remote_data import check_drift
from pfl_lightning.flower.template import Refused
from pfl_lightning.messages import Message
from pfl_lightning.tasks import Task

ALWAYS = frozenset({"weights", "num_samples"})
"""Entries of updates that every site sends, as needed by FedAvg."""


class Site:
    """A site's clients under their ids in the federation.

    A site is a source of samples with the methods of a data module, such as `parts` and `size`.

    Args:
        data: the site's data module, set up. The module has either the site's clients alone, in the order of
            ``clients``, or all clients of the federation.
        clients: the ids of the site's clients in the federation; a text is the name of a client that is to join.
        allow: entries of updates that may be sent beside ``weights`` and ``num_samples``, such as ``class_counts``.
        names: names of all clients by id, as the server gives them; empty for clients known by ids alone.
        agrees: whether sites agree on what makes inputs of rows before the first round, so that it may be missing now.

    Raises:
        MisconfigurationException: if the ids don't fit the data's clients, or if the data have the site's clients alone
            and inputs depend on rows of all sites.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        clients: Sequence[int | str],
        allow: Iterable[str] = (),
        names: Sequence[str] = (),
        agrees: bool = False,
    ) -> None:
        check_drift(data)
        self.data = data
        self.names = dict(enumerate(names))
        self.allow = ALWAYS | frozenset(allow)
        # data with as many clients as there are ids count as the site's own, and ids name the data's clients in turn
        places: Sequence[Any] = range(data.num_clients) if len(clients) == data.num_clients else clients
        # names on both sides pair clients, whatever their order in the site's data
        if names and data.client_names:
            called = [names[client] if isinstance(client, int) else client for client in clients]
            places = [client_id(name, data.client_names, data.num_clients, "clients") for name in called]
        if not clients or len(set(clients)) < len(clients) or not set(places) <= set(range(data.num_clients)):
            raise MisconfigurationException(
                f"clients={' '.join(map(str, clients))!r} don't fit the site's data, which have {data.num_clients} "
                "clients; name each of these once by its id in the federation, or some of them by their own."
            )
        # with a part of the rows a site would, say, scale inputs in another way than the other sites
        self._has_all, self.agrees = len(places) < data.num_clients, agrees
        if self.lacking and not agrees:
            raise MisconfigurationException(self.lacking)
        pairs = list(zip(clients, places, strict=True))
        self._own: dict[int, int] = {client: place for client, place in pairs if isinstance(client, int)}
        self._new: dict[str, int] = {client: place for client, place in pairs if isinstance(client, str)}

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        data: FederatedDataModule,
        names: Sequence[str] = (),
        joins: bool = False,
        agrees: bool = False,
    ) -> "Site":
        """Return the site of a node's configuration.

        Args:
            settings: Flower's ``node_config``, with ``clients`` as ids from 0, such as ``"0 3"``, or as names,
                separated by commas, and optionally ``allow`` as names of entries, such as ``"class_counts
                prototypes"``.
            data: the site's data module, set up.
            names: names of all clients by id, as the server gives them; empty for clients known by ids alone.
            joins: whether a name that the server hasn't given is of a client that joins.
            agrees: whether sites agree on what makes inputs of rows before the first round.

        Raises:
            MisconfigurationException: if ``clients`` is missing, or isn't a list of clients.
        """
        # Flower takes one id without quotes for a number
        clients = ids_of(str(settings.get("clients", "")), names, joins)
        return cls(data, clients, str(settings.get("allow", "")).split(), names, agrees)

    @property
    def lacking(self) -> str:
        """Return why the site's rows can't become inputs yet; an empty text if they can."""
        return "" if self._has_all or self.data.adopted else self.data.needs_all_clients

    def check_inputs(self) -> None:
        """Refuse a site whose rows can't become inputs.

        Raises:
            Refused: with the reason.
        """
        if self.lacking:
            raise Refused(f"{self.lacking}.")

    def check_exchange(self, kinds: Sequence[str]) -> None:
        """Refuse to tell before the first round more than the site's operator allows.

        Args:
            kinds: what the server asks for, such as ``classes``.

        Raises:
            Refused: with the kinds that aren't allowed.
        """
        if closed := sorted(set(kinds) - self.allow):
            raise Refused(
                f"first-exchange asks for {' and '.join(closed)} of its table, which this site keeps to itself; its "
                f"operator can allow it by --node-config 'allow=\"{' '.join(closed)}\"'."
            )

    @property
    def clients(self) -> list[int]:
        """Return the ids of the site's clients in the federation."""
        return list(self._own)

    @property
    def task(self) -> Task:
        """Return the task of the site's data, such as a classification."""
        return self.data.task

    def join(self, client: int, name: str) -> None:
        """Have a client that joins under the id that the server gives.

        Args:
            client: the id.
            name: the client's name.

        Raises:
            Refused: if the site has no such client, or another one under the id.
        """
        if name not in self._new or self._own.get(client, self._new[name]) != self._new[name]:
            raise Refused(f"client {client!r:.20}, {name!r:.50}, isn't at this site.")
        self._own[client], self.names[client] = self._new[name], name

    def client(self, client: int) -> ClientData:
        """Return a client's data.

        Args:
            client: the client's id in the federation.

        Raises:
            Refused: if the client isn't at this site.
        """
        # refused here, in a sentence for the server, and not when an engine first reads the samples
        self._local(client)
        self.check_inputs()
        return ClientData(self, client)

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Return one split of each client, as a data module does."""
        return self.data.parts([self._local(client) for client in clients], split, device)

    def target_scale(self, client: int) -> TargetScale | None:
        """Return the scale of a client's targets, as its data module does."""
        return self.data.target_scale(self._local(client))

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in one split of one client."""
        return self.data.size(self._local(client), split)

    @property
    def inputs(self) -> dict[str, str]:
        """Return a fingerprint of each setting that decides how rows become inputs, equal at all sites."""
        return {f"data.{name}": fingerprint(value) for name, value in self.data.agreed.items()}

    def local(self, client: int) -> int | str:
        """Return a client's name in the site's data, or its id there where the data name no clients."""
        own = self._local(client)
        try:
            names = self.data.client_names
        except MisconfigurationException:
            # a data class of the site's own may hold its clients without dividing samples
            return own
        return names[own] if names else own

    def sizes(self) -> dict[int, dict[str, int]]:
        """Return the numbers of samples by client and split, without clients that join."""
        known = {client: place for client, place in self._own.items() if self.names.get(client) not in self._new}
        return {client: self._sizes(place) for client, place in known.items()}

    def joining(self) -> dict[str, dict[str, int]]:
        """Return the numbers of samples of clients that join, by name and split."""
        return {name: self._sizes(place) for name, place in self._new.items()}

    def _sizes(self, place: int) -> dict[str, int]:
        return {split: self.data.size(place, split) for split in get_args(Split)}

    def check_method(self, module: ClientModule) -> None:
        """Refuse a method with more entries in updates than this site allows.

        Args:
            module: the client module, with the server's ``requested`` entries.

        Raises:
            Refused: if an entry isn't allowed, or the server requests an entry unknown to the method.
        """
        name = type(module).__name__
        if unknown := sorted(module.requested - module.offers - module.tells):
            raise Refused(f"the server asks for {' and '.join(unknown)}, which {name} doesn't offer.")
        self._check(module.sends | module.requested, name)

    def check_update(self, update: Message, method: str) -> None:
        """Refuse an update with more entries than this site allows.

        Args:
            update: a client's update, before sending.
            method: the name of the client module, for the error.

        Raises:
            Refused: if an entry isn't allowed.
        """
        # beside `check_method`, as an upload may add entries that the module hasn't declared
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


def ids_of(clients: str, names: Sequence[str], joins: bool = False) -> list[int | str]:
    """Return the ids of clients in a setting, and unknown names where clients may join.

    >>> ids_of("0 3", []), ids_of("St. Josef", ["Bremen", "St. Josef"]), ids_of("Bremen, 1", ["Bremen", "St. Josef"])
    ([0, 3], [1], [0, 1])
    >>> ids_of("Bremen, Kiel Nord", ["Bremen", "Ulm"], joins=True), ids_of("0 1", ["Bremen", "Ulm"], joins=True)
    ([0, 'Kiel Nord'], [0, 1])

    Args:
        clients: ids apart by spaces, or names and ids apart by commas; a single name may have spaces.
        names: names of all clients by id; empty for clients known by ids alone.
        joins: whether an unknown name is of a client that joins, under an id that the server gives.

    Raises:
        MisconfigurationException: if there is no client, or a word is none.
    """
    one = joins and not all(word in names or is_integer(word) for word in clients.split())
    by_comma = names and ("," in clients or clients in names or one)
    words = [word.strip() for word in clients.split(",")] if by_comma else clients.split()
    if not words or not (names or all(map(is_integer, words))):
        raise MisconfigurationException(
            f"clients={clients!r} are no ids of clients; give the site's, such as --node-config 'clients=\"0 3\"', or "
            "names that the server's setting `names` has."
        )
    given = [int(word) if is_integer(word) and word not in names else word for word in words]
    if not names:
        return list(map(int, words))
    known = {compared(name) for name in names}
    return [
        word
        if joins and isinstance(word, str) and compared(word) not in known
        else client_id(word, names, len(names), "clients")
        for word in given
    ]
