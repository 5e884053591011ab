"""The command line: ``pfl-lightning fit | validate | test``."""

import sys
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import pfl_lightning.callbacks
import pfl_lightning.data
import pfl_lightning.methods  # noqa: F401  # imported classes can be named without their module
from pfl_lightning.client import FedAvg
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.federation import TrainingDiverged
from pfl_lightning.trainer import FederatedTrainer


class Parser(LightningArgumentParser):
    """Lightning's parser, with errors in one sentence instead of pages of usage."""

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Ends the program with exit code 2, unless the parser is only trying."""
        if not self.exit_on_error:
            super().error(message, *args, **kwargs)
        print(f"pfl-lightning: error: {message}", file=sys.stderr)
        sys.exit(2)


class SaveConfig(SaveConfigCallback):
    """Keeps the whole configuration as ``config.yaml`` in the run's folder, and gives it to the loggers."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank zero, before the first round."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, folder / "config.yaml", skip_none=False, overwrite=True, multifile=False)


class PflCLI(LightningCLI):
    """Lightning's command line with our classes."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Lets the shape of the data flow to the net."""
        for name in ("num_classes", "input_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What the Trainer can do with a federation, and the arguments that the command line fills."""
        skip = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
        return {"fit": skip, "validate": skip, "test": skip}


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: the arguments; None takes the process's own.
    """
    try:
        PflCLI(
            FedAvg,
            FederatedDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False, "overwrite": True},
            trainer_class=FederatedTrainer,
            parser_class=Parser,
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=args,
        )
    except (MisconfigurationException, TrainingDiverged) as error:
        print(f"pfl-lightning: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
