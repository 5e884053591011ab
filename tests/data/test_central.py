from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from pfl_lightning.data import CIFAR10, IID, AGNews, FederatedDataModule, ImageFolder, TinyImageNet
from tiny_datasets import write

SPLITS = ("train", "val", "test")


class Halves(FederatedDataModule):
    """300 samples that are their own numbers; the last 60 are the original test half."""

    num_classes = 4
    input_shape = (1,)

    def load(self):
        self.original_test = torch.arange(240, 300)
        return torch.arange(300).unsqueeze(1), torch.arange(300) % 4


class Whole(Halves):
    def load(self):
        return torch.arange(300).unsqueeze(1), torch.arange(300) % 4


def ready(cls=Halves, **settings):
    data = cls(num_clients=3, partitioner=IID(), **settings)
    data.setup()
    return data


def numbers(part):
    return set() if part is None else set(part.x.flatten().tolist())


def clients(data):
    return set().union(*(numbers(data.part(client, split)) for client in range(3) for split in SPLITS))


def test_nothing_is_central_by_default():
    data = ready()
    assert data.central_data() is data.server_data() is None
    assert clients(data) == set(range(300))


def test_the_original_test_half_is_kept_from_the_clients():
    data = ready(central_test="original")
    assert numbers(data.central_data()) == set(range(240, 300))
    assert clients(data) == set(range(240))


def test_a_share_of_the_pool_keeps_the_class_proportions():
    data = ready(central_test=0.2)
    central = data.central_data()
    assert torch.bincount(central.y).tolist() == [15] * 4
    assert numbers(central) | clients(data) == set(range(300))
    assert not numbers(central) & clients(data)
    assert numbers(central) != numbers(ready(central_test=0.2, seed=2).central_data())


def test_the_server_s_samples_come_out_of_the_central_test_set():
    data = ready(central_test="original", server_fraction=0.2)
    assert torch.bincount(data.server_data().y).tolist() == [3] * 4
    assert not numbers(data.server_data()) & numbers(data.central_data())
    assert numbers(data.server_data()) | numbers(data.central_data()) == set(range(240, 300))


def test_a_subset_of_the_pool_keeps_both_halves_apart():
    data = ready(central_test="original", max_samples=100)
    assert numbers(data.central_data()) <= set(range(240, 300))
    assert clients(data) <= set(range(240))
    assert len(numbers(data.central_data())) + len(clients(data)) == 100
    assert 10 <= len(data.central_data()) <= 30


def test_clients_share_a_partition_with_or_without_a_server_s_samples():
    one, other = (ready(central_test="original", server_fraction=share) for share in (0.0, 0.1))
    assert all(numbers(one.part(c, split)) == numbers(other.part(c, split)) for c in range(3) for split in SPLITS)


def test_a_test_without_clients_parts_has_one_batch_of_nobody():
    assert list(ready(central_test=0.1, test_fraction=0.0).test_dataloader()) == [[]]
    assert list(ready(test_fraction=0.0).test_dataloader()) == []
    assert list(ready(central_test=0.1).test_dataloader()) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("cls", "settings", "says"),
    [
        (Halves, {"central_test": 1.0}, r"data\.central_test=1\.0 must be between 0 and 1"),
        (Halves, {"central_test": 0.0}, r"data\.central_test=0\.0"),
        (Halves, {"server_fraction": 0.1}, r"data\.server_fraction=0\.1 .* set data\.central_test"),
        (Halves, {"central_test": 0.1, "server_fraction": 1.0}, r"data\.server_fraction=1\.0"),
        (Halves, {"central_test": 1}, r"data\.central_test=1 must be between 0 and 1"),
        (Halves, {"central_test": "orig"}, r"data\.central_test=orig must be between 0 and 1, or original"),
        (Halves, {"central_test": 0.001}, r"data\.central_test=0\.001 of 300 samples is 0, which leaves none on one"),
        (Halves, {"central_test": 0.1, "server_fraction": 0.01}, r"data\.server_fraction=0\.01 of 30 samples is 0"),
        (Halves, {"central_test": 0.1, "server_fraction": 0.99}, r"data\.server_fraction=0\.99 of 30 samples is 30"),
        (Whole, {"central_test": "original"}, r"data\.central_test=original: Whole has no test half"),
    ],
)
def test_what_can_t_be_held_out_is_refused(cls, settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(cls, **settings)


@pytest.mark.parametrize("cls", [CIFAR10, ImageFolder, AGNews])
def test_data_sets_know_their_test_half(cls, tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    root = Path(write(cls.__name__, tmp_path / "data", 300))
    data = cls(root=str(root), num_clients=3, partitioner=IID(), central_test="original")
    data.setup()
    x, _ = data.load()
    central = data.central_data()
    assert 0 < len(central) == len(data.original_test) < len(x)
    assert torch.equal(central.x, data.transform(x[data.original_test]))


def test_a_tree_without_splits_has_none(tmp_path):
    root = write("ImageFolder", tmp_path / "data", 300)
    with pytest.raises(MisconfigurationException, match="ImageFolder has no test half"):
        ready(ImageFolder, root=str(root / "train"), central_test="original")


@pytest.mark.parametrize("setting", ["central_test", "client_test"])
def test_tiny_imagenet_s_val_folder_is_its_test_half(tmp_path, setting):
    root = write("TinyImageNet", tmp_path / "data", 200)
    data, plain = TinyImageNet(root=str(root), **{setting: "original"}), TinyImageNet(root=str(root))
    x, y = data.load()
    assert torch.equal(x[:200], plain.load()[0]) and not len(plain.original_test)
    assert data.original_test.tolist() == list(range(200, 220))
    # as its table says, whose classes go backwards
    assert y[200:].tolist() == list(range(199, 179, -1))
    with Image.open(root / "tiny-imagenet-200/val/images/val_7.JPEG") as image:
        assert torch.equal(x[207], torch.from_numpy(np.array(image)).permute(2, 0, 1))


def test_tiny_imagenet_s_clients_hold_what_they_hold_without_it(tmp_path):
    root = str(write("TinyImageNet", tmp_path / "data", 200))
    data, plain = ready(TinyImageNet, root=root, central_test="original"), ready(TinyImageNet, root=root)
    assert len(data.central_data()) == 20
    for split in SPLITS:
        assert all(torch.equal(data.part(c, split).x, plain.part(c, split).x) for c in range(3))


@pytest.mark.parametrize("table", [None, "val_0.JPEG\n", "val_0.JPEG\tn_unknown\t0\t0\t63\t63\n"])
def test_a_val_folder_that_was_rearranged_is_refused(tmp_path, table):
    root = write("TinyImageNet", tmp_path / "data", 200)
    path = root / "tiny-imagenet-200/val/val_annotations.txt"
    path.write_text(table) if table else path.unlink()
    TinyImageNet(root=str(root))
    with pytest.raises(MisconfigurationException, match=r"data\.root=.*val_annotations\.txt cannot be read .*unpack"):
        TinyImageNet(root=str(root), central_test="original")
