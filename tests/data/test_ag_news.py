import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import IID, AGNews
from pfl_lightning.data.words import encode, number_words, tokenize

TRAIN = '"3","Oil up","Oil is up, says Oil Inc."\n"4","The ""new"" chip","A fast\\chip; a &lt;b&gt;new chip"\n'
TEST = "1,Talks,The talks\n2,Game,A new game\n"
HEADER = "label,title,description\n"


def articles(root, **files):
    (root / "ag_news").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "ag_news" / f"{name}.csv").write_text(text, encoding="utf-8")
    return AGNews(root=str(root), num_clients=2, partitioner=IID())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Wall St. Bears", "wall st . bears"),
        ("a,b(c)d!e?f", "a , b ( c ) d ! e ? f"),
        ('say "No"; it\'s: 1.5', "say no it ' s 1 . 5"),
        ("one<br />two\nthree\\four  #36;10", "one two three\\four #36 10"),
        ("Café-Bar", "café-bar"),
        ("", ""),
    ],
)
def test_words_are_those_of_basic_english(text, words):
    assert tokenize(text) == words.split()


def test_frequent_words_get_the_small_numbers():
    texts = [["b", "a", "c"], ["c", "a", "d"]]
    assert number_words(texts, size=10, min_count=1) == {"a": 1, "c": 2, "b": 3, "d": 4}
    assert number_words(texts, size=4, min_count=1) == {"a": 1, "c": 2, "b": 3}
    assert number_words(texts, size=10, min_count=2) == {"a": 1, "c": 2}


def test_texts_are_cut_and_padded():
    rows = encode([["a", "b", "a", "b"], ["x", "b"], []], {"a": 1, "b": 2}, length=3)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[1, 2, 1], [0, 2, 0], [0, 0, 0]]


@pytest.mark.parametrize("header", ["", HEADER, "Class Index,Title,Description\n"])
def test_both_files_are_pooled(tmp_path, header):
    dm = articles(tmp_path, train=header + TRAIN, test=header + TEST)
    x, y = dm.load()
    assert y.tolist() == [2, 3, 0, 1]
    assert x.shape == (4, *dm.input_shape) == (4, 200)
    assert (x > 0).sum(1).tolist() == [10, 10, 3, 4]
    # "a", "new" and "oil" occur three times; "chip", "game", "talks", "the" and "up" twice
    assert x[0, :2].tolist() == [3, 8]


@pytest.mark.parametrize(("name", "text", "labels"), [("train", TRAIN, [2, 3]), ("test", HEADER + TEST, [0, 1])])
def test_one_file_alone_will_do(tmp_path, name, text, labels):
    assert articles(tmp_path, **{name: text}).load()[1].tolist() == labels


def test_word_numbers_stay_whole_on_their_way_to_the_net(tmp_path):
    dm = articles(tmp_path, test=TEST * 5)
    dm.setup()
    for part in (dm.part(0, "train"), dm.client(0).to("cpu", torch.float16).train):
        assert part.x.dtype == torch.int64
        assert part.x.shape[1:] == dm.input_shape


def test_the_vocabulary_is_limited(tmp_path):
    articles(tmp_path, train=TRAIN, test=TEST)
    x, _ = AGNews(root=str(tmp_path), max_length=5, vocab_size=3).load()
    assert x.shape == (4, 5)
    assert x.max() == 2
    x, _ = AGNews(root=str(tmp_path), min_count=4).load()
    assert x.max() == 0


@pytest.mark.parametrize(("name", "least"), [("max_length", 1), ("vocab_size", 2), ("min_count", 1)])
def test_bad_settings_are_refused(name, least):
    with pytest.raises(MisconfigurationException, match=f"^data.{name}={least - 1} must be at least {least}$"):
        AGNews(**{name: least - 1})


def test_missing_files_are_one_sentence(tmp_path):
    with pytest.raises(MisconfigurationException) as refusal:
        AGNews(root=str(tmp_path)).setup()
    assert str(refusal.value) == (
        f"data.root='{tmp_path}': there is no train.csv or test.csv in {tmp_path / 'ag_news'}; put them there, or set "
        "data.root to the folder that ag_news is in"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "test.csv has no articles"),
        (HEADER, "test.csv has no articles"),
        (TEST + "5,A,B\n", "test.csv: row 3 is not a label from 1 to 4, a title and a description"),
        (HEADER + "0,A,B\n", "test.csv: row 2 is not"),
        ("1,A\n", "test.csv: row 1 is not"),
        ("\n" + TEST, "test.csv: row 1 is not"),
        ("sports,A,B\n", "test.csv: row 1 is not"),
        ('1,A,"' + "x" * 200_000 + '"\n', r"test.csv cannot be read as a CSV file \(field larger"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, why):
    with pytest.raises(MisconfigurationException, match=why):
        articles(tmp_path, test=text).load()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    dm = articles(tmp_path, test="")
    (tmp_path / "ag_news" / "test.csv").write_bytes(b"1,\xff\xfe,B\n")
    with pytest.raises(MisconfigurationException, match=r"test.csv cannot be read as a CSV file \('utf-8' codec"):
        dm.load()
