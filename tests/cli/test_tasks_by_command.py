"""Tasks on the command line: data and nets in a file of the user's."""

import json
from pathlib import Path

import pytest

from command import QUIET, pfl, refusal

MASKS = '''
import torch
from torch import nn

from pfl_lightning.data import FederatedDataModule, IID, TensorData
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Classification, MultiLabel, Segmentation


class Masks(FederatedDataModule):
    """Which pixels are bright."""

    input_shape, task = (1, 6, 6), Segmentation(2)

    def load(self):
        x = torch.randn(80, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        return x, (x[:, 0] > 0).long()


class Marks(FederatedDataModule):
    """Which of three properties a sample has."""

    input_shape, task = (5,), MultiLabel(3)

    def load(self):
        x = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
        return x, (x[:, :3] > 0).long()


class PixelNet(Net):
    """A convolution, and a class for each pixel."""

    def __init__(self, input_shape, outputs):
        super().__init__(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh()), nn.Conv2d(4, outputs, 1))


class ImagesWithRows(TensorData):
    """An image beside a row of a table, at four sites."""

    def __init__(self):
        y = torch.arange(120) % 3
        noise = torch.Generator().manual_seed(0)
        image = torch.randn(120, 1, 4, 4, generator=noise) + y[:, None, None, None]
        x = {"image": image, "row": torch.randn(120, 4, generator=noise)}
        super().__init__(x, y, Classification(3), client=[f"site {k // 3 % 4}" for k in range(120)], batch_size=5)


class TwoInputs(nn.Module):
    """One branch for each input."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), 8), nn.ReLU())
        self.row = nn.Linear(4, 8)
        self.head = nn.Linear(16, outputs)

    def forward(self, image, row):
        return self.head(torch.cat([self.image(image), self.row(row)], 1))


class Bare(nn.Linear):
    """Takes other arguments than the shape and the number of outputs."""

    def __init__(self, outputs=3):
        super().__init__(5, outputs)
'''

SETTINGS = f"--data.num_clients 4 --data.partitioner IID --trainer.max_rounds 2 {QUIET}"


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "masks_and_marks.py").write_text(MASKS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "metric"),
    [
        ("--model FedPer --data masks_and_marks.Masks --model.net masks_and_marks.PixelNet", "miou"),
        ("--model Ditto --data masks_and_marks.Marks --model.net MLP", "map"),
        ("--model FedAvg --data masks_and_marks.Marks --model.net MLP --trainer.monitor val/f1", "f1"),
    ],
)
@pytest.mark.by_default("--model FedAvg --data masks_an")
def test_a_task_goes_from_the_data_to_the_client(line, metric, capsys):
    pfl(f"fit {line} {SETTINGS}")
    (written,) = Path("runs").glob("*/*/summary.json")
    record = json.loads(written.read_text())
    assert record["monitor"]["metric"] == metric
    assert 0 < record["final"][f"test/{metric}"] <= 1
    assert f"test {metric}, last round" in capsys.readouterr().out


def test_methods_of_classes_are_refused_in_a_sentence(capsys):
    words = refusal(f"fit --config methods/cwfedavg --data masks_and_marks.Marks --model.net MLP {SETTINGS}", capsys)
    assert "model WDR needs the class" in words and "task MultiLabel(num_labels=3) has none" in words
    words = refusal(
        f"fit --model FedAvg --aggregator FedDisco --data masks_and_marks.Marks --model.net MLP {SETTINGS}", capsys
    )
    assert "aggregator FedDisco needs the class" in words


def test_a_metric_that_is_not_there_selects_nothing(capsys):
    line = f"fit --model FedAvg --data masks_and_marks.Marks --model.net MLP --trainer.monitor val/acc {SETTINGS}"
    assert "trainer.monitor='val/acc' is not measured; choose from map, f1, f1_pooled, map_pooled, loss" in refusal(
        line, capsys
    ).replace("f1, map", "map, f1")


def test_a_net_of_two_inputs_by_name(capsys):
    line = "--model FedPer --model.net masks_and_marks.TwoInputs --data masks_and_marks.ImagesWithRows"
    pfl(f"fit {line} --model.optimizer torch.optim.SGD --model.optimizer.lr 0.1 --trainer.max_rounds 10 {QUIET}")
    (written,) = Path("runs").glob("*/*/summary.json")
    record = json.loads(written.read_text())
    assert record["final"]["test/acc"] > 0.6
    capsys.readouterr()
    pfl(f"test {line} --ckpt_path last {QUIET}")
    assert str(record["final"]["test/acc"])[:6] in capsys.readouterr().out


def test_a_net_of_other_arguments_is_refused_in_a_sentence(capsys):
    line = "fit --model FedPer --model.net masks_and_marks.Bare --data masks_and_marks.Marks"
    assert "model.net can't be built from the input's shape" in refusal(f"{line} {SETTINGS}", capsys)
