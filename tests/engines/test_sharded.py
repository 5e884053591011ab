"""Clients shared out to ranks: the same bits from any number of them, and what happens when one is lost."""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl
from federations import NETS, equal, fit, load, make_client, make_trainer, noisy, read_csv, untimed
from pfl_lightning.aggregators import FedReMa
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.engines.sharded import deal
from pfl_lightning.methods import FedAvg, FedBABU, FedPer, Local

MAKE = partial(make_client, FedPer, net=noisy, optimizer_lifetime="run")


def on(ranks, make, root, **settings):
    """A run on some ranks; with several, they are forks, and what they did is in the run's folder."""
    if ranks > 1:
        settings |= {"devices": ranks, "strategy": ClientParallel(start_method="fork")}
    server = settings.pop("aggregator", None)
    run = fit(make(), root=root, aggregator=server and server(), **settings)
    (folder,) = root.glob("*/*")
    return load(folder / "checkpoints" / "last.ckpt"), untimed(read_csv(folder / "rounds.csv")), run


def equal_runs(root):
    """The folders of the runs below 1 and 2, which must have ended with the same bits."""
    (one,), (two,) = ((root / number).glob("*/*") for number in ("1", "2"))
    assert equal(*(load(folder / "checkpoints" / "last.ckpt")["federation"] for folder in (one, two)))
    return one, two


def alike(one, other):
    return equal(one[0]["federation"], other[0]["federation"]) and one[1] == other[1] and len(one[1]) > 0


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (MAKE, {"clients_per_round": 0.75, "evaluate": "both", "test_every_round": True}),
        (partial(make_client, FedBABU), {}),
        (make_client, {"aggregator": FedReMa}),
        (partial(make_client, Local, net=NETS), {}),
        (MAKE, {"accumulate_grad_batches": 2, "limit_train_batches": 3}),
    ],
    ids=["partial", "evaluation_phases", "server", "nets", "accumulation"],
)
@pytest.mark.by_default("partial")
def test_three_ranks_give_the_bits_of_one(make, settings, tmp_path):
    one, three = (on(ranks, make, tmp_path / str(ranks), **settings) for ranks in (1, 3))
    assert alike(one, three)


def test_more_ranks_than_clients_is_no_mistake(tmp_path):
    one, three = (on(ranks, MAKE, tmp_path / str(ranks), clients_per_round=1) for ranks in (1, 3))
    assert alike(one, three)


@pytest.mark.exhaustive
def test_a_run_may_change_its_ranks_when_it_resumes(tmp_path):
    whole = on(1, MAKE, tmp_path / "whole")
    on(2, MAKE, tmp_path / "part", max_rounds=1)
    assert alike(whole, on(3, MAKE, tmp_path / "part", ckpt_path="last"))


class Here(FederatedCallback):
    """Writes which rank has which client."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, trainer, federation):
        inner = federation.engines[0].engine
        run, rank = inner.run, trainer.global_rank

        def spied(jobs):
            jobs = list(jobs)
            (self.folder / str(rank)).write_text(" ".join(str(job.client) for job in jobs))
            return run(jobs)

        inner.run = spied


def test_ranks_share_the_clients(tmp_path):
    on(2, MAKE, tmp_path / "runs", callbacks=[Here(tmp_path)], max_rounds=1)
    shares = [set((tmp_path / str(rank)).read_text().split()) for rank in (0, 1)]
    assert shares[0] | shares[1] == {"0", "1", "2", "3"}
    assert len(shares[0]) == len(shares[1]) == 2


def test_the_longest_come_first_and_nobody_waits_for_two_long_ones():
    assert deal([5, 100, 5, 90, 5], 2) == [1, 0, 1, 1, 0]
    assert deal([0, 0, 0, 0], 2) == [0, 1, 0, 1]
    assert deal([], 3) == []


class Refusing(FedAvg):
    def training_step(self, batch, batch_idx):
        if self.client_id == 3:
            raise MisconfigurationException("model.x=1 must be 2.")
        return super().training_step(batch, batch_idx)


def test_what_one_rank_refuses_all_refuse(tmp_path):
    with pytest.raises(Exception, match=r"model\.x=1 must be 2\."):
        on(2, partial(make_client, Refusing), tmp_path)


class Lost(FederatedCallback):
    """The second rank dies in the second round."""

    def on_round_start(self, trainer, federation, cohort):
        if federation.round == 1 and trainer.global_rank == 1:
            os._exit(7)


def test_a_lost_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path):
    with pytest.raises(Exception, match=r"exit code 7|another rank of this run is gone"):
        on(2, MAKE, tmp_path / "lost", callbacks=[Lost()])
    assert alike(on(1, MAKE, tmp_path / "whole"), on(1, MAKE, tmp_path / "lost", ckpt_path="last"))


def test_other_strategies_are_refused():
    with pytest.raises(MisconfigurationException, match=r"trainer\.strategy=DDPStrategy would cut .* leave it out"):
        make_trainer(devices=2, strategy="ddp_spawn")


def test_processes_of_its_own_are_refused():
    with pytest.raises(MisconfigurationException, match=r"trainer\.engine=processes has processes of its own"):
        make_trainer(devices=2, engine="processes")


@pytest.mark.exhaustive
def test_the_command_starts_ranks(tmp_path):
    line = "--model FedAvg --model.net MLP --data Digits --data.num_clients 3 --data.max_samples 150"
    line = f"fit {line} --trainer.engine sequential --trainer.max_rounds 1 {QUIET} --trainer.default_root_dir"
    pfl(f"{line} {tmp_path / '1'}")
    command = [
        sys.executable,
        "-m",
        "pfl_lightning.cli.main",
        *line.split(),
        str(tmp_path / "2"),
        "--trainer.devices",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy, last round") == 1
    one, two = equal_runs(tmp_path)
    assert (one / "clients.csv").read_text() == (two / "clients.csv").read_text()
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


SMALL = (
    "--model FedPer --model.net MLP --data Digits --data.num_clients 3 --data.max_samples 150 "
    f"--trainer.engine sequential --trainer.max_rounds 1 {QUIET} --trainer.default_root_dir"
)


def meeting_place():
    """The variables by which nodes find the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


@pytest.mark.exhaustive
def test_two_nodes_give_the_bits_of_one(tmp_path, monkeypatch):
    # a number of threads that a user gives holds for a single process and for ranks alike, and would hide a difference
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pfl(f"fit {SMALL} {tmp_path / '1'}")
    where = meeting_place()
    # what a user types on each machine, and what its scheduler would set
    command = [sys.executable, "-m", "pfl_lightning.cli.main", "fit", *SMALL.split(), str(tmp_path / "2")]
    command += ["--trainer.num_nodes", "2"]
    nodes = [
        subprocess.Popen(
            command, env=os.environ | where | {"NODE_RANK": str(rank)}, cwd=tmp_path, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    ends = [node.communicate(timeout=300)[1].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    one, two = equal_runs(tmp_path)
    assert untimed(read_csv(one / "rounds.csv")) == untimed(read_csv(two / "rounds.csv"))


SRUN = """\
#!{python}
import os, subprocess, sys

# what SLURM tells each task, on one machine that stands for all
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | {{"SLURM_PROCID": at, "SLURM_NODEID": at, "SLURM_LOCALID": "0"}})
    for at in map(str, range(int(os.environ["SLURM_NTASKS"])))
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.exhaustive
def test_the_script_for_slurm_gives_the_bits_of_one_process(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pfl(f"fit {SMALL} {tmp_path / '1'}")
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": SRUN.format(python=sys.executable),
        "pfl-lightning": f'#!/bin/sh\nexec {sys.executable} -m pfl_lightning.cli.main "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "federation"}
    slurm |= {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "127.0.0.1", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    script = Path(__file__).parents[2] / "examples" / "cluster.sbatch"
    done = subprocess.run(
        ["bash", script, *SMALL.split(), str(tmp_path / "2")],
        env=os.environ | meeting_place() | slurm,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    one, two = equal_runs(tmp_path)
    assert untimed(read_csv(one / "rounds.csv")) == untimed(read_csv(two / "rounds.csv"))
