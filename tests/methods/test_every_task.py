"""Each method of the catalogue on each task: it runs under both engines alike, or is refused in a sentence."""

from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.methods.registry import METHODS
from sweeps import swept
from tasks_and_data import after_a_round, kinds

TABLE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text().partition("## Which method")[2]
ROWS = [[cell.strip() for cell in line.strip("| ").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
CELLS = {(row[0], task): cell for row in ROWS[2:] for task, cell in zip(ROWS[0][1:], row[1:], strict=True)}
"""What the documentation says of each method and task."""


def test_the_table_is_whole():
    assert CELLS.keys() == {(method.name, task) for method in METHODS for task in kinds()}


# what methods do on classes is tested with each of them
@pytest.mark.parametrize("task", [name for name in kinds() if name != "Classification"])
@pytest.mark.parametrize("method", swept(METHODS, ("FedAvg", "FedPer", "APPLE", "FedProto", "FedClassAvg")))
@pytest.mark.by_default(but=["FedAvg-MultiLabel", "FedAvg-Segmentation", "FedPer-MultiLabel", "FedPer-Reconstruction"])
def test_every_method_does_on_every_task_what_the_table_says(method, task):
    kind, cell = kinds()[task], CELLS[method.name, task]
    if cell in ("yes", "one by one"):
        alone = after_a_round(method, kind, "sequential")
        if cell == "yes":
            assert after_a_round(method, kind, "vectorised") == pytest.approx(alone, rel=1e-4, nan_ok=True)
        return
    words = {
        "needs classes": rf"(model|aggregator) .* class .* task {task}\(",
        "needs vectors": "compares features as vectors|whose inputs would be the features",
        "needs a linear output": r"0 linear layers with 1 outputs, .* by output_layer",
        "needs samples": r"a loss of each single sample, and task Survival\(",
    }
    with pytest.raises(MisconfigurationException, match=words[cell]):
        after_a_round(method, kind, "sequential")


AT_ONCE = (
    *("FedLC", "FedNTD", "FedDF", "FML", "FedPHP", "GPFL", "FedAS", "FedTGP", "FedGH"),
    *("FedETF", "FedGELA", "FedSR"),
)
"""Methods of classes alone whose own tests are of one engine."""


@pytest.mark.parametrize("method", [each for each in METHODS if each.name in AT_ONCE], ids=lambda method: method.name)
@pytest.mark.by_default(but=["FedDF"])
def test_methods_of_classes_are_the_same_under_both_engines(method):
    kind = kinds()["Classification"]
    assert CELLS[method.name, "Classification"] == "yes"
    alone = after_a_round(method, kind, "sequential")
    assert after_a_round(method, kind, "vectorised") == pytest.approx(alone, rel=1e-4)
