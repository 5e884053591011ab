from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import Spy, equal, fit, flat, make_client, near
from pfl_lightning import WeightedAverage
from pfl_lightning.methods import ControlVariates, DPScaffold, FedAvg
from pfl_lightning.methods.scaffold import SCAFFOLD
from pfl_lightning.privacy import DPSGD

STEP = partial(SGD, lr=0.1)
PRIVATE = {"example_privacy": DPSGD(noise_multiplier=0.5, clip=1.0)}
ENGINES = ["sequential", "vectorised"]


class Started(SCAFFOLD):
    """A server whose control variate isn't 0 at first."""

    example_level = True

    def setup(self, server):
        super().setup(server)
        self.state["control"] = torch.linspace(-1, 1, len(self.state["control"]))


def sent(engine="sequential", **settings):
    spy = Spy()
    run = fit(make_client(DPScaffold, optimizer=STEP), callbacks=[spy], engine=engine, **settings)
    return run, spy.updates


def test_without_privacy_it_is_scaffold_up_to_rounding():
    mine, _ = sent()
    other = fit(make_client(ControlVariates, optimizer=STEP))
    assert near(dict(mine.weights), dict(other.weights))
    assert near(mine.federation.aggregator.state["control"], other.federation.aggregator.state["control"], atol=1e-4)


def test_while_all_variates_are_0_it_is_the_private_average_bit_for_bit():
    run, _ = sent(max_rounds=1, **PRIVATE)
    average = WeightedAverage(weighting="uniform")
    plain = fit(make_client(FedAvg, optimizer=STEP), aggregator=average, max_rounds=1, **PRIVATE)
    assert equal({n: run.weights[n] for n in plain.weights}, dict(plain.weights))
    assert run.rows[0]["privacy/epsilon"] == plain.rows[0]["privacy/epsilon"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_correction_comes_after_the_noise_and_is_not_bounded(engine):
    # gradients and noise of length 1e-6, and a correction of length 4
    private = {"example_privacy": DPSGD(noise_multiplier=1.0, clip=1e-6)}
    _, updates = sent(engine, aggregator=Started(), max_rounds=1, local_steps=3, **private)
    start = make_client(DPScaffold).net.state_dict()
    correction = torch.linspace(-1, 1, sum(t.numel() for t in start.values()))
    for update in updates[0].values():
        moved = flat(start, start) - flat(update["weights"], [f"net.{name}" for name in start])
        torch.testing.assert_close(moved, 3 * 0.1 * correction, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(update["control"], torch.zeros_like(correction), atol=1e-4, rtol=0)


def test_the_control_variates_by_hand_follow_from_weights_alone():
    _, updates = sent(max_rounds=2, local_steps=4, **PRIVATE)
    names = list(make_client(DPScaffold).net.state_dict())
    start = flat(make_client(DPScaffold).net.state_dict(), names)
    prefixed = [f"net.{name}" for name in names]
    y = {client: flat(update["weights"], prefixed) for client, update in updates[0].items()}
    # c and c_i are 0 in the first round
    own = {client: (start - w) / 0.4 for client, w in y.items()}
    c, x = sum(own.values()) / 4, sum(y.values()) / 4
    for client, update in updates[0].items():
        torch.testing.assert_close(update["control"], own[client], atol=1e-4, rtol=1e-4)
    for client, update in updates[1].items():
        new = own[client] - c + (x - flat(update["weights"], prefixed)) / 0.4
        torch.testing.assert_close(update["control"], new - own[client], atol=1e-3, rtol=1e-3)


def test_who_corrects_in_the_loss_or_does_not_say_so_is_refused():
    class Quiet(DPScaffold):
        """One that might send anything."""

        example_level = True

    for kind in (ControlVariates, Quiet):
        with pytest.raises(MisconfigurationException, match=f"control, which model={kind.__name__} sends"):
            fit(make_client(kind, optimizer=STEP), **PRIVATE)


def test_option_one_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.option='I'"):
        make_client(DPScaffold, option="I")
