"""Sites that are slow, lost, late, or come and go while a federation runs, on a clock that tests set."""

import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite
from flwr.proto.node_pb2 import NodeInfo
from local_grid import LocalGrid

from federations import Pause, blobs, equal, fit, load, make_client, make_trainer, noisy
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.flower import client_app, link, progress
from pfl_lightning.flower.link import Quorum
from pfl_lightning.flower.server_app import check_quorum
from pfl_lightning.flower.wire import pack
from pfl_lightning.methods import FedAvg, FedDyn, FedPer
from pfl_lightning.privacy import DPAverage, SecureSum
from pfl_lightning.runs.deployment_status import DeploymentStatus
from pfl_lightning.stopping import Stopped

make = partial(make_client, FedPer, net=noisy)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    fake = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep, time=lambda: made.now)
    monkeypatch.setattr(link, "time", fake)
    monkeypatch.setattr(progress, "time", fake)
    return made


class TimedGrid(LocalGrid):
    """Gives each node's replies after the seconds that the node takes, and lets nodes come and go in a round."""

    def __init__(
        self, grid: LocalGrid, clock: Clock, seconds: Callable[[int], float], **rounds: dict[int, int]
    ) -> None:
        super().__init__(grid.app, grid.nodes, grid.keys)
        self.clock, self.seconds = clock, seconds
        self.dies, self.joins = rounds.get("dies", {}), rounds.get("joins", {})
        self.away |= self.joins.keys()
        self.due: dict[str, float] = {}

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            node, kind, group = (
                getattr(message.metadata, name) for name in ("dst_node_id", "message_type", "group_id")
            )
            if kind == "train":
                self.away -= {other for other, round in self.joins.items() if round <= int(group) + 1}
                if self.dies.get(node) == int(group):
                    self.away.add(node)
        names = super().push_messages(messages)
        for name, message in zip(names, messages, strict=True):
            node, greets = message.metadata.dst_node_id, message.metadata.message_type == "query"
            self.due[name] = self.clock.now + (0.0 if greets or node in self.away else self.seconds(node))
        return names

    def pull_messages(self, message_ids):
        return super().pull_messages([name for name in message_ids if self.due.get(name, 0.0) <= self.clock.now])


class Durations(FederatedCallback):
    """Notes how long each round takes on the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self.begun = clock, [], 0.0

    def on_round_start(self, trainer, federation, cohort):
        self.begun = self.clock.now

    def on_train_epoch_end(self, trainer, pl_module):
        self.seconds.append(self.clock.now - self.begun)


def timed(
    tmp_path,
    clock,
    count,
    seconds,
    method=make,
    rounds=2,
    dies=None,
    joins=None,
    serving=None,
    spoil=None,
    loses=None,
    **settings,
):
    """A deployment of sites with a client each, and the seconds of its rounds."""
    data = partial(blobs, *[8] * count)
    settings = {"max_rounds": rounds, "evaluate": "after", **settings}
    nodes = {11 + client: {"clients": str(client), "allow": "control"} for client in range(count)}
    grid = TimedGrid(
        grid_of(method, tmp_path / "sites", data, nodes=nodes, resident=True, **settings),
        clock,
        lambda node: seconds(node - 11),
        dies={11 + client: round for client, round in (dies or {}).items()},
        joins={11 + client: round for client, round in (joins or {}).items()},
    )
    grid.spoil, grid.loses = spoil or grid.spoil, loses or {}
    durations = Durations(clock)
    serving = {"timeout": 600.0, "patience": 60.0, "poll": 0.5} | (serving or {})
    callbacks = [durations, *settings.pop("callbacks", [])]
    run = deploy(grid, method, tmp_path / "server", data, serving=serving, callbacks=callbacks, **settings)
    return run, durations.seconds, grid


def test_a_server_without_sites_looks_for_them_once_a_poll(tmp_path, clock):
    grid, looks = grid_of(make, tmp_path), []
    grid.away |= grid.nodes.keys()

    def looked():
        looks.append(clock.now)
        clock.now += 0.1

    waiting = link.Link(grid, 4, "0" * 16, poll=2.0)
    waiting.on_look = looked
    with pytest.raises(MisconfigurationException, match="within 5 s that it has clients 0, 1, 2, 3"):
        waiting.wait(5.0)
    assert looks == pytest.approx([1000.0, 1002.1, 1004.2, 1006.3])


def test_no_round_is_longer_than_its_slowest_site_and_the_record_says_who_was_absent(tmp_path, clock, capsys):
    run, seconds, _ = timed(
        tmp_path,
        clock,
        10,
        lambda client: 25 if client == 5 else 5,
        rounds=6,
        dies={3: 2},
        joins={9: 4},
        serving={"quorum": Quorum(min_available=9), "status": tmp_path / "state"},
    )
    assert len(seconds) == 6 and all(25 <= each <= 1.5 * 25 for each in seconds)
    assert [row["absent"] for row in run.rows] == ["9", "3 9", "3 9", "3", "3", "3"]
    assert [(row["clients"], row["clients_absent"]) for row in run.rows] == [(9, 1), (8, 2), (8, 2), *[(9, 1)] * 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert lines[1].startswith("round 2 of 6, 25.0 s: 8 of 9 clients answered; absent 3, 9; loss ")
    assert lines[5].endswith("; slowest client 5 after 25.0 s")
    told = DeploymentStatus(tmp_path / "state")
    assert (told.state, told.exit_code, told.content["round"]) == ("finished", 0, 6)
    assert [site["clients"] for site in told.content["sites"] if not site["present"]] == [["3"]]


def test_absent_clients_keep_their_state(tmp_path, clock):
    run, _, _ = timed(tmp_path, clock, 3, lambda client: 1, rounds=3, dies={2: 2})
    last = run.federation.clients[2].kept
    assert (tmp_path / "sites" / "13" / "2").exists()
    assert last in {path.stem for path in (tmp_path / "sites" / "13" / "2").rglob("*.pt")}
    assert run.rows[2]["cohort"] == "0 1"


@pytest.mark.parametrize(
    ("results", "grace", "longest", "absent"), [(0.75, 3.0, 5, ["3", "3"]), (3, 30.0, 20, ["", ""]), (1, 0.0, 2, None)]
)
def test_a_phase_ends_a_time_of_grace_after_enough_answers(tmp_path, clock, results, grace, longest, absent):
    quorum = Quorum(min_results=results, grace=grace)
    run, seconds, _ = timed(
        tmp_path,
        clock,
        4,
        lambda client: [1, 2, 2, 20][client],
        rounds=2,
        serving={"quorum": quorum},
        evaluate="before",
    )
    # training and evaluation, each by the same share
    assert all(each <= 2 * longest + 2 for each in seconds)
    if absent is not None:
        assert [row["absent"] for row in run.rows] == absent


def fails(*nodes):
    """Has sites tell of a failure in place of each training and evaluation."""

    def spoil(node, kind, content):
        if node in nodes and kind in ("train", "evaluate"):
            for name in list(content):
                del content[name]
            for name, record in pack({"failure": {"reason": "no such disk"}}).items():
                content[name] = record

    return spoil


@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_a_site_that_fails_at_once_ends_no_phase_for_slower_ones(tmp_path, clock, capsys, evaluate):
    quorum = Quorum(min_results=2, grace=1.0)
    run, seconds, _ = timed(
        tmp_path,
        clock,
        4,
        [0.1, 0.1, 10, 11].__getitem__,
        serving={"quorum": quorum},
        spoil=fails(11, 12),
        evaluate=evaluate,
    )
    assert [(row["clients"], row["absent"]) for row in run.rows] == [(2, "")] * 2
    assert all(each >= 10 for each in seconds)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("round 1"))
    assert ": 2 of 4 clients answered; refused 0: no such disk" in line


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_a_lost_answer_is_asked_for_again_and_is_the_same_one(tmp_path, clock, capsys, kind):
    run, seconds, grid = timed(
        tmp_path,
        clock,
        3,
        lambda client: 5,
        loses={13: kind},
        serving={"patience": 300.0},
        evaluate="before",
    )
    # far below the time-out of 600 s, and above what a site may take
    assert (60 < sum(seconds) < 100) if kind != "query" else sum(seconds) < 30
    assert [row["absent"] for row in run.rows] == ["", ""]
    data = partial(blobs, *[8] * 3)
    alone = fit(make(), data=data(), max_rounds=2, evaluate="before")
    assert equal(run.weights, alone.weights) and equal(
        run.federation.aggregator.state, alone.federation.aggregator.state
    )
    if kind == "query":
        return
    asked = [node for each, node in grid.asked if each == kind]
    assert asked.count(13) == asked.count(12) + 1
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("round 1 for 6") and line.endswith("waiting for client 2") for line in said)
    assert any(line.startswith("round 1 of 2") and line.endswith("; asked again 2") for line in said)


def test_a_site_trains_once_though_it_is_asked_twice(tmp_path, clock, monkeypatch):
    trained = []
    train = client_app.Worker.train
    monkeypatch.setitem(client_app.WORKS, "train", lambda worker, content: trained.append(1) or train(worker, content))
    seconds = {0: 5, 1: 5, 2: 200}
    run, _, grid = timed(tmp_path, clock, 3, seconds.__getitem__, rounds=3)
    # slow and not lost: the second question is answered by what it has said
    assert [node for kind, node in grid.asked if kind == "train"].count(13) > 3
    assert len(trained) == 3 * 3
    assert equal(run.weights, fit(make(), data=blobs(8, 8, 8), max_rounds=3, evaluate="after").weights)


def test_the_status_says_for_whom_a_round_waits(tmp_path, clock):
    told = []

    class Looks(TimedGrid):
        def pull_messages(self, message_ids):
            told.append(DeploymentStatus(tmp_path / "state").content)
            return super().pull_messages(message_ids)

    data, settings = partial(blobs, 8, 8), {"max_rounds": 1, "evaluate": "after"}
    nodes = {11 + client: {"clients": str(client)} for client in range(2)}
    inner = grid_of(make, tmp_path / "sites", data, nodes=nodes, resident=True, **settings)
    grid = Looks(inner, clock, lambda node: 5 if node == 11 else 30)
    serving = {"timeout": 600.0, "patience": 60.0, "poll": 0.5, "status": tmp_path / "state"}
    deploy(grid, make, tmp_path / "server", data, serving=serving, **settings)
    waits = [each["now"] for each in told if each.get("now")]
    assert {"0 1", "1"} == {" ".join(now["clients"]) for now in waits} and {now["round"] for now in waits} == {1}


@pytest.mark.parametrize(("late_rounds", "told"), [(0, 2), (1, 2), (2, None)])
def test_answers_that_never_count_get_advice(tmp_path, clock, late_rounds, told):
    quorum = Quorum(min_results=2, grace=1.0, late_rounds=late_rounds)
    serving = {"quorum": quorum, "status": tmp_path / "state"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        # two rounds and a bit of the others' time
        run, _, _ = timed(tmp_path, clock, 3, [10, 10, 27].__getitem__, rounds=9, serving=serving)
    said = [str(each.message) for each in warned if "rounds late" in str(each.message)]
    if told is None:
        assert not said and any(row["clients"] == 3 for row in run.rows)
        return
    assert said == [
        f"answers of client 2 come {told} rounds late and don't count; late-rounds={told} would count them."
    ]
    assert "2" in DeploymentStatus(tmp_path / "state").content["late"]
    assert all(row["clients"] == 2 for row in run.rows)


def test_a_site_was_last_heard_at_its_last_heartbeat(tmp_path):
    grid = grid_of(make, tmp_path)
    made = link.Link(grid, 4, "0" * 16)
    beats = {11: 1000.0, 12: 1050.0}
    grid.get_nodes = lambda: [
        NodeInfo(node_id=node, public_key=b"", online_until=beat + 60, heartbeat_interval=30)
        for node, beat in beats.items()
    ]
    assert made._nodes().keys() == beats.keys() and made.seen == beats


def test_nobody_has_sent_the_signal_by_which_flower_ends_an_app(tmp_path, monkeypatch):
    shown = progress.Progress(link.Link(grid_of(make, tmp_path), 4, "0" * 16), tmp_path / "state")
    for parent, reason in ((os.getppid(), "stopped by SIGINT"), (1, "the SuperLink has ended")):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        with pytest.raises(Stopped), shown.ending():
            raise Stopped(signal.SIGINT)
        told = DeploymentStatus(tmp_path / "state")
        assert told.state == "stopped" and told.content["reason"].startswith(reason)


def test_a_late_answer_counts_in_the_next_round_where_asked_for(tmp_path, clock):
    quorum = partial(Quorum, min_results=2, grace=1.0)
    seconds = [1, 1, 5]
    dropped, _, grid = timed(
        tmp_path / "0", clock, 3, seconds.__getitem__, rounds=4, serving={"quorum": quorum(late_rounds=0)}
    )
    counted, _, _ = timed(
        tmp_path / "1", clock, 3, seconds.__getitem__, rounds=4, serving={"quorum": quorum(late_rounds=2)}
    )
    assert [row["clients"] for row in dropped.rows] == [2, 2, 2, 2]
    assert [row["clients"] for row in counted.rows] == [2, 2, 3, 2]
    # at work on the first round, the client isn't asked anew
    trained = [node for kind, node in grid.asked if kind == "train"]
    assert trained.count(13) < 4 == trained.count(11)
    assert dropped.federation.clients.get(2) is None and counted.federation.clients[2].kept


def test_a_late_answer_is_relative_to_the_payload_of_its_own_round(tmp_path, clock, capsys):
    def spoil(node, kind, content):
        if (node, kind) == (12, "train"):
            rewrite(content, lambda records: next(iter(records["1/update"]["weights"].values())).add_(1000))

    quorum = Quorum(min_results=1, grace=0.0, late_rounds=1)
    run, _, _ = timed(
        tmp_path,
        clock,
        2,
        [1, 1.4].__getitem__,
        partial(make_client, FedAvg),
        serving={"quorum": quorum, "max_norm": 99.0},
        spoil=spoil,
    )
    # refused for the norm of its change, and not for its round
    assert [(row["clients"], row["clients_refused"]) for row in run.rows] == [(1, 0), (1, 1)]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("round 2"))
    assert "refused 1: " in line and "99" in line


def test_a_lost_site_is_waited_for_as_long_as_told(tmp_path, clock):
    _, seconds, _ = timed(
        tmp_path, clock, 3, lambda client: 1, rounds=3, dies={2: 2}, serving={"quorum": Quorum(wait_for_lost=40)}
    )
    assert seconds[0] < 3 and 40 <= seconds[1] <= 42 and seconds[2] < 3


def test_a_round_with_too_few_sites_waits_and_ends_the_run_in_a_sentence(tmp_path, clock):
    with pytest.raises(
        MisconfigurationException, match=r"round 3 needs 2 of data.num_clients=3, and no site has clients"
    ):
        timed(
            tmp_path,
            clock,
            3,
            lambda client: 1,
            rounds=4,
            dies={1: 2, 2: 2},
            min_clients=2,
            serving={"status": tmp_path / "state"},
        )
    told = DeploymentStatus(tmp_path / "state")
    assert (told.state, told.exit_code) == ("failed", 1) and "round 3 needs 2" in told.content["reason"]


def test_a_client_that_joins_counts_in_the_checkpoint_and_the_run_goes_on_without_it(tmp_path, clock):
    settings = {"rounds": 3, "joins": {2: 2}, "serving": {"quorum": Quorum(min_available=2)}}
    timed(tmp_path, clock, 3, lambda client: 1, callbacks=[Pause(2)], **settings)
    last = next((tmp_path / "server").rglob("last.ckpt"))
    sizes = load(last)["federation"]["sizes"]
    assert all(sizes) and len(sizes) == 3
    data = partial(blobs, *[8] * 3)
    settings = {"max_rounds": 3, "evaluate": "after"}
    nodes = {11 + client: {"clients": str(client)} for client in range(3)}
    grid = grid_of(make, tmp_path / "sites", data, nodes=nodes, **settings)
    grid.away.add(13)
    serving = {"quorum": Quorum(min_available=2)}
    run = deploy(grid, make, tmp_path / "server", data, ckpt_path="last", serving=serving, **settings)
    assert [row["absent"] for row in run.rows] == ["2", "", "2"]
    assert load(last)["federation"]["sizes"] == sizes


class Restarts(FederatedCallback):
    """Lets a site come back before the second round, as another node, with other settings."""

    def __init__(self, grid, old, new, config, stays=False):
        self.grid, self.old, self.new, self.config, self.stays = grid, old, new, config, stays

    def on_aggregate_end(self, trainer, federation, logs):
        if federation.round == 0:
            self.grid.nodes = {**self.grid.nodes, self.new: self.config}
            self.grid.keys[self.new] = f"key of {self.new}"
            if not self.stays:
                self.grid.away.add(self.old)


@pytest.mark.parametrize(("same_disk", "stays"), [(True, False), (True, True), (False, False)])
def test_a_restarted_site_without_keys_is_known_by_its_folder(tmp_path, same_disk, stays):
    grid = grid_of(make, tmp_path, max_rounds=3)
    if same_disk:
        (tmp_path / "12").mkdir()
        (tmp_path / "13").symlink_to(tmp_path / "12")
    callback = Restarts(grid, 12, 13, grid.nodes[12], stays)
    if same_disk:
        run = deploy(grid, make, max_rounds=3, callbacks=[callback])
        assert equal(run.weights, fit(make(), max_rounds=3).weights)
    else:
        with pytest.warns(UserWarning, match="node 13 is refused: it says that it has client 1, which another site"):
            run = deploy(grid, make, max_rounds=3, callbacks=[callback])
        assert [row["absent"] for row in run.rows] == ["", "1 3", "1 3"]


def test_a_client_leaves_where_its_site_comes_back_without_it(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=2)
    (tmp_path / "12").mkdir()
    (tmp_path / "13").symlink_to(tmp_path / "12")
    callback = Restarts(grid, 12, 13, grid.nodes[12] | {"clients": "1"})
    run = deploy(grid, make, max_rounds=2, callbacks=[callback])
    assert [row["absent"] for row in run.rows] == ["", "3"]


def test_a_client_that_leaves_in_a_round_has_a_last_node(tmp_path):
    made = link.Link(grid_of(make, tmp_path), 4, "0" * 16)

    def greets(*clients):
        sizes = {client: {"train": 8, "val": 0, "test": 4} for client in clients}
        hello = {
            "version": link.VERSION,
            "initial": "0" * 16,
            "settings": {},
            "secret": "s",
            "clients": sizes,
            "new": {},
        }
        made._heard(11, pack({"hello": hello}))

    greets(0, 2)
    made._sent["message"] = link.Sent(11, [0, 2], "train", 1)
    greets(0)
    assert made.present == [0] and made.node(2) == 11 and made._sent["message"].clients == [0]


def test_a_site_without_state_dir_has_the_same_folder_after_a_restart(tmp_path, monkeypatch):
    from pfl_lightning.flower.apps import state_folder

    monkeypatch.chdir(tmp_path)
    assert state_folder({"clients": "0 3"}, 17) == state_folder({"clients": "0 3"}, 18) == "states-0_3"
    assert state_folder({}, 17) == "states-17"
    assert state_folder({"clients": "0 3", "state-dir": "there"}, 17) == "there"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_results": 0.0}, "min-results=0.0"),
        ({"min_results": 1.5}, "min-results=1.5"),
        ({"min_available": -1}, "min-available=-1"),
        ({"late_rounds": 0.5}, "late-rounds=0.5"),
        ({"grace": -1.0}, "grace=-1.0"),
        ({"wait_for_lost": float("inf")}, "wait-for-lost=inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        Quorum(**settings)


@pytest.mark.parametrize(
    ("quorum", "deployed", "words"),
    [
        (Quorum(min_available=5), {}, "min-available=5 is more than data.num_clients=4"),
        (Quorum(min_available=3), {"aggregator": "FedDyn"}, "min-available=3 .* DynamicAverage"),
        (Quorum(late_rounds=1), {"secure_sum": SecureSum()}, "late-rounds=1 .* trainer.secure_sum"),
        (Quorum(late_rounds=1), {"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)}, "late-rounds=1 .* privacy"),
        (
            Quorum(min_results=1),
            {"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)},
            "min-results=1 .* DPAverage",
        ),
        (Quorum(min_results=0.9), {"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)}, "results=0.9 .* take 1.0"),
    ],
)
def test_a_quorum_that_the_server_side_does_not_allow_is_refused(tmp_path, quorum, deployed, words):
    own = partial(make_client, FedAvg)
    if deployed.get("aggregator") == "FedDyn":
        own, deployed = partial(make_client, FedDyn), {}
    grid = grid_of(own, tmp_path)
    with pytest.raises(MisconfigurationException, match=words):
        deploy(grid, own, serving={"quorum": quorum}, **deployed)
    assert grid.asked == []


@pytest.mark.parametrize("results", [1.0, 4, 9])
def test_a_guarantee_takes_a_quorum_of_all(results):
    """Where nobody's update comes in another's place, whoever answers first."""
    private = DPAverage(noise_multiplier=1.0, clip=1.0)
    check_quorum(Quorum(min_results=results), make_trainer(), make_client(), private, 4)
