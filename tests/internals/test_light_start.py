"""What an import of Lightning leaves out is there for whoever asks."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc
import sys
from pfl_lightning.internals import light_start
from pfl_lightning.internals.garbage import uncollected
from pfl_lightning.internals.light_start import import_lightning

with uncollected(freeze=True):
    assert not gc.isenabled()
    import_lightning()
assert gc.isenabled() and gc.get_freeze_count() and "lightning" in sys.modules
assert light_start.hidden == light_start.LEFT_OUT and not light_start.LEFT_OUT & sys.modules.keys()

import matplotlib, scipy, torchvision
from lightning_utilities.core.imports import RequirementCache
assert RequirementCache("matplotlib")
print("done")
"""

WHOLE = """
import sys
from pfl_lightning.internals import light_start

light_start.import_lightning(whole_metrics=True)
assert "matplotlib" in sys.modules and not light_start.hidden
print("done")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.exhaustive
def test_packages_that_a_run_does_not_use_are_imported_on_demand():
    run(PROGRAM)


@pytest.mark.exhaustive
def test_metrics_of_other_packages_find_all_that_torchmetrics_can_use():
    run(WHOLE)
