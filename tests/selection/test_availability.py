import random

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, equal, fit, make_client, same_end
from pfl_lightning.selection import Availability, RoundStart

TABLE = """client,morning,noon,night
3,1,0,0
0,0,1,0
1,1,1,0
2,0,1,0
"""


def written(folder, text):
    path = folder / "table.csv"
    path.write_text(text)
    return Availability(str(path))


def cohorts(cohort, **settings):
    spy = Spy()
    run = fit(make_client(), blobs(), cohort=cohort, callbacks=[spy], **{"max_rounds": 6, **settings})
    return spy.cohorts, run


def test_the_table_is_obeyed_and_begins_again(tmp_path):
    drawn, run = cohorts(written(tmp_path, TABLE))
    assert drawn == [[1, 3], [0, 1, 2], []] * 2
    assert [row["clients"] for row in run.rows] == [2, 3, 0] * 2
    assert run.rows[2]["val/acc"] == run.rows[1]["val/acc"]


def test_no_more_than_take_part_in_a_round_are_drawn_all_as_likely(tmp_path):
    drawn, _ = cohorts(written(tmp_path, TABLE), clients_per_round=2, max_rounds=30)
    assert [cohort for cohort in drawn[::3] if cohort != [1, 3]] == []
    noon = {tuple(cohort) for cohort in drawn[1::3]}
    assert noon == {(0, 1), (0, 2), (1, 2)}


def test_where_all_are_always_there_it_is_uniform(tmp_path):
    table = "client,always\n" + "".join(f"{client},1.0\n" for client in range(4))
    plain, one = cohorts(None, clients_per_round=2)
    drawn, other = cohorts(written(tmp_path, table), clients_per_round=2)
    assert plain == drawn and equal(one.weights, other.weights)


def test_a_rate_is_a_probability(tmp_path):
    rates = {0: 0.2, 1: 0.8, 2: 0.0, 3: 1.0}
    there = written(tmp_path, "client,rate\n" + "".join(f"{k},{rate}\n" for k, rate in rates.items()))
    there.setup(dict.fromkeys(range(4), 5))
    drawn = [there.choose(RoundStart(round, range(4), 4, random.Random(round), dict)) for round in range(3000)]
    for client, rate in rates.items():
        share = sum(client in cohort for cohort in drawn) / 3000
        assert share == rate if rate in (0, 1) else abs(share - rate) < 0.03


def test_rates_are_dealt_out_in_turn(tmp_path):
    some, _ = cohorts(Availability([1, 0]), max_rounds=2)
    assert some == [[0, 2], [0, 2]]
    table = "client,rate\n" + "".join(f"{client},{[0.5, 0.9, 1][client % 3]}\n" for client in range(4))
    drawn, _ = cohorts(Availability([0.5, 0.9, 1]))
    assert drawn == cohorts(written(tmp_path, table))[0]


@pytest.mark.parametrize("rates", [[], [1, 1.5], [float("nan")]])
def test_rates_out_of_range_are_refused(rates):
    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort\.table"):
        Availability(rates)


def test_it_resumes_bit_for_bit(tmp_path):
    there = written(tmp_path, "client,rate\n0,0.5\n1,0.3\n2,1\n3,0.9\n")

    def run(root, rounds, **kwargs):
        return fit(make_client(), blobs(), root, cohort=there, clients_per_round=2, max_rounds=rounds, **kwargs)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "halves", 3)
    assert same_end(whole, run(tmp_path / "halves", 6, ckpt_path="last"))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("client,rate\n0,1\n1,1\n3,1\n", "has no row for client 2; give each of the 4 clients"),
        ("client,rate\n0,1\n1,2\n", "line 3: .* 1 rounds a number from 0 to 1"),
        ("client,a,b\n0,1,1\n1,1\n", "line 3: .* 2 rounds"),
        ("client,rate\n0,1\n0,1\n", "line 3"),
        ("client,rate\nanna,1\n", "line 2"),
        ("client,rate\n0,nan\n", "line 2"),
        ("client\n0\n", "line 2"),
        ("", "has no row for client 0"),
    ],
)
def test_a_table_that_does_not_say_is_refused(text, reason, tmp_path):
    with pytest.raises(MisconfigurationException, match=f"trainer.cohort.table=.*table.csv,? {reason}"):
        fit(make_client(), cohort=written(tmp_path, text))


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort\.table=nowhere\.csv can't be read: No such"):
        fit(make_client(), cohort=Availability("nowhere.csv"))
