"""What a greeting binds: the settings of a site that decide a guarantee or a result, compared with the server's."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.engines.evaluation import measured_names, metrics_of
from pfl_lightning.federation.resuming import client_settings, flat, rounds_of
from pfl_lightning.flower.template import Refused, plain
from pfl_lightning.server import Aggregator
from pfl_lightning.trainer import FederatedTrainer

BY_SERVER = frozenset(
    {
        *("cohort", "schedule", "clients_per_round", "min_clients", "attacks"),
        *("evaluate_clients", "test_every_round", "check_val_every_n_epoch", "limit_val_batches"),
    }
)
"""Settings of rounds by which the server alone works."""
BY_MACHINE = frozenset({"trainer.example_privacy.samples_at_once"})
"""Settings that a site's memory decides, with the same result up to rounding."""
MOST_SETTINGS, LONGEST_NAME, LONGEST_VALUE = 500, 200, 1 << 15
"""Largest number of settings in a greeting, and of characters in a name and in a value."""
NAMED = 3
"""Number of differing settings in a refusal."""
UNSET = ("null", "false")
"""Values that another version may have by leaving the setting out, as torch's optimizers do."""


def settings_told(
    trainer: FederatedTrainer, modules: Sequence[ClientModule], aggregator: Aggregator, data: FederatedDataModule
) -> dict[str, str]:
    """Return the settings that decide local work, as texts by their names on the command line.

    Paths, engine, device, workers and loggers aren't among them, nor what the server alone decides.

    Args:
        trainer: the settings of rounds.
        modules: a client module per architecture, the configured one first.
        aggregator: the server side.
        data: the data module, of the server or of a site; only how it makes batches counts.
    """
    client = modules[0]
    rounds = rounds_of(trainer.rounds, trainer, max(1, data.num_clients), aggregator, data)
    local = {name: value for name, value in rounds.items() if name not in BY_SERVER}
    metrics = metrics_of(client)
    settings = {
        "model": type(client).__name__,
        "model.input_shape": list(client.input_shape),
        "model.task": type(client.task).__name__,
        **client_settings(modules, local),
        "model.metrics": [f"{name}: {type(metrics[name]).__name__}" for name in measured_names(metrics)],
        # client modules look at it too, such as that of APPLE
        "trainer.max_rounds": trainer.max_epochs,
        "data.batch_size": data.batch_size,
        "data.last_batch": data.last_batch,
    }
    # under secure sums sites draw the noise
    if trainer.rounds.secure_sum is not None and aggregator.noise_share(deployed=True) is not None:
        settings |= flat("aggregator", aggregator)
    # Lightning takes the one for the other on a CPU, and machines differ
    if settings["trainer.precision"] in ("16-mixed", "bf16-mixed"):
        settings["trainer.precision"] = "16-mixed or bf16-mixed"
    return {name: text_of(value) for name, value in settings.items() if name not in BY_MACHINE}


def text_of(value: Any) -> str:
    """Return a setting as text, of at most `LONGEST_VALUE` characters.

    >>> text_of("norm"), text_of(0.5), text_of(None), text_of([1, 2])
    ('norm', '0.5', 'null', '[1, 2]')

    Args:
        value: a text, or what JSON can have.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 64]} {fingerprint(text)}"


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that tell values of JSON apart.

    Args:
        value: the value; the order of a mapping's names doesn't count.
    """
    text = json.dumps(value, default=str, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_settings(settings: Mapping[str, str], own: Mapping[str, str], first: tuple[int, Mapping[str, str]]) -> None:
    """Refuse a site with other settings than the server's, or with other inputs than the first site's.

    Args:
        settings: the greeting's settings.
        own: the server's.
        first: node and settings of the first site: the server may have no rows, and then doesn't know how rows become
            inputs, which ``data`` settings beside its own say.

    Raises:
        Refused: with names and both values of settings that differ.
    """
    if len(settings) > MOST_SETTINGS:
        raise Refused(f"it tells of {len(settings)} settings, and may tell of {MOST_SETTINGS}.")
    if wrong := [name for name in settings if name != plain(name, LONGEST_NAME) or not name]:
        raise Refused(f"it tells of a setting {shown(wrong[0])}, which can't be one.")
    inputs = {name: text for name, text in settings.items() if name.startswith("data.") and name not in own}
    lines = []
    for name in differing({name: text for name, text in settings.items() if name not in inputs}, own):
        one, other = excerpts(settings.get(name, "not set"), own.get(name, "not set"))
        lines.append(f"{plain(name, 60)} is {one} and the server's {other}")
    if lines:
        more = f", and {len(lines) - NAMED} more differ" if len(lines) > NAMED else ""
        raise Refused(
            f"its {', its '.join(lines[:NAMED])}{more}; give both the same, where the site's own come from data and "
            "flags of its --node-config."
        )
    node, others = first
    firsts = {name: text for name, text in others.items() if name.startswith("data.") and name not in own}
    if names := sorted({name for name, _ in inputs.items() ^ firsts.items()}):
        raise Refused(
            f"its {plain(', '.join(names), 100)} makes other inputs or classes of the same rows than that of node "
            f"{node}; give all sites the same."
        )


def differing(settings: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Return the names of settings that differ, without the parts of one that differs as a whole.

    >>> differing({"a": "X", "a.b": "1", "c": "2"}, {"a": "null", "c": "3", "d": "false"})
    ['a', 'c']

    Args:
        settings: a site's settings.
        own: the server's.
    """
    found: list[str] = []
    for name in sorted({*settings, *own}):
        one, other = settings.get(name), own.get(name)
        left_out = None in (one, other) and {one, other} & {*UNSET}
        if one != other and not left_out and not any(name.startswith(f"{whole}.") for whole in found):
            found.append(name)
    return found


def excerpts(one: str, other: str, most: int = 40) -> tuple[str, str]:
    """Return two different texts in one printable line each, long ones from shortly before the first difference.

    >>> excerpts("0.1", "2.0"), excerpts("x" * 99 + "1", "x" * 99 + "2", 9)
    (('0.1', '2.0'), ('…xxxx1', '…xxxx2'))

    Args:
        one: a text.
        other: another.
        most: largest number of characters to return of each.
    """
    shorter = min(len(one), len(other))
    alike = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    start = max(0, alike - most // 2) if max(len(one), len(other)) > most else 0
    first, second = (plain(text[start:], most) for text in (one, other))
    return ("…" if start else "") + first, ("…" if start else "") + second
