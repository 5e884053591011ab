"""Who takes part, where clients are at sites."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import equal, fit, make_client
from pfl_lightning.methods import FedPer
from pfl_lightning.selection import Oort, Poisson, PowerOfChoice
from sweeps import swept

CHOICES = {
    "asked": lambda: PowerOfChoice(3),
    "remembered": lambda: PowerOfChoice(3, "remembered"),
    "oort": lambda: Oort(exploration=0.5),
    "poisson": lambda: Poisson(0.3),
}


@pytest.mark.parametrize("choice", swept(CHOICES, ("poisson",), str))
def test_sites_take_part_as_clients_do_here(choice, tmp_path):
    def made():
        return make_client(FedPer)

    settings = {"max_rounds": 4} | ({} if choice == "poisson" else {"clients_per_round": 2})
    grid = grid_of(made, tmp_path, **settings)
    grid.nodes = {node: own | {"allow": "received_loss loss loss_squared"} for node, own in grid.nodes.items()}
    remote = deploy(grid, made, cohort=CHOICES[choice](), **settings)
    here = fit(made(), cohort=CHOICES[choice](), **settings)
    assert equal(remote.weights, here.weights)
    assert equal(remote.trainer.rounds.cohort.state, here.trainer.rounds.cohort.state)
    for name in ("cohort", "bytes/up", "bytes/down"):
        assert [row[name] for row in remote.rows] == [row[name] for row in here.rows]


def test_a_site_tells_no_loss_that_it_does_not_allow(tmp_path):
    grid = grid_of(make_client, tmp_path, clients_per_round=2)
    with pytest.warns(UserWarning, match="sends loss_squared, which this site keeps to itself"):
        run = deploy(grid, make_client, cohort=Oort(), clients_per_round=2, max_rounds=1)
    assert run.rows[0]["clients_refused"] == 2 and not run.trainer.rounds.cohort.state["utility"]
