"""Detection models of TorchVision, which take lists of images of different sizes."""

import logging
import math

import lightning
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import ClientDatasets
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.nets import lightning_net
from pfl_lightning.tasks import OwnLoss

detection = pytest.importorskip("torchvision.models.detection", reason="needs torchvision")
detection_metrics = pytest.importorskip("torchmetrics.detection", reason="needs torchvision")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Scenes(Dataset):
    """Dark images of different sizes with bright squares, red or green."""

    def __init__(self, seed, count):
        self.items = [self.drawn(torch.Generator().manual_seed(100 * seed + place)) for place in range(count)]

    def drawn(self, generator):
        height, width = torch.randint(32, 49, (2,), generator=generator).tolist()
        image, boxes, labels = 0.1 * torch.rand(3, height, width, generator=generator), [], []
        for _ in range(int(torch.randint(1, 3, (1,), generator=generator))):
            x, y, color = (int(torch.randint(n, (1,), generator=generator)) for n in (width - 16, height - 16, 2))
            image[color, y : y + 16, x : x + 16] = 1
            boxes.append([x, y, x + 16, y + 16])
            labels.append(color + 1)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


def listed(items):
    return tuple(zip(*items, strict=True))


class Detector(lightning.LightningModule):
    """A small Faster R-CNN, which counts boxes in evaluations."""

    def __init__(self):
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
        body.out_channels = 8
        anchors = detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
        few = {f"rpn_{when}_nms_top_n_{mode}": 10 for when in ("pre", "post") for mode in ("train", "test")}
        sizes = {"min_size": 32, "max_size": 64, "box_batch_size_per_image": 8}
        head = detection.faster_rcnn.TwoMLPHead(8 * 49, 16)
        predictor = detection.faster_rcnn.FastRCNNPredictor(16, 3)
        self.net = detection.FasterRCNN(
            body, rpn_anchor_generator=anchors, box_head=head, box_predictor=predictor, **few, **sizes
        )
        self.classifier = self.net.roi_heads.box_predictor

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        losses = self.net(*batch)
        self.log_dict(losses)
        return sum(losses.values())

    def validation_step(self, batch, batch_idx):
        images, _ = batch
        found = self.net(images)
        self.log("val_boxes", float(sum(len(each["boxes"]) for each in found)) / len(images), batch_size=len(images))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(**settings):
    clients = {name: (Scenes(place, 7), Scenes(10 + place, 5)) for place, name in enumerate(("Bremen", "Ulm"))}
    own = {"collate_fn": listed, "batch_size": 3, "val_fraction": 0.0}
    return ClientDatasets(clients, OwnLoss("boxes", "max"), **own | settings)


def fit(method=FedAvg, engine="sequential", rounds=1, source=None, module=None):
    record = RoundLogger()
    trainer = FederatedTrainer(max_rounds=rounds, engine=engine, callbacks=[record], accelerator="cpu", **QUIET)
    source = data() if source is None else source
    torch.manual_seed(0)
    client = method(Detector() if module is None else module, source.input_shape, task=source.task)
    trainer.fit(client, datamodule=source)
    return trainer, record, client


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_a_detection_model_trains_by_its_own_losses(method):
    trainer, record, client = fit(method, "auto", rounds=8)
    losses = {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}
    row = record.rows[-1]
    assert sum(row[f"train/{name}"] for name in losses) == pytest.approx(row["train/loss"], rel=1e-5)
    assert row["train/loss"] < record.rows[0]["train/loss"]
    assert "test/boxes" in record.summary["final"]
    shared = client.shared_state()
    assert any("box_predictor" in name or "classifier" in name for name in shared) == (method is FedAvg)
    # a client's model takes images of any size
    net = trainer.client("Ulm").net.eval()
    found = net([image for image, _ in Scenes(3, 2)])
    assert len(found) == 2 and found[0].keys() == {"boxes", "labels", "scores"}


def test_batches_are_those_of_the_collate_fn():
    seen = []

    class Looking(Detector):
        def training_step(self, batch, batch_idx):
            if self.net.training:
                seen.append(batch)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            assert len(batch[0]) <= 3
            super().validation_step(batch, batch_idx)

    fit(module=Looking())
    known = [item for place in range(2) for item in Scenes(place, 7).items]
    images = []
    for batch in seen[-6:]:
        assert type(batch) is tuple and all(type(part) is tuple for part in batch)
        for image, target in zip(*batch, strict=True):
            (own,) = (each for each in known if each[0].shape == image.shape and torch.equal(each[0], image))
            assert torch.equal(own[1]["boxes"], target["boxes"]) and torch.equal(own[1]["labels"], target["labels"])
            images.append(image)
    assert len(images) == 14


def test_processes_and_loaders_of_clients_give_the_same_bits():
    class Own(lightning.LightningDataModule):
        def __init__(self, place):
            super().__init__()
            self.place = place

        def train_dataloader(self):
            return DataLoader(Scenes(self.place, 7), batch_size=3, shuffle=True, collate_fn=listed)

        def test_dataloader(self):
            return DataLoader(Scenes(10 + self.place, 5), collate_fn=listed)

    modules = {name: Own(place) for place, name in enumerate(("Bremen", "Ulm"))}
    loaders = ClientDatasets.of_modules(modules, OwnLoss("boxes", "max"), val_fraction=0.0)
    weights = [
        fit(engine=engine, source=source)[0].lightning_module.client.state_dict()
        for engine, source in (("sequential", None), ("processes", None), ("sequential", loaders))
    ]
    for others in weights[1:]:
        assert all(torch.equal(entry, others[name]) for name, entry in weights[0].items())


def test_what_cannot_be_is_refused_in_a_sentence():
    with pytest.raises(MisconfigurationException, match=r"^data.resident=true stacks all items, and data.collate_fn"):
        data(resident=True)
    with pytest.raises(MisconfigurationException, match=r"reads clients a batch at a time, and trainer.engine='vecto"):
        fit(engine="vectorised")
    with pytest.raises(MisconfigurationException, match=r"make no batch .* or give data.collate_fn"):
        data(collate_fn=None)
    trainer, _, client = fit()
    with pytest.raises(
        MisconfigurationException, match=r"model.net=Detector takes lists of items, .*trainer.client\(NAME\)"
    ):
        trainer.predict(client, clients=["Ulm"])


def test_evaluations_without_a_loss_say_so_once(caplog):
    lightning_net.tell.cache_clear()
    with caplog.at_level(logging.INFO):
        _, record, _ = fit(rounds=2)
    told = [line for line in caplog.messages if "gives no loss in evaluation mode" in line]
    assert len(told) == 1 and "Detector.training_step" in told[0]
    assert "test/loss" not in record.summary["final"] or record.summary["final"]["test/loss"] is None

    class Wrong(Detector):
        validation_step = lightning.LightningModule.validation_step

    # without any measurement the error is the user's
    with pytest.raises(AttributeError):
        fit(module=Wrong())


def test_metrics_of_several_numbers_are_refused():
    class Several(Detector):
        def validation_step(self, batch, batch_idx):
            self.log("val_boxes", torch.zeros(3))

    with pytest.raises(MisconfigurationException, match=r"Several logs boxes of shape \[3\] in evaluations; log one"):
        fit(module=Several())


def test_the_mean_average_precision_is_recorded():
    pytest.importorskip("faster_coco_eval", reason="needs the extra detection")
    from torchmetrics.detection import MeanAveragePrecision

    class Measuring(Detector):
        def __init__(self):
            super().__init__()
            self.map = MeanAveragePrecision(backend="faster_coco_eval")

        def validation_step(self, batch, batch_idx):
            self.map.update(self.net(batch[0]), batch[1])

        def on_validation_epoch_end(self):
            self.log("val_map", self.map.compute()["map"])

    source = data()
    source._task = OwnLoss("map", "max")
    trainer, record, _ = fit(module=Measuring(), source=source)
    metric = MeanAveragePrecision(backend="faster_coco_eval")
    net = trainer.client("Ulm").net.eval()
    # in chunks of a batch, whose smaller images TorchVision pads
    for rows in (slice(3), slice(3, 5)):
        images, targets = map(list, listed(Scenes(11, 5).items[rows]))
        metric.update(net(images), targets)
    row = next(row for row in record.clients if row["client"] == 1)
    assert row["test/map"] == pytest.approx(float(metric.compute()["map"]), abs=1e-6)


class Counting(detection_metrics.MeanAveragePrecision):
    """The metric without its package: 0.5 where there is an object, and -1, like the metric, where there is none."""

    def __init__(self):
        Metric.__init__(self)
        self.add_state("objects", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.objects += sum(len(each["boxes"]) for each in target)

    def compute(self):
        return {"map": torch.tensor(0.5 if self.objects else -1.0)}


@pytest.mark.parametrize("measures", [True, False])
def test_a_client_without_an_object_has_no_mean_average_precision(measures):
    class Measuring(Detector):
        def __init__(self):
            super().__init__()
            if measures:
                self.map = Counting()

        def validation_step(self, batch, batch_idx):
            if measures:
                self.map.update(self.net(batch[0]), batch[1])

        def on_validation_epoch_end(self):
            self.log("val_map", self.map.compute()["map"] if measures else -1.0)

    class Empty(Scenes):
        def __getitem__(self, place):
            image, _ = super().__getitem__(place)
            return image, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}

    clients = {"Bremen": (Scenes(0, 8), Scenes(10, 5)), "Ulm": (Scenes(1, 8), Empty(11, 5))}
    source = ClientDatasets(clients, OwnLoss("map", "max"), collate_fn=listed, batch_size=4)
    _, record, _ = fit(module=Measuring(), source=source)
    own = {row["client"]: row["test/map"] for row in record.clients}
    # a module without the metric may mean -1
    assert own[0] == (0.5 if measures else -1) and (math.isnan(own[1]) if measures else own[1] == -1)
    assert record.summary["final"]["test/map"] == own[0]


def test_a_run_is_kept_and_goes_on(tmp_path):
    found = []
    for rounds, path in ((2, "whole"), (1, "cut"), (2, "cut")):
        source = data()
        torch.manual_seed(0)
        own = QUIET | {"logger": None, "enable_checkpointing": True, "default_root_dir": str(tmp_path / path)}
        trainer = FederatedTrainer(max_rounds=rounds, engine="sequential", accelerator="cpu", **own)
        client = FedPer(Detector(), source.input_shape, task=source.task)
        trainer.fit(client, datamodule=source, ckpt_path="last" if (rounds, path) == (2, "cut") else None)
        found.append(trainer.lightning_module.client.state_dict())
    assert all(torch.equal(entry, found[2][name]) for name, entry in found[0].items())
