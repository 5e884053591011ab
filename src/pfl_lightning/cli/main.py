"""The command line: ``pfl-lightning fit | validate | test | join | compare | configs | methods``."""

import logging
import shlex
import shutil
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only

import pfl_lightning.data
import pfl_lightning.methods  # noqa: F401  # imported classes can be named without their module
from pfl_lightning.cli.commands import OTHERS
from pfl_lightning.cli.configs import resolved
from pfl_lightning.cli.errors import mistake
from pfl_lightning.cli.exclusive import later_wins
from pfl_lightning.cli.nulls import refuse_nulls
from pfl_lightning.cli.parser_errors import sentence
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.stopping import Stopped, stoppable
from pfl_lightning.trainer import FederatedTrainer

DESCRIPTION = """\
Personalized federated learning, on Lightning. There are three more commands than below: 'compare' makes one table of
many methods and seeds, 'methods' prints which methods there are, and 'configs' which configurations come with the
package; 'pfl-lightning compare --help' says more."""


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
        """Finds packaged configurations, and lets the later one hold of settings that exclude each other."""
        return super().parse_args(later_wins(resolved(sys.argv[1:] if args is None else args)), *rest, **kwargs)

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Ends the program with exit code 2, unless the parser is only trying."""
        if not self.exit_on_error:
            super().error(message, *args, **kwargs)
        fail(self._file + sentence(message, self.option_names()))

    def option_names(self) -> list[str]:
        """The options of this parser and of its subcommands, without dashes."""
        commands = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        parsers = [self, *(parser for choices in commands for parser in choices.values())]
        strings = {string for parser in parsers for action in parser._actions for string in action.option_strings}
        return [string.lstrip("-") for string in strings if not string.endswith("+")]


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
        kept: dict[str, Any] = {"overwrite": True, "multifile": False}
        try:
            self.parser.save(self.config, path, skip_unset=False, **kept)
        except TypeError:
            # its name before jsonargparse 4.49
            self.parser.save(self.config, path, skip_none=False, **kept)
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

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser of our own; Lightning takes its class as an argument only since 2.5."""
        parser = Parser(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A file of settings; may be given often.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Lets the task and the shape of the data flow to the client, and takes FedAvg where no method is named."""
        parser.set_defaults({"model": {"class_path": "FedAvg"}})
        for name in ("task", "input_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What the Trainer can do with a federation, and the arguments that the command line fills."""
        skip = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
        return {"fit": skip, "validate": skip, "test": skip, "join": skip}

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
            parser_kwargs={"allow_abbrev": False, "description": DESCRIPTION},
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
            if words and words[0] in OTHERS:
                sys.exit(import_module(OTHERS[words[0]]).main(words[1:]))
            PflCLI.of(args)
    except Stopped as stop:
        rank_zero_only(print)(f"pfl-lightning: stopped by {stop.signal}{way_on(words, stop)}", file=sys.stderr)
        raise
    except Exception as error:
        if reason := mistake(error):
            fail(reason)
        raise


def fail(reason: str) -> NoReturn:
    """Ends the program with a sentence and exit code 2."""
    print(f"pfl-lightning: error: {reason}", file=sys.stderr)
    sys.exit(2)


def way_on(words: list[str], stop: Stopped) -> str:
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
    # Lightning's recommendation of another product, at every start
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_advertisement)


def is_no_advertisement(record: logging.LogRecord) -> bool:
    """Whether a log message isn't Lightning's tip to install a package for its platform."""
    return "/litlogger/" not in record.getMessage() and "/litmodels/" not in record.getMessage()


if __name__ == "__main__":
    main()
