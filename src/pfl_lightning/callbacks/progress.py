"""The terminal during a run: the banner at the start, and the progress of rounds."""

import math
import os
import shutil
import sys
import time
from html import escape
from importlib import import_module
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import FinalTest
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.tables import duration, labelled

REDRAWN = 0.1
"""Least number of seconds between two updates of the bar."""

SILENT = 300.0
"""Seconds after the last line from which any finished round gets a line, if stdout is no terminal."""

LENGTH = 20
"""Characters of the bar itself."""


def on_terminal() -> bool:
    """Return True if stdout is a terminal that can overwrite a line."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, where a later output can replace an earlier one."""
    # whoever runs in a kernel has imported IPython, so that other programs needn't have it installed
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class RunBar(ProgressBar):
    """Show round, clients, time left and the last validation in one line, over the whole run.

    Lightning's bar counts the batches of one epoch; here an epoch is a round. ``callbacks=TQDMProgressBar()`` or
    ``RichProgressBar()`` takes this bar's place. On a terminal the line is overwritten, and disappears at the end; a
    notebook has a bar, which stays full at the end; elsewhere, such as in a log file, a line is printed after the first
    round, after each tenth of the rounds, and every five minutes.
    """

    reads_updates = False

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._drawn = self._working = False
        self._looked = self._printed = -math.inf
        self._done = self._all = self._rounds = self._before = 0
        self._start = self._round_start = 0.0
        self._validation = ""
        self._shown: Any = None
        """The place of the bar in a notebook's output."""

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self._erase()
        super().print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        # earlier rounds of a resumed run say nothing about this machine, so the time left counts from here
        self._before = self._rounds = cast(Federation, pl_module).round
        self._start = time.perf_counter()
        # a second fit has a bar of its own, below its own cell
        self._shown = None

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Reset the count of clients."""
        self._working, self._done, self._all, self._round_start = True, 0, len(cohort), time.perf_counter()
        self._show(trainer)

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Count a client."""
        self._done += 1
        self._show(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count a round, once validated."""
        federation = cast(Federation, pl_module)
        self._working, self._rounds = False, federation.round
        monitor = federation.monitor
        value = federation.metrics.get(f"val/{monitor.metric}", math.nan)
        if not math.isnan(value):
            self._validation = f"validation {monitor.words} {monitor.written(value)}"
        if in_notebook():
            # the last round too, as this bar stays
            self._looked = -math.inf
            self._show(trainer)
        elif self._rounds == trainer.max_epochs:
            # Lightning prints a line of its own after the last round
            self._erase()
        else:
            self._show(trainer)
        if self._is_due(trainer):
            self._printed = time.perf_counter()
            print(", ".join(self._parts(trainer)), flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show that the final test is under way."""
        self._erase()
        # fast_dev_run has no final test
        if self._enabled and on_terminal() and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._draw("all rounds are done; testing")

    def on_final_test(self, trainer: Trainer, federation: Federation, tested: FinalTest) -> None:
        """Clear the line before the final table."""
        self._erase()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Clear the line before the error's message."""
        self._erase()

    def _is_due(self, trainer: Trainer) -> bool:
        """Return True if a finished round needs a line, on a stdout without terminal."""
        if not self._enabled or on_terminal() or in_notebook():
            return False
        # a line at each new tenth: ten lines for any number of rounds
        tenths = [10 * done // (trainer.max_epochs or 1) for done in (self._rounds - 1, self._rounds)]
        return tenths[0] < tenths[1] or time.perf_counter() - self._printed > SILENT

    def _parts(self, trainer: Trainer) -> list[str]:
        """Return the parts of the line: round, clients, time left, last validation."""
        rounds = trainer.max_epochs or 0
        parts = [f"round {self._rounds + self._working} of {rounds}"]
        if self._working:
            parts.append(f"clients {self._done} of {self._all}")
        done = self._rounds - self._before
        if done and self._rounds < rounds:
            now = time.perf_counter()
            # time of the round under way: no part of the mean, and already spent of the time left
            spent = now - self._round_start if self._working else 0.0
            mean = (now - spent - self._start) / done
            parts.append(f"{duration(max(0.0, mean * (rounds - self._rounds) - spent))} left")
        return [*parts, self._validation] if self._validation else parts

    def _show(self, trainer: Trainer) -> None:
        """Update the bar, unless stdout is no terminal or the last update is too recent."""
        now = time.perf_counter()
        # vectorised engines finish many clients within a millisecond, and a terminal is slow
        if not self._enabled or now - self._looked < REDRAWN or not (on_terminal() or in_notebook()):
            return
        self._looked = now
        part = self._done / max(1, self._all) if self._working else 0.0
        done = (self._rounds + part) / (trainer.max_epochs or 1)
        first, *others = self._parts(trainer)
        if in_notebook():
            self._display(done, ", ".join([first, *others]))
            return
        filled = int(LENGTH * done)
        self._draw(", ".join([f"{first} [{'=' * filled}{' ' * (LENGTH - filled)}]", *others]))

    def _draw(self, text: str) -> None:
        # asked for each time, as a window can be resized; a longer line would wrap and couldn't be overwritten
        width = shutil.get_terminal_size().columns - 1
        # return to the line's start, and clear what an earlier, longer text left behind
        sys.stdout.write(f"\r{text[:width]}\x1b[K")
        sys.stdout.flush()
        self._drawn = True

    def _display(self, done: float, text: str) -> None:
        """Draw the bar of a notebook in the place of the one before.

        Args:
            done: the share of the run, from 0 to 1.
            text: the words behind the bar.
        """
        drawn = import_module("IPython.display")
        bar = drawn.HTML(f'<progress value="{done:.4f}" max="1"></progress> <code>{escape(text)}</code>')
        if self._shown is None:
            self._shown = drawn.display(bar, display_id=True)
        else:
            self._shown.update(bar)

    def _erase(self) -> None:
        if self._drawn:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
        self._drawn = False


class RoundProgress(FederatedCallback):
    """Show the round and the number of finished clients on Lightning's TQDM or Rich bar, if the user asked for one."""

    reads_updates = False

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Reset the count of clients."""
        self._done, self._all = 0, len(cohort)
        # asked for once per round: Lightning searches all callbacks at each access
        self._bar = trainer.progress_bar_callback
        self._show(trainer, federation)

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Count a client."""
        self._done += 1
        self._show(trainer, federation)

    def _show(self, trainer: Trainer, federation: Federation) -> None:
        bar = self._bar
        if bar is None:
            return
        text = f"Round {federation.round + 1}/{trainer.max_epochs}, clients {self._done}/{self._all}"
        # the two bars have no common way to set the text
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            bar.train_progress_bar.set_description(text)
        elif isinstance(bar, RichProgressBar) and bar.progress and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, description=text, refresh=True)


class RunBanner(Callback):
    """Print method, data, net, rounds and the run's folder at the start of ``fit``.

    Stands in for Lightning's table of layers; ``callbacks=ModelSummary()`` brings the table back, and
    ``enable_model_summary=False`` prints neither.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the banner on rank 0."""
        if not trainer.is_global_zero:
            return
        federation = cast(Federation, pl_module)
        data, options, client = federation.data, federation.options, federation.client
        clients = data.num_clients
        samples = sum(federation.sizes(range(clients), "train").values())
        name, server = type(client).__name__, federation.aggregator.name
        nets = []
        for module in federation.architectures:
            sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.net.parameters()]  # type: ignore[union-attr]
            frozen = sum(size for size, trained in sizes if not trained)
            note = f", of which {frozen:,} are frozen" if frozen else ""
            nets.append(f"{type(module.net).__name__}, {sum(size for size, _ in sizes):,} parameters{note}")
        lines = [
            ("method", f"{federation.method} (client {name}, aggregator {server})"),
            ("data", f"{type(data).__name__}, {clients} clients with {samples:,} training samples"),
            *data.head_lines,
            ("net", "; ".join(dict.fromkeys(nets))),
            ("rounds", f"{trainer.max_epochs}, each of {options.updates(clients)} clients"),
        ]
        if federation.round:
            # a resumed run says so first: a wrong --ckpt_path shows here, not after hours
            lines.append(("goes on", f"behind round {federation.round}"))
        if folder := run_folder(trainer):
            lines.append(("files", str(folder)))
        print(labelled(lines) + "\n", flush=True)
