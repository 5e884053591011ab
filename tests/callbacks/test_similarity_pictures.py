"""The callback draws whose classifiers are alike, and a run is the same with it."""

import matplotlib.image
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure

from federations import Sizes, Spy, blobs, equal, fit, load, make_client, same_end, untimed
from pfl_lightning import AggregatorList
from pfl_lightning.aggregators import Aggregator
from pfl_lightning.callbacks import similarity_pictures as module
from pfl_lightning.callbacks.similarity_pictures import SimilarityPictures, peer_precision
from pfl_lightning.methods import FedPer, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedrema import FedReMa, is_over
from pfl_lightning.plots.similarity import plot_gaps, plot_peer_counts, plot_peers, plot_similarity
from pfl_lightning.runs.report import PackedRows

LOOKS = {"similarity", "similarity_gap", "similarity_peers"}
COLUMNS = {"similarity/gap", "similarity/peers", "similarity/precision"}

pytestmark = pytest.mark.filterwarnings("error:.*not drawn.*")


class Pairs(Sizes):
    """Clients 2i and 2i + 1 are a group, of mostly one class."""

    def group_of(self, client, num_clients):
        return client // 2


def pairs(**settings):
    partitioner = Pairs(20, 20, 22, 18, 20, 20, by_class=True)
    data = blobs(*partitioner.sizes, **settings)
    data.partitioner = partitioner
    return data


def run(root="unused", callback=None, model=None, data=None, **settings):
    callbacks = settings.pop("callbacks", [])
    settings = {"max_rounds": 4, "local_epochs": 2, **settings}
    callback = callback or SimilarityPictures()
    run = fit(model or make_client(), data or pairs(), root, callbacks=[callback, *callbacks], **settings)
    run.callback = callback
    return run


def pictures(folder):
    """Names of the pictures, each looked at."""
    for path in folder.rglob("*.png"):
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.01, path
    return {path.stem for path in folder.glob("*.png")}


@pytest.fixture
def drawn(monkeypatch):
    """What the callback hands to the pictures, by their names; blank ones are drawn, which is faster."""
    calls = {}
    for name in ("plot_similarity", "plot_gaps", "plot_peers", "plot_peer_counts"):
        calls[name] = []
        monkeypatch.setattr(module, name, lambda *args, to=calls[name]: (to.append(args), Figure((0.1, 0.1)))[1])
    return calls


class Nothing(Aggregator):
    sends = frozenset({"nothing"})


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        (lambda: None, LOOKS),
        (FedReMa, LOOKS | {"peer_counts"}),
        (lambda: AggregatorList([Nothing(), FedReMa()]), LOOKS | {"peer_counts"}),
    ],
    ids=["FedAvg", "FedReMa", "FedReMa beside another"],
)
@pytest.mark.by_default("FedAvg")
def test_any_method_s_classifiers_are_compared(aggregator, expected, tmp_path):
    done = run(tmp_path, aggregator=aggregator())
    assert pictures(done.folder / "pictures") == expected
    assert all(row.keys() >= COLUMNS for row in done.rows)


@pytest.mark.parametrize("method", [FedPer, Local])
@pytest.mark.by_default("Local")
def test_classifiers_that_stay_with_their_clients_are_not_seen(method, tmp_path):
    done = run(tmp_path, model=make_client(method))
    assert not (done.folder / "pictures").exists()
    assert not any(COLUMNS & row.keys() for row in done.rows)


def test_what_an_upload_leaves_out_is_not_seen():
    class Body(FedAvg):
        def upload(self, data):
            update = super().upload(data)
            update["weights"] = {n: t for n, t in update["weights"].items() if "classifier" not in n}
            return update

    class Averages(Aggregator):
        sends = frozenset({"weights"})

        def setup(self, server):
            self.state["weights"] = server.weights

        def download(self, client):
            return {"weights": self.state["weights"]}

    assert not any(COLUMNS & row.keys() for row in run(model=make_client(Body), aggregator=Averages()).rows)


@pytest.mark.parametrize("aggregator", [lambda: None, lambda: FedReMa(delta=0.9)], ids=["FedAvg", "FedReMa"])
@pytest.mark.by_default("FedReMa")
def test_a_run_with_pictures_is_the_run_without(aggregator, drawn, tmp_path):
    settings = {"max_rounds": 4, "local_epochs": 2, "clients_per_round": 0.7}
    plain = fit(make_client(), pairs(), tmp_path, aggregator=aggregator(), **settings)
    looked_at = run(tmp_path, SimilarityPictures(every=1), aggregator=aggregator(), **settings)
    assert len(drawn["plot_similarity"]) == 5
    for row in looked_at.rows:
        for name in COLUMNS:
            del row[name]
    assert same_end(plain, looked_at)
    assert untimed(plain.logger.clients) == untimed(looked_at.logger.clients)


def test_what_it_sees_is_what_fedrema_does():
    done = run(aggregator=FedReMa(delta=0), callback=SimilarityPictures(temperature=9.0))
    for row in done.rows:
        assert (row["similarity/gap"], row["similarity/peers"]) == (row["server/gap"], row["server/peers"])
    assert equal(done.callback.similarities[4], done.federation.aggregator.state["similarity"])


@pytest.mark.exhaustive
def test_it_looks_on_under_fedavg_as_fedrema_would():
    spy = Spy()
    done = run(callback=SimilarityPictures(temperature=0.3, rounds=()), callbacks=[spy])
    judge = module.onlooker(done.federation, 0.3)
    similarity, peers, gaps = judge.compare(spy.updates[3], 3)
    assert list(done.callback.similarities) == [4] and equal(done.callback.similarities[4], similarity)
    assert done.rows[3]["similarity/gap"] == sum(gaps.values()) / 6
    assert done.callback.rows[3]["counts"] == [len(members) for members in peers.values()]
    assert not equal(run().callback.similarities[4], similarity)


def test_precision_tells_how_many_peers_are_of_the_true_group():
    first = run(max_rounds=1).rows[0]
    assert (first["similarity/peers"], first["similarity/precision"]) == (2.0, 1.0)
    assert peer_precision({1: [0, 1, 2, 3], 4: [4, 5]}, [0, 0, 0, 1, 1, 1]) == (3 / 4 + 1) / 2
    known = run(data=blobs(20, 20, 20, 20)).rows[0]
    assert "similarity/gap" in known and "similarity/precision" not in known


def test_clients_that_took_no_part_are_left_out(tmp_path):
    done = run(tmp_path, SimilarityPictures(rounds=(1, 2, 3)), clients_per_round=2)
    for row, matrix in zip(done.rows, done.callback.similarities.values(), strict=True):
        seen = matrix.diagonal().isnan().logical_not()
        assert seen.nonzero().flatten().tolist() == [int(client) for client in row["cohort"].split()]
        assert (matrix.isnan() == ~(seen[:, None] & seen)).all()
        assert row["similarity/peers"] == 2 and "similarity/gap" not in row, "two show no gap"
    assert pictures(done.folder / "pictures") == LOOKS - {"similarity_gap"}


def test_pictures_of_a_resumed_run_are_whole(drawn, tmp_path):
    def go(root, **settings):
        return run(
            root, SimilarityPictures(rounds=(1,)), aggregator=FedReMa(delta=0.9), clients_per_round=0.7, **settings
        )

    whole, half = go(tmp_path / "whole"), go(tmp_path / "half", max_rounds=2)
    kept = load(half.last)["callbacks"]["SimilarityPictures"]
    resumed = go(tmp_path / "half", ckpt_path=half.last)
    assert resumed.callback.rows == whole.callback.rows and len(whole.callback.rows) == 4
    assert list(resumed.callback.similarities) == list(whole.callback.similarities) == [1, 4]
    for one, other in zip(whole.callback.similarities.values(), resumed.callback.similarities.values(), strict=True):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
    assert PackedRows.unpacked(kept["rows"]) == whole.callback.rows[:2]


@pytest.mark.exhaustive
def test_another_run_starts_anew():
    callback = SimilarityPictures()
    assert run(callback=callback).callback.rows == run(callback=callback).callback.rows


def test_pictures_come_every_so_many_rounds_and_at_the_end(drawn, tmp_path):
    folder = run(tmp_path, SimilarityPictures(every=3)).folder / "pictures"
    assert sorted(path.name for path in folder.iterdir()) == ["round_0003", *(f"{name}.png" for name in sorted(LOOKS))]
    assert {path.stem for path in (folder / "round_0003").iterdir()} == LOOKS
    assert [list(similarities) for similarities, *_ in drawn["plot_similarity"]] == [[1, 2, 3], [1, 2, 4]]


@pytest.mark.exhaustive
def test_a_run_s_own_delta_is_the_one_that_is_drawn(drawn, tmp_path):
    runs = [run(tmp_path, SimilarityPictures(delta=0.2), aggregator=own) for own in (FedReMa(delta=0.9), None)]
    assert [delta for _, _, delta in drawn["plot_gaps"]] == [0.9, 0.2]
    for done, (rounds, gaps, _) in zip(runs, drawn["plot_gaps"], strict=True):
        assert rounds == [1, 2, 3, 4] and gaps == [row["similarity/gap"] for row in done.rows]
    ((counts, groups, names),) = drawn["plot_peer_counts"]
    assert names == []
    assert torch.equal(counts, runs[0].federation.aggregator.state["peer_counts"]) and groups == [0, 0, 1, 1, 2, 2]
    assert all(chance == pytest.approx(1 / 3) for _, _, _, chance in drawn["plot_peers"])


def test_the_end_of_the_period_is_fedrema_s():
    done = run(aggregator=FedReMa(delta=0.9))
    last = sum(row["server/in_period"] for row in done.rows)
    gaps = [row["similarity/gap"] for row in done.rows]
    figure = plot_gaps([1, 2, 3, 4], gaps, 0.9)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert 1 < last < 4 and f"end of the period, round {last:.0f}" in labels
    endless = plot_gaps([1, 2], [0.1, 0.2], 0.5)
    assert not is_over([0.1, 0.2], 0.5) and len(endless.legends[0].get_texts()) == 3


def test_heatmaps_are_sorted_by_group():
    matrix = torch.arange(16.0).view(4, 4)
    order = [0, 2, 1, 3]
    for figure in (plot_similarity({1: matrix, 7: matrix}, [0, 1, 0, 1]), plot_peer_counts(matrix, [0, 1, 0, 1])):
        axes = figure.axes[0]
        assert torch.equal(torch.tensor(axes.images[0].get_array().tolist()), matrix[order][:, order])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "1", "3"] and len(axes.lines) == 2
    plain = plot_similarity({1: matrix}).axes[0]
    assert torch.equal(torch.tensor(plain.images[0].get_array().tolist()), matrix) and not plain.lines


@pytest.mark.exhaustive
def test_odd_runs_can_be_drawn(tmp_path):
    alone, absent = torch.ones(1, 1), torch.full((3, 3), torch.nan)
    absent[1, 1] = 1
    figures = [
        plot_similarity({1: alone}, [0]),
        plot_similarity({t: absent for t in range(1, 7)}),
        plot_similarity({1: torch.ones(70, 70)}, [k // 10 for k in range(70)]),
        plot_gaps([3], [0.0], 0.5),
        plot_peers([1, 4], [[1], [2, 2]]),
        plot_peers(range(1, 501), [[2, 3]] * 500, [0.5] * 500, 0.2),
        plot_peer_counts(torch.zeros(1, 1, dtype=torch.int64)),
    ]
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png")
    assert len(pictures(tmp_path)) == len(figures)


@pytest.mark.parametrize("setting", [{"delta": 2}, {"temperature": 0}, {"every": 0}])
def test_values_out_of_range_are_refused_by_name(setting):
    ((name, value),) = setting.items()
    with pytest.raises(MisconfigurationException, match=f"SimilarityPictures.*{name}={value}"):
        SimilarityPictures(**setting)
