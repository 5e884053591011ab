import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.partitioners import Dirichlet, DominantLabels, RandomClasses, RoundedDirichlet

CIFAR10 = torch.arange(10).repeat_interleave(6000)
CIFAR10_TRAIN = torch.arange(10).repeat_interleave(5000)
LETTERS_TRAIN = torch.arange(26).repeat_interleave(4800)
ALL = [
    RoundedDirichlet(),
    RoundedDirichlet(alpha=100.0, second_alpha=0.1),
    Dirichlet(alpha=0.5, equalize=True),
    DominantLabels(samples_per_client=5),
    DominantLabels(samples_per_client=None, grouping="mod"),
    RandomClasses(),
    RandomClasses(equalize=True),
]
# clients, classes, samples
POOLS = [(1, 3, 90), (2, 4, 301), (7, 4, 2000), (20, 10, 2000), (13, 26, 3000), (40, 100, 20000)]


def name(partitioner):
    return f"{type(partitioner).__name__}{list(vars(partitioner).values())}"


def mixed_labels(n, num_classes):
    """Every class has some samples, none as many as another."""
    weights = np.arange(num_classes, 2 * num_classes)
    y = np.random.RandomState(5).choice(num_classes, n, p=weights / weights.sum())
    y[:num_classes] = np.arange(num_classes)
    return torch.from_numpy(y)


def counts(labels, clients, num_classes):
    return torch.stack([torch.bincount(labels[rows], minlength=num_classes) for rows in clients])


def sizes(clients):
    return [len(rows) for rows in clients]


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
@pytest.mark.parametrize("partitioner", ALL, ids=name)
def test_clients_are_disjoint_and_none_is_empty(partitioner, num_clients, num_classes, n):
    labels = mixed_labels(n, num_classes)
    clients = partitioner(labels, num_clients, num_classes, seed=7)
    assert len(clients) == num_clients
    assert min(sizes(clients)) >= 1
    taken = torch.cat(clients)
    assert taken.dtype == torch.int64
    assert len(taken.unique()) == len(taken) <= n
    assert 0 <= taken.min() <= taken.max() < n
    if isinstance(partitioner, Dirichlet):
        assert len(taken) == n


@pytest.mark.parametrize("partitioner", ALL, ids=name)
def test_depends_on_the_seed_alone_and_leaves_global_randomness(partitioner):
    labels = mixed_labels(3000, 10)
    np.random.seed(1)
    torch.manual_seed(1)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    first = partitioner(labels, 15, 10, seed=7)
    assert np.array_equal(numpy_before, np.random.get_state()[1])
    assert torch.equal(torch_before, torch.get_rng_state())
    np.random.seed(2)
    assert all(map(torch.equal, first, partitioner(labels, 15, 10, seed=7)))
    other = partitioner(labels, 15, 10, seed=8)
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def by_rounding(labels, num_clients, num_classes, seed, alpha, second_alpha=None):
    """FedLAW's counting, one client and class after the other."""
    rng = np.random.RandomState(seed)
    pools = [rng.permutation(np.flatnonzero(labels.numpy() == k)).tolist() for k in range(num_classes)]
    share = rng.dirichlet([alpha] * num_clients, num_classes)
    if second_alpha is not None:
        half = num_clients // 2
        second = rng.dirichlet([second_alpha] * (num_clients - half), num_classes)
        for k in range(num_classes):
            share[k, half:] = second[k] * (1 - share[k, :half].sum())
    clients = [set() for _ in range(num_clients)]
    for k, pool in enumerate(pools):
        size = len(pool)
        for client in range(num_clients):
            amount = len(pool) if client == num_clients - 1 else round(float(share[k, client]) * size)
            clients[client].update(pool[:amount])
            del pool[:amount]
    return clients


@pytest.mark.parametrize("settings", [{"alpha": 0.5}, {"alpha": 100.0}, {"alpha": 10.0, "second_alpha": 0.3}], ids=str)
@pytest.mark.parametrize("num_clients", [10, 20, 31])
def test_rounded_dirichlet_is_the_official_draw(settings, num_clients):
    clients = RoundedDirichlet(**settings)(CIFAR10_TRAIN, num_clients, 10, seed=10)
    assert [set(rows.tolist()) for rows in clients] == by_rounding(CIFAR10_TRAIN, num_clients, 10, 10, **settings)


def test_rounding_up_never_takes_more_than_there_are():
    # with 40 clients and 27 samples a class, equal shares of 0.675 all round up; a large class keeps all in
    labels = torch.cat([torch.zeros(4000, dtype=torch.int64), torch.arange(1, 10).repeat_interleave(27)])
    clients = RoundedDirichlet(alpha=1e6)(labels, 40, 10, seed=1)
    assert sorted(torch.cat(clients).tolist()) == list(range(4000 + 9 * 27))
    small = counts(labels, clients, 10)[:, 1:]
    assert small[:27].unique().tolist() == [1]
    assert small[27:].unique().tolist() == [0]


def test_only_rounded_dirichlet_lets_full_clients_grow():
    def grows(partitioner):
        table = counts(CIFAR10_TRAIN, partitioner(CIFAR10_TRAIN, 20, 10, seed=10), 10)
        full = table.cumsum(dim=1) >= 2500
        return bool(table[:, 1:][full[:, :-1]].any())

    assert grows(RoundedDirichlet(alpha=0.5))
    assert not grows(Dirichlet(alpha=0.5))


def test_alpha_100_is_nearly_iid():
    table = counts(CIFAR10_TRAIN, RoundedDirichlet(alpha=100.0)(CIFAR10_TRAIN, 20, 10, seed=1), 10)
    # a share has mean 1/20 and deviation 0.005: 250 and 24 samples
    assert (table - 250).abs().max() < 120


def test_hybrid_has_half_of_the_clients_even_and_half_skewed():
    clients = RoundedDirichlet(alpha=100.0, second_alpha=0.1)(CIFAR10_TRAIN, 20, 10, seed=1)
    table = counts(CIFAR10_TRAIN, clients, 10)
    assert (table[:10] - 250).abs().max() < 120
    assert (table[10:] < 25).sum() > 40
    assert table.sum() == 50000


def test_rounded_dirichlet_draws_again_until_clients_are_large_enough():
    labels = mixed_labels(600, 10)
    first, larger = (RoundedDirichlet(alpha=0.3, min_size=size)(labels, 20, 10, seed=1) for size in (1, 8))
    assert 1 <= min(sizes(first)) < 8 <= min(sizes(larger))


@pytest.mark.parametrize("second_alpha", [None, 1e-6])
def test_underflowing_alpha_gives_each_class_to_one_client(second_alpha):
    # two clients: their halves of the classes need both to be there
    table = counts(CIFAR10, RoundedDirichlet(1e-6, second_alpha)(CIFAR10, 2, 10, seed=1), 10)
    assert set(table.flatten().tolist()) == {0, 6000}
    assert table.sum() == 60000


def test_rounded_dirichlet_refuses_in_its_own_name():
    with pytest.raises(MisconfigurationException, match=r"^RoundedDirichlet alpha=0 must be above 0 and finite"):
        RoundedDirichlet(alpha=0)
    with pytest.raises(MisconfigurationException, match=r"^RoundedDirichlet second_alpha=nan must be above 0"):
        RoundedDirichlet(second_alpha=float("nan"))
    with pytest.raises(MisconfigurationException, match=r"^RoundedDirichlet min_size=0 must be at least 1"):
        RoundedDirichlet(min_size=0)
    with pytest.raises(MisconfigurationException, match=r"^RoundedDirichlet min_size=2501 was not reached in 0 draws"):
        RoundedDirichlet(min_size=2501)(CIFAR10_TRAIN, 20, 10, seed=1)


def test_rounded_dirichlet_gives_up_drawing(monkeypatch):
    monkeypatch.setattr(RoundedDirichlet, "MAX_DRAWS", 5)
    with pytest.raises(MisconfigurationException, match=r"in 5 draws with alpha=0.01 and num_clients=100"):
        RoundedDirichlet(alpha=0.01)(CIFAR10_TRAIN, 100, 10, seed=1)


@pytest.mark.parametrize("partitioner", [RoundedDirichlet(), Dirichlet(equalize=True), RandomClasses()], ids=name)
def test_absent_class_is_no_problem(partitioner):
    labels = torch.arange(10).repeat_interleave(100)
    clients = partitioner(labels, 5, 12, seed=1)
    assert counts(labels, clients, 12)[:, 10:].sum() == 0


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
def test_equalized_clients_have_the_same_size_and_all_samples(num_clients, num_classes, n):
    clients = Dirichlet(alpha=0.5, equalize=True)(mixed_labels(n, num_classes), num_clients, num_classes, seed=3)
    assert set(sizes(clients)) <= {n // num_clients, -(-n // num_clients)}
    assert sorted(torch.cat(clients).tolist()) == list(range(n))


def test_equalize_moves_no_more_than_the_surplus():
    raw = Dirichlet(alpha=0.5, min_size=10)(CIFAR10, 20, 10, seed=2021)
    equal = Dirichlet(alpha=0.5, min_size=10, equalize=True)(CIFAR10, 20, 10, seed=2021)
    assert len(set(sizes(raw))) > 10
    assert sizes(equal) == [3000] * 20
    for before, after in zip(raw, equal, strict=True):
        stayed = len(set(before.tolist()) & set(after.tolist()))
        assert stayed == min(len(before), 3000)


def test_equalize_takes_of_all_classes_of_a_large_client():
    raw = Dirichlet(alpha=0.5, min_size=10)(CIFAR10, 20, 10, seed=2021)
    equal = Dirichlet(alpha=0.5, min_size=10, equalize=True)(CIFAR10, 20, 10, seed=2021)
    largest = int(np.argmax(sizes(raw)))
    before, after = (torch.bincount(CIFAR10[clients[largest]], minlength=10) for clients in (raw, equal))
    kept = after / before
    assert (kept[before > 200] - 3000 / len(raw[largest])).abs().max() < 0.1


# FedReMa's table: five groups of three of ten labels
GROUPS = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]


def fedrema(group, base, *dominant):
    expected = torch.full((10,), base)
    expected[GROUPS[group]] = torch.tensor(dominant)
    return expected


@pytest.mark.parametrize(
    ("settings", "base", "dominant"),
    [
        ({}, 12, (172, 172, 172)),
        ({"samples_per_client": 100}, 2, (28, 28, 30)),
        ({"samples_per_client": 100, "iid_fraction": 0.4}, 4, (24, 24, 24)),
        ({"samples_per_client": 100, "iid_fraction": 0.6}, 6, (19, 19, 20)),
        ({"samples_per_client": 100, "iid_fraction": 0.8}, 8, (14, 14, 16)),
        ({"samples_per_client": 500}, 10, (143, 143, 144)),
        ({"iid_fraction": 0.0}, 0, (200, 200, 200)),
        ({"iid_fraction": 1.0}, 60, (60, 60, 60)),
    ],
    ids=str,
)
def test_dominant_labels_gives_fedremas_counts(settings, base, dominant):
    clients = DominantLabels(**settings)(CIFAR10, 20, 10, seed=1)
    expected = torch.stack([fedrema(client // 4, base, *dominant) for client in range(20)])
    assert torch.equal(counts(CIFAR10, clients, 10), expected)


def test_grouping_mod_is_fedpacs():
    partitioner = DominantLabels(grouping="mod")
    table = counts(CIFAR10, partitioner(CIFAR10, 20, 10, seed=1), 10)
    assert torch.equal(table, torch.stack([fedrema(client % 5, 12, 172, 172, 172) for client in range(20)]))
    assert [partitioner.group_of(client, 20) for client in range(7)] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("num_clients", [1, 3, 5, 7, 20, 23, 100])
@pytest.mark.parametrize("groups", [1, 3, 5])
def test_blocks_are_consecutive_and_as_even_as_can_be(num_clients, groups):
    partitioner = DominantLabels(groups=groups)
    ids = [partitioner.group_of(client, num_clients) for client in range(num_clients)]
    assert ids == sorted(ids)
    assert 0 <= ids[0] <= ids[-1] < groups
    members = np.bincount(ids, minlength=groups)
    assert members.max() - members.min() <= 1


def test_twenty_clients_form_five_blocks_of_four():
    assert [DominantLabels().group_of(client, 20) for client in range(20)] == [client // 4 for client in range(20)]


@pytest.mark.parametrize(
    ("num_classes", "starts"),
    [(10, [0, 2, 4, 6, 8]), (4, [0, 0, 1, 2, 3]), (26, [0, 5, 10, 15, 20]), (100, [0, 20, 40, 60, 80])],
)
def test_dominant_labels_are_spread_over_the_classes(num_classes, starts):
    for group, start in enumerate(starts):
        expected = [start, (start + 1) % num_classes, (start + 2) % num_classes]
        assert DominantLabels().labels_of(group, num_classes) == expected


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.29, 1.0])
def test_dominant_labels_for_any_clients_and_classes(num_clients, num_classes, n, fraction):
    partitioner = DominantLabels(iid_fraction=fraction, samples_per_client=None)
    labels = mixed_labels(n, num_classes)
    clients = partitioner(labels, num_clients, num_classes, seed=1)
    (size,) = set(sizes(clients))
    table = counts(labels, clients, num_classes)
    iid = int(fraction * size + 1e-6)
    for client, row in enumerate(table):
        dominant = partitioner.labels_of(partitioner.group_of(client, num_clients), num_classes)
        expected = torch.full((num_classes,), iid // num_classes)
        expected[-1] += iid % num_classes
        for label in dominant:
            expected[label] += (size - iid) // 3
        expected[dominant[-1]] += (size - iid) % 3
        assert row.tolist() == expected.tolist()


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
@pytest.mark.by_default(but=["0.0-40-100-20000", "0.2-40-100-20000", "1.0-40-100-20000"])
def test_none_takes_the_most_that_fits(num_clients, num_classes, n, fraction):
    labels = mixed_labels(n, num_classes)

    def fits(size):
        try:
            DominantLabels(fraction, size)(labels, num_clients, num_classes, seed=1)
        except MisconfigurationException:
            return False
        return True

    most = len(DominantLabels(fraction, None)(labels, num_clients, num_classes, seed=1)[0])
    assert fits(most)
    assert not any(fits(size) for size in range(most + 1, min(most + 300, n // num_clients + 1)))


def test_dominant_labels_takes_a_random_part_of_each_class():
    # the last 10,000 of the pool are its test half
    labels = torch.cat([torch.arange(10).repeat_interleave(n) for n in (5000, 1000)])
    clients = DominantLabels()(labels, 20, 10, seed=1)
    share = (torch.cat(clients) >= 50000).float().mean()
    assert abs(share - 1 / 6) < 0.02


def test_dominant_labels_takes_unequal_classes_by_their_own_lists():
    # MNIST's classes are not of equal size
    sizes_of_mnist = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    labels = torch.arange(10).repeat_interleave(torch.tensor(sizes_of_mnist))
    table = counts(labels, DominantLabels()(labels, 20, 10, seed=1), 10)
    assert table[4].tolist() == [12, 12, 172, 172, 172, 12, 12, 12, 12, 12]


def test_a_class_that_runs_out_is_refused_with_what_fits():
    # labels 0, 2, 4, 6 and 8 are dominant for 8 of 20 clients and IID for all: 8 * 160 + 20 * 12
    labels = torch.arange(10).repeat_interleave(1520)
    assert sizes(DominantLabels()(labels, 20, 10, seed=1)) == [600] * 20
    with pytest.raises(MisconfigurationException) as refusal:
        DominantLabels()(labels[1:], 20, 10, seed=1)
    assert str(refusal.value) == (
        "DominantLabels samples_per_client=600 for num_clients=20 takes 1520 samples of class 0 and there are "
        "1519; use samples_per_client=599, the most that fits, or use fewer clients"
    )
    assert sizes(DominantLabels(samples_per_client=599)(labels[1:], 20, 10, seed=1)) == [599] * 20


def test_where_no_size_fits_it_says_so():
    # class 2 is the last of group 0, which even a single sample is taken of
    labels = torch.tensor([0, 1, 3, 4] * 50)
    for size in (None, 10):
        with pytest.raises(MisconfigurationException, match=r"of class \d and there are 0; no number fits, or use"):
            DominantLabels(samples_per_client=size)(labels, 5, 10, seed=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"iid_fraction": 1.5}, "iid_fraction=1.5 must be from 0 to 1"),
        ({"iid_fraction": float("nan")}, "iid_fraction=nan must be from 0 to 1"),
        ({"samples_per_client": 0}, "samples_per_client=0 must be at least 1, or null"),
        ({"grouping": "ring"}, "grouping='ring' must be one of block, mod"),
        ({"dominant": 0}, "dominant=0 must be at least 1"),
        ({"groups": 0}, "groups=0 must be at least 1"),
    ],
)
def test_dominant_labels_refuses(settings, sentence):
    with pytest.raises(MisconfigurationException, match=f"^DominantLabels {sentence}"):
        DominantLabels(**settings)


def test_refuses_more_dominant_labels_than_classes():
    with pytest.raises(MisconfigurationException, match="dominant=3 must be at most 2, the number of classes"):
        DominantLabels()(torch.arange(1000) % 2, 5, 2, seed=1)


def test_random_classes_gives_fedclassavgs_amounts():
    # floor(124,800 / 40) = 3,120 of 4,800 for one taker; two cannot have so many
    table = counts(LETTERS_TRAIN, RandomClasses()(LETTERS_TRAIN, 20, 26, seed=2021), 26)
    assert ((table > 0).sum(dim=1) == 2).all()
    takers = (table > 0).sum(dim=0)
    assert {0, 1, 2} <= set(takers.tolist())
    for k, number in enumerate(takers.tolist()):
        assert set(table[:, k].tolist()) - {0} == ({min(3120, 4800 // number)} if number else set())


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_random_classes_for_any_clients_and_classes(num_clients, num_classes, n, per_client):
    labels = mixed_labels(n, num_classes)
    table = counts(labels, RandomClasses(per_client)(labels, num_clients, num_classes, seed=4), num_classes)
    assert ((table > 0).sum(dim=1) == per_client).all()
    for k in range(num_classes):
        amounts = table[:, k][table[:, k] > 0]
        if len(amounts):
            there_are = int((labels == k).sum())
            assert set(amounts.tolist()) == {min(n // (per_client * num_clients), there_are // len(amounts))}


def test_clients_draw_their_classes_on_their_own():
    table = counts(CIFAR10, RandomClasses()(CIFAR10, 400, 10, seed=1), 10) > 0
    pairs = {tuple(row.nonzero().flatten().tolist()) for row in table}
    assert len(pairs) == 45
    # each class is drawn by 80 clients in expectation, with a deviation of 8
    assert (table.sum(dim=0) - 80).abs().max() < 32


def test_all_classes_a_client_is_an_even_division():
    table = counts(CIFAR10, RandomClasses(10)(CIFAR10, 20, 10, seed=1), 10)
    assert table.unique().tolist() == [300]


@pytest.mark.parametrize("per_client", [1, 2, 5])
@pytest.mark.parametrize("num_clients", [20, 100])
def test_equalized_random_classes_use_all_of_an_even_pool(num_clients, per_client):
    table = counts(CIFAR10_TRAIN, RandomClasses(per_client, equalize=True)(CIFAR10_TRAIN, num_clients, 10, seed=3), 10)
    assert set(table.flatten().tolist()) == {0, 50_000 // (num_clients * per_client)}
    assert table.sum(dim=1).unique().tolist() == [50_000 // num_clients]
    # and which classes go together is left to chance
    assert len({tuple(row) for row in (table > 0).tolist()}) >= min(num_clients, 10) * 2 // 3


@pytest.mark.parametrize(("num_clients", "num_classes", "n"), POOLS)
def test_equalized_random_classes_for_any_clients_and_classes(num_clients, num_classes, n):
    labels = mixed_labels(n, num_classes)
    table = counts(labels, RandomClasses(2, equalize=True)(labels, num_clients, num_classes, seed=4), num_classes)
    assert len(table[table > 0].unique()) == 1
    takers = (table > 0).sum(dim=0)
    assert takers.max() - takers.min() <= 1
    scarcest = min(int((labels == k).sum()) // int(takers[k]) for k in range(num_classes) if takers[k])
    assert int(table.max()) == min(scarcest, n // (2 * num_clients))


def test_the_scarce_class_is_the_one_that_is_refused():
    labels = torch.tensor([0] * 100 + [1] * 100 + [2])
    with pytest.raises(MisconfigurationException, match="leaves no sample of class 2 for each"):
        RandomClasses(2, equalize=True)(labels, 10, 3, seed=1)


def test_random_classes_refuses():
    with pytest.raises(MisconfigurationException, match=r"^RandomClasses classes_per_client=0 must be at least 1"):
        RandomClasses(0)
    with pytest.raises(MisconfigurationException, match="classes_per_client=11 must be at most 10, the number"):
        RandomClasses(11)(CIFAR10, 20, 10, seed=1)
    with pytest.raises(MisconfigurationException, match="classes_per_client=3 must be at most 2, the number"):
        RandomClasses(3)(torch.arange(100) % 2, 5, 4, seed=1)
    with pytest.raises(MisconfigurationException, match=r"leaves no sample of class \d for each of the \d+ clients"):
        RandomClasses(2)(torch.arange(10).repeat_interleave(3), 20, 10, seed=1)
