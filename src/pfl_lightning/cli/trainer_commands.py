"""The commands ``fit``, ``validate``, ``test`` and ``join``, run by Lightning's command line."""

import inspect
import shutil
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import ActionConfigFile, Namespace, get_loader, set_loader  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import pfl_lightning.data
import pfl_lightning.methods  # noqa: F401  # imported classes can be named without their module
from pfl_lightning import aggregators
from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.class_names import own_server
from pfl_lightning.cli.commands import FILLED, TRAINER
from pfl_lightning.cli.parser_errors import sentence
from pfl_lightning.cli.usage import fail
from pfl_lightning.cli.yaml_text import check
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.federation.federation import Federation
from pfl_lightning.internals.of_jsonargparse import commands_of, name_paths, options_of
from pfl_lightning.nets.inputs import InputShape
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.trainer import FederatedTrainer

READER = get_loader("yaml")
"""jsonargparse's own YAML reader, for files and values."""


def read(text: str) -> Any:
    """Return the content of a configuration, or of a value on the command line.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: if the text isn't YAML, or is refused.
    """
    check(text)
    try:
        return READER(text)
    # the reader lets errors of YAML's constructors through, and the parser catches YAMLError alone
    except (ValueError, TypeError) as error:
        raise yaml.YAMLError(str(error)) from error


# replaces the reader in all parsers of the process: files, values and settings below both
set_loader("yaml", read, (yaml.YAMLError,))
# a run's config.yaml has server sides by the names that users import
name_paths({f"{aggregators.__name__}.{name}": getattr(aggregators, name) for name in aggregators.__all__})


class Parser(LightningArgumentParser):
    """Lightning's parser with one-sentence errors in place of pages of usage."""

    _file = ""

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration, and keep the file's name for the sentence of an error."""
        self._file = f"{path}: "
        try:
            parsed = super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"the configuration is no text in UTF-8 ({error.reason} at byte {error.start}); save it as such")
        # not in a finally: an error's sentence is built later and still needs the name
        self._file = ""
        return parsed

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Exit with code 2 and one sentence."""
        # jsonargparse tries the types of a Union with parsers that must raise
        if not self.exit_on_error:
            super().error(message, *args, **kwargs)
        self.complain(message)

    def complain(self, message: str) -> NoReturn:
        """Print one sentence and exit.

        Args:
            message: the parser's message.
        """
        fail(self._file + sentence(message, self.option_names()))

    def option_names(self) -> list[str]:
        """Return the options of this parser and of all subcommands, without dashes."""
        parsers = [self, *commands_of(self).values()]
        return list({name for parser in parsers for name in parser.own_names()})

    def own_names(self) -> list[str]:
        """Return this parser's options with two dashes, without the dashes."""
        strings = [string for option in options_of(self) for string in option.option_strings]
        # "--name+" is jsonargparse's way to append to a list, not another option
        return [string[2:] for string in strings if string.startswith("--") and not string.endswith("+")]


class SaveConfig(SaveConfigCallback):
    """Save the whole configuration as ``config.yaml`` in the run's folder, and log the settings."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: at this moment the checkpoint isn't checked yet.

        A checkpoint that is refused must leave the folder of its run unchanged.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the configuration once the checkpoint is loaded; only ``fit`` saves."""
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write ``config.yaml`` and log the settings; called on rank 0 only."""
        if (folder := run_folder(trainer)) is None:
            return
        path = folder / "config.yaml"
        federation = cast(Federation, pl_module)
        # resumed with other settings: config.yaml alone would claim that all rounds ran with the new ones
        if federation.changed:
            keep_earlier(Path(trainer.ckpt_path).parent.parent, folder, federation.round)  # type: ignore[arg-type]
        config = self.config.clone()
        # resume_changed is about this one start, and other commands, which read config.yaml too, don't have the option
        config.pop("resume_changed", None)
        self.parser.save(config, path, skip_unset=False, overwrite=True, multifile=False)
        for logger in trainer.loggers:
            logger.log_hyperparams(yaml.safe_load(path.read_text(encoding="utf-8")))


def keep_earlier(source: Path, folder: Path, round: int) -> None:
    """Copy a resumed run's old configuration to ``config_until_round_N.yaml``.

    Args:
        source: folder of the run that is resumed.
        folder: folder of the run that continues, often the same.
        round: number of finished rounds.
    """
    config, kept = source / "config.yaml", folder / f"config_until_round_{round}.yaml"
    # an existing copy stays: if a resumed run stopped within its first round, config.yaml is already the new one
    if config.exists() and not kept.exists():
        shutil.copy(config, kept)


class PflCLI(LightningCLI):
    """Lightning's command line with the classes of this package."""

    made_parser: type[Parser] = Parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        command = kwargs["args"].command
        # the parser of a command takes a tenth of a second: only the one that is named is made
        self.commands = [command] if command in TRAINER else list(TRAINER)
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return `Parser`; Lightning takes the class of the parser as an argument only since 2.5."""
        parser = self.made_parser(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A file of settings; may be given often.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the task and the input shape of the data to the client module, and set the default model, FedAvg."""
        parser.set_defaults({"model": {"class_path": "FedAvg"}})
        # on instantiation: an own dataset may know both only after it has looked at its files
        parser.link_arguments("data.task", "model.init_args.task", apply_on="instantiate")
        # as plain values: the parser would make a tuple of any shape, without the example of inputs of several tensors
        parser.link_arguments(
            "data.input_shape",
            "model.init_args.input_shape",
            compute_fn=lambda shape: InputShape.of(shape).plain(),
            apply_on="instantiate",
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the named command, or all if none is named, each with the arguments filled by the command line."""
        return dict.fromkeys(self.commands, FILLED)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse a `CommandLine`, after completing it."""
        self.config = parser.parse_args(args.completed(own_server))

    def before_instantiate_classes(self) -> None:
        """Refuse nulls early, in place of an unrelated error later."""
        settings = self.config[self.subcommand]
        if not isinstance(settings.trainer, Namespace):
            raise MisconfigurationException(
                f"trainer={settings.trainer} must be settings of the Trainer, such as 'trainer: {{max_rounds: 10}}'; "
                "leave it out to take the defaults."
            )
        refuse_nulls(settings, type(self))
        refuse_nulls(settings.trainer, self.trainer_class, "trainer.")
        own = getattr(settings.data, "init_args", None)
        # the model is made for the data's inputs, and late rows alone may have fewer categories than the federation
        if self.subcommand == "join" and own is not None and getattr(own, "fitted", "") is None:
            if settings.ckpt_path is not None and Path(settings.ckpt_path).is_file():
                own.fitted = str(settings.ckpt_path)

    def before_validate(self) -> None:
        """Silence Lightning's warning about another folder for checkpoints: an evaluation saves none."""
        warnings.filterwarnings("ignore", message="The dirpath has changed")

    before_test = before_join = before_validate

    @classmethod
    def of(cls, line: CommandLine) -> "PflCLI":
        """Run a command line.

        Args:
            line: the command line.
        """
        return cls(
            ClientModule,
            FederatedDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False, "overwrite": True},
            trainer_class=FederatedTrainer,
            parser_kwargs={
                # `python -m pfl_lightning` would call itself __main__.py
                "prog": "pfl-lightning",
                # a prefix that is unique today becomes ambiguous with the next option
                "allow_abbrev": False,
                "description": "Personalized federated learning, on Lightning.",
            },
            # runs are reproducible without asking
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # the optimizer is a setting of the client module, which makes one per client
            auto_configure_optimizers=False,
            args=line,
        )

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would replace the given settings by the checkpoint's.

        The federation itself compares both, and refuses a checkpoint with other settings.
        """


def main(line: CommandLine) -> None:
    """Run one of these commands.

    Args:
        line: the command line.
    """
    PflCLI.of(line)


def refuse_nulls(settings: Namespace, made: Any, prefix: str = "") -> None:
    """Refuse null for each argument without None among the valid values.

    jsonargparse accepts null for any type; without this check a run ends in a TypeError far from the setting.

    Args:
        settings: arguments by name; values may be classes with arguments of their own.
        made: the class or function that takes the arguments.
        prefix: put before names in the message, such as ``trainer.``.

    Raises:
        MisconfigurationException: for the first such argument.
    """
    for null in nulls(settings, made, prefix):
        raise MisconfigurationException(f"{null} is null; give it a value, or leave it out.")


def nulls(settings: Namespace, made: Any, prefix: str) -> Iterator[str]:
    """Yield dotted names of arguments wrongly None, at any depth."""
    for argument, value in vars(settings).items():
        if value is None and not may_be_null(made, argument):
            yield prefix + argument
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Namespace) and "class_path" in each:
                yield from of_class(each, f"{prefix}{argument}.")


def of_class(spec: Namespace, prefix: str) -> Iterator[str]:
    """Yield such names below a class given with arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError):  # a nested class, which can't be imported by its path
        return iter(())
    return nulls(spec["init_args"], made, prefix) if "init_args" in spec else iter(())


def may_be_null(made: Any, argument: str) -> bool:
    """Return True if an argument's annotation or default allows None.

    >>> import torch
    >>> may_be_null(torch.optim.SGD, "foreach"), may_be_null(torch.optim.SGD, "lr")
    (True, False)

    A class's own signature counts before its bases', as a subclass may narrow an argument.

    Args:
        made: a class or function.
        argument: the argument's name.
    """
    for kind in getattr(made, "__mro__", [made]):
        init = vars(kind).get("__init__") if inspect.isclass(kind) else kind
        known = inspect.signature(init).parameters if inspect.isroutine(init) else {}
        if argument in known:
            kept = known[argument]
            said = str(kept.annotation)
            # annotations can be strings under `from __future__ import annotations`, so their text is searched
            return kept.default is None or kept.annotation is kept.empty or "None" in said or "Optional" in said
    # an argument that no signature names goes through **kwargs, of which nothing is known
    return True
