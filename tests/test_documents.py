"""What documents show as code runs."""

import csv
import doctest
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree
from collections import Counter
from configparser import ConfigParser
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import yaml
from torch.optim import AdamW

from chats import made_tokenizer
from command import QUIET, pfl
from federations import fit
from language_models import write_llama
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits, Natural, sources
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


@pytest.fixture
def short(monkeypatch) -> list[int]:
    """Let trainers of the documents run one round of one step; the rounds that each asks for."""
    rounds: list[int] = []

    class Short(FederatedTrainer):
        def __init__(self, max_rounds: int, **kwargs: Any) -> None:
            rounds.append(max_rounds)
            quiet = {"enable_progress_bar": False, "enable_model_summary": False}
            super().__init__(max_rounds=1, local_steps=1, **quiet, **kwargs)

    monkeypatch.setattr("pfl_lightning.FederatedTrainer", Short)
    return rounds


def test_a_method_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = shown("CONTRIBUTING.md")
    torch.save({"x": torch.randn(60, 12), "y": torch.arange(60) % 3}, "shops.pt")
    data = names["Shops"](num_clients=4, partitioner=names["InOrder"](), batch_size=5)
    client = names["Confident"](weight=0.5, input_shape=(12,), num_classes=3, net=MLP)
    ended = fit(client, data, aggregator=names["Median"](), max_rounds=2)
    assert ended.federation.method == "Confident+Median"
    assert ended.rows[-1]["train/loss"] > 0


def test_the_command_of_a_method_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # another test may have imported a file of this name
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    confident, median, _ = blocks("CONTRIBUTING.md")
    Path("mine.py").write_text(confident + median)
    (command,) = re.findall(r"```bash\npfl-lightning (.*?)\n```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    pfl(shlex.split(f"{command} --trainer.max_rounds 1 {QUIET}"))
    assert list(Path("runs").glob("Confident+Median-Digits/*/rounds.csv"))


def test_the_configuration_of_a_table(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas", reason="needs the extra tables")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "data" / "tables.md").read_text(), re.DOTALL)
    Path("table.yaml").write_text(block)
    with pytest.raises(SystemExit) as ended:
        pfl("fit --model FedAvg --config table.yaml --print_config")
    assert not ended.value.code
    given = yaml.safe_load(block)["data"]
    parsed = yaml.safe_load(capsys.readouterr().out)["data"]
    assert parsed["class_path"].endswith(given["class_path"])
    assert parsed["init_args"]["preprocessing"]["dates"] == given["init_args"]["preprocessing"]["dates"]


@pytest.mark.exhaustive
def test_the_networks_of_others(short, tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
    monkeypatch.chdir(tmp_path)
    # for the second block, which begins with a shape
    names: dict[str, Any] = {"shape": (3, 64, 64)}
    for block in blocks("docs/nets.md"):
        exec(block, names)
    assert short == [2] and isinstance(names["resnet"]((1, 8, 8), 10), torchvision.models.ResNet)


@pytest.mark.exhaustive
def test_the_language_models(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra lm")
    pytest.importorskip("peft", reason="needs the extra lm")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20, max_position_embeddings=16, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("models/qwen")
    tokens = torch.randint(0, 20, (12, 9))
    names = {"tokens": tokens, "targets": tokens[:, 1:], "names": ["Anna", "Bert", "Cleo"] * 4, "vocabulary": 20}
    for block in map(textwrap.dedent, python_of("docs/language_models.md")):
        if "run.ckpt" in block:
            pytest.importorskip("rouge_score", reason="needs the extra lm")
            made_tokenizer().save_pretrained("models/qwen")
            (checkpoint,) = Path("runs").glob("*/*/checkpoints/last.ckpt")
            Path("run.ckpt").symlink_to(checkpoint)
        if "PeftModel" in block:
            (adapters,) = Path("runs").glob("*/*/adapters")
            Path("adapters").symlink_to(adapters)
        exec(block, names)
    assert names["model"].peft_config["default"].r == 8
    assert len(names["made"]) == 2 and all(isinstance(answer, str) for answer in names["made"])
    assert {path.name for path in Path("adapters").iterdir()} == {"Anna", "Bert", "Cleo", "global"}
    schedule = names["schedule"](AdamW([torch.nn.Parameter(torch.ones(1))], lr=3e-4))
    assert schedule.get_last_lr() == pytest.approx([3e-5])


BLOCKS = {
    "README.md": "test_the_snippet_of_the_first_page",
    "CONTRIBUTING.md": "test_a_method_of_ones_own, test_the_command_of_a_method_of_ones_own",
    "docs/compression.md": "the class of one's own: tests/test_compression.py and tests/flower/test_compressed.py",
    "docs/data.md": "test_each_source_of_data",
    "docs/data/arrays.md": "test_each_source_of_data",
    "docs/data/changes.md": "test_each_source_of_data",
    "docs/data/folders.md": "test_each_source_of_data",
    "docs/data/splits.md": "test_each_source_of_data",
    "docs/data/tables.md": "test_each_source_of_data, test_the_configuration_of_a_table",
    "docs/data/texts.md": "test_each_source_of_data",
    "docs/deployment.md": "a site's own class; a client's checkpoint, in tests/flower/test_export.py",
    "docs/index.md": "test_the_snippet_of_the_first_page",
    "docs/language_models.md": "test_the_language_models; its command: tests/data/sources/test_chat_data.py",
    "docs/nets.md": "test_the_networks_of_others",
    "docs/participation.md": "tests/selection/test_cohort_documents.py",
    "docs/predict.md": "test_the_page_about_predictions",
    "docs/privacy.md": "tests/privacy/test_privacy_document.py",
    "docs/robustness.md": "tests/server/means/test_robustness_document.py",
    "docs/round.md": "tests/test_stages.py",
}
"""Pages with blocks of code between fences, and the tests that run these; indented commands run in test_commands.py."""


def python_of(document: str) -> list[str]:
    """Return the document's blocks of Python, in lists too."""
    return re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def test_each_block_of_code_has_a_test():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/data").glob("*.md"),
    ]
    fenced = re.compile(r"^ *```(python|bash|yaml|console|sh)$", re.MULTILINE)
    with_code = {
        str(page.relative_to(ROOT))
        for page in pages
        if page.stem not in ("readme", "contributing") and fenced.search(page.read_text())
    }
    assert with_code == set(BLOCKS)
    for told in BLOCKS.values():
        for name in re.findall(r"\btest_\w+\b(?!\.py)", told):
            assert name in globals(), name
        for path in re.findall(r"tests/\S+\.py", told):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_snippet_of_the_first_page(page, short, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = shown(page)
    assert short == [20] and isinstance(names["data"], Digits)


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
@pytest.mark.by_default("privacy-1")
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


DATA = ["docs/data.md", *(f"docs/data/{path.name}" for path in sorted((ROOT / "docs" / "data").glob("*.md")))]
SOURCES = {f"{Path(page).stem}-{k}": block for page in DATA for k, block in enumerate(blocks(page))}
PACKAGES = {
    "TableData": "pandas",
    "SeriesData": "pandas",
    "HFData": "datasets",
    "FlowerDatasets": "datasets",
    "ChatData": "transformers",
    "PreferenceData": "transformers",
}


@pytest.mark.parametrize("block", SOURCES.values(), ids=SOURCES)
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
    text = " ".join(SOURCES.values())
    assert all(name in text for name in sources.__all__ if name != "OwnedData")


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
@pytest.mark.by_default(
    but=[
        "without_server",
        "by_site",
        "datasets",
        "late_client",
        "forecast",
        "sweep",
        "log",
        "table",
        "image_folders",
        "chat",
        "volumes",
        "autoencoder",
        "detection",
    ]
)
def test_a_page_of_how_to_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Its Python and its commands, in their order and in one folder."""
    optional = {
        "wandb": "wandb",
        "TensorBoard": "tensorboard",
        "pandas": "pandas",
        "peft": "peft",
        "optuna": "optuna",
        "faster_coco_eval": "faster_coco_eval",
    }
    for name, package in optional.items():
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


def test_the_sweep_tunes_each_method_but_fedavg():
    (command,) = [command for _, command in PIECE.findall((ROOT / "docs/howto/sweep.md").read_text()) if command]
    words = shlex.split(command.replace("\\\n", " "))
    at = words.index("--methods") + 1
    tuned = {after.partition("=")[0].rpartition(".")[2] for word, after in pairwise(words) if word == "--tune"}
    clients = {method.client.__name__: method.client for method in METHODS}
    found = {name: tuned & set(inspect.signature(clients[name]).parameters) for name in words[at : at + 3]}
    assert {name: len(settings) for name, settings in found.items()} == {"FedProx": 1, "Ditto": 1, "FedAvg": 0}
    assert set().union(*found.values()) == tuned


def test_a_search_with_optuna_gives_each_method_its_own_settings():
    """The page's Python, whose trials have the settings of each method and no others."""
    optuna = pytest.importorskip("optuna", reason="needs the extra optuna")
    (code,) = [code for code, _ in PIECE.findall((ROOT / "docs/howto/sweep.md").read_text()) if code]
    names: dict[str, Any] = {}
    head, _, _ = code.partition("for method in spaces")
    exec(head, names)
    found = {}
    for method in names["spaces"]:
        study = optuna.create_study(direction="maximize")
        study.optimize(lambda trial, method=method: names["tried"](method, trial), n_trials=1)
        found[method.__name__] = set(study.best_params)
        assert 0 <= study.best_value <= 1 and 0 <= study.best_trial.user_attrs["test"] <= 1
    assert found == {"FedAvg": {"lr"}, "FedProx": {"lr", "mu"}, "Ditto": {"lr", "personal_lambda"}}


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


def clicks(page: Path) -> set[Path]:
    """Return the pages that a page links to in its text."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)|^:link: (\S+)$", page.read_text(), re.MULTILINE)
    targets = (first or f"{second}{'.ipynb' if 'tutorials' in second else '.md'}" for first, second in links)
    return {(page.parent / target).resolve() for target in targets}


def test_each_task_is_found_from_the_first_page_in_two_clicks():
    docs = ROOT / "docs"
    page = (docs / "reviewers.md").read_text().partition("## How tasks are found")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!task|---)(.*?) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    targets = [re.findall(r"\]\((.*?)\)", first + second) for _, first, second in rows]
    for path in targets:
        places = [docs / "index.md", *(docs / target for target in path)]
        assert len(places) in (2, 3)
        for place, following in pairwise(places):
            assert following.resolve() in clicks(place), f"{place} has no link to {following}"
    # every page of the how-to guides is a task
    assert {docs / target for path in targets for target in path} >= {*HOW_TO}


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


@pytest.mark.parametrize("document", PAGES)
def test_addresses_of_other_sites_can_be_such(document):
    """No network is needed: scheme, host and characters of each."""
    text = (ROOT / document).read_text()
    for address in re.findall(r"\]\((https?:[^)\s]*)\)|<(https?:[^>\s]*)>|(?<![(<`\w])(https?://[^\s)>`\]|,;]+)", text):
        parts = urlsplit("".join(address).rstrip("."))
        assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), address
        assert re.fullmatch(r"[\w\-./~%()+:@]*", parts.path), address


def test_the_page_about_predictions(tmp_path, monkeypatch):
    pytest.importorskip("pandas", reason="needs the extra tables")
    monkeypatch.chdir(tmp_path)
    names = shown("docs/predict.md")
    assert list(names["predicted"]) == ["Bremen", "Ulm"] and names["predicted"]["Ulm"].class_names == ["no", "yes"]
    x = names["data"].inputs(names["rows"], "Bremen")
    outputs = torch.export.load("bremen.pt2").module()(x)
    assert torch.allclose(outputs, names["predicted"]["Bremen"].outputs, atol=1e-6)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_each_notebook_opens_in_colab_and_installs_the_package_where_it_is_missing(path, monkeypatch):
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, url = settings["metadata"]["name"], settings["metadata"]["url"]
    title, install, *_ = ("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    opens = f"https://colab.research.google.com/github/{urlsplit(url).path[1:]}/blob/HEAD/notebooks/{path.name}"
    assert f"]({opens})" in title
    (line,) = re.findall(r"^    %pip install --quiet (.*)$", install, re.MULTILINE)
    package, _, extra = line.strip('"').partition("[")
    assert package == name and (not extra or extra.strip("]") in settings["options.extras_require"])
    assert f"git+{url}" in install
    called: list[str] = []
    code = compile(install.replace(f"%pip install --quiet {line}", "called.append('pip')"), path.name, "exec")
    exec(code, {"called": called})
    assert not called
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(code, {"called": called})
    assert called == ["pip"]


@pytest.fixture
def gallery(monkeypatch):
    """The script that writes the gallery."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("gallery")


def test_the_examples_of_the_gallery(gallery):
    for module in (gallery, *map(importlib.import_module, ("catalogue", "ideas", "usage"))):
        done = doctest.testmod(module)
        assert done.attempted and not done.failed


def test_the_examples_of_the_pages_that_are_made(gallery):
    pytest.importorskip("sphinx", reason="needs the extra docs")
    done = doctest.testmod(importlib.import_module("site_pages"))
    assert done.attempted and not done.failed


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.by_default("FedPer", "CCVR", "FedDF", "FedIT", "FedReMa+F")
def test_the_lines_of_python_on_a_methods_page_run(method, gallery, short, tmp_path, monkeypatch):
    usage, row = importlib.import_module("usage"), gallery.measured()[method.name]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(usage.snippet(method, row), names)
    assert short == [20] and type(names["client"]) is method.client
    # what the page tells of the method has the family, and each figure a link
    assert f"**{importlib.import_module('catalogue').declared()[method.name]['family']}**" in usage.when(method, row)


def test_each_picture_of_an_idea_is_whole_and_in_its_frame(gallery):
    ideas = importlib.import_module("ideas")
    rows = gallery.measured()
    described = {name: each["picture"] for name, each in importlib.import_module("catalogue").declared().items()}
    known = {"net", "nets", "parts", "beside", "tie", "adapter", "server", "by", "samples", "local", "up"}
    for name, idea in described.items():
        assert known.issuperset(idea), name
        drawn = xml.etree.ElementTree.fromstring(ideas.svg(name, idea, rows[name]))
        left, top, width, height = map(int, drawn.get("viewBox").split())
        for box in drawn.iter("rect"):
            x, y, wide, high = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            assert left <= x <= x + wide <= left + width and top <= y <= y + high <= top + height, name
        # in letters of 5.5 units: the frame, and the server's box
        assert len(idea.get("local", "")) <= 50 and len(idea.get("by", "")) <= 20, name
        if idea.get("server") not in ("none", "ring"):
            assert {idea.get("up", *ideas.travels(rows[name]["up"])[:1])} <= {
                text.text.removeprefix("↑ ") for text in drawn.iter("text")
            }, name
        # pFedSim's server keeps each client's classifier
        assert "P" not in idea.get("net", "").upper() or rows[name]["stays"] != "nothing" or name == "pFedSim", name


def test_a_picture_shows_which_units_a_client_has(gallery):
    ideas = importlib.import_module("ideas")
    rows = gallery.measured()
    drawn = ideas.svg("HeteroFL", {"parts": [[0, 1], [0.5, 0.5], [0, 0.25]], "server": "none"}, rows["HeteroFL"])
    boxes = [box for box in xml.etree.ElementTree.fromstring(drawn).iter("rect") if box.get("class") == "shared"]
    places = [(float(box.get("x")) + ideas.BOX / 2, float(box.get("width"))) for box in boxes]
    first, second, third = ideas.CLIENTS
    half = ideas.BOX / 2
    assert places == [(first, ideas.BOX)] * 3 + [(second + half, half)] * 3 + [(third, half / 2)] * 3


def test_a_picture_shows_who_has_which_layers(gallery):
    ideas = importlib.import_module("ideas")
    rows = gallery.measured()
    idea = {"net": "SSP", "server": "none"}
    drawn = xml.etree.ElementTree.fromstring(ideas.svg("FedPer", idea, rows["FedPer"]))
    kinds = Counter(box.get("class") for box in drawn.iter("rect"))
    assert kinds == {"shared": 6, "client0": 1, "client1": 1, "client2": 1}
    # the highest box of a column is the classifier
    assert min(drawn.iter("rect"), key=lambda box: float(box.get("y"))).get("class") == "client0"


def test_the_answer_at_the_head_of_the_results_has_the_figures_of_their_sections():
    text = (ROOT / "docs" / "results.md").read_text()
    # from each heading to the next one
    sections = dict(
        re.findall(r"^#+ ([^\n]*)\n(.*?)(?=^#|\Z)", re.sub(r"^    #.*$", "", text, flags=re.M), re.M | re.S)
    )
    by_anchor = {re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): part for title, part in sections.items()}
    rows = re.findall(r"^\|.*?\| (\d\S+) \| (\S+ \[.*?) \| (\S+) (.*?) \| \[[^]]*\]\(#(.*?)\) \|$", text, re.MULTILINE)
    assert len(rows) >= 6
    for local, common, name, best, anchor in rows:
        lines = [line for line in by_anchor[anchor].splitlines() if line.startswith("|")]
        for method, figure in (("Local", local), ("FedAvg", common), (name, best)):
            assert any(line.startswith(f"| {method} |") and figure in line for line in lines), (anchor, method, figure)


def test_cards_have_the_figures_of_the_tables(gallery):
    figures = gallery.figures()
    results = (ROOT / "docs" / "results.md").read_text()
    hospitals = "mean of four hospitals"
    assert figures["kNN-Per"][hospitals] == (
        re.search(r"^\| kNN-Per \| 0.025 \| common \| [^|]* \| [^|]* \| ([^|]*) \|", results, re.MULTILINE)[1],
        "../results.md#personalised-methods-at-the-hospitals",
    )
    assert figures["FENDA-FL"][hospitals] == figures["PerFCL"][hospitals]
    last = results.partition("## All methods")[2].partition("\n## ")[0]
    levels = dict(re.findall(r"^\| (LG-FedAvg|Local) \| ([\d.± ]+) \|", last, re.MULTILINE))
    assert figures["LG-FedAvg"]["digits, 20 rounds"][0] == f"{levels['LG-FedAvg']} % (Local {levels['Local']})"
    assert {data for of in figures.values() for data in of} == {data for data, *_ in gallery.TABLES}
    for address in {address for of in figures.values() for _, address in of.values()}:
        page, anchor = address.removeprefix("../").split("#")
        assert anchor in heads(ROOT / "docs" / page)
    assert "Local" not in figures
