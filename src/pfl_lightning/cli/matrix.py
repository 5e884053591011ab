"""The command ``pfl-lightning matrix``: test each client's model of a finished run on every client's test rows."""

from pathlib import Path

from pfl_lightning.cli.load_config import configured
from pfl_lightning.cli.predict import QUIET, add_run_options, checkpoint_of, configuration_of
from pfl_lightning.cli.usage import Arguments, UsageError

DESCRIPTION = """\
Test each client's model of a run on every client's test rows, and write a table and a picture.

    pfl-lightning matrix runs/FedPer-Digits/version_0

The diagonal has the run's own test figures. All settings come from the run's config.yaml, and the run's data are read.
K clients take K times the work of a test.
"""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning matrix``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if there is no such run or configuration, or the folder can't be written.
    """
    options = parser().parse_args(args)
    path = checkpoint_of(options.ckpt_path, options.runs, "matrix")
    file = configuration_of(options, path.parent.parent, "matrix", "matrix ")
    made = configured(["--config", str(file), *QUIET.split()])
    matrix = made.trainer.matrix(
        made.model,
        made.datamodule,
        ckpt_path=path,
        metric=options.metric,
        clients=options.client,
        aggregator=made.aggregator,
    )
    print(matrix)
    out = options.out or path.parent.parent
    try:
        written = matrix.write(out)
    except OSError as error:
        raise UsageError(f"matrix: --out {out} can't be written ({error.strerror}); give another folder.") from error
    print(f"files: {', '.join(map(str, written))}")
    return 0


def parser() -> Arguments:
    """Return the parser of the command's arguments."""
    made = Arguments("matrix", usage="%(prog)s [RUN] [options]", description=DESCRIPTION)
    made.add_argument(
        "ckpt_path",
        nargs="?",
        default="best",
        metavar="RUN",
        help="a run's folder, a checkpoint, or best or last of the newest run (default: best)",
    )
    add_run_options(made)
    made.add_argument("--metric", help="metric of the test, such as acc (default: the one that selects the best round)")
    made.add_argument("--client", nargs="+", metavar="NAME", help="clients whose models are tested (default: all)")
    made.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for matrix.csv, matrix.md and matrix.png (default: the run's folder)",
    )
    return made
