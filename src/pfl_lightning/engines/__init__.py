"""Engines run the clients of a round: one by one, vectorised, or in several processes."""

from pfl_lightning.engines.auto import Auto
from pfl_lightning.engines.base import ClientState, Engine, EngineMaker, Job, LocalWork, Outcome
from pfl_lightning.engines.client_metrics import ClientMetrics, Evaluated
from pfl_lightning.engines.processes import Processes
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.sharded import Sharded
from pfl_lightning.engines.vmap.engine import Unvectorisable, Vectorised

ENGINES: dict[str, type[Engine]] = {
    "sequential": Sequential,
    "vectorised": Vectorised,
    "processes": Processes,
    "auto": Auto,
}
"""Engines by the values of the Trainer's ``engine``."""

__all__ = [
    "ENGINES",
    "Auto",
    "ClientMetrics",
    "ClientState",
    "Engine",
    "EngineMaker",
    "Evaluated",
    "Job",
    "LocalWork",
    "Outcome",
    "Processes",
    "Sequential",
    "Sharded",
    "Unvectorisable",
    "Vectorised",
]
