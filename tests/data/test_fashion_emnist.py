import pickle
import socket
from urllib.error import URLError

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.mnist import EMNIST, FashionMNIST
from pfl_lightning.data.partitioners import IID, DominantLabels
from tiny_datasets import write, write_emnist, write_idx

TWO = {"num_clients": 2, "partitioner": IID()}
SPLITS = {"letters": 26, "balanced": 47, "digits": 10, "mnist": 10, "byclass": 62, "bymerge": 47}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def halves(root, stems, first_label=0):
    """Two halves that differ in size and in what they hold; their images and labels in order."""
    rng = np.random.default_rng(0)
    made = []
    for stem, n in zip(stems, (30, 12), strict=True):
        made.append(
            (rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n).astype(np.uint8) + first_label)
        )
        write_idx(root, stem, *made[-1])
    return tuple(np.concatenate(arrays) for arrays in zip(*made, strict=True))


def test_fashion_mnist_is_its_training_half_and_then_its_test_half(tmp_path):
    x, y = halves(tmp_path / "FashionMNIST" / "raw", ("train", "t10k"))
    dm = FashionMNIST(root=str(tmp_path), **TWO)
    dm.prepare_data()
    loaded_x, loaded_y = dm.load()
    assert np.array_equal(loaded_x.numpy()[:, 0], x)
    assert np.array_equal(loaded_y.numpy(), y)
    assert dm.original_test.tolist() == list(range(30, 42))


def test_fashion_mnist_is_not_mnist(tmp_path):
    write("MNIST", tmp_path / "here", 40)
    with pytest.raises(MisconfigurationException, match=r"no usable FashionMNIST files in .*FashionMNIST/raw"):
        FashionMNIST(root=str(tmp_path / "here"), download=False).prepare_data()


def test_emnist_is_upright_and_its_training_half_comes_first(tmp_path):
    stems = ("emnist-letters-train", "emnist-letters-test")
    x, y = halves(tmp_path / "EMNIST" / "raw", stems, first_label=1)
    dm = EMNIST(root=str(tmp_path), **TWO)
    dm.prepare_data()
    loaded_x, loaded_y = dm.load()
    assert loaded_x.is_contiguous()
    assert loaded_x.dtype == torch.uint8
    # the files hold column after column
    assert np.array_equal(loaded_x.numpy()[:, 0], x.transpose(0, 2, 1))
    assert np.array_equal(loaded_y.numpy(), y - 1)
    assert dm.original_test.tolist() == list(range(30, 42))


def test_a_letter_l_stands(tmp_path):
    image = np.zeros((28, 28), np.uint8)
    image[4:24, 6] = image[23, 6:20] = 255
    for half in ("train", "test"):
        stored = np.ascontiguousarray(image.T)[None].repeat(4, axis=0)
        write_idx(tmp_path / "EMNIST" / "raw", f"emnist-letters-{half}", stored, np.full(4, 12, np.uint8))
    x, y = EMNIST(root=str(tmp_path)).load()
    assert np.array_equal(x[0, 0].numpy(), image)
    assert y.unique().tolist() == [ord("l") - ord("a")]


@pytest.mark.parametrize(("split", "classes"), SPLITS.items())
def test_every_split_has_its_files_and_classes(tmp_path, split, classes):
    write_emnist(tmp_path, 8 * classes, split, classes)
    dm = EMNIST(split, root=str(tmp_path), **TWO)
    assert (dm.num_classes, dm.input_shape) == (classes, (1, 28, 28))
    dm.prepare_data()
    dm.setup()
    assert dm.load()[1].unique().tolist() == list(range(classes))
    assert dm.counts.shape == (2, classes)


@pytest.mark.parametrize("data", [FashionMNIST, EMNIST])
def test_tiny_files_are_set_up(tmp_path, data):
    root = write(data.__name__, tmp_path / "here", 520)
    partitioner = DominantLabels(samples_per_client=None)
    dm = data(root=str(root), num_clients=5, partitioner=partitioner, test_fraction=0.2)
    dm.prepare_data()
    dm.setup()
    assert dm.num_classes == (26 if data is EMNIST else 10)
    part = dm.part(3, "train")
    assert part.x.shape[1:] == dm.input_shape == (1, 28, 28)
    assert (part.x.min(), part.x.max()) == (-1.0, 1.0)
    assert 0 <= part.y.min() <= part.y.max() < dm.num_classes
    assert len({dm.size(client, "test") for client in range(5)}) == 1


def test_only_letters_are_counted_from_one(tmp_path):
    raw = tmp_path / "EMNIST" / "raw"
    for half in ("train", "test"):
        write_idx(raw, f"emnist-letters-{half}", np.zeros((4, 28, 28), np.uint8), np.arange(4, dtype=np.uint8))
    with pytest.raises(
        MisconfigurationException, match=r"targets from -1 to 2; task Classification\(num_classes=26\) allows 0 to 25"
    ):
        EMNIST(root=str(tmp_path), **TWO).setup()


def test_original_test_half_can_be_held_out(tmp_path):
    root = write("EMNIST", tmp_path / "here", 208)
    dm = EMNIST(root=str(root), central_test="original", **TWO)
    dm.setup()
    assert len(dm.central_data()) == 52


@pytest.mark.parametrize("missing", ["train", "test"])
def test_half_of_emnist_is_not_enough(tmp_path, missing):
    root = write("EMNIST", tmp_path / "here", 104)
    (root / "EMNIST" / "raw" / f"emnist-letters-{missing}-labels-idx1-ubyte").unlink()
    with pytest.raises(MisconfigurationException, match="no usable EMNIST files in"):
        EMNIST(root=str(root), download=False).prepare_data()


def test_files_of_another_split_are_not_enough(tmp_path):
    write_emnist(tmp_path, 40, "digits", 10)
    with pytest.raises(MisconfigurationException, match=r"\(emnist-letters-train-images-idx3-ubyte and so on\)"):
        EMNIST(root=str(tmp_path), download=False).prepare_data()


@pytest.mark.parametrize("data", [FashionMNIST, EMNIST])
@pytest.mark.parametrize("download", [True, False])
def test_missing_files_are_one_sentence(tmp_path, data, download):
    with pytest.raises(MisconfigurationException) as refusal:
        data(root=str(tmp_path), download=download).prepare_data()
    sentence = str(refusal.value)
    folder = tmp_path / data.__name__ / "raw"
    assert sentence.startswith(f"data.root='{tmp_path}': no usable {data.__name__} files in {folder}")
    assert ("downloading failed" in sentence) == download
    assert "\n" not in sentence
    assert refusal.value.__cause__ is None
    assert socket.getdefaulttimeout() is None


def test_truncated_emnist_is_refused(tmp_path):
    root = write("EMNIST", tmp_path / "here", 104)
    images = root / "EMNIST" / "raw" / "emnist-letters-train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(MisconfigurationException, match="no usable EMNIST files in"):
        EMNIST(root=str(root), **TWO).prepare_data()


def test_refuses_an_unknown_split():
    with pytest.raises(MisconfigurationException, match=r"^data.split='Letters' must be one of letters, balanced, "):
        EMNIST("Letters")


def test_split_is_among_the_hyper_parameters():
    dm = EMNIST("digits", num_clients=3)
    assert (dm.hparams["split"], dm.hparams["num_clients"]) == ("digits", 3)
    assert pickle.loads(pickle.dumps(dict(dm.hparams)))["split"] == "digits"
