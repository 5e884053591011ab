"""Whole models of clients, and lm-evaluation-harness on them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from chats import fitted, made_tokenizer
from command import pfl
from pfl_lightning.client import export_adapters, merge_adapters, run_tasks

peft = pytest.importorskip("peft", reason="needs the extra lm")
transformers = pytest.importorskip("transformers", reason="needs the extra lm")
QUESTIONS = [("hi there", ["good", "bad"], 0), ("are you", ["yes", "no"], 1), ("you are", ["bad", "good"], 1)]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The adapters of a run in the working folder."""
    monkeypatch.chdir(tmp_path)
    return export_adapters(fitted("FedSALoRA", made_tokenizer(), 2), "adapters")[1]


def write_task():
    rows = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("tasks").mkdir()
    Path("tasks/tiny.yaml").write_text(TASK)


def scored(model):
    """The share of answers whose tokens are the likeliest."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    net = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    right = 0
    for question, choices, answer in QUESTIONS:
        ids = tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = net(input_ids=ids).logits[0, -1]
        likeliest = max(choices, key=lambda word: logits[tokenizer.convert_tokens_to_ids(word)])
        right += likeliest == choices[answer]
    return right / len(QUESTIONS)


def test_a_merged_model_has_the_logits_of_its_adapters(folder):
    merge_adapters(folder, "whole")
    base = transformers.AutoModelForCausalLM.from_pretrained("model")
    x = torch.randint(0, 20, (2, 7))
    with torch.no_grad():
        plain = base.eval()(input_ids=x).logits
        expected = peft.PeftModel.from_pretrained(base, folder).eval()(input_ids=x).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained("whole").eval()(input_ids=x).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)
    assert (merged - plain).abs().max() > 1e-4
    assert transformers.AutoTokenizer.from_pretrained("whole").get_vocab() == made_tokenizer().get_vocab()


def test_a_folder_without_adapters_is_refused_by_its_name(tmp_path):
    with pytest.raises(MisconfigurationException, match="has no adapter_config"):
        merge_adapters(tmp_path, tmp_path / "whole")


def test_the_command_scores_each_model(folder, capsys):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness, which the command calls")
    write_task()
    (checkpoint,) = Path("runs").glob("*/*/checkpoints/last.ckpt")
    with pytest.raises(SystemExit) as ended:
        pfl(f"adapters {checkpoint} adapters --tasks tiny --include tasks --batch_size 2 --device cpu")
    assert not ended.value.code
    printed = capsys.readouterr().out
    for name in ("global", "Bonn", "Ulm"):
        scores = json.loads(Path("adapters", name, "benchmarks.json").read_text())
        assert scores["tiny"]["acc"] == pytest.approx(scored(Path("adapters", name, "merged")))
        assert f"{name}: tiny: " in printed
    assert run_tasks("model", ["tiny"], limit=1, include="tasks", device="cpu")["tiny"]["acc"] in (0, 1)
    with pytest.raises(MisconfigurationException, match="no task nowhere"):
        run_tasks("model", ["nowhere"], include="tasks")


def test_without_the_harness_tasks_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MisconfigurationException, match="lm-evaluation-harness, which isn't installed"):
        run_tasks("model", ["hellaswag"])
