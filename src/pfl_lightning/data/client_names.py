"""Names and ids of clients: find a client by either, and write both in messages."""

from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Integral

from lightning.fabric.utilities.exceptions import MisconfigurationException

LISTED = 12
"""Largest number of names that a message lists when none is close."""


def client_id(client: int | str, names: Sequence[str], total: int, setting: str = "client") -> int:
    """Return the id of a client given by id or by name.

    A text is a name, or without names an id in digits. An integer is an id, or the name of a client where no client
    has this id.

    >>> client_id("Ulm", ["Bremen", "Ulm"], 2), client_id(1, ["Bremen", "Ulm"], 2), client_id("7", [], 20)
    (1, 1, 7)
    >>> client_id(205, ["101", "205"], 2)
    1

    Args:
        client: the id, from 0, or the name.
        names: names of all clients by id; empty if clients have no names.
        total: number of all clients.
        setting: the setting that gives the client, for messages.

    Raises:
        MisconfigurationException: if there is no such client, or an integer is the id of one client and the name of
            another.
    """
    text = str(client)
    if isinstance(client, str):
        if text in names:
            return list(names).index(text)
        if not names and text.isdecimal() and int(text) < total:
            return int(text)
    elif isinstance(client, Integral) and not isinstance(client, bool):
        if 0 <= client < total:
            id = int(client)
            if text in names and names[id] != text:
                raise MisconfigurationException(
                    f"{setting}={client} is the id of client {names[id]!r} and the name of another client; give the "
                    f"name as a text, {setting}={text!r} or {setting}={names[id]!r}"
                )
            return id
        if text in names:
            return list(names).index(text)
    raise MisconfigurationException(f"{setting}={client!r} is no client; {instead_of(text, names, total)}")


def instead_of(name: str, names: Sequence[str], total: int) -> str:
    """Return advice in the place of an unknown name: close names, or some names, or the range of ids.

    >>> instead_of("bremen", ["Bremen", "Ulm"], 2), instead_of("Rom", ["Bremen", "Ulm"], 2), instead_of("9", [], 4)
    ('did you mean Bremen?', 'choose from Bremen, Ulm', 'clients have no names, and ids from 0 to 3')

    Args:
        name: the unknown name.
        names: names of all clients by id; empty if clients have no names.
        total: number of all clients.
    """
    if not names:
        return f"clients have no names, and ids from 0 to {total - 1}"
    # compared without capitals, so that "bremen" finds Bremen
    spelled = {known.casefold(): known for known in names}
    if near := get_close_matches(name.casefold(), spelled, n=3):
        return f"did you mean {' or '.join(spelled[known] for known in near)}?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"choose from {', '.join(names[:LISTED])}{more}"


def client_label(client: int, names: Sequence[str]) -> str:
    """Return a client's id for messages, followed by the client's name unless the name is the id.

    >>> client_label(1, ["Bremen", "Ulm"]), client_label(1, []), client_label(1, ["0", "1"])
    ('1 (Ulm)', '1', '1')

    Args:
        client: the client's id.
        names: names of all clients by id; empty if clients have no names.
    """
    named = client < len(names) and names[client] != str(client)
    return f"{client} ({names[client]})" if named else str(client)
