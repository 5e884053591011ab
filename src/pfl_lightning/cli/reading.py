"""A run's configuration, read without a run: the classes that the command line would make."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

from pfl_lightning.cli.trainer_commands import PflCLI
from pfl_lightning.trainer import FederatedTrainer

Check = Callable[[Mapping[str, Any]], None]
"""Looks at settings before anything is made of them."""


class Configured(PflCLI):
    """The command line of ``fit``, which makes all classes and runs nothing.

    It has the ``trainer``, the ``model``, the ``datamodule`` and the ``aggregator``.
    """

    trainer: FederatedTrainer
    check: Check | None = None

    def before_instantiate_classes(self) -> None:
        """Looks at the settings."""
        super().before_instantiate_classes()
        if self.check is not None:
            self.check(self.config[self.subcommand].as_dict())

    def _run_subcommand(self, subcommand: str) -> None:
        self.aggregator = self._get(self.config_init, "aggregator")


def configured(args: list[str], check: Check | None = None) -> Configured:
    """What a command line would run.

    Args:
        args: the arguments of ``pfl-lightning fit``.
        check: looks at the settings before classes are made.
    """
    # of the arguments of the process, which are those of another program
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    kind: Any = type("Configured", (Configured,), {"check": staticmethod(check) if check else None})
    return cast(Configured, kind.of(["fit", *args]))
