"""Map-style data sets."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import Compose, Resize, ToTensor, v2

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


@pytest.mark.exhaustive
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


def fake(*parts):
    return FakeData(40, (3, 6, 6), 2, Compose([*parts, ToTensor()]))


def noisy(image):
    return torch.from_numpy(np.array(image)) + torch.rand(())


def sometimes(image):
    return image.transpose(0) if torch.rand(()) < 0.3 else image


RANDOM = {
    "flip": fake(transforms.RandomHorizontalFlip()),
    "rare": fake(transforms.RandomGrayscale(0.001)),
    "crop": fake(transforms.RandomCrop(6, padding=2)),
    "nested": fake(Compose([Compose([transforms.RandomRotation(9)])])),
    "v2": fake(v2.Compose([v2.RandomVerticalFlip(0.1)])),
    "sequential": fake(torch.nn.Sequential(transforms.RandomAutocontrast())),
    "jitter": fake(transforms.ColorJitter(0.5)),
    "augment": fake(transforms.RandAugment()),
    "trivial": fake(transforms.TrivialAugmentWide()),
    "own": FakeData(40, (3, 6, 6), 2, noisy),
    "own at times": fake(sometimes),
    "subset": Subset(fake(transforms.RandomInvert()), range(40)),
    "several": ConcatDataset([fake(), fake(transforms.RandomInvert())]),
}


@pytest.mark.parametrize("dataset", RANDOM.values(), ids=RANDOM)
def test_random_transforms_are_refused(dataset):
    state = torch.get_rng_state()
    with pytest.raises(MisconfigurationException, match=r"data\.dataset=.*at each reading.*training_step"):
        VisionData(dataset, Classification(2), lambda row: row // 10)
    assert torch.equal(state, torch.get_rng_state())


def test_transforms_that_draw_nothing_are_taken():
    parts = [transforms.RandomHorizontalFlip(p=1.0), transforms.RandomInvert(p=0.0), transforms.CenterCrop(4)]
    assert ready(fake(*parts)).part(0, "train").x.shape[1:] == (3, 4, 4)


def test_a_target_transform_counts():
    class Kept(Shades):
        """A data set whose list of targets is not what its samples have."""

        def __getitem__(self, row):
            return super().__getitem__(row)[0], 1 - row % 2

    data = ready(Kept())
    part = data.part(0, "train")
    assert (part.y == 1 - ((part.x[:, 0, 0, 0] + 1) * 127.5).round().long() % 2).all()
