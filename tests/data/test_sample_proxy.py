"""What clients lend to the server, of points that are all different."""

import pytest
import torch

from federations import CLASSES, blobs, points
from pfl_lightning.data.sample_proxy import sample_proxy


def lent(fraction, *sizes, by_class=False, seed=0):
    data = blobs(*sizes, by_class=by_class)
    data.setup()
    return data, sample_proxy(data, fraction, torch.Generator().manual_seed(seed))


def rows_of(part):
    return {tuple(row) for row in part.x.tolist()}


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize(("fraction", "per_class"), [(0.001, 1), (0.2, 4), (0.3, 6)])
def test_clients_lend_as_many_training_samples_of_each_class(fraction, per_class, by_class):
    data, proxy = lent(fraction, by_class=by_class)
    assert data.counts.sum() == 60 and proxy.y.bincount(minlength=CLASSES).tolist() == [per_class] * CLASSES
    train, others = set(), set()
    for client in range(4):
        train |= rows_of(data.part(client, "train"))
        others |= rows_of(data.part(client, "val")) | rows_of(data.part(client, "test"))
    assert len(rows_of(proxy)) == 3 * per_class and rows_of(proxy) <= train and not rows_of(proxy) & others
    truth = dict(zip(map(tuple, points(120, seed=0)[0].tolist()), points(120, seed=0)[1].tolist(), strict=True))
    assert all(truth[tuple(x)] == y for x, y in zip(proxy.x.tolist(), proxy.y.tolist(), strict=True))


def test_a_class_gives_what_it_has_and_a_missing_one_nothing():
    data, proxy = lent(1.0, 40, 12, by_class=True)
    counts = data.counts.sum(0)
    assert 0 < counts[1] < counts.sum() / 3 < counts[0] and counts[2] == 0
    assert proxy.y.bincount(minlength=CLASSES).tolist() == [round(float(counts.sum()) / 3), int(counts[1]), 0]


def test_who_lends_what_is_drawn_by_seed_from_all_clients():
    assert rows_of(lent(0.2)[1]) == rows_of(lent(0.2)[1]) != rows_of(lent(0.2, seed=1)[1])
    lenders = set()
    for seed in range(20):
        data, proxy = lent(0.2, seed=seed)
        lenders |= {k for k in range(4) if rows_of(data.part(k, "train")) & rows_of(proxy)}
    assert lenders == {0, 1, 2, 3}
