"""Find the packaged configurations by name; the command ``pfl-lightning configs``."""

import os
import re
import shutil
from pathlib import Path

from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.cli.usage import Arguments, UsageError
from pfl_lightning.runs.tables import text_table

PACKAGED = Path(__file__).parents[1] / "configs"
FOLDER = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[3] / "configs"
"""Folder of the configurations: in the package, where ``setup.py`` puts them, or beside ``src`` in a checkout."""

DESCRIPTION = """\
List the packaged configurations. Each is found by its name, in any working folder:

    pfl-lightning fit --config methods/fedrema --config protocols/digits_dir0.1

A file of your own with the same name is taken first.
"""


def squeezed(name: str) -> str:
    """Return a name for comparison: without capitals, dashes, dots, underscores and the ending ``.yaml``.

    >>> squeezed("methods/Per-FedAvg") == squeezed("configs/methods/per_fedavg.yaml")
    True
    """
    name = re.sub(r"\.ya?ml$", "", name.lower()).removeprefix("configs/")
    return re.sub(r"[^a-z0-9/]", "", name)


def names() -> dict[str, Path]:
    """Return the packaged configurations: path by name, such as ``methods/cwfedavg``."""
    # files at the top, such as quickstart, come before those in folders
    paths = sorted(FOLDER.rglob("*.yaml"), key=lambda path: (len(path.relative_to(FOLDER).parts), path))
    return {path.relative_to(FOLDER).as_posix().removesuffix(".yaml"): path for path in paths}


def find(name: str) -> Path | None:
    """Return the file for a name: a file of the user first, then a packaged configuration, else None.

    >>> find("methods/FedAWA") == find("methods/fedawa.yaml") == FOLDER / "methods" / "fedawa.yaml"
    True

    Args:
        name: a path, or the name of a packaged configuration; both with or without ``.yaml``.
    """
    for own in (name, f"{name}.yaml"):
        # Path.is_file raises OSError for a name longer than the file system allows; os.path.isfile returns False
        if os.path.isfile(own):
            return Path(own)
    return {squeezed(known): path for known, path in names().items()}.get(squeezed(name))


def nearest(name: str) -> str:
    """Return the end of the sentence about a missing file: similar names beside the path and in the package.

    Args:
        name: the path or name that wasn't found.
    """
    path = Path(name)
    beside = path.parent.glob("*.y*ml") if os.path.isdir(path.parent) else []
    known = names()
    # the right name without its folder, such as fedper for methods/fedper, beats any similar spelling
    if whole := [each for each in known if squeezed(each).rpartition("/")[2] == squeezed(path.name)]:
        return f"; did you mean {' or '.join(whole)}?"
    return suggestion(name.removeprefix("./"), [file.as_posix() for file in beside] + list(known))


def what(path: Path) -> str:
    """Return the description of a configuration, a comment in the first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()


def main(args: list[str]) -> int:
    """Run ``pfl-lightning configs``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if a folder or a name is unknown, or the copy would overwrite a file.
    """
    parser = Arguments("configs", usage="%(prog)s [FOLDER] [--copy NAME]", description=DESCRIPTION)
    parser.add_argument(
        "folder", nargs="?", default="", metavar="FOLDER", help="list one folder, such as methods (default: all)"
    )
    parser.add_argument("--copy", metavar="NAME", help="copy a configuration into the working folder, to change it")
    given = parser.parse_args(args)
    if given.copy is None:
        paths = {name: path for name, path in names().items() if name.startswith(given.folder)}
        if not paths:
            folders = sorted({name.partition("/")[0] for name in names() if "/" in name})
            raise UsageError(f"configs: {given.folder} is no folder{suggestion(given.folder, folders)}")
        print(text_table([["configuration", "description"], *([name, what(path)] for name, path in paths.items())]))
        return 0
    if (path := find(given.copy)) is None:
        raise UsageError(f"configs: --copy {given.copy} is no configuration{nearest(given.copy)}")
    copy = Path(path.name)
    if copy.exists():
        raise UsageError(f"configs: {copy} is there already; move it away, or change to another folder.")
    shutil.copyfile(path, copy)
    print(f"{copy} written; run it by: pfl-lightning fit --config {copy}")
    return 0
