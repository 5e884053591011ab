import pickle
import socket
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from pfl_lightning.data import CIFAR10, CIFAR100, IID, MNIST, Digits, ImageFolder, TinyImageNet
from tiny_datasets import write

TWO = {"num_clients": 2, "partitioner": IID()}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def test_digits_are_the_1797_of_scikit_learn():
    x, y = Digits().load()
    assert x.shape == (1797, *Digits.input_shape)
    assert x.dtype == torch.uint8
    assert (x.min(), x.max()) == (0, 255)
    assert torch.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # 0, 5 and 13 of 16 in the first row of the first digit
    assert x[0, 0, 0, 1:4].tolist() == [0, 80, 207]


def test_default_digits_work_and_are_normalised():
    dm = Digits()
    dm.setup()
    assert dm.num_clients == 10
    x = dm.part(0, "train").x
    assert x.dtype == torch.float32
    assert (x.min(), x.max()) == (-1.0, 1.0)


def test_transform_is_tensor_then_half_mean_and_half_deviation():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert torch.allclose(Digits().transform(x), torch.tensor([-1.0, -0.6, 1.0]))
    assert x.tolist() == [0, 51, 255]
    floats = torch.tensor([0.3, 7.0])
    assert Digits().transform(floats) is floats


def write_mnist(root):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pools = []
    for stem, n in (("train", 30), ("t10k", 10)):
        x, y = rng.integers(0, 256, (n, 28, 28), np.uint8), (np.arange(n) % 10).astype(np.uint8)
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *x.shape) + x.tobytes())
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n) + y.tobytes())
        pools.append((x, y))
    return tuple(np.concatenate(arrays) for arrays in zip(*pools, strict=True))


def test_mnist_pools_train_and_test_of_idx_files(tmp_path, no_network):
    x, y = write_mnist(tmp_path)
    dm = MNIST(root=str(tmp_path), **TWO)
    dm.prepare_data()
    loaded_x, loaded_y = dm.load()
    assert np.array_equal(loaded_x.numpy()[:, 0], x)
    assert np.array_equal(loaded_y.numpy(), y)
    dm.setup()
    assert dm.part(0, "train").x.shape[1:] == dm.input_shape


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08\x03\x00", b"\x00\x00\x08\x09"])
def test_damaged_mnist_is_refused(tmp_path, no_network, content):
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(MisconfigurationException, match="no usable MNIST files in"):
        MNIST(root=str(tmp_path)).prepare_data()


def test_truncated_mnist_is_refused(tmp_path, no_network):
    write_mnist(tmp_path)
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(MisconfigurationException, match="no usable MNIST files in"):
        MNIST(root=str(tmp_path), **TWO).setup()


def write_cifar10(root):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pools = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        x, y = rng.integers(0, 256, (10, 3, 32, 32), np.uint8), rng.permutation(10).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": x.reshape(10, 3072), "labels": y}))
        pools.append((x, y))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(k) for k in range(10)]}))
    return tuple(np.concatenate(arrays) for arrays in zip(*pools, strict=True))


def test_cifar10_pools_train_and_test_of_pickled_batches(tmp_path, no_network, monkeypatch):
    # torchvision knows the checksums of the real batches; ours have the same layout but other content, so
    # its check is cut down to "is there such a file"; its reading stays
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    x, y = write_cifar10(tmp_path)
    dm = CIFAR10(root=str(tmp_path), **TWO)
    dm.prepare_data()
    loaded_x, loaded_y = dm.load()
    assert np.array_equal(loaded_x.numpy(), x)
    assert np.array_equal(loaded_y.numpy(), y)
    dm.setup()
    assert dm.part(0, "train").x.shape[1:] == dm.input_shape


def test_damaged_cifar10_is_refused(tmp_path, no_network):
    write_cifar10(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"no usable CIFAR10 files in .*corrupted"):
        CIFAR10(root=str(tmp_path), **TWO).setup()


@pytest.mark.parametrize(
    ("data", "folder"), [(MNIST, "MNIST/raw"), (CIFAR10, "cifar-10-batches-py"), (CIFAR100, "cifar-100-python")]
)
@pytest.mark.parametrize("download", [True, False])
def test_missing_files_are_one_sentence(tmp_path, no_network, data, folder, download):
    with pytest.raises(MisconfigurationException) as refusal:
        data(root=str(tmp_path), download=download).prepare_data()
    sentence = str(refusal.value)
    assert sentence.startswith(f"data.root='{tmp_path}': no usable {data.__name__} files in {tmp_path / folder}")
    assert ("downloading failed" in sentence) == download
    assert ("set data.download=true to fetch them" in sentence) != download
    assert "\n" not in sentence
    assert "or set data.root to the folder" in sentence
    # no chain of network errors under it
    assert refusal.value.__suppress_context__
    assert refusal.value.__cause__ is None
    assert socket.getdefaulttimeout() is None


def test_downloads_give_up_on_a_silent_network(tmp_path, monkeypatch):
    timeouts = []

    def note(*args, **kwargs):
        timeouts.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", note)
    with pytest.raises(MisconfigurationException, match="downloading failed"):
        CIFAR10(root=str(tmp_path)).prepare_data()
    assert timeouts == [10.0]


def write_images(root, classes=("ant", "bee", "cat"), n=4, size=(6, 5), suffix="png"):
    for k, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True)
        for i in range(n):
            pixels = np.full((*size, 3), (10 * k, i, 100), np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.{suffix}")


def test_image_folder_reads_class_folders(tmp_path):
    write_images(tmp_path)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "ant" / "._0.png").write_text("no image either")
    dm = ImageFolder(root=str(tmp_path), **TWO)
    assert (dm.classes, dm.num_classes, dm.input_shape) == (["ant", "bee", "cat"], 3, (3, 6, 5))
    x, y = dm.load()
    assert x.shape == (12, 3, 6, 5)
    assert y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert x[6, :, 0, 0].tolist() == [10, 2, 100]
    dm.setup()
    assert dm.part(1, "train").x.shape[1:] == dm.input_shape


@pytest.mark.parametrize("other", ["test", "val"])
def test_image_folder_pools_splits(tmp_path, other):
    write_images(tmp_path / "train", n=4)
    write_images(tmp_path / other, n=2)
    dm = ImageFolder(root=str(tmp_path), **TWO)
    assert dm.classes == ["ant", "bee", "cat"]
    assert torch.bincount(dm.load()[1]).tolist() == [6, 6, 6]


def test_image_folder_takes_one_split_alone(tmp_path):
    write_images(tmp_path / "train")
    assert ImageFolder(root=str(tmp_path)).classes == ["ant", "bee", "cat"]


@pytest.mark.parametrize("other", ["car", "test"])
def test_image_folder_may_have_a_class_called_train(tmp_path, other):
    write_images(tmp_path, classes=(other, "train"))
    assert ImageFolder(root=str(tmp_path)).classes == sorted([other, "train"])


def test_image_folder_takes_train_with_subfolders_among_classes_for_a_class(tmp_path):
    write_images(tmp_path, classes=("car",))
    write_images(tmp_path / "train", classes=("old", "new"))
    assert ImageFolder(root=str(tmp_path)).classes == ["car", "train"]


def test_image_folder_looks_into_subfolders_of_a_class(tmp_path):
    for name in ("n01", "n02"):
        write_images(tmp_path / name, classes=("images",), suffix="JPEG")
    dm = ImageFolder(root=str(tmp_path))
    assert dm.classes == ["n01", "n02"]
    assert len(dm.load()[1]) == 8


def test_image_folder_decodes_grey(tmp_path):
    write_images(tmp_path)
    dm = ImageFolder(root=str(tmp_path), channels=1)
    assert dm.input_shape == (1, 6, 5)
    # ITU-R 601 luma of (20, 3, 100)
    assert dm.load()[0][11].unique().tolist() == [19]


@pytest.mark.parametrize(("size", "shape"), [(8, (3, 8, 8)), ((4, 9), (3, 4, 9))])
def test_image_folder_resizes(tmp_path, size, shape):
    write_images(tmp_path, classes=("a",))
    write_images(tmp_path, classes=("b",), size=(7, 7))
    dm = ImageFolder(root=str(tmp_path), size=size)
    assert dm.input_shape == shape
    assert dm.load()[0].shape == (8, *shape)


def test_image_folder_refuses_mixed_sizes(tmp_path):
    write_images(tmp_path, classes=("a",))
    write_images(tmp_path, classes=("b",), size=(7, 7))
    with pytest.raises(MisconfigurationException, match=r"data.size=null: .*0.png has 7x7 pixels.*6x5; set data.size"):
        ImageFolder(root=str(tmp_path), **TWO).setup()


def test_image_folder_refuses_bad_settings(tmp_path):
    write_images(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"data.size=0 must be at least 1"):
        ImageFolder(root=str(tmp_path), size=0)
    with pytest.raises(
        MisconfigurationException, match=r"data.size=\(8,\) must be at least 1 pixel, or \(height, width\)"
    ):
        ImageFolder(root=str(tmp_path), size=(8,))
    with pytest.raises(MisconfigurationException, match=r"data.channels=4 must be 1"):
        ImageFolder(root=str(tmp_path), channels=4)


def test_image_folder_refuses_missing_and_empty_folders(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"data.root='.*nowhere' is no folder; set it to"):
        ImageFolder(root=str(tmp_path / "nowhere"))
    with pytest.raises(MisconfigurationException, match="has no class folders; set it to"):
        ImageFolder(root=str(tmp_path))
    write_images(tmp_path, classes=("ant",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MisconfigurationException, match=r"class folder 'empty' has no images; add some"):
        ImageFolder(root=str(tmp_path))


def test_image_folder_refuses_splits_with_different_classes(tmp_path):
    write_images(tmp_path / "train")
    write_images(tmp_path / "val", classes=("ant", "dog"))
    with pytest.raises(MisconfigurationException, match="train/ and val/ have different class folders"):
        ImageFolder(root=str(tmp_path))


@pytest.mark.parametrize("broken", ["ant/0.png", "cat/3.png"])
def test_image_folder_names_broken_files(tmp_path, broken):
    write_images(tmp_path)
    (tmp_path / broken).write_bytes(b"not a png")
    with pytest.raises(MisconfigurationException, match=rf"{broken} cannot be read as an image"):
        ImageFolder(root=str(tmp_path), **TWO).setup()


def test_image_folder_shows_progress_only_for_many_files(tmp_path, monkeypatch, capsys):
    write_images(tmp_path)
    dm = ImageFolder(root=str(tmp_path))
    dm.load()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("pfl_lightning.data.image_folder.SLOW_FILES", 11)
    dm.load()
    assert "decoding images" in capsys.readouterr().err


def test_cifar100_pools_the_fine_labels_of_train_and_test(tmp_path, no_network, monkeypatch):
    # as for CIFAR-10
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    write("CIFAR100", tmp_path / "here", 240)
    halves = [pickle.loads((tmp_path / "here" / "cifar-100-python" / name).read_bytes()) for name in ("train", "test")]
    dm = CIFAR100(root=str(tmp_path / "here"), **TWO)
    dm.prepare_data()
    x, y = dm.load()
    assert np.array_equal(x.numpy().reshape(240, 3072), np.concatenate([half["data"] for half in halves]))
    assert y.tolist() == halves[0]["fine_labels"] + halves[1]["fine_labels"]
    assert y.max() == 99
    dm.setup()
    assert dm.counts.shape == (2, 100)
    assert dm.part(0, "train").x.shape[1:] == dm.input_shape == (3, 32, 32)


def test_tiny_imagenet_reads_the_train_folder_only(tmp_path):
    root = write("TinyImageNet", tmp_path / "here", 400)
    dm = TinyImageNet(root=str(root), **TWO)
    assert (dm.root, dm.num_classes, dm.input_shape) == (str(root), 200, (3, 64, 64))
    assert dm.classes[:2] == ["n00000000", "n00000001"]
    x, y = dm.load()
    assert x.shape == (400, 3, 64, 64)
    assert torch.bincount(y).tolist() == [2] * 200


def test_missing_tiny_imagenet_is_one_sentence(tmp_path):
    with pytest.raises(MisconfigurationException) as refusal:
        TinyImageNet(root=str(tmp_path))
    assert str(refusal.value) == (
        f"data.root='{tmp_path}': there is no folder {tmp_path / 'tiny-imagenet-200' / 'train'}; unpack "
        f"tiny-imagenet-200.zip in {tmp_path}, or set data.root to the folder that tiny-imagenet-200 is in"
    )
