"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import math
import os
import shutil
import sys
import time
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.runs.tables import duration

REDRAWN = 0.1
"""Seconds between two looks of the bar."""

SILENT = 300.0
"""Seconds after which a round is told of where there is no terminal; so is each tenth of the rounds, and the first."""

LENGTH = 20
"""Characters of the bar itself."""


def on_terminal() -> bool:
    """Whether what is printed can be printed over."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class RunBar(ProgressBar):
    """Shows the round of all rounds, the clients done in it, the time left and the last validation, in one line.

    It takes the place of Lightning's bar, which is of an epoch, unless a user asks for that by
    ``callbacks=TQDMProgressBar()`` or the like. On a terminal the line is drawn anew, and goes when the run is done;
    elsewhere a line is printed after the first round and each tenth of all rounds, and every five minutes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._drawn = self._working = False
        self._looked = self._told = -math.inf
        self._done = self._all = self._rounds = self._before = 0
        self._start = self._round_start = 0.0
        self._validation = ""

    def enable(self) -> None:
        """Shows it."""
        self._enabled = True

    def disable(self) -> None:
        """Shows nothing, as on all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        self._erase()
        super().print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock, also that of a resumed run, whose earlier rounds tell nothing of this machine."""
        self._before = self._rounds = cast(Federation, pl_module).round
        self._start = time.perf_counter()

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Starts to count clients."""
        self._working, self._done, self._all, self._round_start = True, 0, len(cohort), time.perf_counter()
        self._show(trainer)

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Counts a client."""
        self._done += 1
        self._show(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts a round, which has been validated."""
        federation = cast(Federation, pl_module)
        self._working, self._rounds = False, federation.round
        monitor = federation.monitor
        value = federation.metrics.get(f"val/{monitor.metric}", math.nan)
        if not math.isnan(value):
            self._validation = f"validation {monitor.words} {monitor.written(value)}"
        if self._rounds == trainer.max_epochs:
            # Lightning says something at this point
            self._erase()
        else:
            self._show(trainer)
        if self._is_due(trainer):
            self._told = time.perf_counter()
            print(", ".join(self._parts(trainer)), flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says what is still done."""
        self._erase()
        if self._enabled and on_terminal() and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._draw("all rounds are done; testing")

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Goes before the table comes."""
        self._erase()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the line to what is said of it."""
        self._erase()

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether a round that is done is told of where there is no terminal."""
        if not self._enabled or on_terminal():
            return False
        tenths = [10 * done // (trainer.max_epochs or 1) for done in (self._rounds - 1, self._rounds)]
        return tenths[0] < tenths[1] or time.perf_counter() - self._told > SILENT

    def _parts(self, trainer: Trainer) -> list[str]:
        """What is known: the round, its clients, the time left, the last validation."""
        rounds = trainer.max_epochs or 0
        parts = [f"round {self._rounds + self._working} of {rounds}"]
        if self._working:
            parts.append(f"clients {self._done} of {self._all}")
        done = self._rounds - self._before
        if done and self._rounds < rounds:
            now = time.perf_counter()
            spent = now - self._round_start if self._working else 0.0
            mean = (now - spent - self._start) / done
            parts.append(f"{duration(max(0.0, mean * (rounds - self._rounds) - spent))} left")
        return [*parts, self._validation] if self._validation else parts

    def _show(self, trainer: Trainer) -> None:
        """Draws the bar, if there is a terminal and it was not drawn just now."""
        now = time.perf_counter()
        if not self._enabled or now - self._looked < REDRAWN or not on_terminal():
            return
        self._looked = now
        part = self._done / max(1, self._all) if self._working else 0.0
        filled = int(LENGTH * (self._rounds + part) / (trainer.max_epochs or 1))
        first, *others = self._parts(trainer)
        self._draw(", ".join([f"{first} [{'=' * filled}{' ' * (LENGTH - filled)}]", *others]))

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        # to the line's start, the text, and nothing behind it
        sys.stdout.write(f"\r{text[:width]}\x1b[K")
        sys.stdout.flush()
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
        self._drawn = False
