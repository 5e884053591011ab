import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import Spy, check_batches_of_one, drawn_update, equal, fit, flat, make_client, noisy, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FairAverage
from pfl_lightning.methods import FedAvg, QFedAvg
from pfl_lightning.methods.scaffold import ControlVariates


def update(model, seed, loss, lr=0.1, size=10):
    return drawn_update(model, seed, size, received_loss=torch.tensor(loss), learning_rate=torch.tensor(lr))


@pytest.mark.parametrize("q", [0.001, 1.0, 5.0])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_round_by_the_paper_s_formula(q, weighting):
    model = make_client(net=noisy).double()
    ours = set_up(FairAverage(q=q, weighting=weighting), model)
    names = [name for name, _ in model.named_parameters()]
    x, lr = flat(ours.global_model(), names), 0.1
    updates = {k: update(model, k, loss, lr, 10 + 5 * k) for k, loss in ((1, 0.4), (2, 2.5), (3, 0.9))}
    ours.aggregate(updates, 0)
    above, below = 0.0, 0.0
    for u in updates.values():
        n = float(u["num_samples"]) if weighting == "samples" else 1.0
        loss, g = float(u["received_loss"]) + 1e-10, (x - flat(u["weights"], names)) / lr
        above = above + n * loss**q * g
        below = below + n * (q * loss ** (q - 1) * float(g @ g) + loss**q / lr)
    torch.testing.assert_close(flat(ours.global_model(), names), x - above / below, rtol=0, atol=1e-7)
    buffer = "net.features.1.running_mean"
    n = [float(u["num_samples"]) if weighting == "samples" else 1.0 for u in updates.values()]
    mean = sum(w * u["weights"][buffer] for w, u in zip(n, updates.values(), strict=True)) / sum(n)
    torch.testing.assert_close(ours.global_model()[buffer], mean)


def test_with_q_zero_it_is_the_plain_mean_bit_for_bit_and_else_is_not():
    runs = [
        fit(make_client(method, net=noisy), aggregator=aggregator, clients_per_round=3).weights
        for method, aggregator in (
            (FedAvg, WeightedAverage(weighting="uniform")),
            (QFedAvg, FairAverage(q=0)),
            (QFedAvg, FairAverage(q=1)),
        )
    ]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


@pytest.mark.parametrize("loss", [0.7, 1e30])
def test_one_client_shrinks_its_own_step(loss):
    model = make_client().double()
    ours, sent = set_up(FairAverage(q=2.0), model), update(make_client().double(), 1, loss)
    names = list(sent["weights"])
    x, y = flat(ours.global_model(), names), flat(sent["weights"], names)
    ours.aggregate({1: sent}, 0)
    expected = x + (y - x) / (1 + 2.0 * float((y - x) @ (y - x)) / 0.1 / loss)
    torch.testing.assert_close(flat(ours.global_model(), names), expected, rtol=1e-6, atol=1e-6)


def test_a_client_that_fares_badly_counts_for_more():
    model = make_client().double()
    moved = []
    for losses in ((0.1, 2.0), (2.0, 0.1)):
        ours = set_up(FairAverage(q=1.0), model)
        updates = {k: update(model, k, loss) for k, loss in zip((1, 2), losses, strict=True)}
        names = list(updates[1]["weights"])
        x, a, b = (flat(w, names) for w in (ours.global_model(), updates[1]["weights"], updates[2]["weights"]))
        ours.aggregate(updates, 0)
        way = flat(ours.global_model(), names) - x
        moved.append(torch.linalg.lstsq(torch.stack([a - x, b - x], 1), way[:, None]).solution.flatten())
    assert moved[0][1] / moved[0][0] == pytest.approx(20.0) and moved[1][0] / moved[1][1] == pytest.approx(20.0)


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_clients_without_loss_or_without_a_change_move_nothing(change):
    model = make_client().double()
    ours = set_up(FairAverage(q=1.0), model)
    x = ours.global_model()
    sent = update(model, 1, loss=0.0 if change else 3.0, lr=0.1 if change else 0.0)
    sent["weights"] = {name: tensor + change for name, tensor in x.items()}
    ours.aggregate({1: sent}, 0)
    torch.testing.assert_close(ours.global_model(), x, rtol=0, atol=1e-8)


def test_the_loss_is_of_the_received_model_in_evaluation_mode():
    spy = Spy()
    run = fit(make_client(QFedAvg, net=noisy), callbacks=[spy], max_rounds=1)
    net = make_client(net=noisy).net.eval()
    for client, sent in spy.updates[0].items():
        part = run.data.part(client, "train")
        assert float(sent["received_loss"]) == pytest.approx(F.cross_entropy(net(part.x), part.y).item(), rel=1e-5)
        assert float(sent["learning_rate"]) == pytest.approx(0.1)
    assert all("received_loss" not in state.personal for state in run.federation.clients.values())


def test_nobody_taking_part_changes_nothing():
    ours = set_up(FairAverage(), make_client())
    before = copy.deepcopy(ours.state)
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(QFedAvg), max_rounds=4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.q=-1 must be 0"):
        FairAverage(q=-1)
    with pytest.raises(MisconfigurationException, match="FairAverage needs learning_rate and received_loss, which"):
        fit(make_client(ControlVariates), aggregator=FairAverage())
