"""Recurrent layers of stacked clients, as torch's kernels have no rule for ``vmap``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.internals.of_torch import is_wrapped, update_flat_weights

Cell = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]
"""A step: maps the input's and the hidden state's part of the gates, and the states, to new states."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A linear layer of many clients: maps input, weight and bias to outputs."""


def lstm_cell(of_input: Tensor, of_hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    r"""Return :math:`h' = o \odot \tanh c'` and :math:`c' = f \odot c + i \odot g`, with gates in torch's order."""
    i, f, g, o = (of_input + of_hidden).chunk(4, 1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def gru_cell(of_input: Tensor, of_hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    r"""Return :math:`h' = n + z \odot (h - n)`, with gates in torch's order."""
    (r, z, n), (own_r, own_z, own_n) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return [n + (z + own_z).sigmoid() * (states[0] - n)]


def plain_cell(function: Callable[[Tensor], Tensor], of_input: Tensor, of_hidden: Tensor, _: Any) -> list[Tensor]:
    """Return ``tanh`` or ``relu`` of the gates."""
    return [function(of_input + of_hidden)]


CELLS: dict[Any, Cell] = {
    torch.lstm: lstm_cell,
    torch.gru: gru_cell,
    torch.rnn_tanh: partial(plain_cell, torch.tanh),
    torch.rnn_relu: partial(plain_cell, torch.relu),
}
"""Steps by the function of torch for all steps."""


def recurrent(
    func: Any,
    linear: Linear,
    between: Callable[[Tensor, float], Tensor],
    input: Tensor,
    states: Any,
    weights: Any,
    *settings: Any,
) -> Any:
    """Compute torch's recurrent layers step by step, for the clients under ``vmap``.

    Args:
        func: the function of torch.
        linear: computes a linear layer.
        between: dropout of a layer's outputs at a probability.
        input: ``[T, n, in]``, or ``[n, T, in]`` with ``batch_first``.
        states: the initial hidden state ``[layers * directions, n, hidden]``, of `torch.lstm` a pair.
        weights: the weights of all layers and directions, in torch's order.
        *settings: whether there are biases, the number of layers, the dropout between them, whether it is training,
            whether there are two directions, and whether samples come first.

    Raises:
        RuntimeError: for packed sequences, whose batches shrink in each client at another step.
    """
    # torch gives an LSTM a pair of states, and the other layers one
    pair = func is torch.lstm
    given = [*(states if pair and isinstance(states, (list, tuple)) else [states])]
    if isinstance(settings[0], (list, tuple)):
        # the variant for packed sequences has sizes of batches in front of the states, and so all else one place later
        if any(map(is_wrapped, [input, *settings[0]])):
            raise RuntimeError(f"{func.__name__} of packed sequences")
        return func(input, states, weights, *settings)
    if not any(map(is_wrapped, [input, *given, *weights])):
        return func(input, states, weights, *settings)
    biased, layers, dropout, training, both, batch_first = settings
    x = input.transpose(0, 1) if batch_first else input
    ways = 2 if both else 1
    size = len(weights) // (layers * ways)
    last: list[list[Tensor]] = []
    for layer in range(layers):
        if layer and dropout and training:
            x = between(x, dropout)
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            own = list(weights[at * size : (at + 1) * size])
            out, end = direction(CELLS[func], linear, x, [state[at] for state in given], own, biased, way == 1)
            outputs.append(out)
            last.append(end)
        x = torch.cat(outputs, 2) if both else outputs[0]
    # of hidden states, and for an LSTM of cells: torch gives them by layer and direction
    ends = [torch.stack(column) for column in zip(*last, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *ends


def direction(
    cell: Cell, linear: Linear, x: Tensor, states: list[Tensor], weights: list[Tensor], biased: bool, backwards: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs ``[T, n, hidden]`` of one layer in one direction, and the last states.

    Args:
        cell: the step.
        linear: computes a linear layer.
        x: inputs ``[T, n, in]``.
        states: the first states ``[n, hidden]``.
        weights: of the input, of the hidden state, their biases if there are some, and the projection if there is one.
        biased: whether there are biases.
        backwards: whether the last input is the first.
    """
    of_input, of_hidden, *rest = weights
    biases: Sequence[Tensor | None] = rest[:2] if biased else (None, None)
    projection = rest[2 if biased else 0 :]
    length, n = x.shape[:2]
    # one product for all steps
    gates = linear(x.reshape(length * n, -1), of_input, biases[0]).view(length, n, -1).unbind(0)
    outputs: list[Tensor] = []
    for gate in reversed(gates) if backwards else gates:
        states = cell(gate, linear(states[0], of_hidden, biases[1]), states)
        if projection:
            states[0] = linear(states[0], projection[0], None)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs), states


@contextmanager
def weights_exchanged(module: nn.Module) -> Iterator[None]:
    """Let recurrent layers of a module take weights under ``vmap`` inside this context, and afterwards their own.

    Args:
        module: any module.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    if update_flat_weights is None or not layers:
        yield
        return
    for layer in layers:
        # it looks for the weights' places in memory, which rows under vmap don't have
        vars(layer)["flatten_parameters"] = nothing
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["flatten_parameters"]
            update_flat_weights(layer)


def nothing() -> None:
    """Do nothing."""
