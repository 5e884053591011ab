import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import AGNewsLetters
from pfl_lightning.data.ag_news import LETTERS, TOPICS
from pfl_lightning.tasks import NextToken


def articles(root, count=40, name="train"):
    (root / "ag_news").mkdir(exist_ok=True)
    rows = [f"{1 + row % 4},T{row},é {'abc' * (row % 3)}" for row in range(count)]
    (root / "ag_news" / f"{name}.csv").write_text("\n".join(rows), encoding="utf-8")


def texts(x):
    return ["".join(LETTERS[number] for number in row) for row in x.tolist()]


def test_targets_are_the_next_letters(tmp_path):
    articles(tmp_path)
    data = AGNewsLetters(str(tmp_path), max_length=8, parts=2)
    data.setup()
    assert len(LETTERS) == len(set(LETTERS)) == 48 and data.task == NextToken(48) and data.input_shape == (8,)
    loaded = data.load()
    assert texts(loaded.x)[:3] == ["t0 \0 \0\0\0", "t1 \0 abc", "t2 \0 abc"]
    counted = loaded.y != NextToken(48).ignore_index
    assert counted.sum(1)[:3].tolist() == [4, 7, 8]
    assert loaded.y[2].tolist() == [LETTERS.index(letter) for letter in "2 \0 abca"]
    assert loaded.y[0, :4].equal(loaded.x[0, 1:5])


def test_a_part_of_a_topic_is_a_client(tmp_path):
    articles(tmp_path)
    data = AGNewsLetters(str(tmp_path), max_length=8, parts=2, test_fraction=0.0, val_fraction=0.0)
    data.setup()
    assert data.client_names == sorted(f"{topic} {part}" for topic in TOPICS for part in (1, 2))
    held = [sorted(data.division.clients[client]["train"].tolist()) for client in range(8)]
    assert held[data.client_names.index("world 1")] == [0, 4, 8, 12, 16]
    assert held[data.client_names.index("science 2")] == [23, 27, 31, 35, 39]


def test_both_files(tmp_path):
    articles(tmp_path)
    articles(tmp_path, 12, "test")
    data = AGNewsLetters(str(tmp_path), max_length=8, parts=1, central_test="original")
    data.setup()
    assert data.original_test.tolist() == list(range(40, 52)) and len(data.central_data()) == 12


@pytest.mark.parametrize("wrong", [{"parts": 0}, {"max_length": 0}, {"parts": 1.5}])
def test_numbers_are_in_range(wrong):
    with pytest.raises(MisconfigurationException, match=rf"data\.{next(iter(wrong))}="):
        AGNewsLetters(**wrong)


def test_the_file_is_missing(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"there is no train.csv or test.csv"):
        AGNewsLetters(str(tmp_path)).setup()


def test_no_target_is_of_padding(tmp_path):
    articles(tmp_path)
    loaded = AGNewsLetters(str(tmp_path), max_length=30).load()
    padded = torch.tensor([text.endswith("\0" * 10) for text in texts(loaded.x)])
    assert padded.any() and (loaded.y[padded][:, -10:] == -100).all()
