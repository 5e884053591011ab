"""The server side that settings of one are about where none is named."""

from collections.abc import Sequence
from contextlib import suppress

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.cli.class_names import KINDS, subclasses
from pfl_lightning.cli.exclusive import grouped, settings_in, value_of

MEAN = "--aggregator.mean"


def with_server(words: Sequence[str]) -> list[str]:
    """A command line that names the model's own server side where it gives a rule for its mean and no aggregator.

    >>> with_server(["fit", "--model", "FedAvg", "--aggregator.mean", "Krum"])
    ['fit', '--model', 'FedAvg', '--aggregator', 'WeightedAverage', '--aggregator.mean', 'Krum']

    Args:
        words: the command's arguments, with paths of configurations.
    """
    arguments = grouped(words)
    first = next((k for k, argument in enumerate(arguments) if is_mean(argument[0])), None)
    if first is None or any(named(argument, "aggregator") for argument in arguments):
        return list(words)
    model = next((name for argument in reversed(arguments) if (name := named(argument, "model"))), "FedAvg")
    server = ["--aggregator", own_server(model)]
    return [word for argument in [*arguments[:first], server, *arguments[first:]] for word in argument]


def is_mean(word: str) -> bool:
    """Whether a word is the option that gives a rule, or one of the rule's settings."""
    option = word.partition("=")[0]
    return option == MEAN or option.startswith(f"{MEAN}.")


def named(argument: list[str], setting: str) -> str | None:
    """The class that an argument gives to a setting, itself or by a file."""
    if name := value_of(argument, f"--{setting}", f"--{setting}.class_path"):
        return name
    path = value_of(argument, "-c", "--config")
    settings = None if path is None else settings_in(path)
    given = settings.get(setting) if isinstance(settings, dict) else None
    return given.get("class_path") if isinstance(given, dict) else given if isinstance(given, str) else None


def own_server(model: str) -> str:
    """Name of the server side that a client module brings along; of an unknown one, `WeightedAverage`."""
    found = [cls for cls in subclasses(KINDS["model"]) if cls.__name__ == model.rpartition(".")[2]]
    # of what can't be found, or made without settings, the parser says what is wrong
    with suppress(IndexError, TypeError, MisconfigurationException), isolate_rng():
        return type(found[0]().configure_aggregator()).__name__
    return "WeightedAverage"
