"""Read YAML with one meaning only: no key twice, no list within itself, no explosion by aliases.

YAML's own readers drop the first of two equal keys in silence, and ten lines of aliases can stand for millions of
values.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pfl_lightning.cli.usage import UsageError, one_line

CHARACTERS = 1_000_000
"""Largest number of characters of a text."""
KEYS = 5_000
"""Largest number of keys of a text: the parser's time grows with the square of their number."""
REPEATED = 10_000
"""Largest number of values repeated by aliases."""
LEVELS = 100
"""Largest depth of nested lists and mappings."""


# the C loader is several times as fast, and not every build of PyYAML has it
class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe loader reading dates as strings, as the command line's parser does.

    PyYAML raises ValueError for a date that doesn't exist, such as 2020-99-99.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class RefusedYAML(yaml.YAMLError):
    """Raised for valid YAML refused by `check`, with a sentence beginning with "the YAML has"."""


class Size(NamedTuple):
    """Number of values, keys and levels of a node; an alias counts as often as used."""

    values: int
    keys: int
    levels: int


def load(text: str, loader: type[Any] = Loader) -> Any:
    """Return the content of a YAML text.

    Args:
        text: YAML.
        loader: the reader; ``yaml.BaseLoader`` leaves numbers and truth values as texts, such as a client's code 01.

    Raises:
        yaml.YAMLError: if the text isn't YAML, or `check` refuses it.
    """
    check(text)
    try:
        return yaml.load(text, loader)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error


def read_settings(path: Path, owner: str) -> dict[str, Any]:
    """Return the settings in a YAML file; none in an empty one.

    Args:
        path: the file.
        owner: beginning of the error message, such as ``predict: --config run.yaml``.

    Raises:
        UsageError: if the file can't be read, isn't valid YAML, or has no settings by name.
    """
    try:
        content = load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{owner} can't be read ({error.strerror}); give a YAML file of settings.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{owner} is no text in UTF-8; save it as such.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{owner}: {no_yaml(str(error))}") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"{owner} holds a {type(content).__name__}; give settings by name, such as trainer: ...")
    return content or {}


def no_yaml(reason: str) -> str:
    """Return the sentence for a configuration with invalid YAML.

    Args:
        reason: a sentence of `yaml_text.check`, or PyYAML's message with an excerpt of the file after a blank line.
    """
    if reason.startswith("the YAML "):
        return reason
    # the excerpt goes: one sentence holds no picture of several lines
    place = re.sub(r'in "<[a-z ]+>",', "at", reason.partition("\n\n")[0])
    return one_line(f"the configuration is not valid YAML: {place}")


def check(text: str) -> None:
    """Refuse a text misread by YAML's readers in silence, or readable only in minutes and gigabytes.

    Args:
        text: YAML.

    Raises:
        RefusedYAML: if a mapping has a key twice, a list or mapping contains itself, a text has a null character, or
            there are too many characters, keys, levels or repeated values.
        yaml.YAMLError: if the text isn't YAML.
    """
    if len(text) > CHARACTERS:
        raise RefusedYAML(f"the YAML has {len(text)} characters; it can have up to {CHARACTERS}.")
    try:
        root = yaml.compose(text, Loader)
    except RecursionError:  # PyYAML's Python reader has no limit of its own
        raise RefusedYAML(f"the YAML has over {LEVELS} lists or mappings in one another.") from None
    # composed, not constructed: nodes show aliases and double keys, and cost no memory for repeats
    sizes: dict[int, Size] = {}
    size = Size(0, 0, 0) if root is None else measure(root, "", (), sizes)
    if size.keys > KEYS:
        raise RefusedYAML(f"the YAML has {size.keys} keys; it can have up to {KEYS}.")
    if (repeated := size.values - len(sizes)) > REPEATED:
        raise RefusedYAML(f"the YAML has {repeated} values by aliases alone; it can have up to {REPEATED}.")


def measure(node: yaml.Node, name: str, above: tuple[yaml.Node, ...], sizes: dict[int, Size]) -> Size:
    """Return the size of a node, and refuse nodes within themselves or too deep.

    Args:
        node: the node.
        name: dotted name of the setting whose value the node is, with a dot at the end.
        above: the lists and mappings around the node.
        sizes: sizes of all nodes so far by ``id``; this node's and its children's are added.

    Raises:
        RefusedYAML: as `check` does.
    """
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value:
            raise RefusedYAML(f"the YAML has a null character in line {line}, which no name or path can have.")
        return sizes.setdefault(id(node), Size(1, 0, 0))
    if any(node is each for each in above):
        raise RefusedYAML(f"the YAML has a list or mapping in line {line} that holds itself by its alias.")
    # an alias is the same node again; counted anew each time, nested aliases would take exponential time
    size = sizes.get(id(node))
    if size is None and len(above) < LEVELS:
        inside = (*above, node)
        if isinstance(node, yaml.MappingNode):
            refuse_twins(node, name)
            below = [measure(key, name, inside, sizes) for key, _ in node.value]
            below += [measure(value, f"{name}{key.value}.", inside, sizes) for key, value in node.value]
            keys = len(node.value)
        else:
            below, keys = [measure(each, name, inside, sizes) for each in node.value], 0
        size = sizes[id(node)] = Size(
            1 + sum(each.values for each in below),
            keys + sum(each.keys for each in below),
            1 + max((each.levels for each in below), default=0),
        )
    if size is None or len(above) + size.levels > LEVELS:
        raise RefusedYAML(f"the YAML has over {LEVELS} lists or mappings in one another, by line {line}.")
    return size


def refuse_twins(node: yaml.MappingNode, name: str) -> None:
    """Refuse a key given twice in a mapping; YAML's readers would drop the first in silence.

    Args:
        node: the mapping.
        name: dotted name of the setting whose value the mapping is, with a dot at the end.

    Raises:
        RefusedYAML: if there is such a key.
    """
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line, same = key.start_mark.line + 1, (key.tag, key.value)
        if same in lines:
            where = f"in line {line}" if lines[same] == line else f"in line {lines[same]} and in line {line}"
            raise RefusedYAML(f"the YAML has {name}{key.value} twice, {where}; keep one of them.")
        lines[same] = line
