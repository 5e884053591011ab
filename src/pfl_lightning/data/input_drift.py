"""Inputs of clients that change from a round on: shifted, scaled or rotated, at once or step by step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import grid_sample

from pfl_lightning.data.trees import Tree
from pfl_lightning.messages import tensors, tree_map
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import is_count


@dataclass(frozen=True)
class InputDrift:
    """A change of clients' inputs from a round on: :math:`x' = a x + b`, and images are rotated.

    The change is of inputs as the net takes them, so for images in [-1, 1] ``scale=-1`` is the negative, ``shift=0.5``
    is brighter and ``scale=0.5`` has less contrast. Training, validation and test samples change alike; targets,
    samples of the server, and integer inputs such as texts stay.

    Args:
        start: the first round of the change, from 1; from round 1 on, these clients simply have other inputs.
        scale: factor a; a list has one number per column of a table or per channel of images, ``x.shape[1]``.
        shift: summand b, in the units of the net's inputs; a list as for ``scale``.
        rotate: angle by which images are rotated counter-clockwise, in degrees; edges are continued outwards.
        rounds: rounds in which the change grows in equal steps; 1 is an abrupt change.
        end: the round from which inputs are as before the change, above ``start``; None for never.
        clients: clients with the change: ids or names, or a share of all clients, above 0.0 and up to 1.0. A share is
            rounded, at least one client. It is drawn by ``data.seed``; a smaller share is a part of a larger one.

    Raises:
        MisconfigurationException: if a value is out of range, or nothing would change.
    """

    start: int
    scale: float | list[float] = 1.0
    shift: float | list[float] = 0.0
    rotate: float = 0.0
    rounds: int = 1
    end: int | None = None
    clients: float | list[int | str] = 1.0

    def __post_init__(self) -> None:
        for name in ("start", "rounds"):
            if not is_count(getattr(self, name)):
                raise MisconfigurationException(
                    f"data.input_drift.{name}={getattr(self, name)!r} must be a number of rounds from 1 up."
                )
        if self.end is not None and not (is_count(self.end) and self.end > self.start):
            raise MisconfigurationException(
                f"data.input_drift.end={self.end!r} must be a round after start={self.start}, or null for no end."
            )
        for name in ("scale", "shift", "rotate"):
            value = getattr(self, name)
            listed = isinstance(value, (list, tuple)) and name != "rotate" and len(value) > 0
            if not all(map(is_finite, value if listed else [value])):
                raise MisconfigurationException(
                    f"data.input_drift.{name}={value!r} must be a finite number"
                    + ("." if name == "rotate" else ", or a list of one for each column or channel.")
                )
        if not self.turns and all(each == 1 for each in listed_numbers(self.scale)):
            if all(each == 0 for each in listed_numbers(self.shift)):
                raise MisconfigurationException(
                    f"data.input_drift: from round {self.start} on nothing changes; give scale, shift or rotate, such "
                    "as shift=0.5."
                )
        if isinstance(self.clients, (list, tuple)):
            right = len(self.clients) > 0 and all(type(each) in (int, str) for each in self.clients)
        else:
            # 1 could be meant as one client, so that a share is a float.
            right = isinstance(self.clients, float) and 0 < self.clients <= 1
        if not right:
            raise MisconfigurationException(
                f"data.input_drift.clients={self.clients!r} must be a list of ids or names, or a share above 0.0 and "
                "up to 1.0, such as 0.5."
            )

    @property
    def turns(self) -> bool:
        """True if images are rotated."""
        return self.rotate % 360 != 0

    def strength(self, round: int) -> float:
        """Return the share of the change that holds in a round, from 0 for none to 1 for all.

        >>> drift = InputDrift(start=20, shift=1.0, rounds=4, end=30)
        >>> [drift.strength(round) for round in (19, 20, 21, 23, 29, 30)]
        [0.0, 0.25, 0.5, 1.0, 1.0, 0.0]

        Args:
            round: the round, from 1.
        """
        if round < self.start or (self.end is not None and round >= self.end):
            return 0.0
        return min(1.0, (round - self.start + 1) / self.rounds)

    def chosen(self, num_clients: int, seed: int, client_id: Callable[[int | str], int]) -> frozenset[int]:
        """Return the ids of the clients with the change.

        Args:
            num_clients: number of clients, with new ones.
            seed: seed of the data.
            client_id: returns the id of a client given by id or name, and refuses others.
        """
        if isinstance(self.clients, (list, tuple)):
            return frozenset(client_id(client) for client in self.clients)
        generator = torch.Generator().manual_seed(derive_seed(seed, "input drift"))
        order = torch.randperm(num_clients, generator=generator)
        return frozenset(order[: max(1, round(self.clients * num_clients))].tolist())

    def changed(self, x: Tree, strength: float) -> Tree:
        """Return inputs after a share of the change; the given tensors stay as they are.

        Args:
            x: inputs ``[n, ...]``, or a tree of such tensors, of which integer ones stay.
            strength: the share, from 0 to 1.
        """
        return tree_map(lambda leaf: self._changed(leaf, strength) if leaf.is_floating_point() else leaf, x)

    def _changed(self, x: Tensor, strength: float) -> Tensor:
        if self.turns:
            x = rotated(x, strength * self.rotate)
        scale, shift = (along_columns(value, x) for value in (self.scale, self.shift))
        moved: Tensor = x * (1 + strength * (scale - 1)) + strength * shift
        return moved

    def check(self, x: Tree) -> None:
        """Refuse inputs that the change doesn't fit.

        Args:
            x: some inputs, as the net takes them.

        Raises:
            MisconfigurationException: if no input is floating-point, images would be needed, or lists have other
                lengths than the inputs have columns or channels.
        """
        leaves = [leaf for leaf in tensors(x) if leaf.is_floating_point()]
        if not leaves:
            raise MisconfigurationException(
                "data.input_drift changes numbers, and these inputs are integers, such as the codes of a text; leave "
                "it out, or override the data module's parts(), which finds the round in self.round."
            )
        shapes = [list(leaf.shape[1:]) for leaf in leaves]
        if self.turns and any(len(shape) != 3 for shape in shapes):
            raise MisconfigurationException(
                f"data.input_drift.rotate={self.rotate} rotates images [channels, height, width], and an input has the "
                f"shape {shapes[0]}; take scale or shift."
            )
        for name in ("scale", "shift"):
            value: Any = getattr(self, name)
            if isinstance(value, (list, tuple)) and any(len(value) != (shape or [1])[0] for shape in shapes):
                raise MisconfigurationException(
                    f"data.input_drift.{name} has {len(value)} numbers, and an input has the shape {shapes[0]}; give "
                    f"{(shapes[0] or [1])[0]}, or a single one for all."
                )


def changed(x: Tree, changes: Sequence[tuple[InputDrift, float]]) -> Tree:
    """Return inputs after several changes, one after the other.

    Args:
        x: inputs of one client, as the net takes them.
        changes: the changes, each with its strength in the round.
    """
    for drift, strength in changes:
        x = drift.changed(x, strength)
    return x


def is_finite(value: Any) -> bool:
    """Return True for finite numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def listed_numbers(value: float | Sequence[float]) -> Sequence[float]:
    """Return a number or several as several."""
    return value if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]


def along_columns(value: float | Sequence[float], x: Tensor) -> Any:
    """Return a number as it is, and a list as a tensor along the second dimension of inputs."""
    if not isinstance(value, (list, tuple)):
        return value
    return torch.tensor(value, dtype=x.dtype, device=x.device).view(-1, *[1] * (x.dim() - 2))


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Return images rotated counter-clockwise about their centres; what comes from outside continues the edges.

    Right angles of square images move pixels and change none.

    Args:
        images: images ``[n, channels, height, width]``.
        degrees: the angle.
    """
    height, width = images.shape[-2:]
    if degrees % 180 == 0 or (degrees % 90 == 0 and height == width):
        return torch.rot90(images, round(degrees / 90), (-2, -1))
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    # In pixels and not in shares of the sides, which would shear images that aren't square.
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2,
        torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2,
        indexing="ij",
    )
    places = torch.stack([(cos * x - sin * y) * 2 / width, (sin * x + cos * y) * 2 / height], dim=-1)
    grid = places.expand(len(images), height, width, 2)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
