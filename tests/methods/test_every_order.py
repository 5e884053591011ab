"""Every method: neither the order in which clients train and deliver nor a pause changes a bit."""

from functools import partial

import pytest

from federations import check_order_and_resume
from pfl_lightning.aggregators import (
    FeatureGenerator,
    FedDF,
    HyperNetwork,
    NormalizedAverage,
    PFedSim,
    SubregionAverage,
    TrainablePrototypes,
)
from pfl_lightning.methods.registry import METHODS

CLIENTS = {
    "APFL": {"mix": "outputs"},
    "APFL, parameters": {"mix": "parameters"},
    "APPLE": {"rho_lr": 0.1, "mu": 0.5, "penalty_share": 1.0},
    "Ditto": {"personal_lambda": 2.0},
    "FedALA": {"layers": 3, "max_passes": 5},
    "FedClassAvg": {"contrastive": False},
    "FedFed": {"distill_rounds": 1},
    "FedGen": {"noise_size": 4, "hidden": 6},
    "FedKD": {"distill": 1.0},
    "FedMD": {"initial_epochs": 2, "distill_batch_size": 4},
    "FedRep": {"head_epochs": 2},
    "FedSelect": {"every": 1},
    **{name: {"ranks": [1, 2]} for name in ("FlexLoRA", "LoRA-SVD")},
    "FLoRA": {"ranks": [1, 2]},
    "HetLoRA": {"ranks": [1, 2]},
    "KT-pFL": {"max_epochs": 2, "distill_batch_size": 4},
    "MOON": {"mu": 5.0},
    "Per-FedAvg": {"alpha": 0.3},
    "Per-FedAvg, HF": {"alpha": 0.3, "variant": "HF"},
}
"""Settings with which a method's terms count within three rounds, or its work on public samples is short."""
SERVERS = {
    "FedDF": partial(FedDF, server_steps=4, batch_size=5),
    "FedGen": partial(FeatureGenerator, server_steps=3, batch_size=6),
    "FedNova": partial(NormalizedAverage, beta=0.5),
    "FedTGP": partial(TrainablePrototypes, server_epochs=3),
    "FLOCO": partial(SubregionAverage, tau=0.7),
    "pFedHN": partial(HyperNetwork, hidden=7, layers=2),
    "pFedSim": partial(PFedSim, 0.4),
}
"""Servers in place of the method's own, for the same reasons."""
ROUND = {"optimizer_lifetime": "round"}
RUNS = {
    **dict.fromkeys(("Dis-PFL", "FedNova", "FlexLoRA", "FLoRA", "LoRA-SVD", "RoLoRA"), ROUND),
    "FedBABU": {"evaluate": "before"},
    "FedBABU, both": {"evaluate": "both"},
    "FedRep": {"evaluate": "before"},
    "FedRep, both": {"evaluate": "both"},
}
"""Settings of the run: methods that refuse an optimizer with memory of earlier rounds, or train for evaluations."""
VARIANTS = ("APFL, parameters", "FedBABU, both", "FedRep, both", "Per-FedAvg, HF")


@pytest.mark.parametrize("case", [*(method.name for method in METHODS), *VARIANTS])
@pytest.mark.by_default("APFL", "FedBABU")
def test_neither_the_order_of_clients_nor_a_pause_changes_a_bit(case, tmp_path):
    (method,) = (method for method in METHODS if method.name == case.split(", ")[0])
    own, run = (table.get(case, table.get(method.name, {})) for table in (CLIENTS, RUNS))
    server = SERVERS.get(method.name, method.aggregator)
    check_order_and_resume(partial(method.client, **own), tmp_path, aggregator=server and server(), **run)


def test_each_setting_is_of_a_method():
    assert {*CLIENTS, *SERVERS, *RUNS} <= {*(method.name for method in METHODS), *VARIANTS}
