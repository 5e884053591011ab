import contextlib
import errno
import os
import re
import resource
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache

from command import CONFIGS, QUICKSTART, QUIET, forked, pfl, refusal
from pfl_lightning.methods.fedavg import FedAvg
from sweeps import all_but

SMALL = f"{QUICKSTART} {QUIET} --data.max_samples 300"
LAST = Path("runs/cwFedAvg-Digits/version_0/checkpoints/last.ckpt")

NAMES = {
    "fti": "'fti' is not a command; did you mean fit?",
    "": (
        "a command is missing; choose from fit, validate, test, join, adapters, advise, compare, configs, flower, "
        "matrix, memory, methods, predict, status."
    ),
    "compar": "'compar' is not a command; did you mean compare?",
    "fit": "nothing is given for data; name it by --data",
    "fit --modle FedPer": "modle is not an option; did you mean model?",
    "fit Q extra": "extra is given without an option",
    "fit Q --max_rounds 3": "max_rounds is not an option; did you mean trainer.max_rounds?",
    "fit Q --trainer.max_round 3": "trainer.max_round is not an option; did you mean trainer.max_rounds?",
    "test Q --ckpt_pth x": "ckpt_pth is not an option; did you mean ckpt_path?",
    "fit Q --model FedPorx": "model=FedPorx is no known class; did you mean FedProx",
    "fit Q --model pfl_lightning.methods.FedPorx": "FedPorx is no known class; did you mean FedProx",
    "fit Q --model torch.nn.Linear": "Linear: Import path does not correspond to a subclass of ClientModule.",
    "fit Q --model nowhere.Method": "model=nowhere.Method: No module named 'nowhere'.",
    "fit Q --data MINST": "data=MINST is no known class; did you mean MNIST or EMNIST?",
    "fit Q --aggregator WeightAverage": "aggregator=WeightAverage is no known class; did you mean WeightedAverage or",
    "fit Q --data.partitioner IIDD": "data.partitioner=IIDD is no known class; did you mean IID?",
    "fit Q --model.net MPL": "model.net=MPL is no known class; did you mean MLP?",
    "fit Q --model.optimizer Adma": "model.optimizer=Adma is no known class; did you mean Adamax or Adam?",
    "fit Q --model.optimizer torch.optim.Adma": "is no known class; did you mean Adamax or Adam?",
    "fit Q --model.lr_scheduler StepLr2": "model.lr_scheduler=StepLr2 is no known class; did you mean StepLR",
    "fit Q --trainer.logger WandLogger": "trainer.logger=WandLogger is no known class; did you mean WandbLogger",
    "fit Q --trainer.callbacks+=EarlyStoping": "trainer.callbacks=EarlyStoping is no known class; did you mean EarlySt",
    "fit Q --model FedProx --model.mue 3": "model.mue is not a setting of FedProx; did you mean model.mu?",
    "fit Q --model.lr 3": "model.lr is not a setting of WDR; did you mean model.optimizer.lr?",
    "fit Q --rounds 3": "rounds is not an option; did you mean trainer.max_rounds?",
    "fit Q --model.depth 3": "model.depth is not a setting of WDR; choose from model.assign_nets, ",
    "fit Q --data.partitoner IID": "data.partitoner is not a setting of Digits; did you mean data.partitioner?",
    "fit Q --data.partitioner.alpa 3": "is not a setting of Dirichlet; did you mean data.partitioner.alpha?",
    "fit Q --model.net.hiden [3]": "model.net.hiden is not a setting of MLP; did you mean model.net.hidden?",
    "fit Q --model.optimizer.lrr 1": "model.optimizer.lrr is not a setting of SGD; did you mean model.optimizer.lr?",
    "fit Q --trainer.logger WandbLogger --trainer.logger.ofline 1": "did you mean trainer.logger.offline?",
    "fit Q --trainer.callbacks+=EarlyStopping": "trainer.callbacks: EarlyStopping needs monitor.",
    "fit Q --model.lr_scheduler StepLR": "model.lr_scheduler: StepLR needs step_size.",
}

VALUES = {
    "--trainer.max_rounds x": "trainer.max_rounds=x must be an integer.",
    "--trainer.max_rounds 0": "trainer.max_rounds=0 must be at least 1.",
    "--trainer.clients_per_round x": "trainer.clients_per_round=x must be an integer or a number.",
    "--trainer.clients_per_round 0": "trainer.clients_per_round=0 must be a number of clients from 1 up",
    "--trainer.clients_per_round 1.5": "trainer.clients_per_round=1.5 must be a number of clients from 1 up",
    "--trainer.clients_per_round 11": "trainer.clients_per_round=11 is more than data.num_clients=10",
    "--trainer.clients_per_round .nan": "trainer.clients_per_round=nan must be a number of clients from 1 up",
    "--trainer.gradient_clip_val -1": "trainer.gradient_clip_val=-1.0 must be a number above 0, such as 1.0; leave it",
    "--trainer.gradient_clip_val -.inf": "--trainer.gradient_clip_val needs a value; one that begins with a dash",
    "--trainer.accelerator tpu": "trainer.accelerator=tpu is not on this machine, or torch is installed without it",
    "--trainer.deterministic x": "trainer.deterministic=x must be true or false or one of warn.",
    "--trainer.max_rounds 1:": "trainer.max_rounds can't be read; take away the colon",
    "--trainer.max_rounds 2020-99-99": "trainer.max_rounds=2020-99-99 must be an integer.",
    "--trainer.devices 99999999999999999999": "trainer.devices: cannot fit 'int' into",
    "--trainer null": "trainer=null must be settings by name, such as --trainer.accelerator.",
    "--trainer.callbacks [Unknown]": "trainer.callbacks=Unknown is no known class.",
    "--trainer.callbacks x.y": "trainer.callbacks=x.y: No module named 'x'.",
    "--seed_everything -5": "seed_everything: -5 is not in bounds",
    "--trainer.max_time x": "trainer.max_time: `Timer(duration='x')` is not a valid duration.",
    "--trainer.local_epochs 1 --trainer.local_steps 1": "exclude each other; give one of them.",
    "--trainer.local_epochs 100000000000": "trainer.local_epochs=100000000000 must be the number for one round",
    "--trainer.local_steps 10000000": "trainer.local_steps=10000000 must be the number for one round",
    "--trainer.evaluate befor": "must be one of before, after, both; did you mean before?",
    "--trainer.precision bf17": "did you mean bf16?",
    "--trainer.accelerator foo": "invalid accelerator name",
    "--trainer.engine fast": "trainer.engine='fast' must be one of",
    "--trainer.max_epochs 3": "trainer.max_epochs means nothing in a federation: a round is an epoch; give max_rounds.",
    "--trainer.max_steps 3": "trainer.max_steps=3 means nothing in a federation",
    "--trainer.limit_train_batches 1.5": "trainer.limit_train_batches=1.5 must be a number of batches from 1 up, or a",
    "--trainer.accumulate_grad_batches 0": "trainer.accumulate_grad_batches=0 must be a number of batches from 1 up",
    "--trainer.overfit_batches 1": "trainer.overfit_batches=1 means nothing in a federation",
    "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.mode x": "`mode` can be min, max but got x.",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/ac": "monitor=val/ac is no metric of the",
    "--model.optimizer.lr -1": "model.optimizer: Invalid learning rate: -1.0.",
    "--model.optimizer.lr nan": "model.optimizer.lr=nan must be a number.",
    "--model.optimizer.lr null": "model.optimizer.lr=None must be a number.",
    "--model.optimizer.lr .nan": "model.optimizer.lr=nan must be finite.",
    "--model.optimizer Adam --model.optimizer.betas [0.9]": "model.optimizer.betas=[0.9] must be a list of 2.",
    "--model.optimizer null": "model.optimizer is null; give it a value, or leave it out.",
    "--model.optimizer torch.optim.Optimizer": "model.optimizer: Optimizer needs defaults.",
    "--model.lr_scheduler ReduceLROnPlateau": "model.lr_scheduler=ReduceLROnPlateau waits for a metric, and schedules",
    "--model.lr_scheduler.gamma 3": "model.lr_scheduler.gamma is given, but no model.lr_scheduler; name its class too.",
    "--model.optimizer Adam --model.optimizer.betas [2,3]": "Invalid beta parameter at index 0: 2.0.",
    "--model.net.hidden x": "model.net.hidden=x must be a list.",
    "--model.net.hidden [-3]": "model.net.hidden=[-3] must be 1 or more each, such as [64].",
    "--model.net null": "model.net is null; give it a value, or leave it out.",
    "--model.net torch.optim.SGD": "model.net=torch.optim.SGD is no Net.",
    "--model.net CNN": "net CNN takes images of at least 16 x 16 pixels",
    "--model.buffers x": "model.buffers=x must be one of average, local.",
    "--model FedProx --model.mu -1": "model.mu=-1.0 must be 0 (which is FedAvg) or more",
    "--model Local --aggregator WeightedAverage": "WeightedAverage needs num_samples and weights, which Local does not",
    "--data.partitioner.alpha 0": "Dirichlet alpha=0.0 must be above 0",
    "--data.partitioner.alpha -1": "Dirichlet alpha=-1.0 must be above 0",
    "--data.partitioner.alpha x": "data.partitioner.alpha=x must be a number.",
    "--data.partitioner [3]": "data.partitioner=[3] must be a class: class_path names it",
    "--data.batch_size 1.5": "data.batch_size=1.5 must be an integer.",
    "--data.last_batch dorp": "data.last_batch=dorp must be one of keep, drop, wrap; did you mean drop?",
    "--data.num_clients 5000 --data.max_samples null": "num_clients=5000 is more than the 1797 samples there are",
    "--data ImageFolder --data.root nowhere": "data.root='nowhere' is no folder",
    "--data MNIST --data.root nowhere --data.download false": "data.root='nowhere': no usable MNIST files in",
    "--ckpt_path gone.ckpt": "ckpt_path='gone.ckpt': there is no such file.",
    "--ckpt_path .": "ckpt_path='.' can't be read as a checkpoint (it is a folder); take another one, such as",
}

FILES = {
    "model: {class_path: FedPer": "is not valid YAML: while parsing a flow mapping",
    "just text": "the configuration holds no settings; it must be YAML",
    "modl: {class_path: FedPer}": "modl.class_path is not an option; did you mean model?",
    "trainer: {max_round: 3}": "trainer.max_round is not an option; did you mean trainer.max_rounds?",
    "trainer: {max_epochs: 3}": "trainer.max_epochs means nothing in a federation: a round is an epoch; give max_r",
    "trainer: {clients_per_round: [3]}": "trainer.clients_per_round=[3] must be an integer or a number.",
    "data: {class_path: Digits, init_args: {partitoner: IID}}": "did you mean data.partitioner?",
    "data: {class_path: MINST}": "data=MINST is no known class; did you mean MNIST or EMNIST?",
    "data: {class_path: Digits, num_clients: 3}": "data must be a class: class_path names it, and its settings belong",
    "model: {class_path: FedProx, mu: 3}": "model must be a class: class_path names it, and its settings belong",
    "model: {init_args: {net: {class_path: MLP, init_args: {hiden: [3]}}}}": "did you mean model.net.hidden?",
    "model: {init_args: {optimizer: {class_path: SGD, lr: 3}}}": "model.optimizer must be a class",
    "model: {init_args: {optimizer: {class_path: SGD, init_args: {params: 3}}}}": "not a setting of SGD; choose from",
    "model: {init_args: null}": "model: class_path or init_args is null; give it a value, or leave it out.",
    "data: {init_args: {partitioner: null}}": "data.partitioner is null; give it a value, or leave it out.",
    "model: {class_path: FedProx, dict_kwargs: {a: 1}}": "dict_kwargs: a class got an unexpected keyword argument 'a'",
    "trainer: null": "trainer=None must be settings of the Trainer, such as 'trainer: {max_rounds: 10}'; leave it out",
    "trainer: {max_rounds: null}": "trainer.max_rounds is null; give it a value, or leave it out.",
    "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/acc, patience: x}}]}": "bad.yaml: "
    "trainer.callbacks.patience=x must be an integer.",
    "": "bad.yaml: the configuration holds no settings; it must be YAML of the form 'NAME: VALUE'.",
}

LAUGHS = "\n".join(
    ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))],
)
AMBIGUOUS = {
    "trainer: {max_rounds: 1}\nmodel: {class_path: FedPer}\ntrainer: {local_steps: 1}": "trainer twice, in line 1 and",
    "trainer:\n  max_rounds: 1\n  'max_rounds': 2": "trainer.max_rounds twice, in line 2 and in line 3; keep one",
    "data: {init_args: {partitioner: {class_path: IID, class_path: IID}}}": "init_args.partitioner.class_path twice",
    "trainer: {callbacks: [{a: 1, a: 2}]}": "trainer.callbacks.a twice, in line 1; keep one",
    "trainer: {callbacks: &a [*a]}": "a list or mapping in line 1 that holds itself",
    "a: &a {b: [{c: *a}]}": "a list or mapping in line 1 that holds itself",
    LAUGHS: " values by aliases alone",
    "\n".join(f"k{n}: {n}" for n in range(6000)): "6000 keys; it can have up to 5000",
    f"a: {'[' * 200}{']' * 200}": "over 100 lists or mappings in one another",
    'trainer: {default_root_dir: "a\\0b"}': "a null character in line 1",
    "# " + "x" * 1_000_000: "1000002 characters; it can have up to 1000000",
}


NAMES_AGAIN = {
    *(f"fit Q --{rest}" for rest in ("trainer.max_round 3", "aggregator WeightAverage", "model.net MPL")),
    *(f"fit Q --{rest}" for rest in ("data.partitioner IIDD", "model.optimizer Adma", "model.lr_scheduler StepLr2")),
    *(f"fit Q --{rest}" for rest in ("trainer.logger WandLogger", "data.partitoner IID", "model.net.hiden [3]")),
    *("fit Q --model.optimizer.lrr 1", "fit Q --model.lr_scheduler StepLR", "test Q --ckpt_pth x"),
}
"""Lines with which the command does what it does with another one above."""


@pytest.mark.parametrize("line", all_but(NAMES_AGAIN, NAMES))
def test_misspelt_names(line, capsys):
    assert NAMES[line] in refusal(line.replace("Q", QUICKSTART), capsys)


VALUES_AGAIN = {
    *(f"--trainer.{rest}" for rest in ("clients_per_round 0", "clients_per_round 1.5", "precision bf17", "max_time x")),
    *(f"--trainer.{rest}" for rest in ("devices 99999999999999999999", "callbacks x.y")),
    *(f"--trainer.{rest}" for rest in ("limit_train_batches 1.5", "accumulate_grad_batches 0", "overfit_batches 1")),
    *(f"--model.{rest}" for rest in ("optimizer.lr null", "net.hidden x", "net.hidden [-3]", "net null", "buffers x")),
    *("--model.optimizer Adam --model.optimizer.betas [2,3]", "--model FedProx --model.mu -1"),
    *(f"--data.{rest}" for rest in ("partitioner.alpha -1", "partitioner.alpha x", "batch_size 1.5")),
    *("--data.last_batch dorp", "--data ImageFolder --data.root nowhere", "--trainer.accelerator foo"),
    "--data MNIST --data.root nowhere --data.download false",
}


@pytest.mark.parametrize("line", all_but(VALUES_AGAIN, VALUES))
@pytest.mark.by_default(
    but=[
        "--trainer.callbacks+=ModelChec",
        "--trainer.callbacks+=EarlyStop",
        "--model.optimizer torch.optim.Optimizer",
        "--model Local --aggregator Wei",
    ]
)
def test_bad_values(line, capsys):
    assert VALUES[line] in refusal(f"fit {SMALL} {line}", capsys)


@pytest.mark.parametrize("text", FILES)
@pytest.mark.by_default(
    but=[
        "modl: {class_path: FedPer}",
        "trainer: {max_round: 3}",
        "trainer: {max_epochs: 3}",
        "data: {init_args: {partitioner: null}}",
        "trainer: {max_rounds: null}",
    ]
)
def test_bad_files(text, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    assert FILES[text] in refusal(f"fit {QUICKSTART} --config bad.yaml", capsys)


@pytest.mark.parametrize("text", AMBIGUOUS, ids=lambda text: text[:20])
def test_yaml_with_several_meanings_or_without_end(text, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    lines = {
        "bad.yaml: the YAML has": ["fit", "--config", "quickstart", "--config", "bad.yaml"],
        "--config: the YAML has": ["fit", "--config", "quickstart", "--config", text],
        "compare: --table bad.yaml: the YAML has": ["compare", "--table", "bad.yaml"],
    }
    for beginning, line in lines.items():
        message = refusal(line, capsys)
        assert message.startswith(beginning) and AMBIGUOUS[text] in message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "line",
    [
        "fit --config quickstart --config bad.yaml --print_config",
        "fit --config quickstart --model.net bad.yaml",
        "fit --config quickstart --data bad.yaml",
        "compare --methods fedavg --data Digits --config bad.yaml",
        "compare --methods bad.yaml --data Digits",
    ],
)
def test_a_setting_that_is_there_twice_is_found_in_every_file(line, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("{class_path: MLP,\n class_path: CNN}")
    assert (
        refusal(line, capsys) == "bad.yaml: the YAML has class_path twice, in line 1 and in line 2; keep one of them."
    )


@pytest.mark.exhaustive
def test_aliases_and_merged_keys_stay_what_they_are(capsys, tmp_path):
    (tmp_path / "good.yaml").write_text("a: &a {max_rounds: 3, local_steps: 5}\ntrainer: {<<: *a, max_rounds: 4}\n")
    assert refusal("fit --config quickstart --config good.yaml", capsys).startswith("a.max_rounds is not an option")
    (tmp_path / "good.yaml").write_text("trainer: {check_val_every_n_epoch: &n 3, max_rounds: *n}\n")
    with pytest.raises(SystemExit):
        pfl("fit --config quickstart --config good.yaml --print_config")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_rounds"] == 3


@pytest.mark.parametrize(
    "line",
    [
        "fit --config {}",
        "fit --config quickstart --model.net {}",
        "fit --config quickstart --model.{} 3",
        "fit --config quickstart --trainer.max_rounds {}",
        "fit --{} 3",
        "{}",
        "compare --methods {}",
        "compare --methods fedavg --config {}",
        "compare --methods fedavg --data Digits --out {}",
        "compare --table {}",
        "configs {}",
        "configs --copy {}",
        "status {}",
        "fit --config quickstart --ckpt_path {}",
        "fit --config quickstart --trainer.default_root_dir {}",
    ],
)
@pytest.mark.by_default(but=["fit --config quickstart --ckpt_path {}"])
def test_a_value_without_end_is_told_by_its_beginning_and_its_end(line, capsys):
    message = refusal(line.format("A" * 60_000), capsys)
    assert "AAA[...]AAA" in message and len(message) < 1000


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "out/x: Permission denied; take another place"),
        (errno.EROFS, "out/x: Read-only file system; take another place"),
        (errno.ENOSPC, "out/x: No space left on device; make room"),
    ],
)
def test_files_that_the_system_refuses(number, advice, capsys, monkeypatch):
    def refuse(*args):
        raise OSError(number, os.strerror(number), "out/x")

    monkeypatch.setattr("shutil.copyfile", refuse)
    assert refusal("configs --copy quickstart", capsys).startswith(advice)


def test_a_configuration_that_may_not_be_read(capsys, monkeypatch, tmp_path):
    (tmp_path / "secret.yaml").write_text("trainer: {max_rounds: 1}")
    read, access = Path.read_text, os.access
    denied = (os.R_OK, "secret.yaml")

    def refuse(path, *args, **kwargs):
        if path.name == "secret.yaml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args, **kwargs)

    # the superuser may read all files
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (mode, Path(path).name) != denied)
    assert "secret.yaml is not readable" in refusal("fit --config quickstart --config secret.yaml", capsys)
    assert "secret.yaml can't be read (Permission denied)" in refusal("compare --table secret.yaml", capsys)


@pytest.mark.exhaustive
def test_a_limit_on_the_size_of_files_ends_a_run_in_a_sentence(tmp_path):
    def limited():
        # the network is larger than that
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with (tmp_path / "said.txt").open("w") as said, contextlib.redirect_stderr(said):
            pfl(f"fit {SMALL} --trainer.max_rounds 2")

    process = forked(limited)
    process.join()
    assert process.exitcode == 2
    last = (tmp_path / "said.txt").read_text().splitlines()[-1]
    assert last.startswith("pfl-lightning: error: runs/cwFedAvg-Digits/version_0: File too large; let files be larger")
    assert not list(Path("runs").rglob("*.partial"))


def test_a_number_with_thousands_of_digits(capsys):
    assert "trainer.max_rounds" in refusal(f"fit {QUICKSTART} --trainer.max_rounds {'1' * 5000}", capsys)


@pytest.mark.parametrize("content", ["trainer: {max_rounds: 1} # \xe9".encode("latin-1"), bytes(range(256))])
def test_a_file_that_is_no_text(content, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(content)
    message = refusal(f"fit {QUICKSTART} --config bad.yaml", capsys)
    assert message.startswith("bad.yaml: the configuration is no text in UTF-8 (")


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--config epochs.yaml --config steps.yaml", {"local_epochs": None, "local_steps": 5}),
        ("--config steps.yaml --config=epochs.yaml", {"local_epochs": 2, "local_steps": None}),
        ("--config epochs.yaml --trainer.local_steps 7", {"local_epochs": None, "local_steps": 7}),
        ("--config steps.yaml --trainer.local_epochs=3", {"local_epochs": 3, "local_steps": None}),
        ("--trainer.local_steps 7 -c epochs.yaml", {"local_epochs": 2, "local_steps": None}),
    ],
)
@pytest.mark.by_default("--config steps.yaml --trainer.")
def test_the_later_of_epochs_and_steps_holds(line, kept, capsys, tmp_path):
    (tmp_path / "epochs.yaml").write_text("trainer: {local_epochs: 2}")
    (tmp_path / "steps.yaml").write_text("trainer: {local_steps: 5}")
    with pytest.raises(SystemExit) as ended:
        pfl(f"fit {SMALL} {line} --print_config")
    assert ended.value.code == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert {name: trainer[name] for name in kept} == kept


def test_an_error_in_a_file_names_the_file(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("data: {class_path: Digits, init_args: {partitoner: IID}}")
    assert refusal("fit --model FedPer --config bad.yaml", capsys).startswith("bad.yaml: data.partitoner is")


def test_a_config_that_is_not_there(capsys):
    wrong = CONFIGS / "methods" / "fedpr.yaml"
    message = refusal(f"fit --config {wrong}", capsys)
    assert message.startswith(f"--config {wrong} is no file; did you mean {CONFIGS}/methods/fed")


def test_data_that_need_a_download_without_a_network(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    message = refusal(f"fit {SMALL} --data MNIST --data.root empty", capsys)
    assert message.startswith("data.root='empty': no usable MNIST files in empty")
    assert "downloading failed" in message


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    pfl(f"fit {SMALL} --trainer.max_rounds 1 --trainer.default_root_dir {root}")
    return root / "cwFedAvg-Digits/version_0/checkpoints/last.ckpt"


OTHERS = (pytest.param("validate", marks=pytest.mark.exhaustive), "test")


@pytest.mark.parametrize("command", ["fit", *OTHERS])
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--model FedAvg", "the checkpoint is of cwFedAvg and this run of FedAvg"),
        ("--data.num_clients 9", "the checkpoint has 10 clients and data.num_clients=9"),
        ("--data.partitioner.alpha 0.5", "the checkpoint's clients hold other numbers of samples"),
        ("--model.net.hidden [32]", "the checkpoint holds another net"),
    ],
)
@pytest.mark.by_default(
    "edAvg and this run of FedAvg-t",
    "ients and data.num_clients=9-f",
    "old other numbers of samples-t",
    "checkpoint holds another net-f",
)
def test_a_checkpoint_of_something_else(command, line, sentence, checkpoint, capsys):
    assert sentence in refusal(f"{command} {SMALL} {line} --ckpt_path {checkpoint}", capsys)


@pytest.mark.parametrize("command", ["fit", *OTHERS])
@pytest.mark.parametrize("damage", [lambda whole: whole[:3000], lambda whole: b"hello"])
@pytest.mark.by_default("<lambda>1-test")
def test_a_damaged_checkpoint(command, damage, checkpoint, capsys, tmp_path):
    (tmp_path / "bad.ckpt").write_bytes(damage(checkpoint.read_bytes()))
    assert "ckpt_path='bad.ckpt' can't be read as" in refusal(f"{command} {SMALL} --ckpt_path bad.ckpt", capsys)


def test_an_empty_checkpoint_is_called_so_and_a_whole_one_beside_it_is_named(capsys, tmp_path, checkpoint):
    (tmp_path / "bad.ckpt").touch()
    (tmp_path / "best.ckpt").write_bytes(checkpoint.read_bytes())
    message = refusal(f"test {SMALL} --ckpt_path bad.ckpt", capsys)
    assert (
        message
        == "ckpt_path='bad.ckpt' can't be read as a checkpoint (it is empty); take another one, such as best.ckpt."
    )


def test_another_program_s_checkpoint(capsys, tmp_path):
    torch.save({"model": torch.ones(3)}, tmp_path / "other.ckpt")
    message = refusal(f"fit {SMALL} --ckpt_path other.ckpt", capsys)
    assert message.startswith("ckpt_path='other.ckpt': the checkpoint is not of a federation; take another one")


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.by_default("best")
def test_an_evaluation_without_a_run(which, capsys):
    message = refusal(f"test {SMALL} --ckpt_path {which}", capsys)
    assert message.startswith(f"ckpt_path={which!r}: no run under runs/cwFedAvg-Digits has such a checkpoint")


def test_divergence_ends_with_a_sentence_and_leaves_the_round_before(capsys):
    pfl(f"fit {SMALL} --trainer.max_rounds 1")
    changed = "--resume_changed true --model.optimizer.lr 1e10"
    message = refusal(f"fit {SMALL} --trainer.max_rounds 9 --ckpt_path last {changed}", capsys)
    (diverged,) = re.findall(r"^round (\d): the loss or the weights of every client became NaN or infinite", message)
    kept = torch.load(LAST, weights_only=True)["federation"]["round"]
    # the record counts rounds from 1, so the round before it is as many rounds as are done
    assert kept == int(diverged) - 1
    assert kept >= 1


class Buggy(FedAvg):
    """Fails in its own loss."""

    def loss(self, features, logits, target):
        return {}["bug"]


class Unbuildable(FedAvg):
    """Fails while it is made, by an error that torch raises too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        raise ValueError("of its own")


@pytest.mark.parametrize(("method", "error"), [("Buggy", KeyError), ("Unbuildable", ValueError)])
@pytest.mark.by_default("Buggy-KeyError")
def test_a_bug_keeps_its_traceback(method, error, capsys):
    with pytest.raises(error):
        pfl(f"fit {SMALL} --model test_bad_input.{method}")
    assert "pfl-lightning: error" not in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("gone-tracker>=1"))
    message = refusal(f"fit {SMALL} --trainer.logger WandbLogger", capsys)
    assert message.startswith("trainer.logger: Requirement 'gone-tracker>=1' not met.") and "pip install" in message
