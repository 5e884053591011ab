"""The models that clients train when they join a federation that is over."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import (
    NETS,
    Blobs,
    Sizes,
    equal,
    fit,
    fitting,
    make_client,
    make_trainer,
    noisy,
    plain,
    points,
    read_csv,
)
from pfl_lightning.client.joined_clients import JOINED
from pfl_lightning.data import TensorData
from pfl_lightning.federation.joining import keep_joined
from pfl_lightning.federation.prediction import NeedsSamples
from pfl_lightning.methods import FedPer, FedProto
from pfl_lightning.methods.registry import METHODS
from sweeps import swept

SETTINGS = {"FedClassAvg": {"contrastive": False}}
ROWS = points(7, seed=5)[0]
PARTS = (24, 16, 30, 20, 15, 15)
NEED_SAMPLES = {"kNN-Per", "FedFomo"}
"""Methods whose joined models look at the client's samples when they predict."""


def crowd() -> Blobs:
    """Four clients and two new ones, without names."""
    return Blobs(num_clients=4, partitioner=Sizes(*PARTS), batch_size=5, val_fraction=0.2, new_clients=2)


def named(*sites: str) -> TensorData:
    x, y = points(30 * len(sites), seed=len(sites[0]))
    clients = [sites[row % len(sites)] for row in range(len(x))]
    return TensorData(x, y, Blobs().task, client=clients, client_split="stratified")


def told(trainer) -> dict[str, float]:
    """What the join's own table says of each new client."""
    folder = max(Path(trainer.log_dir).parent.glob("*/clients.csv"), key=lambda path: path.stat().st_mtime_ns)
    return {row["name" if row.get("name") else "client"]: float(row["new/acc"]) for row in read_csv(folder)}


def right(predicted, data) -> dict[str, float]:
    """The share of right classes of each client on its test rows."""
    targets = {name: data.part(data.client_id(name), "test").y for name in predicted}
    return {str(name): float((own.classes == targets[name]).float().mean()) for name, own in predicted.items()}


@pytest.mark.parametrize("method", swept(METHODS))
@pytest.mark.by_default("FedAvg", "Ditto", "FedProto", "APPLE")
def test_predictions_of_clients_that_joined_give_their_test_figures(method, tmp_path):
    make = partial(make_client, method.client, net=noisy, **SETTINGS.get(method.name, {}))
    run = fit(make(), crowd(), root=tmp_path, aggregator=method.new_aggregator(), max_rounds=2)
    run.trainer.join(run.model, run.data, epochs=2, rounds=2)
    expected = told(run.trainer)
    assert expected.keys() >= {"4", "5"}
    predicted = run.trainer.predict(clients=[4, 5])
    assert right(predicted, run.data) == pytest.approx({name: expected[name] for name in ("4", "5")})
    rows = {client: run.data.part(client, "test").x for client in (4, 5)}
    given = run.trainer.predict(clients=rows)
    # in another process, with the data or with the checkpoints alone
    saved = make_trainer().predict(
        make(), clients=rows, ckpt_path=run.last, datamodule=crowd(), aggregator=method.new_aggregator()
    )
    for other in (given, saved):
        assert equal([own.outputs for own in predicted.values()], [own.outputs for own in other.values()])
    try:
        alone = make_trainer().predict(make(), clients=rows, ckpt_path=run.last)
    except NeedsSamples:
        assert method.name in NEED_SAMPLES
    else:
        assert method.name not in NEED_SAMPLES
        assert equal([own.outputs for own in predicted.values()], [own.outputs for own in alone.values()])
        net = fitting(method.client, noisy)
        loaded = method.client.load_from_checkpoint(run.last, client=5, net=net, **SETTINGS.get(method.name, {}))
        assert torch.equal(loaded.eval()(rows[5]), predicted[5].outputs)
        assert equal(loaded.state_dict(), run.trainer.client(5).cpu().state_dict())


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_engines_keep_the_same_models(engine, tmp_path):
    kept = []
    for name in ("sequential", engine):
        run = fit(make_client(FedPer), crowd(), engine=name, max_rounds=1)
        run.trainer.join(run.model, run.data, rounds=2)
        kept.append(run.federation.joined)
    assert kept[0].keys() == kept[1].keys() == {"4", "5"}
    for name, own in kept[0].items():
        assert own["personal"].keys() == run.model.state_dict().keys()
        assert all(torch.allclose(own["personal"][k], t, atol=1e-5) for k, t in kept[1][name]["personal"].items())


def test_each_architecture_keeps_its_own(tmp_path):
    make = partial(make_client, FedProto, net=NETS)
    run = fit(make(), crowd(), root=tmp_path, max_rounds=1)
    run.trainer.join(run.model, run.data)
    kept = run.trainer.predict(data=ROWS, clients=[4, 5])
    alone = make_trainer().predict(make(), ROWS, ckpt_path=run.last, clients=[4, 5])
    for client in (4, 5):
        loaded = FedProto.load_from_checkpoint(run.last, client=client, net=NETS).eval()
        assert torch.equal(kept[client].outputs, alone[client].outputs)
        assert torch.equal(kept[client].outputs, loaded(ROWS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = fit(make_client(FedPer), named("Bremen", "Ulm"), root=tmp_path_factory.mktemp("named"), max_rounds=2)
    for site in ("Erfurt", "Jena"):
        # one after another, each from data of its own
        run.trainer.join(run.model, named(site), names=site, epochs=3)
    return run


@pytest.mark.parametrize("data", [lambda: named("Bremen", "Ulm"), lambda: named("Jena")])
@pytest.mark.parametrize("in_memory", [True, False])
def test_named_clients_are_known_whatever_the_data(trained, data, in_memory):
    expected = FedPer.load_from_checkpoint(trained.last, client="Erfurt", net=plain).eval()(ROWS)
    received = make_trainer().predict(make_client(FedPer), ROWS, ckpt_path=trained.last, clients=["new"])["new"]
    trainer = trained.trainer if in_memory else make_trainer()
    settings = {} if in_memory else {"ckpt_path": trained.last}
    predicted = trainer.predict(trained.model, ROWS, datamodule=data(), clients=["Erfurt", "Ulm"], **settings)
    assert list(predicted) == ["Erfurt", "Ulm"]
    assert torch.equal(predicted["Erfurt"].outputs, expected)
    assert not torch.allclose(expected, received.outputs) and not torch.equal(predicted["Ulm"].outputs, expected)
    assert torch.equal(trained.trainer.client("Erfurt").eval()(ROWS), expected)
    rows = {"Jena": ROWS[:2], "Erfurt": ROWS[:3], "Bremen": ROWS[:1]}
    alone = make_trainer().predict(make_client(FedPer), ckpt_path=trained.last, clients=rows)
    assert {name: len(own) for name, own in alone.items()} == {"Jena": 2, "Erfurt": 3, "Bremen": 1}
    assert torch.equal(alone["Erfurt"].outputs, expected[:3])


def test_files_of_others_are_neither_taken_nor_changed(trained, tmp_path, recwarn):
    kept = Path(trained.last).with_name(JOINED)
    other = fit(make_client(FedPer, seed=4), named("Bremen", "Ulm"), root=tmp_path, max_rounds=1)
    theirs = Path(other.last).with_name(JOINED)
    theirs.write_bytes(kept.read_bytes())
    with pytest.raises(MisconfigurationException, match="'Erfurt'"):
        FedPer.load_from_checkpoint(other.last, client="Erfurt", net=plain)
    other.trainer.join(other.model, named("Erfurt"))
    assert theirs.read_bytes() == kept.read_bytes()
    assert any("another federation" in str(warning.message) for warning in recwarn)
    assert len(other.trainer.predict(data=ROWS, clients=["Erfurt"])["Erfurt"]) == 7
    theirs.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(MisconfigurationException, match=JOINED):
        FedPer.load_from_checkpoint(other.last, client="Erfurt", net=plain)


def test_nothing_is_written_without_a_logger(tmp_path):
    run = fit(make_client(FedPer), crowd(), root=tmp_path, max_rounds=1)
    make_trainer().join(make_client(FedPer), crowd(), ckpt_path=run.last)
    assert not Path(run.last).with_name(JOINED).exists()


def test_why_models_of_new_clients_could_not_be_written_is_said(tmp_path):
    assert keep_joined(tmp_path / "gone" / "last.ckpt", {}, {}).endswith(f"{JOINED}: No such file or directory")
