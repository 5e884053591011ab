"""What inputs are made by, under a guarantee of privacy."""

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import Diabetes, TableData
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.privacy import DPSGD, DPAverage
from pfl_lightning.tasks import Classification

pandas = pytest.importorskip("pandas", reason="needs the extra tables")
ROWS = 90


def table(**settings):
    drawn = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": drawn.normal(50, 12, ROWS),
            "weight": drawn.normal(70, 9, ROWS),
            "sex": drawn.choice(["f", "m"], ROWS),
            "ill": drawn.integers(0, 2, ROWS),
            "site": np.arange(ROWS) % 3,
        }
    )
    texts = settings.pop("texts", "categories" in settings)
    return TableData(frame, "ill", Classification(2), ["age", "weight", *["sex"] * texts], "site", **settings)


CLIENTS, SAMPLES = {"aggregator": DPAverage(noise_multiplier=1.0)}, {"example_privacy": DPSGD(noise_multiplier=1.0)}
GIVEN = {"age": [50, 12], "weight": [70, 9]}


def run(data, guarantee):
    data.setup()
    model = FedAvg(input_shape=data.input_shape, task=data.task, net=MLP)
    return fit(model, data, max_rounds=1, **guarantee)


@pytest.mark.parametrize(
    ("settings", "guarantee", "reason"),
    [
        (
            {"standardize": "table"},
            CLIENTS,
            r"samples of all clients.* aggregator=DPAverage .*=client",
        ),
        ({"texts": True}, CLIENTS, "samples of all clients.* aggregator=DPAverage "),
        ({"standardize": "table"}, SAMPLES, r"samples of all clients.* trainer\.example_privacy "),
        ({"standardize": "client"}, SAMPLES, r"samples of each client.* trainer\.example_privacy "),
    ],
    ids=["table", "vocabulary", "table, samples", "client, samples"],
)
def test_what_others_samples_decide_is_refused(settings, guarantee, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        run(table(**settings), guarantee)


@pytest.mark.parametrize(
    ("settings", "guarantee"),
    [
        ({"standardize": GIVEN}, CLIENTS),
        ({"standardize": GIVEN, "categories": {"sex": ["f", "m"]}}, SAMPLES),
        ({"standardize": "client"}, CLIENTS),
        ({"standardize": "table", "texts": True}, {}),
    ],
    ids=["given", "given, samples", "own statistics", "no guarantee"],
)
def test_what_is_given_or_a_client_s_own_is_fine(settings, guarantee):
    assert len(run(table(**settings), guarantee).rows) == 1


def test_data_that_are_always_fitted_on_all_clients_are_refused():
    with pytest.raises(MisconfigurationException, match=r"data=Diabetes .* samples of all clients"):
        run(Diabetes(), CLIENTS)
