from collections import Counter

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Pause, Spy, fit, make_client, read_csv
from pfl_lightning.aggregators import GossipAverage
from pfl_lightning.callbacks import EdgeTable

SETTINGS = {"aggregator": GossipAverage(graph="random", degree=2), "clients_per_round": 3, "max_rounds": 3}


def test_each_direction_of_an_edge_has_a_row_and_a_resumed_table_is_complete(tmp_path):
    spy = Spy()
    whole = fit(make_client(), root=tmp_path / "whole", callbacks=[EdgeTable(), spy], **SETTINGS)
    rows = read_csv(whole.folder / "edges.csv")
    assert list(rows[0]) == ["round", "sender", "receiver", "bytes"]
    for number, (row, cohort) in enumerate(zip(whole.rows, spy.cohorts, strict=True), 1):
        edges = [edge for edge in rows if int(edge["round"]) == number]
        pairs = Counter((int(edge["sender"]), int(edge["receiver"])) for edge in edges)
        assert pairs == Counter((k, j) for k in cohort for j in cohort if k != j)
        assert sum(int(edge["bytes"]) for edge in edges) == row["server/edge_bytes"]
    again = tmp_path / "again"
    fit(make_client(), root=again, callbacks=[EdgeTable(), Pause(2)], **SETTINGS)
    resumed = fit(make_client(), root=again, ckpt_path="last", callbacks=[EdgeTable()], **SETTINGS)
    assert read_csv(resumed.folder / "edges.csv") == rows


def test_a_second_run_begins_with_an_empty_table():
    table = EdgeTable()
    for _ in range(2):
        fit(make_client(), callbacks=[table], **SETTINGS | {"max_rounds": 1})
        assert table.table[:, 0].tolist() == [1] * 6


def test_an_aggregator_without_edges_is_refused():
    with pytest.raises(MisconfigurationException, match="EdgeTable: aggregator=WeightedAverage"):
        fit(make_client(), callbacks=[EdgeTable()])
