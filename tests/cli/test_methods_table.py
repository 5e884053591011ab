"""The table of methods: complete, measured, and that of the documentation."""

import csv
import io
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import CONFIGS, pfl, refusal
from pfl_lightning import WeightedAverage, aggregators, methods, server
from pfl_lightning.aggregators import client_weights
from pfl_lightning.cli.measuring import CLIENTS, describe, net_of, quiet, works
from pfl_lightning.cli.methods_table import FORMATS, NOTE, STORED, stored
from pfl_lightning.messages import digest
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.registry import METHODS, Method
from pfl_lightning.nets import MLP
from sweeps import servers, swept

BASES = {aggregators.KnowledgeCoefficients, aggregators.ServerSteps}
"""What is exported to be subclassed, and is no method by itself."""


@pytest.fixture
def rows():
    return stored()


@pytest.mark.parametrize("method", swept(METHODS))
@pytest.mark.by_default("FedReMa")
def test_the_stored_table_is_what_is_measured(method, rows):
    said = f"python docs/catalogue.py {method.name}"
    assert row(method) == rows[METHODS.index(method)], said


def pair_of(file: Path) -> tuple[str, str]:
    """Client module and aggregator of a configuration, under the names that records have for them."""
    config = yaml.safe_load(file.read_text())
    client = config["model"]["class_path"]
    if "aggregator" not in config:
        return Method("", getattr(methods, client)).pair
    parts = config["aggregator"].get("init_args", {}).get("aggregators", [config["aggregator"]])
    return client, "+".join(part["class_path"] for part in parts)


@pytest.mark.parametrize(
    "file", swept(sorted((CONFIGS / "methods").glob("*.yaml")), ("fedavg", "cwfedavg", "fedrema_af"), lambda f: f.stem)
)
@pytest.mark.by_default("fedavg")
def test_every_configured_pair_is_in_the_table(file):
    assert pair_of(file) in {(method.client.__name__, servers()[method.name].name) for method in METHODS}


@pytest.mark.exhaustive
def test_everything_that_is_exported_is_in_the_table():
    used: set[type] = {method.client for method in METHODS}
    for aggregator in servers().values():
        used |= {type(each) for each in (aggregator, *getattr(aggregator, "aggregators", ()))}
    exported = {getattr(methods, name) for name in methods.__all__}
    offered = {getattr(aggregators, name) for name in aggregators.__all__} - {
        getattr(server, name) for name in server.__all__
    }
    assert ({cls for cls in exported if issubclass(cls, FedAvg)} | offered) - BASES <= used


def test_every_method_has_a_name_and_a_paper_of_its_year():
    assert len({method.name for method in METHODS}) == len(METHODS)
    for method in METHODS:
        paper, url = method.paper
        # the references below and above all methods have none
        if method.name in ("Local", "Pooled"):
            assert (paper, url) == ("", "")
        else:
            assert 2016 < int(paper[-4:]) < 2030 and url.startswith("https://"), method.name


@pytest.mark.exhaustive
def test_all_methods_start_from_the_same_net():
    nets = {}
    for method in METHODS:
        torch.manual_seed(3)
        nets[method.name] = method.client(input_shape=(1, 28, 28), num_classes=10).net
    # FedPM's layers are the same, with weights of its own
    own = nets.pop("FedPM")
    layers = [type(layer) for layer in nets["FedAvg"].modules()]
    alike = [net for net in nets.values() if [type(layer) for layer in net.modules()] == layers]
    initial = {digest(net.state_dict()) for net in alike}
    assert len(alike) > 80 and len(initial) == 1 and digest(own.state_dict()) not in initial


def row(method: Method) -> dict[str, str]:
    with quiet():
        return describe(method)


def test_what_travels_and_stays_is_measured(rows):
    by_name = {row["method"]: row for row in rows}
    assert (by_name["Local"]["up"], by_name["Local"]["down"]) == ("nothing", "nothing")
    assert by_name["Local"]["stays"] == "1.00 features, classifier"
    assert (by_name["FedAvg"]["up"], by_name["FedAvg"]["stays"]) == ("1.00 weights", "nothing")
    assert (by_name["FedPer"]["up"], by_name["FedPer"]["stays"]) == ("0.99 weights", "0.01 classifier")
    assert by_name["FedBN"]["stays"].endswith(" features") and by_name["FedBN"]["up"] != by_name["FedAvg"]["up"]
    # the public samples have come in the first round, and stay
    assert by_name["FedMD"]["down"] == "<0.01 targets" and by_name["FedMD"]["stays"].endswith(", public")
    assert (by_name["FedAvg"]["down"], by_name["cwFedAvg"]["down"]) == ("1.00 weights", "1.00 weights of its own")
    assert (by_name["FedAvg"]["different nets"], by_name["FedProto"]["different nets"]) == ("no", "yes")
    assert "class counts" in by_name["FedDisco"]["needs"] and "server" in by_name["FedLAW"]["needs"]
    assert not any("participation" in column for column in by_name["FedAvg"])


class Equal(WeightedAverage):
    def __init__(self):
        super().__init__(weighting="uniform")


class AtFirst(Equal):
    """Weighs by samples in the first round alone."""

    def aggregate(self, updates, round):
        if updates:
            self.average(updates, client_weights(updates, "samples" if round == 0 else "uniform"))
        return {}


@pytest.mark.parametrize(
    ("method", "weighs"),
    [
        (Method("FedAvg", FedAvg), "yes"),
        (Method("AtFirst", FedAvg, AtFirst), "yes"),
        (Method("FedProto", methods.FedProto), "yes"),
        (Method("Equal", FedAvg, Equal), "no"),
        (Method("SCAFFOLD", methods.ControlVariates), "no"),
        (Method("Local", methods.Local), ""),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.by_default("SCAFFOLD-no", "FedProto-yes", "Local-")
def test_servers_that_weigh_by_samples_are_found_by_measuring(method, weighs):
    assert row(method)["weighs by samples"] == weighs


def test_who_sends_vectors_by_class_shows_its_classes(rows):
    needs = {row["method"]: row["needs"] for row in rows}
    shown = ("CCVR", "FedDistill", "FedPCL", "FedTGP", "FedGH", "FedReMa+F", "FedReMa+AF")
    assert {needs[name] for name in shown} == {"classes"}
    assert not {needs[name] for name in ("FedAvg", "FedUV", "FedReMa")} & {"classes", "class counts"}
    assert needs["FedProto"] == needs["FedPAC"] == "class counts"


class Curious(FedAvg):
    """Source: Nobody and Others, 2031, figure 1 (https://example.org)."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        assert data is not None and len(data.val)


class Everyone(WeightedAverage):
    def aggregate(self, updates, round):
        if len(updates) < 4:
            raise MisconfigurationException("all clients must take part.")
        return super().aggregate(updates, round)


@pytest.mark.exhaustive
def test_data_that_are_looked_at_are_needed():
    assert row(Method("Curious", Curious))["needs"] == "validation data"
    assert row(Method("FedAvg", FedAvg))["needs"] == ""


def takes_part_in_part(method: Method) -> str:
    with quiet():
        net = net_of(method.client, MLP) if "adapters" in method.client.requires else MLP
        return works(method, net, clients_per_round=CLIENTS // 2, max_rounds=3)


@pytest.mark.parametrize("method", swept(METHODS))
def test_some_clients_can_stay_away(method):
    assert takes_part_in_part(method) == "yes"


def test_what_is_refused_is_not_possible():
    assert takes_part_in_part(Method("Everyone", FedAvg, Everyone)) == "no"


def test_an_error_that_is_no_refusal_is_no_answer():
    class Broken(WeightedAverage):
        def aggregate(self, updates, round):
            raise ZeroDivisionError

    with quiet(), pytest.raises(ZeroDivisionError):
        describe(Method("Broken", FedAvg, Broken))


def test_papers_come_from_docstrings():
    assert Method("Curious", Curious).paper == ("Nobody and Others, 2031", "https://example.org")
    assert Method("X", FedAvg, aggregators.FedAWA).paper[1] == "https://arxiv.org/abs/2503.15842"
    assert Method("X", Curious, Equal).paper[1] == "https://example.org"


def test_formats(rows):
    assert list(csv.DictReader(io.StringIO(FORMATS["csv"](rows)))) == rows
    (fedavg,) = (row for row in rows if row["method"] == "FedAvg")
    link = f"| [{fedavg['paper']}]({fedavg['url']}) | `methods/fedavg` |"
    assert f"{link} `FedAvg` | `WeightedAverage` |" in FORMATS["markdown"](rows)
    assert f"{link} 1.00 weights | nothing |" in FORMATS["short"](rows)
    assert all(row["method"] in FORMATS["text"](rows) for row in rows)


def test_the_note_says_how_many_clients_are_measured():
    assert f" {CLIENTS} clients " in NOTE


@pytest.mark.parametrize("named", ["", "FedProx Local"])
@pytest.mark.by_default("FedProx Local")
def test_the_command_measures_all_methods_or_those_named(named, monkeypatch, capsys):
    few = [method for method in METHODS if method.name in ("Local", "FedAvg", "FedProx")]
    monkeypatch.setattr("pfl_lightning.cli.measuring.METHODS", few)
    with pytest.raises(SystemExit) as ended:
        pfl(f"methods --format csv --measure {named}")
    assert ended.value.code == 0
    printed = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["method", *(method.name for method in few if not named or method.name in named.split())]


def test_a_method_that_there_is_not_is_no_empty_table(capsys):
    assert "--measure FedPorx is no method; did you mean FedProx" in refusal("methods --measure FedPorx", capsys)


def test_what_is_stored_is_printed_without_measuring(monkeypatch, capsys):
    monkeypatch.setattr("pfl_lightning.cli.measuring.describe", None)
    with pytest.raises(SystemExit) as ended:
        pfl("methods --format csv")
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == STORED.read_text().splitlines()


def test_a_format_that_there_is_not(capsys):
    assert refusal("methods --format tex", capsys).startswith("methods: --format: invalid choice: 'tex' (choose from")
