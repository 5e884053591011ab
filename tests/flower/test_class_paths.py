import sys

import pytest

from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.flower.class_paths import check_arguments, check_class_paths
from pfl_lightning.flower.template import Refused

CONFIGS = sorted(FOLDER.rglob("*.yaml"))


UNKNOWN = "neither a word, a number nor a class that this site knows"


def test_what_may_be_named():
    texts = (
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
    )
    for text in texts:
        check_class_paths({"model": {"class_path": text, "init_args": {"net": [text]}}}, own=["mine.Net"])


FORBIDDEN = (
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
    "pfl_lightning.federation.federation.LightningModule",
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
)


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_may_not(text):
    places = {
        "class_path": {"class_path": text},
        "net": {"class_path": "FedAvg", "init_args": {"net": text}},
        "task": {"init_args": {"task": {"class_path": text, "init_args": {}}}},
        "list": {"init_args": {"net": [{"class_path": "pfl_lightning.nets.MLP"}, {"class_path": text}]}},
        "deep": {"dict_kwargs": {"a": {"b": [[{"c": text}]]}}},
    }
    for settings in places.values():
        with pytest.raises(Refused, match=rf"^model\..*{UNKNOWN}"):
            check_class_paths({"model": settings}, own=["mine.Net"])


def test_nothing_is_imported_that_may_not_be_named(tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refused):
        check_class_paths({"model": "bad_module.Net"})
    assert "bad_module" not in sys.modules


TABLE = """
model: {class_path: FedAvg, init_args: {net: MLP}}
aggregator: {class_path: WeightedAverage}
data:
  class_path: TableData
  init_args:
    path: /srv/all/patients.csv
    target: ill
    features: ["age (years)", "b.m.i."]
    preprocessing:
      by: client
      vocabulary: {"sex/gender": ["m.", "f."]}
      dates: {"seen.at": [month]}
      since: 2024-01-01
      columns: {"b.m.i.": {fill: 25.5, clip: [0.01, 0.99]}}
    task: {class_path: Classification, init_args: {num_classes: 3}}
trainer:
  default_root_dir: ../runs/of.mine
  cohort: {class_path: pfl_lightning.selection.Poisson}
  logger: {class_path: lightning.pytorch.loggers.CSVLogger}
  callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/acc}}]
"""


def arguments(tmp_path, *texts):
    """A command line with a configuration of each text."""
    args = []
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.yaml").write_text(text)
        args += ["--config", str(tmp_path / f"{index}.yaml")]
    return args


def test_a_class_that_the_site_names_too_keeps_its_annotations(tmp_path):
    # as of a site's own file, which names the class by its short name
    check_arguments(arguments(tmp_path, TABLE), own=["TableData", "Classification"])


def test_the_configurations_of_the_library_are_taken():
    for path in CONFIGS:
        # a table of `compare` is no configuration of a run
        if path.parent.name != "tables":
            check_arguments(["--config", str(path)])
    check_arguments(["-c=methods/fedavg"])


def test_settings_that_are_texts_may_be_any_text(tmp_path):
    files = arguments(tmp_path, TABLE)
    check_arguments(
        [*files, "--data.path", "other.csv", "--data.init_args.target=how ill?", "--trainer.max_rounds", "7"]
    )
    check_arguments([*files, "--data.preprocessing", "{class_path: pfl_lightning.data.preprocessing.Preprocessing}"])
    check_arguments([*files, "--trainer.default_root_dir", "/tmp/os.system", "--model.optimizer.lr", "-1e-3"])


EVIL = "evil_module.Sel"
PLACES = [
    "trainer: {cohort: EVIL}",
    "trainer: {cohort: {class_path: EVIL}}",
    "trainer: {logger: {class_path: EVIL}}",
    "trainer: {callbacks: [{class_path: EVIL}]}",
    "trainer: {callbacks+: {class_path: EVIL}}",
    "trainer: {engine: EVIL}",
    "trainer.cohort: EVIL",
    "aggregator: {class_path: EVIL}",
    "aggregator: EVIL",
    "data: {class_path: EVIL}",
    "data: {class_path: Digits, init_args: {partitioner: {class_path: EVIL}}}",
    "data: {class_path: Digits, init_args: {partitioner: EVIL}}",
    "data: {class_path: TableData, init_args: {path: {class_path: EVIL}}}",
    "data: {class_path: TableData, init_args: {path: '{class_path: EVIL}'}}",
    "data: {class_path: TableData, init_args: {task: EVIL}}",
    "data: {class_path: TableData, init_args: {preprocessing: {transformer: {class_path: EVIL}}}}",
    "data: {class_path: TableData, init_args: {preprocessing: {class_path: EVIL}}}",
    "data: {class_path: TableData, init_args: {preprocessing: EVIL}}",
    "data: {class_path: Digits, dict_kwargs: {x: EVIL}}",
    "model: {class_path: FedAvg, init_args: {net: EVIL}}",
    "other: EVIL",
    "config: evil.yaml",
]


@pytest.mark.parametrize("place", PLACES)
def test_no_file_of_an_app_names_another_class_anywhere(tmp_path, monkeypatch, place):
    (tmp_path / "evil_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    text = place.replace("EVIL", EVIL)
    for files in ([text], [TABLE, text], [text, TABLE]):
        with pytest.raises(Refused, match=UNKNOWN):
            check_arguments(arguments(tmp_path, *files))
    assert "evil_module" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.cohort EVIL",
        "--trainer.cohort=EVIL",
        "--trainer.cohort {class_path:EVIL}",
        "--trainer.cohort.class_path EVIL",
        "--trainer.callbacks+ EVIL",
        "--trainer.callbacks+=EVIL",
        "--trainer.logger.help EVIL",
        "--data EVIL",
        "--data.help EVIL",
        "--data.partitioner EVIL",
        "--data.init_args.partitioner EVIL",
        "--data.class_path EVIL",
        "--model.net.init_args.x EVIL",
        "--aggregator EVIL",
        "--config {trainer:{cohort:EVIL}}",
        "--config FILE",
        "-c FILE",
        "-cFILE",
        "-c=FILE",
        "--config=FILE",
        "--trainer.max_rounds 3 EVIL",
    ],
)
def test_no_flag_of_an_app_names_another_class(tmp_path, words):
    (tmp_path / "evil.yaml").write_text(f"trainer: {{cohort: {EVIL}}}")
    args = words.replace(":", ": ").replace("EVIL", EVIL).replace("FILE", str(tmp_path / "evil.yaml"))
    split = args.split(" ", 1) if "{" in args else args.split()
    with pytest.raises(Refused, match=UNKNOWN):
        check_arguments([*arguments(tmp_path, TABLE), *split])


def test_a_text_is_refused_where_another_file_gives_it_to_a_class_that_takes_classes(tmp_path):
    # of TableData `client` is the name of a column, of VisionData a function
    text = "data: {class_path: TableData, init_args: {client: evil_module.Sel}}"
    check_arguments(arguments(tmp_path, text))
    for other in ("data: {class_path: VisionData}", "data: VisionData", "data.class_path: VisionData"):
        for files in ((text, other), (other, text)):
            with pytest.raises(Refused, match=r"data\.init_args\.client='evil_module"):
                check_arguments(arguments(tmp_path, *files))


def test_a_class_that_the_site_allows_is_taken(tmp_path, monkeypatch):
    (tmp_path / "clinic_data.py").write_text("class Patients:\n    def __init__(self, root: str, kind: type): ...")
    monkeypatch.syspath_prepend(tmp_path)
    text = "data: {class_path: clinic_data.Patients, init_args: {root: /srv/a.b}}"
    with pytest.raises(Refused, match="clinic_data"):
        check_arguments(arguments(tmp_path, text))
    check_arguments(arguments(tmp_path, text), own=["clinic_data.Patients"])
    with pytest.raises(Refused, match=r"data\.init_args\.kind='os\.system'"):
        check_arguments(
            arguments(tmp_path, text.replace("root: /srv/a.b", "kind: os.system")), ["clinic_data.Patients"]
        )
