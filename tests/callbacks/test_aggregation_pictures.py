"""The callback keeps and draws what an averaging server weighs its clients by, and a run is the same with it."""

import matplotlib.image
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure

from federations import blobs, equal, fit, load, make_client, noisy, read_csv, same_end
from pfl_lightning import Aggregator, WeightedAverage, messages
from pfl_lightning.aggregators import AggregatorList
from pfl_lightning.callbacks import AggregationPictures
from pfl_lightning.callbacks import aggregation_pictures as module
from pfl_lightning.messages import detached, tree_map
from pfl_lightning.methods import APPLE, FedAvg, FedPer, Local
from pfl_lightning.server.means import CoordinateMedian

ALL = {"weights", "weights_heatmap", "weights_vs_norms", "objective", "distances"}

pytestmark = pytest.mark.filterwarnings("error:AggregationPictures.*")


def pictures(folder):
    """Names of the pictures, each looked at."""
    for path in folder.rglob("*.png"):
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.01, path
    return {path.stem for path in folder.glob("*.png")}


def comparable(record):
    """The record with a number in place of NaN, which doesn't equal itself."""
    return tree_map(lambda tensor: tensor.nan_to_num(nan=-1), record)


class Tilted(WeightedAverage):
    """Weights by the client's id, and logs to draw."""

    def aggregate(self, updates, round):
        total = sum(client + 1 for client in updates)
        self.average(updates, {client: (client + 1) / total for client in updates})
        return {"loss": 1 / (round + 1)}


class Nothing(Aggregator):
    """A server side that sends and keeps nothing."""


class Watch(Callback):
    """Keeps each round's old global model and uploads."""

    def __init__(self):
        self.rounds = []

    def on_aggregate_start(self, trainer, federation, updates):
        self.rounds.append(detached((federation.aggregator.global_model(), updates)))


def vectors(run, before, updates):
    """Client vectors by id: all trained parameters, one after the other."""
    names = [name for name, _ in run.model.named_parameters() if name in before]
    return {
        client: torch.cat([(update["weights"][name].double() - before[name].double()).flatten() for name in names])
        for client, update in updates.items()
    }


@pytest.fixture
def shown(monkeypatch):
    """What the callback hands to the pictures, by the name of the function; nothing is drawn, which takes time."""
    calls = {}
    for name in [name for name in vars(module) if name.startswith("plot_")]:
        calls[name] = []
        monkeypatch.setattr(module, name, lambda *args, kept=calls[name]: (kept.append(args), Figure((1, 1)))[1])
    return calls


@pytest.mark.parametrize("method", [make_client, lambda **net: make_client(FedPer, **net)], ids=["FedAvg", "FedPer"])
@pytest.mark.parametrize("aggregator", [WeightedAverage, Tilted])
def test_the_table_has_each_rounds_weights_shares_and_norms(method, aggregator, shown, tmp_path):
    watch = Watch()
    callbacks = [watch, AggregationPictures()]
    run = fit(method(net=noisy), root=tmp_path, aggregator=aggregator(), clients_per_round=0.5, callbacks=callbacks)
    rows = read_csv(run.folder / "aggregation.csv")
    assert list(rows[0]) == ["round", "client", "share", "sample_share", "norm"]
    expected = []
    for number, (before, updates) in enumerate(watch.rounds, start=1):
        sizes = {client: run.data.size(client, "train") for client in updates}
        ids = {client: client + 1 for client in updates}
        weights = sizes if aggregator is WeightedAverage else ids
        for client, vector in vectors(run, before, updates).items():
            share, sample_share = weights[client] / sum(weights.values()), sizes[client] / sum(sizes.values())
            expected.append([number, client, share, sample_share, float(torch.linalg.vector_norm(vector))])
    assert len(expected) == 6 and len({row[1] for row in expected}) > 2
    np.testing.assert_allclose([[float(value) for value in row.values()] for row in rows], expected, rtol=1e-12)
    assert [(row["round"], row["client"]) for row in rows] == [(str(row[0]), str(row[1])) for row in expected]
    assert {path.stem for path in run.folder.glob("pictures/*")} == ALL


def test_a_client_that_got_no_weight_has_none_in_the_table(shown, tmp_path):
    class Picky(WeightedAverage):
        def aggregate(self, updates, round):
            self.average({client: updates[client] for client in (0, 2)}, {0: 0.5, 2: 0.5})
            return {}

    run = fit(make_client(), root=tmp_path, aggregator=Picky(), max_rounds=1, callbacks=[AggregationPictures()])
    assert [float(row["share"]) for row in read_csv(run.folder / "aggregation.csv")] == [0.5, 0.0, 0.5, 0.0]


def test_pictures_show_the_history_and_the_last_round(shown, tmp_path):
    watch = Watch()
    callbacks = [watch, AggregationPictures()]
    run = fit(
        make_client(),
        blobs(by_class=True),
        tmp_path,
        aggregator=Tilted(),
        clients_per_round=3,
        callbacks=callbacks,
    )
    rounds, weights, samples, names = shown["plot_weights"][0]
    assert rounds == [1, 2, 3] and weights.shape == samples.shape == (3, 4)
    assert shown["plot_weight_heatmaps"][0] == (rounds, weights, samples, names) and names == []
    for row, part, (_, updates) in zip(weights, samples, watch.rounds, strict=True):
        assert (~row.isnan()).nonzero().flatten().tolist() == (~part.isnan()).nonzero().flatten().tolist()
        assert [client for client in range(4) if not row[client].isnan()] == list(updates)
    torch.testing.assert_close(weights.nansum(1), torch.ones(3, dtype=torch.float64))

    before, updates = watch.rounds[-1]
    last, tau = list(updates), torch.stack(list(vectors(run, before, updates).values()))
    lambdas, shares, norms, clients, title, _ = shown["plot_weights_against"][0]
    assert clients == last and "3" in title
    torch.testing.assert_close(norms, torch.linalg.vector_norm(tau, dim=1))
    assert torch.equal(lambdas, weights[-1, last]) and torch.equal(shares, samples[-1, last])

    labels, panels, _ = shown["plot_distances"][0]
    pairs = [(0, 1), (0, 2), (1, 2)]
    p = run.data.counts[last].double()
    p = p / p.sum(1, keepdim=True)
    torch.testing.assert_close(labels, torch.stack([(p[j] - p[k]).abs().sum() / 2 for j, k in pairs]))
    cosine, euclidean = panels.values()
    expected = torch.stack([1 - torch.cosine_similarity(tau[j], tau[k], dim=0) for j, k in pairs])
    torch.testing.assert_close(cosine, expected)
    torch.testing.assert_close(euclidean, torch.stack([torch.dist(tau[j], tau[k]) for j, k in pairs]))

    (rows,) = shown["plot_server_terms"][0]
    assert [(row["round"], row["server/loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all(row["time/aggregate"] > 0 for row in rows)


def test_pictures_come_every_so_many_rounds_with_the_round_at_hand(shown, monkeypatch, tmp_path):
    written, write = [], module.write_rows
    monkeypatch.setattr(module, "write_rows", lambda path, rows: (written.append(len(rows)), write(path, rows)))
    callbacks = [AggregationPictures(every=2)]
    run = fit(make_client(), root=tmp_path, aggregator=Tilted(), max_rounds=5, callbacks=callbacks)
    folder = run.folder / "pictures"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["round_0002", "round_0004"]
    for place in (folder, folder / "round_0002", folder / "round_0004"):
        assert {path.stem for path in place.glob("*.png")} == ALL
    rounds = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert [[row["round"] for row in rows] for (rows,) in shown["plot_server_terms"]] == rounds
    assert [args[0] for args in shown["plot_weights"]] == rounds
    assert written == [8, 16, 20]


def test_a_run_with_pictures_has_them_and_is_the_run_without(tmp_path):
    def go(*callbacks):
        settings = {"root": tmp_path, "clients_per_round": 0.75, "callbacks": list(callbacks)}
        return fit(make_client(net=noisy), aggregator=Tilted(), **settings)

    plain, drawn = go(), go(AggregationPictures())
    assert same_end(plain, drawn)
    assert pictures(drawn.folder / "pictures") == ALL and not (plain.folder / "pictures").exists()


def test_vectors_longer_than_a_block_are_whole(monkeypatch):
    g = torch.Generator().manual_seed(0)
    theta_g = {"w": torch.randn(7, 3, generator=g), "b": torch.randn(5, generator=g), "alone": torch.ones(2)}
    updates = {
        client: {"weights": {name: torch.randn(tensor.shape, generator=g) for name, tensor in theta_g.items()}}
        for client in (2, 5, 9)
    }
    del updates[5]["weights"]["alone"]
    tau = torch.stack(
        [
            torch.cat([(update["weights"][name].double() - theta_g[name].double()).flatten() for name in ("w", "b")])
            for update in updates.values()
        ]
    )
    monkeypatch.setattr(messages, "COLUMNS", 4)
    torch.testing.assert_close(module.gram_matrix(updates, theta_g), tau @ tau.T)


def test_vectors_that_nearly_agree_are_told_apart():
    theta_g = {"w": torch.zeros(1000)}
    near = torch.ones(1000)
    near[0] += 1e-5
    gram = module.gram_matrix({0: {"weights": {"w": torch.ones(1000)}}, 1: {"weights": {"w": near}}}, theta_g)
    _, distance = module.vector_distances(gram).values()
    assert float(distance) == pytest.approx(float(near[0]) - 1, rel=1e-3)


def test_a_zero_vector_has_a_distance_and_no_angle():
    cosine, distance = module.vector_distances(torch.tensor([[0.0, 0.0], [0.0, 4.0]])).values()
    assert cosine.isnan().all() and distance.tolist() == [2.0]


def test_a_resumed_runs_table_and_pictures_are_those_of_a_whole_one(shown, tmp_path):
    def go(folder, rounds, ckpt_path=None):
        settings = {"clients_per_round": 0.5, "callbacks": [AggregationPictures()], "max_rounds": rounds}
        client = make_client(net=noisy)
        return fit(client, root=tmp_path / folder, aggregator=Tilted(), ckpt_path=ckpt_path, **settings)

    def history():
        return [calls[-1] for name, calls in shown.items() if name != "plot_server_terms"]

    whole, drawn = go("whole", 5), history()
    half = go("halves", 2)
    assert len(read_csv(half.folder / "aggregation.csv")) == 4
    resumed = go("halves", 5, "last")
    assert resumed.folder == half.folder and len(resumed.rows) == 5
    tables = [(run.folder / "aggregation.csv").read_bytes() for run in (whole, resumed)]
    assert tables[0] == tables[1] and tables[0].count(b"\n") == 11
    assert len(drawn) == 4 and equal(comparable(drawn), comparable(history()))
    state = next(value for name, value in load(resumed.last)["callbacks"].items() if "AggregationPictures" in name)
    assert state["table"].shape == (10, 5) and state["gram"].shape == (2, 2)


def test_a_run_that_is_resumed_at_its_end_is_drawn_again(shown, tmp_path):
    def go(**settings):
        return fit(make_client(), root=tmp_path, callbacks=[AggregationPictures()], **settings)

    run = go()
    table = (run.folder / "aggregation.csv").read_bytes()
    for path in run.folder.glob("pictures/*.png"):
        path.unlink()
    assert go(ckpt_path="last").folder == run.folder
    assert {path.stem for path in run.folder.glob("pictures/*")} == ALL
    assert (run.folder / "aggregation.csv").read_bytes() == table
    assert equal(*shown["plot_distances"])


def test_the_callback_of_an_earlier_run_starts_anew(shown, tmp_path):
    callback = AggregationPictures()
    for folder in ("a", "b"):
        run = fit(make_client(), root=tmp_path / folder, max_rounds=2, callbacks=[callback])
        assert [row["round"] for row in read_csv(run.folder / "aggregation.csv")] == list("11112222")


def test_one_client_a_round_has_no_pairs(tmp_path):
    settings = {"clients_per_round": 1, "max_rounds": 2, "callbacks": [AggregationPictures()]}
    run = fit(make_client(), root=tmp_path, **settings)
    assert pictures(run.folder / "pictures") == ALL - {"distances"}
    assert {row["share"] for row in read_csv(run.folder / "aggregation.csv")} == {"1.0"}


@pytest.mark.exhaustive
def test_the_weights_of_one_server_side_of_several_are_found(shown, tmp_path):
    def table(aggregator):
        run = fit(make_client(), root=tmp_path, aggregator=aggregator, callbacks=[AggregationPictures()])
        return (run.folder / "aggregation.csv").read_bytes()

    alone = table(Tilted())
    assert table(AggregatorList([Nothing(), Tilted()])) == alone != table(WeightedAverage())
    assert table(AggregatorList([AggregatorList([Nothing(), Tilted()]), Nothing()])) == alone


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "aggregator", "name"),
    [
        (Local, None, "Aggregator"),
        (Local, AggregatorList([Nothing(), Nothing()]), "AggregatorList"),
        (APPLE, None, "CorePool"),
        (FedAvg, WeightedAverage(mean=CoordinateMedian()), "WeightedAverage"),
    ],
    ids=["Local", "AggregatorList", "APPLE", "median"],
)
def test_a_server_without_weights_gets_a_warning_and_no_pictures(method, aggregator, name, tmp_path):
    callbacks = [AggregationPictures(every=1)]
    with pytest.warns(UserWarning, match=f"{name} keeps no weights") as caught:
        run = fit(make_client(method), root=tmp_path, aggregator=aggregator, callbacks=callbacks)
    assert sum("AggregationPictures" in str(warning.message) for warning in caught) == 1
    assert len(run.rows) == 3
    assert not (run.folder / "pictures").exists() and not (run.folder / "aggregation.csv").exists()


def test_without_a_logger_nothing_is_measured_or_drawn(monkeypatch):
    monkeypatch.setattr(module, "gram_matrix", pytest.fail)
    callback = AggregationPictures(every=1)
    fit(make_client(), callbacks=[callback])
    assert len(callback.state_dict()["table"]) == 0


@pytest.mark.filterwarnings("default")
@pytest.mark.exhaustive
def test_a_picture_that_fails_is_a_warning(monkeypatch, tmp_path):
    def broken(*args):
        raise ValueError("no ink")

    for name in ("plot_weights", "plot_server_terms", "plot_distances"):
        monkeypatch.setattr(module, name, broken)
    with pytest.warns(UserWarning, match=r"AggregationPictures: \w+ was not drawn: no ink") as caught:
        run = fit(make_client(), root=tmp_path, callbacks=[AggregationPictures()])
    assert sum("no ink" in str(warning.message) for warning in caught) == 3
    assert len(run.rows) == 3 and len(read_csv(run.folder / "aggregation.csv")) == 12
    assert pictures(run.folder / "pictures") == {"weights_heatmap", "weights_vs_norms"}


@pytest.mark.parametrize("every", [0, -1])
def test_rounds_between_pictures_are_at_least_one(every):
    with pytest.raises(MisconfigurationException, match=r"AggregationPictures\.every="):
        AggregationPictures(every=every)
