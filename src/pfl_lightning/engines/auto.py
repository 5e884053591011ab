"""The choice of an engine by the device, the net and the cores."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import distributed
from torch.nn.modules.conv import _ConvNd

from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData
from pfl_lightning.engines.base import Engine, Evaluated, Outcome, Task
from pfl_lightning.engines.processes import Processes, cores
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vectorised import Unvectorisable, Vectorised

LARGE_ON_CPU = 100_000
"""Parameters from which on a net's steps take as long on a CPU for many clients at once as one by one."""


class Auto(Engine):
    """Takes the engine that should be the fastest, and says in one line which and why.

    On a GPU, where a client's computations are too small to fill it, that is `Vectorised`; on a CPU too for small nets
    without convolutions, whose steps take less time than it takes to start them. Otherwise, and where a method can't be
    vectorised, it is `Processes` on a CPU with several cores, and `Sequential` elsewhere. Takes the arguments of
    `Engine`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = args, kwargs
        self._said = ""
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        if self.device.type != "cpu":
            self._take(Vectorised, f"many small clients fill {self.device.type}")
        elif any(isinstance(m, _ConvNd) for m in self._modules) or parameters > LARGE_ON_CPU:
            self._take_one_by_one(f"a step of {type(self.module.net).__name__} is enough work for a core")
        else:
            self._take(Vectorised, f"{type(self.module.net).__name__} is small and without convolutions")

    def _take(self, engine: type[Engine], reason: str) -> None:
        args, kwargs = self._arguments
        self._engine = engine(*args, **kwargs)
        self._line = f"trainer.engine='auto' takes {engine.__name__.lower()}: {reason}."

    def _take_one_by_one(self, reason: str) -> None:
        several = self.device.type == "cpu" and sys.platform == "linux" and not distributed.is_initialized()
        count = (self.workers or cores()) if several else 1
        self._take(Processes if count > 1 else Sequential, f"{reason}, {count} at a time" if several else reason)

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yields outcomes as the engine that was taken does, and takes another where that one can't run the method."""
        tasks = list(tasks)
        done = set()
        if self._said != self._line:
            rank_zero_info(self._line)
            self._said = self._line
        try:
            for outcome in self._engine.run(tasks):
                done.add(outcome.client)
                yield outcome
        except Unvectorisable as error:
            self._take_one_by_one(error.reason)
            yield from self.run(task for task in tasks if task.client not in done)

    def evaluate_all(self, tasks: Iterable[Task]) -> Iterator[Evaluated]:
        """Evaluates as the engine that was taken does."""
        return self._engine.evaluate_all(tasks)

    def adapt(self, phases: list[Phase], task: Task, data: ClientData) -> None:
        """Trains as the engine that was taken does."""
        self._engine.adapt(phases, task, data)
