"""Map-style data sets."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import Compose, Resize, ToTensor

from pfl_lightning.data import VisionData
from pfl_lightning.data.sources import base
from pfl_lightning.tasks import Classification


class Shades:
    """Grey images that are their own numbers, of two classes; tells its labels, unless it shall be silent."""

    def __init__(self, sizes=(3,), silent=False):
        self.sizes = sizes
        if not silent:
            self.targets = [row % 2 for row in range(40)]

    def __len__(self):
        return 40

    def __getitem__(self, row):
        size = self.sizes[row % len(self.sizes)]
        return Image.fromarray(np.full((size, 4), row, np.uint8)), row % 2


def ready(dataset, client=lambda row: row // 10, **settings):
    data = VisionData(dataset, Classification(2), client, **settings)
    data.setup()
    return data


def shades(data, client):
    x = torch.cat([data.part(client, split).x for split in ("train", "val", "test")])
    return ((x[:, 0, 0, 0] + 1) * 127.5).round().sort().values.tolist()


@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("silent", [False, True])
def test_a_function_says_who_holds_a_sample(monkeypatch, limit, silent):
    monkeypatch.setattr(base, "RESIDENT", limit)
    data = ready(Shades(silent=silent))
    assert data.input_shape == (1, 3, 4) and data.num_clients == 4
    assert [shades(data, client) for client in range(4)] == [list(range(10 * k, 10 * k + 10)) for k in range(4)]
    assert data.class_counts("train").sum() == sum(data.size(client, "train") for client in range(4))


def test_names_say_it_too():
    assert ready(Shades(), client=["a", "b"] * 20).client_names == ["a", "b"]


def test_torchvision_s_own(tmp_path):
    for k in range(2):
        (tmp_path / f"class{k}").mkdir()
        for row in range(10):
            Image.fromarray(np.full((5, 5, 3), row, np.uint8)).save(tmp_path / f"class{k}" / f"{row}.png")
    pictures = ImageFolder(str(tmp_path), Compose([Resize((4, 4)), ToTensor()]))
    data = ready(pictures, lambda row: pictures.samples[row][0].endswith("1.png"), partitioner=base.Natural(5))
    assert data.input_shape == (3, 4, 4) and data.client_names == ["False"] and data.part(0, "train").x.max() <= 1
    fake = FakeData(40, (3, 6, 6), 2, ToTensor())
    assert ready(fake).part(3, "train").x.shape[1:] == (3, 6, 6)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (iter([]), "has no samples by position; give a map-style data set"),
        (Shades(sizes=(3, 5)), r"inputs have shapes \(1, 3, 4\) and \(1, 5, 4\); give the data set a transform"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(dataset, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(dataset)
