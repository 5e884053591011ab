"""Training and evaluation mode: what ``eval()`` has frozen stays frozen in every engine, as under a plain Trainer."""

import copy
from functools import partial

import lightning
import pytest
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from federations import FEATURES, HIDDEN, blobs, fit, make_client, make_trainer, noisy, same_end
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines import Processes, processes
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.methods import FedAvg, FedBABU
from pfl_lightning.nets import Net

ENGINES = ["sequential", "vectorised", "processes", "auto"]
MEAN = "net.features.1.running_mean"


@pytest.fixture(autouse=True)
def workers_pay(monkeypatch):
    """Workers are forked for clients that take milliseconds too."""
    monkeypatch.setattr(processes, "WORTH", 1e-9)
    monkeypatch.setattr(Processes, "_workers_for", lambda self, what, jobs: min(2, jobs))


class KeepsItself(Net):
    """Leaves its BatchNorm in evaluation mode, whoever asks for another."""

    def train(self, mode=True):
        super().train(mode)
        self.features[1].eval()
        return self


def keeping_itself(input_shape, num_classes):
    net = noisy(input_shape, num_classes)
    return KeepsItself(net.features, net.classifier)


def frozen(model):
    model.net.features[1].eval()
    return model


MAKE = {
    "by eval": lambda method=FedAvg: frozen(make_client(method, net=noisy)),
    "by train": lambda method=FedAvg: make_client(method, net=keeping_itself),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", MAKE)
@pytest.mark.by_default("by eval-sequential", "by train-vectorised")
def test_statistics_of_a_frozen_layer_stand_still(how, engine):
    run = fit(MAKE[how](), engine=engine, workers=2, evaluate="both")
    assert not run.weights[MEAN].any()
    assert fit(make_client(net=noisy), engine=engine, workers=2).weights[MEAN].any()


@pytest.mark.parametrize("how", MAKE)
@pytest.mark.by_default("by eval")
def test_so_they_do_on_ranks_and_where_an_evaluation_trains(how):
    run = fit(MAKE[how](), devices=2, strategy=ClientParallel(start_method="fork"))
    assert not run.model.state_dict()[MEAN].any()
    run = fit(MAKE[how](FedBABU), blobs(), test_every_round=True)
    assert not run.weights[MEAN].any()


@pytest.mark.parametrize("engine", ENGINES[:3])
@pytest.mark.by_default(but=["processes"])
def test_frozen_dropout_drops_nothing(engine):
    def without(input_shape, num_classes):
        net = noisy(input_shape, num_classes)
        net.features[3].p = 0.0
        return net

    model = make_client(net=noisy)
    model.net.features[3].eval()
    settings = {"engine": engine, "workers": 2}
    assert same_end(fit(model, **settings), fit(make_client(net=without), **settings))


class Modes(FederatedCallback):
    """Keeps the modes of the client module at the hooks of rounds."""

    def __init__(self):
        self.seen = {}

    def look(self, hook, federation):
        self.seen.setdefault(hook, set()).add(tuple(m.training for m in federation.client.net.features))

    def on_train_epoch_end(self, trainer, federation):
        self.look("train", federation)

    def on_validation_epoch_end(self, trainer, federation):
        self.look("validation", federation)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.by_default(but=["processes"])
def test_modes_are_as_they_were_outside_of_rounds_and_evaluation_mode_within_an_evaluation(engine):
    given, none = (True, False, True, True), (False,) * 4
    model = MAKE["by eval"]()
    run = fit(model, callbacks=[modes := Modes()], engine=engine, workers=2)
    assert modes.seen == {"train": {given}, "validation": {none}}
    run.trainer.validate(model, datamodule=run.data, verbose=False)
    run.trainer.test(model, datamodule=run.data, verbose=False)
    assert tuple(m.training for m in model.net.features) == given


def test_a_module_is_trained_again_as_it_was_given_after_an_error():
    class Failing(FederatedCallback):
        def on_client_fit_end(self, trainer, federation, client, outcome):
            raise KeyError("lost")

    model = MAKE["by eval"]()
    with pytest.raises(KeyError):
        fit(model, callbacks=[Failing()])
    assert [m.training for m in model.net.features] == [True, False, True, True]
    trainer = make_trainer()
    trainer.validate(model, datamodule=blobs(), verbose=False)
    trainer.fit(model, datamodule=blobs())
    assert not model.state_dict()[MEAN].any() and model.net.features[0].training


class AlwaysDrops(nn.Dropout):
    """Drops in an evaluation too."""

    def train(self, mode=True):
        return super().train(True)


def test_an_own_train_is_asked_in_an_evaluation_too():
    def net(input_shape, num_classes):
        return Net(nn.Sequential(nn.Linear(FEATURES, HIDDEN), AlwaysDrops(0.9)), nn.Linear(HIDDEN, num_classes))

    still = partial(SGD, lr=0.0)
    run = fit(make_client(net=net, optimizer=still), max_rounds=3)
    assert len({row["val/loss"] for row in run.rows}) > 1


def test_a_copy_of_a_module_in_a_round_keeps_its_own_modes():
    class Copying(FederatedCallback):
        def on_client_fit_end(self, trainer, federation, client, outcome):
            self.copy = copy.deepcopy(federation.client)

    fit(MAKE["by eval"](), callbacks=[copying := Copying()])
    fit(copying.copy)
    assert not copying.copy.state_dict()[MEAN].any()
    assert [m.training for m in copying.copy.net.features] == [True, False, True, True]


@pytest.mark.parametrize(("make", "moves"), [(MAKE["by eval"], False), (partial(make_client, net=noisy), True)])
def test_a_plain_trainer_does_the_same(make, moves):
    model, data = make(), blobs()
    data.setup()
    part = data.part(0, "train")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(model, DataLoader(TensorDataset(part.x, part.y), batch_size=5, drop_last=True))
    assert bool(model.state_dict()[MEAN].any()) == moves
