"""The state of a deployment for its operator: a line per round, and a file for ``pfl-lightning status``."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.callbacks.checkpoints import LastCheckpoint
from pfl_lightning.federation.federation import Federation
from pfl_lightning.flower.link import Link
from pfl_lightning.flower.remote import Remote
from pfl_lightning.runs.deployment_status import waits, write_status
from pfl_lightning.stopping import Stopped

LONG = 60.0
"""Seconds of a phase from which a line says whom it waits for, and once more each time they have doubled."""
REWRITTEN = 2.0
"""Least number of seconds between two writings of the file without news."""


class Progress(FederatedCallback):
    """Print a line per round, and write the state of sites and rounds into a file.

    Args:
        link: the connection to the sites.
        path: the file; None writes none.
        checkpoint: the checkpoint with which the run goes on; None for a new run.
    """

    def __init__(self, link: Link, path: Path | None = None, checkpoint: str | None = None) -> None:
        self.link, self.path = link, path
        self._state: dict[str, Any] = {"state": "waiting", "round": 0, "rounds": None, "reason": "", "last": {}}
        # a server killed again before its first round must not have the run begin anew
        self._state["checkpoint"] = checkpoint
        self._cohort: list[int] = []
        self._begun = self._written = -math.inf
        self._present, self._next = -1, LONG
        self._parent = os.getppid()
        link.on_look = self._look

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Write inside this context how the run has ended."""
        self._write()
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, (Stopped, KeyboardInterrupt, SystemExit))
            reason = " ".join(str(error).split())[:500]
            # Flower then interrupts the app by a signal that nobody has sent
            if stopped and os.getppid() != self._parent:
                reason = "the SuperLink has ended, or its flower-superexec, and the server's app with it"
            self._write(state="stopped" if stopped else "failed", reason=reason)
            raise
        # not in a `finally`: a run that ends early has another state
        self._write(state="finished")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write that the rounds begin."""
        federation = cast(Federation, pl_module)
        folder = str(trainer.log_dir or "")
        kept = [
            callback for callback in cast(Any, trainer).checkpoint_callbacks if isinstance(callback, LastCheckpoint)
        ]
        last = next((str(Path(callback.dirpath, "last.ckpt")) for callback in kept if callback.dirpath), None)
        self._write(state="running", round=federation.round, rounds=trainer.max_epochs, run=folder, checkpoint=last)

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Start the round's clock."""
        self._cohort, self._begun = cohort, time.monotonic()
        self.link.trained.clear()
        self.link.asked_again.clear()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the round's line, once evaluated, and write the file."""
        federation = cast(Federation, pl_module)
        label, engine = self.link.label, cast(Remote, federation.engines[0])
        row, monitor = federation.metrics, federation.monitor
        absent = [int(client) for client in str(row["absent"]).split()]
        refused = {label(client): reason for client, reason in sorted(engine.refusals.items())}
        answered = len(set(self._cohort).difference(absent, engine.refusals))
        parts = [f"{answered} of {len(self._cohort)} clients answered"]
        if absent:
            parts.append(f"absent {', '.join(map(label, absent))}")
        parts += [f"refused {client}: {reason}" for client, reason in refused.items()]
        if "train/loss" in row:
            parts.append(f"loss {row['train/loss']:.4g}")
        if not math.isnan(value := row.get(f"val/{monitor.metric}", math.nan)):
            parts.append(f"validation {monitor.words} {monitor.written(value)}")
        if took := self.link.trained:
            slowest = max(took, key=lambda client: took[client])
            parts.append(f"slowest client {label(slowest)} after {took[slowest]:.1f} s")
        if again := sorted(self.link.asked_again):
            parts.append(f"asked again {', '.join(map(label, again))}")
        line = f"round {federation.round} of {trainer.max_epochs}, {time.monotonic() - self._begun:.1f} s: "
        line += "; ".join(parts)
        # flushed, as Flower passes on what an app prints, and its pipe is no terminal
        print(line, flush=True)
        last = {"line": line, "absent": [label(client) for client in absent], "refused": refused}
        self._write(round=federation.round, last=last)

    def _look(self) -> None:
        """Write the file now and then while the server waits, and print how many clients have a site at the start."""
        present = len(self.link.present)
        if self._state["state"] == "waiting" and present != self._present:
            self._present = present
            print(f"waiting for sites: {present} of {self.link.clients} clients have one", flush=True)
        round, seconds, clients = self.link.waiting()
        if seconds < LONG:
            self._next = LONG
        elif seconds >= self._next and clients:
            self._next = 2 * seconds
            print(waits(round, seconds, [self.link.label(client) for client in clients]), flush=True)
        if time.monotonic() - self._written > REWRITTEN:
            self._write()

    def _write(self, **news: Any) -> None:
        """Write the file, with some entries new."""
        self._state |= news
        self._written = time.monotonic()
        if self.path is None:
            return
        sites = self.link.sites()
        served = {client for site in sites for client in site["clients"]}
        every = [self.link.label(client) for client in range(self.link.clients)]
        round, seconds, clients = self.link.waiting()
        now = {"round": round, "since": time.time() - seconds, "clients": [every[client] for client in clients]}
        late = {
            every[client]: f"answers {self.link.lateness(rounds)}" for client, rounds in sorted(self.link.late.items())
        }
        state = {
            **self._state,
            "now": now if clients else {},
            "late": late,
            "sites": sites,
            "without_site": [client for client in every if client not in served],
            "refused_sites": [
                {"node": str(node), "clients": self.link.claims.get(node, ""), "reason": reason}
                for node, reason in self.link.refusals.items()
            ],
        }
        # a full disk or a removed folder must not end the rounds
        with suppress(OSError):
            write_status(self.path, state)
