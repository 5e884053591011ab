"""Each private name of jsonargparse and argparse that the package uses."""

import sys
from types import ModuleType
from typing import Literal

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from pfl_lightning.internals.of_jsonargparse import commands_of, name_paths, options_of


def train(rate: float = 0.1, mode: Literal["slow", "fast"] = "slow", size: int | None = None) -> None:
    """Train."""


@pytest.fixture(params=[ArgumentParser, LightningArgumentParser])
def parser(request):
    parser = request.param()
    below = request.param()
    below.add_function_arguments(train, "trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_subcommands().add_subcommand("fit", below)
    return parser


def test_options_are_listed_with_their_names(parser):
    names = {string for option in options_of(parser) for string in option.option_strings}
    assert {"--seed", "--help"} <= names and "--trainer.rate" not in names
    below = [option.dest for option in options_of(commands_of(parser)["fit"])]
    assert {"trainer.rate", "trainer.mode", "trainer.size"} <= set(below)


def test_commands_are_listed_with_their_parsers(parser):
    assert list(commands_of(parser)) == ["fit"]
    assert commands_of(commands_of(parser)["fit"]) == {}


class Here:
    """A class."""


def test_a_class_is_written_by_the_path_it_was_given(monkeypatch):
    window = ModuleType("window")
    window.Here = Here
    monkeypatch.setitem(sys.modules, "window", window)
    parser = ArgumentParser()
    parser.add_subclass_arguments(Here, "here")
    name_paths({"window.Here": Here})
    assert parser.parse_args(["--here", "Here"]).here.class_path == "window.Here"
