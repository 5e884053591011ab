"""Each method of the catalogue on each task: it runs under both engines alike, or is refused in a sentence."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.methods.registry import METHODS
from tasks_and_data import OfKind, client_of, kinds

OTHERS = [name for name in kinds() if name != "Classification"]
NEED_CLASSES = {
    *("FedUV", "FedNH", "FedDisco", "FedRoD", "FedProto", "FedPAC", "FedDistill", "KT-pFL", "FedClassAvg"),
    *("cwFedAvg", "cwFedAvg-noWDR", "cwFedAvg-Dist", "FedReMa", "FedReMa+A", "FedReMa+F", "FedReMa+AF"),
}
ONE_BY_ONE = {"FedFomo", "APPLE"}


def after_two_rounds(method, kind, engine):
    record = RoundLogger()
    trainer = FederatedTrainer(
        max_rounds=2,
        engine=engine,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[record],
    )
    data = OfKind(kind, central_test=0.2, server_fraction=0.3)
    trainer.fit(client_of(kind, method.client), datamodule=data, aggregator=method.new_aggregator())
    return [value for row in record.clients for name, value in row.items() if name.startswith("test/")]


@pytest.mark.parametrize("task", OTHERS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_runs_on_every_task_or_says_why_not(method, task):
    kind = kinds()[task]
    if method.name in NEED_CLASSES:
        with pytest.raises(
            MisconfigurationException, match=rf"(model|aggregator) .* by their class, and task {task}\("
        ):
            after_two_rounds(method, kind, "sequential")
    elif method.name == "MOON" and task in ("Segmentation", "NextToken"):
        with pytest.raises(MisconfigurationException, match="compares features as vectors"):
            after_two_rounds(method, kind, "sequential")
    else:
        alone = after_two_rounds(method, kind, "sequential")
        if method.name not in ONE_BY_ONE:
            assert after_two_rounds(method, kind, "vectorised") == pytest.approx(alone, rel=1e-4, nan_ok=True)
