"""LEAF's JSON, of files that are written here."""

import json

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import LeafData
from pfl_lightning.tasks import Classification, Regression

USERS = {"ann": 9, "bob": 6, "eve": 12}


def content(sizes, offset=0, text=False):
    held = {}
    for number, (user, size) in enumerate(sizes.items()):
        x = [[float(offset + 100 * number + k)] * 4 for k in range(size)]
        y = [k % 3 for k in range(size)]
        if text:
            x, y = ["abca"[k % 2 :][:3] for k in range(size)], ["abc"[k] for k in y]
        held[user] = {"x": x, "y": y}
    return {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": held}


def write(path, *args, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content(*args, **kwargs)))


def ready(root, **settings):
    data = LeafData(str(root), Classification(3), **settings)
    data.setup()
    return data


def numbers(data, client, split):
    return sorted(int(row[0]) for row in data.part(client, split).x.flatten(1))


def test_users_keep_their_halves(tmp_path):
    write(tmp_path / "train" / "0.json", {"eve": 12, "ann": 9})
    write(tmp_path / "train" / "1.json", {"bob": 6}, 1000)
    write(tmp_path / "test" / "all.json", {"ann": 2, "bob": 3, "eve": 4}, 5000)
    data = ready(tmp_path, val_fraction=0.3)
    assert data.client_names == ["ann", "bob", "eve"] and data.input_shape == (4,)
    assert [data.size(client, "test") for client in range(3)] == [2, 3, 4]
    assert numbers(data, 0, "test") == [5000, 5001]
    assert sorted(numbers(data, 0, "train") + numbers(data, 0, "val")) == list(range(100, 109))
    assert data.size(0, "val") == 3


def test_a_folder_without_halves_is_split(tmp_path):
    write(tmp_path / "all.json", USERS)
    data = ready(tmp_path, input_shape=(1, 2, 2), num_clients=2)
    assert data.num_clients == 2 and data.part(0, "train").x.shape[1:] == (1, 2, 2) == data.input_shape
    assert data.size(0, "test") > 0


def test_letters_become_numbers(tmp_path):
    write(tmp_path / "all.json", USERS, text=True)
    data = ready(tmp_path, letters="abc")
    x = data.part(0, "train").x
    assert x.dtype == torch.int64 and {tuple(row) for row in x.tolist()} == {(0, 1, 2), (1, 2, 0)}
    with pytest.raises(MisconfigurationException, match=r"data.letters=null: x in .* are texts"):
        ready(tmp_path)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("bad", ["1e400", "NaN", "-Infinity"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, bad):
    held = content({"ann": 9, "bob": 6})
    for user in held["user_data"].values():
        user["y"] = [float(y) for y in user["y"]]
    held["user_data"]["bob"][name][4] = ["BAD"] * 4 if name == "x" else "BAD"
    (tmp_path / "all.json").write_text(json.dumps(held).replace('"BAD"', bad))
    with pytest.raises(MisconfigurationException, match=rf"{name} of user 'bob' in .*all\.json has .* in row 4"):
        LeafData(str(tmp_path), Regression()).setup()


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"has no LEAF files; put \*.json into it"):
        ready(tmp_path)
    write(tmp_path / "test" / "0.json", USERS)
    with pytest.raises(MisconfigurationException, match="has files in test/ and none in train/"):
        ready(tmp_path)
    write(tmp_path / "train" / "0.json", {"ann": 9, "zoe": 4})
    with pytest.raises(MisconfigurationException, match=r"2 of 4 clients without train .* first client 1 \(bob\)"):
        ready(tmp_path)
    (tmp_path / "train" / "0.json").write_text("{}")
    with pytest.raises(MisconfigurationException, match=r"0.json is no LEAF file \(KeyError"):
        ready(tmp_path)
    wrong = content(USERS)
    wrong["num_samples"][1] = 7
    (tmp_path / "train" / "0.json").write_text(json.dumps(wrong))
    with pytest.raises(MisconfigurationException, match="user bob has 6 x and 6 y where num_samples says 7"):
        ready(tmp_path)
    ragged = content(USERS)
    ragged["user_data"]["eve"]["x"][1] = [1.0]
    (tmp_path / "train" / "0.json").write_text(json.dumps(ragged))
    with pytest.raises(MisconfigurationException, match=r"x in .* are not numbers of one shape"):
        ready(tmp_path)
