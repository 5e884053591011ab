"""What docs/deployment.md says of entries of updates, for all methods."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import REVEALED

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.methods.registry import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
SIDES = {method.name: (method.client, method.new_aggregator()) for method in METHODS}


def sent(client: type[ClientModule], aggregator: Aggregator) -> frozenset[str]:
    """Entries of a method's updates."""
    return client.sends | client.offers & aggregator.needs


def sums_do(names):
    """What the last column says of an entry that some methods send."""
    enough = [name for name in names if SIDES[name][1].sums_only]
    return "yes" if enough == names else f"for {' and '.join(enough)}" if enough else "no"


def test_the_table_tells_who_sends_an_entry_and_whether_sums_would_do():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| .* \| (yes|no|for .*) \|$", PAGE, re.MULTILINE)
    # what a choice of clients asks for, beside methods or alone, needs each client's own
    methods = [(entries, of.partition(";")[0], sums) for entries, of, sums in rows if not of.startswith("`trainer.")]
    told = {entry: (of, sums) for entries, of, sums in methods for entry in re.findall(r"\w+", entries)}
    of = {
        entry: sorted((name for name, pair in SIDES.items() if entry in sent(*pair)), key=str.lower)
        for entry in REVEALED
    }
    assert told == {entry: (", ".join(names), sums_do(names)) for entry, names in of.items() if names}


def test_it_names_all_methods_whose_servers_need_sums_alone():
    # wherever the page breaks its lines
    page = " ".join(PAGE.split())
    words = re.search(r"that is all that the servers of these methods need: (.*?)\. ", page)[1]
    named = re.split(r", | and ", words)
    assert named == [
        name for name, pair in SIDES.items() if pair[1].sums_only and "weights" in sent(*pair) and not pair[0].pools
    ]
