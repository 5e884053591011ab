"""What documents show as code runs."""

import csv
import importlib
import re
import shlex
import subprocess
import textwrap
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from command import QUIET, pfl
from federations import fit
from language_models import write_llama
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits, Natural, OwnedData
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import MLP
from tiny_datasets import WRITERS, write

ROOT = Path(__file__).parents[1]


def blocks(document: str) -> list[str]:
    """The document's pieces of Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def shown(document: str) -> dict[str, Any]:
    """What the document's Python defines."""
    names: dict[str, Any] = {}
    for block in blocks(document):
        exec(block, names)
    return names


def test_a_method_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = shown("CONTRIBUTING.md")
    torch.save({"x": torch.randn(60, 12), "y": torch.arange(60) % 3}, "shops.pt")
    data = names["Shops"](num_clients=4, partitioner=names["InOrder"](), batch_size=5)
    client = names["Confident"](weight=0.5, input_shape=(12,), num_classes=3, net=MLP)
    ended = fit(client, data, aggregator=names["Median"](), max_rounds=2)
    assert ended.federation.method == "Confident+Median"
    assert ended.rows[-1]["train/loss"] > 0


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_snippet_of_the_first_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rounds: list[int] = []

    class Short(FederatedTrainer):
        def __init__(self, max_rounds: int, **kwargs: Any) -> None:
            rounds.append(max_rounds)
            super().__init__(max_rounds=1, enable_progress_bar=False, enable_model_summary=False, **kwargs)

    monkeypatch.setattr("pfl_lightning.FederatedTrainer", Short)
    names = shown(page)
    assert rounds == [20] and isinstance(names["data"], Digits)


def commands(document: str) -> list[str]:
    """The lines of ``pfl-lightning`` that the document's pieces of shell call, with all their loops gone through."""
    pieces = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", (ROOT / document).read_text(), re.MULTILINE)
    told = 'pfl-lightning() { printf "%q " "$@"; echo; }; python() { :; }\n'
    script = told + textwrap.dedent("".join(piece for piece in pieces if "pfl-lightning" in piece))
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True)
    # of a loop over methods one line: each method's file is tested beside these protocols' own
    return list({re.sub(r"methods/\w+", "", line): line for line in done.stdout.splitlines()}.values())


LEDGER = [
    pytest.param(line, id=f"{name}-{k}", marks=pytest.mark.exhaustive if k > 2 else ())
    for name in ("claims", "privacy", "results", "robustness")
    for k, line in enumerate(commands(f"docs/{name}.md"))
]


def run_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The run that a command is, or the last one that it starts."""
    if not line.startswith("compare"):
        return line
    with pytest.raises(SystemExit) as ended:
        pfl([*shlex.split(line), "--commands", "--out", "runs"])
    assert not ended.value.code
    *_, last = capsys.readouterr().out.splitlines()
    return last[last.index("fit ") :]


@pytest.mark.parametrize("line", LEDGER)
@pytest.mark.by_default("claims-0", "privacy-1", "privacy-2", "robustness-2")
def test_each_command_of_the_ledger_makes_runs_that_there_can_be(line, capsys, monkeypatch):
    """It runs for two rounds with a few clients of random samples."""
    line = run_of(line, capsys)
    with pytest.raises(SystemExit) as ended:
        pfl([*shlex.split(line), "--print_config"])
    assert not ended.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_rounds"] > 0
    # torchvision knows the checksums of the real files
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    data = config["data"]["class_path"].rpartition(".")[2]
    length = "local_epochs" if config["trainer"]["local_epochs"] else "local_steps"
    small = f"--trainer.max_rounds 2 --trainer.{length} 1"
    if data in WRITERS:
        root = write(data, Path("files"), 1000)
        small += f" --data.root {root}"
        if "role_model" in str(config["model"]):
            write_llama(Path("role_model/model"), vocab_size=66, max_position_embeddings=80)
        if data not in ("FedHeartDisease", "FedTcgaBrca"):  # their files are their clients
            small += " --data.max_samples 900 --data.num_clients 5 --data.new_clients 0"
    if "samples_per_client" in config["data"]["init_args"].get("partitioner", {}).get("init_args", {}):
        small += " --data.partitioner.samples_per_client 40"
    pfl([*shlex.split(line), *shlex.split(f"{small} {QUIET} --trainer.default_root_dir small")])
    (end,) = Path("small").rglob("summary.json")
    assert len((end.parent / "rounds.csv").read_text().splitlines()) == 3


SOURCES = blocks("docs/data.md")
PACKAGES = {"TableData": "pandas", "HFData": "datasets", "FlowerDatasets": "datasets", "ChatData": "transformers"}


@pytest.mark.parametrize("block", SOURCES, ids=range(len(SOURCES)))
@pytest.mark.by_default(but=["11"])
def test_each_source_of_data(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, package in PACKAGES.items():
        if name in block:
            pytest.importorskip(package, reason="needs an extra, as the page says")
    assert len(block.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(block, names)
    data = names["data"] if "data" in names else names["Rivers"](num_clients=None, partitioner=Natural())
    data.setup()
    names_known = data.num_clients if isinstance(data.partitioner, Natural) else 0
    assert data.num_clients > 1 and len(data.client_names) == names_known


def test_the_sources_are_all_shown():
    text = " ".join(SOURCES)
    assert all(kind.__name__ in text for kind in OwnedData.__subclasses__() if kind.__module__.count(".") == 3)


HOW_TO = sorted(path for path in (ROOT / "docs" / "howto").glob("*.md") if path.stem != "index")
PIECE = re.compile(r"```python\n(.*?)```|^    (pfl-lightning (?:[^\n]*\\\n)*[^\n]*)$", re.DOTALL | re.MULTILINE)
"""A block of Python, or a command with its further lines."""


def small(line: str) -> str:
    """Return a command of a page with two rounds, and with one seed and no grid."""
    if line.startswith("compare"):
        fewer = re.sub(r"--seeds [\d ]+", "--seeds 0 ", re.sub(r"--tune_rounds \d+", "--tune_rounds 1", line))
        return re.sub(r"(--methods \S+ \S+)( [A-Z]\w*)*", r"\1", fewer) + " --trainer.max_rounds 2"
    return f"{line} {QUIET} --trainer.max_rounds 2" if line.startswith("fit") else line


@pytest.mark.parametrize("page", HOW_TO, ids=lambda path: path.stem)
@pytest.mark.by_default(but=["by_site", "sweep", "log", "table", "image_folders", "chat"])
def test_a_page_of_how_to_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Its Python and its commands, in their order and in one folder."""
    for name, package in {"wandb": "wandb", "TensorBoard": "tensorboard", "pandas": "pandas", "peft": "peft"}.items():
        if name in page.read_text():
            pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    names: dict[str, Any] = {}
    pieces = PIECE.findall(page.read_text())
    assert pieces
    for code, command in pieces:
        if code:
            exec(code, names)
        else:
            words = shlex.split(small(command.replace("\\\n", " ").removeprefix("pfl-lightning ")))
            with pytest.raises(SystemExit) if words[0] in ("compare", "predict") else nullcontext() as ended:
                pfl(words)
            assert ended is None or not ended.value.code


def test_conversations_end_as_adapters_of_peft_and_answers_by_client(tmp_path, monkeypatch):
    """The page's own rounds: each client answers in its own words."""
    pytest.importorskip("peft", reason="needs the extra lm")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, command in PIECE.findall((ROOT / "docs/howto/chat.md").read_text()):
        if code:
            exec(code, names)
        else:
            words = shlex.split(command.replace("\\\n", " ").removeprefix("pfl-lightning "))
            with pytest.raises(SystemExit) if words[0] == "predict" else nullcontext() as ended:
                pfl([*words, *(shlex.split(QUIET) if words[0] == "fit" else ())])
            assert ended is None or not ended.value.code
    with Path("answers.csv").open(newline="") as file:
        rows = {row["client"]: row["answer"] for row in csv.DictReader(file)}
    assert rows == {client: f"{greeting} dear" for client, greeting in names["greetings"].items()}
    assert {path.name for path in Path("adapters").iterdir()} == {*rows, "global"}
    assert names["kiel"].peft_config["default"].r == 8


TASKS = {
    "a hospital's CSV to a federation": "howto/table.md",
    "a regression, with a chronological split": "howto/regression.md",
    "AUROC and class weights": "howto/rare_classes.md",
    "four methods compared, by site": "howto/by_site.md",
    "a JPEG folder a client": "howto/image_folders.md",
    "a list of Datasets with transforms": "howto/datasets.md",
    "an own network": "howto/own_network.md",
    "a sweep of mu over methods": "howto/sweep.md",
    "W&B, TensorBoard, cosine": "howto/log.md",
    "predict for new rows of a site": "howto/predict_rows.md",
    "a sixth hospital that comes later": "howto/late_client.md",
    "the confusion matrix of client 3": "howto/confusion.md",
    "conversations of three clients to adapters": "howto/chat.md",
    "one client's model as a Lightning module": "howto/lightning_module.md",
    "a method of one's own": "tutorials/own_method.ipynb",
    "which method for which client": "advise.md",
    "all settings of data": "data.md",
    "sites that keep their data": "deployment.md",
    "claims, commands and hardware": "reviewers.md",
}
"""Tasks of people who know nothing of this package, and the page of each."""


def clicks(page: Path) -> set[Path]:
    """Return the pages that a page links to in its text."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)|^:link: (\S+)$", page.read_text(), re.MULTILINE)
    targets = (first or f"{second}{'.ipynb' if 'tutorials' in second else '.md'}" for first, second in links)
    return {(page.parent / target).resolve() for target in targets}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_found_from_the_first_page_in_two_clicks(task):
    first = clicks(ROOT / "docs" / "index.md")
    second = {target for page in first if page.suffix == ".md" and page.exists() for target in clicks(page)}
    assert (ROOT / "docs" / TASKS[task]).resolve() in first | second


MADE = ("method", "reference", "tutorials", "jupyter_execute", "readme.md", "contributing.md")
"""Pages in docs/ that the build of the documentation makes."""
WRITTEN = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if page.relative_to(ROOT / "docs").parts[0] not in MADE
]
PAGES = [str(page.relative_to(ROOT)) for page in WRITTEN if "_build" not in page.parts] + [
    "README.md",
    "CONTRIBUTING.md",
]


def heads(page: Path) -> set[str]:
    """Return the anchors of a page's heads, as the site names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        target = (path.parent / link) if link else path
        if target.resolve().relative_to(ROOT).parts[1:2] and target.resolve().relative_to(ROOT).parts[1] in MADE:
            notebook = ROOT / "notebooks" / target.name
            assert "tutorials" not in link or notebook.exists(), link
            continue
        assert target.exists(), link
        assert not anchor or anchor in heads(target), f"{link}#{anchor}"


def test_the_page_about_predictions(tmp_path, monkeypatch):
    pytest.importorskip("pandas", reason="needs the extra tables")
    monkeypatch.chdir(tmp_path)
    names = shown("docs/predict.md")
    assert list(names["predicted"]) == ["Bremen", "Ulm"] and names["predicted"]["Ulm"].class_names == ["no", "yes"]
    x = names["data"].inputs(names["rows"], "Bremen")
    outputs = torch.export.load("bremen.pt2").module()(x)
    assert torch.allclose(outputs, names["predicted"]["Bremen"].outputs, atol=1e-6)


def test_each_method_is_in_one_family_and_the_readme_has_the_families(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    gallery = importlib.import_module("gallery")
    named = Counter(name for family in gallery.families() for name in family["methods"])
    assert named == Counter(method.name for method in METHODS)
    assert [family["family"] for family in gallery.families()][-1] != "More methods", "add it to docs/families.yaml"
    assert (ROOT / "README.md").read_text() == gallery.written((ROOT / "README.md").read_text())
