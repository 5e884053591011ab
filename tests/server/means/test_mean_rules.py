import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from pfl_lightning.server.means import (
    Bucketing,
    Bulyan,
    CentredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    TrimmedMean,
)
from pfl_lightning.server.means.vectors import Vectors

F = 2
RULES = {
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(F),
    "krum": Krum(F),
    "multi_krum": MultiKrum(F),
    "bulyan": Bulyan(F),
    "geometric": GeometricMedian(),
    "clipping": CentredClipping(),
    "bound": NormBound(),
    "bucketing": Bucketing(CoordinateMedian()),
    "mixing_median": NearestNeighbourMixing(CoordinateMedian(), F),
    "mixing_krum": NearestNeighbourMixing(MultiKrum(F), F),
}
EVERY = pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
BOUNDED = [name for name in RULES if name not in ("clipping", "bound", "bucketing")]
SIZES = {"a": (3, 2), "b": (5,), "c": ()}


def drawn(n, seed=0, dtype=torch.float64):
    """n uploads, and the model that they began with; as vectors they have 12 coordinates."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for name, size in SIZES.items()}
        for _ in range(n + 1)
    ]


def row(model):
    return torch.cat([tensor.flatten().double() for tensor in model.values()]).numpy()


def vectors(models, seed=0):
    """Of uploads and, as the last, the model that they began with."""
    *sent, origin = models
    return Vectors(sent, origin, list(SIZES), torch.full((len(sent),), 1 / len(sent), dtype=torch.float64), seed)


def taken(rule, models, seed=0):
    return row(rule.of(vectors(models, seed)).entries)


def mapped(change, models):
    return [{name: change(tensor) for name, tensor in model.items()} for model in models]


def plain_krum(x, f, left):
    """The scores of some of the uploads among themselves, by the definition."""
    scores = {}
    for i in left:
        squares = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in left if j != i)
        scores[i] = sum(squares[: max(len(left) - f - 2, 1)])
    return scores


def plain_clip(x, origin, radius, passes):
    v = origin
    for _ in range(passes):
        lengths = [float(np.sqrt(((each - v) ** 2).sum())) for each in x]
        bound = np.median(lengths) if radius is None else radius
        v = v + sum((each - v) * min(1, bound / length) for each, length in zip(x, lengths, strict=True)) / len(x)
    return v


def plain_bulyan(x, f):
    left, picked = list(range(len(x))), []
    while len(picked) < len(x) - 2 * f:
        scores = plain_krum(x, f, left)
        # the two that are each other's only neighbour have one score
        whole = {i: sorted(float(((x[i] - x[j]) ** 2).sum()) for j in left) for i in left}
        picked.append(min(left, key=lambda i: (round(scores[i], 9), whole[i])))
        left.remove(picked[-1])
    columns = []
    for column in np.stack([x[i] for i in picked]).T:
        middle = np.median(column)
        columns.append(np.mean(sorted(column, key=lambda value: abs(value - middle))[: len(picked) - 2 * f]))
    return np.array(columns)


def plain_mixing(x, f):
    near = [sorted(range(len(x)), key=lambda j: ((x[i] - x[j]) ** 2).sum())[: len(x) - f] for i in range(len(x))]
    return [np.mean([x[j] for j in group], axis=0) for group in near]


def plain_multi_krum(x, f, keep):
    scores = plain_krum(x, f, range(len(x)))
    return np.mean([x[i] for i in sorted(scores, key=scores.get)[:keep]], axis=0)


PLAINLY = {
    "median": lambda x, origin: np.median(x, axis=0),
    "trimmed": lambda x, origin: trim_mean(np.stack(x), F / len(x) + 1e-9, axis=0),
    "krum": lambda x, origin: plain_multi_krum(x, F, 1),
    "multi_krum": lambda x, origin: plain_multi_krum(x, F, len(x) - F),
    "bulyan": lambda x, origin: plain_bulyan(x, F),
    "clipping": lambda x, origin: plain_clip(x, origin, None, 3),
    "bound": lambda x, origin: plain_clip(x, origin, None, 1),
    "mixing_median": lambda x, origin: np.median(plain_mixing(x, F), axis=0),
    "mixing_krum": lambda x, origin: plain_multi_krum(plain_mixing(x, F), F, len(x) - F),
}


# Definitions


@pytest.mark.parametrize("n", [11, 12])
@pytest.mark.parametrize("name", list(PLAINLY))
def test_it_is_what_its_definition_says(name, n):
    *sent, origin = models = drawn(n)
    assert np.allclose(taken(RULES[name], models), PLAINLY[name]([row(m) for m in sent], row(origin)), atol=1e-11)


@pytest.mark.parametrize("radius", [0.5, 3.0, 100.0])
def test_clipping_by_a_given_radius_is_what_its_definition_says(radius):
    *sent, origin = models = drawn(7)
    x = [row(m) for m in sent]
    assert np.allclose(taken(CentredClipping(radius, 2), models), plain_clip(x, row(origin), radius, 2), atol=1e-11)
    assert np.allclose(taken(NormBound(radius), models), plain_clip(x, row(origin), radius, 1), atol=1e-11)


def test_no_point_nearby_has_a_smaller_sum_of_distances_than_the_geometric_median():
    models = drawn(9)
    x, z = np.stack([row(m) for m in models[:-1]]), taken(GeometricMedian(), models)

    def cost(point):
        return np.sqrt(((x - point) ** 2).sum(1)).sum()

    rng = np.random.default_rng(0)
    assert all(cost(z) < cost(z + step * rng.normal(size=12)) for step in (1e-3, 1e-2, 1) for _ in range(50))


def test_the_geometric_median_of_whole_numbers_of_votes_counts_weights_as_these():
    *sent, origin = drawn(4)
    counts = [3, 1, 1, 2]
    weighted = Vectors(sent, origin, list(SIZES), torch.tensor(counts, dtype=torch.float64) / 7)
    repeated = [model for model, count in zip(sent, counts, strict=True) for _ in range(count)]
    result = row(GeometricMedian(weighted=True).of(weighted).entries)
    assert np.allclose(result, taken(GeometricMedian(), [*repeated, origin]), atol=1e-7)


def claiming(models, claims):
    """Uploads of clients who claim to have so many samples."""
    *sent, origin = models
    claims = torch.tensor(claims, dtype=torch.float64)
    return Vectors(sent, origin, list(SIZES), claims / claims.sum())


def test_a_claim_of_any_size_counts_as_the_cap_times_the_median_claim():
    models = drawn(7)
    honest = [20.0, 30.0, 25.0, 40.0, 35.0, 15.0]
    for cap in (1.0, 3.0, 4.5):
        rule = GeometricMedian(weighted=True, cap=cap)
        # the median of these claims is 30, and a claim at the bound is as good as one far above it
        capped = [min(claim, cap * 30.0) for claim in honest]
        ends = [row(rule.of(claiming(models, [claim, *honest])).entries) for claim in (cap * 30.0, 1e15)]
        expected = GeometricMedian(weighted=True, cap=math.inf).of(claiming(models, [cap * 30.0, *capped])).entries
        assert np.allclose(ends[0], ends[1], atol=1e-9) and np.allclose(ends[0], row(expected), atol=1e-9)


def test_one_who_claims_to_have_most_samples_is_not_the_median_by_that():
    models = drawn(9)
    far = [mapped(lambda t: 1e6 + 0 * t, models[:1])[0], *models[1:]]
    honest = np.mean([row(m) for m in models[1:-1]], axis=0)
    claims = [1e15, *[30.0] * 8]
    assert np.abs(row(GeometricMedian(weighted=True).of(claiming(far, claims)).entries) - honest).max() < 3
    unbound = GeometricMedian(weighted=True, cap=math.inf).of(claiming(far, claims)).entries
    assert np.abs(row(unbound) - honest).min() > 1e5


@pytest.mark.parametrize(("bad", "borne"), [(2, True), (3, False)], ids=["borne", "not"])
def test_so_many_as_the_cap_bears_may_claim_anything(bad, borne):
    # 11 clients and a cap of 3: f below 11 / 4
    models = drawn(11)
    far = [*mapped(lambda t: 1e6 + 0 * t, models[:bad]), *models[bad:]]
    found = row(GeometricMedian(weighted=True).of(claiming(far, [1e9] * bad + [30.0] * (11 - bad))).entries)
    assert (np.abs(found).max() < 5) == borne


def test_bucketing_is_the_rule_of_the_means_of_groups():
    *sent, _ = models = drawn(5)
    x = [row(m) for m in sent]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3)).tolist()
    groups = [np.mean([x[i] for i in order[k : k + 2]], axis=0) for k in (0, 2, 4)]
    assert np.allclose(taken(Bucketing(CoordinateMedian()), models, seed=3), np.median(groups, axis=0), atol=1e-12)
    assert np.allclose(taken(Bucketing(Krum(0)), models, seed=3), plain_multi_krum(groups, 0, 1), atol=1e-12)
    ways = {tuple(taken(Bucketing(CoordinateMedian()), models, seed=seed)) for seed in range(20)}
    assert len(ways) > 5


@pytest.mark.parametrize("name", ["krum", "multi_krum", "geometric", "clipping", "bound", "mixing_krum"])
def test_the_sum_by_shares_is_the_result(name):
    *sent, origin = models = drawn(11)
    found = RULES[name].of(vectors(models))
    shares = found.shares.numpy()
    rest = 1 - shares.sum()
    assert shares.min() >= 0 and rest > -1e-12
    x = np.stack([row(m) for m in sent])
    assert np.allclose(shares @ x + rest * row(origin), row(found.entries), atol=1e-12)


def test_rules_by_coordinate_have_no_shares():
    assert all(RULES[name].of(vectors(drawn(11))).shares is None for name in ("median", "trimmed", "bulyan"))


# Symmetries


@EVERY
@pytest.mark.filterwarnings("ignore:aggregator.mean=")
def test_equal_uploads_give_that_upload_exactly(rule):
    for dtype, n in itertools.product((torch.float32, torch.float64, torch.bfloat16), (1, 2, 3, 10, 11)):
        (one, origin) = drawn(1, dtype=dtype)
        result = rule.of(vectors([one] * n + [origin])).entries
        assert all(torch.equal(result[name], one[name]) and result[name].dtype == dtype for name in one)


@pytest.mark.parametrize("name", [name for name in RULES if name != "bucketing"])
def test_who_sent_what_changes_nothing(name):
    *sent, origin = models = drawn(12)
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        assert np.allclose(
            taken(RULES[name], [*(sent[i] for i in order), origin]), taken(RULES[name], models), atol=1e-9
        )


@EVERY
def test_moving_and_stretching_everything_moves_and_stretches_the_result(rule):
    models = drawn(11)
    result = taken(rule, models)
    assert np.allclose(taken(rule, mapped(lambda t: t + 30, models)), result + 30, atol=1e-9)
    assert np.allclose(taken(rule, mapped(lambda t: -0.01 * t, models)), -0.01 * result, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [TrimmedMean(0), MultiKrum(0), MultiKrum(F, keep=11), Bulyan(0), NearestNeighbourMixing(CoordinateMedian(), 0)],
    ids=["trimmed", "multi_krum", "krum_of_all", "bulyan", "mixing"],
)
def test_rules_that_fear_nobody_are_the_mean(rule):
    models = drawn(11)
    assert np.allclose(taken(rule, models), np.mean([row(m) for m in models[:-1]], axis=0), atol=1e-12)


@EVERY
def test_the_precision_of_float64_is_kept(rule):
    models = mapped(lambda t: 1 + 1e-12 * t, drawn(11))
    result = taken(rule, models)
    assert len(set(result)) == 12 and np.abs(result - 1).max() < 1e-11


# Bad uploads


def attacked(name, bad, size, n=12):
    """How far a rule's result is from the honest mean, with so many uploads that are so large."""
    *sent, origin = drawn(n)
    honest = np.mean([row(m) for m in sent[bad:]], axis=0)
    shifted = mapped(lambda t: t * 0.1 + size, sent[:bad])
    return np.abs(taken(RULES[name], [*shifted, *sent[bad:], origin]) - honest).max()


@pytest.mark.parametrize("name", BOUNDED)
def test_so_many_bad_uploads_as_it_bears_do_not_move_it_further_if_they_are_larger(name):
    near, far = attacked(name, F, 1e2), attacked(name, F, 1e6)
    assert far < 3 and far == pytest.approx(near, rel=0.05)


@pytest.mark.parametrize("name", BOUNDED)
def test_more_than_it_bears_do(name):
    bad = {"trimmed": 3, "mixing_median": 7, "bulyan": 7}.get(name, 7)
    assert attacked(name, bad, 1e6) > 1e3 * attacked(name, F, 1e6)


def test_enormous_uploads_take_no_digits_from_the_others():
    *sent, origin = drawn(11)
    for name in BOUNDED:
        ends = [
            taken(RULES[name], [*mapped(lambda t, size=size: 0 * t + size, sent[:F]), *sent[F:], origin])
            for size in (1e8, 1e30)
        ]
        # the pull of what is far away vanishes
        assert np.allclose(*ends, atol=1e-6), name


@pytest.mark.parametrize("rule", [CentredClipping(0.5, 2), NormBound(0.5)], ids=["clipping", "bound"])
def test_a_clipped_upload_moves_the_result_by_no_more_than_the_bound_over_all(rule):
    *sent, origin = drawn(10)
    ends = [taken(rule, [*mapped(lambda t, size=size: t + size, sent[:1]), *sent[1:], origin]) for size in (1e2, -1e9)]
    passes = getattr(rule, "passes", 1)
    assert 0.05 < np.linalg.norm(ends[0] - ends[1]) <= 2 * passes * 0.5 / 10 + 1e-9


# Buffers


def with_buffers(models, bad=()):
    """Uploads and their origin with running statistics, of which bad ones send others."""
    generator = torch.Generator().manual_seed(9)
    kept = []
    for k, model in enumerate(models):
        mean, variance = torch.randn(4, generator=generator), torch.rand(4, generator=generator)
        far = k in bad
        kept.append(
            model
            | {
                "running_mean": torch.full_like(mean, 1e6) if far else mean,
                "running_var": torch.full_like(variance, -1e6) if far else variance,
                "batches": torch.tensor(10**9 if far else 7 + k % 3),
            }
        )
    return kept


def buffered(models):
    *sent, origin = models
    weights = torch.full((len(sent),), 1 / len(sent), dtype=torch.float64)
    return Vectors(sent, origin, list(SIZES), weights, buffers=origin.keys() - SIZES.keys())


@EVERY
def test_who_sends_honest_parameters_and_far_buffers_moves_no_buffer_far(rule):
    models = drawn(12)
    ends = [rule.of(buffered(with_buffers(models, bad))).entries for bad in ((), (0, 5))]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in SIZES)
    for entries in ends:
        assert entries["running_mean"].abs().max() < 3 and 7 <= int(entries["batches"]) <= 9
        assert ((entries["running_var"] >= 0) & (entries["running_var"] <= 1)).all()
        assert entries["running_mean"].dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("trimmed", "bulyan", "median")])
def test_buffers_of_sums_and_of_rules_of_means_are_the_median_of_all_uploads(name):
    models = with_buffers(drawn(12), bad=(0,))
    found = RULES[name].of(buffered(models)).entries
    for entry in ("running_mean", "running_var"):
        expected = np.median(np.stack([model[entry].double().numpy() for model in models[:-1]]), axis=0)
        assert np.allclose(found[entry].numpy(), expected, rtol=0, atol=1e-7)


@EVERY
@pytest.mark.filterwarnings("ignore:aggregator.mean=")
def test_variances_are_never_negative_whoever_sends_them(rule):
    for n in (1, 2, 7):
        found = rule.of(buffered(with_buffers(drawn(n), bad=range(n)))).entries
        assert (found["running_var"] == 0).all() and found["running_var"].shape == (4,)


@EVERY
@pytest.mark.filterwarnings("ignore:aggregator.mean=")
def test_equal_buffers_stay_what_they_are(rule):
    (one, origin) = with_buffers(drawn(1))
    for n in (1, 2, 3, 12):
        found = rule.of(buffered([one] * n + [origin])).entries
        assert list(found) == list(one) and all(torch.equal(found[name], one[name]) for name in one), n


def test_shares_above_one_lead_no_buffer_out_of_the_range_of_uploads():
    *sent, origin = with_buffers(drawn(5))
    entries, shares = buffered([*sent, origin]).combined(torch.full((5,), 30.0, dtype=torch.float64), [1, 3, 4])
    assert float(shares.sum()) == 150
    for name in ("running_mean", "running_var"):
        stack = torch.stack([sent[k][name] for k in (1, 3, 4)])
        assert torch.equal(entries[name], stack.median(0).values)
    change = sum(30 * (model["b"] - origin["b"]) for model in sent)
    assert torch.allclose(entries["b"], origin["b"] + change)


# Small rounds and settings


@EVERY
@pytest.mark.filterwarnings("ignore:aggregator.mean=")
def test_small_rounds_end_between_their_uploads(rule):
    for n in (1, 2, 3):
        *sent, origin = models = drawn(n)
        result, x = taken(rule, models), np.stack([row(m) for m in [*sent, origin]])
        assert ((x.min(0) - 1e-12 <= result) & (result <= x.max(0) + 1e-12)).all(), n


@pytest.mark.parametrize(
    ("rule", "n", "f"),
    [(TrimmedMean(4), 5, 2), (Krum(4), 9, 3), (Bulyan(2), 10, 1), (MultiKrum(0.4), 5, 1)],
    ids=["trimmed", "krum", "bulyan", "share"],
)
def test_a_round_that_is_too_small_goes_on_with_what_can_be_borne(rule, n, f):
    models = drawn(n)
    with pytest.warns(UserWarning, match=f"goes on with {f}"):
        result = taken(rule, models)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = taken(type(rule)(f), models)
    assert np.array_equal(result, expected)


def test_a_share_is_rounded_down_whatever_its_last_digit():
    for percent, n in itertools.product((0, 10, 20, 29, 45, 49), range(1, 101)):
        assert TrimmedMean(percent / 100)._bad.asked(n) == percent * n // 100, (percent, n)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TrimmedMean(0.5), "aggregator.mean=TrimmedMean: trim=0.5 must be a number of clients"),
        (lambda: TrimmedMean(-1), "trim=-1 must be"),
        (lambda: TrimmedMean(math.nan), "trim=nan must be"),
        (lambda: Krum(0.6), "aggregator.mean=Krum: f=0.6 must be"),
        (lambda: MultiKrum(1, keep=0), "keep=0 must be 1 or more"),
        (lambda: Bulyan(0.25), "below 0.25"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing=0.0 must be above 0"),
        (lambda: GeometricMedian(passes=0), "passes=0 at least 1"),
        (lambda: GeometricMedian(cap=0.5), "cap=0.5 at least 1"),
        (lambda: GeometricMedian(cap=math.nan), "cap=nan at least 1"),
        (lambda: CentredClipping(0.0), "radius=0.0 must be above 0"),
        (lambda: CentredClipping(1.0, 0), "passes=0 must be 1 or more"),
        (lambda: NormBound(math.nan), "bound=nan must be above 0"),
        (lambda: Bucketing(Krum(), 0), "size=0 must be 1 or more"),
        (lambda: Bucketing(GeometricMedian(weighted=True)), "set its weighted=false"),
        (lambda: NearestNeighbourMixing(Krum(), 0.5), "f=0.5 must be"),
    ],
)
def test_settings_out_of_their_range_are_refused(make, sentence):
    with pytest.raises(Exception, match=sentence):
        make()


@pytest.mark.parametrize(
    ("rule", "clients", "fits"),
    [
        (Krum(3), 9, True),
        (Krum(4), 10, False),
        (Bulyan(2), 11, True),
        (Bulyan(2), 10, False),
        (TrimmedMean(2), 5, True),
        (TrimmedMean(2), 4, False),
        (Bucketing(Krum(1)), 9, True),
        (Bucketing(Krum(1)), 8, False),
        (NearestNeighbourMixing(Bulyan(2), 3), 10, False),
        (CoordinateMedian(), 1, True),
    ],
    ids=["krum", "krum_not", "bulyan", "bulyan_not", "trim", "trim_not", "buckets", "buckets_not", "mixing", "median"],
)
def test_what_no_round_can_bear_is_told_beforehand(rule, clients, fits):
    if fits:
        rule.check(clients)
    else:
        with pytest.raises(Exception, match=r"to bear that; take \d or less, or more clients"):
            rule.check(clients)
