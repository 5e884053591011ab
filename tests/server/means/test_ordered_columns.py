import pytest
import torch

from pfl_lightning.server.means.bulyan import mean_near_median
from pfl_lightning.server.means.vectors import ordered_columns


def by_sorting_distances(rows, count):
    """The same mean, from each value's distance to the median."""
    ordered = rows.double().sort(0).values
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    near = rows.double() - (low + (high - low) / 2)
    return low + (high - low) / 2 + near.gather(0, near.abs().argsort(dim=0, stable=True)[:count]).mean(0)


@pytest.mark.parametrize(("n", "count"), [(3, 3), (7, 3), (8, 4), (31, 11)])
@pytest.mark.parametrize("values", ["continuous", "tied"])
def test_the_values_near_the_median_are_those_of_the_least_distances(n, count, values):
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 200, generator=generator)
    if values == "tied":
        rows = torch.randint(-3, 4, (n, 200), generator=generator).float()
    result = mean_near_median(rows, count)
    torch.testing.assert_close(result, by_sorting_distances(rows, count), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_ordered_and_the_uploads_stay(dtype):
    rows = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows[3, 4] = torch.inf
    before = rows.clone()
    assert torch.equal(ordered_columns(rows), rows.sort(0).values) and torch.equal(rows, before)
    # one row and one column: the transposed tensor is the tensor itself
    for single in (rows[:1].clone(), rows[:, :1].clone()):
        kept = single.clone()
        assert torch.equal(ordered_columns(single), kept.sort(0).values) and torch.equal(single, kept)
