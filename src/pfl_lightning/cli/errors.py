"""Turn exceptions caused by settings into one sentence, and leave bugs with their traceback.

Settings outside the valid range pass the parser; the error comes from the class that first uses the setting.
"""

import errno
import re
from collections.abc import Iterator
from traceback import walk_tb

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.usage import one_line
from pfl_lightning.engines.errors import ClientsLost
from pfl_lightning.federation.messages import TrainingDiverged

OF_SETTINGS = {
    "lightning.fabric.utilities.seed": "seed_everything",
    "lightning.fabric.": "trainer",
    "lightning.pytorch.accelerators.": "trainer.devices",
    "lightning.pytorch.callbacks.timer": "trainer.max_time",
    "lightning.pytorch.callbacks.": "trainer.callbacks",
    "lightning.pytorch.loggers.": "trainer.logger",
    "lightning.pytorch.strategies.": "trainer.strategy",
    "lightning.pytorch.trainer.": "trainer",
    "torch.optim.": "model.optimizer",
}
"""The setting behind an error, by the module that raised the error; the first matching prefix counts."""

PLACE = "take another place, or let this one be read and written"
ADVICE = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EACCES: PLACE,
    errno.EPERM: PLACE,
    errno.EROFS: PLACE,
    errno.EIO: PLACE,
    errno.EFBIG: "let files be larger (ulimit -f)",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
}
"""Advice for errors of the operating system that are never a bug."""


def mistake(error: BaseException) -> str | None:
    """Return the sentence for an error caused by settings, or None for a bug.

    Args:
        error: the exception that ended the run.
    """
    # the original error shows which module refused the value; jsonargparse and Lightning raise their own from it
    root = list(causes(error))[-1]
    for cause in causes(error):
        if isinstance(cause, (MisconfigurationException, TrainingDiverged, ClientsLost)):
            return one_line(about(cause))
        # dict_kwargs bypass the parser's checks, so a wrong name fails in the class; any other TypeError is a bug
        unseen = re.search(r"__init__\(\) (got an unexpected keyword argument '\w+')[\s\S]* dict_kwargs=", str(cause))
        if unseen and raised_in(cause).startswith("jsonargparse."):
            return f"dict_kwargs: a class {unseen[1]}; leave it out."
        # compared by name, as wandb needn't be installed
        if type(cause).__module__.startswith("wandb.errors"):
            reason = str(cause).splitlines()[0].removesuffix(".")
            return f"WandbLogger: {reason}; or log on this machine alone, by --trainer.logger.offline true."
    # a missing file or a refused connection can be a bug, so other numbers keep their traceback
    if isinstance(root, OSError) and root.errno in ADVICE:
        where = f"{root.filename}: " if isinstance(root.filename, str) else ""
        return one_line(f"{where}{root.strerror}; {ADVICE[root.errno]}.")
    # the same ValueError is a mistake in settings if an optimizer's constructor raised it, and a bug elsewhere
    return (
        one_line(about(root))
        if isinstance(root, (ValueError, OverflowError, RuntimeError, ImportError)) and owner(root)
        else None
    )


def about(error: BaseException) -> str:
    """Return an error's message, preceded by the setting unless the message begins with a setting."""
    # messages of this package begin with "setting=value" or "setting:"
    said, setting = str(error), owner(error)
    return said if setting is None or re.match(r"[\w.]+[=:]", said) else f"{setting}: {said}"


def owner(error: BaseException) -> str | None:
    """Return the setting behind an error, by the module where the error was raised, or None."""
    module = raised_in(error)
    return next((setting for start, setting in OF_SETTINGS.items() if module.startswith(start)), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the cause, the cause of the cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def raised_in(error: BaseException) -> str:
    """Return the name of the module where an error was raised."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""
