"""Suggest names close to a mistyped one."""

from collections.abc import Iterable
from difflib import get_close_matches

LISTED = 12
"""Largest number of names that are listed when none is close."""

RATES = {"lr": "lr", "learning_rate": "lr", "momentum": "momentum", "weight_decay": "weight_decay"}
"""Settings of the optimizer that people look for elsewhere, by the names that people try."""


def suggestion(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence: close names, or all names if few.

    >>> suggestion("FedPorx", ["FedProx", "Local"])
    '; did you mean FedProx?'
    >>> suggestion("lr", ["net", "optimizer"], prefix="model.")
    '; choose from model.net, model.optimizer.'

    Args:
        name: the given name.
        names: all valid names.
        prefix: put before each name.
    """
    # compared without capitals, so that "fedprox" finds FedProx
    spelled = {known.lower(): known for known in sorted(names)}
    if close := get_close_matches(name.lower(), spelled, n=2):
        return f"; did you mean {' or '.join(prefix + spelled[known] for known in close)}?"
    if 0 < len(spelled) <= LISTED:
        return f"; choose from {', '.join(prefix + known for known in spelled.values())}."
    return "."


def nearest_option(key: str, options: Iterable[str]) -> str:
    """Return the end of a sentence on an unknown option: close options, compared at the first wrong part.

    >>> nearest_option("trainer.max_round", ["trainer.max_rounds", "model"])
    '; did you mean trainer.max_rounds?'
    >>> nearest_option("max_rounds", ["trainer.max_rounds", "model"])
    '; did you mean trainer.max_rounds?'
    >>> nearest_option("rounds", ["trainer.max_rounds", "model"]), nearest_option("lr", ["model"])
    ('; did you mean trainer.max_rounds?', '; did you mean model.optimizer.lr?')

    Args:
        key: the option, without dashes.
        options: all valid options, without dashes.
    """
    valid = set(options)
    # the right name in the wrong place is the most common mistake: max_rounds for trainer.max_rounds
    if elsewhere := [option for option in sorted(valid) if option.endswith(f".{key}")]:
        return f"; did you mean {elsewhere[0]}?"
    if key in RATES:
        return f"; did you mean model.optimizer.{RATES[key]}?"
    # a single word of the name, such as rounds for trainer.max_rounds
    if elsewhere := [option for option in sorted(valid) if key in option.rpartition(".")[2].split("_")][:2]:
        return f"; did you mean {' or '.join(elsewhere)}?"
    parts = key.split(".")
    # compared with names beside it only: close names elsewhere in the tree would mislead
    for depth, part in enumerate(parts):
        prefix = "".join(f"{parent}." for parent in parts[:depth])
        names = {option.removeprefix(prefix).split(".")[0] for option in valid if option.startswith(prefix)}
        if part not in names:
            return suggestion(part, names, prefix)
    return "."
