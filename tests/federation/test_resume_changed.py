import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, SequentialLR, StepLR

from command import QUICKSTART, QUIET, pfl, refusal
from federations import FEATURES, Blobs, Run, Sizes, blobs, equal, fit, load, make_client, make_trainer, plain, read_csv
from pfl_lightning.aggregators import AggregatorList, FedLAW, PFedSim
from pfl_lightning.callbacks import ChannelsLast, SignFlip
from pfl_lightning.data import Dirichlet
from pfl_lightning.federation.resuming import changes, check_settings
from pfl_lightning.methods import FLOCO, FedAvg, FedDGGA, FedKD, FedProx
from pfl_lightning.nets import Net


def dropping(input_shape: Any, num_classes: int, p: float = 0.1) -> Net:
    return Net(nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(p)), nn.Linear(4, num_classes))


def warm_up(optimizer: Any, rounds: int) -> Any:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], milestones=[rounds])


BASE: dict[str, Any] = {"method": FedProx, "model": {"mu": 0.1, "net": dropping, "lr_scheduler": None}, "data": {}}

CHANGES = {
    "model.mu: 0.1 then, 0.5 now": {"model": {"mu": 0.5}},
    "model.buffers: average then, local now": {"model": {"buffers": "local"}},
    "model.optimizer: SGD then, Adam now": {"model": {"optimizer": partial(Adam, lr=0.1)}},
    "model.optimizer.lr: 0.1 then, 0.2 now": {"model": {"optimizer": partial(SGD, lr=0.2, momentum=0.9)}},
    "model.optimizer.momentum: 0.9 then, 0 now": {"model": {"optimizer": lambda parameters: SGD(parameters, lr=0.1)}},
    "model.lr_scheduler: null then, ExponentialLR now": {"model": {"lr_scheduler": partial(ExponentialLR, gamma=0.9)}},
    "model.net: (1): Dropout(p=0.1, inplace=False) then, (1): Dropout(p=0.4, inplace=False) now": {
        "model": {"net": partial(dropping, p=0.4)}
    },
    "data.batch_size: 5 then, 6 now": {"data": {"batch_size": 6}},
    "data.last_batch: keep then, drop now": {"data": {"last_batch": "drop"}},
    "data.seed: 1 then, 2 now": {"data": {"seed": 2}},
    "trainer.clients_per_round: 4 of 4 then, 2 of 4 now": {"trainer": {"clients_per_round": 0.5}},
    "trainer.local_epochs: 1 then, 2 now": {"trainer": {"local_epochs": 2}},
    "trainer.local_steps: null then, 3 now": {"trainer": {"local_steps": 3}},
    "trainer.gradient_clip_val: null then, 1.0 now": {"trainer": {"gradient_clip_val": 1.0}},
    "trainer.precision: 32-true then, bf16-mixed now": {"trainer": {"precision": "bf16-mixed"}},
    'trainer.attacks: [] then, ["SignFlip fraction=0.5 scale=1.0"] now': {"trainer": {"callbacks": [SignFlip(0.5)]}},
    "seed_everything: 3 then, 4 now": {"model": {"seed": 4}},
}

HARMLESS = {
    "engine": {"trainer": {"engine": "vectorised"}},
    "workers": {"trainer": {"engine": "processes", "workers": 1}},
    "client_states": {"trainer": {"client_states": "disk"}},
    "callbacks": {"trainer": {"callbacks": [ChannelsLast()], "log_every_n_steps": 5}},
    "the same in other words": {
        "model": {"optimizer": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)},
        "trainer": {"clients_per_round": 4, "local_epochs": 1, "gradient_clip_algorithm": "value"},
    },
    "folder of the data": {"data": {"root": "elsewhere", "download": False}},
}


def run(root: Path, change: Any = (), rounds: int = 1, ckpt_path: Any = None, **settings: Any) -> Run:
    of = {name: {**BASE.get(name, {}), **dict(change).get(name, {})} for name in ("model", "data", "trainer")}
    model, data = make_client(BASE["method"], **of["model"]), blobs(**of["data"])
    return fit(model, data, root, ckpt_path=ckpt_path, **{"max_rounds": rounds, **of["trainer"], **settings})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("run")).last


@pytest.fixture
def told(caplog) -> Any:
    """The lines of the log so far."""
    caplog.set_level(logging.INFO)
    return lambda: [line for record in caplog.records for line in record.getMessage().splitlines()]


@pytest.mark.parametrize("line", CHANGES)
def test_each_other_setting_is_told_and_refused(line, checkpoint, told, tmp_path):
    with pytest.raises(MisconfigurationException, match=rf"other settings of .*\b{line.split(':')[0]}\b.*resume_chang"):
        run(tmp_path, CHANGES[line], 2, checkpoint)
    assert line in told()


@pytest.mark.parametrize("change", HARMLESS)
def test_what_cannot_change_a_result_is_free(change, checkpoint, tmp_path, told):
    resumed = run(tmp_path, HARMLESS[change], 2, checkpoint)
    assert len(resumed.rows) == 2 and not [line for line in told() if line.endswith(" now")]


def test_a_run_goes_on_with_other_settings_when_told_so(tmp_path, told):
    run(tmp_path)
    resumed = run(tmp_path, {"model": {"mu": 0.5}}, 2, "last", resume_changed=True)
    assert [line for line in told() if line.endswith(" now")] == ["model.mu: 0.1 then, 0.5 now"]
    assert load(resumed.last)["federation"]["settings"]["model.mu"] == 0.5
    with pytest.raises(MisconfigurationException, match=r"model\.mu"):
        run(tmp_path, {}, 3, "last")


PLANNED = {
    "FLOCO": (FLOCO, None),
    "FedDG-GA": (FedDGGA, None),
    "FedKD": (FedKD, None),
    "pFedSim": (FedAvg, PFedSim),
    "a list": (FedAvg, lambda: AggregatorList([PFedSim()])),
}


@pytest.mark.parametrize("name", PLANNED)
def test_another_number_of_rounds_is_refused_where_earlier_rounds_depend_on_it(name, tmp_path):
    method, aggregator = PLANNED[name]
    server = aggregator or (lambda: None)
    fit(make_client(method), root=tmp_path, aggregator=server(), max_rounds=2)
    with pytest.raises(MisconfigurationException, match=r"other settings of trainer\.max_rounds; .*resume_changed"):
        fit(make_client(method), root=tmp_path, aggregator=server(), ckpt_path="last", max_rounds=3)


class Centred(Blobs):
    """Inputs whose preprocessing depends on what the test puts here."""

    words = ("f", "m")
    mean = (0.5, 0.25)

    def preprocess(self, samples: Any, division: Any) -> Any:
        self.preprocessing = {"categories": {"sex": list(self.words)}, "mean": {"age": list(self.mean)}}
        return samples


CENTRED = {"data": {"data": Centred}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mean": (0.5, 0.75)}, "data.preprocessing.mean.age: [0.5, 0.25] then, [0.5, 0.75] now"),
        ({"words": ("m", "f")}, 'data.preprocessing.categories.sex: ["f", "m"] then, ["m", "f"] now'),
        ({"mean": [k / 3 for k in range(40)]}, None),
    ],
    ids=["mean", "vocabulary", "another number of clients"],
)
def test_data_that_would_be_preprocessed_otherwise_are_told(change, line, tmp_path, monkeypatch, told):
    first = run(tmp_path, CENTRED)
    assert load(first.last)["Centred"]["preprocessing"] == first.data.preprocessing
    run(tmp_path, CENTRED, 2, first.last)
    for name, value in change.items():
        monkeypatch.setattr(Centred, name, value)
    with pytest.raises(MisconfigurationException, match=r"other settings of data\.preprocessing\."):
        run(tmp_path, CENTRED, 3, first.last)
    assert line is None or line in told()
    with pytest.warns(UserWarning, match=r"inputs that were made otherwise \(data\.preprocessing\."):
        make_trainer().test(make_client(FedProx, net=dropping), datamodule=blobs(data=Centred), ckpt_path=first.last)
    run(tmp_path, CENTRED, 3, first.last, resume_changed=True)


def test_checkpoints_from_before_preprocessing_was_kept_go_on(tmp_path, told):
    first = run(tmp_path, CENTRED)
    checkpoint = load(first.last)
    del checkpoint["Centred"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    assert len(run(tmp_path, CENTRED, 2, tmp_path / "old.ckpt").rows) == 2
    assert not [line for line in told() if line.endswith(" now")]


def test_a_refusal_names_some_of_many_settings_and_long_lists_by_an_entry():
    then = {"settings": {f"data.s{k}": k for k in range(30)} | {"data.long": list(range(50))}, "seed": 1}
    now = {f"data.s{k}": k + 1 for k in range(30)} | {"data.long": [*range(49), 0]}
    assert "data.long: 49 then, 0 now" in changes(then["settings"], now)
    with pytest.raises(MisconfigurationException, match=r"data\.s0, .*data\.s9 and \d+ more; resume"):
        check_settings(then, now, accepted=False)


def test_a_refused_run_leaves_the_earlier_one_as_it_is(tmp_path):
    def files() -> dict[Path, bytes]:
        # Lightning's CSVLogger empties its file before a checkpoint is read; the next resumed run fills it again
        found = [path for path in folder.rglob("*") if path.is_file() and path.name != "metrics.csv"]
        return {path: path.read_bytes() for path in found}

    folder = run(tmp_path).folder
    earlier = files()
    with pytest.raises(MisconfigurationException):
        run(tmp_path, {"model": {"mu": 0.5}}, 2, "last")
    assert files() == earlier


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        (partial(StepLR, step_size=2), partial(StepLR, step_size=3), "step_size: 2 then, 3 now"),
        (partial(MultiStepLR, milestones=[2]), partial(MultiStepLR, milestones=[3]), "milestones: [2] then, [3] now"),
        (partial(warm_up, rounds=2), partial(warm_up, rounds=3), "_milestones: [2] then, [3] now"),
    ],
)
def test_settings_of_a_schedule_are_compared_as_they_began(one, other, line, tmp_path, told):
    half = run(tmp_path, {"model": {"lr_scheduler": one}}, 3)
    run(tmp_path, {"model": {"lr_scheduler": one}}, 4, half.last)
    with pytest.raises(MisconfigurationException):
        run(tmp_path, {"model": {"lr_scheduler": other}}, 5, half.last)
    assert [each for each in told() if each.endswith(" now")] == [f"model.lr_scheduler.{line}"]


def test_settings_of_a_server_and_its_optimizer_are_compared(tmp_path, told):
    def law(**settings: Any) -> FedLAW:
        return FedLAW(**{"server_epochs": 1, "optimizer": partial(Adam, lr=0.01), **settings})

    path = fit(make_client(), root=tmp_path, aggregator=law(), max_rounds=2).last
    fit(make_client(), root=tmp_path, aggregator=law(), max_rounds=3, ckpt_path=path)
    with pytest.raises(MisconfigurationException):
        other = law(server_epochs=2, optimizer=partial(SGD, lr=0.1))
        fit(make_client(), root=tmp_path, aggregator=other, ckpt_path=path)
    assert [line for line in told() if line.endswith(" now")] == [
        "aggregator.server_epochs: 1 then, 2 now",
        "aggregator.optimizer: Adam then, SGD now",
        "aggregator.optimizer.lr: 0.01 then, 0.1 now",
    ]


def test_a_partitioner_is_compared_with_its_settings(tmp_path, told):
    # two clients of one size each, however they are drawn
    def data(partitioner: Any) -> Any:
        return Blobs(num_clients=2, partitioner=partitioner)

    path = fit(make_client(), data(Dirichlet(alpha=0.5, equalize=True)), tmp_path, max_rounds=1).last
    for other, line in (
        (Dirichlet(alpha=0.7, equalize=True), "data.partitioner.alpha: 0.5 then, 0.7 now"),
        (Sizes(60, 60), "data.partitioner: Dirichlet then, Sizes now"),
    ):
        with pytest.raises(MisconfigurationException, match=r"data\.partitioner"):
            fit(make_client(), data(other), tmp_path, ckpt_path=path)
        assert line in told()


@pytest.mark.parametrize("entry", ["settings", "rows", "names"])
def test_a_checkpoint_of_another_version_is_refused(entry, checkpoint, tmp_path):
    other = load(checkpoint)
    del other["federation"][entry]
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(MisconfigurationException, match=f"no {entry};"):
        run(tmp_path, {}, 2, tmp_path / "other.ckpt")


@pytest.mark.parametrize("evaluate", ["validate", "test"])
def test_a_checkpoint_is_evaluated_under_any_settings(evaluate, checkpoint, tmp_path):
    model, trainer = make_client(FedProx, mu=3, net=dropping), make_trainer(clients_per_round=1, max_rounds=1)
    (result,) = getattr(trainer, evaluate)(model, datamodule=blobs(batch_size=7), ckpt_path=checkpoint)
    assert {"val/acc", "test/acc"} & set(result)


def test_fewer_rounds_than_are_done_are_refused_by_both_numbers(tmp_path):
    run(tmp_path, {}, 3)
    with pytest.raises(MisconfigurationException, match=r"max_rounds=2 is less than the 3 rounds .*; give 3 or more"):
        run(tmp_path, {}, 2, "last")


def test_another_net_is_refused_before_its_settings_are(checkpoint, tmp_path):
    with pytest.raises(MisconfigurationException, match="holds another net"):
        run(tmp_path, {"model": {"net": plain}}, 2, checkpoint)


def test_a_run_without_a_chosen_seed_takes_the_checkpoint_s(checkpoint, tmp_path, monkeypatch):
    model = make_client(FedProx, mu=0.1, net=dropping)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    torch.manual_seed(77)
    assert fit(model, root=tmp_path, ckpt_path=checkpoint, max_rounds=2).federation.seed == 3


LINE = f"{QUICKSTART} {QUIET} --data.max_samples 200 --trainer.local_epochs 1"
FOLDER = Path("runs/cwFedAvg-Digits/version_0")


def settings(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.exhaustive
def test_the_command_line_keeps_both_configurations(capsys, told):
    pfl(f"fit {LINE} --trainer.max_rounds 1")
    changed = "--model.wdr_lambda 7 --model.optimizer.lr 0.1 --trainer.max_rounds 2 --ckpt_path last"
    sentence = refusal(f"fit {LINE} {changed}", capsys)
    assert sentence.startswith("ckpt_path: ") and "model.wdr_lambda, model.optimizer.lr;" in sentence
    assert sentence.endswith("resume_changed=true.")
    assert [line for line in told() if line.endswith(" now")] == [
        "model.wdr_lambda: 5.0 then, 7.0 now",
        "model.optimizer.lr: 0.05 then, 0.1 now",
    ]
    assert settings("config.yaml")["model"]["init_args"]["wdr_lambda"] == 5
    pfl(f"fit {LINE} {changed} --resume_changed true")
    assert settings("config_until_round_1.yaml")["model"]["init_args"]["wdr_lambda"] == 5
    assert settings("config.yaml")["model"]["init_args"]["wdr_lambda"] == 7
    assert len(read_csv(FOLDER / "rounds.csv")) == 2
    # what can't change a result leaves no second file
    again = changed.replace("max_rounds 2", "max_rounds 3 --trainer.engine auto")
    pfl(f"fit {LINE} {again}")
    assert [path.name for path in FOLDER.glob("config_*")] == ["config_until_round_1.yaml"]


@pytest.mark.exhaustive
def test_a_run_of_the_command_line_goes_on_from_python():
    from pfl_lightning import FederatedTrainer
    from pfl_lightning.data import Digits
    from pfl_lightning.methods import WDR
    from pfl_lightning.nets import MLP

    pfl(f"fit {LINE} --trainer.max_rounds 1")
    data = Digits(num_clients=10, partitioner=Dirichlet(alpha=0.3), max_samples=200)
    optimizer = {"optimizer": lambda parameters: SGD(parameters, lr=0.05)}
    client = WDR(wdr_lambda=5, net=MLP, input_shape=data.input_shape, num_classes=data.num_classes, **optimizer)
    FederatedTrainer(max_rounds=2, enable_progress_bar=False).fit(client, datamodule=data, ckpt_path="last")
    assert len(read_csv(FOLDER / "rounds.csv")) == 2


def test_settings_of_other_types_are_kept_as_plain_values(tmp_path):
    server = FedLAW(server_epochs=0, proxy_fraction=np.float64(0.25))
    path = fit(make_client(), root=tmp_path, aggregator=server, max_rounds=1).last
    assert type(load(path)["federation"]["settings"]["aggregator.proxy_fraction"]) is float


def test_settings_are_the_same_in_every_round_s_checkpoint(tmp_path):
    one = run(tmp_path / "one", {"model": {"lr_scheduler": partial(ExponentialLR, gamma=0.5)}}, 1).last
    four = run(tmp_path / "four", {"model": {"lr_scheduler": partial(ExponentialLR, gamma=0.5)}}, 3).last
    assert equal(*(load(path)["federation"]["settings"] for path in (one, four)))
