"""Names and ids of clients: read and compare names, find a client by name or id, and write both in messages."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any
from unicodedata import normalize

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.columns import numbered

LISTED = 12
"""Largest number of names that a message lists when none is close."""

WIDEST = 16
"""Largest number of letters of a name beside an axis."""


def compared(name: str) -> str:
    r"""Return a name as names are compared: in Unicode's form NFC, without spaces at the ends, and case-folded.

    >>> compared("Ulm ") == compared("ulm"), compared("Ko\u0308ln") == compared("K\xf6ln")
    (True, True)

    Args:
        name: the name.
    """
    return normalize("NFC", normalize("NFC", name).strip().casefold())


def both(one: Any, other: Any) -> str:
    r"""Return two spellings for a message; letters beyond ASCII by their codes where both would look the same.

    >>> both("Ulm ", "ulm"), both("K\xf6ln", "Ko\u0308ln")
    ("'Ulm ' and 'ulm'", "'K\\xf6ln' and 'Ko\\u0308ln'")

    Args:
        one: a name, or a number in its place.
        other: another one.
    """
    shown = ascii if normalize("NFC", repr(one)) == normalize("NFC", repr(other)) else repr
    return f"{shown(one)} and {shown(other)}"


def distinct(names: Iterable[Any], setting: str) -> list[str]:
    """Return clients' names as texts, all different.

    >>> distinct(["01", 1], "data.clients")
    ['01', '1']

    Args:
        names: the names, or numbers in their place, each of another client.
        setting: the setting that gives them, for the message.

    Raises:
        MisconfigurationException: if two names agree when `compared`.
    """
    spelled: dict[str, Any] = {}
    for name in names:
        key = compared(str(name))
        if key in spelled:
            raise two_spellings(setting, spelled[key], name)
        spelled[key] = name
    return [str(name) for name in spelled.values()]


def owners_of(column: NDArray[Any]) -> tuple[list[str], Tensor]:
    """Return the clients' names in order, and the position of each sample's client among them.

    >>> owners_of(np.array(["b", "a", "b"]))
    (['a', 'b'], tensor([1, 0, 1]))

    Args:
        column: the name of each sample's client, or a number in its place.

    Raises:
        MisconfigurationException: if two names agree when `compared`.
    """
    names, codes = numbered(column)
    return distinct(names, "client"), codes


def check_kinds(values: Any) -> None:
    """Refuse a column of clients with numbers and texts that are written alike, of which NumPy would make one client.

    Args:
        values: the column; None and arrays of one type pass.

    Raises:
        MisconfigurationException: if a number and a text are written alike.
    """
    is_typed = getattr(getattr(values, "dtype", None), "kind", "O") != "O"
    if isinstance(values, Tensor) or is_typed or not hasattr(values, "__len__"):
        return
    given = list(values)
    if len(set(map(type, given))) > 1:
        spelled: dict[str, Any] = {}
        for value in given:
            other = spelled.setdefault(str(value), value)
            if isinstance(other, str) is not isinstance(value, str):
                raise two_spellings("client", other, value)


def codes_kept(texts: Any) -> NDArray[Any]:
    """Return a column of clients that was read as texts, as integers if each text is the way to write an integer.

    So clients 1, 2 and 10 stay in this order, and 01 stays a text, which isn't 1.

    >>> codes_kept(["2", "10"]), codes_kept(["01", "1"])
    (array([ 2, 10]), array(['01', '1'], dtype=object))

    Args:
        texts: the texts; missing values stay.
    """
    column = np.asarray(texts, dtype=object)
    return column.astype(np.int64) if all(map(is_integer, set(column))) else column


def is_integer(text: Any) -> bool:
    """Return whether a text is an integer as Python writes it, such as 7 and not 07, and of at most 18 digits.

    Args:
        text: the text; anything else is none.
    """
    return isinstance(text, str) and text.isdecimal() and len(text) <= 18 and str(int(text)) == text


def two_spellings(setting: str, one: Any, other: Any) -> MisconfigurationException:
    """Return the error for two spellings of one client's name.

    Args:
        setting: the setting that gives the names.
        one: a spelling.
        other: another spelling, or the same once more.
    """
    if type(one) is type(other) and one == other:
        return MisconfigurationException(f"{setting}: {one!r} is the name of two clients; give each a name of its own")
    return MisconfigurationException(
        f"{setting}: {both(one, other)} are one client's name, as capitals, spaces at the ends and Unicode's forms "
        "don't tell clients apart; spell it in one way, or give two clients different names"
    )


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
        if not names and is_integer(text) and int(text) < total:
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
    """Return advice in place of an unknown name: close names, or some names, or the range of ids.

    >>> instead_of("bremen", ["Bremen", "Ulm"], 2), instead_of("Rom", ["Bremen", "Ulm"], 2), instead_of("9", [], 4)
    ('did you mean Bremen?', 'choose from Bremen, Ulm', 'clients have no names, and ids from 0 to 3')

    Args:
        name: the unknown name.
        names: names of all clients by id; empty if clients have no names.
        total: number of all clients.
    """
    if not names:
        return f"clients have no names, and ids from 0 to {total - 1}"
    spelled = {compared(known): known for known in names}
    if (known := spelled.get(compared(name))) is not None:
        # two names that look the same are told apart by the codes of their letters
        return f"did you mean {ascii(known) if normalize('NFC', known) == normalize('NFC', name) else known}?"
    if near := get_close_matches(compared(name), spelled, n=3):
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


def axis_label(client: int, names: Sequence[str]) -> str:
    """Return a client's name, cut to fit beside an axis, or the id of an unnamed client.

    >>> axis_label(1, ["Bremen", "St. Joseph-Stift Bremen"]), axis_label(1, [])
    ('St. Joseph-Stif…', '1')

    Args:
        client: the client's id.
        names: names of all clients by id; empty if clients have no names.
    """
    name = names[client] if client < len(names) else str(client)
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"
