import sys
from pathlib import Path

import pytest
import yaml

import pfl_lightning
from pfl_lightning.flower.class_paths import check_class_paths
from pfl_lightning.flower.template import Refused

CONFIGS = sorted((Path(pfl_lightning.__file__).parent / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_configurations_of_the_library_are_taken(path):
    settings = yaml.safe_load(path.read_text()) or {}
    check_class_paths({name: settings[name] for name in ("model", "aggregator") if name in settings})


@pytest.mark.parametrize(
    "text",
    [
        "FedPer",
        "pfl_lightning.methods.FedPer",
        "pfl_lightning.methods.fedper.FedPer",
        "pfl_lightning.nets.MLP",
        "pfl_lightning.tasks.Classification",
        "pfl_lightning.aggregators.WeightedAverage",
        "torch.optim.SGD",
        "torch.optim.lr_scheduler.ExponentialLR",
        "torch.nn.Linear",
        "torch.nn.CrossEntropyLoss",
        "torchmetrics.classification.MulticlassF1Score",
        "mine.Net",
        "bf16-mixed",
        "0.5",
        "-1e-3",
        "inf",
        "",
    ],
)
def test_what_may_be_named(text):
    check_class_paths({"model": {"class_path": text, "init_args": {"net": [text]}}}, own=["mine.Net"])


@pytest.mark.parametrize(
    "text",
    [
        "os.system",
        "builtins.exec",
        "subprocess.Popen",
        "torch.load",
        "torch.nn.os.system",
        "torch.optim.optimizer.functools.partial",
        "torch.nn.parallel.distributed.os.system",
        "torch.nn.functional.relu",
        "torch.nn.Sequential.load_state_dict",
        "torch.optim.sgd.Tensor",
        "torch.utils.data.DataLoader",
        "torchmetrics.utilities.data.torch",
        "pfl_lightning.cli.main.main",
        "pfl_lightning.runs.folder.Path",
        "pfl_lightning.runs.client_states.DiskStates",
        "pfl_lightning.data.TensorData",
        "pfl_lightning.federation.base.LightningModule",
        "pfl_lightningx.Net",
        "mine.net.Net",
        "mine.Nett",
        "../other.yaml",
        "other.yaml",
        "/etc/passwd",
        "{class_path: os.system}",
        '{"class_path": "os.system"}',
        "[os.system]",
        "class_path: os.system",
        "os.system\n",
        " os.system",
        "torch.nn.Linear ",
        "\uff4fs.system",
    ],
)
@pytest.mark.parametrize("place", ["class_path", "net", "task", "list", "deep"])
def test_what_may_not(text, place):
    settings = {
        "class_path": {"class_path": text},
        "net": {"class_path": "FedAvg", "init_args": {"net": text}},
        "task": {"init_args": {"task": {"class_path": text, "init_args": {}}}},
        "list": {"init_args": {"net": [{"class_path": "pfl_lightning.nets.MLP"}, {"class_path": text}]}},
        "deep": {"dict_kwargs": {"a": {"b": [[{"c": text}]]}}},
    }[place]
    with pytest.raises(Refused, match="neither a word, a number nor a class that this site knows") as refusal:
        check_class_paths({"model": settings}, own=["mine.Net"])
    assert str(refusal.value).startswith("model.")


def test_nothing_is_imported_that_may_not_be_named(tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refused):
        check_class_paths({"model": "bad_module.Net"})
    assert "bad_module" not in sys.modules
