"""What docs/robustness.md says of methods and rules."""

import re
from pathlib import Path

import yaml

from pfl_lightning.aggregators import CFL, AggregatorList, ClassMeans, ClusterModels, Mean, WeightedAverage
from pfl_lightning.aggregators import means as rules
from pfl_lightning.callbacks import attacks
from pfl_lightning.methods.registry import METHODS
from test_documents import shown

PAGE = (Path(__file__).parents[3] / "docs" / "robustness.md").read_text()
TABLE = PAGE[PAGE.index("<!-- methods -->") : PAGE.index("<!-- end of methods -->")]


def told():
    """What the table says of each method."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][2:]
    return [(name, result) for names, result in rows for name in names.split(", ")]


def test_it_names_every_method_once():
    assert sorted(name for name, _ in told()) == sorted(method.name for method in METHODS)


def test_it_says_of_each_whether_it_takes_a_mean():
    table = dict(told())
    for method in METHODS:
        server = method.new_aggregator()
        takes = (isinstance(server, ClassMeans) and type(server) is ClassMeans and not server.exclude_self) or type(
            server
        ) in (CFL, ClusterModels)
        takes = takes or (isinstance(server, WeightedAverage) and server.takes_mean)
        assert table[method.name].startswith("refused") == (not takes or isinstance(server, AggregatorList)), (
            method.name
        )


def test_it_has_every_rule_and_every_attack():
    found = {name for name in rules.__all__ if issubclass(getattr(rules, name), Mean)} - {"Mean"}
    table = PAGE[PAGE.index("## Rules") : PAGE.index("## Which methods")]
    assert found == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) - {"mean"}
    table = PAGE[PAGE.index("## Attacks") : PAGE.index("## What it costs")]
    assert set(attacks.__all__) - {"Attack"} == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_its_pieces_say_the_same():
    names = shown("docs/robustness.md")
    assert names["aggregator"].name == "WeightedAverage+MultiKrum" and names["attack"].fraction == 0.2
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    mean = yaml.safe_load(block)["aggregator"]["init_args"]["mean"]
    assert getattr(rules, mean["class_path"])(**mean["init_args"]).f == names["aggregator"].mean.f
