"""Advise against mixed precision for nets slowed down by casts."""

from collections.abc import Iterable

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.vmap.engine import Vectorised

SMALL = 300_000
"""Number of parameters up to which, on a CPU, casts cost more than the faster arithmetic saves. An MLP of 159,010
parameters took 1.36 times as long under ``bf16-mixed``, one of 1,276,810 as long, and a CNN of 582,026 0.87 times."""


def say_who_loses(engines: Iterable[Engine]) -> None:
    """Log a line naming the nets slowed down by mixed precision on a CPU; GPUs weren't measured.

    Args:
        engines: the engines, with modules and precision.
    """
    losing = [engine for engine in engines if loses(engine)]
    if losing:
        nets = ", ".join(sorted({type(engine.module.net).__name__ for engine in losing}))
        precision = losing[0].precision.precision
        rank_zero_info(
            f"trainer.precision={precision!r}: on this CPU {nets} should train faster with '32-true', as casts take "
            "longer than what they save."
        )


def loses(engine: Engine) -> bool:
    """Return True if an engine's steps should be faster without mixed precision.

    Args:
        engine: the engine, with module and precision.
    """
    if not isinstance(engine.precision, MixedPrecision) or engine.module.device.type != "cpu":
        return False
    # Batched matrix products of the vectorised engine gain nothing from bfloat16 at any size.
    return type(engine) is Vectorised or sum(p.numel() for p in engine.module.parameters()) <= SMALL
