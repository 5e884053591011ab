"""Configurations are found by their names, and methods by theirs."""

import re
from pathlib import Path

import pytest

from command import QUIET, pfl, refusal
from pfl_lightning.cli.argv import resolved
from pfl_lightning.cli.compare.choices import choose
from pfl_lightning.cli.configs import FOLDER, find, names, squeezed, what
from pfl_lightning.methods.registry import METHODS, method_of

SMALL = f"{QUIET} --trainer.max_rounds 1 --data.max_samples 900"


def test_every_configuration_has_a_name_of_its_own_and_a_line_that_tells_what_it_is():
    known = names()
    assert {"quickstart", "methods/cwfedavg", "protocols/mnist_dir0.1", "paper/moon_cifar10"} <= known.keys()
    assert len({squeezed(name) for name in known}) == len(known) == len(list(FOLDER.rglob("*.yaml")))
    assert all(re.match(r"\w+.{20}", what(path)) for path in known.values())


@pytest.mark.parametrize(
    "name", ["methods/cwfedavg", "methods/cwfedavg.yaml", "methods/cwFedAvg", "configs/methods/cwfedavg"]
)
def test_a_name_is_found_in_any_working_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find(name) == FOLDER / "methods" / "cwfedavg.yaml"
    assert resolved(["fit", "--config", name, f"-c={name}", name]) == [
        "fit",
        "--config",
        str(find(name)),
        f"-c={find(name)}",
        name,
    ]


@pytest.mark.parametrize("file", ["methods/cwfedavg", "methods/cwfedavg.yaml"])
def test_a_file_of_the_user_wins(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir()
    Path(file).touch()
    assert find("methods/cwfedavg") == Path(file)


def test_a_run_is_named_after_its_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pfl(f"fit --config methods/cwfedavg --config protocols/digits_dir0.1 {SMALL}")
    (folder,) = Path("runs").iterdir()
    assert folder.name == "cwFedAvg-Digits"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("methods/cwfedavgg", "methods/cwfedavg"),
        ("cwfedavg", "methods/cwfedavg"),
        ("protocols/mnist_dir", "protocols/mnist_dir0.1"),
    ],
)
def test_the_nearest_name_is_told(name, near, capsys):
    assert f"--config {name} is no file; did you mean {near}" in refusal(f"fit --config {name}", capsys)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.by_default(
    "FedPer", "WDR", "FedAWA", "FedReMa", "FedClassAvg", "FedIT", "DP-SCAFFOLD", "HeteroFL", "kNN-Per"
)
def test_every_method_runs_by_its_name_or_says_how(method, capsys):
    assert find(f"methods/{method.name}") or method.file != method.name
    assert (path := find(f"methods/{method.file}")) is not None and path.parent == FOLDER / "methods"
    if method.client.__name__ != method.name:
        said = refusal(f"fit --model {method.name}", capsys)
        assert f"--config methods/{method.file}" in said
    assert method_of(method.client(), method.new_aggregator()) == method.name


def test_a_server_side_alone_is_told_too(capsys):
    said = refusal("fit --model FedAWA", capsys)
    assert said == "model=FedAWA is a server side; give --config methods/fedawa, or --aggregator FedAWA."
    assert (
        refusal("fit --model ClusterModels", capsys)
        == "model=ClusterModels is a server side; give --aggregator ClusterModels."
    )


@pytest.mark.parametrize("name", ["FedAWAL", "FedAWA-L", "KT-pFL"])
def test_a_method_given_as_a_server_side_is_told_by_its_configuration(name, capsys):
    said = refusal(f"fit --aggregator {name}", capsys)
    file = {"KT-pFL": "kt_pfl"}.get(name, "fedawa_l")
    assert said == f"aggregator={name} is no aggregator but a method; give --config methods/{file}."


def test_comparisons_take_the_same_names():
    words = ["cwFedAvg", "fedawa", "KT-pFL+weight", "Per-FedAvg", "local+paper/moon_cifar10"]
    labels = [choice.label for choice in choose(words, FOLDER / "methods")]
    assert labels == ["cwFedAvg", "FedAWA", "KT-pFL+weight", "Per-FedAvg", "Local+moon_cifar10"]


def test_the_command_lists_and_copies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in ("configs", "configs methods"):
        with pytest.raises(SystemExit) as ended:
            pfl(words)
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert "methods/fedrema " in shown and ("quickstart" in shown) == (words == "configs")
    with pytest.raises(SystemExit):
        pfl("configs --copy methods/fedrema")
    assert Path("fedrema.yaml").read_bytes() == (FOLDER / "methods" / "fedrema.yaml").read_bytes()
    assert "there already" in refusal("configs --copy methods/fedrema", capsys)
    assert "did you mean methods/fedrema" in refusal("configs --copy fedremaa", capsys)
    assert refusal("configs method5", capsys).endswith("no folder; did you mean methods?")
