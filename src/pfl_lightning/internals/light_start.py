"""Import torchmetrics without optional packages for plots, sounds, images and language models."""

import sys
from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache, package_available

LEFT_OUT = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})
"""Optional packages of torchmetrics, loaded wherever installed."""


def import_torchmetrics() -> None:
    """Import torchmetrics with the packages of `LEFT_OUT` hidden, in a quarter of the time.

    Afterwards the packages can be imported as usual. An app with metrics for one of these packages imports torchmetrics
    first; an imported torchmetrics stays as it is.
    """
    if "torchmetrics" in sys.modules:
        return
    installed = RequirementCache.__bool__

    def told(requirement: RequirementCache) -> bool:
        if str(requirement.requirement).split(">")[0] in LEFT_OUT:
            requirement.available = False
        return installed(requirement)

    hidden = LEFT_OUT - sys.modules.keys()
    # None in sys.modules makes an import fail at once; packages that are loaded already stay
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with patch.object(RequirementCache, "__bool__", told):
            import torchmetrics  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
        # answers given meanwhile say that the hidden packages are missing
        package_available.cache_clear()
