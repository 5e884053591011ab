import pytest
import torch

from federations import points
from pfl_lightning.data import CHUNK, Samples


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
def test_chunks_are_all_samples_in_their_order(size):
    part = Samples(*points(20, seed=0))
    chunks = list(part.chunks(size))
    assert [len(y) for _, y in chunks[:-1]] == [size] * (len(chunks) - 1) and 0 < len(chunks[-1][1]) <= size
    assert torch.equal(torch.cat([x for x, _ in chunks]), part.x)
    assert torch.equal(torch.cat([y for _, y in chunks]), part.y)


def test_chunks_are_as_large_as_what_goes_through_a_net_at_once():
    assert [len(y) for _, y in Samples(*points(CHUNK + 5, seed=0)).chunks()] == [CHUNK, 5]
