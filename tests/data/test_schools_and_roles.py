"""Chem97 and Shakespeare on small files of their layouts."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import Chem97, Natural, Shakespeare
from pfl_lightning.data.shakespeare import LETTERS
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import MLP, CharGRU
from pfl_lightning.tasks import NextToken, Regression
from tiny_datasets import write

SPLITS = ("train", "val", "test")


def made(kind, root, **settings):
    data = kind(root=str(root), **settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def schools(tmp_path_factory):
    return write("Chem97", tmp_path_factory.mktemp("data") / "chem", 300)


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    return write("Shakespeare", tmp_path_factory.mktemp("data") / "plays", 300)


def sizes(data):
    return [[data.size(client, split) for split in SPLITS] for client in range(data.num_clients)]


def test_schools_or_authorities_are_the_clients(schools):
    by_school, by_authority = made(Chem97, schools), made(Chem97, schools, by="authority")
    assert by_school.task == Regression() and by_school.input_shape == (3,)
    assert len(by_school.client_names) == 30 and {"1", "30"} <= set(by_school.client_names)
    # 10 pupils: 3 to test, a tenth of the others to validate
    assert sizes(by_school) == [[6, 1, 3]] * 30
    assert by_authority.client_names == ["1", "2", "3", "4", "5", "6"] and sizes(by_authority)[0] == [33, 4, 13]
    with pytest.raises(MisconfigurationException, match=r"data\.by='?town"):
        Chem97(by="town")


def test_pupils_go_to_their_own_school(schools):
    data = made(Chem97, schools)
    mean, deviation = (data.preprocessing[name]["score"] for name in ("mean", "deviation"))
    for client, name in enumerate(data.client_names):
        points = torch.cat([data.part(client, split).y for split in SPLITS]) * deviation + mean
        # the file's first 30 pupils have their school's number, from 0, and all others even points up to 10
        assert (points.round() == int(name) - 1).any()


def test_inputs_and_points_are_standardised_by_training_pupils(schools):
    data = made(Chem97, schools, test_fraction=0.4)
    parts = [data.part(client, "train") for client in range(30)]
    for values in (torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])):
        assert values.mean(0).abs().max() < 1e-5 and (values.std(0, correction=0) - 1).abs().max() < 1e-5
    assert data.preprocessing["features"] == ["female", "age", "gcsescore"] and data.fitted_on == "all clients"


def test_the_split_is_the_seeds(schools):
    one, same, other = (made(Chem97, schools, seed=seed).part(3, "test").x for seed in (1, 1, 2))
    assert one.equal(same) and not one.equal(other)


def test_schools_too_small_to_split_are_left_out_or_refused(tmp_path):
    root = write("Chem97", tmp_path / "few", 63)
    # three schools of three pupils, and 27 of two
    assert made(Chem97, root).client_names == ["1", "2", "3"]
    assert made(Chem97, root, val_fraction=0.0, partitioner=Natural(min_samples=2)).num_clients == 30
    with pytest.raises(MisconfigurationException, match="min_samples"):
        made(Chem97, root, partitioner=Natural())


@pytest.mark.parametrize("content", ["lea,school\n1,2\n", "lea,school,score,gender,age,gcsescore\n1,2,A,F,0,6\n"])
def test_another_table_is_refused(tmp_path, content):
    (tmp_path / "chem97").mkdir()
    (tmp_path / "chem97" / "chem97.csv").write_text(content)
    with pytest.raises(MisconfigurationException, match=r"chem97\.csv"):
        made(Chem97, tmp_path)


def test_missing_files_are_named(tmp_path):
    for kind, name in ((Chem97, "chem97.csv"), (Shakespeare, "shakespeare.txt")):
        with pytest.raises(MisconfigurationException, match=name):
            made(kind, tmp_path)


def test_a_role_is_a_client_with_windows_that_do_not_overlap(roles):
    data = made(Shakespeare, roles)
    # the messenger has one window
    assert data.client_names == [f"ROLE {k}" for k in range(10)]
    assert data.task == NextToken(66) and data.input_shape == (80,)
    parts = [data.part(4, split) for split in SPLITS]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    spoken = [speech.split("\n")[1] for speech in Path(roles, "shakespeare/shakespeare.txt").read_text().split("\n\n")]
    whole = "\n".join(spoken[4:60:10])
    # 6 speeches of 80 letters and 5 breaks are six windows and one of five letters, of which four have a next one
    assert len(whole) == 485 and len(x) == 7
    texts = {"".join(LETTERS[number] for number in row): target for row, target in zip(x.tolist(), y, strict=True)}
    assert set(texts) == {whole[start : start + 80].ljust(80, "\0") for start in range(0, 485, 80)}
    for text, target in texts.items():
        start = whole.index(text.rstrip("\0"))
        known = target[target != -100].tolist()
        assert "".join(LETTERS[number] for number in known) == whole[start + 1 : start + 81]


def test_in_the_order_of_time_the_last_windows_test(roles):
    data = made(Shakespeare, roles, client_split="time")
    # of seven windows the last two
    assert (data.part(4, "test").y == -100).any(1).tolist() == [False, True]
    assert not (data.part(4, "train").y == -100).any()


def test_windows_of_another_length(roles):
    data = made(Shakespeare, roles, length=20)
    assert data.input_shape == (20,) and data.part(0, "train").x.shape[1] == 20
    with pytest.raises(MisconfigurationException, match=r"data\.length=0"):
        Shakespeare(length=0)


def test_a_text_without_roles_is_refused(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "shakespeare.txt").write_text("To be, or not to be.\n")
    with pytest.raises(MisconfigurationException, match=r"shakespeare\.txt has no speeches"):
        made(Shakespeare, tmp_path)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_federations_of_schools_and_of_roles_train(schools, roles, engine):
    for data, net, metric in (
        (made(Chem97, schools, num_clients=4), MLP, "mae"),
        (made(Shakespeare, roles, num_clients=3, length=10), CharGRU, "perplexity"),
    ):
        client = FedPer(net, data.input_shape, task=data.task)
        run = fit(client, data, max_rounds=1, engine=engine)
        assert 0 < run.logger.summary["final"][f"test/{metric}"] < 100


def test_letters_of_a_prompt_and_of_an_answer():
    data = Shakespeare()
    assert data.decode(data.encode("To be\n")) == "To be\n" and not data.end_tokens
    assert data.encode("é") == [0]
