"""Optimizers and schedules that clients train by, of the settings or of an overridden ``configure_optimizers``."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD, Adagrad, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

from federations import MOMENTUM, blobs, equal, fit, make_client
from pfl_lightning.engines import Processes, Sequential, Vectorised
from pfl_lightning.methods import APPLE, FedNova, FedPer, FedRep
from pfl_lightning.methods.fedavg import FedAvg

ADAM = partial(Adam, lr=0.05)


def overriding(method, configure):
    """A method whose client side configures its optimizer as Lightning's modules do."""
    return type("Own", (method,), {"configure_optimizers": configure})


def adam(module):
    return ADAM(module.parameters())


def trainable_adam(module):
    return ADAM([p for p in module.parameters() if p.requires_grad])


def scheduled(module):
    optimizer = adam(module)
    return [optimizer], [{"scheduler": ExponentialLR(optimizer, gamma=0.5), "interval": "epoch"}]


class Rates(FedAvg):
    """Logs the learning rate that it trains by."""

    def training_step(self, batch, batch_idx):
        self.log("rate", torch.tensor(self.learning_rate, dtype=torch.float64))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("configure", "engine"),
    [(adam, Sequential), (adam, Processes), (adam, Vectorised), (trainable_adam, Sequential)],
)
@pytest.mark.by_default("adam-Vectorised", "trainable_adam-Sequential")
def test_clients_train_by_an_overridden_configure_optimizers(configure, engine):
    settings = {"max_rounds": 2, "engine": engine}
    own = fit(make_client(overriding(FedRep, configure), optimizer=MOMENTUM), **settings)
    by_setting = fit(make_client(FedRep, optimizer=ADAM), **settings)
    assert equal(own.weights, by_setting.weights)
    assert {row["lr"] for row in own.rows} == {0.05}


def test_its_state_lives_on_with_the_client():
    settings = {"optimizer_lifetime": "run"}
    own = fit(make_client(overriding(FedPer, adam), **settings))
    assert equal(own.weights, fit(make_client(FedPer, optimizer=ADAM, **settings)).weights)
    assert not equal(own.weights, fit(make_client(overriding(FedPer, adam))).weights)


def test_its_schedule_steps_once_a_round():
    own = fit(make_client(overriding(Rates, scheduled)))
    by_setting = fit(make_client(Rates, optimizer=ADAM, lr_scheduler=partial(ExponentialLR, gamma=0.5)))
    assert equal(own.weights, by_setting.weights)
    assert [row["train/rate"] for row in own.rows] == [row["lr"] for row in own.rows] == [0.05, 0.025, 0.0125]


@pytest.mark.parametrize("by_setting", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [
        partial(LinearLR, start_factor=0.25),
        partial(CosineAnnealingLR, T_max=3),
        partial(OneCycleLR, max_lr=1.0, total_steps=5, cycle_momentum=False),
        partial(CyclicLR, base_lr=0.02, max_lr=0.3, step_size_up=2, cycle_momentum=False),
    ],
    ids=lambda schedule: schedule.func.__name__,
)
def test_the_recorded_rate_is_the_one_that_clients_train_by(schedule, by_setting):
    def configure(module):
        optimizer = MOMENTUM(module.parameters())
        return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}

    model = make_client(Rates, lr_scheduler=schedule) if by_setting else make_client(overriding(Rates, configure))
    expected = configure(make_client())
    for row in fit(model).rows:
        rate = expected["optimizer"].param_groups[0]["lr"]
        assert row["lr"] == pytest.approx(rate) and row["train/rate"] == pytest.approx(rate)
        expected["optimizer"].step()
        expected["lr_scheduler"].step()


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_parameter_groups_keep_their_settings(engine):
    def configure(module):
        classifier = {"params": module.net.classifier.parameters(), "lr": 0.5}
        return SGD([{"params": module.net.features.parameters()}, classifier], lr=0.1)

    class ByPhase(FedRep):
        def local_optimizer(self, phase, parameters):
            return SGD(parameters, lr=0.5 if phase.name == "head" else 0.1)

    phases = [phase.name for phase in make_client(FedRep).local_phases()]
    assert "head" in phases and len(phases) == 2
    own = fit(make_client(overriding(FedRep, configure)), engine=engine)
    assert equal(own.weights, fit(make_client(ByPhase), engine=engine).weights)


def test_what_it_leaves_out_stands_still():
    model = make_client(overriding(FedAvg, lambda module: Adagrad(module.net.classifier.parameters(), lr=0.1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = fit(model).weights
    # an average of equal weights may be off by rounding
    moved = {name for name, tensor in before.items() if not torch.allclose(tensor, after[name])}
    assert moved == {name for name in before if name.startswith("net.classifier")}


def test_a_method_with_groups_of_its_own_trains_by_it_too():
    own = fit(make_client(overriding(APPLE, adam), optimizer=MOMENTUM))
    assert equal(own.weights, fit(make_client(APPLE, optimizer=ADAM)).weights)


def test_it_may_read_what_the_constructor_sets_later():
    class Later(FedAvg):
        def __init__(self, lr, **settings):
            super().__init__(**settings)
            self.lr = lr

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=self.lr)

    run = fit(make_client(Later, lr=0.3))
    assert equal(run.weights, fit(make_client(optimizer=partial(SGD, lr=0.3))).weights)


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda module: None, "returns NoneType, .*one optimizer"),
        (lambda module: [adam(module), adam(module)], "returns Adam, Adam, .*one optimizer"),
        (lambda module: LBFGS(module.parameters()), "=LBFGS computes the loss again"),
        (lambda module: SGD(module.parameters(), lr=float("nan")), r"\.lr=nan must be finite"),
        (lambda module: Adam(torch.nn.Linear(2, 2).parameters()), "parameter of shape .* wasn't given"),
        (
            lambda module: {
                "optimizer": (optimizer := adam(module)),
                "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"},
            },
            "once a round.*interval='step'",
        ),
        (
            lambda module: {"optimizer": (o := adam(module)), "lr_scheduler": ReduceLROnPlateau(o)},
            "ReduceLROnPlateau waits for a metric",
        ),
    ],
)
def test_what_clients_cannot_train_by_is_refused_before_the_first_round(configure, words):
    with pytest.raises(MisconfigurationException, match=rf"^Own\.configure_optimizers.*{words}"):
        fit(make_client(overriding(FedAvg, configure)))


def test_a_schedule_that_is_not_used_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Own\.configure_optimizers.*model\.lr_scheduler"):
        fit(make_client(overriding(FedAvg, adam), lr_scheduler=partial(ExponentialLR, gamma=0.5)))


def test_a_phase_of_nothing_that_it_has_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Own\.configure_optimizers.*phase 'head'"):
        fit(make_client(overriding(FedRep, lambda module: ADAM(module.net.features.parameters()))))
    with pytest.raises(MisconfigurationException, match=r"Own\.configure_optimizers.*model\.optimizer"):
        make_client(overriding(FedNova, adam))


def test_a_schedule_of_several_rates_is_refused():
    def groups(parameters):
        return SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)

    factors = [lambda round: 1.0, *[lambda round: 0.5**round] * 3]
    with pytest.raises(MisconfigurationException, match=r"model\.lr_scheduler=LambdaLR .*different factors in round 2"):
        fit(make_client(optimizer=groups, lr_scheduler=partial(LambdaLR, lr_lambda=factors)))


@pytest.mark.parametrize("schedule", [OneCycleLR, CyclicLR])
def test_a_schedule_that_would_move_the_momentum_is_refused(schedule):
    settings = {"max_lr": 1, "total_steps": 9} if schedule is OneCycleLR else {"max_lr": 1, "base_lr": 0.1}
    with pytest.raises(MisconfigurationException, match="cycle_momentum=False"):
        make_client(lr_scheduler=partial(schedule, **settings))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_parameters_that_are_not_the_phase_s_are_refused(engine):
    foreign = torch.nn.Linear(2, 2)

    class Own(FedAvg):
        def local_optimizer(self, phase, parameters):
            return SGD([*parameters, *foreign.parameters()], lr=0.1)

    with pytest.raises(MisconfigurationException, match=r"^Own\.local_optimizer\('train'\).*\[2, 2\]"):
        fit(make_client(Own), blobs(), engine=engine)
    with pytest.raises(MisconfigurationException, match=r"^model\.optimizer has a parameter of shape \[2, 2\]"):
        make_client(optimizer=lambda parameters: SGD(foreign.parameters(), lr=0.1))


def test_an_optimizer_in_the_place_of_what_builds_one_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^model\.optimizer=SGD\(.*partial\(SGD, lr=0\.1\)"):
        make_client(optimizer=SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": lambda parameters: torch.nn.Linear(2, 2)}, "builds a Linear and no optimizer"),
        ({"lr_scheduler": partial(ExponentialLR)}, r"^model\.lr_scheduler: .*gamma"),
    ],
    ids=["optimizer", "schedule"],
)
def test_what_builds_something_else_or_lacks_a_setting_is_refused(settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        make_client(**settings)
