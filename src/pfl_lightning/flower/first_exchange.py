"""The exchange before the first round: sites tell words and scales of their tables, and get those of all of them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import FederatedDataModule
from pfl_lightning.flower.states import written
from pfl_lightning.flower.template import Refused, plain

Values: TypeAlias = dict[str, Any]
"""Entries of a data module's ``preprocessing``."""
KINDS = ("classes", "categories", "scales")
"""What an exchange may have: names of classes, values of columns of texts, and moments of columns of numbers."""
WORDS = KINDS[:2]
PAIRS = (("mean", "deviation"), ("target_mean", "target_deviation"))
MOMENTS = tuple(moment for pair in PAIRS for moment in pair)
ASKED = {"kinds": "", "words": {str: str}, "resumed": False}
"""Template of the server's question: kinds apart by spaces, agreed words as JSON, and whether the run goes on."""
TOLD = {"values": {str: str}, "clients": 0, "agreed": False}
"""Template of a site's answer: values as JSON, number of clients, and whether the values are of an earlier exchange."""
PIECE = 1000
"""Largest number of characters in a piece of a text of JSON, since a message bounds the length of a text."""
MOST_BYTES, MOST_WORDS, LONGEST = 1 << 20, 100_000, 500
"""Largest sizes of an answer: bytes, words of a column, and characters of a word."""
FILE = "agreed.json"
"""The file with the values of all sites, in a site's folder of states."""


class FirstExchange:
    """The server's side: collects what sites tell, and makes one set of values of it.

    Words come first, since moments of a coded column depend on the codes.

    Args:
        kinds: what is exchanged, of `KINDS`.
        least: number of clients whose sites must have told.
        classes: number of classes of the task; None for a task without.
        resumed: whether the run goes on from a checkpoint, with the values that its sites have.
    """

    def __init__(self, kinds: Sequence[str], least: int, classes: int | None, resumed: bool) -> None:
        self.kinds, self.least, self.classes, self.resumed = kinds, least, classes, resumed
        self.agreed = ""
        """The values of all sites as JSON; empty before."""
        self._words = ""
        self._answers: dict[int, tuple[int, Values]] = {}

    def question(self) -> dict[str, Any]:
        """Return the record of the question to a site."""
        return {"kinds": " ".join(self.kinds), "words": pieces(self._words), "resumed": self.resumed}

    def take(self, node: int, answer: Mapping[str, Any]) -> list[int]:
        """Take a site's answer, and return the nodes to be asked or greeted next; empty until enough have told.

        Args:
            node: the site's node.
            answer: the answer, like `TOLD`.

        Raises:
            Refused: if the answer is malformed.
            MisconfigurationException: if the answers of sites don't fit.
        """
        values = checked(whole(answer["values"]))
        # a resumed run keeps the values with which its models were trained
        if answer["agreed"] and self.resumed:
            self.agreed = whole(answer["values"])
            return [*self._answers, node]
        self._answers[node] = answer["clients"], values
        if sum(count for count, _ in self._answers.values()) < self.least:
            return []
        # by node, so that the order of answers changes nothing
        answers = {node: values for node, (_, values) in sorted(self._answers.items())}
        nodes, self._answers = list(answers), {}
        if self._words or "scales" not in self.kinds:
            self.agreed = json.dumps(merged(answers, self.kinds, self.classes))
        else:
            self._words = json.dumps(merged(answers, [kind for kind in self.kinds if kind in WORDS], self.classes))
        return nodes


def pieces(text: str) -> dict[str, str]:
    """Return a text in pieces, by their places.

    Args:
        text: the text.
    """
    return {str(start // PIECE): text[start : start + PIECE] for start in range(0, len(text), PIECE)}


def whole(parts: Mapping[str, str]) -> str:
    """Return the text of `pieces`.

    >>> whole(pieces("flu" * 999)) == "flu" * 999
    True

    Args:
        parts: the pieces by their places.
    """
    return "".join(parts.get(str(place), "") for place in range(len(parts)))


def merged(answers: Mapping[int, Values], kinds: Sequence[str], classes: int | None = None) -> Values:
    """Return one set of values for all sites.

    >>> ulm, kiel = ({"classes": {"ill": words}} for words in (["flu"], ["cold", "flu"]))
    >>> merged({1: ulm, 2: kiel}, ["classes"])
    {'classes': {'ill': ['cold', 'flu']}}

    Args:
        answers: what each site tells, by node.
        kinds: what is exchanged.
        classes: number of classes of the task; None for a task without.

    Raises:
        MisconfigurationException: if a column holds texts at some sites alone, or there are more or fewer classes.
    """
    common: Values = {}
    every = list(answers.values())
    for kind in [kind for kind in kinds if kind in WORDS]:
        columns = {column for values in every for column in values[kind]}
        # such a column would be coded at some sites and standardised at others
        if alone := sorted(column for column in columns if not all(column in values[kind] for values in every)):
            raise MisconfigurationException(
                f"first-exchange={kind}: column {alone[0]!r} holds texts at some sites and numbers at others; list its "
                f"values in data.{kind}, the same at every site."
            )
        common[kind] = {}
        for column in every[0][kind]:
            words = [values[kind][column] for values in every]
            # a given order stays where all sites have it
            common[kind][column] = words[0] if all(each == words[0] for each in words) else sorted(set().union(*words))
            if kind == "classes" and classes is not None and len(common[kind][column]) != classes:
                raise MisconfigurationException(
                    f"first-exchange=classes: sites have the classes {', '.join(common[kind][column][:12])}, and the "
                    f"task takes {classes}; list all in data.classes."
                )
    if "scales" in kinds:
        if len({tuple(tuple(values.get(moment, ())) for moment in MOMENTS) for values in every}) > 1:
            raise MisconfigurationException("first-exchange=scales: sites have other features; name them in the app.")
        rows = [values["rows"] for values in every]
        for first, second in [pair for pair in PAIRS if pair[0] in every[0]]:
            common |= {first: {}, second: {}}
            for column in every[0][first]:
                means = [values[first][column] for values in every]
                mean = math.fsum(n * each for n, each in zip(rows, means, strict=True)) / max(sum(rows), 1)
                # within sites and between them
                squares = [
                    n * (values[second][column] ** 2 + (each - mean) ** 2)
                    for n, each, values in zip(rows, means, every, strict=True)
                ]
                common[first][column] = mean
                common[second][column] = math.sqrt(math.fsum(squares) / max(sum(rows), 1))
    return common


def checked(text: str) -> Values:
    """Return the values in a site's text.

    Args:
        text: a text of JSON.

    Raises:
        Refused: if the text has another form, is too long, or has numbers that aren't finite.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"{len(text)} bytes, and it may have {MOST_BYTES}")
        values = json.loads(text)
        for kind in [kind for kind in WORDS if kind in values]:
            for column, words in values[kind].items():
                if type(words) is not list or len(words) > MOST_WORDS or not all(map(is_word, [column, *words])):
                    raise ValueError(f"column {plain(str(column), 50)} has no list of words")
        for moment in [moment for moment in MOMENTS if moment in values]:
            if not all(is_word(column) and is_number(number) for column, number in values[moment].items()):
                raise ValueError(f"{moment} has what is no number")
        if not 0 <= values.get("rows", 0) < 1 << 31 or type(values.get("rows", 0)) is not int:
            raise ValueError("rows is no number of rows")
        if not values.keys() <= {*WORDS, *MOMENTS, "rows"}:
            raise ValueError("it has what wasn't asked for")
    # as many kinds as there are wrong texts
    except Exception as error:
        raise Refused(f"what it tells of its data can't be taken: {plain(str(error), 200)}.") from error
    return dict(values)


def is_word(value: object) -> bool:
    """Return whether a value is a text that is short enough."""
    return type(value) is str and len(value) <= LONGEST


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def values_of(data: FederatedDataModule, kinds: Sequence[str], words: str) -> Values:
    """Return what a site tells of its own table.

    Args:
        data: the site's data module, which is set up anew if necessary.
        kinds: what is exchanged.
        words: the words that the sites have agreed on, as JSON; empty before.

    Raises:
        Refused: if the data can't tell that.
    """
    data.adopt({}, [])
    data.setup()
    if not data.preprocessing or "inputs" in data.preprocessing:
        raise Refused(
            f"first-exchange={' '.join(kinds)}: data={type(data).__name__} tells nothing"
            + (" under data.preprocessing; give its vocabulary, and by=client." if data.preprocessing else ".")
        )
    if words:
        take_over(data, words)
    preprocessing = data.preprocessing
    values: Values = {kind: preprocessing[kind] for kind in kinds if kind in WORDS}
    # moments of each client's own rows never leave a site
    ways = (preprocessing["standardize"], preprocessing.get("standardize_target"))
    pairs = [pair for pair, way in zip(PAIRS, ways, strict=True) if way == "table"]
    if "scales" in kinds and pairs:
        rows = sum(data.size(client, "train") for client in range(data.num_clients))
        values |= {moment: preprocessing[moment] for pair in pairs for moment in pair} | {"rows": rows}
    elif "scales" in kinds and words:
        raise Refused("first-exchange=scales: its data has no standardize=table; leave scales out.")
    return values


def take_over(data: FederatedDataModule, agreed: str) -> None:
    """Set a site's data up with the values of all sites.

    Args:
        data: the site's data module, set up.
        agreed: the values as JSON.
    """
    # moments of own rows, or of other codes, are fitted anew unless all have agreed on them
    own = {name: value for name, value in data.preprocessing.items() if name not in MOMENTS}
    data.adopt(own | json.loads(agreed), [])


def kept(folder: Path) -> str:
    """Return the values of all sites from a site's folder, as JSON; empty without."""
    path = folder / FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def keep(folder: Path, agreed: str) -> None:
    """Write the values of all sites into a site's folder.

    Args:
        folder: the folder of states.
        agreed: the values as JSON.
    """
    with written(folder / FILE) as partial:
        partial.write_text(agreed, encoding="utf-8")


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse unknown kinds.

    Raises:
        MisconfigurationException: with the known ones.
    """
    if wrong := sorted(set(kinds) - set(KINDS)):
        raise MisconfigurationException(
            f"first-exchange={' '.join(kinds)!r} has {wrong[0]!r}; choose from {', '.join(KINDS)}."
        )
