"""Low-rank adapters on the server: names, products of stacks, and what a mean of factors misses."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.server.adapters import (
    deviations,
    factors,
    is_first,
    is_second,
    norm,
    pairs,
    product_error,
    summed,
    truncated,
)

SHARES = {0: 0.5, 3: 0.2, 4: 0.3}


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def updates_of(o=7, i=6, r=2, spread=1.0):
    """Three clients with one layer, near to or far from each other."""
    a, b = drawn(r, i, seed=1), drawn(o, r, seed=2)
    return {
        client: {
            "weights": {
                "l.lora_A.default.weight": a + spread * drawn(r, i, seed=10 + client),
                "l.lora_B.default.weight": b + spread * drawn(o, r, seed=20 + client),
            }
        }
        for client in SHARES
    }


def by_hand(updates):
    """M and the product of means."""
    (pair,) = pairs(updates[0]["weights"])
    a, b = factors(updates, pair)
    shares = SHARES.values()
    mean = sum(p * y @ x for p, x, y in zip(shares, a, b, strict=True))
    mean_a, mean_b = (sum(p * t for p, t in zip(shares, each, strict=True)) for each in (a, b))
    return mean, mean_b @ mean_a


def test_pairs_are_found_by_name():
    names = [
        "net.q.base_layer.weight",
        "net.q.lora_B.own.weight",
        "net.q.lora_A.own.weight",
        "net.e.lora_embedding_A.default",
        "net.e.lora_embedding_B.default",
        "net.v.lora_A.default.weight",
    ]
    found = pairs(names)
    assert [tuple(pair) for pair in found] == [
        ("net.q", "own", names[2], names[1]),
        ("net.e", "default", names[3], names[4]),
    ]
    assert [is_first(name) for name in names] == [False, False, True, True, False, True]
    assert [is_second(name) for name in names] == [False, True, False, False, True, False]


def test_the_error_of_means_is_the_covariance_of_factors():
    updates = updates_of()
    mean, of_means = by_hand(updates)
    a, b = factors(updates, pairs(updates[0]["weights"])[0])
    left, right = summed(deviations(a, b, list(SHARES.values())), list(SHARES.values()))
    torch.testing.assert_close(left @ right, mean - of_means, atol=1e-14, rtol=0)
    left, right = summed(list(zip(b, a, strict=True)), list(SHARES.values()))
    torch.testing.assert_close(left @ right, mean, atol=1e-14, rtol=0)
    assert norm(left, right) == pytest.approx(float(mean.norm()))
    # the other way of shapes: wider than the stacks
    assert norm(right.T, left.T) == pytest.approx(float(mean.norm()))


def test_the_error_is_relative_over_all_layers_and_of_second_order():
    updates = updates_of()
    (pair,) = pairs(updates[0]["weights"])
    mean, of_means = by_hand(updates)
    expected = float((mean - of_means).norm() / mean.norm())
    assert product_error(updates, SHARES, {pair: 4.0}) == pytest.approx(expected)
    small, smaller = (product_error(updates_of(spread=s), SHARES, {pair: 1.0}) for s in (1e-2, 1e-3))
    assert small / smaller == pytest.approx(100, rel=0.1)
    two = {
        k: {"weights": u["weights"] | {n.replace("l.", "k."): 3 * t for n, t in u["weights"].items()}}
        for k, u in updates.items()
    }
    first, second = pairs(two[0]["weights"])
    both = product_error(two, SHARES, {first: 1.0, second: 0.5})
    assert both == pytest.approx(expected)
    assert product_error(two, SHARES, {first: 1.0, second: 0.0}) == pytest.approx(expected)


def test_equal_clients_one_client_one_factor_and_zeros_have_no_error():
    updates = updates_of()
    (pair,) = pairs(updates[0]["weights"])
    alone = {4: updates[4]}
    assert product_error(alone, {4: 1.0}, {pair: 2.0}) == 0
    for name in (pair.a, pair.b):
        shared = {k: {"weights": u["weights"] | {name: updates[0]["weights"][name]}} for k, u in updates.items()}
        assert product_error(shared, SHARES, {pair: 1.0}) < 1e-15
    zeros = {k: {"weights": u["weights"] | {pair.b: torch.zeros(7, 2).double()}} for k, u in updates.items()}
    assert product_error(zeros, SHARES, {pair: 1.0}) == 0


@pytest.mark.parametrize(("o", "i", "m"), [(9, 8, 4), (3, 8, 6), (8, 3, 6), (5, 5, 5)])
def test_the_truncation_is_that_of_the_dense_product(o, i, m):
    left, right = drawn(o, m, seed=3), drawn(m, i, seed=4)
    u, s, v = truncated(left, right, 2)
    dense = torch.linalg.svd(left @ right, full_matrices=False)
    torch.testing.assert_close(s[: min(o, i)], dense.S[: len(s)])
    torch.testing.assert_close(u * s[:2] @ v, dense.U[:, :2] * dense.S[:2] @ dense.Vh[:2])
    # Eckart and Young: the error is that of what is left out
    missed = float((left @ right - u * s[:2] @ v).norm())
    assert missed == pytest.approx(float(s[2:].norm()), abs=1e-12)
    # signs don't depend on those of the factors
    other = truncated(-left, -right, 2)
    torch.testing.assert_close(u, other[0])
    assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()


def test_a_convolution_has_its_places_among_its_inputs():
    weights = {"l.lora_A.default.weight": torch.randn(2, 3, 5, 5), "l.lora_B.default.weight": torch.randn(4, 2, 1, 1)}
    a, b = factors({0: {"weights": weights}}, pairs(weights)[0])
    assert a[0].shape == (2, 75) and b[0].shape == (4, 2)


def test_a_layer_without_a_scale_is_refused_by_its_name():
    (pair,) = pairs(["l.lora_A.x.weight", "l.lora_B.x.weight"])
    module = nn.ModuleDict({"l": nn.Linear(1, 1)})
    with pytest.raises(MisconfigurationException, match=r"l has l\.lora_A\.x\.weight and no scaling\['x'\]"):
        pair.scale(module)
    module["l"].scaling = {"x": 0.5}
    assert pair.scale(module) == 0.5 and not pair.is_transposed(module)
    module["l"].fan_in_fan_out = True
    assert pair.is_transposed(module)
