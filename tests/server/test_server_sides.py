"""Server sides of methods, which users import from `pfl_lightning.aggregators`."""

import importlib
import inspect
import pkgutil

import pytest
import yaml

from command import pfl
from pfl_lightning import Aggregator, aggregators, methods

SERVERS = {
    made.__name__: made
    for file in pkgutil.iter_modules(methods.__path__)
    for made in vars(importlib.import_module(f"pfl_lightning.methods.{file.name}")).values()
    if inspect.isclass(made)
    and made.__module__ == f"pfl_lightning.methods.{file.name}"
    and issubclass(made, Aggregator)
}


def test_each_server_side_of_a_method_is_there_and_in_each_list():
    assert {name: getattr(aggregators, name) for name in SERVERS} == SERVERS
    assert SERVERS.keys() <= set(aggregators.__all__)


def test_methods_export_client_sides():
    assert not [name for name in methods.__all__ if issubclass(getattr(methods, name), Aggregator)]
    assert not SERVERS.keys() & vars(methods).keys()


def test_other_names_are_in_neither():
    for room in (methods, aggregators):
        with pytest.raises(AttributeError, match="FedPorx"):
            room.FedPorx  # noqa: B018


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("FedAdam", "aggregators.FedAdam"),
        ("CwFedAvg", "aggregators.CwFedAvg"),
        ("pfl_lightning.aggregators.FedAdam", "aggregators.FedAdam"),
        ("pfl_lightning.methods.fedopt.FedAdam", "methods.fedopt.FedAdam"),
    ],
)
def test_the_command_line_takes_all_names_and_writes_the_new_ones(given, written, capsys):
    with pytest.raises(SystemExit) as ended:
        pfl(f"fit --config quickstart --aggregator {given} --print_config")
    assert ended.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["aggregator"]["class_path"] == f"pfl_lightning.{written}"
