"""Loss scales of stacked clients, under ``trainer.precision=16-mixed``."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.engines.vmap.block import Rows
from pfl_lightning.messages import StateDict

COLUMNS = ("scale", "_growth_tracker", "growth_factor", "backoff_factor", "growth_interval")
"""What a scaler's ``state_dict`` has."""


class Scales:
    """A loss scale of each client, which grows and shrinks as ``torch.amp.GradScaler`` has it.

    A step in which a scaled gradient isn't finite is left out, for that client alone, and halves its scale; 2,000 other
    steps in a row double it. Nothing is read from the device before `state_dicts`.

    Args:
        saved: ``state_dict`` of each client's scaler; an empty one begins anew.
        device: where the clients train.
    """

    def __init__(self, saved: Sequence[dict[str, Any]], device: torch.device) -> None:
        new = torch.amp.GradScaler(device.type).state_dict()
        self._saved = [{**new, **state} for state in saved]

        columns = torch.tensor([[float(state[name]) for state in self._saved] for name in COLUMNS]).to(device)
        self._scale, self._good, self._growth, self._backoff, self._interval = columns.unbind()

    def of(self, rows: Rows) -> Tensor:
        """Factors ``[rows]`` of the losses of some clients."""
        return self._scale[rows]

    def unscaled(self, gradients: StateDict) -> tuple[StateDict, Tensor]:
        """Gradients of the losses themselves, and which clients ``[rows]`` leave this step out; the scales move on.

        Args:
            gradients: of the scaled losses, a row for each of the first clients.
        """
        if not gradients:
            return gradients, torch.zeros_like(self._scale, dtype=torch.bool)
        # a norm is NaN where something is
        largest = [torch.linalg.vector_norm(g.reshape(len(g), -1), torch.inf, dim=1) for g in gradients.values()]
        left_out = ~torch.stack(largest).isfinite().all(0)
        # rounded as the scaler does
        inverse = self._scale[: len(left_out)].double().reciprocal().float()
        result = {name: g * inverse.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}
        self._update(left_out)
        return result, left_out

    def _update(self, left_out: Tensor) -> None:
        """Moves the scales of clients that have made a step, or left it out."""
        rows = slice(0, len(left_out))
        scale, good = self._scale[rows], torch.where(left_out, 0, self._good[rows] + 1)
        due, grown = good == self._interval[rows], scale * self._growth[rows]
        grown = torch.where(due & grown.isfinite(), grown, scale)
        self._scale[rows] = torch.where(left_out, scale * self._backoff[rows], grown)
        self._good[rows] = torch.where(due, 0, good)

    def state_dicts(self) -> Iterator[dict[str, Any]]:
        """What each client's own scaler would be now, as its ``state_dict``."""
        scales, good = torch.stack([self._scale, self._good]).tolist()
        for state, scale, steps in zip(self._saved, scales, good, strict=True):
            yield {**state, "scale": scale, "_growth_tracker": int(steps)}
