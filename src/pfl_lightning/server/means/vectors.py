"""The uploads of a round as vectors side by side, for rules to combine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from pfl_lightning.messages import CPU, StateDict, blocks, column, promoted
from pfl_lightning.server.model_pool import inner_products
from pfl_lightning.transfers import moved


class Sum(NamedTuple):
    """The result of a rule.

    Args:
        entries: the result, with the names, shapes and types of the uploads.
        shares: each upload's share in the result's parameters ``[n]``, at least 0; None for rules by coordinate.
    """

    entries: StateDict
    shares: Tensor | None


class Vectors:
    r"""Uploads :math:`x_1, \ldots, x_n` of a round, of one shape, or means of these uploads.

    Floating entries are the coordinates. Distances don't see buffers, so a bad client with honest parameters could send
    any: floating buffers take the median of each coordinate where a rule sums uploads up, and integer buffers, such as
    BatchNorm's counters, the lower median under every rule. Running variances are at least 0.

    Args:
        sent: named tensors of each client, at least one client.
        origin: the same entries as received by the clients.
        names: names of the floating entries for distances.
        weights: each client's weight in a plain mean ``[n]``, summing to 1.
        seed: seed of a rule's draws.
        mixing: a matrix ``[m, n]`` whose rows sum to 1: the vectors are then these means of uploads.
        buffers: names of the entries that aren't parameters, such as BatchNorm's running statistics.
    """

    def __init__(
        self,
        sent: Sequence[Mapping[str, Tensor]],
        origin: Mapping[str, Tensor],
        names: Sequence[str],
        weights: Tensor,
        seed: int = 0,
        mixing: Tensor | None = None,
        buffers: Collection[str] = (),
    ) -> None:
        self.sent, self.origin, self.names = sent, origin, names
        self.weights, self.seed = weights, seed
        self.mixing, self.buffers = mixing, buffers

    def __len__(self) -> int:
        return len(self.sent) if self.mixing is None else len(self.mixing)

    @cached_property
    def products(self) -> Tensor:
        """Inner products of the differences to the origin ``[m, m]``, in float64."""
        # from the origin, not from 0: models are long and differ little, and squares of their length would lose digits
        among = inner_products(self.sent, self.names, self.origin)[:-1, :-1]
        if self.mixing is not None:
            # products of means follow from products of uploads, so that no mean is ever built
            among = self.mixing @ among @ self.mixing.T
        return (among + among.T) / 2

    @property
    def squared_distances(self) -> Tensor:
        """Squared distances between all pairs of vectors ``[m, m]``, in float64."""
        own = self.products.diagonal()
        return (own[:, None] + own - 2 * self.products).clamp_min(0).fill_diagonal_(0)

    def mixed(self, mixing: Tensor) -> "Vectors":
        """Return means of these vectors, as vectors.

        Args:
            mixing: ``[m', m]``, rows sum to 1.
        """
        whole = mixing if self.mixing is None else mixing @ self.mixing
        weights = torch.full((len(whole),), 1 / len(whole), dtype=torch.float64)
        return Vectors(self.sent, self.origin, self.names, weights, self.seed, whole, self.buffers)

    def combined(self, shares: Tensor, heard: Sequence[int] | None = None) -> Sum:
        r"""Return :math:`x + \sum_k a_k (x_k - x)` for the origin x; of buffers the median.

        Args:
            shares: :math:`a_k` of each vector ``[m]``, at least 0, of any sum.
            heard: positions of the uploads for the medians of buffers, at least one; None is all.
        """
        weights = shares if self.mixing is None else shares @ self.mixing
        rest = 1 - float(weights.sum())
        first = int(weights.argmax())
        entries = {}
        for name in self.sent[first]:
            tensors = column(self.sent, name)
            tensor = tensors[first]
            if name in self.buffers or not tensor.is_floating_point():
                # of all by default: uploads left out by distances may be honest, and kept ones may not be
                entries[name] = median_of_buffer(
                    name, tensors if heard is None else [tensors[index] for index in heard]
                )
                continue
            # by differences to one that counts: equal uploads then are their own mean bit for bit, and one that is
            # far away takes no digits from the others
            base = tensor.double()
            change = torch.zeros_like(base)
            for index, share in enumerate(weights.tolist()):
                if share > 0 and index != first:
                    change.add_(tensors[index].double() - base, alpha=share)
            if abs(rest) > 1e-12:
                change.add_(self.origin[name].to(base) - base, alpha=rest)
            entries[name] = (base + change).to(tensor.dtype)
        return Sum(on_cpu(entries), weights)

    def by_coordinate(self, rule: Callable[[Tensor], Tensor]) -> Sum:
        """Return a rule's result coordinate by coordinate, in blocks of bounded memory.

        Args:
            rule: returns ``[w]`` in float64 for ``[m, w]`` in float32 or better, which hold the uploads exactly.
        """
        entries = {}
        for name in self.sent[0]:
            tensors = column(self.sent, name)
            # a bad buffer would be in most of the means of uploads, so the median is of the uploads themselves
            if (self.mixing is not None and name in self.buffers) or not tensors[0].is_floating_point():
                entries[name] = median_of_buffer(name, tensors)
                continue
            result = in_blocks(lambda rows: rule(self._mixed_rows(rows)), tensors)
            entries[name] = within_range(name, result) if name in self.buffers else result
        return Sum(on_cpu(entries), None)

    def _mixed_rows(self, rows: Tensor) -> Tensor:
        if self.mixing is None:
            return rows
        # by differences, as in `combined`
        rows = rows.double()
        middle = rows.median(0).values
        return middle + self.mixing.to(rows.device) @ (rows - middle)


def on_cpu(entries: StateDict) -> StateDict:
    """Return entries, computed on the clients' device, on the CPU, the server's device."""
    return dict(zip(entries, moved([*entries.values()], CPU), strict=True))


def median_of_buffer(name: str, tensors: list[Tensor]) -> Tensor:
    """Return the median of each coordinate of a buffer; of integers the lower median.

    >>> median_of_buffer("running_mean", [torch.tensor([0.5]), torch.tensor([1e6]), torch.tensor([0.25])])
    tensor([0.5000])

    Args:
        name: the buffer's name.
        tensors: of one shape, at least one.
    """
    if not tensors[0].is_floating_point():
        return lower_median(tensors)
    return within_range(name, in_blocks(median, tensors))


def in_blocks(rule: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return a rule's result for each coordinate of tensors of one shape, in their type.

    Args:
        rule: returns ``[w]`` for ``[n, w]`` in float32 or better.
        tensors: of one shape, at least one.
    """
    # filled in place: parts that outlive a block keep the heap from using its memory for the next block
    result = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    flat, start = result.view(-1), 0
    for rows in blocks(tensors):
        end = start + rows.shape[1]
        flat[start:end] = rule(rows.to(promoted(rows)))
        start = end
    return result


def within_range(name: str, buffer: Tensor) -> Tensor:
    """Return a floating buffer, without negative values if the buffer holds variances."""
    # nets take the roots of variances, and a majority of bad clients, or a mean without trimming, may be below 0
    return buffer.clamp_min(0) if name.endswith("running_var") else buffer


def median(rows: Tensor) -> Tensor:
    """Return the median of each column, in float64; of an even number of rows the mean of the middle two.

    >>> import torch
    >>> median(torch.tensor([[1.0, 5.0], [9.0, 5.0], [3.0, 7.0], [2.0, 8.0]]))
    tensor([2.5000, 6.0000], dtype=torch.float64)

    Args:
        rows: ``[n, w]``.
    """
    # torch.median takes the lower one of the middle two
    return middle_of(ordered_columns(rows))


def middle_of(ordered: Tensor) -> Tensor:
    """Return the median of each column in float64.

    Args:
        ordered: ``[n, w]``, each column ascending.
    """
    n = len(ordered)
    low, high = ordered[(n - 1) // 2].double(), ordered[n // 2].double()
    return low + (high - low) / 2


def ordered_columns(rows: Tensor) -> Tensor:
    """Return the values of each column in ascending order.

    Args:
        rows: ``[n, w]``, float32 or float64.
    """
    if rows.device.type != "cpu":
        return rows.sort(0).values
    # NumPy sorts contiguous numbers with vector instructions: 100 of them in an eighth of the time of selecting the
    # middle two, and in a twentieth of PyTorch's time
    # a clone, since a single row is contiguous both ways, and the sort is in place
    columns = rows.T.clone(memory_format=torch.contiguous_format)
    columns.numpy().sort(axis=1)
    return columns.T


def lower_median(tensors: Sequence[Tensor]) -> Tensor:
    """Return the median of each entry; of an even number of tensors the lower one of the middle two.

    >>> lower_median([torch.tensor(3), torch.tensor(900), torch.tensor(4), torch.tensor(5)])
    tensor(4)
    """
    kind = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return torch.stack([tensor.to(kind) for tensor in tensors]).sort(0).values[(len(tensors) - 1) // 2]
