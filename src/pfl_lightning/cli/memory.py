"""The command ``pfl-lightning memory``: the memory that a configuration takes, without running it."""

from collections.abc import Iterator
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.load_config import Configured, configured
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.engines.memory_plan import MemoryPlan, planned
from pfl_lightning.messages import tree_map

DESCRIPTION = """\
usage: pfl-lightning memory [options of fit]

Compute the memory that a run takes, by the shapes of its net, batches and optimizer. Data are read; weights are not,
where a net can be built without, as CausalLM can, and nothing is trained.

    pfl-lightning memory --config run.yaml --data.batch_size 8

The numbers are of one client at a time (engine sequential) on a CPU. Engine processes takes the lines of a step once
for each process; vectorised takes them once for each client of a batch.
"""
MIB = 2**20
QUIET = "--trainer.logger false --trainer.enable_checkpointing false --trainer.callbacks null"
"""Settings for a Trainer that isn't run."""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning memory``.

    Args:
        args: the options of ``fit``.

    Returns:
        The exit code.

    Raises:
        UsageError: if there are no options.
    """
    if {"--help", "-h"} & set(args):
        print(DESCRIPTION, end="")
        return 0
    if not args:
        raise UsageError("memory: options of a run are missing, such as --config quickstart.")
    made = built(args)
    data: FederatedDataModule = made.datamodule
    data.prepare_data()
    data.setup("fit")
    clients, rounds = data.num_clients, made.trainer.rounds
    try:
        plan = planned(made.model, full_batch(made.model, data), made.trainer.precision_plugin.forward_context)
    except MisconfigurationException:
        raise
    # of torch, in many types, such as for a step that looks at values of its net
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"memory: the step of {type(made.model).__name__} can't be computed by shapes alone ({reason}); run fit "
            "with --trainer.max_rounds 1 and measure."
        ) from error
    # an optimizer that lasts for the run is a state of each client
    for line in lines(plan, clients, rounds.cohort_size(clients), made.model.optimizer_lifetime == "run"):
        print(line)
    return 0


def built(args: list[str]) -> Configured:
    """Return the objects of a configuration, with nets without weights where possible.

    Args:
        args: the options of ``fit``.
    """
    quiet = [*args, *QUIET.split()]
    try:
        with torch.device("meta"):
            return configured(quiet)
    # a class that computes with its first weights, or compares them
    except (NotImplementedError, RuntimeError):
        return configured(quiet)


def full_batch(module: ClientModule, data: FederatedDataModule) -> Batch:
    """Return a batch of the largest size, of copies of one sample.

    Args:
        module: the client module.
        data: its data, set up.
    """
    # no client has a fuller batch than the one with most samples
    largest = max(range(data.num_clients), key=lambda client: data.size(client, "train"))
    rows = min(data.batch_size, data.size(largest, "train"))
    one = data.part(largest, "train").take(slice(1)).to("cpu", cast(torch.dtype, module.dtype))
    batch: Batch = tree_map(lambda leaf: leaf[:1].expand(rows, *leaf.shape[1:]).contiguous(), (one.x, one.y))
    return batch


def lines(plan: MemoryPlan, clients: int, cohort: int, keeps_optimizer: bool) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        plan: the plan of one client.
        clients: number of clients.
        cohort: number of clients of a round.
        keeps_optimizer: whether each client keeps its optimizer's state.
    """
    kept = plan.personal + keeps_optimizer * plan.optimizer
    rows = {
        "frozen weights, once": plan.frozen,
        "trained weights": plan.trained,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations,
        "logits, loss and backward pass": plan.logits,
        "an evaluation, in place of a step": plan.evaluation,
        f"states of {clients:,} clients": clients * kept,
        f"the server's model, and at most {cohort:,} updates": (1 + cohort) * plan.shared,
    }
    width = max(map(len, rows))
    for name, size in rows.items():
        yield f"{name:<{width}} {size / MIB:>12,.1f} MiB"
    total = plan.peak + clients * kept + (1 + cohort) * plan.shared
    yield f"{'at most, beside the libraries':<{width}} {total / MIB:>12,.1f} MiB"
