"""Compare methods over seeds on one data configuration: ``pfl-lightning compare``."""

from pfl_lightning.cli.compare.command import main

__all__ = ["main"]
