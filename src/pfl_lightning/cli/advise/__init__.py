"""Advise which method suits which client, by a small tournament within a budget: ``pfl-lightning advise``."""

from pfl_lightning.cli.advise.command import main

__all__ = ["main"]
