"""Evaluation of stacked clients: one forward pass for many of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import MetricCollection

from pfl_lightning.client import ClientModule
from pfl_lightning.data import CHUNK, Samples
from pfl_lightning.engines.evaluation import computed
from pfl_lightning.engines.vmap.slots import Places
from pfl_lightning.messages import StateDict

AT_ONCE = 8 * CHUNK
"""Samples of all clients together that go through the net at once."""
PADDING = -100
"""Target of what is no sample; cross-entropy leaves it out."""


class Scorer:
    """Computes for many clients at once what `evaluate` does for one.

    Samples of clients with fewer are padded, which changes nothing of a net that looks at each by itself, as in
    evaluation mode all do but BatchNorm without running statistics.

    Args:
        module: the client module, in evaluation mode.
        metrics: what to compute on logits and targets, besides the mean cross-entropy ``loss``.
        forward_context: gives the context for a forward pass.
    """

    def __init__(
        self,
        module: ClientModule,
        metrics: MetricCollection,
        forward_context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self.metrics = metrics
        self.forward_context = forward_context
        self.alone = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in module.modules())
        # the share of right ones, of all clients in one computation; other metrics are the work of their own classes
        self._accuracy_only = type(module).configure_metrics is ClientModule.configure_metrics

    @torch.no_grad()
    def score(self, places: Places, entries: StateDict, parts: list[Samples]) -> list[dict[str, float]]:
        """Metrics of each client; none for a part without samples.

        Args:
            places: of the module.
            entries: its entries, a row a client.
            parts: the clients' samples, on the module's device.
        """
        result: list[dict[str, float]] = [{} for _ in parts]
        for rows in alike([len(part) for part in parts]):
            chosen = entries
            if rows != list(range(len(parts))):
                at = torch.tensor(rows, device=self.module.device)
                chosen = {name: stack[at] for name, stack in entries.items()}
            x = pad_sequence([parts[row].x for row in rows], batch_first=True)
            y = pad_sequence([parts[row].y for row in rows], batch_first=True, padding_value=PADDING)
            with self.forward_context():
                logits = torch.cat([self._forward(places, chosen, chunk) for chunk in torch.split(x, CHUNK, dim=1)], 1)
            values = self._values(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)
            for row, value in zip(rows, values, strict=True):
                result[row] = value
        return result

    def _forward(self, places: Places, entries: StateDict, x: Tensor) -> Tensor:
        logits: Tensor = vmap(lambda e, x: places.call(self.module.forward, e, x))(entries, x)
        return logits

    def _values(self, logits: Tensor, y: Tensor) -> list[dict[str, float]]:
        """Metrics of logits ``[clients, n, classes]`` and targets ``[clients, n]``, a client at a time."""
        sizes = (y != PADDING).sum(1)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="none").view_as(y)
        means = [loss / size for loss, size in zip(losses.sum(1).tolist(), sizes.tolist(), strict=True)]
        if self._accuracy_only:
            right = (logits.argmax(-1) == y).sum(1).float() / sizes.float()
            return [{"acc": acc, "loss": loss} for acc, loss in zip(right.tolist(), means, strict=True)]
        values = []
        for of_one, target, size, loss in zip(logits, y, sizes.tolist(), means, strict=True):
            self.metrics.reset()
            self.metrics.update(of_one[:size], target[:size])
            values.append(computed(self.metrics) | {"loss": loss})
        return values


def alike(sizes: list[int]) -> Iterator[list[int]]:
    """Rows that go through the net together: with padding at most twice their samples, and not too many of them.

    >>> list(alike([3, 8, 0, 5, 8]))
    [[1, 3, 4], [0]]

    Args:
        sizes: samples of each row; rows without any are left out.
    """
    rows = sorted((row for row, size in enumerate(sizes) if size), key=lambda row: -sizes[row])
    while rows:
        longest = sizes[rows[0]]
        limit = max(AT_ONCE // longest, 1)
        together = sum(2 * sizes[row] >= longest for row in rows[:limit])
        yield sorted(rows[:together])
        rows = rows[together:]
