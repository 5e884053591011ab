import random

import pytest

from federations import fit, make_client
from pfl_lightning.selection import Cyclic, RoundStart


@pytest.mark.parametrize(("clients", "size"), [(6, 2), (7, 3), (5, 5), (4, 1)])
def test_clients_come_in_turn_and_not_before_their_time(clients, size):
    last: dict[int, int] = {}
    for round in range(40):
        cohort = Cyclic().choose(RoundStart(round, range(clients), size, random.Random(0), dict))
        assert len(set(cohort)) == size
        for client in cohort:
            assert round - last.get(client, -clients) >= clients // size
            last[client] = round
    assert len(last) == clients


def test_a_run_in_turn():
    run = fit(make_client(), cohort=Cyclic(), clients_per_round=3, max_rounds=3)
    assert [row["cohort"] for row in run.rows] == ["0 1 2", "0 1 3", "0 2 3"]
