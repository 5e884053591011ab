"""New clients join a federation that is over."""

import copy

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import (
    Blobs,
    Pause,
    Sizes,
    Spy,
    blobs,
    equal,
    fit,
    make_client,
    make_trainer,
    near,
    noisy,
    points,
    read_csv,
    same_end,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import CFL, CwFedAvg, FedAMP, FedReMa, KTpFL
from pfl_lightning.data import IID, FederatedDataModule, Loaded, Natural
from pfl_lightning.engines import Sequential
from pfl_lightning.methods import (
    APPLE,
    IFCA,
    WDR,
    CloudProx,
    Ditto,
    FedBABU,
    FedFomo,
    FedPer,
    FedRep,
    FedRoD,
    KnowledgeTransfer,
    PerFedAvg,
)
from pfl_lightning.methods.fedfomo import AffinityPool
from pfl_lightning.methods.fedpac import PACClient
from pfl_lightning.methods.registry import METHODS
from sweeps import swept
from tasks_and_data import OfKind, client_of, kinds

PARTS = (24, 16, 30, 20, 15, 15)
SETTINGS = {
    "FedClassAvg": {"contrastive": False},
    # a few small steps change no bit of a drawn mask
    "FedPM": {"predict": "mean"},
}


class Hidden(Blobs):
    """The same clients, and nobody knows who was held out."""

    @property
    def newcomers(self):
        return super().newcomers if self._pool is None else range(0)


class Keeping(Sequential):
    """Keeps what its clients' training gave, of all such engines."""

    outcomes: list = []

    def train(self, job, layout):
        outcome = super().train(job, layout)
        if job.client > 3:
            self.outcomes.append((job, outcome))
        return outcome


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(Keeping, "outcomes", [])
    return Keeping.outcomes


def crowd(new_clients=2, data=Blobs, **settings):
    parts = {"num_clients": 4, "partitioner": Sizes(*PARTS), "batch_size": 5, "val_fraction": 0.2}
    return data(new_clients=new_clients, **{**parts, **settings})


def memory(run):
    return copy.deepcopy(run.federation.federation_state())


@pytest.mark.parametrize("method", swept(METHODS))
def test_clients_of_every_method_join_and_leave_it_as_it_was(method):
    spy = Spy()
    client = make_client(method.client, **SETTINGS.get(method.name, {}))
    run = fit(client, crowd(), aggregator=method.new_aggregator(), callbacks=[spy], max_rounds=2)
    state, tested = memory(run), run.test()
    metrics = run.trainer.join(run.model, run.data, rounds=2)
    for name in ("new_received", "new", "new_val_received", "new_val"):
        assert 0 <= metrics[f"{name}/acc"] <= 1 and metrics[f"{name}/loss"] > 0
    assert metrics["new/loss"] != metrics["new_received/loss"]
    assert equal(state, memory(run))
    assert tested == run.test()
    trained = [0] if method.client.pools else [0, 1, 2, 3]
    assert {client for updates in spy.updates for client in updates} == set(trained)
    assert spy.cohorts == [trained] * 2


def test_that_some_join_changes_no_bit_of_the_others():
    with_them, without = (fit(make_client(net=noisy), crowd(data=data)) for data in (Blobs, Hidden))
    assert same_end(with_them, without)
    assert with_them.logger.summary["final"] == without.logger.summary["final"]
    assert "new" in with_them.logger.summary and "new" not in without.logger.summary


@pytest.mark.parametrize("method", [Ditto, FedRoD])
def test_a_personal_model_is_what_joined_clients_are_tested_by(method, kept):
    run = fit(make_client(method), crowd(), engine=Keeping)
    kept.clear()
    run.trainer.join(run.model, run.data, epochs=5)
    module = run.federation.client
    assert len(kept) == 2
    for job, outcome in kept:
        assert outcome.state.personal["has_personal"]
        module.receive(outcome.state.personal, {"weights": outcome.update["weights"]}, job.data)
        part = job.data.test
        with torch.no_grad():
            by_personal, by_net = (float(module.task.loss(model(part.x), part.y)) for model in (module, module.net))
        assert outcome.after["test"]["loss"] == pytest.approx(by_personal, rel=1e-5) != pytest.approx(by_net, rel=1e-3)


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBABU])
def test_where_the_paper_says_so_the_classifier_learns_alone(method, kept):
    run = fit(make_client(method), crowd(), engine=Keeping)
    kept.clear()
    run.trainer.join(run.model, run.data)
    assert len(kept) == 2
    for job, outcome in kept:
        assert equal(outcome.update["weights"], job.payload["weights"])
        assert not equal(outcome.state.personal, run.federation.initial[0])


def test_an_adapted_model_is_what_per_fedavg_gives():
    run = fit(make_client(PerFedAvg, alpha=0.1), crowd())
    metrics = run.trainer.join(run.model, run.data)
    run.federation.evaluations.evaluate(run.data.newcomers, ("test",))
    received, adapted = (run.federation.evaluations.summary()[f"{name}/acc"] for name in ("test_received", "test"))
    assert metrics["new_received/acc"] == received
    # the step is on another batch
    assert metrics["new/acc"] == pytest.approx(adapted, abs=0.3) and metrics["new/loss"] < metrics["new_received/loss"]


def test_what_stays_with_a_client_stays_between_its_rounds(kept):
    run = fit(make_client(FedPer), crowd(), engine=Keeping)
    kept.clear()
    run.trainer.join(run.model, run.data, rounds=3)
    works = [(job, outcome) for job, outcome in kept if job.client == 4]
    assert [job.round for job, _ in works] == [3, 4, 5]
    assert equal(works[0][1].state.personal, works[1][0].state.personal)


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.by_default("processes")
def test_engines_agree(engine):
    metrics = []
    for name in ("sequential", engine):
        run = fit(make_client(FedRep), crowd(), engine=name)
        metrics.append(run.trainer.join(run.model, run.data, epochs=2, rounds=2))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def test_a_resumed_run_and_a_checkpoint_have_the_same_new_clients(tmp_path):
    whole = fit(make_client(FedPer), crowd(), root=tmp_path)
    expected = whole.trainer.join(whole.model, whole.data)
    again = make_trainer(tmp_path).join(make_client(FedPer, seed=8), crowd(), ckpt_path=whole.last)
    fit(make_client(FedPer), crowd(), root=tmp_path, callbacks=[Pause(2)])
    resumed = fit(make_client(FedPer), crowd(), root=tmp_path, ckpt_path="last")
    assert again == expected == resumed.trainer.join(resumed.model, resumed.data)
    assert resumed.logger.summary["new"] == whole.logger.summary["new"]
    with pytest.raises(MisconfigurationException, match="numbers of samples"):
        make_trainer(tmp_path).join(make_client(FedPer), crowd(seed=2), ckpt_path=whole.last)


def test_who_has_taken_part_is_not_new(tmp_path):
    alike = {"num_clients": 4, "partitioner": IID(), "max_samples": 90}
    run = fit(make_client(), crowd(0, max_samples=60, partitioner=IID()), root=tmp_path)
    with pytest.raises(
        MisconfigurationException, match=r"the checkpoint's run had data\.new_clients=0 and this one has 2"
    ):
        make_trainer(tmp_path).join(make_client(), crowd(2, **alike), ckpt_path=run.last)


def test_records_tell_of_them(tmp_path):
    run = fit(make_client(), crowd(), root=tmp_path)
    rows = read_csv(run.folder / "clients.csv")
    assert [row["new"] for row in rows] == list("000011")
    assert [bool(row["test/acc"]) for row in rows] == [True] * 4 + [False] * 2
    new = run.logger.summary["new"]
    sizes = [run.data.size(client, "test") for client in (4, 5)]
    for name, column in (("received/acc", "new_received/acc"), ("joined/acc", "new/acc")):
        values = [float(row[column]) for row in rows[4:]]
        assert new[name] == pytest.approx(sum(map(float.__mul__, values, map(float, sizes))) / sum(sizes))
    assert new["gap"] == pytest.approx(run.logger.summary["final"]["test/acc"] - new["joined/acc"])


@pytest.mark.parametrize("name", ["Regression", "MultiLabel", "Segmentation", "NextToken"])
def test_they_join_whatever_is_predicted(name):
    kind = kinds()[name]
    run = fit(client_of(kind, Ditto), OfKind(kind, num_clients=3, new_clients=1), max_rounds=1)
    new, metric = run.logger.summary["new"], kind.task.monitor
    (row,) = (row for row in run.logger.clients if row["new"])
    assert row["new/loss"] != row["new_received/loss"]
    sign = 1 if kind.task.mode == "max" else -1
    gap = run.logger.summary["final"][f"test/{metric}"] - new[f"joined/{metric}"]
    assert new["gap"] == pytest.approx(sign * gap)


class Strict(WeightedAverage):
    """Knows its clients."""

    def setup(self, server):
        super().setup(server)
        self.state["names"] = {client: client for client in range(server.num_clients)}

    def download(self, client):
        return super().download(self.state["names"][client])


class Polite(Strict):
    def welcome(self, client, update):
        return self.download(0)


def test_a_server_that_knows_its_clients_alone_is_refused_before_the_first_round():
    spy = Spy()
    with pytest.raises(MisconfigurationException, match=r"data\.new_clients=2: aggregator Strict has no payload"):
        fit(make_client(), crowd(), aggregator=Strict(), callbacks=[spy])
    assert not spy.cohorts
    assert fit(make_client(), crowd(0), aggregator=Strict()).rows
    assert fit(make_client(), crowd(), aggregator=Polite()).logger.summary["new"]


def test_a_welcome_without_what_clients_share_is_refused():
    class Rude(WeightedAverage):
        def welcome(self, client, update):
            return {"weights": {}}

    with pytest.raises(MisconfigurationException, match="gave weights without"):
        fit(make_client(), crowd(), aggregator=Rude())


@pytest.mark.parametrize(
    ("new", "settings", "sentence"),
    [
        (0, {}, r"data\.new_clients=0 leaves nobody to join"),
        (2, {"epochs": 0}, "epochs=0 must be at least 1"),
        (2, {"rounds": 0}, "rounds=0 must be at least 1"),
    ],
)
def test_what_can_not_join_is_refused(new, settings, sentence):
    run = fit(make_client(), crowd(new))
    with pytest.raises(MisconfigurationException, match=sentence):
        run.trainer.join(run.model, run.data, **settings)
    # and afterwards tests are tests
    assert run.trainer.test(run.model, datamodule=run.data, verbose=False)[0]["test/acc"] >= 0


# What servers have for a stranger


def server_of(client, aggregator=None, **settings):
    run = fit(client, crowd(), aggregator=aggregator, **settings)
    return run, run.federation.aggregator


def moved(weights, by):
    return {"weights": {name: tensor + by for name, tensor in weights.items()}}


def test_cfl_gives_the_cluster_towards_which_a_newcomer_goes():
    _, server = server_of(make_client(), CFL())
    start = server.state["models"][0]
    assert equal(server.welcome(4, None)["weights"], start)
    low, high = (moved(start, by)["weights"] for by in (-1.0, 1.0))
    server.state |= {"clusters": [[0, 1], [2, 3]], "models": [low, high]}
    middle = server.welcome(4, None)["weights"]
    assert all(torch.allclose(middle[name], start[name], atol=1e-6) for name in start)
    assert equal(server.welcome(4, moved(start, 0.1))["weights"], high)
    assert equal(server.welcome(4, moved(start, -0.1))["weights"], low)


def test_cwfedavg_mixes_by_the_newcomers_own_classes():
    _, server = server_of(make_client(WDR), CwFedAvg(distribution="counts"))
    counts = {"class_counts": torch.tensor([0, 5, 0])}
    (rows,) = (server.class_models()[server.rows],)
    assert torch.allclose(server.welcome(4, counts)["weights"][server.rows], rows[1])
    mean = server.welcome(4, None)["weights"][server.rows]
    assert torch.allclose(mean, rows.mean(0), atol=1e-6)


def test_fedamp_mixes_by_distance():
    _, server = server_of(make_client(CloudProx), FedAMP(alpha=1.0, sigma=1.0))
    assert equal(server.welcome(4, None)["weights"], server.state["initial"])
    far = moved(server.state["initial"], 100.0)
    assert equal(server.welcome(4, far), far)
    twin = {"weights": server.state["models"][2]}
    own = copy.deepcopy(server)
    own.aggregate({4: twin}, 3)
    assert near(server.welcome(4, twin), own.download(4))


def test_apple_sends_all_cores_and_a_share_for_the_newcomer():
    run, server = server_of(make_client(APPLE))
    payload = server.welcome(5, None)
    sizes = [run.data.size(client, "train") for client in (0, 1, 2, 3, 5)]
    assert list(payload["models"]) == [0, 1, 2, 3]
    assert payload["shares"].tolist() == pytest.approx([size / sum(sizes) for size in sizes])


def test_fedfomo_chooses_by_the_newcomers_gains():
    _, server = server_of(make_client(FedFomo), AffinityPool(num_models=1))
    assert len(server.welcome(4, None)["models"]) == 1
    gains = {client: torch.tensor(float(client == 2)) for client in range(4)}
    assert list(server.welcome(4, {"affinity": gains})["models"]) == [2]


def test_kt_pfl_teaches_the_mean_of_all_answers():
    _, server = server_of(make_client(KnowledgeTransfer), KTpFL())
    assert list(server.welcome(4, None)) == ["public"]
    answer = torch.ones_like(server.state["predictions"][0])
    answers = torch.stack([*server.state["predictions"].values(), answer])
    assert equal(server.welcome(4, {"predictions": answer})["targets"], answers.mean(0))


def test_who_has_a_classifier_keeps_it_under_fedrema_and_takes_the_mean_under_fedpac():
    _, server = server_of(make_client(), FedReMa())
    start = server.state["weights"]
    assert equal(server.welcome(4, None)["weights"], start)
    sent = moved(start, 1.0)
    received = server.welcome(4, sent)["weights"]
    assert {name for name in start if equal(received[name], sent["weights"][name])} == set(server.relevance.names)
    client = make_client(PACClient)
    _, server = server_of(client, client.configure_aggregator())
    assert equal(server.welcome(4, None)["weights"], server.global_model())


def test_a_newcomer_chooses_among_the_models_of_ifca(kept):
    run = fit(make_client(IFCA), crowd(), engine=Keeping)
    models = run.federation.aggregator.state["models"]
    for job, outcome in kept:
        assert equal(job.payload["cluster_models"], models) and 0 <= int(outcome.update["cluster"]) < len(models)


# Clients with names


WARDS = ("a", "b", "c", "d", "e", "f")


class Wards(FederatedDataModule):
    """Wards with names, of which each has points of its own."""

    num_classes, input_shape = 3, (6,)

    def __init__(self, names="abcdef", shift=0, **settings):
        settings = {"num_clients": None, "partitioner": Natural(), "batch_size": 5, "val_fraction": 0.2, **settings}
        super().__init__(**settings)
        self.wards, self.shift = names, shift

    def load(self):
        sizes = [20 + 2 * WARDS.index(name) + self.shift for name in self.wards]
        seeds = [WARDS.index(name) + 10 * self.shift for name in self.wards]
        parts = [points(size, seed) for size, seed in zip(sizes, seeds, strict=True)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        return Loaded(x, y, client=np.repeat(list(self.wards), sizes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit(make_client(FedPer), Wards("bdf"), tmp_path_factory.mktemp("named"))


def evaluated_by(trainer):
    return trainer.lightning_module.evaluations.results["test"]


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
@pytest.mark.parametrize(
    ("names", "settings"),
    [("bdf", {}), ("db", {}), ("f", {}), ("abcdef", {"new_clients": 3, "seed": 3}), ("fbd", {"shift": 4})],
    ids=["same", "two", "one", "drawn", "other-rows"],
)
def test_clients_are_tested_with_what_is_theirs_by_name(names, settings, engine, trained, tmp_path):
    drawn = settings.get("new_clients")
    if drawn:
        # a draw that makes those new that haven't trained
        seeds = (seed for seed in range(500) if known(Wards(names, **{**settings, "seed": seed})) == ["b", "d", "f"])
        settings = {**settings, "seed": next(seeds)}
    data, trainer = Wards(names, **settings), make_trainer(tmp_path, engine=engine)
    trainer.test(make_client(FedPer), datamodule=data, ckpt_path=trained.last, verbose=False)
    results = evaluated_by(trainer)
    assert {data.client_names[client] for client in results} == set(names) & set("bdf")
    for client, values in results.items():
        name = data.client_names[client]
        state = trained.federation.clients["bdf".index(name)]
        trained.model.receive(state.personal, trained.federation.aggregator.download(client), None)
        part = data.part(client, "test")
        with torch.no_grad():
            loss = float(trained.model.task.loss(trained.model.eval().net(part.x), part.y))
        assert values["loss"] == pytest.approx(loss, rel=1e-4)


def known(data):
    data.setup()
    return data.client_names[: data.num_clients]


@pytest.mark.parametrize(
    "settings", [{}, {"new_clients": 3}, {"new_clients": 2, "seed": 5}], ids=["all", "drawn", "few"]
)
def test_a_client_that_has_trained_is_never_new(settings, trained, kept, tmp_path, caplog):
    data = Wards(**settings)
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, engine=Keeping).join(make_client(FedPer), datamodule=data, ckpt_path=trained.last)
    assert [data.client_names[client] for client in data.newcomers] == ["a", "c", "e"]
    assert any("new clients" in message and "a, c, e" in message for message in caplog.messages)
    # ids up to 3 are those of the clients that have trained, and Keeping leaves these out
    assert {job.client for job, _ in kept} == {4, 5} and data.num_clients == 3


def test_where_everybody_has_trained_nobody_joins(trained, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"leaves nobody to join"):
        make_trainer(tmp_path).join(make_client(FedPer), datamodule=Wards("bd"), ckpt_path=trained.last)


def test_the_trainer_that_has_trained_pairs_by_name_too():
    run = fit(make_client(FedPer), Wards("bdf"))
    before = copy.deepcopy(run.federation.clients)
    with pytest.warns(UserWarning, match="client_split"):
        run.trainer.test(run.model, datamodule=Wards("fd"), verbose=False)
    assert set(evaluated_by(run.trainer)) == {1, 2} and equal(vars(run.federation.clients[2]), vars(before[2]))
    run.trainer.join(run.model, datamodule=Wards())
    assert list(run.trainer.datamodule.newcomers) == [3, 4, 5]


@pytest.mark.parametrize("act", ["test", "validate"])
def test_a_client_that_has_not_trained_has_nothing_to_be_evaluated_with(act, trained, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"doesn't know the clients a, c.*trainer\.join"):
        getattr(make_trainer(tmp_path), act)(make_client(FedPer), datamodule=Wards("abc"), ckpt_path=trained.last)


def test_a_run_goes_on_with_its_own_clients_alone(trained, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"client 0 is 'b' and 'a'"):
        fit(make_client(FedPer), Equal("adf"), tmp_path, ckpt_path=fit_equal(tmp_path).last)
    fit(make_client(FedPer), Equal("bdf"), tmp_path, ckpt_path=fit_equal(tmp_path).last, max_rounds=4)


class Equal(Wards):
    """Wards of one size."""

    def load(self):
        x, y = points(20 * len(self.wards), 0)
        return Loaded(x, y, client=np.repeat(list(self.wards), 20))


def fit_equal(root):
    return fit(make_client(FedPer), Equal("bdf"), root)


def test_clients_without_names_are_those_of_the_checkpoint_or_refused(tmp_path):
    run = fit(make_client(FedPer), crowd(0, partitioner=IID()), tmp_path)
    other = crowd(0, partitioner=IID(), seed=7)
    with pytest.raises(MisconfigurationException, match=r"other samples .* no names"):
        run.trainer.test(run.model, datamodule=other)
    with pytest.raises(MisconfigurationException, match=r"other samples .* no names"):
        make_trainer(tmp_path).test(make_client(FedPer), datamodule=other, ckpt_path=run.last)
    run.trainer.test(run.model, datamodule=crowd(0, partitioner=IID()), verbose=False)
    with pytest.raises(MisconfigurationException, match=r"have no names and the data's clients have some"):
        run.trainer.test(run.model, datamodule=Wards("abcd"))


def test_metrics_that_were_kept_are_not_told_of_other_samples(tmp_path):
    run = fit(make_client(FedPer), Wards("bdf"), evaluate="after")
    with pytest.raises(MisconfigurationException, match=r"trainer\.evaluate=after .* other samples"):
        run.trainer.test(run.model, datamodule=Wards("bdf", shift=4))


def test_new_clients_without_test_samples_have_a_warning_and_no_table_of_nothing(capsys):
    run = fit(make_client(), blobs(new_clients=1, test_fraction=0.0))
    with pytest.warns(UserWarning, match=r"data\.test_fraction=0\.0 leaves new clients 4 without test samples"):
        assert not any(name.startswith("new/") for name in run.trainer.join())
    assert "nan" not in capsys.readouterr().out
