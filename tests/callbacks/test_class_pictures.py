"""The callback draws what a run shows, and a run is the same with it."""

from unittest.mock import MagicMock

import matplotlib.image
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from federations import blobs, fit, make_client, noisy, same_end, untimed
from pfl_lightning import Aggregator, AggregatorList
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.callbacks import ClassPictures
from pfl_lightning.callbacks import class_pictures as module
from pfl_lightning.methods import WDR, FedPer, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net
from sweeps import swept

PARTITION = {"partition"}
UPLOADS = {"row_norms", "distributions", "scatter"}
SERVER = {"mixing_matrix", "class_models"}
TRACE = {"trace", "trace_scatter"}

pytestmark = pytest.mark.filterwarnings("error:.*(not drawn|is not a client).*")


def pictures(folder):
    """Names of the pictures, each looked at."""
    for path in folder.rglob("*.png"):
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.01, path
    return {path.stem for path in folder.glob("*.png")}


def wdr(**settings):
    return make_client(WDR, wdr_lambda=0.5, **settings)


@pytest.mark.parametrize(
    ("method", "aggregator", "expected"),
    [
        (wdr, CwFedAvg, PARTITION | UPLOADS | SERVER | TRACE),
        (make_client, CwFedAvg, PARTITION | UPLOADS | SERVER),
        (make_client, lambda: AggregatorList([Aggregator(), CwFedAvg()]), PARTITION | UPLOADS | SERVER),
        (make_client, lambda: None, PARTITION | UPLOADS),
        (lambda: make_client(Local), lambda: None, PARTITION),
        (lambda: make_client(FedPer), lambda: None, PARTITION),
        (
            lambda: make_client(FedPer),
            lambda: CwFedAvg(layers="all", distribution="counts"),
            PARTITION | {"mixing_matrix"},
        ),
    ],
    ids=["WDR", "cwFedAvg", "cwFedAvg beside another", "FedAvg", "Local", "FedPer", "FedPer by class"],
)
@pytest.mark.by_default("FedPer by class", "WDR")
def test_each_method_gets_the_pictures_of_what_its_server_sees(method, aggregator, expected, tmp_path):
    run = fit(method(), root=tmp_path, aggregator=aggregator(), callbacks=[ClassPictures()])
    assert pictures(run.folder / "pictures") == expected


@pytest.mark.parametrize("share", swept([1.0, 0.5], ("0.5",), str))
@pytest.mark.exhaustive
def test_a_run_with_pictures_is_the_run_without(share, tmp_path):
    def go(*callbacks):
        settings = {"root": tmp_path, "clients_per_round": share, "callbacks": list(callbacks)}
        return fit(wdr(net=noisy), aggregator=CwFedAvg(), **settings)

    plain, drawn = go(), go(ClassPictures(every=1, trace_client=1))
    assert same_end(plain, drawn)
    assert untimed(plain.logger.clients) == untimed(drawn.logger.clients)


@pytest.mark.exhaustive
def test_pictures_come_every_so_many_rounds_and_at_the_end(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=5, callbacks=[ClassPictures(every=2)])
    folder = run.folder / "pictures"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["round_0002", "round_0004"]
    assert pictures(folder / "round_0004") == UPLOADS


class Rows(Callback):
    """Norms of the output rows that travel, of the last round of each client."""

    def __init__(self):
        self.down, self.up = {}, {}

    def norms(self, record):
        return torch.linalg.vector_norm(record["weights"]["net.classifier.weight"], dim=1)

    def on_aggregate_start(self, trainer, federation, updates):
        for client, update in updates.items():
            self.down[client] = self.norms(federation.aggregator.download(client))
            self.up[client] = self.norms(update)


@pytest.fixture
def shown(monkeypatch):
    """What the callback hands to the heatmaps."""
    panels = {}
    draw = module.plot_class_heatmaps
    monkeypatch.setattr(module, "plot_class_heatmaps", lambda p, *a, **k: (panels.update(p), draw(p, *a, **k))[1])
    return panels


@pytest.mark.exhaustive
def test_heatmaps_show_each_clients_last_round(shown, tmp_path):
    rows, callback = Rows(), ClassPictures()
    settings = {"root": tmp_path, "clients_per_round": 1, "max_rounds": 2, "callbacks": [rows, callback]}
    run = fit(wdr(), blobs(by_class=True), aggregator=CwFedAvg(), **settings)
    seen = sorted(rows.up)
    assert 0 < len(seen) < 4
    assert torch.equal(shown["As received"][seen], torch.stack([rows.down[client] for client in seen]))
    assert torch.equal(shown["After local training"][seen], torch.stack([rows.up[client] for client in seen]))
    for title in ("As received", "After local training", "Difference", "Estimated from row norms"):
        assert shown[title].isnan().all(1).nonzero().flatten().tolist() == sorted({0, 1, 2, 3} - set(seen))
    torch.testing.assert_close(shown["True"].sum(1), torch.ones(4))
    estimates = run.federation.aggregator.distributions().float()
    torch.testing.assert_close(shown["Estimated from row norms"][seen], estimates[seen])
    models = run.federation.aggregator.class_models()["net.classifier.weight"]
    torch.testing.assert_close(shown["Class models"].float(), torch.linalg.vector_norm(models, dim=2))


@pytest.mark.exhaustive
def test_the_trace_is_of_the_first_round_with_and_without_the_regulariser(monkeypatch, tmp_path):
    calls = []
    draw = module.plot_distribution_trace
    monkeypatch.setattr(module, "plot_distribution_trace", lambda t, p: (calls.append((dict(t), p)), draw(t, p))[1])
    rows, client = Rows(), wdr()
    fit(client, root=tmp_path, aggregator=CwFedAvg(), max_rounds=1, callbacks=[ClassPictures(trace_client=2), rows])
    ((traces, p),) = calls
    assert client.wdr_weight == 0.25 and p.sum() == pytest.approx(1)
    assert torch.equal(traces["Without WDR"][0], traces["With WDR"][0])
    torch.testing.assert_close(traces["With WDR"][-1], rows.up[2] / rows.up[2].sum())
    without = {title: torch.linalg.vector_norm(p - trace[-1]) for title, trace in traces.items()}
    assert without["With WDR"] < without["Without WDR"]


def test_without_a_logger_nothing_is_drawn_or_traced(monkeypatch):
    monkeypatch.setattr(module, "trace_job", pytest.fail)
    fit(wdr(), callbacks=[ClassPictures(every=1)])


@pytest.mark.exhaustive
def test_weights_and_biases_gets_the_pictures(monkeypatch, tmp_path):
    images = {}

    class Fake(WandbLogger):
        name, version, experiment = "test", "v", MagicMock()

        def __init__(self):
            self._save_dir = str(tmp_path)

        def log_image(self, key, images_, step=None, **kwargs):
            images[key] = images_

        def log_metrics(self, *args, **kwargs): ...

        def log_hyperparams(self, *args, **kwargs): ...

        def log_table(self, *args, **kwargs): ...

        def save(self): ...

        def after_save_checkpoint(self, *args): ...

        def finalize(self, *args): ...

    logger = Fake()
    run = fit(wdr(), root=tmp_path, aggregator=CwFedAvg(), logger=logger, callbacks=[ClassPictures()])
    assert set(images) - {"partition"} == {f"pictures/{name}" for name in PARTITION | UPLOADS | SERVER | TRACE}
    assert all(type(figure).__name__ == "Figure" for (figure,) in images.values())
    assert pictures(run.folder / "pictures")


@pytest.mark.filterwarnings("default")
def test_a_picture_that_fails_is_a_warning(monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise ValueError("no ink")

    for name in ("plot_mixing_matrix", "trace_job", "plot_partition"):
        monkeypatch.setattr(module, name, broken)
    with pytest.warns(UserWarning, match="not drawn: no ink") as caught:
        run = fit(wdr(), root=tmp_path, aggregator=CwFedAvg(), callbacks=[ClassPictures()])
    assert sum("no ink" in str(warning.message) for warning in caught) == 3
    assert len(run.rows) == 3 and pictures(run.folder / "pictures") == UPLOADS | {"class_models"}


@pytest.mark.filterwarnings("default")
@pytest.mark.exhaustive
def test_a_client_that_is_not_there_is_not_traced(tmp_path):
    with pytest.warns(UserWarning, match="trace_client=9 is not a client"):
        run = fit(wdr(), root=tmp_path, callbacks=[ClassPictures(trace_client=9)])
    assert "trace" not in pictures(run.folder / "pictures")


def test_a_net_without_one_output_layer_shows_only_who_holds_what(tmp_path):
    def two(input_shape, num_classes):
        square = torch.nn.Linear(num_classes, num_classes)
        return Net(torch.nn.Identity(), torch.nn.Sequential(torch.nn.Linear(input_shape[0], num_classes), square))

    run = fit(make_client(FedAvg, net=two), root=tmp_path, callbacks=[ClassPictures()])
    assert pictures(run.folder / "pictures") == PARTITION


@pytest.mark.parametrize("every", [0, -1])
def test_rounds_between_pictures_are_at_least_one(every):
    with pytest.raises(MisconfigurationException, match="every="):
        ClassPictures(every=every)
