"""Where mixed precision makes steps slower."""

from collections.abc import Iterable

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.vmap.engine import Vectorised

SMALL = 300_000
"""Parameters up to which a net on a CPU loses more by casts than it gains by arithmetic. An MLP of 159,010 took 1.36
times as long under ``bf16-mixed``, one of 1,276,810 as long, and a CNN of 582,026 0.87 times."""


def say_who_loses(engines: Iterable[Engine]) -> None:
    """Says in one line which nets train more slowly under mixed precision, on a CPU; of GPUs it is not known.

    Args:
        engines: with their modules and their precision.
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
    """Whether an engine's steps should be faster without the mixed precision that it has.

    Args:
        engine: with its module.
    """
    if not isinstance(engine.precision, MixedPrecision) or engine.module.device.type != "cpu":
        return False
    # products of stacks gain nothing by it, of whatever size
    return type(engine) is Vectorised or sum(p.numel() for p in engine.module.parameters()) <= SMALL
