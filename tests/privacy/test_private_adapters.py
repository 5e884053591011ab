"""Differential privacy of conversations and of clients, of adapters on a frozen language model."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from command import QUIET, pfl
from federations import Spy, equal
from federations import fit as fit_run
from language_models import ATTENTION, FAMILIES, LENGTH, TOKENS, write_llama, write_models
from pfl_lightning.data import TensorData
from pfl_lightning.methods import Ditto, FedAvg, FedSALoRA, FFALoRA
from pfl_lightning.nets import CausalLM
from pfl_lightning.privacy import DPSGD, DPAverage, Laplace, PrivUnit, Release, epsilon
from pfl_lightning.tasks import NextToken

CLIENTS, EACH = 3, 6
CLIP = 0.02
ENGINES = ("sequential", "vectorised")
each_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def conversations(change=None, rows=(0,)):
    """Six conversations of each of three clients; of client 0's some are others, or count for nothing."""
    tokens = torch.randint(0, TOKENS, (CLIENTS * EACH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    if change == "others":
        tokens[list(rows)] = torch.randint(
            0, TOKENS, (len(rows), LENGTH + 1), generator=torch.Generator().manual_seed(7)
        )
    targets = tokens[:, 1:].clone()
    targets[1::3, 7:] = -100
    if change == "absent":
        # a loss over no token has a gradient of NaN, which no sum takes in
        targets[list(rows)] = -100
    owners = torch.arange(CLIENTS * EACH) // EACH
    return TensorData(
        tokens[:, :-1], targets, client=owners, task=NextToken(TOKENS), batch_size=EACH, test_fraction=0, val_fraction=0
    )


def client_of(models, family="llama", method=FedAvg, **net):
    torch.manual_seed(1)
    settings = {"lora": {"r": 2, "alpha": 4}, "attention": ATTENTION.get(family, "sdpa"), **net}
    net = partial(CausalLM, model=str(models / family), **settings)
    return method(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=1.0))


def fit(client, data=None, root="unused", **settings):
    return fit_run(client, data or conversations(), root, **{"limit_val_batches": 0, "max_rounds": 1, **settings})


def uploads(client, data=None, **settings):
    """Each client's adapters after a round, as one vector, and their names."""
    spy = Spy()
    fit(client, data, callbacks=[spy], **settings)
    weights = {k: update["weights"] for k, update in spy.updates[0].items()}
    return {k: torch.cat([own[n].double().flatten() for n in sorted(own)]) for k, own in weights.items()}, set(
        weights[0]
    )


# Conversations


@each_engine
@pytest.mark.parametrize(("family", "method"), [*((name, FedAvg) for name in FAMILIES), ("llama", FFALoRA)])
def test_one_conversation_moves_the_sum_by_the_bound_and_nobody_else_s(models, family, method, engine):
    if (family, engine) == ("gpt2", "vectorised"):
        pytest.skip("its dropout is refused under vmap")
    settings = {"engine": engine, "local_steps": 1, "example_privacy": DPSGD(1.0, CLIP)}
    before, _ = uploads(client_of(models, family, method), **settings)
    for change, bound in {"absent": CLIP, "others": 2 * CLIP}.items():
        after, _ = uploads(client_of(models, family, method), conversations(change), **settings)
        # all samples are in the batch, whose sum is divided by their number; the noise is the same
        moved = float((after[0] - before[0]).norm()) * EACH
        assert 0.5 * CLIP < moved <= bound * (1 + 1e-3)
        assert all(torch.equal(after[k], before[k]) for k in (1, 2))
    # the bound is of all adapters together, and reached
    absent, _ = uploads(client_of(models, family, method), conversations("absent"), **settings)
    assert float((absent[0] - before[0]).norm()) * EACH == pytest.approx(CLIP, rel=1e-3)


@each_engine
def test_without_the_bound_it_moves_further(models, engine):
    settings = {"engine": engine, "local_steps": 1, "example_privacy": DPSGD(0.0, 1e9)}
    before, _ = uploads(client_of(models), **settings)
    absent, _ = uploads(client_of(models), conversations("absent"), **settings)
    assert float((absent[0] - before[0]).norm()) * EACH > 5 * CLIP


@pytest.mark.parametrize("method", [FedAvg, FedSALoRA, FFALoRA, Ditto])
@pytest.mark.parametrize(
    "private",
    [
        {"example_privacy": DPSGD(1.0, CLIP)},
        {"aggregator": lambda: DPAverage(1.0, clip=CLIP)},
        {"local_privacy": PrivUnit(8.0)},
        {"local_privacy": Laplace(8.0)},
    ],
    ids=["samples", "clients", "directions", "numbers"],
)
@pytest.mark.by_default("FedAvg", "samples", "clients", "directions")
def test_adapters_travel_with_noise_and_the_model_below_stays(models, method, private):
    client = client_of(models, method=method)
    base = {n: p.detach().clone() for n, p in client.named_parameters() if "lora" not in n}
    made = {name: part() if callable(part) else part for name, part in private.items()}
    spy = Spy()
    run = fit(client, callbacks=[spy], **made)
    assert base and all(torch.equal(dict(client.named_parameters())[n], t) for n, t in base.items())
    for update in spy.updates[0].values():
        assert update["weights"] and all("lora" in name for name in update["weights"])
    assert 0 < run.federation.privacy()["epsilon"] < 100


def test_engines_agree_on_private_adapters(models):
    for private in ({"example_privacy": DPSGD(1.0, CLIP)}, {"local_privacy": PrivUnit(8.0, CLIP)}):
        one, other = (uploads(client_of(models), engine=engine, **private)[0] for engine in ENGINES)
        assert all(torch.allclose(one[k], other[k], atol=1e-4) for k in one)


# Clients


@each_engine
def test_one_client_moves_the_global_adapters_by_the_bound(models, engine):
    ends = {}
    for change in (None, "absent", "others"):
        run = fit(
            client_of(models), conversations(change, range(EACH)), engine=engine, aggregator=DPAverage(1.0, clip=CLIP)
        )
        weights = run.federation.aggregator.global_model()
        ends[change] = torch.cat([weights[n].double().flatten() for n in sorted(weights)])
    # the sum is divided by the number of clients, and the noise is the same
    assert float((ends["absent"] - ends[None]).norm()) * CLIENTS == pytest.approx(CLIP, rel=1e-3)
    assert CLIP * 0.5 < float((ends["others"] - ends[None]).norm()) * CLIENTS <= 2 * CLIP * (1 + 1e-3)


# The account


def test_epsilon_of_the_record_is_the_accountant_s(models, tmp_path):
    rounds, batch = 3, 2
    data = conversations()
    data.batch_size = batch
    run = fit(client_of(models), data, tmp_path, max_rounds=rounds, example_privacy=DPSGD(0.9, CLIP))
    steps = rounds * math.ceil(EACH / batch)
    expected = epsilon([Release(0.9, batch / EACH, steps)], delta=0.1 / EACH)
    assert json.loads((run.folder / "summary.json").read_text())["privacy"]["epsilon"] == pytest.approx(expected)
    run = fit(client_of(models), root=tmp_path, max_rounds=rounds, aggregator=DPAverage(0.9, clip=CLIP))
    expected = epsilon([Release(0.9, 1.0, rounds)], delta=0.1 / CLIENTS)
    assert json.loads((run.folder / "summary.json").read_text())["privacy"]["epsilon"] == pytest.approx(expected)


def test_private_adapters_go_on_bit_for_bit(models, tmp_path):
    settings = {"example_privacy": DPSGD(0.9, CLIP), "checkpoint_common": False}
    whole = fit(client_of(models), max_rounds=2, **settings)
    first = fit(client_of(models), root=tmp_path, max_rounds=1, **settings)
    resumed = fit(client_of(models), root=tmp_path, max_rounds=2, ckpt_path=str(first.last), **settings)
    assert equal(whole.federation.global_model(common=False), resumed.federation.global_model(common=False))
    assert whole.federation.privacy()["epsilon"] == resumed.federation.privacy()["epsilon"]


def test_the_command_of_the_page(tmp_path, monkeypatch):
    """docs/language_models.md's, on its tiny model and with fewer conversations."""
    transformers = pytest.importorskip("transformers", reason="needs the extra lm")
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    letters = {letter: number for number, letter in enumerate(["<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained("tiny")
    write_llama(Path("tiny"), vocab_size=len(letters), max_position_embeddings=128)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good morning to you"}]
    rows = [{"messages": turns, "client": name} for name in ("Bonn", "Ulm") for _ in range(8)]
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = (Path(__file__).parents[2] / "docs" / "language_models.md").read_text()
    (line,) = re.findall(r"^pfl-lightning (fit .*privacy/adapters(?:.*\\\n)*.*)$", page, re.MULTILINE)
    pfl(f"{line.replace(chr(92), ' ')} {QUIET} --trainer.max_rounds 1")
    (summary,) = Path("runs").rglob("summary.json")
    assert json.loads(summary.read_text())["privacy"]["unit"] == "sample"


# What doesn't go with it


def test_conversations_that_share_a_sample_are_refused(models):
    data = conversations()
    data.packing = True
    with pytest.raises(MisconfigurationException, match=r"example_privacy needs data\.packing=false"):
        fit(client_of(models), data, example_privacy=DPSGD(1.0))


def test_layers_computed_again_are_refused_by_name(models):
    client = client_of(models, gradient_checkpointing=True)
    with pytest.raises(MisconfigurationException, match=r"gradient_checkpointing=true .* take false"):
        fit(client, example_privacy=DPSGD(1.0))
    with pytest.raises(MisconfigurationException, match=r"chunk_tokens .* take null"):
        fit(client_of(models, chunk_tokens=4), example_privacy=DPSGD(1.0))
