"""Fill up a command line for a finished run from the run's folder: ``pfl-lightning join --data new.csv``."""

from pathlib import Path

from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.usage import UsageError

COMMANDS = ("join",)
"""Commands that find their configuration in the folder of a run."""
TABLES = (".csv", ".parquet")
"""Endings of files that ``--data`` takes in place of a class."""


def with_run(line: CommandLine) -> CommandLine:
    """Insert a finished run's configuration and checkpoint into a command line that names no configuration or class.

    ``--data FILE`` becomes ``--data.path FILE``. The run is that of ``--ckpt_path FILE``, or else the newest one with
    the checkpoint ``best`` or ``last`` (by default ``last``) below the folder of runs.

    >>> with_run(CommandLine(["fit", "--data", "new.csv"])).words
    ['fit', '--data', 'new.csv']

    Args:
        line: the command line.

    Raises:
        UsageError: if ``--data`` is a file, and no run with a configuration is found.
    """
    asks = any(each.name == "-h" or each.name.endswith((".help", "--help")) for each in line.arguments)
    if line.command not in COMMANDS or asks:
        return line
    given = {argument.name: argument.value or "" for argument in line.arguments}
    data, has_table = given.get("--data", ""), given.get("--data", "").endswith(TABLES)
    words = [line.command]
    for argument in line.arguments:
        words += ["--data.path", data] if has_table and argument.name == "--data" else argument.words
    if {"--config", "-c", "--model", "--model.class_path"} & set(given) or (data and not has_table):
        return CommandLine(words)
    name = given.get("--ckpt_path", "last")
    root = Path(given.get("--trainer.default_root_dir", "runs"))
    checkpoint = newest(root, name) if name in ("best", "last") else Path(name)
    config = None if checkpoint is None else checkpoint.parent.parent / "config.yaml"
    if config is None or not config.is_file():
        if not data:
            return CommandLine(words)
        where = f"below {root}" if checkpoint is None else f"at {checkpoint}"
        raise UsageError(
            f"--data {data}: there is no run with a config.yaml and a checkpoint {where}; give --ckpt_path "
            "RUN/checkpoints/last.ckpt, or --config RUN/config.yaml."
        )
    # in front, so that options on the command line replace the run's settings
    return CommandLine([line.command, "--config", str(config), *words[1:], "--ckpt_path", str(checkpoint)])


def newest(root: Path, name: str, configured: bool = True) -> Path | None:
    """Return the checkpoint of the newest run of any method; None if there is none.

    Args:
        root: folder of all runs, each in ``METHOD-DATA/version_N``.
        name: ``best`` or ``last``.
        configured: whether only runs with a ``config.yaml`` count, as those of the command line.

    Raises:
        MisconfigurationException: if several runs of a method wrote last, such as copies of one run.
    """
    # imported late: it needs Lightning, and `main` imports this module at its start
    from pfl_lightning.runs.folder import checkpoint_of_run, stamped

    methods = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    found = [path for each in methods if (path := checkpoint_of_run(each, name, begun=False)) is not None]
    if configured:
        found = [path for path in found if (path.parents[1] / "config.yaml").is_file()]
    return max(found, key=lambda path: stamped(path.parents[1]), default=None)
