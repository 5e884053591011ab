"""The scale of standardised targets, by which outputs and targets get back their unit."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


# a tuple, which Lightning can hand over in a batch, as it can't a frozen dataclass
class TargetScale(NamedTuple):
    r"""Mean and standard deviation of a regression's targets over training rows.

    A net learns :math:`(y - \mu) / \sigma`, and predictions and metrics are of :math:`\mu + \sigma\,o` for its outputs
    :math:`o`.

    Args:
        mean: mean :math:`\mu` of each quantity, in the target's unit.
        deviation: standard deviation :math:`\sigma > 0` of each quantity, in the same unit.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def undone(self, values: Tensor) -> Tensor:
        """Return standardised outputs or targets in the target's unit.

        >>> TargetScale((300.0,), (10.0,)).undone(torch.tensor([[-1.0], [2.0]]))
        tensor([[290.],
                [320.]])

        Args:
            values: floating, ``[n]``, ``[n, quantities]``, or ``[n, quantities * levels]`` with the levels of a
                quantity side by side.
        """
        mean, deviation = (values.new_tensor(each) for each in (self.mean, self.deviation))
        return undone_by(values, mean, deviation)


def undone_by(values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return standardised values in the target's unit.

    Args:
        values: as for `TargetScale.undone`.
        mean: means ``[quantities]``, or ``[n, quantities]`` with those of each row's client.
        deviation: standard deviations of the same shape.
    """
    # a quantile task has several outputs a quantity, side by side
    levels = values.shape[1] // mean.shape[-1] if values.dim() > 1 else 1
    mean, deviation = (each.repeat_interleave(levels, -1) for each in (mean, deviation))
    if values.dim() == 1:
        mean, deviation = mean[..., 0], deviation[..., 0]
    return values * deviation + mean


def undone_of_clients(values: Tensor, scales: Sequence[TargetScale | None], sizes: Sequence[int]) -> Tensor:
    """Return standardised values of several clients in the target's unit; values without a scale stay.

    Args:
        values: rows of all clients, client after client, as for `TargetScale.undone`.
        scales: the scale of each client; either all clients have one or none has.
        sizes: number of rows of each client.
    """
    first = scales[0] if scales else None
    if first is None or all(scale == first for scale in scales):
        return values if first is None else first.undone(values)
    lengths = torch.tensor(sizes, device=values.device)
    known = [scale for scale in scales if scale is not None]
    mean, deviation = (
        values.new_tensor(each).repeat_interleave(lengths, 0)
        for each in ([scale.mean for scale in known], [scale.deviation for scale in known])
    )
    return undone_by(values, mean, deviation)


def source_scale(source: Any, client: int) -> TargetScale | None:
    """Return the scale of a client's targets; None where they are as loaded.

    Args:
        source: the client's data module, or another source of samples, which need not know of scales.
        client: the client's id.
    """
    known = getattr(source, "target_scale", None)
    return None if known is None else cast(TargetScale | None, known(client))


def scale_at(fitted: Mapping[str, Any], place: int | None) -> TargetScale | None:
    """Return the scale among fitted values; None without one.

    Args:
        fitted: the ``preprocessing`` of a data module.
        place: position of the client in lists of values; None asks for the scale that all clients share.
    """
    columns = [list(fitted.get(name, {}).values()) for name in ("target_mean", "target_deviation")]
    is_own = fitted.get("standardize_target") == "client"
    if not columns[0] or (is_own and place is None):
        return None
    mean, deviation = (tuple(each[place] if is_own else each for each in column) for column in columns)
    return TargetScale(mean, deviation)


def saved_scale(checkpoint: Mapping[str, Any], client: int | str | None = None) -> TargetScale | None:
    """Return the scale in a checkpoint; None without one.

    Args:
        checkpoint: a federation's checkpoint, with the entries of its data modules.
        client: the client's name or id; None asks for the scale that all clients share.
    """
    for entry in checkpoint.values():
        fitted = entry.get("preprocessing") if isinstance(entry, Mapping) else None
        if not isinstance(fitted, Mapping) or "target_mean" not in fitted:
            continue
        known = list(entry.get("table", {}).get("clients", ()))
        # ids are those of the federation, whose names may stand in another order than those of the fit
        names = list(entry.get("clients", ())) or known
        name = names[client] if isinstance(client, int) and client < len(names) else client
        return scale_at(fitted, known.index(name) if name in known else None)
    return None
