"""A folder a client, of files that are written here."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from pfl_lightning.data import FolderData
from pfl_lightning.data.sources import base
from pfl_lightning.tasks import Classification, Regression, Segmentation


def write_images(root, sizes=((6, 5), (6, 5))):
    for number, size in enumerate(sizes):
        for k, name in enumerate(["cat", "dog"]):
            folder = root / f"site{number}" / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(np.full((*size, 3), 100 * number + 10 * k + i, np.uint8)).save(folder / f"{i}.png")


def write_arrays(root, save=np.save, suffix="npy"):
    for number, count in enumerate([9, 14]):
        folder = root / f"site{number}"
        folder.mkdir()
        x = np.arange(100 * number, 100 * number + count, dtype=np.float64)
        save(folder / f"x.{suffix}", np.stack([x, x], 1))
        save(folder / f"y.{suffix}", x / 100)


def ready(root, *args, **settings):
    data = FolderData(str(root), *args, **settings)
    data.setup()
    return data


def whole(data, client):
    return torch.cat([data.part(client, split).x for split in ("train", "val", "test")])


@pytest.mark.parametrize("limit", [2**30, 0])
def test_images_by_class(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(base, "RESIDENT", limit)
    write_images(tmp_path)
    data = ready(tmp_path)
    assert data.task == Classification(2) and data.classes == ["cat", "dog"] and data.input_shape == (3, 6, 5)
    assert data.client_names == ["site0", "site1"]
    assert isinstance(data._pool.samples.x, torch.Tensor) == (limit > 0)
    for client in range(2):
        pixels = ((whole(data, client)[:, 0, 0, 0] + 1) * 127.5).round().int().sort().values.tolist()
        assert pixels == [100 * client + 10 * k + i for k in range(2) for i in range(4)]
    part = data.part(1, "train")
    assert (part.y == (((part.x[:, 0, 0, 0] + 1) * 127.5).round() >= 109).long()).all()


@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("suffix", ["npy", "pt"])
def test_arrays(tmp_path, monkeypatch, limit, suffix):
    monkeypatch.setattr(base, "RESIDENT", limit)
    save = np.save if suffix == "npy" else lambda path, array: torch.save(torch.from_numpy(array), path)
    write_arrays(tmp_path, save, suffix)
    data = ready(tmp_path, Regression())
    assert data.input_shape == (2,) and data.client_names == ["site0", "site1"]
    for client, count in enumerate([9, 14]):
        assert whole(data, client)[:, 0].sort().values.tolist() == list(range(100 * client, 100 * client + count))
        part = data.part(client, "train")
        assert part.x.dtype == torch.float32 and part.y.tolist() == pytest.approx((part.x[:, 0] / 100).tolist())


def test_sizes_are_brought_together(tmp_path):
    write_images(tmp_path, ((6, 5), (7, 7)))
    assert ready(tmp_path, size=(4, 4), channels=1).part(1, "train").x.shape[1:] == (1, 4, 4)
    with pytest.raises(MisconfigurationException, match=r"data.size=null: .*site1.* has 7x7 pixels, the first"):
        ready(tmp_path)


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(MisconfigurationException, match="has no clients' folders; give a folder with a"):
        ready(tmp_path / "none")
    write_arrays(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"data\.task=null"):
        ready(tmp_path)
    np.save(tmp_path / "site1" / "y.npy", np.zeros(3))
    with pytest.raises(MisconfigurationException, match="site1 has 14 x and 3 y"):
        ready(tmp_path, Regression())
    np.save(tmp_path / "site1" / "x.npy", np.zeros((3, 5)))
    with pytest.raises(MisconfigurationException, match=r"of shapes \(2,\), \(5,\)"):
        ready(tmp_path, Regression())
    (tmp_path / "site2").mkdir()
    with pytest.raises(MisconfigurationException, match=r"site2 has no x and y in .npy or .pt files as others have"):
        ready(tmp_path, Regression())
    for path in tmp_path.glob("*/*.npy"):
        path.unlink()
    with pytest.raises(MisconfigurationException, match="site0 has neither images nor arrays"):
        ready(tmp_path)


def write_volumes(root, shape=(1, 2, 3, 4)):
    for number, count in enumerate([5, 7]):
        for part in ("x", "y"):
            (root / f"site{number}" / part).mkdir(parents=True)
        for k in range(count):
            volume = np.full(shape, 10 * number + k, np.float32)
            np.save(root / f"site{number}" / "x" / f"case{k}.npy", volume)
            np.save(root / f"site{number}" / "y" / f"case{k}.npy", volume[0].astype(np.uint8))


@pytest.mark.parametrize("limit", [2**30, 0])
def test_samples_may_have_a_file_each(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(base, "RESIDENT", limit)
    write_volumes(tmp_path)
    data = ready(tmp_path, Segmentation(20))
    assert data.input_shape == (1, 2, 3, 4) and data.client_names == ["site0", "site1"]
    assert isinstance(data._pool.samples.x, torch.Tensor) == (limit > 0)
    for client, count in enumerate([5, 7]):
        values = whole(data, client)[:, 0, 0, 0, 0].sort().values.tolist()
        assert values == [10 * client + k for k in range(count)]
        part = data.part(client, "train")
        assert part.y.dtype == torch.int64 and torch.equal(part.x[:, 0].long(), part.y)


def test_files_of_samples_that_do_not_fit_are_refused(tmp_path):
    write_volumes(tmp_path)
    np.save(tmp_path / "site1" / "x" / "case3.npy", np.zeros((1, 2, 9, 4), np.float32))
    with pytest.raises(MisconfigurationException, match=r"case3.npy has an array of shape \[1, 2, 9, 4\], and .* crop"):
        ready(tmp_path, Segmentation(20))
    (tmp_path / "site1" / "y" / "case3.npy").unlink()
    with pytest.raises(MisconfigurationException, match=r"site1 has x/case3.npy and no y/case3.npy"):
        ready(tmp_path, Segmentation(20))


def test_a_class_of_images_may_be_named_like_a_file(tmp_path):
    for name in ("x", "y"):
        (tmp_path / "site" / name).mkdir(parents=True)
        for k in range(4):
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "site" / name / f"{k}.png")
    assert ready(tmp_path).classes == ["x", "y"]
