"""Fill up a command line for a finished run from the run's folder: ``pfl-lightning join --data new.csv``."""

import os
from collections.abc import Sequence
from pathlib import Path

from pfl_lightning.cli.argv import grouped, value_of
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.runs.folder import stamped

COMMANDS = ("join",)
"""Commands that find their configuration in the folder of a run."""
TABLES = (".csv", ".parquet")
"""Endings of files that ``--data`` takes in the place of a class."""


def with_run(words: Sequence[str]) -> list[str]:
    """Insert a finished run's configuration and checkpoint into a command line that names no configuration or class.

    ``--data FILE`` becomes ``--data.path FILE``. The run is that of ``--ckpt_path FILE``, or else the newest one with
    the checkpoint ``best`` or ``last`` (by default ``last``) below the folder of runs.

    >>> with_run(["fit", "--data", "new.csv"])
    ['fit', '--data', 'new.csv']

    Args:
        words: the command's arguments.

    Raises:
        UsageError: if ``--data`` is a file, and no run with a configuration is found.
    """
    if (
        not words
        or words[0] not in COMMANDS
        or any(word == "-h" or word.endswith((".help", "--help")) for word in words)
    ):
        return list(words)
    command, *arguments = grouped(words)
    given: dict[str, str] = {}
    result: list[str] = []
    for argument in arguments:
        for option in ("--config", "-c", "--model", "--data", "--ckpt_path", "--trainer.default_root_dir"):
            if (value := value_of(argument, option)) is not None:
                given[option] = value
        table = value_of(argument, "--data")
        is_table = table is not None and table.endswith(TABLES)
        result += ["--data.path", str(table)] if is_table else argument
    data = given.get("--data", TABLES[0])
    if {"--config", "-c", "--model"} & set(given) or not data.endswith(TABLES):
        return [*command, *result]
    name = given.get("--ckpt_path", "last")
    root = Path(given.get("--trainer.default_root_dir", "runs"))
    checkpoint = newest(root, name) if name in ("best", "last") else Path(name)
    config = None if checkpoint is None else checkpoint.parent.parent / "config.yaml"
    if config is None or not config.is_file():
        if "--data" not in given:
            return [*command, *result]
        where = f"below {root}" if checkpoint is None else f"at {checkpoint}"
        raise UsageError(
            f"--data {given['--data']}: there is no run with a config.yaml and a checkpoint {where}; give --ckpt_path "
            "RUN/checkpoints/last.ckpt, or --config RUN/config.yaml."
        )
    # in front, so that options on the command line replace the run's settings
    return [*command, "--config", str(config), *result, "--ckpt_path", str(checkpoint)]


def newest(root: Path, name: str) -> Path | None:
    """Return the checkpoint of the newest run of any method that has a configuration; None if there is none.

    Args:
        root: folder of all runs, each in ``METHOD-DATA/version_N``.
        name: ``best`` or ``last``.
    """
    files = [path for path in root.glob(f"*/*/checkpoints/{name}.ckpt") if (path.parents[1] / "config.yaml").is_file()]
    return max(files, key=lambda path: (stamped(path.parents[1])[0], os.path.getmtime(path)), default=None)
