"""Entry point of the command line, ``pfl-lightning COMMAND``; ``cli.commands`` lists the commands.

Nothing heavy is imported here: importing torch and Lightning takes seconds, and neither a list nor a mistyped command
needs either. A command imports both when it starts.
"""

import os
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module

from lightning_utilities.core.rank_zero import rank_zero_only

import pfl_lightning
from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.commands import OTHERS, overview
from pfl_lightning.cli.earlier_run import with_run
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.usage import UsageError, fail, silence
from pfl_lightning.internals.garbage import uncollected
from pfl_lightning.internals.light_start import import_lightning
from pfl_lightning.stopping import RankLost, Stopped, ending_at_once, stoppable

MODULES = {
    "adapters": "pfl_lightning.cli.adapters",
    "advise": "pfl_lightning.cli.advise",
    "compare": "pfl_lightning.cli.compare",
    "configs": "pfl_lightning.cli.configs",
    "flower": "pfl_lightning.flower.command",
    "matrix": "pfl_lightning.cli.matrix",
    "memory": "pfl_lightning.cli.memory",
    "methods": "pfl_lightning.cli.methods_table",
    "predict": "pfl_lightning.cli.predict",
    "status": "pfl_lightning.cli.status",
}
"""The module whose ``main(args)`` runs a command of `OTHERS`, imported on demand."""
LIGHT = {"configs", "flower", "methods", "status"}
"""Commands without Lightning, or with a quick start of their own."""
OF_RUNS = {"adapters", "matrix", "predict"}
"""Commands whose classes are named in files of earlier runs, maybe classes of other packages."""


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: the arguments after the program's name; None takes ``sys.argv``.
    """
    silence()
    words = sys.argv[1:] if args is None else args
    if args is None:
        # like `python -m`: a method in a file of the working folder can be named by `--model FILE.CLASS`
        sys.path.append("")
    try:
        # from here on SIGTERM and Ctrl-C raise Stopped, so that a run can say how to resume
        with stoppable(), ExitStack() as end:
            # here, since nothing catches a broken pipe in the interpreter's own last flush
            end.callback(sys.stdout.flush)
            if words in (["--help"], ["-h"]):
                print(overview())
                sys.exit(0)
            if words == ["--version"]:
                print(f"pfl-lightning {pfl_lightning.__version__}")
                sys.exit(0)
            line = with_run(CommandLine(words))
            refuse_at_sight(line)
            other = line.command in OTHERS
            # A signal ends the process at once here: an exception within an import would surface as another error.
            with ending_at_once(partial(tell, words)), uncollected(freeze=args is None):
                if line.command not in LIGHT:
                    # Metrics of a user's own module may need what is left out of torchmetrics.
                    import_lightning(whole_metrics=line.command in OF_RUNS or bool(line.foreign))
                command = import_module(MODULES[line.command] if other else "pfl_lightning.cli.trainer_commands")
            if other:
                sys.exit(command.main(words[1:]))
            command.main(line)
    except UsageError as error:
        fail(str(error))
    except Stopped as stop:
        tell(words, stop)
        raise
    except RankLost as lost:
        print(f"pfl-lightning: {lost}{way_on(words, lost)}", file=sys.stderr)
        # the lost rank's own exit code, so that a scheduler such as Slurm sees why the run ended
        sys.exit(lost.code)
    except BrokenPipeError:
        # as under `head`, which has read enough: the interpreter's last flush would complain too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # as shells have it for SIGPIPE
        sys.exit(141)
    except Exception as error:
        # imported late: the table of known mistakes needs Lightning's exception classes
        if reason := import_module("pfl_lightning.cli.errors").mistake(error):
            fail(reason)
        raise


def import_trainer_commands() -> None:
    """Import all that a run needs whose line names no class of another package; `compare` forks runs from here."""
    with uncollected():
        import_lightning()
        import_module("pfl_lightning.cli.trainer_commands")


def tell(words: list[str], stop: Stopped) -> None:
    """Print why a command was stopped and how to resume, on rank 0 only.

    Args:
        words: the command's arguments.
        stop: the exception that a signal raised.
    """
    # Lightning, which knows the rank, may not be imported yet; it hands the rank to processes that it starts
    if not getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0))):
        print(f"pfl-lightning: {stop}{way_on(words, stop)}", file=sys.stderr)


def way_on(words: list[str], stop: RankLost | Stopped) -> str:
    """Return the end of the sentence about a stopped command: how to resume, or how to start again.

    Args:
        words: the command's arguments.
        stop: the exception that ended the command; ``resumable`` says if a checkpoint exists.
    """
    # A comparison skips its finished runs and resumes its unfinished ones by itself.
    if words and words[0] in ("advise", "compare"):
        return "; the same command goes on from here."
    # only `fit` writes checkpoints, so no other command has anything to resume
    if not words or words[0] != "fit":
        return "."
    if stop.resumable:
        # the printed line can be pasted: shlex quotes it, and a run resumed twice doesn't get the option twice
        words = words if words[-2:] == ["--ckpt_path", "last"] else [*words, "--ckpt_path", "last"]
        return f"; go on with: pfl-lightning {shlex.join(words)}"
    return f" before there was a checkpoint; start again with: pfl-lightning {shlex.join(words)}"


if __name__ == "__main__":
    main()
