import gc
import os
import signal
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Adam

from command import forked
from federations import (
    Run,
    blobs,
    equal,
    fit,
    load,
    make_client,
    make_trainer,
    noisy,
    plain,
    read_csv,
    same_end,
)
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines import ClientState
from pfl_lightning.federation import options
from pfl_lightning.federation.options import stay_on_device
from pfl_lightning.methods import FedPer, Local
from pfl_lightning.runs.client_states import DiskStates

RUN = {"optimizer_lifetime": "run"}


def run(root: Path | str, states: str, rounds: int = 3, model: Any = RUN, method: Any = FedPer, **trainer: Any) -> Run:
    trainer = {"clients_per_round": 0.4, "max_rounds": rounds, "client_states": states, **trainer}
    return fit(make_client(method, **model), blobs(24, 16, 30, 20, 12), root, **trainer)


def files(run: Run) -> list[Path]:
    return [path for path in (run.folder / "states").rglob("*") if path.is_file()]


def tensor_bytes(checkpoint: Path) -> int:
    return sum(entry.file_size for entry in ZipFile(checkpoint).infolist() if "/data/" in entry.filename)


def state(value: float) -> ClientState:
    return ClientState(
        {"w": torch.full((3,), value)}, {"": {"state": {0: {"step": torch.tensor(2.0)}}}}, {"scale": 8.0}
    )


@pytest.mark.parametrize(
    ("method", "model", "trainer"),
    [
        (Local, {"net": noisy, **RUN}, {}),
        (FedPer, {"net": plain, "optimizer": partial(Adam, lr=0.01), **RUN}, {"engine": "vectorised"}),
        (FedPer, {"net": noisy, **RUN}, {"engine": "processes", "workers": 2}),
    ],
    ids=["momentum", "vectorised-adam", "processes"],
)
@pytest.mark.parametrize("states", ["disk", "device", "auto"])
def test_a_run_with_states_elsewhere_has_the_bits_of_one_in_memory(method, model, trainer, states, tmp_path):
    trainer = {"evaluate": "both", **trainer}
    memory, other = (run(tmp_path / where, where, 3, model, method, **trainer) for where in ("memory", states))
    assert same_end(memory, other)
    assert read_csv(memory.folder / "clients.csv") == read_csv(other.folder / "clients.csv")
    checkpoints = [load(run.last) for run in (memory, other)]
    assert equal(*(checkpoint["federation"] for checkpoint in checkpoints))
    assert equal(*(checkpoint["state_dict"] for checkpoint in checkpoints))
    # nothing is in it that its tensors are only parts of
    assert tensor_bytes(memory.last) == tensor_bytes(other.last)


def test_clients_that_stay_on_a_device_have_one():
    trainer = SimpleNamespace(world_size=2, precision_plugin=Precision(), max_epochs=1)
    options = FederatedTrainer(client_states="device", logger=False).rounds
    data = blobs()
    data.setup()
    expected = r"of trainer\.devices=2 it is another one in each round; take client_states='memory'"
    with pytest.raises(MisconfigurationException, match=expected):
        options.engines([make_client()], data, trainer)


@pytest.mark.parametrize("lifetime", ["round", "run"])
def test_clients_stay_on_a_gpu_that_has_room_for_all_of_them(lifetime, monkeypatch, caplog):
    # on the device "meta" in place of a GPU
    module = make_client(FedPer, net=plain, optimizer_lifetime=lifetime).to("meta")
    personal = [tensor for name, tensor in module.state_dict().items() if module.is_personal(name)]
    kept = sum(tensor.nbytes for tensor in personal)
    if lifetime == "run":
        kept += 2 * sum(parameter.nbytes for parameter in module.parameters())
    free = [4 * 7 * kept]
    monkeypatch.setattr(options, "free_memory", lambda device: free[0])
    with caplog.at_level("INFO"):
        assert stay_on_device("auto", [module], clients=7, ranks=1)
        assert not stay_on_device("auto", [module], clients=8, ranks=1)
    on, off = [record.message for record in caplog.records]
    assert "keeps clients on meta: there they take" in on and "keeps clients in memory: there they take" in off
    # of several devices each client is on another one in each round
    assert not stay_on_device("auto", [module], clients=1, ranks=2)
    assert not stay_on_device("auto", [make_client(FedPer)], clients=1, ranks=1)
    free[0] = 0
    assert stay_on_device("device", [module], clients=7, ranks=1)
    assert not any(stay_on_device(where, [module], clients=7, ranks=1) for where in ("memory", "disk"))


def test_there_is_a_file_for_each_client_that_has_trained(tmp_path):
    disk = run(tmp_path, "disk")
    assert 2 <= len(disk.federation.clients) < 5
    names = [path.name.split("-")[0] for path in files(disk)]
    assert sorted(map(int, names)) == sorted(disk.federation.clients)
    assert disk.trainer.strategy.checkpoint_io.mapped


@pytest.mark.parametrize(("first", "second"), [("memory", "disk"), ("disk", "memory"), ("disk", "disk")])
def test_a_run_goes_on_from_a_checkpoint_of_either_kind(first, second, tmp_path):
    whole = run(tmp_path / "whole", "memory", 6)
    run(tmp_path / "halves", first, 3)
    assert same_end(whole, run(tmp_path / "halves", second, 6, ckpt_path="last"))


def test_a_resumed_run_lets_go_of_its_checkpoint(tmp_path):
    last = run(tmp_path, "disk").last.resolve()
    trainer = make_trainer(tmp_path, client_states="disk", max_rounds=3)
    trainer.validate(make_client(FedPer, **RUN), datamodule=blobs(24, 16, 30, 20, 12), ckpt_path=str(last))
    assert len(trainer.lightning_module.clients)
    assert str(last) not in Path("/proc/self/maps").read_text()


def test_testing_the_selected_round_leaves_the_states_as_they_are(tmp_path):
    # with a rate that grows the best round isn't the last
    growing = {**RUN, "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=30.0)}
    memory, disk = (run(tmp_path / states, states, 4, growing) for states in ("memory", "disk"))
    assert memory.logger.summary["selected"]["round"] < 4
    assert memory.logger.summary["selected"] == disk.logger.summary["selected"]
    assert isinstance(disk.federation.clients, DiskStates)
    assert same_end(memory, disk)


def test_states_that_were_looked_up_stay_what_they_were(tmp_path):
    states = DiskStates(tmp_path, {4: state(1.0), 2: state(5.0)})
    before = states[4]
    states[4] = state(2.0)
    assert equal(vars(before), vars(state(1.0))) and equal(vars(states[4]), vars(state(2.0)))
    states[4].personal["w"].zero_()
    assert equal(vars(states[4]), vars(state(2.0)))
    assert list(states) == [4, 2] and len(list(tmp_path.rglob("*.pt"))) == 2
    del states[4]
    assert 4 not in states and equal(vars(before), vars(state(1.0)))
    with pytest.raises(KeyError):
        states[4]


def test_a_state_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    states = DiskStates(tmp_path, {0: state(1.0)})
    with pytest.raises(Exception, match="pickle"):
        states[0] = ClientState({"w": lambda: None})
    assert equal(vars(states[0]), vars(state(1.0)))


def test_their_files_go_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    disk, unlogged = run(tmp_path, "disk"), run("unused", "disk")
    folder = disk.folder
    assert files(disk) and list((tmp_path / "temporary").rglob("*.pt"))
    changed = folder.stat().st_mtime_ns
    del disk, unlogged
    gc.collect()
    assert not list((folder / "states").iterdir()) and not list((tmp_path / "temporary").iterdir())
    # by which the newest run is found
    assert folder.stat().st_mtime_ns == changed


class Killed(FederatedCallback):
    """Kills the process in the second round, while the states of the clients are new and no checkpoint has them."""

    def on_aggregate_end(self, trainer: Any, federation: Any, logs: Any) -> None:
        if federation.round == 1:
            Path(trainer.log_dir, "checkpoints", "best.ckpt.partial").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_what_a_killed_run_has_left_goes_when_it_goes_on(engine, states, tmp_path):
    killed = forked(partial(run, tmp_path / "run", "disk", callbacks=[Killed()], engine=engine))
    killed.join()
    (folder,) = (tmp_path / "run").glob("*/*")
    (left,) = (folder / "states").iterdir()
    assert killed.exitcode == -signal.SIGKILL and list(left.iterdir())
    # those of an evaluation, of a version that named no process, and of another host
    alive, earlier, elsewhere = (
        left.with_name(name) for name in (f"states-{os.getppid()}-{socket.gethostname()}-x", "states-x", "states-1-a-x")
    )
    for each in (alive, earlier, elsewhere):
        each.mkdir()
    resumed = run(tmp_path / "run", states, engine=engine, ckpt_path="last")
    assert same_end(run(tmp_path / "whole", "memory", engine=engine), resumed)
    own = {path.parent for path in files(resumed)}
    assert len(own) == (states == "disk") and set((folder / "states").iterdir()) == {alive, *own}
    assert not list(folder.rglob("*.partial"))
    del resumed
    gc.collect()
    assert list((folder / "states").iterdir()) == [alive]


def test_states_of_ended_evaluations_go_from_all_runs_of_a_method(tmp_path):
    """Each evaluation has a folder of its own, in which no run goes on."""
    ended = forked(os.getpid)
    ended.join()
    for version, process in enumerate((ended.pid, os.getppid())):
        (tmp_path / f"version_{version}/states/states-{process}-{socket.gethostname()}-x").mkdir(parents=True)
    states = DiskStates(tmp_path / "version_2/states", {0: state(1.0)})
    assert sorted(path.parent.parent.name for path in tmp_path.glob("*/states/*")) == ["version_1", "version_2"]
    del states
    gc.collect()
    assert not list((tmp_path / "version_2/states").iterdir())


def test_states_of_ended_processes_go_from_the_system_s_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = forked(os.getpid)
    ended.join()
    names = [f"pfl-lightning-states-{p}-{socket.gethostname()}-x" for p in (ended.pid, os.getppid())]
    for name in [*names, "states-x"]:
        (tmp_path / name).mkdir()
    states = DiskStates(None, {})
    assert {names[1], "states-x"} < {path.name for path in tmp_path.iterdir()} and len(list(tmp_path.iterdir())) == 3
    del states


def test_runs_in_memory_keep_no_files(tmp_path):
    memory = run(tmp_path, "memory")
    assert not (memory.folder / "states").exists()
    assert not memory.trainer.strategy.checkpoint_io.mapped


def test_a_damaged_checkpoint_is_refused_as_in_memory(tmp_path):
    path = tmp_path / "cut.ckpt"
    path.write_bytes(run(tmp_path, "disk").last.read_bytes()[:3000])
    with pytest.raises(MisconfigurationException, match="can't be read as a checkpoint"):
        run(tmp_path, "disk", ckpt_path=path)


def test_a_place_that_is_neither_is_refused():
    with pytest.raises(
        MisconfigurationException, match="client_states='tape' must be one of memory, device, disk, rank, auto"
    ):
        make_trainer(client_states="tape")
