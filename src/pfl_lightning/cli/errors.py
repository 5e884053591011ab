"""What users get wrong, in one sentence: the errors of the classes that the command line makes and runs."""

import errno
import re
from collections.abc import Iterator
from traceback import walk_tb

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.usage import one_line
from pfl_lightning.engines.errors import ClientsLost
from pfl_lightning.federation.accepted_updates import TrainingDiverged

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
"""Modules whose complaints are about settings, and which: they are raised where a setting is first used."""

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
"""What to do about those of the system's errors that are never a bug."""


def mistake(error: BaseException) -> str | None:
    """The sentence of an error that a user's settings caused; None for one that is a bug.

    Args:
        error: what ended the run.
    """
    root = list(causes(error))[-1]
    for cause in causes(error):
        if isinstance(cause, (MisconfigurationException, TrainingDiverged, ClientsLost)):
            return one_line(about(cause))
        # arguments that the parser hands on unseen; without them it is the class's own mistake
        unseen = re.search(r"__init__\(\) (got an unexpected keyword argument '\w+')[\s\S]* dict_kwargs=", str(cause))
        if unseen and raised_in(cause).startswith("jsonargparse."):
            return f"dict_kwargs: a class {unseen[1]}; leave it out."
        if type(cause).__module__.startswith("wandb.errors"):
            reason = str(cause).splitlines()[0].removesuffix(".")
            return f"WandbLogger: {reason}; or log on this machine alone, by --trainer.logger.offline true."
    if isinstance(root, OSError) and root.errno in ADVICE:
        where = f"{root.filename}: " if isinstance(root.filename, str) else ""
        return one_line(f"{where}{root.strerror}; {ADVICE[root.errno]}.")
    return (
        one_line(about(root))
        if isinstance(root, (ValueError, OverflowError, RuntimeError, ImportError)) and owner(root)
        else None
    )


def about(error: BaseException) -> str:
    """What an error says, behind the setting that it is about where it doesn't say so itself."""
    said, setting = str(error), owner(error)
    return said if setting is None or re.match(r"[\w.]+[=:]", said) else f"{setting}: {said}"


def owner(error: BaseException) -> str | None:
    """The setting that an error is about by the module that raised it, if there is one."""
    module = raised_in(error)
    return next((setting for start, setting in OF_SETTINGS.items() if module.startswith(start)), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def raised_in(error: BaseException) -> str:
    """Name of the module in which an error was raised."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""
