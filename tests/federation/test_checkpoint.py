"""Everything in a checkpoint can be read back, or the run ends before a round is lost."""

import logging
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import Pause, blobs, equal, fit, load, make_client, make_trainer, same_end
from pfl_lightning import FederatedTrainer, WeightedAverage
from pfl_lightning.callbacks import FederatedCallback, checkpoints
from pfl_lightning.callbacks.checkpoints import LastCheckpoint
from pfl_lightning.client.module import payloads_of
from pfl_lightning.federation.checkpoint import storable
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import APPLE, IFCA, CloudProx, FedAvg, FedPer, FedProx
from pfl_lightning.methods.fedamp import FedAMP
from pfl_lightning.nets import MLP
from pfl_lightning.privacy import DPSGD, SecureSum
from pfl_lightning.selection import Uniform


class Keeping(WeightedAverage):
    """Keeps something from its set-up, or from the first aggregation on."""

    def __init__(self, value: Any, at_once: bool = False) -> None:
        super().__init__()
        self.value, self.at_once = value, at_once

    def setup(self, server):
        super().setup(server)
        if self.at_once:
            self.state["mine"] = {"x": self.value}

    def aggregate(self, updates, round):
        self.state["mine"] = {"x": self.value}
        return super().aggregate(updates, round)


class Kind(Enum):
    A = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (np.ones(2), "tensor"),
        (np.array(1.0), "tensor"),
        (deque([1]), "list"),
        (defaultdict(int, {1: 2}), "dict"),
        (frozenset([1]), "list"),
        (datetime(2026, 1, 1), "isoformat"),
        (timedelta(1), "seconds"),
        (Path("x"), "text"),
        (Pair(1, 2), "tuple"),
        (Kind.A, "value"),
        (range(3), "numbers"),
        (object(), "numbers"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("at_once", [True, False], ids=["set-up", "aggregation"])
def test_what_cannot_be_read_back_ends_the_run_before_its_first_round_is_over(value, advice, at_once):
    with pytest.raises(MisconfigurationException, match=rf"Keeping.state\['mine'\]\['x'\].*{type(value).__name__}"):
        fit(make_client(), aggregator=Keeping(value, at_once))
    with pytest.raises(MisconfigurationException, match=advice):
        storable([value], "state")


PLAIN = {
    "texts": ["a", b"b", None, True, 2**70, 1j],
    "dicts": OrderedDict(a=Counter("aab"), b={1: (1, {2, 3})}),
    "tensors": [torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.Size([2]), torch.float64],
}


def test_what_can_be_read_back_is_left_as_it_is(tmp_path):
    assert storable(PLAIN, "state") is PLAIN
    torch.save(PLAIN, tmp_path / "plain")
    assert equal(load(tmp_path / "plain"), PLAIN)


@pytest.mark.parametrize(
    "number", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.str_("a")], ids=lambda n: str(n.dtype)
)
def test_numbers_of_numpy_become_python_s_in_the_running_state(number):
    state = fit(make_client(), aggregator=Keeping(number), max_rounds=1).federation.aggregator.state
    assert type(state["mine"]["x"]) is type(number.item()) and state["mine"]["x"] == number
    (key,) = storable({number: 1}, "state")
    assert type(key) is type(number.item())


class Drifting(WeightedAverage):
    """Counts in NumPy's float32, in which a number is another one than in Python's."""

    def aggregate(self, updates, round):
        share = self.state.get("share", np.float32(0.1))
        self.state["share"] = np.float32(share) + np.float64(share) / 3
        return super().aggregate(updates, round) | {"share": np.float32(share)}


class Late(Uniform):
    def remember(self, reports, round):
        self.state["last"] = np.int64(round)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
@pytest.mark.by_default("processes")
def test_numbers_of_numpy_do_not_change_a_resumed_run(engine, tmp_path):
    def go(root: Path, **settings: Any) -> Any:
        optimizer = partial(SGD, lr=np.float64(0.1), momentum=0.9)
        model = make_client(FedProx, mu=np.float64(0.5), optimizer=optimizer, optimizer_lifetime="run")
        data = blobs(24, 16, val_fraction=np.float64(0.2), root=Path("data"))
        return fit(model, data, root, Drifting(), engine=engine, cohort=Late(), **settings)

    whole = go(tmp_path / "whole")
    go(tmp_path / "half", callbacks=[Pause(2)])
    assert same_end(whole, go(tmp_path / "half", ckpt_path="last"))
    assert type(whole.rows[-1]["server/share"]) is float


class Forgetful(Uniform):
    def remember(self, reports, round):
        self.state["seen"] = deque([round])


class Noting(FederatedCallback):
    def state_dict(self):
        return {"seen": deque()}


class Listing(FederatedCallback):
    def on_aggregate_end(self, trainer, federation, logs):
        federation.metrics["listed"] = [1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cohort": Forgetful()}, r"trainer.cohort.state\['seen'\]"),
        ({"callbacks": [Noting()]}, r"callbacks\['Noting'\]\['seen'\]"),
        ({"callbacks": [Listing()]}, r"metrics\['listed'\]"),
    ],
    ids=["cohort", "callback", "record"],
)
def test_cohorts_and_callbacks_are_held_to_it_too(settings, named, tmp_path):
    with pytest.raises(MisconfigurationException, match=named):
        fit(make_client(), root=tmp_path, max_rounds=2, **settings)
    assert not list(tmp_path.rglob("last.ckpt"))


def emptied(entries):
    entries.clear()


def halved(entries):
    del entries["aggregator"], entries["seed"]


def replaced(entries):
    entries["sizes"] = 3


@pytest.mark.parametrize(
    ("change", "named"), [(emptied, "method, names"), (halved, "seed, aggregator"), (replaced, "sizes")]
)
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_checkpoint_whose_federation_is_damaged_is_refused(change, named, states, tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    checkpoint = load(run.last)
    change(checkpoint["federation"])
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    for act in ("fit", "test", "join"):
        trainer = make_trainer(tmp_path, client_states=states)
        with pytest.raises(MisconfigurationException, match=f"federation has no {named}"):
            getattr(trainer, act)(make_client(), datamodule=blobs(), ckpt_path=tmp_path / "damaged.ckpt")


@pytest.mark.parametrize("entry", [None, [], 3, "text"])
def test_a_federation_that_is_none_is_refused(entry, tmp_path):
    checkpoint = load(fit(make_client(), root=tmp_path, max_rounds=1).last)
    torch.save({**checkpoint, "federation": entry}, tmp_path / "damaged.ckpt")
    with pytest.raises(MisconfigurationException, match="federation has no method"):
        fit(make_client(), root=tmp_path, ckpt_path=tmp_path / "damaged.ckpt")


@pytest.mark.parametrize("method", [FedAvg, IFCA, APPLE, FedPer])
def test_each_different_payload_is_there_once(method, tmp_path):
    run = fit(make_client(method), root=tmp_path)
    saved = load(next(run.folder.rglob("last.ckpt")))["federation"]
    federation = run.federation
    assert equal(payloads_of(saved), {client: federation.aggregator.download(client) for client in range(4)})
    payloads = [each["payload"] for each in saved["payloads"]]
    assert not any(equal(one, other) for one, other in combinations(payloads, 2))
    if method in (FedAvg, FedPer):
        assert saved["payloads"][0]["clients"] == [[0, 4]]


def test_empty_parts_of_states_are_left_out_and_come_back(tmp_path):
    run = fit(make_client(FedAvg), root=tmp_path, clients_per_round=0.5)
    path = next(run.folder.rglob("last.ckpt"))
    assert load(path)["federation"]["clients"] == {client: {} for client in sorted(run.federation.clients)}
    trainer = make_trainer(tmp_path)
    trainer.test(make_client(FedAvg), blobs(), ckpt_path=path, verbose=False)
    assert trainer.lightning_module.clients == run.federation.clients


@pytest.mark.parametrize(("method", "aggregator"), [(CloudProx, FedAMP), (FedPer, None)])
def test_a_file_grows_by_a_state_a_client_and_by_no_further_tensors(method, aggregator, tmp_path):
    sizes, tensors = [], []
    for clients in (20, 40):
        client, data = make_client(method, net=partial(MLP, hidden=(400,))), blobs(*[3] * clients)
        server = aggregator and aggregator()
        run = fit(client, data, tmp_path / str(clients), aggregator=server, max_rounds=1, engine="sequential")
        sizes.append(run.last.stat().st_size)
        with ZipFile(run.last) as file:
            tensors.append(len(file.namelist()))
    assert tensors[0] == tensors[1]
    # FedAMP's server has each client's model, which the client keeps too, and sends mixes of all
    assert (sizes[1] - sizes[0]) / 20 < 1.1 * num_bytes(run.federation.clients[0].personal)


def test_a_resumed_run_of_mixes_computes_their_weights_again(tmp_path):
    settings = {"max_rounds": 3, "engine": "sequential", "clients_per_round": 10}
    data = blobs(*[3] * 20)
    whole = fit(make_client(), data, tmp_path / "whole", aggregator=FedAMP(), **settings)
    cut = fit(make_client(), blobs(*[3] * 20), tmp_path / "cut", aggregator=FedAMP(), **settings | {"max_rounds": 2})
    assert "xi" not in load(cut.last)["federation"]["aggregator"]
    resumed = fit(
        make_client(), blobs(*[3] * 20), tmp_path / "cut", aggregator=FedAMP(), ckpt_path=cut.last, **settings
    )
    assert same_end(resumed, whole)


class Dumps(FederatedCallback):
    """Counts how often the trainer's state is written out."""

    def __init__(self) -> None:
        self.count: list[int] = []

    def on_train_epoch_start(self, trainer, federation):
        self.count.append(0)

    def on_save_checkpoint(self, trainer, federation, checkpoint):
        self.count[-1] += 1


@pytest.mark.parametrize("links", [True, False])
def test_a_round_that_is_best_and_last_is_written_once(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr("os.link", lambda *paths: (_ for _ in ()).throw(OSError("no links here")))
    dumps, inodes = Dumps(), []

    class Look(FederatedCallback):
        def on_train_epoch_start(self, trainer, federation):
            folder = Path(trainer.log_dir, "checkpoints")
            if federation.round:
                best, last = (load(folder / name)["federation"]["round"] for name in ("best.ckpt", "last.ckpt"))
                same = (folder / "best.ckpt").samefile(folder / "last.ckpt")
                inodes.append((best, last, same))

    run = fit(make_client(), root=tmp_path, max_rounds=8, callbacks=[dumps, Look()])
    assert dumps.count == [1] * 8
    assert [last for _, last, _ in inodes] == [*range(1, 8)]
    assert {same for best, last, same in inodes if best == last} == {links}
    values = [row["val/acc"] for row in run.logger.rows]
    assert [best for best, _, _ in inodes] == [values.index(max(values[:end])) + 1 for end in range(1, 8)]
    assert len({best == last for best, last, _ in inodes}) == 2


class Written(FederatedCallback):
    """Notes the rounds of the two files after each round."""

    def __init__(self, stop: int = 0) -> None:
        self.rounds: list[tuple[int | None, int | None]] = []
        self.stop = stop

    def on_train_epoch_start(self, trainer, federation):
        files = [Path(trainer.log_dir, "checkpoints", name) for name in ("best.ckpt", "last.ckpt")]
        found = [load(file)["federation"]["round"] if file.exists() else None for file in files]
        self.rounds.append((found[0], found[1]))

    def on_round_start(self, trainer, federation, cohort):
        trainer.should_stop = bool(self.stop) and federation.round + 1 >= self.stop


@pytest.mark.parametrize("validates", [True, False])
def test_fewer_checkpoints_change_no_result_and_lose_no_best_round(validates, tmp_path):
    settings = {"max_rounds": 8} | ({} if validates else {"limit_val_batches": 0})
    whole = fit(make_client(), root=tmp_path / "1", callbacks=[Written()], **settings)
    written = Written()
    some = fit(make_client(), root=tmp_path / "3", callbacks=[written], checkpoint_every=3, **settings)
    assert same_end(whole, some) and whole.logger.summary["selected"] == some.logger.summary["selected"]
    each = next(c for c in whole.trainer.callbacks if isinstance(c, Written))
    best = [one for one, _ in each.rounds]
    assert [one for one, _ in written.rounds] == best
    expected: list[int | None] = [None]
    for round in range(1, 8):
        due = round % 3 == 0 or (validates and best[round] == round)
        expected.append(round if due else expected[-1])
    assert [last for _, last in written.rounds] == expected != [None, *range(1, 8)]
    assert load(some.last)["federation"]["round"] == 8


def test_a_killed_run_with_fewer_checkpoints_ends_with_the_same_bits(tmp_path):
    settings = {"max_rounds": 6, "limit_val_batches": 0, "checkpoint_every": 4}
    whole = fit(make_client(), root=tmp_path / "whole", **settings)

    class Killed(FederatedCallback):
        def on_aggregate_end(self, trainer, federation, logs):
            if federation.round == 4:
                raise KeyError("the end")

    with pytest.raises(KeyError):
        fit(make_client(), root=tmp_path / "cut", callbacks=[Killed()], **settings)
    last = next((tmp_path / "cut").rglob("last.ckpt"))
    assert load(last)["federation"]["round"] == 4
    assert same_end(fit(make_client(), root=tmp_path / "cut", ckpt_path=last, **settings), whole)


def test_the_round_after_which_a_run_stops_is_written(tmp_path):
    settings = {"limit_val_batches": 0, "checkpoint_every": 5, "max_rounds": 9}
    run = fit(make_client(), root=tmp_path, callbacks=[Written(stop=3)], **settings)
    assert run.federation.round == load(run.last)["federation"]["round"] == 3


class Clock(FederatedCallback):
    """Seconds that pass as a test says: some a round, and some for a ``last.ckpt``."""

    def __init__(self, monkeypatch, round, file):
        self.now, self.round, self.files = 0.0, round, []
        save = FederatedTrainer.save_checkpoint

        def saved(trainer, path, *args, **kwargs):
            self.now += file
            self.files.append((Path(path).stem, trainer.lightning_module.round))
            save(trainer, path, *args, **kwargs)

        monkeypatch.setattr(FederatedTrainer, "save_checkpoint", saved)
        monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: self.now))

    def on_round_start(self, trainer, federation, cohort):
        self.now += self.round


@pytest.mark.parametrize(
    ("round", "file", "expected"),
    [
        (3.0, 1.0, [1, 5, 9, 11]),
        (10.0, 1.0, [*range(1, 12)]),
        (1.0, 0.0, [*range(1, 12)]),
    ],
)
def test_files_take_a_tenth_of_the_time_at_most(round, file, expected, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, round, file)
    settings = {"limit_val_batches": 0, "checkpoint_every": None, "max_rounds": 11}
    fit(make_client(), root=tmp_path, callbacks=[clock], **settings)
    assert clock.files == [("last", saved) for saved in expected]


def test_a_best_round_is_the_last_one_saved_and_its_link_counts_for_no_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 3.0, 1.0)
    run = fit(make_client(), root=tmp_path, callbacks=[clock], checkpoint_every=None, max_rounds=11)
    best = {saved for name, saved in clock.files if name == "best"}
    last = [saved for name, saved in clock.files if name == "last"]
    assert best < set(last) and len(last) < 11 and load(run.last)["federation"]["round"] == 11
    last_checkpoint = next(c for c in run.trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint))
    assert last_checkpoint.seconds == 1.0


def test_a_run_says_what_a_kill_costs_where_it_is_more_than_a_minute(tmp_path, monkeypatch, caplog):
    settings = {"limit_val_batches": 0, "checkpoint_every": None, "max_rounds": 4}
    with caplog.at_level(logging.INFO):
        fit(make_client(), root=tmp_path, callbacks=[Clock(monkeypatch, 9.0, 5.0)], **settings)
        assert "last.ckpt took" not in caplog.text
        fit(make_client(), root=tmp_path, callbacks=[Clock(monkeypatch, 9.0, 12.0)], **settings)
    assert caplog.text.count("last.ckpt took 12 s to write: it is written each 2 min") == 1


@pytest.mark.parametrize("due", [True, False])
def test_the_clock_of_one_rank_decides_for_all(due):
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: due))
    assert LastCheckpoint()._is_due(trainer, round=1) is due


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_number_of_rounds_between_checkpoints_is_an_integer_from_1(value, tmp_path):
    with pytest.raises(MisconfigurationException, match=f"checkpoint_every={value}"):
        make_trainer(tmp_path, checkpoint_every=value)


@pytest.mark.parametrize("stage", [{"secure_sum": SecureSum()}, {"example_privacy": DPSGD(epsilon=8)}])
def test_no_round_is_left_out_whose_privacy_is_spent(stage, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"checkpoint_every=2 .*give 1"):
        fit(make_client(), root=tmp_path, checkpoint_every=2, **stage)


@pytest.mark.parametrize("stage", [{"secure_sum": SecureSum()}, {"example_privacy": DPSGD(epsilon=8)}])
def test_by_default_each_round_is_written_whose_privacy_is_spent(stage, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 1.0, 5.0)
    settings = {"limit_val_batches": 0, "checkpoint_every": None, "max_rounds": 3}
    fit(make_client(), root=tmp_path, callbacks=[clock], **stage, **settings)
    assert clock.files == [("last", 1), ("last", 2), ("last", 3)]
