"""Clients' models go on from prompts, and a run is the same with it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import blobs, fit, make_client, read_csv, same_end, untimed
from pfl_lightning.callbacks import GenerationSamples
from pfl_lightning.data import FederatedDataModule, Loaded, Natural
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import CharGRU, Net
from pfl_lightning.tasks import NextToken

LETTERS = ".abcd"


class Words(FederatedDataModule):
    """Three clients that write the letters in different orders."""

    input_shape = (8,)
    task = NextToken(len(LETTERS))
    end_tokens = frozenset({0})

    def __init__(self):
        super().__init__(num_clients=None, partitioner=Natural(), batch_size=4)

    def encode(self, prompt):
        return [LETTERS.index(letter) for letter in prompt]

    def decode(self, tokens):
        return "".join(LETTERS[token] for token in tokens)

    def load(self):
        texts = torch.tensor([self.encode((text * 9)[i : i + 9]) for text in ("ab", "bacd", "dcba") for i in range(8)])
        return Loaded(texts[:, :-1], texts[:, 1:], ["Bonn"] * 8 + ["Erfurt"] * 8 + ["Ulm"] * 8)


class Behind(nn.Module):
    """The next letter of the alphabet, as a unit vector; behind d comes the end."""

    def forward(self, x):
        return nn.functional.one_hot(torch.where(x == 4, 0, x + 1), len(LETTERS)).float()


class Following(Net):
    """The next letter of the alphabet, whatever came before."""

    def __init__(self, input_shape, num_classes):
        super().__init__(Behind(), nn.Linear(num_classes, num_classes))
        nn.init.eye_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)


def run(*callbacks, net=CharGRU, **settings):
    torch.manual_seed(0)
    client = FedPer(net, Words.input_shape, task=Words.task, optimizer=partial(SGD, lr=0.01))
    return fit(client, Words(), callbacks=[*callbacks], **settings)


def test_the_most_likely_letters_follow_until_one_ends_the_text():
    samples = GenerationSamples(["ab", "d", "a"], max_new_tokens=2, clients=["Ulm"])
    run(samples, net=Following, max_rounds=1)
    texts = [("ab", "cd"), ("d", ""), ("a", "bc")]
    assert samples.rows == [{"round": 1, "client": "Ulm", "prompt": prompt, "text": text} for prompt, text in texts]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_is_the_same_with_it(engine, tmp_path):
    samples = GenerationSamples(["ab", "c"], every=2, max_new_tokens=5, temperature=1.0)
    one = run(samples, engine=engine, root=tmp_path)
    other = run(engine=engine)
    assert same_end(one, other) and untimed(one.rows) == untimed(other.rows)
    written = [(row["round"], row["client"], row["prompt"], row["text"]) for row in samples.rows]
    clients = [(client, prompt) for client in ("Bonn", "Erfurt", "Ulm") for prompt in ("ab", "c")]
    assert [row[:3] for row in written] == [(done, *each) for done in (2, 3) for each in clients]
    assert all(len(text) <= 5 and set(text) <= set("abcd") for *_, text in written)
    assert [row["text"] for row in read_csv(one.folder / "generations.csv")] == [text for *_, text in written]


def test_texts_are_of_the_models_that_clients_have():
    # each client's own head and the common body, as evaluated: the text is that of the loaded client by hand
    samples = GenerationSamples(["ab"], max_new_tokens=4, clients=[1])
    made = run(samples, max_rounds=2)
    engine, job = made.federation.engines[0], made.federation.job(1)
    engine.become(job)
    tokens = [1, 2]
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(engine.module(torch.tensor([tokens]))[0, -1].argmax()))
    expected = made.data.decode(tokens[2 : tokens.index(0) if 0 in tokens else None])
    assert samples.rows[0]["client"] == "Erfurt" and samples.rows[0]["text"] == expected


def test_a_resumed_run_has_the_texts_of_all_rounds(tmp_path):
    settings = {"every": 1, "max_new_tokens": 3, "temperature": 1.0, "clients": [0]}
    whole = GenerationSamples(["ab"], **settings)
    run(whole, root=tmp_path / "whole", max_rounds=3)
    half = run(GenerationSamples(["ab"], **settings), root=tmp_path / "half", max_rounds=2)
    rest = GenerationSamples(["ab"], **settings)
    run(rest, root=tmp_path / "rest", max_rounds=3, ckpt_path=half.last)
    assert rest.rows == whole.rows and [row["round"] for row in rest.rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": []}, r"prompts=\[\]"),
        ({"prompts": "ab"}, "prompts='ab'"),
        ({"every": 0}, "every=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"clients": ["Mainz"]}, "Mainz"),
        ({"prompts": [""]}, "prompts has ''"),
    ],
)
def test_mistakes_are_told(settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        run(GenerationSamples(**{"prompts": ["ab"], **settings}))


def test_data_without_texts_are_refused():
    with pytest.raises(MisconfigurationException, match="data=Blobs with task Classification"):
        fit(make_client(), blobs(), callbacks=[GenerationSamples(["ab"])])


def test_states_on_several_ranks_are_refused():
    federation = SimpleNamespace(data=Words(), options=SimpleNamespace(client_states="rank"))
    with pytest.raises(MisconfigurationException, match=r"client_states=rank"):
        GenerationSamples(["ab"]).on_fit_start(SimpleNamespace(world_size=2), federation)
