"""Folders as PFLlib's scripts write them, and files that would run code."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import PFLlibData
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification, Regression

SIZES = {"train": (12, 8, 10), "test": (4, 2, 3)}


def write(root, dtype=np.float32, config=True):
    """A folder of three clients; inputs are 10 times the client's number, plus the sample's."""
    if config:
        root.mkdir(exist_ok=True)
        (root / "config.json").write_text(json.dumps({"num_clients": 3, "num_classes": 4, "non_iid": True}))
    for split, sizes in SIZES.items():
        (root / split).mkdir(parents=True)
        for client, size in enumerate(sizes):
            x = (10 * client + np.arange(size, dtype=dtype)).reshape(size, 1, 1, 1).repeat(4, axis=3)
            np.savez_compressed(root / split / f"{client}.npz", data={"x": x, "y": np.arange(size) % 4})
    return root


def ready(root, **settings):
    data = PFLlibData(str(root), **settings)
    data.setup()
    return data


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_clients_and_splits_are_those_of_the_files(tmp_path, dtype):
    data = ready(write(tmp_path, dtype))
    assert (data.input_shape, data.task, data.num_clients) == ((1, 1, 4), Classification(4), 3)
    for client in range(3):
        for split, sizes in SIZES.items():
            part = data.part(client, split)
            assert sorted(part.x[:, 0, 0, 0].tolist()) == [10 * client + k for k in range(sizes[client])]
            assert part.x.dtype == torch.float32 and ((part.x[:, 0, 0, 0] - 10 * client) % 4 == part.y).all()
        assert data.size(client, "val") == 0


def test_validation_samples_are_drawn_from_train_on_request(tmp_path):
    data = ready(write(tmp_path), val_fraction=0.25)
    assert [data.size(client, "val") for client in range(3)] == [3, 2, 2]
    assert [data.size(client, "test") for client in range(3)] == list(SIZES["test"])


def test_a_federation_trains_on_it(tmp_path):
    data = ready(write(tmp_path / "files"))
    run = fit(FedAvg(MLP, data.input_shape, data.num_classes), data, max_rounds=1)
    assert 0 <= run.logger.summary["final"]["test/acc"] <= 1


def test_files_beyond_the_number_of_clients_are_left_from_an_earlier_script(tmp_path):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_clients": 2, "num_classes": 4}))
    assert ready(tmp_path).num_clients == 2
    (tmp_path / "config.json").write_text(json.dumps({"num_clients": 5, "num_classes": 4}))
    with pytest.raises(MisconfigurationException, match=r"num_clients=5, and there is no train/3\.npz"):
        ready(tmp_path)


def test_without_a_configuration_there_must_be_a_task(tmp_path):
    write(tmp_path, config=False)
    with pytest.raises(MisconfigurationException, match="task=null"):
        ready(tmp_path)
    assert ready(tmp_path, task=Classification(7)).num_classes == 7
    with pytest.raises(MisconfigurationException, match="Regression"):
        ready(tmp_path, task=Regression())


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["whole", "entry", "array"])
def test_no_file_runs_code(tmp_path, where):
    write(tmp_path)
    harm = Harm(str(tmp_path / "harm"))
    content = {"x": np.array([harm], dtype=object) if where == "array" else np.zeros((1, 4)), "y": np.zeros(1)}
    if where == "entry":
        content["more"] = harm
    np.savez_compressed(tmp_path / "train" / "0.npz", data=np.array(harm if where == "whole" else content))
    with pytest.raises(MisconfigurationException, match=r"names .*mkdir, which isn't read as it could run code"):
        PFLlibData(str(tmp_path))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_arrays_of_all_pickles_are_read(tmp_path, protocol):
    write(tmp_path)
    x = np.arange(12.0).reshape(3, 4)
    held = np.array({"x": x, "y": [np.int64(0), np.int64(1), 2]}, dtype=object)
    with zipfile.ZipFile(tmp_path / "train" / "0.npz", "w") as archive, archive.open("data.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": ()})
        pickle.dump(held, file, protocol=protocol)
    if protocol == 2:
        # this protocol writes bytes by a function
        with pytest.raises(MisconfigurationException, match=r"_codecs\.encode"):
            PFLlibData(str(tmp_path))
    else:
        assert PFLlibData(str(tmp_path)).input_shape == (4,)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"x": np.zeros((2, 4))}, "'y'"),
        ({"x": np.zeros((2, 4)), "y": np.zeros(3)}, "has 2 x and 3 y"),
        ({"x": [["word"], ["words"]], "y": np.zeros(2)}, "x are no numbers"),
        ({"x": [[1, 2], [3]], "y": np.zeros(2)}, "is no file of PFLlib"),
        (np.zeros(3), "an array and no dict"),
    ],
    ids=["no y", "sizes", "texts", "ragged", "array"],
)
def test_other_contents_are_refused(tmp_path, content, says):
    write(tmp_path)
    np.savez_compressed(tmp_path / "train" / "0.npz", data=content)
    with pytest.raises(MisconfigurationException, match=says):
        PFLlibData(str(tmp_path))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="has no train/"):
        PFLlibData(str(tmp_path), Classification(4))
    write(tmp_path)
    (tmp_path / "train" / "0.npz").write_bytes(b"no archive")
    with pytest.raises(MisconfigurationException, match=r"0\.npz is no file of PFLlib"):
        PFLlibData(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MisconfigurationException, match="is no JSON"):
        PFLlibData(str(tmp_path))


def test_clients_of_other_shapes_are_refused(tmp_path):
    write(tmp_path)
    np.savez_compressed(tmp_path / "train" / "1.npz", data={"x": np.zeros((2, 5)), "y": np.zeros(2, dtype=int)})
    with pytest.raises(MisconfigurationException, match=r"1\.npz has inputs of shape \[5\], the first client \[1, 1"):
        ready(tmp_path)
