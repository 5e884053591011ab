"""Statistics of columns over some of the rows."""

import numpy as np
import pytest
import torch

from pfl_lightning.data import preprocessing
from pfl_lightning.data.division import Division
from pfl_lightning.data.preprocessing import moments_of, standardized

NONE = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_moments_are_those_of_the_rows_alone(monkeypatch, chunk):
    monkeypatch.setattr(preprocessing, "CHUNK", chunk)
    values = np.random.default_rng(0).normal(1e6, 3, size=(50, 4))
    rows = torch.arange(0, 50, 3)
    mean, deviation = moments_of(torch.from_numpy(values), rows)
    np.testing.assert_allclose(mean, values[rows].mean(0), rtol=1e-12)
    np.testing.assert_allclose(deviation, values[rows].std(0), rtol=1e-9)


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -7.0])
@pytest.mark.parametrize("by", ["table", "client"])
def test_constant_columns_become_zero_also_where_others_differ(value, by):
    values = torch.full((30, 1), value, dtype=torch.float64)
    values[29] = 2 * value
    parts = [{"train": torch.arange(10), "test": torch.arange(10, 15)}]
    parts += [{"train": torch.arange(15, 28), "test": torch.arange(28, 30)}]
    scaled, statistics = standardized(values, Division(parts, NONE, NONE, []), by)
    assert scaled.abs().max() == 0 and all(deviation.item() == 0 for _, deviation in statistics)


def test_newcomers_are_scaled_as_the_federation_is_and_change_nothing_of_it():
    values = torch.arange(12.0)[:, None]
    parts = [{"train": torch.arange(start, start + 4)} for start in (0, 4, 8)]
    division = Division(parts, NONE, NONE, [], newcomers=1)
    of_table, [(mean, deviation)] = standardized(values, division, "table")
    assert mean == 3.5 and torch.allclose(of_table, ((values - 3.5) / deviation.item()))
    of_clients, each = standardized(values, division, "client")
    assert [mean.item() for mean, _ in each] == [1.5, 5.5, 9.5]
    assert torch.equal(of_clients[8:], of_clients[:4])


@pytest.mark.parametrize(
    ("codes", "known", "fill", "word"),
    [
        # the most frequent word is none of the vocabulary
        ([1, 1, 0, -1], ["a"], "mode", "a"),
        # the vocabulary has a word that no training row has
        ([1, 1], ["a", "b"], "mode", "b"),
        ([1, 1], ["a"], "mode", None),
        ([-1], ["a", "b"], "mode", None),
        ([1, 1], ["a", "b"], "a", "a"),
        ([1, 1], ["a", "b"], None, None),
    ],
)
def test_gaps_of_categories_are_filled_by_a_known_word_of_training_rows(codes, known, fill, word):
    assert preprocessing.filled_word(np.array(codes), ["a", "b"], known, fill) == word
