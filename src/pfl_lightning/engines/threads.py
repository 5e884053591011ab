"""Intra-op threads: into how many pieces an operation on the CPU is cut."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

SMALL = 1_000_000
"""Parameters up to which a net's operations are too short to be cut into pieces."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes without helpers while it is entered."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(net: nn.Module) -> AbstractContextManager[None]:
    """The context in which a net is computed: in one thread if `is_for_one_thread`."""
    return one_thread() if is_for_one_thread(net) else nullcontext()


def is_for_one_thread(net: nn.Module) -> bool:
    """Whether a net should train in one thread: a small one on the CPU, unless ``OMP_NUM_THREADS`` is set.

    Each operation waits for the slowest of its threads. Where another process holds a core, that is longer than a small
    net's operation takes: a round can take ten times as long, and on free cores it is seldom faster by half.

    Args:
        net: the net.
    """
    parameters = list(net.parameters())
    small = sum(parameter.numel() for parameter in parameters) <= SMALL
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return small and on_cpu and "OMP_NUM_THREADS" not in os.environ
