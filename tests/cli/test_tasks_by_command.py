"""Tasks on the command line: data and nets in a file of the user's."""

import json
from pathlib import Path

import pytest
import torch

from command import QUIET, pfl, refusal
from federations import read_csv

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


class Masked(nn.Module):
    """The mean of a text's words, without those that the mask leaves out."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, outputs)

    def forward(self, input_ids, attention_mask):
        kept = attention_mask.unsqueeze(-1)
        return self.head((self.words(input_ids) * kept).sum(1) / kept.sum(1).clamp(min=1))


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


def predictions(line):
    """The rows that a run predicts."""
    with pytest.raises(SystemExit) as ended:
        pfl(line)
    assert ended.value.code == 0
    return read_csv(Path("predicted.csv"))


@pytest.mark.exhaustive
def test_a_net_of_two_inputs_by_name(capsys):
    line = "--model FedPer --model.net masks_and_marks.TwoInputs --data masks_and_marks.ImagesWithRows"
    pfl(f"fit {line} --model.optimizer torch.optim.SGD --model.optimizer.lr 0.1 --trainer.max_rounds 10 {QUIET}")
    (written,) = Path("runs").glob("*/*/summary.json")
    record = json.loads(written.read_text())
    assert record["final"]["test/acc"] > 0.6
    capsys.readouterr()
    pfl(f"test {line} --ckpt_path last {QUIET}")
    assert str(record["final"]["test/acc"])[:6] in capsys.readouterr().out
    predicted = predictions("predict --ckpt_path last --out predicted.csv")
    assert {row["client"] for row in predicted} == {f"site {number}" for number in range(4)}
    assert len({row["p_0"] for row in predicted}) == len(predicted) > 8


@pytest.mark.exhaustive
def test_a_file_of_named_tensors_reaches_a_net_of_two_inputs(tmp_path):
    ids = torch.randint(11, (60, 4), generator=torch.Generator().manual_seed(0))
    torch.save({"input_ids": ids, "attention_mask": (ids > 2).long()}, tmp_path / "words.pt")
    torch.save(torch.arange(60) % 2, tmp_path / "labels.pt")
    torch.save(torch.arange(60) // 15, tmp_path / "sites.pt")
    files = f"--data.x {tmp_path}/words.pt --data.y {tmp_path}/labels.pt --data.client {tmp_path}/sites.pt"
    task = "--data.task Classification --data.task.num_classes 2"
    line = f"--model FedPer --model.net masks_and_marks.Masked --data TensorData {files} {task}"
    pfl(f"fit {line} --trainer.max_rounds 1 {QUIET}")
    predicted = predictions("predict --ckpt_path last --out predicted.csv")
    assert {row["client"] for row in predicted} == {"0", "1", "2", "3"}


def test_a_net_of_other_arguments_is_refused_in_a_sentence(capsys):
    line = "fit --model FedPer --model.net masks_and_marks.Bare --data masks_and_marks.Marks"
    assert "model.net can't be built from the input's shape" in refusal(f"{line} {SETTINGS}", capsys)
