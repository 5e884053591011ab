from itertools import product, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import CONFIGS, QUICKSTART, QUIET, pfl, summary
from language_models import write_llama
from pfl_lightning import methods
from pfl_lightning.data.shakespeare import LETTERS
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedrema import is_over
from pfl_lightning.nets import ResNet18
from sweeps import swept
from tiny_datasets import write

METHODS = sorted((CONFIGS / "methods").glob("*.yaml"))
DATA = sorted((CONFIGS / "protocols").glob("*.yaml"))
PAPER = sorted((CONFIGS / "paper").glob("*.yaml"))
LARGE = ("agnews", "cifar100", "tinyimagenet")


def pairs(methods: tuple[str, ...], data: tuple[str, ...], some: tuple[str, ...]) -> list[Any]:
    """Files of each of two kinds meet all methods, or all data; one setting never depends on a third file."""
    chosen = [pair for pair in product(METHODS, DATA) if pair[0].stem in methods or pair[1].stem in data]
    return swept(chosen, some, lambda pair: f"{pair[0].stem}-{pair[1].stem}")


# each kind of data, and of methods one whose server has samples; all methods' files run in tests of their names
OTHERS = tuple(f"fedavg-{data}" for data in ("mnist_dir0.1", "cifar10_pat2", "agnews_tokens", "diabetes_sites"))
PAIRS = pairs(("fedavg", "cwfedavg"), ("digits_dir0.1", "cifar10_dir0.1"), ("fedclassavg-digits_dir0.1", OTHERS[0]))
RUNS = pairs(("fedavg",), ("digits_dir0.1",), ("kt_pfl-digits_dir0.1", *OTHERS))
SAMPLES = 600


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def printed(files: list[Path], capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        pfl("fit " + " ".join(f"--config {file}" for file in files) + " --print_config")
    assert not ended.value.code
    return yaml.safe_load(capsys.readouterr().out)


def holds(config: Any, given: Any) -> bool:
    """Whether all that was given is in the configuration; classes may be named with or without their module."""
    if isinstance(given, dict):
        return all(holds(config[key], value) for key, value in given.items() if key != "class_path") and (
            "class_path" not in given or config["class_path"].split(".")[-1] == given["class_path"].split(".")[-1]
        )
    if isinstance(given, list):
        return len(config) == len(given) and all(map(holds, config, given))
    return bool(config == given)


def test_there_are_pairs():
    assert {path.stem for path in METHODS} >= {"local", "fedavg", "fedprox", "fedper"}
    names = {path.stem for path in DATA}
    sets, parts = ("digits", "mnist", "cifar10"), ("iid", "dir0.1", "pat2")
    assert names >= {f"{name}_{part}" for name in sets for part in parts}
    pathological = {"agnews": "pat2", "cifar100": "pat10", "tinyimagenet": "pat20"}
    assert names >= {f"{name}_{part}" for name in LARGE for part in ("iid", "dir0.1", pathological[name])}


def test_a_file_says_what_it_is():
    for path in (*METHODS, *DATA, *PAPER):
        # what stands at the end is for tables of methods
        comment = list(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
        assert 1 <= len(comment) <= 4, path


def test_a_method_is_its_client_and_aggregator():
    for path in METHODS:
        config = load(path)
        assert set(config) <= {"model", "aggregator"}, path
        assert not {"net", "optimizer"} & set(config["model"].get("init_args", {})), path


def test_data_leave_the_method_open():
    for path in DATA:
        config = load(path)
        assert set(config) == {"model", "data", "trainer"}, path
        assert set(config["model"]) == {"init_args"}, path


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.by_default("fedavg-mnist_dir0.1")
def test_a_pair_keeps_what_both_say(pair, capsys):
    method, data = pair
    config = printed([method, data], capsys)
    assert holds(config, load(method))
    assert holds(config, load(data))


@pytest.mark.parametrize("path", swept(PAPER, (PAPER[0].stem,), lambda path: path.stem))
def test_a_papers_own_value_follows_the_file_of_its_method(path, capsys):
    files = [CONFIGS / "methods" / f"{path.stem.rpartition('_')[0]}.yaml", CONFIGS / "protocols" / "digits_dir0.1.yaml"]
    assert holds(printed([*files, path], capsys), load(path))
    assert not holds(printed(files, capsys), load(path))


def test_the_ablation_without_an_end_of_its_period_never_ends_it():
    aggregator = load(CONFIGS / "methods" / "fedrema_mds.yaml")["aggregator"]["init_args"]
    assert not is_over([1.0, 1e-9], aggregator["delta"])


@pytest.mark.parametrize("data", [path for path in DATA if path.stem.startswith("tinyimagenet")], ids=lambda p: p.stem)
def test_statistics_of_a_net_with_batch_norm_stay_with_clients_as_in_the_papers_code(data):
    assert load(data)["model"]["init_args"]["buffers"] == "local"
    given = {"net": ResNet18, "input_shape": (3, 64, 64), "num_classes": 200, "buffers": "local"}
    client = FedAvg(**given)
    statistics = [name for name in client.state_dict() if name.endswith(("running_mean", "running_var"))]
    assert statistics and not any(map(client.is_shared, statistics))


@pytest.mark.exhaustive
def test_the_order_of_a_pair_does_not_matter(capsys):
    files = [CONFIGS / "methods" / "fedprox.yaml", CONFIGS / "protocols" / "digits_pat2.yaml"]
    assert printed(files, capsys) == printed(files[::-1], capsys)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return lambda name: write(name, root / name, SAMPLES)


@pytest.mark.parametrize("pair", RUNS)
@pytest.mark.exhaustive
def test_a_pair_runs(pair, tiny, monkeypatch):
    method, data = pair
    if data.stem == "roles_adapters":
        write_llama(Path("role_model/model"), vocab_size=len(LETTERS), max_position_embeddings=80)
    # torchvision knows the checksums of the real files
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    root = tiny(load(data)["data"]["class_path"])
    # 10 clients with a tenth of the classes each have all of them
    clients = 10 if data.stem.startswith(("cifar100", "tinyimagenet")) else 4 if data.stem == "flamby_heart" else 5
    fewer = " --data.partitioner.samples_per_client 40" if "dominant" in data.stem else ""
    samples = 300 if "_fedclassavg_dir" in data.stem else SAMPLES - 100
    small = f"--data.root {root} --data.max_samples {samples} --data.num_clients {clients}{fewer}"
    # large nets: two clients train, by one step
    small += " --trainer.local_steps 2" if "digits" in data.stem else " --trainer.local_steps 1"
    small += "" if "digits" in data.stem else " --trainer.clients_per_round 2"
    if method.stem in ("kt_pfl", "feddf", "fedmd"):
        small += f" --data.public {load(data)['data']['class_path']} --data.public.root {root} --data.public_samples 50"
    if "adapters" in getattr(methods, load(method)["model"]["class_path"]).requires:
        small += f" --model.net Adapted --model.net.net {load(data)['model']['init_args']['net']['class_path']}"
    pfl(f"fit --config {method} --config {data} {small} --trainer.max_rounds 1 {QUIET}")
    (run,) = Path("runs").glob("*/version_0")
    outcome = summary(str(run.relative_to("runs")))
    metric = outcome.get("monitor", {"metric": "acc"})["metric"]
    # some protocols test one model on one test set, and no client
    value = outcome["final"].get(f"test/global_{metric}", outcome["final"][f"test/{metric}"])
    assert 0 <= value <= (1 if metric == "acc" else 1000)
    assert len((run / "rounds.csv").read_text().splitlines()) == 2


CIFAR10 = [path for path in DATA if path.stem.startswith("cifar10_")]


@pytest.mark.parametrize("data", swept(CIFAR10, (CIFAR10[0].stem,), lambda path: path.stem))
def test_a_folder_of_images_takes_the_place_of_the_archive(data, capsys):
    config = printed([data, CONFIGS / "sources" / "cifar10_folder.yaml"], capsys)["data"]
    assert config["class_path"].endswith(".ImageFolder") and config["init_args"].pop("root") == "data/cifar10"
    assert holds(config["init_args"], load(data)["data"]["init_args"])


@pytest.mark.exhaustive
def test_a_protocol_runs_on_a_folder_of_images(tiny):
    small = f"--data.root {tiny('ImageFolder')} --data.max_samples 500 --data.num_clients 5"
    pfl(f"fit --config protocols/cifar10_iid --config sources/cifar10_folder {small} --trainer.max_rounds 1 {QUIET}")
    assert summary("FedAvg-ImageFolder/version_0")["final"]["test/acc"] >= 0


@pytest.mark.exhaustive
def test_quickstart_learns():
    # of twenty rounds the first eight
    pfl(f"fit {QUICKSTART} {QUIET} --trainer.max_rounds 8")
    assert summary("cwFedAvg-Digits/version_0")["final"]["test/acc"] > 0.85
