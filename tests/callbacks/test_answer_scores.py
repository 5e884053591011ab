"""ROUGE-L of answers in rounds, tests and tables, as by hand; and runs are the same with it."""

import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adam

from chats import ROWS, fitted, made_tokenizer
from command import QUICKSTART, QUIET, pfl, refusal
from federations import Pause, blobs, fit, make_client, read_csv, same_end
from pfl_lightning.callbacks import AnswerScores, answer_scores
from pfl_lightning.callbacks.answer_scores import last_answers
from pfl_lightning.data import FederatedDataModule, Loaded, Natural
from pfl_lightning.methods import APFL, FedAvg, FedPer
from pfl_lightning.nets import Net
from pfl_lightning.tasks import NextToken

WORDS = "<end> ask a b c d e".split()
ENDS = frozenset({0})


class Talks(FederatedDataModule):
    """Three clients that answer in words of their own; an answer ends with a mark, and padding follows."""

    input_shape = (8,)
    task = NextToken(len(WORDS), exact_match=True)
    end_tokens = ENDS

    def __init__(self, val_fraction=0.4):
        settings = {"val_fraction": val_fraction, "test_fraction": 0.3, "batch_size": 4}
        super().__init__(num_clients=None, partitioner=Natural(), **settings)

    def encode(self, prompt):
        return [WORDS.index(word) for word in prompt.split()]

    def decode(self, tokens):
        return " ".join(WORDS[token] for token in tokens)

    def load(self):
        texts, owners = [], []
        for owner, answers in {"Bonn": ("d", "d a"), "Erfurt": ("d e",), "Ulm": ("d c b", "e", "d")}.items():
            for place in range(10):
                asked, answer = f"ask {WORDS[2 + place % 5]}", answers[place % len(answers)]
                texts.append((self.encode(asked), self.encode(f"{answer} <end>")))
                owners.append(owner)
        x, y = torch.zeros(len(texts), 8, dtype=torch.int64), torch.full((len(texts), 8), -100)
        for row, (asked, answer) in enumerate(texts):
            whole = torch.tensor([*asked, *answer])
            x[row, : len(whole) - 1], y[row, len(asked) - 1 : len(whole) - 1] = whole[:-1], whole[len(asked) :]
        return Loaded(x, y, owners)


class LastWord(Net):
    """The next word by the last one alone."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Embedding(num_classes, 6), nn.Linear(6, num_classes))


class Texts(Talks):
    """The same without answers that count as such."""

    task = NextToken(len(WORDS))


def common(one, other):
    """The length of the longest common subsequence, by recursion."""
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return 1 + common(one[:-1], other[:-1])
    return max(common(one[:-1], other), common(one, other[:-1]))


def by_hand(answered, right):
    """ROUGE-L by its formula, of words between blanks."""
    words = [(one.split(), other.split()) for one, other in zip(answered, right, strict=True)]
    return [{"rouge_l": 2 * common(one, other) / max(len(one) + len(other), 1)} for one, other in words]


@pytest.fixture(autouse=True)
def formula(monkeypatch, request):
    """The formula in place of the package, which not every environment has."""
    if "command" not in request.node.name and "package" not in request.node.name:
        monkeypatch.setattr(answer_scores, "scores", by_hand)


def run(*callbacks, method=FedPer, data=Talks, **settings):
    torch.manual_seed(0)
    talks = data()
    client = method(LastWord, Talks.input_shape, task=talks.task, optimizer=partial(Adam, lr=0.1))
    return fit(client, talks, callbacks=[*callbacks], **{"max_rounds": 4, "local_epochs": 3, **settings})


def expected(made, client, split, count, most):
    """A client's figure by its model as loaded, word for word and comparison by comparison."""
    part = made.data.part(client, split)
    made.back_on_device()
    model = made.federation.model_of(client).eval()
    found = []
    for x, y in zip(part.x[:count].tolist(), part.y[:count].tolist(), strict=True):
        first = next(place for place, token in enumerate(y) if token != -100)
        right = [WORDS[token] for token in y if token > 0]
        tokens = x[: first + 1]
        while len(tokens) < first + 1 + most:
            with torch.no_grad():
                token = int(model(torch.tensor([tokens[-8:]]))[0, -1].argmax())
            if token == 0:
                break
            tokens.append(token)
        answer = [WORDS[token] for token in tokens[first + 1 :]]
        found.append(2 * common(answer, right) / (len(answer) + len(right)))
    return fmean(found)


@pytest.mark.parametrize("method", [FedAvg, FedPer, APFL])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_figures_are_those_of_each_clients_answers_to_its_own_prompts(method, engine, tmp_path):
    made = run(AnswerScores(prompts=2, max_new_tokens=3), method=method, engine=engine, root=tmp_path)
    rows = read_csv(made.folder / "clients.csv")
    tested = [expected(made, client, "test", 2, 3) for client in range(3)]
    assert [float(row["test/rouge_l"]) for row in rows] == pytest.approx(tested, abs=1e-6) and len({*tested}) > 1
    sizes = [len(made.data.part(client, "val")) for client in range(3)]
    weighted = sum(expected(made, k, "val", 2, 3) * size for k, size in enumerate(sizes)) / sum(sizes)
    assert made.rows[-1]["val/rouge_l"] == pytest.approx(weighted)
    final = json.loads((made.folder / "summary.json").read_text())["final"]
    assert final["test/rouge_l"] == pytest.approx(fmean(tested))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_is_the_same_with_it(engine):
    with_it, without = run(AnswerScores(every=1), engine=engine), run(engine=engine)
    for row in with_it.rows:
        assert 0 <= row.pop("val/rouge_l") <= 1
    assert same_end(with_it, without)


@pytest.mark.parametrize(("every", "rounds"), [(None, {4}), (3, {3, 4}), (2, {2, 4}), (1, {1, 2, 3, 4})])
def test_rounds_are_every_so_many_and_the_last(every, rounds, tmp_path):
    made = run(AnswerScores(every), root=tmp_path)
    assert {row["round"] for row in made.rows if "val/rouge_l" in row} == rounds
    named = {int(row["round"]) for row in read_csv(made.folder / "rounds.csv") if row["val/rouge_l"] != ""}
    assert named == rounds


def test_tests_have_it_whatever_the_rounds(tmp_path):
    made = run(AnswerScores(3), root=tmp_path, test_every_round=True)
    assert {row["round"] for row in made.rows if "test/rouge_l" in row} == {3, 4}
    again = run(AnswerScores(3), root=tmp_path / "again")
    (tested,) = again.trainer.test(again.model, datamodule=again.data, ckpt_path=again.last)
    (validated,) = again.trainer.validate(again.model, datamodule=again.data, ckpt_path=again.last)
    assert tested["test/rouge_l"] == pytest.approx(made.rows[-1]["test/rouge_l"])
    assert validated["val/rouge_l"] == pytest.approx(made.rows[-1]["val/rouge_l"])
    # once for each client, though the callback was set up for three stages
    assert len(again.federation.evaluations.further) == 1


def test_the_best_round_is_tested_with_it(tmp_path):
    # a rate at which later rounds are worse, so that the best round isn't the last
    torch.manual_seed(0)
    client = FedPer(LastWord, Talks.input_shape, task=Talks.task, optimizer=partial(SGD, lr=30.0))
    made = fit(client, Talks(), callbacks=[AnswerScores()], root=tmp_path, max_rounds=4)
    selected = json.loads((made.folder / "summary.json").read_text())["selected"]
    assert selected["round"] < 4 and 0 <= selected["test/rouge_l"] <= 1


def test_a_resumed_run_has_the_figures_of_an_unbroken_one(tmp_path):
    whole = run(AnswerScores(1))
    run(AnswerScores(1), Pause(2), root=tmp_path)
    rest = run(AnswerScores(1), root=tmp_path, ckpt_path="last")
    assert same_end(whole, rest) and all("val/rouge_l" in row for row in rest.rows)


def test_clients_without_conversations_have_no_figure():
    made = run(AnswerScores(), data=partial(Talks, val_fraction=0.0))
    assert not any("val/rouge_l" in row for row in made.rows)


def test_the_last_answer_of_the_last_of_packed_texts_is_asked_for():
    x = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    y = torch.tensor([[-100, 3, -100, -100, 6, 7, -100, -100]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    assert last_answers(x, y) == [([1, 2, 3, 4, 5], [6, 7])]
    assert last_answers({"input_ids": x, "position_ids": positions}, y) == [([4, 5], [6, 7])]
    assert last_answers(x, x) == [([1], x[0].tolist())]


@pytest.mark.parametrize("settings", [{"every": 0}, {"prompts": 0}, {"max_new_tokens": 0}])
def test_numbers_below_one_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=f"{name}={value}"):
        AnswerScores(**settings)


def test_data_without_answers_are_refused():
    with pytest.raises(MisconfigurationException, match="data=Blobs with task Classification"):
        fit(make_client(), blobs(), callbacks=[AnswerScores()])
    with pytest.raises(MisconfigurationException, match="loss_on=assistant"):
        run(AnswerScores(), data=Texts)


def test_models_after_training_are_refused():
    with pytest.raises(MisconfigurationException, match="evaluate=before"):
        run(AnswerScores(), evaluate="both")


@pytest.mark.parametrize(("at_sites", "states", "named"), [(False, "rank", "client_states=rank"), (True, "", "sites")])
def test_models_elsewhere_are_refused(at_sites, states, named):
    data = SimpleNamespace(at_sites=at_sites, task=Talks.task, encode=len, decode=len, end_tokens=ENDS)
    federation = SimpleNamespace(data=data, options=SimpleNamespace(client_states=states, evaluate="before"))
    with pytest.raises(MisconfigurationException, match=named):
        AnswerScores().setup(SimpleNamespace(world_size=2), federation, "fit")


def test_a_missing_package_is_told_before_the_first_round(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MisconfigurationException, match="rouge-score"):
        run(AnswerScores())


def test_the_command_line_measures_conversations_by_the_package(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rouge_score", reason="pip install 'pfl-lightning[lm]'")
    monkeypatch.chdir(tmp_path)
    callback = "--trainer.callbacks+=AnswerScores --trainer.callbacks.prompts 3 --trainer.callbacks.max_new_tokens 4"
    rows = [row | {"split": split} for split in ("train", "val", "test", "test") for row in ROWS]
    checkpoint = fitted("FedSALoRA", made_tokenizer(), 2, rows, f"--data.split_column split {callback}")
    folder = checkpoint.parents[1]
    assert [bool(row["val/rouge_l"]) for row in read_csv(folder / "rounds.csv")] == [False, True]
    # the models of the same round answer the same conversations, given as texts
    for row in read_csv(folder / "clients.csv"):
        own = [each for each in rows if each["split"] == "test" and each["client"] == row["name"]][:3]
        Path("asked.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in own))
        asked = f"--client {row['name']} --data asked.jsonl --max_new_tokens 4 --out made.csv"
        with pytest.raises(SystemExit) as ended:
            pfl(f"predict --ckpt_path {checkpoint} {asked}")
        assert not ended.value.code
        found = fmean(float(each["rouge_l"]) for each in read_csv(Path("made.csv")))
        assert float(row["test/rouge_l"]) == pytest.approx(found)
    capsys.readouterr()
    told = refusal(f"fit {QUICKSTART} {QUIET} {callback}", capsys)
    assert "AnswerScores" in told and "ChatData" in told
