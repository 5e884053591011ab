"""What docs/robustness.md says of rules and attacks."""

import re
from pathlib import Path

import yaml

from pfl_lightning.aggregators import Mean
from pfl_lightning.callbacks import attacks
from pfl_lightning.server import means as rules
from test_documents import shown

PAGE = (Path(__file__).parents[3] / "docs" / "robustness.md").read_text()


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
