"""Loss scales of stacked clients, for ``trainer.precision=16-mixed``."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.engines.vmap.block import Rows
from pfl_lightning.internals.of_torch import GROWTH_TRACKER
from pfl_lightning.messages import StateDict

COLUMNS = ("scale", GROWTH_TRACKER, "growth_factor", "backoff_factor", "growth_interval")
"""Entries of a scaler's ``state_dict``."""


class Scales:
    """A loss scale per client, which grows and shrinks by the rule of ``torch.amp.GradScaler``.

    A client with a scaled gradient that isn't finite skips the step and halves its scale; 2,000 steps in a row without
    this double the scale. Nothing is read from the device until `state_dicts`.

    Args:
        saved: the ``state_dict`` of each client's scaler; an empty one starts anew.
        device: the device where the clients train.
    """

    def __init__(self, saved: Sequence[dict[str, Any]], device: torch.device) -> None:
        new = torch.amp.GradScaler(device.type).state_dict()
        self._saved = [{**new, **state} for state in saved]

        columns = torch.tensor([[float(state[name]) for state in self._saved] for name in COLUMNS]).to(device)
        self._scale, self._good, self._growth, self._backoff, self._interval = columns.unbind()

    def of(self, rows: Rows) -> Tensor:
        """Return the loss factors ``[rows]`` of some clients."""
        return self._scale[rows]

    def unscaled(self, gradients: StateDict) -> tuple[StateDict, Tensor]:
        """Return unscaled gradients and a mask ``[rows]`` of clients skipping this step, and update the scales.

        Args:
            gradients: gradients of the scaled losses, with rows for the first clients.
        """
        if not gradients:
            return gradients, torch.zeros_like(self._scale, dtype=torch.bool)
        # One norm per client finds NaN and infinity alike, without a read from the device.
        largest = [torch.linalg.vector_norm(g.reshape(len(g), -1), torch.inf, dim=1) for g in gradients.values()]
        left_out = ~torch.stack(largest).isfinite().all(0)
        # Rounded in the same way as by torch's scaler.
        inverse = self._scale[: len(left_out)].double().reciprocal().float()
        result = {name: g * inverse.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}
        self._update(left_out)
        return result, left_out

    def _update(self, left_out: Tensor) -> None:
        """Update the scales of clients after a taken or skipped step."""
        rows = slice(0, len(left_out))
        scale, good = self._scale[rows], torch.where(left_out, 0, self._good[rows] + 1)
        # As in GradScaler, a scale grows only if the result is finite.
        due, grown = good == self._interval[rows], scale * self._growth[rows]
        grown = torch.where(due & grown.isfinite(), grown, scale)
        self._scale[rows] = torch.where(left_out, scale * self._backoff[rows], grown)
        self._good[rows] = torch.where(due, 0, good)

    def state_dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the ``state_dict`` of a scaler of each client's own."""
        scales, good = torch.stack([self._scale, self._good]).tolist()
        for state, scale, steps in zip(self._saved, scales, good, strict=True):
            yield {**state, "scale": scale, GROWTH_TRACKER: int(steps)}
