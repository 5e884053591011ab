"""The callback shows the features of the models that clients use, and a run is the same with it."""

import copy
from functools import partial

import matplotlib.image
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure
from torch import nn
from torch.func import functional_call

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    Blobs,
    blobs,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    read_csv,
    same_end,
)
from pfl_lightning.callbacks import feature_pictures as module
from pfl_lightning.callbacks.feature_pictures import FeaturePictures, Seen, common_samples, embed, layer_conductance
from pfl_lightning.client import Phase
from pfl_lightning.data import Samples
from pfl_lightning.methods import Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net

ALL = {"tsne", "conductance"}

pytestmark = pytest.mark.filterwarnings("error:FeaturePictures.*")


def narrow(input_shape, num_classes):
    """Features of another width."""
    return Net(nn.Linear(input_shape[0], HIDDEN - 2), nn.Linear(HIDDEN - 2, num_classes))


class Adapted(FedAvg):
    """Trains the classifier before it is used."""

    def evaluation_phases(self):
        return [Phase("adapt", lambda name: "classifier" in name, steps=5)]


class Twofold(FedAvg):
    """Answers by a net of its own, a mix of which with the shared one gives the features."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.own = copy.deepcopy(self.net)

    def mixture(self):
        return {name: (2 * tensor + self.net.state_dict()[name]) / 3 for name, tensor in self.own.state_dict().items()}

    def training_step(self, batch, batch_idx):
        x, target = batch
        return {
            "loss": nn.functional.cross_entropy(self.own(x), target) + super().training_step(batch, batch_idx)["loss"]
        }

    def forward(self, x):
        return functional_call(self.own, self.mixture(), (x,))


def pictures(folder):
    """Names of the pictures, each looked at."""
    for path in folder.rglob("*.png"):
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.01, path
    return {path.stem for path in folder.glob("*.png")}


@pytest.fixture
def shown(monkeypatch):
    """What the callback hands to the pictures, by the name of the function; nothing is embedded or drawn."""
    calls = {}
    for name in ("plot_tsne", "plot_conductance"):
        calls[name] = []
        monkeypatch.setattr(module, name, lambda *args, kept=calls[name]: (kept.append(args), Figure((1, 1)))[1])
    monkeypatch.setattr(module, "embed", lambda features: features[:, :2])
    return calls


@pytest.fixture
def looked(monkeypatch):
    """All that was seen, a `Seen` a drawing."""
    kept = []
    look_at_all = module.look_at_all
    monkeypatch.setattr(module, "look_at_all", lambda *args: (kept.append(look_at_all(*args)), kept[-1])[1])
    return kept


@pytest.mark.parametrize(
    "client",
    [
        make_client,
        partial(make_client, Adapted),
        partial(make_client, Twofold),
        partial(make_client, Local, net=[plain, noisy]),
    ],
    ids=["FedAvg", "adapted", "two nets", "two kinds"],
)
@pytest.mark.by_default("adapted")
def test_models_are_those_that_clients_are_evaluated_with(client, shown, looked, tmp_path):
    run = fit(client(), root=tmp_path, callbacks=[FeaturePictures()], evaluate="before")
    (seen,) = looked
    sizes = [run.data.size(k, "test") for k in range(4)]
    assert seen.correct.shape == (4, sum(sizes)) and len(seen.part) == sum(sizes)
    for k, correct in enumerate(seen.correct):
        # the samples are the clients' test parts, one after the other
        own = correct.split(sizes)[k]
        assert float(own.float().mean()) == pytest.approx(run.logger.clients[k]["test/acc"], abs=1e-7)
        assert seen.features[k].shape == (sum(sizes), HIDDEN)
    assert not all(seen.correct.flatten())


def test_features_are_those_that_the_answer_is_made_of(shown, looked, tmp_path):
    run = fit(make_client(Twofold), root=tmp_path, callbacks=[FeaturePictures()])
    (seen,) = looked
    model = run.federation.client
    for k in range(4):
        run.federation.engines[0].become(run.federation.job(k))
        body = {
            name.removeprefix("features."): t for name, t in model.mixture().items() if name.startswith("features.")
        }
        with torch.no_grad():
            expected = functional_call(model.own.features, body, (seen.part.x,))
        assert torch.equal(seen.features[k], expected)
    assert not torch.equal(seen.features[0], seen.features[1])


def test_the_table_has_the_correctly_classified_samples_of_each_client(shown, looked, tmp_path):
    run = fit(make_client(Local), root=tmp_path, callbacks=[FeaturePictures()])
    (seen,) = looked
    rows = read_csv(run.folder / "pictures" / "tsne.csv")
    assert list(rows[0]) == ["client", "label", "x", "y"]
    expected = [
        (k, label, *h[:2])
        for k in range(4)
        for h, label, right in zip(seen.features[k].tolist(), seen.part.y.tolist(), seen.correct[k], strict=True)
        if right
    ]
    assert [(int(r["client"]), int(r["label"]), float(r["x"]), float(r["y"])) for r in rows] == expected
    (((name, drawn),),) = [call[0].items() for call in shown["plot_tsne"]]
    assert name == "Local" and [tuple(row.values()) for row in drawn] == expected
    assert 0 < len(expected) < seen.correct.numel()


def test_conductance_is_of_the_sample_that_most_clients_classify_correctly(shown, looked, tmp_path):
    callback = FeaturePictures(clients=[3, 0, 2], steps=7)
    run = fit(make_client(Local), blobs(by_class=True), root=tmp_path, callbacks=[callback])
    (seen,), ((conductance, clients, title),) = looked, shown["plot_conductance"]
    votes = seen.correct.sum(0)
    sample = votes.tolist().index(int(votes.max()))
    assert seen.clients == [3, 0, 2] and clients == torch.tensor([3, 0, 2])[seen.correct[:, sample]].tolist()
    assert f"class {int(seen.part.y[sample])}" in title and len(clients) == 2 and "2 of 3 clients" in title
    model, x, y = run.federation.client, seen.part.x[sample, None], seen.part.y[sample, None]
    for k, found in zip(clients, conductance, strict=True):
        run.federation.engines[0].become(run.federation.job(k))
        assert torch.equal(found, layer_conductance(model, model.net.features, x, y, 7)[0])
        with torch.no_grad():
            change = (model(x) - model(torch.zeros_like(x)))[0, int(y)]
        assert float(found.sum()) == pytest.approx(float(change), abs=1e-5)
    assert not torch.equal(*conductance)


def test_a_run_has_pictures(tmp_path):
    run = fit(make_client(), root=tmp_path, callbacks=[FeaturePictures(samples=12)], max_rounds=1)
    assert pictures(run.folder / "pictures") == ALL


@pytest.mark.exhaustive
def test_a_run_with_pictures_is_the_run_without(shown, looked, tmp_path):
    def go(*callbacks):
        settings = {"root": tmp_path, "clients_per_round": 0.75, "callbacks": list(callbacks), "evaluate": "both"}
        run = fit(make_client(Adapted, net=noisy, optimizer_lifetime="run"), **settings)
        return run, torch.get_rng_state()

    (plain, state), (drawn, same) = go(), go(FeaturePictures(every=2, samples=40))
    assert same_end(plain, drawn) and torch.equal(state, same)
    folder = drawn.folder / "pictures"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["round_0002"]
    for place in (folder, folder / "round_0002"):
        assert {path.stem for path in place.glob("*.png")} == ALL
    assert not (plain.folder / "pictures").exists()
    first, last = looked
    assert equal(first.part.x, last.part.x) and not equal(first.features, last.features)
    assert (folder / "tsne.csv").read_text() != (folder / "round_0002" / "tsne.csv").read_text()


@pytest.mark.exhaustive
def test_a_resumed_run_ends_with_the_same_table(tmp_path, shown):
    def go(folder, rounds, **settings):
        callbacks = [FeaturePictures()]
        return fit(make_client(Local), root=tmp_path / folder, max_rounds=rounds, callbacks=callbacks, **settings)

    whole = go("whole", 3)
    half = go("half", 1)
    resumed = go("half", 3, ckpt_path="last")
    assert resumed.folder == half.folder and same_end(whole, resumed)
    tables = [(run.folder / "pictures" / "tsne.csv").read_bytes() for run in (whole, resumed)]
    assert tables[0] == tables[1]
    # a run that is resumed at its end is drawn again
    (resumed.folder / "pictures" / "tsne.csv").unlink()
    again = go("half", 3, ckpt_path="last")
    assert (again.folder / "pictures" / "tsne.csv").read_bytes() == tables[0]


def test_clients_that_are_left_out_are_not_looked_at(shown, looked, tmp_path):
    run = fit(make_client(), root=tmp_path, callbacks=[FeaturePictures(clients=[2], conductance=False)])
    assert {row["client"] for row in read_csv(run.folder / "pictures" / "tsne.csv")} == {"2"}
    assert len(looked[0].features) == 1 and not shown["plot_conductance"]
    # the samples are those of all
    assert len(looked[0].part) == sum(run.data.size(k, "test") for k in range(4))


@pytest.mark.parametrize(("count", "sizes"), [(10, [3, 3, 2, 2]), (2, [1, 1, 0, 0]), (24, [6, 4, 6, 5])])
def test_each_client_gives_as_many_samples_as_far_as_it_has_them(count, sizes):
    data = blobs(24, 16, 30, 20)
    data.setup()
    assert [data.size(k, "test") for k in range(4)] == [6, 4, 8, 5]
    part = common_samples(data, count)
    for k, own in enumerate(part.x.split(sizes)):
        rows = [tuple(row) for row in own.tolist()]
        assert len(set(rows)) == sizes[k] and set(rows) <= {tuple(row) for row in data.part(k, "test").x.tolist()}
    again, other = (blobs(24, 16, 30, 20, seed=seed) for seed in (1, 2))
    for twin in (again, other):
        twin.setup()
    assert equal(common_samples(again, count).x, part.x) and not equal(common_samples(other, count).x, part.x)


def test_samples_of_the_central_test_set_come_first():
    class Central(Blobs):
        def central_data(self):
            y = torch.arange(30) % CLASSES
            return Samples(torch.arange(30.0)[:, None].expand(30, FEATURES), y)

    data = blobs(data=Central)
    data.setup()
    part = common_samples(data, 12)
    rows = part.x[:, 0].long()
    assert len(set(rows.tolist())) == 12 and rows.max() > 12 and torch.equal(part.y, rows % CLASSES)
    assert len(common_samples(data, 1000)) == 30


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("client", "data", "reason"),
    [
        (partial(make_client, Local, net=[plain, narrow]), {}, "features of widths 3, 5 can't be compared"),
        (make_client, {"test_fraction": 0}, "there are no test samples"),
    ],
    ids=["widths", "no test samples"],
)
def test_what_cannot_be_compared_is_one_warning(client, data, reason, tmp_path):
    callbacks = [FeaturePictures(every=1)]
    with pytest.warns(UserWarning, match=f"FeaturePictures: nothing is drawn: {reason}") as caught:
        run = fit(client(), blobs(**data), root=tmp_path, callbacks=callbacks)
    assert sum("FeaturePictures" in str(warning.message) for warning in caught) == 1
    assert len(run.rows) == 3 and not (run.folder / "pictures").exists()


@pytest.mark.filterwarnings("default")
def test_a_look_or_a_picture_that_fails_is_a_warning(monkeypatch, tmp_path):
    def broken(*args):
        raise RuntimeError("no light")

    monkeypatch.setattr(module, "embed", broken)
    with pytest.warns(UserWarning, match="FeaturePictures: tsne was not drawn: no light"):
        run = fit(make_client(), root=tmp_path, callbacks=[FeaturePictures()])
    assert pictures(run.folder / "pictures") == {"conductance"}
    monkeypatch.setattr(module, "look", broken)
    with pytest.warns(UserWarning, match="FeaturePictures: nothing is drawn: no light"):
        run = fit(make_client(), root=tmp_path, callbacks=[FeaturePictures()])
    assert len(run.rows) == 3 and not (run.folder / "pictures").exists()


def test_where_no_two_clients_are_right_about_a_sample_there_is_no_conductance(tmp_path):
    run = fit(make_client(), root=tmp_path)
    part = Samples(torch.zeros(3, FEATURES), torch.tensor([0, 1, 2]))
    seen = Seen([0, 1, 2], part, [torch.zeros(3, HIDDEN)] * 3, torch.eye(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no two clients"):
        module.draw_conductance(run.federation, seen, 5)


def test_without_a_logger_nobody_is_looked_at(monkeypatch):
    monkeypatch.setattr(module, "look_at_all", pytest.fail)
    fit(make_client(), callbacks=[FeaturePictures(every=1)])


def test_points_that_lie_together_are_embedded_together():
    g = torch.Generator().manual_seed(0)
    features = torch.randn(60, 8, generator=g) + 20 * (torch.arange(60) % 3)[:, None]
    before = torch.get_rng_state()
    points = embed(features)
    assert points.shape == (60, 2) and torch.equal(points, embed(features))
    assert torch.equal(before, torch.get_rng_state())
    groups = torch.arange(60) % 3
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
    assert torch.equal(groups[distances.argmin(1)], groups)


@pytest.mark.parametrize("count", [5, 8, 31])
def test_few_points_are_embedded(count):
    assert embed(torch.randn(count, 4, generator=torch.Generator().manual_seed(0))).isfinite().all()


@pytest.mark.parametrize(
    ("features", "reason"), [(torch.randn(4, 3), "4 features of"), (torch.ones(20, 3), "all samples are equal")]
)
def test_what_has_no_embedding_is_said(features, reason):
    with pytest.raises(ValueError, match=reason):
        embed(features)


@pytest.mark.parametrize("settings", [{"samples": 0}, {"steps": 0}, {"clients": ()}, {"every": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(MisconfigurationException, match=f"FeaturePictures.{next(iter(settings))}="):
        FeaturePictures(**settings)


@pytest.mark.parametrize("client", [4, -1])
def test_clients_that_are_not_there_are_refused_before_the_first_round(client):
    with pytest.raises(MisconfigurationException, match=rf"clients has {client}, .*data\.num_clients=4"):
        fit(make_client(), callbacks=[FeaturePictures(clients=(0, client))])
