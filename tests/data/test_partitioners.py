import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import IID, Dirichlet, Pathological

# A partition depends on the labels alone, its sizes and class mixes only on how many samples each class has:
# the published partitions can be checked without the images.
CIFAR10 = torch.arange(10).repeat_interleave(6000)
CIFAR100 = torch.arange(100).repeat_interleave(600)
ALL = [
    IID(),
    Dirichlet(alpha=0.1),
    Dirichlet(alpha=100.0, min_size=40),
    Pathological(),
    Pathological(balanced=True),
    Pathological(classes_per_client=10),
]


def name(partitioner):
    return f"{type(partitioner).__name__}{list(vars(partitioner).values())}"


def shuffled_labels(n=2000, num_classes=10):
    return torch.arange(n)[torch.from_numpy(np.random.default_rng(5).permutation(n))] % num_classes


@pytest.mark.parametrize(
    ("alpha", "mean_classes"),
    [(0.01, 12.45), (0.05, 30.95), (0.1, 46.05), (0.25, 68.9), (0.5, 85.1), (1.0, 94.05)],
)
def test_dirichlet_gives_the_published_cifar100_partition(alpha, mean_classes):
    # floors are Table 3 of the cwFedAvg paper (arXiv v1); 20 clients, PFLlib's seed 1
    clients = Dirichlet(alpha=alpha)(CIFAR100, 20, 100, seed=1)
    assert np.mean([len(CIFAR100[rows].unique()) for rows in clients]) == pytest.approx(mean_classes, abs=1e-9)


def test_dirichlet_gives_pfllibs_cifar10_partition():
    clients = Dirichlet(alpha=0.1)(CIFAR10, 20, 10, seed=1)
    assert [len(rows) for rows in clients] == [
        *[1621, 1814, 1211, 2080, 5128, 4264, 1440, 2622, 2974, 3236],
        *[1164, 1964, 5994, 1527, 3100, 4325, 4252, 3175, 5449, 2660],
    ]
    assert [client for client, rows in enumerate(clients) if len(CIFAR10[rows].unique()) == 1] == [17]


def test_pathological_gives_pfllibs_cifar10_partition():
    clients = Pathological(classes_per_client=2)(CIFAR10, 20, 10, seed=1)
    assert [len(rows) for rows in clients] == [
        *[2266, 1250, 2243, 6241, 2009, 952, 1734, 7305, 1859, 2514],
        *[2046, 5581, 1605, 1114, 1548, 7733, 2649, 1442, 2084, 5825],
    ]
    blocks = [CIFAR10[rows].unique().tolist() for rows in clients]
    assert blocks == [[2 * (client // 4), 2 * (client // 4) + 1] for client in range(20)]


def test_pathological_slices_follow_the_pool_order():
    clients = Pathological()(CIFAR10, 20, 10, seed=1)
    of_class_0 = torch.cat([rows[CIFAR10[rows] == 0] for rows in clients[:4]])
    assert torch.equal(of_class_0, torch.arange(6000))


def test_pathological_cifar100_has_blocks_of_two_clients():
    clients = Pathological(classes_per_client=10)(CIFAR100, 20, 100, seed=1)
    for client, rows in enumerate(clients):
        assert CIFAR100[rows].unique().tolist() == list(range(client // 2 * 10, client // 2 * 10 + 10))


def test_pathological_balanced_is_even():
    clients = Pathological(classes_per_client=2, balanced=True)(CIFAR10, 20, 10, seed=1)
    assert [len(rows) for rows in clients] == [3000] * 20


def test_pathological_shares_lie_between_a_tenth_of_fair_and_fair():
    clients = Pathological(classes_per_client=10)(CIFAR10, 20, 10, seed=2)
    counts = torch.stack([torch.bincount(CIFAR10[rows], minlength=10) for rows in clients])
    assert counts[:-1].min() >= 30
    assert counts[:-1].max() < 300
    assert counts[-1].min() > 300


def test_pathological_last_block_may_have_fewer_classes():
    # 20 * 3 / 10 = 6 clients a class: blocks of 6, 6, 6 with 3 classes and of 2 with the last class
    clients = Pathological(classes_per_client=3)(CIFAR10, 20, 10, seed=1)
    assert [len(CIFAR10[rows].unique()) for rows in clients] == [3] * 18 + [1] * 2
    assert sum(map(len, clients)) == 60000


def test_pathological_gives_every_client_its_classes_in_small_pools():
    clients = Pathological(classes_per_client=2)(torch.arange(10).repeat_interleave(4), 20, 10, seed=1)
    assert [len(rows) for rows in clients] == [2] * 20


def test_iid_sizes_and_mixes_are_even():
    clients = IID()(CIFAR10[:-7], 20, 10, seed=1)
    assert {len(rows) for rows in clients} == {2999, 3000}
    counts = torch.stack([torch.bincount(CIFAR10[rows], minlength=10) for rows in clients])
    # hypergeometric with mean 300 and deviation 16
    assert (counts - 300).abs().max() < 80


def test_alpha_sets_the_skew():
    def skew(alpha):
        clients = Dirichlet(alpha=alpha)(CIFAR10, 20, 10, seed=3)
        return np.mean([torch.bincount(CIFAR10[rows]).max() / len(rows) for rows in clients])

    assert skew(0.05) > skew(0.5) > skew(5.0) > skew(500.0)
    assert skew(500.0) < 0.13


@pytest.mark.parametrize("partitioner", ALL, ids=name)
def test_every_sample_has_one_owner(partitioner):
    labels = shuffled_labels()
    clients = partitioner(labels, 20, 10, seed=7)
    assert len(clients) == 20
    assert min(map(len, clients)) >= 1
    assert all(rows.dtype == torch.int64 for rows in clients)
    assert torch.equal(torch.cat(clients).sort().values, torch.arange(len(labels)))


@pytest.mark.parametrize("partitioner", ALL, ids=name)
def test_depends_on_the_seed_alone_and_leaves_global_randomness(partitioner):
    np.random.seed(1)
    torch.manual_seed(1)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    first = partitioner(shuffled_labels(), 20, 10, seed=7)
    assert np.array_equal(numpy_before, np.random.get_state()[1])
    assert torch.equal(torch_before, torch.get_rng_state())
    np.random.seed(2)
    second = partitioner(shuffled_labels(), 20, 10, seed=7)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("partitioner", [p for p in ALL if not getattr(p, "balanced", False)], ids=name)
def test_seed_matters(partitioner):
    first, second = (partitioner(shuffled_labels(), 20, 10, seed=seed) for seed in (1, 2))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_min_size_is_reached_by_drawing_again():
    # 20 clients, 2,000 samples: the first draw has a client with fewer
    first = Dirichlet(alpha=0.1)(shuffled_labels(), 20, 10, seed=1)
    larger = Dirichlet(alpha=0.1, min_size=20)(shuffled_labels(), 20, 10, seed=1)
    assert min(map(len, first)) < 20 <= min(map(len, larger))


def test_underflowing_alpha_gives_each_class_to_one_client():
    clients = Dirichlet(alpha=1e-6)(CIFAR10, 5, 10, seed=1)
    assert sum(map(len, clients)) == 60000
    owners = sum(len(CIFAR10[rows].unique()) for rows in clients)
    assert owners == 10


@pytest.mark.parametrize("num_clients", [1, 5])
def test_absent_class_is_no_problem_for_dirichlet(num_clients):
    labels = torch.arange(10).repeat_interleave(100)
    clients = Dirichlet(alpha=1.0)(labels, num_clients, 12, seed=1)
    assert sum(map(len, clients)) == 1000


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_alpha(alpha):
    with pytest.raises(MisconfigurationException, match=f"alpha={alpha} must be above 0"):
        Dirichlet(alpha=alpha)


def test_a_huge_alpha_is_even():
    clients = Dirichlet(alpha=1e308)(CIFAR10, 20, 10, seed=1)
    counts = torch.stack([torch.bincount(CIFAR10[rows], minlength=10) for rows in clients])
    # cuts are rounded down
    assert (counts - 300).abs().max() <= 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dirichlet(alpha="a"), "^Dirichlet alpha='a' must be a number"),
        (lambda: Dirichlet(min_size=2.5), "^Dirichlet min_size=2.5 must be an integer"),
        (lambda: Pathological(classes_per_client=2.0), "^Pathological classes_per_client=2.0 must be an integer"),
    ],
)
def test_refuses_other_types_than_a_setting_has(make, says):
    with pytest.raises(MisconfigurationException, match=says):
        make()


def test_refuses_min_size():
    with pytest.raises(MisconfigurationException, match="min_size=0 must be at least 1"):
        Dirichlet(min_size=0)
    with pytest.raises(MisconfigurationException, match=r"min_size=3001 was not reached in 0 draws"):
        Dirichlet(min_size=3001)(CIFAR10, 20, 10, seed=1)


def test_gives_up_drawing(monkeypatch):
    monkeypatch.setattr(Dirichlet, "MAX_DRAWS", 5)
    with pytest.raises(MisconfigurationException, match=r"in 5 draws with alpha=0.01 .* use a larger alpha"):
        Dirichlet(alpha=0.01, min_size=1)(CIFAR10, 100, 10, seed=1)


@pytest.mark.parametrize("partitioner", ALL, ids=name)
def test_refuses_more_clients_than_samples(partitioner):
    with pytest.raises(MisconfigurationException, match=r"num_clients=11 .* at most 10 clients"):
        partitioner(torch.arange(10), 11, 10, seed=1)


def test_refuses_classes_per_client():
    with pytest.raises(MisconfigurationException, match="classes_per_client=0 must be at least 1"):
        Pathological(classes_per_client=0)
    with pytest.raises(MisconfigurationException, match="classes_per_client=11 must be at most 10"):
        Pathological(classes_per_client=11)(CIFAR10, 20, 10, seed=1)


@pytest.mark.parametrize(("num_clients", "enough"), [(3, 5), (4, 5), (7, 4), (12, 4)])
def test_refuses_to_drop_classes_and_its_advice_works(num_clients, enough):
    with pytest.raises(MisconfigurationException, match=f"use classes_per_client={enough}, or make"):
        Pathological(classes_per_client=2)(CIFAR10, num_clients, 10, seed=1)
    clients = Pathological(classes_per_client=enough)(CIFAR10, num_clients, 10, seed=1)
    assert sum(map(len, clients)) == 60000


def test_refuses_classes_smaller_than_their_clients():
    with pytest.raises(MisconfigurationException, match="needs 4 samples of class 0 and there are 3"):
        Pathological()(torch.arange(10).repeat_interleave(3), 20, 10, seed=1)
