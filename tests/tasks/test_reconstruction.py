"""Autoencoders: samples whose targets are their inputs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torchmetrics.functional import mean_squared_error
from torchmetrics.functional.image import peak_signal_noise_ratio

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import TensorData
from pfl_lightning.data.input_drift import InputDrift
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.methods import FedAvg, FedBN, FedPer
from pfl_lightning.nets import MLP, Autoencoder, UNet
from pfl_lightning.tasks import Reconstruction
from tasks_and_data import OfKind, client_of, drawn, kinds

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def fit(client, data, engine="sequential", rounds=2):
    record = RoundLogger()
    trainer = FederatedTrainer(max_rounds=rounds, engine=engine, callbacks=[record], accelerator="cpu", **QUIET)
    trainer.fit(client, datamodule=data)
    return trainer, record


@pytest.mark.parametrize("shape", [(6, 1, 4, 5), (6, 2, 3, 4, 5), (6, 7)])
def test_errors_are_those_of_torchmetrics(shape):
    task = Reconstruction(shape[1], values=(-1, 3))
    x, outputs = 4 * torch.rand(shape) - 1, drawn(*shape, seed=1)
    metrics = task.configure_metrics()
    for rows in (slice(2), slice(2, None)):
        metrics.update(outputs[rows], x[rows])
    values = metrics.compute()
    assert float(values["mse"]) == pytest.approx(float(mean_squared_error(outputs, x)), rel=1e-5)
    expected = peak_signal_noise_ratio(outputs, x, data_range=4.0)
    assert float(values["psnr"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(task.loss(outputs, x)) == pytest.approx(float(F.mse_loss(outputs, x)), rel=1e-5)
    alone = [float(F.mse_loss(o, own)) for o, own in zip(outputs, x, strict=True)]
    assert task.row_errors(outputs, x).tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("error", ["mse", "bce"])
def test_a_sum_of_errors_is_of_samples(error):
    task = Reconstruction(2, error)
    x, outputs = drawn(5, 2, 3, 4).tanh(), drawn(5, 2, 3, 4, seed=1)
    whole = task.loss(outputs, x, "sum") / task.weight(x)
    assert float(whole) == pytest.approx(float(task.loss(outputs, x)), rel=1e-5)


def test_cross_entropy_is_of_shares_of_the_range():
    task = Reconstruction(1, "bce", values=(-1, 3))
    x, outputs = 4 * torch.rand(5, 1, 3, 3) - 1, drawn(5, 1, 3, 3)
    share = (x + 1) / 4
    by_hand = -(share * outputs.sigmoid().log() + (1 - share) * (1 - outputs.sigmoid()).log()).mean()
    assert float(task.loss(outputs, x)) == pytest.approx(float(by_hand), rel=1e-5)
    seen = task.reconstructed(outputs)
    assert torch.allclose(seen, 4 * outputs.sigmoid() - 1)
    assert float(task.configure_metrics()["mse"](outputs, x)) == pytest.approx(float(F.mse_loss(seen, x)), rel=1e-5)
    # the mean of several models is of reconstructions and not of logits
    several, shares = drawn(3, 5, 1, 3, 3), torch.tensor([0.5, 0.3, 0.2])
    mean = torch.tensordot(shares, task.reconstructed(several), 1)
    assert torch.allclose(task.reconstructed(task.combined(several, shares)), mean, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 5), (1, 2, 2), (2, 5, 6, 7)])
def test_an_autoencoder_gives_back_the_shape_of_its_inputs(shape):
    net = Autoencoder(shape, shape[0], width=4, code=6)
    x = torch.randn(2, *shape)
    assert net.features(x).shape == (2, 6) and net(x).shape == x.shape


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Autoencoder((8,), 1), r"not input_shape=\(8,\); net MLP takes vectors"),
        (lambda: Autoencoder((1, 1, 8), 1), "of at least 2 pixels a side"),
        (lambda: Autoencoder((1, 8, 8), 1, code=0), "code=0 and levels=2 must be 1 or more"),
        (lambda: Reconstruction(error="mae"), r"task\.error='mae' must be one of mse, bce"),
        (lambda: Reconstruction(values=(1, -1)), r"task\.values=\[1\.0, -1\.0\] must be the smallest and the largest"),
        (lambda: Reconstruction(values=(1,)), r"task\.values=\[1\.0\] must be"),
    ],
)
def test_what_cannot_be_is_refused(make, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        make()


@pytest.mark.parametrize(
    ("outputs", "x", "task", "sentence"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 5), Reconstruction(), r"needs shape \[2, 1, 4, 5\]"),
        (torch.zeros(2, 5), torch.zeros(2, 5).long(), Reconstruction(5), "one floating tensor, and .* torch.int64"),
        (torch.zeros(2, 5), {"a": torch.zeros(2)}, Reconstruction(5), "one floating tensor, and .* type dict"),
        (
            torch.zeros(2, 1),
            2 * torch.ones(2, 1),
            Reconstruction(1, "bce"),
            "from -1 to 1, and the data .* from 2 to 2",
        ),
    ],
)
def test_other_outputs_and_inputs_are_refused(outputs, x, task, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        task.check_outputs(outputs, x, "Net")


@pytest.mark.parametrize("resident", [True, False])
def test_targets_are_the_inputs_as_the_net_takes_them(resident):
    pixels = torch.randint(256, (20, 1, 4, 4), dtype=torch.uint8)
    # of the data's own targets nothing is used
    data = TensorData(pixels, np.arange(20), Reconstruction(), client=["a", "b"] * 10, resident=resident)
    data.setup()
    part = data.part(0, "train")
    assert isinstance(part, Streamed) != resident
    assert part.x.dtype == torch.float32 and torch.equal(part.x, part.y)
    assert all(torch.equal(*pair) for pair in part.chunks(3))
    some = part.take(torch.tensor([2, 0])).to("cpu", torch.float64)
    assert torch.equal(some.x.float(), some.y.float())


@pytest.mark.parametrize("resident", [True, False])
def test_inputs_that_drift_are_their_own_targets(resident):
    x = drawn(20, 1, 4, 4)
    drift = [InputDrift(start=2, shift=2.0)]
    data = TensorData(x, x, Reconstruction(), client=["a"] * 20, resident=resident, input_drift=drift)
    data.setup()
    before = data.part(0, "train").x
    data.go_to(4)
    part = data.part(0, "train")
    assert not torch.equal(part.x, before) and torch.equal(part.x, part.y)


@pytest.mark.parametrize("error", ["mse", "bce"])
@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_both_engines_reconstruct_alike(method, error):
    kind = replace(kinds()["Reconstruction"], task=Reconstruction(error=error))
    found = {}
    for engine in ("sequential", "vectorised"):
        trainer, record = fit(client_of(kind, method), OfKind(kind), engine)
        found[engine] = [v for row in record.clients for name, v in row.items() if name.startswith("test/")]
        weights = trainer.lightning_module.client.state_dict()
        found[f"{engine} weights"] = torch.cat([entry.flatten() for entry in weights.values()])
    assert found["vectorised"] == pytest.approx(found["sequential"], rel=1e-4)
    assert torch.allclose(found["vectorised weights"], found["sequential weights"], atol=1e-6)
    assert {"test/mse", "test/psnr", "test/psnr_pooled"} <= record.summary["final"].keys()
    assert record.summary["monitor"] == {"metric": "mse", "mode": "min"}


def test_rows_unlike_a_clients_own_have_large_errors():
    stripes = drawn(400, 1, 6, 1).tanh().repeat(1, 1, 1, 6)
    kind = replace(kinds()["Reconstruction"], x=stripes, y=stripes)
    torch.manual_seed(0)
    optimizer = partial(Adam, lr=0.01)
    client = FedPer(partial(Autoencoder, width=8, code=12, levels=1), (1, 6, 6), task=kind.task, optimizer=optimizer)
    data = OfKind(kind, batch_size=16)
    trainer, record = fit(client, data, "vectorised", rounds=10)
    assert record.rows[-1]["val/mse"] < 0.5 * record.rows[0]["val/mse"]
    odd = drawn(8, 1, 6, 6, seed=5).sign()
    # a client's own test rows, and given ones
    own, found = trainer.predict(client, clients=["1"])["1"], trainer.predict(client, odd, clients=["1"])["1"]
    part = data.part(1, "test")
    assert torch.allclose(own.errors, (own.values - part.x).square().flatten(1).mean(1), atol=1e-6)
    assert own.values.shape == part.x.shape
    assert found.errors.min() > own.errors.max()
    assert list(found.columns()) == ["error"] and len(found.columns()["error"]) == 8
    last = next(row for row in record.clients if row["client"] == 1)
    assert float(own.errors.mean()) == pytest.approx(last["test/mse"], rel=1e-4)


@pytest.mark.parametrize("net", [partial(MLP, hidden=(4,)), partial(UNet, width=2, levels=2)])
def test_other_nets_reconstruct_vectors_and_images(net):
    x = drawn(40, 5) if net.func is MLP else drawn(40, 1, 6, 6)
    task = Reconstruction(x.shape[1])
    data = TensorData(x, x, task, client=["a", "b"] * 20, batch_size=4)
    client = FedBN(net, data.input_shape, task=task, optimizer=partial(SGD, lr=0.1))
    _, record = fit(client, data, rounds=4)
    assert record.rows[-1]["train/loss"] < record.rows[0]["train/loss"]
