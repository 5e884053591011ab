"""Graphs of clients: neighbours, weights, and what is refused."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import make_client, set_up
from pfl_lightning.aggregators import GossipAverage
from pfl_lightning.server.graph import both_ways, metropolis, regular

GIVEN = {0: [1, 2, 3], 3: [4]}


def graph(clients=6, **settings):
    return set_up(GossipAverage(**settings), make_client(), clients)


def test_a_ring_has_the_clients_in_their_order():
    assert graph().neighbours(range(6), 0) == {0: [1, 5], 1: [0, 2], 2: [1, 3], 3: [2, 4], 4: [3, 5], 5: [0, 4]}
    # who stays away takes edges along, and no new ones are made
    assert graph().neighbours([0, 2, 3, 5], 0) == {0: [5], 2: [3], 3: [2], 5: [0]}
    assert graph(clients=2).neighbours([0, 1], 0) == {0: [1], 1: [0]}
    assert graph(clients=1).neighbours([0], 0) == {0: []}


def test_a_full_graph_has_all_pairs_of_those_who_came():
    assert graph(graph="full").neighbours([1, 2, 5], 0) == {1: [2, 5], 2: [1, 5], 5: [1, 2]}


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("degree", range(1, 9))
def test_all_clients_have_as_many_neighbours_where_a_graph_can_be_so(count, degree):
    hears = regular(range(count), degree)
    wanted, degrees = min(degree, count - 1), sorted(map(len, hears.values()))
    odd = wanted % 2 and count % 2
    assert degrees == ([wanted - 1] if odd else []) + [wanted] * (count - bool(odd))
    assert all(k in hears[j] and j != k for k, others in hears.items() for j in others)


def test_random_graphs_change_by_round_and_seed_alone():
    server, clients = graph(graph="random", degree=3, clients=12), range(12)
    drawn = [server.neighbours(clients, round) for round in range(6)]
    assert drawn == [graph(graph="random", degree=3, clients=12).neighbours(clients, round) for round in range(6)]
    assert len({str(hears) for hears in drawn}) == 6
    server.seed = 1
    assert server.neighbours(clients, 0) not in drawn
    # also of a part of the clients, each of which has its neighbours
    assert {len(others) for others in server.neighbours([2, 3, 5, 7, 8, 9, 11, 10], 0).values()} == {3}


@pytest.mark.parametrize("hears", [both_ways(range(5), [(0, 1), (0, 2), (0, 3), (3, 4)]), regular(range(9), 4)])
def test_weights_are_symmetric_with_rows_of_sum_1(hears):
    w = torch.tensor(metropolis(hears), dtype=torch.float64)
    assert torch.equal(w, w.T) and (w >= 0).all()
    torch.testing.assert_close(w.sum(1), torch.ones(len(w), dtype=torch.float64), rtol=0, atol=1e-15)
    connected = torch.tensor([[j in others or j == k for j in hears] for k, others in hears.items()])
    assert torch.equal(w > 0, connected)


def test_a_random_graph_leaves_the_expected_part_of_the_distance_to_the_mean():
    count, degree = 10, 4
    server = graph(graph="random", degree=degree, clients=count)
    x = torch.randn(count, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean()
    left = [
        float((torch.tensor(metropolis(server.neighbours(range(count), round)), dtype=x.dtype) @ x).square().sum())
        for round in range(2000)
    ]
    expected = (1 - degree / (count - 1)) / (degree + 1)
    assert sum(left) / len(left) / float(x.square().sum()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("how", ["dict", "file"])
def test_a_given_graph_needs_each_edge_once(tmp_path, how):
    given = GIVEN
    if how == "file":
        path = tmp_path / "edges.csv"
        path.write_text("client,neighbour\n0,1\n1,0\n0,2\n\n0,3\n3,4\n")
        given = str(path)
    server = graph(graph=given)
    assert server.neighbours(range(6), 0) == {0: [1, 2, 3], 1: [0], 2: [0], 3: [0, 4], 4: [3], 5: []}
    assert server.neighbours([1, 3, 4], 7) == {1: [], 3: [4], 4: [3]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({0: [6]}, "clients 0 and 6"),
        ({2: [2]}, "clients 2 and 2"),
        ({-1: [2]}, "clients -1 and 2"),
        ("rings", "no file"),
    ],
)
def test_a_graph_of_other_clients_is_refused_by_name(given, named):
    with pytest.raises(MisconfigurationException, match=r"aggregator\.graph=") as refused:
        graph(graph=given)
    assert named in str(refused.value)


@pytest.mark.parametrize("row", ["0;1", "0,one", "0,1,2"])
def test_a_file_of_something_else_is_refused(tmp_path, row):
    path = tmp_path / "edges.csv"
    path.write_text(f"client,neighbour\n{row}\n")
    with pytest.raises(MisconfigurationException, match=r"aggregator\.graph=.*edges\.csv"):
        graph(graph=str(path))


def test_random_pairs_are_the_least():
    hears = graph(graph="random", degree=1, clients=6).neighbours(range(6), 0)
    assert all(hears[other] == [client] for client, (other,) in hears.items()) and len(hears) == 6


def test_no_neighbours_at_all_are_refused():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.degree=0"):
        GossipAverage(degree=0)
