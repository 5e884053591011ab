"""What docs/privacy.md says of methods."""

import re
from contextlib import suppress
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.contract.guarantee import unfit
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.privacy.dp_sgd import check_example_level
from pfl_lightning.privacy.local_noise import check_local
from test_documents import shown

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
TABLE = PAGE[PAGE.index("<!-- methods -->") : PAGE.index("<!-- end of methods -->")]


def told():
    """What the table says of each method: what it sends, and what becomes of it."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][2:]
    return [(name, sends, result) for names, sends, result in rows for name in names.split(", ")]


def test_it_names_every_method_once():
    assert sorted(name for name, _, _ in told()) == sorted(method.name for method in METHODS)


def test_it_says_of_each_what_becomes_of_it():
    table = {name: (sends, result) for name, sends, result in told()}
    for method in METHODS:
        with isolate_rng():
            client = method.client()
        aggregator = method.new_aggregator()
        sends, result = table[method.name]
        assert result.startswith("refused") == bool(unfit(client)), method.name
        further = (client.sends | (client.offers & aggregator.needs)) - {"weights", "num_samples"}
        assert sends.startswith("nothing") == (not further), method.name
        if not unfit(client):
            assert (result == "guaranteed") == (type(aggregator) is WeightedAverage), method.name


def test_it_names_the_methods_that_are_fit_for_single_samples():
    fit = []
    for method in METHODS:
        with isolate_rng():
            client = method.client()
        with suppress(MisconfigurationException):
            check_example_level(client, method.new_aggregator())
            fit.append(method.name)
    listed = PAGE[PAGE.index("Fit for it:") + 11 : PAGE.index("<!-- end -->")]
    assert listed.strip().rstrip(".").replace("\n", " ").split(", ") == fit


def test_it_names_the_methods_that_are_fit_for_noise_at_sites():
    fit = []
    for method in METHODS:
        with isolate_rng():
            client = method.client()
        with suppress(MisconfigurationException):
            check_local(client, method.new_aggregator())
            fit.append(method.name)
    begin, end = (PAGE.index(f"<!-- {words} noise at sites -->") for words in ("fit for", "end of"))
    listed = PAGE[begin:end].partition("-->")[2]
    assert listed.strip().rstrip(".").replace("\n", " ").split(", ") == fit


def test_its_python_gives_what_it_says():
    names = shown("docs/privacy.md")
    numbers = re.findall(r"# ([\d.]+)$", PAGE, re.MULTILINE)
    assert [f"{names['epsilon']([names['Release'](1.0, 0.01, 1000)], 1e-5):.2f}"] == numbers[:1]
    assert [f"{names['noise_for'](2.0, 1e-5, 1000, 0.01, tight=False):.2f}"] == numbers[1:]
