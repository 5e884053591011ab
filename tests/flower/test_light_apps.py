"""What a site's process loads before it works: Flower starts one for every message."""

import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

HEAVY = ("matplotlib", "scipy", "sklearn", "torchvision", "transformers", "wandb")
"""What a site needs for some data, nets and methods only, or never."""


def said(code: str) -> list[str]:
    """What a process of its own prints, which runs some code."""
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.exhaustive
def test_apps_load_nothing_that_they_may_never_need():
    code = f"""
        import sys
        import pfl_lightning as root
        print("torch" in sys.modules)
        import pfl_lightning.flower.apps
        import pfl_lightning.flower.client_app
        print(sorted({{name.split(".")[0] for name in sys.modules}} & {set(HEAVY)}))
        print(all(getattr(root, name) for name in root.__all__))
        # and can have it all the same
        import matplotlib.pyplot, scipy.stats, torchvision.models
        from lightning_utilities.core.imports import RequirementCache, package_available
        print(bool(RequirementCache("torchvision")), package_available("scipy"))
        import torchmetrics.detection
        print(hasattr(torchmetrics.detection, "CompleteIntersectionOverUnion"))
    """
    assert said(code) == ["False", "[]", "True", "True True", "False"]


@pytest.mark.exhaustive
def test_an_app_that_imports_torchmetrics_first_gets_all_of_it():
    code = """
        import torchmetrics.detection
        import pfl_lightning.flower
        print(hasattr(torchmetrics.detection, "CompleteIntersectionOverUnion"))
    """
    assert said(code) == ["True"]
