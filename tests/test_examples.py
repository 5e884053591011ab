"""The examples do what they say."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from command import pfl
from pfl_lightning.callbacks import GenerationSamples
from pfl_lightning.client import save_adapters
from pfl_lightning.engines.slots import Slots
from pfl_lightning.messages import digest, tensors
from pfl_lightning.methods import FedAvg, FedPer

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def test_a_plain_loop_gives_the_same_weights(tmp_path, monkeypatch, capsys):
    import fedavg_by_hand

    monkeypatch.chdir(tmp_path)
    fedavg_by_hand.main()
    shown = capsys.readouterr().out
    assert shown.count("largest difference 0.0e+00") == len(shown.splitlines()) == 4


WANTED = "pip install 'pfl-lightning[lm]' for transformers and peft, which this test is about"


@pytest.fixture
def lora():
    pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("peft", reason=WANTED)
    import lora

    return lora


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_adapters_travel_alone_under_both_engines(lora, method):
    runs = [lora.fit(method, engine) for engine in ("sequential", "vectorised")]
    ends = [(t.lightning_module.state_dict(), [s.personal for s in t.lightning_module.clients.values()]) for t in runs]
    for one, other in zip(*map(tensors, ends), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    client = runs[1].lightning_module.client
    adapters = 2 * 4 * (64 + 3 * 64)
    head = 64 * client.task.outputs
    size = sum(parameter.numel() for parameter in client.net.parameters())
    sent, kept = lora.shares(runs[1])
    expected = (adapters + head, 0) if method is FedAvg else (adapters, head)
    assert (sent * size, kept * size) == pytest.approx(expected)
    stacked = {slot.name for slot in Slots(client) if isinstance(slot.tensor, torch.nn.Parameter)}
    assert stacked == {name for name, p in client.named_parameters() if "lora_" in name or "modules_to_save" in name}
    torch.manual_seed(0)
    untrained = lora.adapted_gpt2()(client.hparams.input_shape, client.task.outputs).state_dict()
    before = {name: untrained[name.removeprefix("net.")] for name in sorted(client.common_names)}
    after = {name: ends[1][0][name] for name in before}
    assert before and digest(before) == digest(after)


def test_adapters_of_a_client_can_be_saved_for_peft(lora, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = lora.fit(FedPer, "vectorised", root=tmp_path)
    path = Path(trainer.log_dir) / "checkpoints" / "last.ckpt"
    settings = {"net": lora.adapted_gpt2(), "optimizer": torch.optim.AdamW, "weights_only": True}
    client = FedPer.load_from_checkpoint(path, client=3, **settings).eval()
    save_adapters(client, tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 40_000
    base = AutoModelForCausalLM.from_pretrained(lora.base(), attn_implementation="eager")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    x = trainer.datamodule.part(3, "test").x
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, client(x))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_are_documented(path):
    assert path.read_text().startswith('"""')


@pytest.mark.exhaustive
def test_a_search_by_optuna_chooses_on_validation(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="pip install 'pfl-lightning[optuna]' for optuna, which this test is about")
    import sweep_optuna

    monkeypatch.chdir(tmp_path)
    study = sweep_optuna.search(trials=2, rounds=2)
    folders = [Path(trial.user_attrs["folder"]) for trial in study.trials]
    assert len(set(folders)) == 2
    for trial, folder in zip(study.trials, folders, strict=True):
        selected = json.loads((folder / "summary.json").read_text())["selected"]
        assert (trial.value, trial.user_attrs["test/acc"]) == (selected["val/acc"], selected["test/acc"])
        assert trial.intermediate_values.keys() == {1, 2}
        assert trial.value == pytest.approx(max(trial.intermediate_values.values()))
    assert study.best_value == max(trial.value for trial in study.trials)


@pytest.mark.exhaustive
def test_trials_of_a_search_that_fall_behind_are_ended(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna", reason="pip install 'pfl-lightning[optuna]' for optuna")
    import sweep_optuna

    monkeypatch.chdir(tmp_path)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=1.1))
    study.optimize(lambda trial: sweep_optuna.objective(trial, rounds=3), n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED and trial.intermediate_values.keys() == {1}


@pytest.mark.exhaustive
def test_the_sweep_of_weights_and_biases_runs_trials_and_has_what_it_chooses_by(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install 'pfl-lightning[wandb]' for wandb")
    from wandb_files import records

    path = Path(__file__).parents[1] / "examples" / "sweep_wandb.yaml"
    sweep = yaml.safe_load(path.read_text())
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODE": "offline", "SILENT": "true", "CACHE_DIR": "cache", "CONFIG_DIR": "config"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for trial in range(2):
        # what an agent does: it names the run, and puts the trial's settings in place of ${args}
        monkeypatch.setenv("WANDB_RUN_ID", f"trial{trial}")
        spaces = {
            name: space.get("values") or [space["min"], space["max"]] for name, space in sweep["parameters"].items()
        }
        settings = {name: values[trial] for name, values in spaces.items()}
        given = [f"--{name}={value}" for name, value in settings.items()]
        words = [w for word in sweep["command"] for w in (given if word == "${args}" else [word])]
        assert words[0] == "${program}" and sweep["program"] == "pfl-lightning"
        pfl([*words[1:], "--trainer.max_rounds=2", "--trainer.accelerator=cpu"])
        wandb.finish()
        # what writes its file may still be at it, and a process keeps what it has read of its environment
        wandb.teardown()
        folder = Path("lightning_logs", f"trial{trial}")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        for name, value in settings.items():
            first, *rest = name.split(".")
            where = config[first]
            for part in rest:
                where = where.get("init_args", where)[part]
            assert where == value
    assert sweep["metric"] == {"name": "selected/val/acc", "goal": "maximize"}
    for trial in range(2):
        (file,) = tmp_path.glob(f"wandb/offline-run-*/run-trial{trial}.wandb")
        logged = [
            {entry.key or "/".join(entry.nested_key): entry.value_json for entry in record.history.item}
            for record in records(file)
            if record.WhichOneof("record_type") == "history"
        ]
        values = [float(row["val/acc"]) for row in logged if "val/acc" in row]
        (choice,) = (float(row["selected/val/acc"]) for row in logged if "selected/val/acc" in row)
        assert len(values) == 2 and choice == max(values)


def test_clients_answer_in_their_own_words(tmp_path):
    pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("peft", reason=WANTED)
    import chat_clients

    (tmp_path / "model").mkdir()
    chat_clients.write_model(tmp_path / "model")
    chat_clients.write_conversations(tmp_path / "conversations.jsonl")
    trainer = chat_clients.fit(tmp_path, rounds=4, engine="sequential")
    # one common model could give a third of the clients their answers
    assert float(trainer.callback_metrics["val/exact_match"]) > 0.34
    (samples,) = (callback for callback in trainer.callbacks if isinstance(callback, GenerationSamples))
    texts = {row["client"]: row["text"].split()[0] for row in samples.rows if row["round"] == 4}
    assert texts == chat_clients.GREETINGS
    folders = Path(trainer.log_dir, "adapters")
    assert all((folders / client / "adapter_model.safetensors").exists() for client in texts)
