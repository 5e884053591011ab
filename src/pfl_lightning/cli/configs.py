"""The packaged configurations, by their names, and the command ``pfl-lightning configs``."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.runs.tables import text_table

PACKAGE = Path(__file__).parents[1] / "configs"
FOLDER = PACKAGE if PACKAGE.is_dir() else Path(__file__).parents[3] / "configs"
"""Where they are: in the package, or beside its sources where a checkout has no symbolic links."""

DESCRIPTION = """\
The configurations that come with the package. Each is found by its name, in any working folder:

    pfl-lightning fit --config methods/fedrema --config protocols/digits_dir0.1

A file of your own with that name wins.
"""

OPTIONS = ("--config", "-c")
"""Options of ``fit`` that take a configuration."""


def squeezed(name: str) -> str:
    """A name as it is compared: capitals, dashes, dots and the ending ``.yaml`` make no difference.

    >>> squeezed("methods/Per-FedAvg") == squeezed("configs/methods/per_fedavg.yaml")
    True
    """
    name = re.sub(r"\.ya?ml$", "", name.lower()).removeprefix("configs/")
    return re.sub(r"[^a-z0-9/]", "", name)


def names() -> dict[str, Path]:
    """The packaged configurations by their names, such as ``methods/cwfedavg``."""
    paths = sorted(FOLDER.rglob("*.yaml"), key=lambda path: (len(path.relative_to(FOLDER).parts), path))
    return {path.relative_to(FOLDER).as_posix().removesuffix(".yaml"): path for path in paths}


def find(name: str) -> Path | None:
    """The file that a name means: the user's own of that name, else the packaged one, else none.

    >>> find("methods/FedAWA") == find("methods/fedawa.yaml") == FOLDER / "methods" / "fedawa.yaml"
    True

    Args:
        name: a path, or the name of a packaged configuration; both with or without ``.yaml``.
    """
    for own in (name, f"{name}.yaml"):
        # other than Path.is_file it takes a name that is too long for a file
        if os.path.isfile(own):
            return Path(own)
    return {squeezed(known): path for known, path in names().items()}.get(squeezed(name))


def nearest(name: str) -> str:
    """The end of a sentence about a file that isn't there: files beside it, or packaged ones, with names like it."""
    path = Path(name)
    beside = path.parent.glob("*.y*ml") if os.path.isdir(path.parent) else []
    known = names()
    # a name without its folder
    if whole := [each for each in known if squeezed(each).rpartition("/")[2] == squeezed(path.name)]:
        return f"; did you mean {' or '.join(whole)}?"
    return suggestion(name.removeprefix("./"), [file.as_posix() for file in beside] + list(known))


def resolved(words: Sequence[str]) -> list[str]:
    """A command line with the paths of packaged configurations in the place of their names.

    Args:
        words: the command's arguments; a name that means nothing stays, for the parser to refuse.
    """
    result: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in OPTIONS:
            word = f"{option}={find(value) or value}"
        elif result and result[-1] in OPTIONS:
            word = str(find(word) or word)
        result.append(word)
    return result


def what(path: Path) -> str:
    """What a configuration is, by its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()


def main(args: list[str]) -> int:
    """Runs ``pfl-lightning configs``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if a name means nothing, or a file of that name is there already.
    """
    parser = Arguments("configs", usage="%(prog)s [FOLDER] [--copy NAME]", description=DESCRIPTION)
    parser.add_argument("folder", nargs="?", default="", metavar="FOLDER", help="methods, protocols, … (all of them)")
    parser.add_argument("--copy", metavar="NAME", help="write this one into the working folder, to be changed")
    given = parser.parse_args(args)
    if given.copy is None:
        known = {name: path for name, path in names().items() if name.startswith(given.folder)}
        if not known:
            folders = sorted({name.partition("/")[0] for name in names() if "/" in name})
            raise UsageError(f"configs: {given.folder} is no folder{suggestion(given.folder, folders)}")
        print(text_table([["configuration", "what it is"], *([name, what(path)] for name, path in known.items())]))
        return 0
    if (path := find(given.copy)) is None:
        raise UsageError(f"configs: --copy {given.copy} is no configuration{nearest(given.copy)}")
    copy = Path(path.name)
    if copy.exists():
        raise UsageError(f"configs: {copy} is there already; move it away, or copy in another folder.")
    shutil.copyfile(path, copy)
    print(f"{copy} written; run it by: pfl-lightning fit --config {copy}")
    return 0
