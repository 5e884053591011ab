"""The command line: ``pfl-lightning COMMAND``, with the commands of ``cli.commands``.

This module imports nothing heavy: lists, and mistakes that a look at the words tells, are answered at once. Torch and
Lightning are read when a command needs them.
"""

import logging
import os
import shlex
import sys
import warnings
from functools import partial
from importlib import import_module

from lightning_utilities.core.rank_zero import rank_zero_only

from pfl_lightning.cli.commands import OTHERS, overview
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.usage import UsageError, fail
from pfl_lightning.stopping import RankLost, Stopped, ending_at_once, stoppable


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: the arguments; None takes the process's own.
    """
    silence()
    words = sys.argv[1:] if args is None else args
    if args is None:
        # like `python -m`: a method in a file of the working folder can be named by `--model FILE.CLASS`
        sys.path.append("")
    try:
        with stoppable():
            if words in (["--help"], ["-h"]):
                print(overview())
                sys.exit(0)
            refuse_at_sight(words)
            other = words[0] in OTHERS
            with ending_at_once(partial(tell, words)):
                command = import_module(OTHERS[words[0]] if other else "pfl_lightning.cli.trainer_commands")
            if other:
                sys.exit(command.main(words[1:]))
            command.main(args)
    except UsageError as error:
        fail(str(error))
    except Stopped as stop:
        tell(words, stop)
        raise
    except RankLost as lost:
        print(f"pfl-lightning: {lost}{way_on(words, lost)}", file=sys.stderr)
        sys.exit(lost.code)
    except BrokenPipeError:
        # as under `head`, which has read enough: the interpreter's last flush would complain too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # as shells have it for SIGPIPE
        sys.exit(141)
    except Exception as error:
        if reason := import_module("pfl_lightning.cli.errors").mistake(error):
            fail(reason)
        raise


def tell(words: list[str], stop: Stopped) -> None:
    """Says what has stopped a command, and how to go on; of several ranks the first one does.

    Args:
        words: the command's arguments.
        stop: what ended it.
    """
    # Lightning, which knows the rank, may not be imported yet; it hands the rank to processes that it starts
    if not getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0))):
        print(f"pfl-lightning: {stop}{way_on(words, stop)}", file=sys.stderr)


def way_on(words: list[str], stop: RankLost | Stopped) -> str:
    """What a user who has stopped a command can do next.

    Args:
        words: the command's arguments.
        stop: what ended it.
    """
    if words and words[0] == "compare":
        return "; the same command goes on from here."
    if not words or words[0] != "fit":
        return "."
    if stop.resumable:
        words = words if words[-2:] == ["--ckpt_path", "last"] else [*words, "--ckpt_path", "last"]
        return f"; go on with: pfl-lightning {shlex.join(words)}"
    return f" before there was a checkpoint; start again with: pfl-lightning {shlex.join(words)}"


def silence() -> None:
    """Keeps back what users of the command line can't act upon."""
    # Lightning's own use of a name that torch deprecates
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a log message is neither Lightning's tip to install a package of its own nor that all rounds are done."""
    said = record.getMessage()
    return not any(part in said for part in ("/litlogger/", "/litmodels/", "stopped: `max_epochs="))


if __name__ == "__main__":
    main()
