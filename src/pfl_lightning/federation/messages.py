"""Check each round's payloads and updates, and select the outcomes to aggregate."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor, dtype

from pfl_lightning.client import ClientModule
from pfl_lightning.engines import Outcome
from pfl_lightning.messages import Message, Row, RunningMean, StateDict
from pfl_lightning.server import Aggregator

Kinds: TypeAlias = dict[str, tuple[Size, dtype]]
"""Shape and type of tensors, by name."""


class TrainingDiverged(RuntimeError):
    """The loss or the weights of every client in a round became NaN or infinite."""


# Payloads


def check_entries(payload: Any, client: int, aggregator: Aggregator, module: ClientModule) -> None:
    """Check a payload for an entry of the client module's needs, and for weights if the module needs weights.

    Further entries may come in later rounds, such as KT-pFL's targets once clients have answered.

    Args:
        payload: the result of `Aggregator.download` or `Aggregator.welcome`.
        client: the client's id.
        aggregator: the aggregator.
        module: the client module, which names the entries that it needs.

    Raises:
        MisconfigurationException: if an entry is missing, or the payload is no dict.
    """
    if not isinstance(payload, dict):
        raise MisconfigurationException(
            f"{aggregator.name} gave client {client} a {type(payload).__name__} and no dict of entries; let download "
            "return one for every client."
        )
    needs = module.needs
    if payload.keys() >= needs:
        return
    if missing := sorted(needs if not payload else (needs - payload.keys()) & {"weights"}):
        raise MisconfigurationException(
            f"{aggregator.name} gave client {client} no {' and '.join(missing)}, which {type(module).__name__} needs; "
            "let download give every client what `sends` names."
        )


def check_payload(payload: Message, client: int, aggregator: Aggregator, shared: StateDict) -> None:
    """Refuse a payload with other ``weights`` than the shared entries.

    An entry without a new value would keep that of the last client trained in the module.

    Args:
        payload: the payload.
        client: the client's id.
        aggregator: the aggregator.
        shared: the entries that clients share.

    Raises:
        MisconfigurationException: if names, shapes or kinds of types differ.
    """
    if "weights" not in payload:
        return
    given, kinds = kinds_of(payload["weights"]), kinds_of(shared)
    if given == kinds:
        return
    # a server may send more digits than clients have, such as float64, but no integers for floats
    rounded: Kinds = {}
    for name, (shape, kind) in given.items():
        own = kinds[name][1] if name in kinds else kind
        rounded[name] = shape, own if own.is_floating_point == kind.is_floating_point else kind
    if rounded != kinds:
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {difference(rounded, kinds)}; give every entry that upload "
            "sends, and no other."
        )


# Updates


class Arrivals:
    """Adds the weights of a round's updates up as they come, so that no more than one client's are in memory.

    Args:
        aggregator: the aggregator.
        sizes: returns the expected clients' numbers of training samples, by id.
        shared: returns the entries that clients share.
    """

    def __init__(
        self, aggregator: Aggregator, sizes: Callable[[], Mapping[int, int]], shared: Callable[[], StateDict]
    ) -> None:
        self.aggregator, self._sizes, self._shared = aggregator, sizes, shared

    # both made for the first update that can be added: in a stack of many clients none can

    @cached_property
    def mean(self) -> RunningMean | None:
        """The mean of the round; None if the server wants each client's own weights."""
        return self.aggregator.running_mean(self._sizes())

    @cached_property
    def kinds(self) -> Kinds:
        """Shapes and types of the entries that clients share."""
        return kinds_of(self._shared())

    def added(self, outcome: Outcome) -> Outcome:
        """Return an outcome with the mean in place of its weights, to which these are added.

        Whatever can't be added stays as it is, and is judged by `accepted`.

        Args:
            outcome: of a client whose update was expected.
        """
        update = outcome.update
        # rows of a stack are summed where they are, and restored weights keep the form that travelled
        if not isinstance(update, dict) or type(update.get("weights")) is not dict:
            return outcome
        if self.mean is None or outcome.refused or not outcome.finite or fault(update, self.aggregator, self.kinds):
            return outcome
        count = float(update["num_samples"]) if "num_samples" in self.aggregator.needs else 1.0
        self.mean.add(outcome.client, update["weights"], count)
        return outcome._replace(update={**update, "weights": self.mean})


def accepted(
    outcomes: Mapping[int, Outcome],
    aggregator: Aggregator,
    method: str,
    shared: StateDict,
    round: int,
    expected: int,
    label: Callable[[int], str] = str,
    parts: Mapping[int, StateDict] | None = None,
) -> tuple[dict[int, Outcome], int]:
    """Return the outcomes to aggregate, by id, and the number of diverged ones.

    Refused, diverged and malformed outcomes are left out with a warning.

    Args:
        outcomes: the outcomes of the round, by client.
        aggregator: the aggregator.
        method: name of the client module, for errors.
        shared: the entries that clients share. An update's ``weights`` have these names, shapes and types, or, as in
            methods that send a part of them, the names of the majority of updates.
        round: the round's number, from 1.
        expected: the number of clients in the cohort, all of which may not diverge; 0 allows it.
        label: returns a client's id and name for messages.
        parts: what clients with a narrow net share in place of ``shared``, by id.

    Raises:
        TrainingDiverged: if all expected clients diverged.
        MisconfigurationException: if all updates are malformed.
    """
    taken: dict[int, Outcome] = {}
    diverged: list[int] = []
    # Sorted, because engines finish clients in different orders, and sums of floats depend on the order.
    for client, outcome in sorted(outcomes.items()):
        if outcome.refused:
            rank_zero_warn(f"round {round}: client {label(client)} is left out of the aggregation: {outcome.refused}.")
        elif outcome.finite:
            taken[client] = outcome
        else:
            diverged.append(client)
    if diverged and len(diverged) == expected:
        raise TrainingDiverged(
            f"round {round}: the loss or the weights of every client became NaN or infinite; "
            "earlier checkpoints stand; try a smaller learning rate or trainer.gradient_clip_val."
        )
    if diverged:
        rank_zero_warn(
            f"round {round}: left out of the aggregation, because their loss or weights became NaN or "
            f"infinite: clients {', '.join(map(label, diverged))}."
        )
    updates = {client: outcome.update for client, outcome in taken.items()}
    kinds = kinds_of(shared)
    stacks = (u["weights"].stack for u in updates.values() if isinstance(u, dict) and type(u.get("weights")) is Row)
    # Rows of a stack have one record of kinds, so that all but the first are known by identity.
    kinds = next((stack.kinds for stack in stacks if stack.kinds == kinds), kinds)
    narrow = {client: kinds_of(part) for client, part in (parts or {}).items()}
    wrong = {k: reason for k, update in updates.items() if (reason := fault(update, aggregator, narrow.get(k, kinds)))}
    if wrong and not narrow and "weights" in aggregator.needs:
        # a method may send a part of the shared entries; the majority tells which part, so that one wrong client can't
        names = Counter(frozenset(u["weights"]) for u in updates.values() if isinstance(u, Mapping) and "weights" in u)
        usual = names.most_common(1)[0][0] if names else kinds.keys()
        part = {name: kind for name, kind in kinds.items() if name in usual}
        wrong = {client: reason for client, update in updates.items() if (reason := fault(update, aggregator, part))}
    # all wrong is a mistake in the method's code, and one wrong that of a client
    if wrong and len(wrong) == len(updates):
        client, reason = next(iter(wrong.items()))
        raise MisconfigurationException(
            f"client {label(client)}: {method}.upload gave {reason}, which {aggregator.name} can't use; let it add to "
            "super().upload(data), or say in `sends` and `offers` what it gives."
        )
    for client, reason in wrong.items():
        rank_zero_warn(f"client {label(client)} is left out of the aggregation: {method}.upload gave {reason}.")
        del taken[client]
    return taken, len(diverged)


def fault(update: Any, aggregator: Aggregator, kinds: Kinds) -> str:
    """Return a description of an update's fault; empty without one.

    Args:
        update: the update.
        aggregator: the aggregator, which names the entries that it needs.
        kinds: shapes and types of the weights, by name.
    """
    needs = aggregator.needs
    if not isinstance(update, (dict, Mapping)):
        return f"a {type(update).__name__} and no dict of entries"
    if not update.keys() >= needs:
        return f"no {' and '.join(sorted(needs - update.keys()))}"
    if "weights" in needs and (given := kinds_of(update["weights"])) is not kinds and given != kinds:
        return difference(given, kinds)
    if "num_samples" in needs:
        count = update["num_samples"]
        # not negative and not 0 either: both would pass into weights of a mean without a sound
        whole = isinstance(count, Tensor) and count.dim() == 0 and not count.is_floating_point()
        if not whole or count.item() < 1:
            return f"num_samples={count} and no tensor of one integer from 1 up"
    if "class_counts" in needs:
        counts = update["class_counts"]
        if not isinstance(counts, Tensor) or counts.dim() != 1 or bool((counts < 0).any()):
            return f"class_counts={counts} and no numbers of samples from 0 up, one a class"
    return ""


def kinds_of(weights: Mapping[str, Tensor]) -> Kinds:
    """Return shapes and types of weights, by name, without a copy from the device.

    Args:
        weights: a state dict, a row of a stack, or a mean of several.
    """
    if type(weights) is Row:
        return weights.stack.kinds
    if type(weights) is RunningMean:
        return weights.kinds
    return {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}


def difference(given: Kinds, kinds: Kinds) -> str:
    """Return a description of the first difference between weights and the shared entries.

    Args:
        given: shapes and types of the weights, by name.
        kinds: those of the shared entries.
    """
    if differing := sorted(given.keys() ^ kinds.keys()):
        return f"weights {'without' if differing[0] in kinds else 'with'} {differing[0]}"
    name = next(name for name in given if given[name] != kinds[name])
    (shape, kind), (own_shape, own_kind) = given[name], kinds[name]
    if shape != own_shape:
        return f"weights whose {name} has the shape {tuple(shape)} and not {tuple(own_shape)}"
    return f"weights whose {name} is of type {kind} and not {own_kind}"
