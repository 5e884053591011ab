"""LightningModules with a training of their own, as clients."""

import re
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from federations import CLASSES, FEATURES, HIDDEN, Pause, equal, fit, make_trainer, near, plain, points, same_end
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.data import ClientDatasets
from pfl_lightning.methods import (
    APFL,
    APPLE,
    FML,
    MOON,
    CloudProx,
    ControlVariates,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedFomo,
    FedLC,
    FedPer,
    FedProx,
    PerFedAvg,
    PFedMe,
    QFedAvg,
)
from pfl_lightning.tasks import Classification, OwnLoss

SEEN = []
"""Batches that training steps were given; a list of the test's own, as a module may keep none."""


def keep(module, batch):
    if module.training:
        SEEN.append(batch)


class Classifier(L.LightningModule):
    """Logarithms of probabilities, a weighted loss, and a metric of torchmetrics."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.hits = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.body(x))), 1)

    def training_step(self, batch, batch_idx):
        keep(self, batch)
        x, y = batch
        self.log("train_hits", (self(x).argmax(1) == y).float().mean(), prog_bar=True)
        return 5 * F.nll_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.hits(self(x), y)
        self.log("val_hits", self.hits)
        self.log("val_loss", 5 * F.nll_loss(self(x), y))

    def configure_optimizers(self):
        return Adam(self.parameters(), lr=0.02)


class VectorAutoencoder(L.LightningModule):
    """Samples without targets, and a schedule."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh()), nn.Linear(2, FEATURES)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        keep(self, batch)
        return F.mse_loss(self(batch), batch)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


class Forecaster(L.LightningModule):
    """Batches that are dicts, and steps that return dicts."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, series):
        return self.head(self.rnn(series)[0][:, -1])

    def training_step(self, batch):
        keep(self, batch)
        loss = F.l1_loss(self(batch["past"]), batch["future"])
        self.log_dict({"train_mae": loss})
        return {"loss": loss}

    def validation_step(self, batch):
        self.log("val/mae", F.l1_loss(self(batch["past"]), batch["future"]))

    def predict_step(self, batch):
        return self(batch["past"])

    def configure_optimizers(self):
        return {"optimizer": AdamW(self.parameters(), lr=0.01)}


class Linear(Forecaster):
    """One that many clients can train at once."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.Flatten(), nn.Linear(4, 2)

    def forward(self, series):
        return self.head(self.rnn(series))


def pairs(n, seed):
    return TensorDataset(*points(n, seed))


def alone(n, seed):
    x, _ = points(n, seed)

    class Inputs(Dataset):
        __len__ = x.__len__
        __getitem__ = x.__getitem__

    return Inputs()


def series(n, seed):
    x, _ = points(n, seed)
    return StackDataset(past=x[:, :4, None], future=x[:, 4:])


OWN = {
    "classifier": (Classifier, pairs, Classification(CLASSES)),
    "autoencoder": (VectorAutoencoder, alone, OwnLoss()),
    "forecaster": (Forecaster, series, OwnLoss("mae", "min")),
    "linear": (Linear, series, OwnLoss("mae", "min")),
}


def data_of(kind, sizes=(24, 16, 30), **settings):
    _, items, task = OWN[kind]
    sets = {f"site {n}": (items(n, n), items(9, 100 + n)) for n in sizes}
    return ClientDatasets(sets, task, **{"batch_size": 5, **settings})


def client_of(kind, method=FedAvg, data=None, **settings):
    L.seed_everything(3, verbose=False)
    data = data or data_of(kind)
    return method(OWN[kind][0](), data.input_shape, task=data.task, **settings)


def train(kind, method=FedAvg, data=None, aggregator=None, **settings):
    data = data or data_of(kind)
    return fit(client_of(kind, method, data), data, aggregator=aggregator, **{"max_rounds": 2, **settings})


METHODS = [FedAvg, FedPer, Ditto, ControlVariates, FedProx, CloudProx]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["classifier", "autoencoder", "linear"])
@pytest.mark.by_default("classifier-FedAvg", "classifier-FedPer", "autoencoder-Ditto", "linear-ControlVariates")
def test_modules_train_by_themselves_under_each_method_and_engine(kind, method):
    one, many = (train(kind, method, engine=engine) for engine in ("sequential", "vectorised"))
    assert near(one.weights, many.weights)
    for row, other in zip(one.rows, many.rows, strict=True):
        assert row.keys() == other.keys()
        assert near(row["train/loss"], other["train/loss"]) and near(row["val/loss"], other["val/loss"], 1e-4)
    assert one.rows[1]["train/loss"] < one.rows[0]["train/loss"]


def test_recurrent_layers_train_many_clients_at_once():
    one, many = (train("forecaster", engine=engine) for engine in ("sequential", "vectorised"))
    assert near(one.weights, many.weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_class_wise_averaging_mixes_the_output_layer(engine):
    run = train("classifier", engine=engine, aggregator=CwFedAvg())
    assert run.federation.aggregator.rows == "net.classifier.layer.weight"
    assert "val/hits" in run.rows[-1] and "val/acc" in run.rows[-1]


@pytest.mark.parametrize("kind", ["classifier", "autoencoder", "forecaster"])
def test_one_client_is_a_fit_of_lightning_s_trainer_bit_for_bit(kind):
    data = data_of(kind, (23,))
    client = client_of(kind, data=data, optimizer_lifetime="run")
    twin = OWN[kind][0]()
    L.seed_everything(3, verbose=False)
    client.net.give_weights(twin)
    SEEN.clear()
    fit(client, data, max_rounds=2)
    half = len(SEEN) // 2
    epochs = iter([SEEN[:half], SEEN[half:]])

    class Same(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(next(epochs), batch_size=None)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = L.Trainer(
        max_epochs=2, reload_dataloaders_every_n_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(twin, datamodule=Same())
    other = OWN[kind][0]()
    client.net.give_weights(other)
    assert equal(other.state_dict(), twin.state_dict())


@pytest.mark.parametrize("kind", ["classifier", "autoencoder", "forecaster"])
@pytest.mark.parametrize("method", [FedPer, Ditto])
@pytest.mark.by_default("FedPer-classifier")
def test_a_resumed_run_is_the_same_bit_for_bit(kind, method, tmp_path):
    whole = train(kind, method, max_rounds=3)
    train(kind, method, root=tmp_path, max_rounds=3, callbacks=[Pause(2)])
    assert same_end(whole, train(kind, method, root=tmp_path, max_rounds=3, ckpt_path="last"))


def test_a_module_is_given_to_fit_as_to_lightning_s_trainer():
    data, module = data_of("linear"), Linear()
    before = module.head.weight.clone()
    trainer = make_trainer(max_rounds=2)
    trainer.fit(module, datamodule=data)
    assert not torch.equal(module.head.weight, before)
    [results] = trainer.test(module, datamodule=data)
    tests = [data.part(client, "test").x for client in range(3)]
    losses = [F.l1_loss(module(test["past"]), test["future"]).item() for test in tests]
    assert results["test/mae"] == pytest.approx(sum(losses) / 3)
    found = trainer.predict()[data.client_names[0]].values
    assert torch.allclose(found, module(tests[0]["past"]))
    # the same federation goes on
    round = trainer.lightning_module.round
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    assert trainer.lightning_module.round > round


def test_logged_values_are_in_the_record():
    run = train("classifier")
    for name in ("train/hits", "val/hits", "val/loss", "val/acc"):
        assert name in run.rows[-1]
    tested = run.test()
    for client in range(3):
        held, module = run.data.part(client, "test"), run.trainer.client(client).eval()
        outputs = module(held.x)
        assert tested[client]["loss"] == pytest.approx(5 * float(F.nll_loss(outputs, held.y)))
        assert tested[client]["hits"] == pytest.approx(float((outputs.argmax(1) == held.y).float().mean()))


def test_an_evaluation_of_several_batches_is_one_of_all_rows():
    class Whole(Classifier):
        """Calls a hook of the end of an epoch, and averages over batches of different size."""

        def __init__(self):
            super().__init__()
            self.rows = []

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.rows.append(len(batch[1]))

        def on_validation_epoch_end(self):
            self.log("val_rows", float(sum(self.rows)))
            self.rows.clear()

    from pfl_lightning.data.samples import Samples
    from pfl_lightning.engines.evaluation import evaluate, metrics_of

    client = FedAvg(Whole(), (FEATURES,), CLASSES)
    samples = Samples(*points(1500, 0))
    found = evaluate(client, samples, metrics_of(client), torch.no_grad, "val")
    outputs = client(samples.x)
    assert found["rows"] == 1500
    assert found["loss"] == pytest.approx(5 * float(F.nll_loss(outputs, samples.y)), rel=1e-5)
    assert found["hits"] == pytest.approx(float((outputs.argmax(1) == samples.y).float().mean()))


@pytest.mark.exhaustive
def test_rounds_are_epochs_for_the_module():
    class Warm(Linear):
        def training_step(self, batch):
            found = super().training_step(batch)
            self.log("epoch", float(self.current_epoch))
            return found["loss"] * min(1.0, self.current_epoch / 2)

    data = data_of("linear")
    run = fit(FedAvg(Warm(), data.input_shape, task=data.task), data)
    assert [row["train/epoch"] for row in run.rows] == [0, 1, 2]
    assert run.rows[0]["train/loss"] == 0 < run.rows[1]["train/loss"]


@pytest.mark.parametrize("method", [FedALA, FedFomo, QFedAvg, PFedMe, PerFedAvg, partial(ControlVariates, option="I")])
@pytest.mark.by_default("PFedMe")
def test_methods_that_compute_losses_at_other_weights_take_the_module_s(method):
    # of the data's own task such a loss would be refused by `OwnLoss`
    one = train("linear", method)
    assert near(one.weights, train("linear", method, engine="vectorised").weights)


@pytest.mark.parametrize(
    ("method", "need"),
    [(MOON, "features"), (FML, "outputs"), (APFL, "outputs"), (FedLC, "outputs"), (APPLE, "loss of outputs")],
)
def test_methods_that_need_more_than_losses_and_weights_are_refused_before_the_first_round(method, need):
    data = data_of("classifier")
    trainer = make_trainer()
    with pytest.raises(MisconfigurationException) as refused:
        trainer.fit(client_of("classifier", method, data), datamodule=data)
    assert trainer.lightning_module.round == 0 or need == "loss of outputs"
    for word in (f"model {method.__name__}", need, "Classifier", "override", "FedPer"):
        assert word in str(refused.value)


class Tuple(Linear):
    """One whose forward gives several tensors, so that nothing says which layer is the last."""

    def forward(self, past, scale):
        return self.head(self.rnn(past)) * scale, scale

    def training_step(self, batch):
        return self(batch["past"], 1.0)[0].square().mean()

    validation_step = L.LightningModule.validation_step


def test_a_cut_needs_an_output_layer_and_a_name_gives_it():
    class Named(Tuple):
        def __init__(self):
            super().__init__()
            self.classifier = self.head

    class Exemplary(Tuple):
        example_input_array = {"past": torch.zeros(2, 4, 1), "scale": torch.ones(())}

    data = data_of("linear")
    assert len(fit(FedAvg(Tuple(), data.input_shape, task=data.task), data, monitor="val/loss").rows) == 3
    for method in (FedPer, FedBABU):
        with pytest.raises(MisconfigurationException, match=r"Tuple.*`classifier`.*example_input_array"):
            fit(method(Tuple(), data.input_shape, task=data.task), data, monitor="val/loss")
    for kind in (Named, Exemplary):
        client = FedPer(kind(), data.input_shape, task=data.task)
        assert [name for name, _ in client.named_parameters() if not client.is_shared(name)] == [
            "net.classifier.layer.weight",
            "net.classifier.layer.bias",
        ]
        fit(client, data, monitor="val/loss")


def overriding(hook, value, kind=Classifier):
    return type("Mine", (kind,), {hook: value})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAvg(Classifier(), optimizer=partial(SGD, lr=0.1)), r"model\.optimizer.*Classifier"),
        (lambda: FedAvg(overriding("on_train_epoch_end", print)(), (FEATURES,)), "Mine.*on_train_epoch_end"),
        (lambda: FedAvg(overriding("automatic_optimization", False)(), (FEATURES,)), "automatic_optimization=False"),
        (
            lambda: FedAvg(overriding("training_step", L.LightningModule.training_step)(), (FEATURES,)),
            "Mine.*no training_step",
        ),
        (lambda: FedAvg(Classifier(), (FEATURES,), task=Classification(3, class_weights="balanced")), "class_weights"),
    ],
)
def test_what_clients_would_pass_over_is_refused_when_made(make, words):
    with pytest.raises(MisconfigurationException, match=words):
        make()


def two_optimizers(self):
    return [SGD(self.body.parameters(), 0.1), SGD(self.fc.parameters(), 0.1)]


def by_step(self):
    optimizer = SGD(self.parameters(), 0.1)
    scheduler = {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def on_plateau(self):
    optimizer = SGD(self.parameters(), 0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("hook", "value", "words"),
    [
        ("configure_optimizers", two_optimizers, "Mine.configure_optimizers returns SGD, SGD"),
        ("configure_optimizers", by_step, "Mine.configure_optimizers.*interval='step'"),
        ("configure_optimizers", on_plateau, "Mine.configure_optimizers.*ReduceLROnPlateau"),
        ("training_step", lambda self, batch: None, "Mine.training_step returned NoneType without a loss"),
        ("training_step", lambda self, batch: self.optimizers(), r"no trainer\.strategy"),
        (
            "training_step",
            lambda self, batch: self.log("n", 1.0, reduce_fx="sum"),
            r"self\.log\('n', reduce_fx='sum'\)",
        ),
    ],
)
def test_what_clients_can_t_do_is_refused_before_the_first_round(hook, value, words):
    data = data_of("classifier")
    trainer = make_trainer()
    with pytest.raises(MisconfigurationException, match=words):
        trainer.fit(FedAvg(overriding(hook, value)(), data.input_shape, task=data.task), datamodule=data)
    assert trainer.lightning_module.round == 0


def test_a_step_that_keeps_a_client_s_data_is_refused():
    class Keeping(Classifier):
        def training_step(self, batch, batch_idx):
            self.last = batch
            return super().training_step(batch, batch_idx)

    data = data_of("classifier")
    with pytest.raises(MisconfigurationException, match=re.escape("attribute net.features.module.last")):
        fit(FedAvg(Keeping(), data.input_shape, task=data.task), data)


def test_own_loss_needs_a_module_with_one():
    data = data_of("autoencoder")
    with pytest.raises(MisconfigurationException, match=r"OwnLoss.*training_step"):
        fit(FedAvg(plain, data.input_shape, task=data.task), data)


def test_a_monitor_that_is_not_logged_is_refused_before_the_first_round(tmp_path):
    _, items, _ = OWN["linear"]
    data = ClientDatasets({"a": (items(20, 0), items(9, 1))}, OwnLoss("rmse", "min"))
    trainer = make_trainer(tmp_path)
    with pytest.raises(MisconfigurationException, match="Linear logs mae, loss and no rmse"):
        trainer.fit(FedAvg(Linear(), data.input_shape, task=data.task), datamodule=data)
    assert trainer.lightning_module.round == 0
    with pytest.raises(MisconfigurationException, match=r"trainer\.monitor='val/mae'.*OwnLoss\(monitor='mae'"):
        train("linear", monitor="val/mae")
