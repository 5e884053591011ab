"""Writes down the options of the Trainer's commands: ``python -m pfl_lightning.cli.options`` prints them."""

import json
import re

from pfl_lightning.cli.commands import TRAINER
from pfl_lightning.cli.reading import new_parser
from pfl_lightning.cli.refusals import Options, installed
from pfl_lightning.trainer import MEANINGLESS

PLAIN = re.compile(r"(typing\.|Optional|Union|Literal\[[^]]*\]|NoneType|None|int|float|str|bool|[\[\],|' ]|<class|>)*")
"""Types of values that have no settings of their own."""


def measured() -> Options:
    """The options that the parser has."""
    parser = new_parser()
    (commands,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    taken = {command: set(commands[command].own_names()) for command in TRAINER}
    names = sorted(parser.option_names())
    actions = [action for command in TRAINER for action in commands[command]._actions]
    return Options(
        versions=installed(),
        commands={name: " ".join(command for command in TRAINER if name in taken[command]) for name in names},
        open=sorted({action.dest for action in actions if not PLAIN.fullmatch(str(getattr(action, "_typehint", "")))}),
        explained=sorted({f"trainer.{name}" for name in MEANINGLESS} - set(names)),
    )


def text(options: Options) -> str:
    """Options as they are stored."""
    return json.dumps(options._asdict(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(measured()), end="")
