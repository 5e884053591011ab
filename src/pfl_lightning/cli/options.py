"""Print the options of the Trainer's commands for ``options.json``: ``python -m pfl_lightning.cli.options``."""

import json
import re

from pfl_lightning.cli.commands import TRAINER
from pfl_lightning.cli.load_config import new_parser
from pfl_lightning.cli.refusals import Options, installed
from pfl_lightning.internals.of_jsonargparse import commands_of, options_of, type_of
from pfl_lightning.trainer import MEANINGLESS

PLAIN = re.compile(r"(typing\.|Optional|Union|Literal\[[^]]*\]|NoneType|None|int|float|str|bool|[\[\],|' ]|<class|>)*")
"""Types whose values have no settings of their own, as jsonargparse writes types."""


def measured() -> Options:
    """Return the options of the installed parser, with the installed versions."""
    parser = new_parser()
    commands = commands_of(parser)
    taken = {command: set(commands[command].own_names()) for command in TRAINER}
    names = sorted(parser.option_names())
    options = [option for command in TRAINER for option in options_of(commands[command])]
    return Options(
        versions=installed(),
        commands={name: " ".join(command for command in TRAINER if name in taken[command]) for name in names},
        open=sorted({option.dest for option in options if not PLAIN.fullmatch(str(type_of(option)))}),
        # the parser refuses these with advice, such as "means nothing in a federation"; a suggestion would mislead
        explained=sorted({f"trainer.{name}" for name in MEANINGLESS} - set(names)),
    )


def text(options: Options) -> str:
    """Return options in the format of ``options.json``."""
    return json.dumps(options._asdict(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(measured()), end="")
