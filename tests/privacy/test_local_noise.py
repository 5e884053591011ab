"""Noise of one client's update: what an adversary who sees it can tell, and what it is on average."""

import math

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.integrate import quad
from scipy.stats import beta, kstest, laplace

from pfl_lightning.privacy import Laplace, PrivUnit
from pfl_lightning.privacy.local import Cap, noised_share

DRAWS = 8_000


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def many(local, change, draws=DRAWS, seed=0):
    source = local.draws(seed)
    return torch.stack([local.noised(change, source) for _ in range(draws)])


# The adversary


def bound(a, b):
    """A bound on the log of the ratio of an event's probabilities, at 99.9 %: Clopper and Pearson."""
    hits, misses = int(a.sum()), int(b.sum())
    return math.log(beta.ppf(0.0005, hits, len(a) - hits + 1) / beta.ppf(0.9995, misses + 1, len(b) - misses))


def refuted(local, one, other, events, draws=DRAWS):
    """The largest epsilon that an adversary refutes, by the frequencies of events under two updates.

    Events are chosen on one half of the draws, so that the other half's bounds hold for the chosen one.
    """
    halves = [many(local, change, draws, seed).chunk(2) for seed, change in enumerate((one, other))]
    found = []
    for (a, a2), (b, b2) in (halves, halves[::-1]):
        likely = [event for event in events if 0 < event(a).sum() < len(a) and event(b).sum() < len(b)]
        best = max(likely, key=lambda event: bound(event(a), event(b)))
        found.append(bound(best(a2), best(b2)))
    return max(found)


CASES = {
    "Laplace": (lambda epsilon: Laplace(epsilon, clip=1.5), vector(9.0, 0.0), vector(-9.0, 0.0)),
    "PrivUnit": (lambda epsilon: PrivUnit(epsilon), vector(1.0, 0.0, 0.0), vector(-1.0, 0.0, 0.0)),
    "PrivUnit with norms": (
        lambda epsilon: PrivUnit(epsilon, norm_epsilon=epsilon / 2),
        vector(1.0, 0.0, 0.0),
        vector(-0.1, 0.0, 0.0),
    ),
}


def events_of(local, one):
    """Far on one's side, by any height; for directions the cap itself, and lengths."""
    scale = float(many(local, one, 500, seed=9).norm(dim=1).mean())
    unit = one / one.norm()
    heights, lengths = np.linspace(-1, 1, 41), np.linspace(0.2, 3, 15)
    found = [lambda seen, k=k: seen @ unit > k * scale for k in heights]
    found += [lambda seen, k=k: seen @ unit < k * scale for k in heights]
    return found + [lambda seen, k=k: (seen.norm(dim=1) > k * scale) & (seen @ unit > 0) for k in lengths]


@pytest.mark.parametrize(("make", "one", "other"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.by_default("seeded-Laplace", "seeded-PrivUnit with norms")
def test_no_event_is_likelier_than_the_claim(make, one, other, noise):
    local = make(1.0)
    local.noise = noise
    found = refuted(local, one, other, events_of(local, one))
    # the adversary is a good one: most of the claim is there to be found
    assert 0.6 < found <= 1.0


@pytest.mark.parametrize(("make", "one", "other"), CASES.values(), ids=CASES)
@pytest.mark.by_default("PrivUnit")
def test_half_the_noise_is_found_out(make, one, other):
    """Made for an epsilon of 2, it would have to keep 1."""
    local = make(2.0)
    assert refuted(local, one, other, events_of(local, one)) > 1.2


@pytest.mark.exhaustive
def test_a_zero_and_a_diverged_change_look_like_any_other():
    local = PrivUnit(1.0)
    events = events_of(local, vector(1.0, 0.0, 0.0))
    assert refuted(local, vector(1.0, 0.0, 0.0), torch.zeros(3, dtype=torch.float64), events) <= 1.0


# Laplace


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_laplace_noise_has_its_distribution(noise):
    local = Laplace(2.0, clip=0.5, noise=noise)
    seen = many(local, vector(0.1, -0.2), 3_000)
    assert local.scale == 0.5
    for entry, start in zip(seen.T, (0.1, -0.2), strict=True):
        assert kstest(entry.numpy(), laplace(start, local.scale).cdf).pvalue > 1e-4


def test_secure_laplace_noise_is_on_a_grid_that_tells_nothing():
    local = Laplace(2.0, noise="secure")
    for change in (vector(0.1, -0.2), vector(1 / 3, 0.0)):
        steps = many(local, change, 50) * 2.0**16
        assert torch.equal(steps, steps.round())


def test_a_change_is_bounded_as_a_whole():
    generous = Laplace(400.0, clip=1.0)
    seen = many(generous, vector(30.0, -10.0, 0.0), 4_000).mean(0)
    assert torch.allclose(seen, vector(0.75, -0.25, 0.0), atol=1e-3)
    # within the bound nothing is changed
    assert torch.allclose(many(generous, vector(0.3, -0.1, 0.2), 4_000).mean(0), vector(0.3, -0.1, 0.2), atol=1e-3)


# (clip, epsilon, clipped change, scale, squared error) by the LaplaceMechanism of Apple's pfl 0.6.0 (PyPI), in Python:
# m = LaplaceMechanism(clip, epsilon); s = MappedVectorStatistics({"a": np.array([0.3, -0.4, 1.2, 0.05, 0.0])})
# m.constrain_sensitivity(s); m.add_noise(s, 1) with its metric "Laplace DP noise scale"; m.get_squared_error(5, 1.0, 1)
PFL = [
    (1.0, 2.0, (0.15384615384615385, -0.20512820512820518, 0.6153846153846154, 0.025641025641025647, 0.0), 0.5, 2.5),
    (
        0.5,
        8.0,
        (0.07692307692307693, -0.10256410256410259, 0.3076923076923077, 0.012820512820512824, 0.0),
        0.0625,
        0.0390625,
    ),
    (3.0, 0.1, (0.3, -0.4, 1.2, 0.05, 0.0), 30.0, 9000.0),
]


@pytest.mark.parametrize(("clip", "epsilon", "clipped", "scale", "error"), PFL)
def test_it_is_pfl_s_laplace_mechanism_at_twice_the_epsilon(clip, epsilon, clipped, scale, error):
    """That package's adjacency is presence of a client, ours is any other update, which is twice as far away."""
    local = Laplace(2 * epsilon, clip)
    assert local.scale == pytest.approx(scale) and 5 * 2 * local.scale**2 == pytest.approx(error)
    # the same noise with another change is as far away as the bounded changes are
    change = vector(0.3, -0.4, 1.2, 0.05, 0.0)
    moved = local.noised(change, local.draws(1)) - local.noised(torch.zeros_like(change), local.draws(1))
    assert torch.allclose(moved, vector(*clipped), atol=1e-12 * scale + 1e-15)


# PrivUnit


def mass_by_integral(d, low, high, weight=lambda t: 1.0):
    """Share of the sphere between heights, by the density of one coordinate."""
    whole, _ = quad(lambda angle: math.sin(angle) ** (d - 2), 0, math.pi)
    part, _ = quad(lambda angle: weight(math.cos(angle)) * math.sin(angle) ** (d - 2), math.acos(high), math.acos(low))
    return part / whole


@pytest.mark.parametrize("d", [2, 3, 10, 200])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 12.0])
def test_the_ratio_of_densities_is_the_claim(d, epsilon):
    cap = Cap.of(epsilon, d)
    mass = mass_by_integral(d, cap.height, 1.0)
    assert cap.mass == pytest.approx(mass, rel=1e-6)
    densities = (1 - cap.outside) / mass, cap.outside / (1 - mass)
    assert math.log(densities[0] / densities[1]) == pytest.approx(epsilon, rel=1e-6)
    # the paper's two parts, its coin and its cap
    p = 1 - cap.outside
    assert math.log(p / (1 - p)) + math.log((1 - mass) / mass) == pytest.approx(epsilon, rel=1e-6)
    mean = densities[0] * mass_by_integral(d, cap.height, 1.0, lambda t: t)
    mean += densities[1] * mass_by_integral(d, -1.0, cap.height, lambda t: t)
    assert cap.mean == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("d", [2, 5, 50])
def test_no_other_cap_has_a_smaller_error(epsilon, d):
    def mean(height):
        mass = mass_by_integral(d, height, 1.0)
        odds = math.exp(epsilon)
        inside = odds * mass / (1 - mass + odds * mass)
        return inside / mass * mass_by_integral(d, height, 1.0, lambda t: t) + (1 - inside) / (
            1 - mass
        ) * mass_by_integral(d, -1.0, height, lambda t: t)

    found = Cap.of(epsilon, d)
    assert max(mean(height) for height in np.linspace(0, 0.999, 400)) <= found.mean * (1 + 1e-9)


# (epsilon, squared norm of what is sent over the dimensions) for high dimensions, where the sphere's caps are
# half-lines of a Gaussian: priv_unit_G_sq_norm(1, epsilon) of Apple's ml-projunit, utilities.py, at commit
# 17c630b2e178454be7f508fc42e6499dd3736e8e; it tries probabilities in steps of 0.01, and so is above by up to 3e-4
PROJUNIT = [(1, 6.330060104517499), (2, 1.6166822208978973), (4, 0.4353238658417237), (8, 0.13291437489502145)]


@pytest.mark.parametrize(("epsilon", "error"), PROJUNIT)
def test_its_error_is_that_of_apple_s_code(epsilon, error):
    d = 1_000_000
    assert 1 / Cap.of(epsilon, d).mean ** 2 / d == pytest.approx(error, rel=3e-4)


@pytest.mark.parametrize("d", [2, 7, 300])
def test_what_is_sent_has_one_norm_and_the_right_mean(d):
    change = torch.randn(d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    local = PrivUnit(6.0, clip=0.3)
    norm = 0.3 / Cap.of(6.0, d).mean
    seen = many(local, change, 5_000)
    assert torch.allclose(seen.norm(dim=1), torch.tensor(norm, dtype=torch.float64), rtol=1e-9)
    unit = change / change.norm()
    # within four standard deviations in the direction, and in all together
    assert float(seen.mean(0) @ unit) == pytest.approx(0.3, abs=4 * norm / math.sqrt(5_000))
    assert float((seen.mean(0) - 0.3 * unit).norm()) < 1.5 * norm / math.sqrt(5_000)
    # other norms count alike
    assert torch.allclose(local.noised(change, local.draws(1)), local.noised(1e-3 * change, local.draws(1)))


def test_secure_directions_are_on_a_grid_and_of_the_same_law():
    secure, seeded = PrivUnit(3.0, noise="secure"), PrivUnit(3.0)
    unit, mean = vector(1.0, 0.0, 0.0, 0.0), Cap.of(3.0, 4).mean
    one, other = many(secure, unit, 2_500) * mean, many(seeded, unit, 2_500) * mean
    steps = one * 2.0**31
    assert torch.allclose(steps, steps.round(), atol=1e-5) and not torch.allclose(
        other * 2.0**31, (other * 2.0**31).round()
    )
    assert kstest(one[:, 0].numpy(), other[:, 0].numpy()).pvalue > 1e-4
    assert kstest(one[:, 1].numpy(), other[:, 1].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_told_norms_are_right_on_average(share, epsilon):
    draws = PrivUnit(1.0).draws(3)
    seen = np.array([noised_share(share, epsilon, draws) for _ in range(5_000)])
    assert seen.mean() == pytest.approx(share, abs=4 * seen.std() / math.sqrt(len(seen)))


def test_told_norms_keep_their_epsilon():
    draws = PrivUnit(1.0).draws(4)

    def frequencies(share):
        seen = [round(noised_share(share, 2.0, draws), 9) for _ in range(10_000)]
        return {value: seen.count(value) / len(seen) for value in set(seen)}

    one, other = frequencies(0.0), frequencies(1.0)
    # k = 2 levels above zero, e^2 to 1
    assert len(one) == len(other) == 3
    assert max(one[value] / other[value] for value in one) == pytest.approx(math.exp(2.0), rel=0.2)


def test_norms_and_directions_share_one_epsilon():
    change = vector(0.3, 0.4, 0.0)
    seen = many(PrivUnit(10.0, norm_epsilon=4.0), change, 6_000)
    spread = seen.std(0) / math.sqrt(len(seen))
    assert bool(((seen.mean(0) - change).abs() < 4 * spread).all())
    # the direction's part is the rest
    longest = float(seen.norm(dim=1).max())
    k, e = math.ceil(math.exp(4 / 3)), math.exp(4)
    largest = ((e + k) * k - k * (k + 1) / 2) / (e - 1) / k
    assert longest == pytest.approx(largest / Cap.of(6.0, 3).mean, rel=1e-9)


@pytest.mark.parametrize("change", [vector(1e-300, -1e-300), vector(1e38, 1e38), vector(0.0, 5e-324)])
@pytest.mark.parametrize("epsilon", [1e-3, 500.0])
@pytest.mark.parametrize("kind", [PrivUnit, Laplace])
def test_extreme_numbers_stay_finite(kind, change, epsilon):
    for noise in ("seeded", "secure"):
        local = kind(epsilon, noise=noise)
        assert local.noised(change, local.draws(0)).isfinite().all()


# Sources and settings


def test_seeded_noise_is_the_seed_s_and_secure_noise_is_nobody_s():
    for kind in (PrivUnit, Laplace):
        change, local = vector(0.3, 0.4, 0.1), kind(1.0)
        same = [local.noised(change, local.draws(seed)) for seed in (5, 5, 6)]
        assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])
        secure = local.deployed()
        assert secure.is_secure and not local.is_secure and secure.round_epsilon == 1.0
        assert not torch.equal(secure.noised(change, secure.draws(5)), secure.noised(change, secure.draws(5)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Laplace(0.0), r"round_epsilon=0\.0 must be above 0"),
        (lambda: PrivUnit(math.inf), "round_epsilon=inf must be above 0 and up to 500"),
        (lambda: PrivUnit(1.0, clip=math.inf), "clip=inf must be above 0"),
        (lambda: PrivUnit(1.0, norm_epsilon=1.0), r"norm_epsilon=1\.0 must be above 0 and below round_epsilon=1"),
        (lambda: Laplace(1.0, noise="none"), r"local_privacy\.noise='none'"),
        (lambda: Laplace(1.0, noise="seeded").deployed(), "noise=seeded .* take secure"),
        (lambda: PrivUnit(1.0).noised(vector(1.0), PrivUnit(1.0).draws(0)), "share 1 number; take Laplace"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(MisconfigurationException, match=words):
        make()
