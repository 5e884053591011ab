import math

import pytest
import torch

from pfl_lightning.privacy.noise import clipped, next_clip, noise_beside_counts

DRAWN = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ODD = {
    "zero": torch.zeros(40, dtype=torch.float64),
    "small": DRAWN * 1e-6,
    "usual": DRAWN,
    "huge": DRAWN * 1e150,
    "beyond": DRAWN * 1e300,
    "infinite": DRAWN.clone().index_fill_(0, torch.tensor(3), math.inf),
    "nan": DRAWN.clone().index_fill_(0, torch.tensor(39), math.nan),
}


@pytest.mark.parametrize("sizes", [None, [10, 30], [1, 2, 3, 34], [0, 40]], ids=str)
@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_no_change_is_longer_than_the_bound(change, sizes):
    assert float(torch.linalg.vector_norm(clipped(change, 0.7, sizes))) <= 0.7 * (1 + 1e-12)


def test_it_keeps_the_direction_and_what_is_within():
    cut = clipped(DRAWN, 0.5)
    assert torch.allclose(cut / 0.5, DRAWN / DRAWN.norm(), rtol=1e-12)
    assert torch.equal(clipped(DRAWN, math.inf), DRAWN) and torch.equal(clipped(DRAWN, 100.0), DRAWN)


def test_each_entry_has_its_own_bound():
    cut = clipped(DRAWN, 1.0, [10, 30])
    assert [float(part.norm()) for part in cut.split([10, 30])] == pytest.approx([0.5**0.5] * 2)
    # the one that is within its bound stays as it is
    mixed = torch.cat([DRAWN[:10] * 1e-3, DRAWN[10:]])
    assert torch.equal(clipped(mixed, 1.0, [10, 30])[:10], mixed[:10])


def test_sum_and_count_cost_together_what_they_shall():
    z = noise_beside_counts(1.5, 2.0)
    # two Gaussians side by side: squares of sensitivity over noise add up
    assert z**-2 + (0.5 / 2.0) ** 2 == pytest.approx(1.5**-2)
    assert noise_beside_counts(0.0, 2.0) == 0


@pytest.mark.parametrize("start", [1e-3, 1e3])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_bound_comes_to_a_quantile_of_the_norms_from_below_and_from_above(start, quantile):
    norms = torch.linspace(1, 2, 1001)
    clip = start
    for _ in range(400):
        clip = next_clip(clip, float((norms <= clip).double().mean()), quantile, 0.2)
    assert clip == pytest.approx(1 + quantile, rel=0.02)
