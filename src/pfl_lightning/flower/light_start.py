"""A start without packages that torchmetrics would load for metrics that federations don't use."""

import sys
from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache, package_available

LEFT_OUT = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})
"""What torchmetrics uses where it is installed: for plots, sounds, images and language models."""


def import_torchmetrics() -> None:
    """Imports torchmetrics as where these packages aren't installed, which takes a quarter of the time.

    Everybody else can import them as ever. Where torchmetrics is imported already, nothing changes: that is what an app
    does first whose metrics need one of them.
    """
    if "torchmetrics" in sys.modules:
        return
    installed = RequirementCache.__bool__

    def told(requirement: RequirementCache) -> bool:
        if str(requirement.requirement).split(">")[0] in LEFT_OUT:
            requirement.available = False
        return installed(requirement)

    hidden = LEFT_OUT - sys.modules.keys()
    # how Python marks what can't be found
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with patch.object(RequirementCache, "__bool__", told):
            import torchmetrics  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
        package_available.cache_clear()
