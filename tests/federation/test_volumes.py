"""Federations that segment volumes, and images by the same net."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.methods import FedAvg, FedBN, FedPer
from pfl_lightning.nets import UNet
from pfl_lightning.tasks import Segmentation
from tasks_and_data import Kind, OfKind, drawn

DICE = ("dice", "dice_1", "dice_2", "miou", "pixel_acc")


def volumes(norm="batch"):
    """Volumes of an odd depth, with two structures that follow the brightness, and uncounted voxels."""
    x = drawn(40, 1, 5, 6, 8)
    masks = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    masks[:, 0, 0] = -100
    net = partial(UNet, width=4, levels=2, norm=norm)
    return Kind(Segmentation(3, metrics=DICE), x, masks, net, 0.2)


def fit(kind, method, engine="sequential", rounds=2):
    record = RoundLogger()
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer(
        max_rounds=rounds, engine=engine, callbacks=[record], accelerator="cpu", enable_model_summary=False, **settings
    )
    torch.manual_seed(0)
    data = OfKind(kind, batch_size=4)
    optimizer = partial(SGD, lr=kind.rate)
    client = method(kind.net, data.input_shape, task=kind.task, optimizer=optimizer)
    trainer.fit(client, datamodule=data)
    return trainer, record, client


@pytest.mark.parametrize("method", [FedAvg, FedPer, FedBN])
def test_volumes_are_segmented_alike_under_both_engines(method):
    kind = volumes()
    (one, record, _), (other, beside, _) = (fit(kind, method, engine) for engine in ("sequential", "vectorised"))
    values = [
        [v for row in each.clients for name, v in row.items() if name.startswith("test/")] for each in (record, beside)
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-4, nan_ok=True)
    assert {f"test/{name}" for name in DICE} <= record.clients[0].keys()
    assert {"test/dice_pooled", "test/dice_1_pooled"} <= record.summary["final"].keys()
    weights, others = (each.lightning_module.client.state_dict() for each in (one, other))
    for name, entry in weights.items():
        assert torch.allclose(entry, others[name], atol=1e-5), name


def test_the_net_learns_structures():
    _, record, _ = fit(replace(volumes("instance"), rate=1.0), FedAvg, "vectorised", rounds=8)
    assert record.rows[-1]["val/dice"] > record.rows[0]["val/dice"] + 0.2


@pytest.mark.exhaustive
def test_masks_of_volumes_are_predicted_and_exported(tmp_path):
    kind = volumes()
    trainer, _, client = fit(kind, FedBN)
    predicted = trainer.predict(client, kind.x[:3], clients=["2"])["2"]
    assert predicted.classes.shape == (3, 5, 6, 8) and predicted.probabilities.shape == (3, 3, 5, 6, 8)
    trainer.client(2).export(tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.allclose(loaded(kind.x[:3]), predicted.outputs, atol=1e-5)
