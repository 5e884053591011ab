"""The commands that run a federation, by Lightning's command line: ``pfl-lightning fit | validate | test | join``."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import ActionConfigFile, Namespace, get_loader, set_loader  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import pfl_lightning.data
import pfl_lightning.methods  # noqa: F401  # imported classes can be named without their module
from pfl_lightning.cli.commands import TRAINER
from pfl_lightning.cli.configs import resolved
from pfl_lightning.cli.default_server import with_server
from pfl_lightning.cli.exclusive import later_wins
from pfl_lightning.cli.nulls import refuse_nulls
from pfl_lightning.cli.parser_errors import sentence
from pfl_lightning.cli.usage import fail
from pfl_lightning.cli.yaml_text import check
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.trainer import FederatedTrainer

READER = get_loader("yaml")
"""The parser's own reader of files and values."""


def read(text: str) -> Any:
    """Return the content of a configuration, or of a value on the command line.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: if the text is none, or is refused.
    """
    check(text)
    try:
        return READER(text)
    except (ValueError, TypeError) as error:
        raise yaml.YAMLError(str(error)) from error


set_loader("yaml", read, (yaml.YAMLError,))


class Parser(LightningArgumentParser):
    """Lightning's parser, with errors in one sentence instead of pages of usage."""

    _file = ""

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Remembers which file is read, for errors in it."""
        self._file = f"{path}: "
        try:
            parsed = super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"the configuration is no text in UTF-8 ({error.reason} at byte {error.start}); save it as such")
        self._file = ""
        return parsed

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Finds packaged configurations and the server that a mean is of, and settles what excludes each other."""
        words = resolved(sys.argv[1:] if args is None else args)
        return super().parse_args(later_wins(with_server(words)), *rest, **kwargs)

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Ends the program with exit code 2, unless the parser is only trying."""
        if not self.exit_on_error:
            super().error(message, *args, **kwargs)
        self.complain(message)

    def complain(self, message: str) -> NoReturn:
        """Ends the program with a sentence.

        Args:
            message: the parser's.
        """
        fail(self._file + sentence(message, self.option_names()))

    def option_names(self) -> list[str]:
        """The options of this parser and of its subcommands, without dashes."""
        commands = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        parsers = [self, *(parser for choices in commands for parser in choices.values())]
        return list({name for parser in parsers for name in parser.own_names()})

    def own_names(self) -> list[str]:
        """The options of this parser, without dashes and without those of one letter."""
        strings = [string for action in self._actions for string in action.option_strings]
        return [string[2:] for string in strings if string.startswith("--") and not string.endswith("+")]


class SaveConfig(SaveConfigCallback):
    """Keeps the whole configuration as ``config.yaml`` in the run's folder, and gives it to the loggers."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Too early: a checkpoint that is refused afterwards must leave the run that it belongs to as it is."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, with the checkpoint in place; an evaluation saves nothing."""
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank zero."""
        if (folder := run_folder(trainer)) is None:
            return
        path = folder / "config.yaml"
        federation = cast(Federation, pl_module)
        if federation.changed:
            keep_earlier(Path(trainer.ckpt_path).parent.parent, folder, federation.round)  # type: ignore[arg-type]
        config = self.config.clone()
        # of the moment, and not of the run; the other commands, which take the file too, don't know it
        config.pop("resume_changed", None)
        self.parser.save(config, path, skip_unset=False, overwrite=True, multifile=False)
        for logger in trainer.loggers:
            logger.log_hyperparams(yaml.safe_load(path.read_text()))


def keep_earlier(source: Path, folder: Path, round: int) -> None:
    """Keeps the configuration that a resumed run had until now, under a name that says until which round it held.

    Args:
        source: the folder of the run that is resumed.
        folder: the folder of the run that goes on.
        round: rounds that are done.
    """
    config, kept = source / "config.yaml", folder / f"config_until_round_{round}.yaml"
    # one that is there stands: a run that was stopped in its next round has put its own in the other's place
    if config.exists() and not kept.exists():
        shutil.copy(config, kept)


class PflCLI(LightningCLI):
    """Lightning's command line with our classes."""

    made_parser: type[Parser] = Parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        words = sys.argv[1:] if (given := kwargs.get("args")) is None else given
        # the parser of a command takes a tenth of a second: only the one that is named is made
        self.commands = words[:1] if words and words[0] in TRAINER else list(TRAINER)
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser of our own; Lightning takes its class as an argument only since 2.5."""
        parser = self.made_parser(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A file of settings; may be given often.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Lets the task and the shape of the data flow to the client, and takes FedAvg where no method is named."""
        parser.set_defaults({"model": {"class_path": "FedAvg"}})
        for name in ("task", "input_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the named command, or all where none is named, with the arguments that the command line fills."""
        skip = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
        return dict.fromkeys(self.commands, skip)

    def before_instantiate_classes(self) -> None:
        """Refuses nulls before they end in an error of some other kind."""
        settings = self.config[self.subcommand]
        if not isinstance(settings.trainer, Namespace):
            raise MisconfigurationException(
                f"trainer={settings.trainer} must be settings of the Trainer, such as 'trainer: {{max_rounds: 10}}'; "
                "leave it out to take the defaults."
            )
        refuse_nulls(settings, type(self))
        refuse_nulls(settings.trainer, self.trainer_class, "trainer.")

    def before_validate(self) -> None:
        """An evaluation keeps no checkpoints, so the folder that it would keep them in is of no interest."""
        warnings.filterwarnings("ignore", message="The dirpath has changed")

    before_test = before_join = before_validate

    @classmethod
    def of(cls, args: list[str] | None) -> "PflCLI":
        """The command line with our classes and settings.

        Args:
            args: the arguments; None takes the process's own.
        """
        return cls(
            ClientModule,
            FederatedDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False, "overwrite": True},
            trainer_class=FederatedTrainer,
            parser_kwargs={"allow_abbrev": False, "description": "Personalized federated learning, on Lightning."},
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=args,
        )

    def _parse_ckpt_path(self) -> None:
        """Leaves the settings as they were given; Lightning would replace them by those in the checkpoint.

        A federation refuses a checkpoint of other settings itself.
        """


def main(args: list[str] | None) -> None:
    """Runs one of these commands.

    Args:
        args: the arguments; None takes the process's own.
    """
    PflCLI.of(args)
