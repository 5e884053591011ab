"""Tests of all methods, protocols or pairs: ``pytest`` runs some of them, ``pytest -m ''`` all."""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import pytest

from pfl_lightning.methods.registry import METHODS
from pfl_lightning.server import Aggregator

SOME = {
    *("Local", "FedAvg", "FedPer", "cwFedAvg", "FedAWA", "FedReMa"),
    *("FedClassAvg", "SCAFFOLD", "FedProto", "Ditto", "APPLE"),
}
"""The four systems, and methods of the main kinds beside them."""


@cache
def servers() -> dict[str, Aggregator]:
    """Each method's server by the method's name, to look at; some clients' modules that make them are large."""
    return {method.name: method.new_aggregator() for method in METHODS}


def swept(
    values: Iterable[Any], some: Collection[str] = SOME, name: Callable[[Any], str] = lambda v: v.name
) -> list[Any]:
    """Parameters of a test, of which all but some are only run where everything is."""
    marks = {True: (), False: pytest.mark.exhaustive}
    return [pytest.param(value, id=name(value), marks=marks[name(value) in some]) for value in values]


def all_but(rest: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which some are only run where everything is, as another one takes the same branches."""
    values = list(values)
    assert all(value in values for value in rest), "what is left out is no parameter"
    return [pytest.param(value, marks=pytest.mark.exhaustive if value in rest else ()) for value in values]
