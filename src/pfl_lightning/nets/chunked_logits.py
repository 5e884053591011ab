"""Logits computed chunk by chunk within the loss, so a batch's never take memory at once."""

from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class ChunkedLogits:
    """The logits of a batch, as hidden states and an output layer.

    The loss takes them for logits. Only positions that count go through the output layer, ``size`` of them at a time,
    and are computed again in the backward pass. Any other use is refused.

    Args:
        output: the output layer, which may have adapters and dropout.
        hidden: hidden states ``[n, ..., d]``.
        size: positions of a chunk, at least 1.
    """

    def __init__(self, output: nn.Module, hidden: Tensor, size: int) -> None:
        self.output, self.hidden, self.size = output, hidden, size
        # those of the moment: a method may put others into the layer, and the backward pass comes later
        self.entries = {**dict(output.named_parameters()), **dict(output.named_buffers())}

    def errors(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the cross-entropy at each position ``[n, ...]``, 0 at ignored ones.

        Args:
            target: token numbers ``[n, ...]``.
            ignore_index: target of positions that don't count.
        """
        counted = target.flatten() != ignore_index
        places = counted.nonzero()[:, 0]
        pieces = zip(
            torch.split(self.hidden.flatten(0, -2)[places], self.size),
            torch.split(target.flatten()[places], self.size),
            strict=True,
        )
        # one chunk alone has no other beside it in memory, and is computed once
        at_once = len(places) <= self.size
        found = [
            self._errors(*piece) if at_once else checkpoint(self._errors, *piece, use_reentrant=False)
            for piece in pieces
        ]
        errors = torch.cat(found)
        return errors.new_zeros(counted.shape).index_put((places,), errors).view(target.shape)

    def _errors(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of some positions.

        Args:
            hidden: their hidden states ``[m, d]``.
            target: their token numbers ``[m]``.
        """
        logits = functional_call(self.output, self.entries, (hidden,))
        return F.cross_entropy(logits, target, reduction="none")

    def __getattr__(self, name: str) -> NoReturn:
        # copying and pickling look for hooks such as __deepcopy__, which aren't there
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse functions of torch."""
        refuse(getattr(function, "__name__", str(function)))


def refuse(use: str) -> NoReturn:
    """Raise the error of a use beside the task's loss.

    Args:
        use: the name of the use.

    Raises:
        MisconfigurationException: always.
    """
    raise MisconfigurationException(
        f"model.net.chunk_tokens gives logits to the task's loss alone, and the method computes with them ({use}); set "
        "model.net.chunk_tokens=null, or take a method of loss and weights, such as FedAvg."
    )


def refused(use: str) -> Any:
    """Return an operator that refuses the use.

    Args:
        use: the operator's name.
    """

    def operator(self: ChunkedLogits, *_: Any) -> NoReturn:
        refuse(use)

    return operator


for operator in "add radd sub rsub mul rmul truediv rtruediv pow neg matmul rmatmul getitem len iter".split():
    setattr(ChunkedLogits, f"__{operator}__", refused(operator))
