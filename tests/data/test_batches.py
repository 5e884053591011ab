import pytest
import torch

from pfl_lightning.data import epoch_order


def order(n, batch_size, last, seed=0):
    return epoch_order(n, batch_size, last, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("n", "batch_size", "last", "length"),
    [
        (10, 4, "keep", 10),
        (10, 4, "drop", 8),
        (10, 4, "wrap", 12),
        (8, 4, "keep", 8),
        (8, 4, "drop", 8),
        (8, 4, "wrap", 8),
        (4, 4, "drop", 4),
        (4, 4, "wrap", 4),
        (3, 4, "keep", 3),
        (3, 4, "drop", 3),
        (3, 8, "wrap", 8),
        (1, 4, "keep", 1),
        (1, 4, "drop", 1),
        (1, 4, "wrap", 4),
        (5, 1, "drop", 5),
    ],
)
def test_length_and_use_of_samples(n, batch_size, last, length):
    uses = torch.bincount(order(n, batch_size, last), minlength=n)
    assert uses.sum() == length
    assert len(uses) == n
    # as even as the length allows: no sample twice before all are used
    assert uses.max() - uses.min() <= 1


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (3, 8), (1, 4)])
def test_modes_differ_only_at_the_end(n, batch_size):
    keep, drop, wrap = (order(n, batch_size, last) for last in ("keep", "drop", "wrap"))
    assert torch.equal(drop, keep[: len(drop)])
    assert torch.equal(wrap, keep.repeat(batch_size)[: len(wrap)])


def test_shuffles_by_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = order(100, 10, "keep", seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    assert torch.equal(first, order(100, 10, "keep", seed=1))
    assert not torch.equal(first, order(100, 10, "keep", seed=2))
    assert not torch.equal(first, torch.arange(100))


def test_generator_moves_on_between_epochs():
    generator = torch.Generator().manual_seed(0)
    first, second = (epoch_order(50, 10, "keep", generator) for _ in range(2))
    assert not torch.equal(first, second)
