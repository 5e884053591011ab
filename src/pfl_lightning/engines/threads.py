"""Set the number of threads within an operation on the CPU."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

SMALL = 1_000_000
"""Number of parameters up to which operations are too short to gain from several threads: a net's, or a block's."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with a single thread inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(net: nn.Module, clients: int = 1) -> AbstractContextManager[None]:
    """Return the context to run a net in: a single thread if `is_for_one_thread`, else unchanged."""
    return one_thread() if is_for_one_thread(net, clients) else nullcontext()


def is_for_one_thread(net: nn.Module, clients: int = 1) -> bool:
    """Return True if a net should train in one thread: a small net on the CPU, unless ``OMP_NUM_THREADS`` is set.

    Each operation waits for its slowest thread. If another process occupies a core, the wait is longer than a small
    net's operation: a round can take ten times as long. On free cores several threads seldom make a round 1.5 times as
    fast.

    Args:
        net: the net.
        clients: clients that each operation computes, with weights of their own.
    """
    parameters = list(net.parameters())
    small = clients * sum(parameter.numel() for parameter in parameters) <= SMALL
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return small and on_cpu and "OMP_NUM_THREADS" not in os.environ


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_cores(processes: int) -> None:
    """Divide the cores among processes, as the threads of torch, unless ``OMP_NUM_THREADS`` is set.

    Lightning's own way sets the variable, too, and `is_for_one_thread` would take it for the user's: ranks would train
    small nets in several threads, and end with other bits than a single process.

    Args:
        processes: number of processes on this machine, at least 1.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // processes))
