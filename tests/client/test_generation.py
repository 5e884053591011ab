"""Prompts answered by batches and from memory, as by passes of whole texts; and answers compared with right ones."""

import csv
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.func import functional_call

from chats import fitted, made_tokenizer, turns
from command import pfl, refusal
from language_models import ATTENTION, FAMILIES, LENGTH, TOKENS, write_models
from pfl_lightning.client import answers, generation, scores
from pfl_lightning.client.generation import continued
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import CausalLM, CharGRU
from pfl_lightning.tasks import NextToken

WIDE = 24
PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3], [1, 2], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


class Mixed(FedAvg):
    """The net twice in a pass, the second time without its adapters."""

    def forward(self, x):
        plain = {n: torch.zeros_like(p) for n, p in self.net.named_parameters() if "lora_B" in n}
        return 0.7 * self.net(x) + 0.3 * functional_call(self.net, plain, (x,))


class Counting(FedAvg):
    """Outputs that depend on the number of tokens in the pass."""

    def forward(self, x):
        logits = self.net(x)
        return logits.roll(x.shape[1], -1)


class Failing(FedAvg):
    """Passes of whole texts alone: a single token is an error."""

    def forward(self, x):
        if x.shape[1] == 1 and len(x) > 1:
            raise ValueError("one token")
        return self.net(x)


def client_of(models, method=FedAvg, family="llama"):
    torch.manual_seed(1)
    net = partial(CausalLM, model=str(models / family), attention=ATTENTION.get(family, "sdpa"))
    client = method(net, (LENGTH,), task=NextToken(TOKENS))
    with torch.no_grad():
        for name, parameter in client.named_parameters():
            # larger than at the beginning, where nearly all texts go on alike
            parameter.mul_(8) if "lora_" not in name and parameter.dim() > 1 else None
            if "lora_B" in name:
                parameter.normal_()
    return client


@torch.no_grad()
def by_whole_passes(client, prompt, count, window, ends=()):
    client.eval()
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        token = int(client(torch.tensor([tokens[-window:]]))[0, -1].argmax())
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.fixture
def lengths(monkeypatch):
    """Numbers of tokens of the passes of single texts."""
    seen, alone = [], generation.Reader.alone
    monkeypatch.setattr(generation.Reader, "alone", lambda self, text: seen.append(len(text)) or alone(self, text))
    return seen


@pytest.mark.parametrize("method", [FedAvg, Mixed])
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_from_memory_give_the_tokens_of_whole_passes(models, family, method, lengths):
    client = client_of(models, method, family)
    expected = [by_whole_passes(client, prompt, 10, WIDE) for prompt in PROMPTS]
    assert len({tuple(made) for made in expected}) > 2
    end = expected[0][4]
    made = dict(continued(client, PROMPTS, 10, WIDE, frozenset(), batch_size=3))
    # two rows in each of two steps were compared, and no others computed alone
    assert [made[place] for place in range(len(PROMPTS))] == expected and len(lengths) == 4
    made = dict(continued(client, PROMPTS, 10, WIDE, frozenset({end}), batch_size=5))
    assert made == {n: by_whole_passes(client, p, 10, WIDE, {end}) for n, p in enumerate(PROMPTS)}
    assert client.net.features.memory is None


@pytest.mark.parametrize("method", [Counting, Failing])
def test_methods_that_need_whole_texts_get_them(models, method, lengths):
    client = client_of(models, method)
    made = dict(continued(client, PROMPTS, 6, WIDE, frozenset()))
    assert made == {place: by_whole_passes(client, prompt, 6, WIDE) for place, prompt in enumerate(PROMPTS)}
    assert len(lengths) >= 6 * len(PROMPTS)


def test_texts_behind_the_window_lose_their_first_tokens(models):
    client = client_of(models)
    made = dict(continued(client, PROMPTS, 9, 8, frozenset()))
    assert made == {place: by_whole_passes(client, prompt, 9, 8) for place, prompt in enumerate(PROMPTS)}


def test_draws_are_those_of_each_prompts_generator_however_batches_are_cut(models):
    def drawn(method, size):
        generators = [torch.Generator().manual_seed(place) for place in range(len(PROMPTS))]
        client = client_of(models, method)
        return dict(continued(client, PROMPTS, 6, WIDE, frozenset(), 1.0, generators, batch_size=size))

    assert drawn(FedAvg, 5) == drawn(FedAvg, 1) == drawn(FedAvg, 2)
    assert drawn(Failing, 5) == drawn(FedAvg, 1)


def test_other_nets_take_prompts_one_after_another():
    torch.manual_seed(0)
    client = FedAvg(CharGRU, (WIDE,), task=NextToken(TOKENS))
    made = dict(continued(client, PROMPTS, 4, WIDE, frozenset()))
    assert made == {place: by_whole_passes(client, prompt, 4, WIDE) for place, prompt in enumerate(PROMPTS)}


class Numbers:
    end_tokens = frozenset({0})

    def encode(self, prompt):
        return [int(word) for word in prompt.split()]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def test_answers_are_texts_in_the_order_of_the_prompts(models):
    client, data = client_of(models), Numbers()
    prompts = [data.decode(prompt) for prompt in PROMPTS]
    made = answers(client, data, prompts, max_new_tokens=5, batch_size=2)
    assert made == [data.decode(by_whole_passes(client, prompt, 5, LENGTH, {0})) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": object()}, "data=object"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"prompts": [""]}, "no token"),
    ],
)
def test_mistakes_are_refused(models, settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        answers(**{"module": client_of(models), "data": Numbers(), "prompts": ["1"], **settings})


def subsequence(one, other):
    """The length of the longest common subsequence, by recursion."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + subsequence(one[1:], other[1:])
    return max(subsequence(one[1:], other), subsequence(one, other[1:]))


def test_scores_are_those_of_rouge_score_and_of_the_formula():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="pip install 'pfl-lightning[lm]'")
    pairs = [("The cat sat.", "the cat sat"), ("a b c d e", "a x c e"), ("", "a"), ("b a", "a b"), (" yes ", "yes")]
    found = scores(*zip(*pairs, strict=True))
    for (answer, reference), own in zip(pairs, found, strict=True):
        expected = scorer.RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure
        words = [text.lower().replace(".", "").split() for text in (answer, reference)]
        common = subsequence(*words)
        by_hand = 2 * common / sum(map(len, words)) if common else 0.0
        assert own["rouge_l"] == expected == pytest.approx(by_hand)
    assert [own["exact_match"] for own in found] == [0, 0, 0, 0, 1]
    with pytest.raises(MisconfigurationException, match="2 answers and 1 "):
        scores(["a", "b"], ["a"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run's checkpoint from the command line."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return Path(folder, fitted("FedAvg", made_tokenizer(), 1)).absolute()


def test_conversations_are_answered_and_compared_with_the_right_answers(checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(checkpoint.parents[4])
    rows = [
        {"messages": turns("hi", "good", "you"), "client": "Bonn"},
        {"messages": turns("hi there", "good"), "client": "Ulm"},
        {"prompt": "you", "response": "no", "client": "Bonn"},
        {"instruction": "are", "input": "you", "client": "Ulm"},
    ]
    Path("asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = f"predict --ckpt_path {checkpoint} --client all --data asked.jsonl --max_new_tokens 4"
    made = {}
    for name, options in (("each", "--client_column client"), ("all", "--batch_size 1")):
        with pytest.raises(SystemExit) as ended:
            pfl(f"{asked} --out {name}.csv {options}")
        assert not ended.value.code
        with Path(f"{name}.csv").open(newline="") as file:
            made[name] = list(csv.DictReader(file))
    assert "ROUGE-L" in capsys.readouterr().out
    shown = [(row["client"], row["prompt"], row["reference"]) for row in made["each"]]
    assert shown == [("Bonn", "you", ""), ("Bonn", "you", "no"), ("Ulm", "hi there", "good"), ("Ulm", "are\n\nyou", "")]
    assert len(made["all"]) == 8 and [row for row in made["all"] if row in made["each"]] == made["each"]
    assert [bool(row["rouge_l"]) for row in made["each"]] == [False, True, True, False]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "hi"}, "row 1"),
        ({"messages": turns("hi"), "client": 3}["messages"], "row 1"),
        ({"messages": []}, "row 1"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "row 1"),
        ({"prompt": 4}, "row 1"),
    ],
)
def test_other_rows_are_refused(checkpoint, monkeypatch, capsys, row, named):
    monkeypatch.chdir(checkpoint.parents[4])
    Path("wrong.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": "hi"}, row])))
    told = refusal(f"predict --ckpt_path {checkpoint} --client all --data wrong.jsonl", capsys)
    assert "wrong.jsonl" in told and named in told
