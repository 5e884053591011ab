"""Pairs of answers: layouts of rows, counted tokens, the reference, and training by every method of adapters."""

import json
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from chats import MARKED, WORDS, made_tokenizer, numbers, turns
from command import QUIET, pfl, refusal
from language_models import write_llama
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import PreferenceData
from pfl_lightning.flower.measured import Measured
from pfl_lightning.flower.sketch import Sketch
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import CausalLM

transformers = pytest.importorskip("transformers", reason="needs the extra lm")
pytest.importorskip("peft", reason="needs the extra lm")

ASKED = [{"role": "user", "content": "hi there"}]
WHOLE = "user : hi there </s> assistant : "
ADAPTERS = [
    "fedit",
    "ffa_lora",
    "fedsa_lora",
    "rolora",
    "flexlora",
    "hetlora",
    "fedex_lora",
    "flora",
    "feddpa",
    "fedalt",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    write_llama(folder, vocab_size=len(WORDS) + 3, max_position_embeddings=32, initializer_range=0.3)
    made_tokenizer(MARKED).save_pretrained(folder)
    return str(folder)


def rows(count=24):
    words = "hi there you are no".split()
    asked = [f"{words[i % 5]} {words[i // 5 % 5]}" for i in range(count)]
    return [
        {"client": "ab"[i % 2], "prompt": ask, "chosen": "good " * (i % 3 + 1), "rejected": "bad yes"}
        for i, ask in enumerate(asked)
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi there", "chosen": "yes", "rejected": "no no"},
        {"instruction": "hi there", "chosen": "yes", "rejected": "no no"},
        {"prompt": ASKED, "chosen": turns("", "yes")[1:], "rejected": turns("", "no no")[1:]},
        {"prompt": "hi there", "chosen": turns("hi there", "yes"), "rejected": turns("hi there", "no no")},
        {"chosen": turns("hi there", "yes"), "rejected": turns("hi there", "no no")},
        {
            "chosen": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "yes"}],
            "rejected": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "no no"}],
        },
        {"chosen": "\n\nHuman: hi there\n\nAssistant: yes", "rejected": "\n\nHuman: hi there\n\nAssistant: no no"},
    ],
    ids=["texts", "instruction", "messages", "text and messages", "conversations", "other names", "HH-RLHF"],
)
def test_every_layout_gives_the_same_tokens(model, row):
    pool = PreferenceData({"7": [row]}, model, max_length=16).load()
    texts = [numbers(f"{WHOLE}{answer} </s>") for answer in ("yes", "no no")]
    assert pool.x.tolist() == [[[*texts[0][:-1], 2], texts[1][:-1]]]
    begin = len(numbers(WHOLE)) - 1
    expected = [[-100] * begin + text[begin + 1 :] for text in texts]
    assert pool.y["tokens"].tolist() == [[expected[0] + [-100], expected[1]]]
    assert list(pool.client) == [7]


def test_the_reference_is_the_model_without_adapters(model):
    data = PreferenceData(rows(), model, max_length=16)
    pool = data.load()
    whole = transformers.AutoModelForCausalLM.from_pretrained(model).double().eval()
    for sample in range(0, len(pool.x), 5):
        for side in range(2):
            x, y = pool.x[sample, side], pool.y["tokens"][sample, side]
            with torch.no_grad():
                # the model has three rows more than the tokenizer has tokens
                logits = whole(x[None]).logits[0, :, : len(WORDS)]
            expected = sum(logits[place].log_softmax(0)[y[place]] for place in range(len(y)) if y[place] >= 0)
            assert float(pool.y["reference"][sample, side]) == pytest.approx(float(expected), rel=1e-5)


def test_answers_of_the_prompt_do_not_count(model):
    row = {"prompt": turns("hi", "good", "you"), "chosen": "yes", "rejected": "no", "client": 0}
    data = PreferenceData([row], model, max_length=32)
    counted = data.load().y["tokens"]
    assert [text[text != -100].tolist() for text in counted[0]] == [numbers("yes </s>"), numbers("no </s>")]


def test_pairs_without_two_different_answers_are_left_out(model):
    few = rows(4)
    few[1]["rejected"] = few[1]["chosen"]
    few[2]["prompt"] = "hi " * 20
    data = PreferenceData(few, model, max_length=16)
    assert len(data.load()) == 2
    assert data.head_lines[0] == ("texts", "2 pairs; 1 cut to 16 tokens; 2 without two different answers left out")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": [{"chosen": "yes", "rejected": "no", "client": 0}]}, ["row 0", "data.prompt"]),
        ({"path": [{"chosen": turns("hi", "no"), "rejected": turns("no", "no"), "client": 0}]}, ["row 0", "prompt"]),
        ({"path": [{"prompt": "hi", "chosen": None, "rejected": "no", "client": 0}]}, ["row 0", "chosen"]),
        ({"chosen": "best"}, ["data.chosen", "best", "rejected"]),
        ({"max_length": 3}, ["data.max_length=3"]),
        ({"reference": "nowhere"}, ["data.reference", "nowhere"]),
        ({"reference": None, "tokenizer": "made"}, ["data.reference=null", "model.net.model"]),
        ({"max_length": 99, "path": [rows(1)[0] | {"chosen": "no " * 60}]}, ["data.reference", "32"]),
    ],
)
def test_mistakes_are_refused(model, settings, named):
    settings = {"path": rows(), "tokenizer": model, "max_length": 16, **settings}
    if settings["tokenizer"] == "made":
        settings["tokenizer"] = made_tokenizer()
    with pytest.raises(MisconfigurationException) as error:
        PreferenceData(**settings).load()
    assert all(name in str(error.value) for name in named)


def fitted(model, method, engine, record=None, reference=None, **settings):
    [chosen] = [each for each in METHODS if each.file == method]
    data = PreferenceData(rows(), model, reference, max_length=16, batch_size=4, beta=0.5)
    data.setup()
    torch.manual_seed(1)
    net = partial(CausalLM, model=model, lora={"r": 2, "alpha": 8, "targets": "all-linear"}, **settings)
    client = chosen.client(net, data.input_shape, task=data.task, optimizer=partial(SGD, lr=0.3))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    trainer = FederatedTrainer(
        max_rounds=2, engine=engine, enable_checkpointing=False, callbacks=[record] if record else [], **quiet
    )
    trainer.fit(client, datamodule=data, aggregator=chosen.new_aggregator())
    return trainer.lightning_module


@pytest.mark.parametrize("method", ADAPTERS)
def test_each_method_of_adapters_learns_preferences_under_both_engines(model, method):
    records = [RoundLogger() for _ in range(2)]
    for engine, record in zip(("sequential", "vectorised"), records, strict=True):
        fitted(model, method, engine, record)
    one, other = ([row["val/loss"] for row in record.rows] for record in records)
    assert one == pytest.approx(other, abs=1e-4)
    assert one[-1] < math.log(2) - 0.05
    last = records[0].rows[-1]
    assert last["val/reward_acc"] == 1 and last["val/reward_margin"] > 0


def test_another_reference_than_the_net_is_told(model, tmp_path):
    torch.manual_seed(5)
    write_llama(tmp_path, vocab_size=len(WORDS) + 3, max_position_embeddings=32, initializer_range=0.3)
    with pytest.warns(UserWarning, match=r"data\.reference"):
        fitted(model, "fedit", "sequential", reference=str(tmp_path))


def test_the_command_line_takes_a_file_with_a_list_for_each_client(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.json").write_text(json.dumps({name: rows(12) for name in ("Bonn", "Ulm")}))
    settings = (
        f"fit {QUIET} --config methods/fedsa_lora --model.net CausalLM --model.net.model {model} --data PreferenceData "
        f"--data.path pairs.json --data.tokenizer {model} --data.max_length 16 --trainer.max_rounds 1"
    )
    pfl(settings)
    shown = capsys.readouterr().out
    assert "test loss" in shown and "reward_acc" in shown
    assert "data.beta=0" in refusal(f"{settings} --data.beta 0", capsys)


def test_the_settings_of_fed_chatbotpa_run_on_its_layout(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Fed-ChatbotPA").mkdir()
    (tmp_path / "Fed-ChatbotPA/chatbotPA_747c_10k.json").write_text(json.dumps({"0": rows(12), "1": rows(13)}))
    pfl(
        f"fit {QUIET} --config methods/fedit --config sources/chatbotpa --model.net.model {model} "
        f"--data.tokenizer {model} --data.max_length 32 --data.chat_template null --trainer.max_rounds 1 "
        "--trainer.clients_per_round 2"
    )
    assert next(tmp_path.glob("runs/*/version_0/rounds.csv")).read_text().count("\n") == 2


def test_a_server_without_pairs_knows_the_metrics_and_updates_of_sites(model):
    data = PreferenceData(rows(), model, max_length=16)
    net = partial(CausalLM, model=model, lora={"r": 2})
    client = FedAvg(net, data.input_shape, task=data.task)
    ranges = Measured(client).ranges
    assert ranges["reward_acc"] == (0, 1) and ranges["reward_margin"] == ranges["loss"]
    (made,) = Sketch(data.task, data.input_shape).parts([0], "train")
    data.task.check(made.y, "a sketch")
    assert client(made.x[:2]).shape == (2, 2, 16, len(WORDS))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_steps_of_several_batches_are_on_all_their_pairs(model, engine):
    data = partial(PreferenceData, rows(), model, max_length=16, test_fraction=0, val_fraction=0)
    ends = []
    for size, batches in ((4, 1), (2, 2)):
        torch.manual_seed(1)
        net = partial(CausalLM, model=model, lora={"r": 2})
        client = FedAvg(net, (2, 16), task=data().task, optimizer=partial(SGD, lr=0.3))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
        trainer = FederatedTrainer(
            max_rounds=1, engine=engine, accumulate_grad_batches=batches, enable_checkpointing=False, **quiet
        )
        trainer.fit(client, datamodule=data(batch_size=size))
        ends.append(trainer.lightning_module.global_model(common=False))
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-6) for name in ends[0])


def test_rows_are_known_again_where_the_reference_rounds_otherwise(model, monkeypatch):
    digests = []
    computed = PreferenceData._log_probabilities
    for factor in (1.0, 1.0 + 1e-6):
        monkeypatch.setattr(PreferenceData, "_log_probabilities", lambda *args, factor=factor: factor * computed(*args))
        data = PreferenceData(rows(), model, max_length=16)
        data.setup()
        digests.append(data.split_digests()[..., :2])
    assert torch.equal(*digests) and digests[0].any()
