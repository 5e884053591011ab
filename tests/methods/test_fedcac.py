import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, drawn_update, equal, fit, make_client, noisy, set_up
from pfl_lightning.aggregators import CriticalAverage
from pfl_lightning.methods import FedAvg, FedCAC
from pfl_lightning.methods.fedcac import critical, overlaps, packed, unpacked

NAMES = [f"net.{name}" for name, _ in make_client(net=noisy).net.named_parameters()]


def masks(seed, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(make_client(net=noisy).named_parameters())
    return {name: critical(torch.rand(parameters[name].shape, generator=generator), share) for name in NAMES}


def update(seed, size=10):
    model = make_client(FedCAC, net=noisy)
    return drawn_update(model, seed, size, critical={name: packed(mask) for name, mask in masks(seed).items()})


@pytest.mark.parametrize("shape", [(3,), (8,), (5, 7), ()])
def test_bits_are_unpacked_as_they_were(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    assert len(packed(mask)) == -(-mask.numel() // 8)
    assert torch.equal(unpacked(packed(mask), mask.numel()).reshape(shape), mask)


def test_the_most_sensitive_entries_are_critical():
    assert critical(torch.tensor([[4.0, 1.0], [3.0, 2.0]]), 0.5).tolist() == [[True, False], [True, False]]
    assert critical(torch.tensor([5.0]), 0.9).tolist() == [False], "rounded down"
    assert critical(torch.tensor([1.0, 1.0, 1.0]), 0.4).tolist() == [True] * 3, "equals at the margin"
    assert critical(torch.tensor([0.0, 2.0, 0.0, 0.0]), 0.5).tolist() == [False, True, False, False]
    assert not critical(torch.zeros(4), 1.0).any()


def test_clients_tell_what_is_critical_by_change_times_value():
    spy = Spy()
    fit(make_client(partial(FedCAC, tau=0.3), net=noisy), callbacks=[spy], max_rounds=1)
    start = make_client(net=noisy).state_dict()
    for sent in spy.updates[0].values():
        for name in NAMES:
            y = sent["weights"][name]
            sensitivity = ((y - start[name]) * y).abs().flatten()
            mask = unpacked(sent["critical"][name], y.numel())
            assert int(mask.sum()) == min(int(0.3 * y.numel()), int((sensitivity > 0).sum()))
            assert mask.all() or not mask.any() or sensitivity[mask].min() >= sensitivity[~mask].max()


def test_overlaps_by_hand():
    one, other = masks(1, 0.5), masks(2, 0.2)
    ours = overlaps([{n: packed(m) for n, m in each.items()} for each in (one, other)])
    a, b = (torch.cat([each[name].flatten() for name in NAMES]).double() for each in (one, other))
    differing = float((a - b).abs().sum())
    expected = [[1.0, 1 - differing / (2 * float(a.sum()))], [1 - differing / (2 * float(b.sum())), 1.0]]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))
    none = {name: packed(torch.zeros_like(mask)) for name, mask in one.items()}
    assert overlaps([none, none]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("round", [0, 9, 10])
@pytest.mark.by_default("9")
def test_a_round_by_a_second_implementation(round):
    """With beta 10: many are together at first, the closest pair in the tenth round, and nobody after it."""
    model = make_client(FedCAC, net=noisy).double()
    ours = set_up(CriticalAverage(beta=10.0), model)
    updates = {k: drawn_update(model, k, 10 + k, critical=update(k)["critical"]) for k in (0, 2, 3, 5)}
    log = ours.aggregate(updates, round)
    bits = {k: torch.cat([masks(k)[name].flatten() for name in NAMES]).double() for k in updates}
    overlap = {
        (k, j): 1 - float((bits[k] - bits[j]).abs().sum()) / (2 * float(bits[k].sum()))
        for k in updates
        for j in updates
        if k != j
    }
    middle, largest = sum(overlap.values()) / len(overlap), max(overlap.values())
    threshold = middle + (round + 1) / 10 * (largest - middle)
    total, sizes = sum(10 + k for k in updates), []
    for k, sent in updates.items():
        alike = [k, *(j for j in updates if j != k and overlap[k, j] >= threshold - 1e-12)]
        sizes.append(len(alike))
        received = ours.download(k)["weights"]
        for name in sent["weights"]:
            x = sum((10 + j) / total * updates[j]["weights"][name].double() for j in updates)
            u = sum(updates[j]["weights"][name].double() for j in alike) / len(alike)
            if name not in NAMES:
                if x.is_floating_point() and "num_batches" not in name:
                    torch.testing.assert_close(received[name], x)
                continue
            torch.testing.assert_close(received[name], torch.where(masks(k)[name], u, x), rtol=0, atol=1e-12)
    assert log == {"overlap": pytest.approx(middle), "together": sum(sizes) / 4}
    closest = sum(o > largest - 1e-12 for o in overlap.values())
    assert {0: sum(sizes) >= 4 + closest, 9: sum(sizes) == 4 + closest, 10: sum(sizes) == 4}[round]


def test_who_stayed_away_keeps_what_is_critical_and_who_is_new_gets_the_mean():
    ours = set_up(CriticalAverage(), make_client(FedCAC, net=noisy))
    ours.aggregate({0: update(0), 1: update(1)}, 0)
    before = ours.download(0)["weights"]
    ours.aggregate({1: update(7), 2: update(8)}, 1)
    after, mean = ours.download(0)["weights"], ours.global_model()
    for name in NAMES:
        mask = masks(0)[name]
        assert torch.equal(after[name][mask], before[name][mask])
        assert torch.equal(after[name][~mask], mean[name][~mask])
    assert equal(ours.download(3)["weights"], mean) and equal(ours.welcome(9, None)["weights"], mean)


def test_without_critical_parameters_it_is_fedavg_bit_for_bit_and_with_them_is_not():
    settings = {"clients_per_round": 3}
    off, on, average = (fit(make_client(m, net=noisy), **settings) for m in (partial(FedCAC, tau=0.0), FedCAC, FedAvg))
    assert equal(off.weights, average.weights)
    assert not equal(on.weights, average.weights)


def test_one_client_is_trained_alone_and_nobody_changes_nothing():
    run = fit(make_client(FedCAC), blobs(40))
    torch.testing.assert_close(run.weights, fit(make_client(FedAvg), blobs(40)).weights)
    ours = run.federation.aggregator
    before = copy.deepcopy(ours.state)
    assert ours.aggregate({}, 5) == {} and equal(ours.state, before)


@pytest.mark.parametrize(("make", "name"), [(partial(make_client, FedCAC, tau=2.0), "tau"), (CriticalAverage, "beta")])
def test_what_is_out_of_range_is_refused_by_name(make, name):
    with pytest.raises(MisconfigurationException, match=rf"(model|aggregator)\.{name}="):
        make() if name == "tau" else make(beta=0.0)
