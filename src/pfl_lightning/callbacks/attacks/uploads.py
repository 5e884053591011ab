"""Attacks on uploads: bad clients train like all others, and send forged entries."""

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Generator, Tensor

from pfl_lightning.callbacks.attacks.base import Attack
from pfl_lightning.client import ClientModule
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import WeightedAverage, client_weights


class View(NamedTuple):
    """The knowledge of a bad client in a round; models are the entries to be forged, in float64.

    Args:
        received: the model x received from the server.
        own: the model w trained by the client.
        known: models for statistics, at least one.
        clients: number of clients with an upload in the round.
        bad: number of bad clients among these.
        generator: generator of the attack's draws.
        outcome: function from entries to the server's next model, if all bad clients of the round send these entries.
    """

    received: StateDict
    own: StateDict
    known: list[StateDict]
    clients: int
    bad: int
    generator: Generator
    outcome: Callable[[StateDict], StateDict]


class UploadAttack(Attack):
    """Replace the parameters in bad clients' uploads.

    Running statistics (but for `BufferAttack`) and all other entries of the updates stay as they are, such as control
    variates and numbers of samples. The attack comes after the count of bytes, and before the server. Name attacks
    before callbacks that look at updates.

    Args:
        fraction: as for `Attack`.

    Raises:
        MisconfigurationException: if ``fraction`` is out of its range.
    """

    does = MappingProxyType({"edits": "changes single updates"})
    excludes = MappingProxyType(
        {
            "sums": "changes single updates, which are summed by then",
            "stale": "forges models from the round's own model; take LabelFlip, or Synchronous",
        }
    )
    colludes = False
    """All bad clients of a round send one model."""

    def names(self, client: ClientModule) -> list[str]:
        """Return the names of the entries to be forged: all parameters, tied ones by all names.

        Args:
            client: the client module.
        """
        return [name for name, _ in client.named_parameters(remove_duplicate=False)]

    @abstractmethod
    def forged(self, view: View) -> StateDict:
        """Return a bad client's forged entries.

        Args:
            view: the client's knowledge.
        """

    def check(self, federation: Federation) -> None:
        """Refuse methods whose clients and server don't exchange models."""
        super().check(federation)
        # a method that sends prototypes or answers has no model to forge
        client, server = federation.client, federation.aggregator
        if "weights" not in client.sends or "weights" not in server.sends:
            who = type(client).__name__ if "weights" not in client.sends else server.name
            raise MisconfigurationException(
                f"trainer.callbacks: {type(self).__name__} changes models that clients receive and send, and {who} "
                "sends none as weights; take LabelFlip, or a method that does, such as FedAvg."
            )

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Replace the bad clients' models."""
        bad = sorted(self.bad(federation).intersection(updates))
        if not bad:
            return
        names = self.names(federation.client)
        models = [double(updates[client]["weights"], names) for client in self.seen(bad, updates)]
        # of a copy of the updates, since the loop below replaces bad ones in the round's own dict
        outcome = partial(self.outcome, federation, dict(updates), bad)
        model: StateDict | None = None
        for client in bad:
            own = updates[client]["weights"]
            if model is None or not self.colludes:
                # by round and client, so that draws don't depend on engines, order or resuming
                seed = derive_seed(federation.seed or 0, "attack", federation.round, client)
                received = double(federation.aggregator.download(client)["weights"], names)
                generator = torch.Generator().manual_seed(seed)
                view = View(received, double(own, names), models, len(updates), len(bad), generator, outcome)
                model = self.forged(view)
            updates[client] = replaced(updates[client], model)

    def outcome(self, federation: Federation, updates: Updates, bad: list[int], entries: StateDict) -> StateDict:
        """Return the server's next model, in float64, if all bad clients send the same entries.

        Args:
            federation: the federation, whose server averages models; unchanged.
            updates: the round's updates, by client id; unchanged.
            bad: ids of the bad clients.
            entries: the entries sent in place of the trained ones.
        """
        # a copy draws and remembers for itself, so that the server's own mean of the round is what it is without
        server = copy.copy(cast(WeightedAverage, federation.aggregator))
        server.state = dict(server.state)
        sent = updates | {client: replaced(updates[client], entries) for client in bad}
        with warnings.catch_warnings():
            # a rule that warns of an upload would do so for each one that is tried
            warnings.simplefilter("ignore")
            found = server.mean_of(sent, client_weights(sent, server.weighting))
        return double(found, list(entries))

    def seen(self, bad: list[int], updates: Updates) -> list[int]:
        """Return the ids of the clients whose models are known to bad clients.

        Args:
            bad: ids of the round's bad clients, at least one.
            updates: the round's updates, by client id.
        """
        # one stands for all where an attack needs no statistics: copies in float64 take memory
        return bad[:1]


class SignFlip(UploadAttack):
    r"""Send :math:`x - s (w - x)`: the trained change, backwards.

    Args:
        fraction: as for `Attack`.
        scale: s, above 0.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, scale: float = 1.0) -> None:
        super().__init__(fraction)
        check_positive(self, scale=scale)
        self.scale = scale

    def forged(self, view: View) -> StateDict:
        """Return the model with the change turned around."""
        return {name: x - self.scale * (view.own[name] - x) for name, x in view.received.items()}


class GaussianUpload(UploadAttack):
    r"""Send :math:`x + \sigma \xi` with standard normal :math:`\xi`: noise in place of a change.

    Args:
        fraction: as for `Attack`.
        std: :math:`\sigma`, above 0.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, std: float = 1.0) -> None:
        super().__init__(fraction)
        check_positive(self, std=std)
        self.std = std

    def forged(self, view: View) -> StateDict:
        """Return the received model with noise."""
        return {name: x + self.std * drawn(x, view.generator) for name, x in view.received.items()}


class FreeRider(UploadAttack):
    r"""Send the received model x, or nearly: a client without a contribution, who gets the result all the same.

    Args:
        fraction: as for `Attack`.
        std: standard deviation of noise to hide behind, at least 0.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, std: float = 0.0) -> None:
        super().__init__(fraction)
        if not 0 <= std < math.inf:
            raise MisconfigurationException(f"FreeRider: std={std} must be 0 or more, and finite.")
        self.std = std

    def forged(self, view: View) -> StateDict:
        """Return the received model, with noise if there is some."""
        return {name: x + self.std * drawn(x, view.generator) for name, x in view.received.items()}


class ModelReplacement(UploadAttack):
    r"""Send :math:`x + s (w - x)`, so that a mean over all becomes the bad client's own model, as after a `Backdoor`.

    The bad clients of a run are the same for both callbacks, which together are one attack.
    Source: Bagdasaryan et al., 2020 (https://arxiv.org/abs/1807.00459).

    Args:
        fraction: as for `Attack`.
        scale: s, above 0; None is the round's number of clients, divided by the number of bad ones.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, scale: float | None = None) -> None:
        super().__init__(fraction)
        check_positive(self, scale=1.0 if scale is None else scale)
        self.scale = scale

    def forged(self, view: View) -> StateDict:
        """Return the model with the change enlarged."""
        scale = view.clients / view.bad if self.scale is None else self.scale
        return {name: x + scale * (view.own[name] - x) for name, x in view.received.items()}


class BufferAttack(UploadAttack):
    """Train honestly, and send one value in place of running statistics.

    Distances between parameters don't show the attack. A mean over n clients is off by the n-th part of the value.

    Args:
        fraction: as for `Attack`.
        value: the value to send, finite; variances of 0 or less make nets return NaN.
        buffer: the end of the buffers' names, such as ``running_var`` or ``num_batches_tracked``.

    Raises:
        MisconfigurationException: if a value is out of its range; before the first round, if clients share no such
            buffer.
    """

    def __init__(self, fraction: float, value: float = 1e6, buffer: str = "running_mean") -> None:
        super().__init__(fraction)
        if not math.isfinite(value):
            raise MisconfigurationException(f"BufferAttack: value={value} must be finite, such as 1e6.")
        self.value, self.buffer = value, buffer

    def names(self, client: ClientModule) -> list[str]:
        """Return the names of the buffers to be forged."""
        return [name for name, _ in client.named_buffers(remove_duplicate=False) if name.endswith(self.buffer)]

    def check(self, federation: Federation) -> None:
        """Refuse nets without such buffers, too."""
        super().check(federation)
        client = federation.client
        if not any(client.is_shared(name) for name in self.names(client)):
            shared = sorted({name.rpartition(".")[2] for name, _ in client.named_buffers() if client.is_shared(name)})
            raise MisconfigurationException(
                f"BufferAttack: buffer={self.buffer!r} is the end of no buffer's name that clients of "
                f"{type(client).__name__} send; "
                + (f"take one of {', '.join(shared)}." if shared else "take a net with BatchNorm, or SignFlip.")
            )

    def forged(self, view: View) -> StateDict:
        """Return buffers full of the value."""
        return {name: torch.full_like(x, self.value) for name, x in view.received.items()}


def double(weights: Mapping[str, Tensor], names: list[str]) -> StateDict:
    """Return the named entries of weights in float64, as far as present.

    Args:
        weights: the weights.
        names: names of entries.
    """
    return {name: weights[name].double() for name in names if name in weights}


def replaced(update: Message, entries: StateDict) -> Message:
    """Return an update with other weights for some entries, in the types of the old ones.

    Args:
        update: with ``weights``; unchanged.
        entries: the other weights, in any floating type.
    """
    own = update["weights"]
    return update | {"weights": {**own, **{name: tensor.to(own[name].dtype) for name, tensor in entries.items()}}}


def drawn(tensor: Tensor, generator: Generator) -> Tensor:
    """Return standard normal numbers of a tensor's shape, in float64."""
    # on the CPU whatever the device, as generators of other devices draw other numbers
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def check_positive(attack: Attack, **values: float) -> None:
    """Refuse settings of 0 or less, or infinite ones.

    Args:
        attack: the attack.
        **values: the settings by name.

    Raises:
        MisconfigurationException: if one isn't above 0 and finite.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise MisconfigurationException(
                f"{type(attack).__name__}: {name}={value} must be above 0 and finite, such as 1."
            )
