"""YAML of users, read only where it has one meaning: no key twice, no list within itself, no aliases that explode."""

from typing import Any, NamedTuple

import yaml

CHARACTERS = 1_000_000
"""Characters that a text has at most."""
KEYS = 5_000
"""Keys that a text has at most: the parser takes time with the square of their number."""
REPEATED = 10_000
"""Values that the aliases of a text repeat at most."""
LEVELS = 100
"""Lists and mappings that are within one another at most."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe loader that reads dates as texts, as the parser of the command line does.

    YAML's own reading ends in a ValueError for a date that doesn't exist, such as 2020-99-99.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class RefusedYAML(yaml.YAMLError):
    """Raised for YAML that its own readers take, in one sentence that begins with "the YAML has"."""


class Size(NamedTuple):
    """Size of a node with all nodes below it, with an alias counted as all that it stands for."""

    values: int
    keys: int
    levels: int


def load(text: str) -> Any:
    """Return the content of a text.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: if the text isn't YAML, or `check` refuses it.
    """
    check(text)
    try:
        return yaml.load(text, Loader)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error


def check(text: str) -> None:
    """Refuse a text that YAML's own readers misread in silence, or that takes minutes and gigabytes.

    Args:
        text: YAML.

    Raises:
        RefusedYAML: if a mapping has a key twice, a list or a mapping is within itself, a text has a null
            character, or there are too many characters, keys, levels or repeated values.
        yaml.YAMLError: if the text isn't YAML.
    """
    if len(text) > CHARACTERS:
        raise RefusedYAML(f"the YAML has {len(text)} characters; it can have up to {CHARACTERS}.")
    try:
        root = yaml.compose(text, Loader)
    except RecursionError:  # of YAML's reader in Python, which knows no limit
        raise RefusedYAML(f"the YAML has over {LEVELS} lists or mappings in one another.") from None
    sizes: dict[int, Size] = {}
    size = Size(0, 0, 0) if root is None else measure(root, "", (), sizes)
    if size.keys > KEYS:
        raise RefusedYAML(f"the YAML has {size.keys} keys; it can have up to {KEYS}.")
    if (repeated := size.values - len(sizes)) > REPEATED:
        raise RefusedYAML(f"the YAML has {repeated} values by aliases alone; it can have up to {REPEATED}.")


def measure(node: yaml.Node, name: str, above: tuple[yaml.Node, ...], sizes: dict[int, Size]) -> Size:
    """Return the size of a node.

    Args:
        node: the node.
        name: the dotted name of the setting that it is the value of, with a dot behind it.
        above: the lists and mappings that it is in.
        sizes: sizes of all nodes so far by ``id``; this one and those below it are added.

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
    """Refuse a key that a mapping has twice, of which YAML's own readers drop the first.

    Args:
        node: the mapping.
        name: the dotted name of the setting that it is the value of, with a dot behind it.

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
