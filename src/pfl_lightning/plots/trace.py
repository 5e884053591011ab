"""Record of the class distribution in an output layer's rows during one round of a client."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.client.common import personal_entries, shared_entries
from pfl_lightning.data import ClientData
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.methods.cwfedavg import row_distribution
from pfl_lightning.nets import find_output_layer


def trace_distribution(
    client: ClientModule, data: ClientData, work: LocalWork, seed: int = 0, output_layer: str | None = None
) -> Tensor:
    """Return the class distribution of the output layer's rows at each step of a round from a client's weights.

    A copy is trained: the client module and the random state stay unchanged.

    Args:
        client: the client module with the initial weights.
        data: the data to train on.
        work: amount of local training.
        seed: seed of the batches and of dropout.
        output_layer: name of the linear layer with one row per class, if the net's classifier has several layers.

    Returns:
        Estimates ``[steps + 1, K]``: before each step, and after the last.
    """
    entries = client.state_dict()
    state = ClientState(personal_entries(client, entries))
    job = Job(client.client_id, client.round, state, {"weights": shared_entries(client, entries)}, data, seed)
    return trace_job(client, job, work, output_layer=output_layer)


def trace_job(
    client: ClientModule,
    job: Job,
    work: LocalWork,
    precision: Precision | None = None,
    output_layer: str | None = None,
) -> Tensor:
    """Return the class distribution as in `trace_distribution`, for a job made by a federation.

    Args:
        client: the client module.
        job: the client's payload, state and data.
        work: amount of local training.
        precision: the Trainer's precision plugin; None computes in the module's own type.
        output_layer: name of the linear layer with one row per class, if the net's classifier has several layers.

    Returns:
        Estimates ``[steps + 1, K]``: before each step, and after the last.
    """
    twin = copy_client(client)
    named = output_layer or getattr(client, "output_layer", None)
    layer = cast(nn.Linear, twin.get_submodule(find_output_layer(twin, twin.num_classes, named)))
    estimates: list[Tensor] = []
    # wrapped, since no callback sees the weights between two steps of a client
    train: Callable[[Batch, int], dict[str, Tensor]] = twin.training_step

    def training_step(batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        estimates.append(row_distribution(layer.weight.detach()))
        return train(batch, batch_idx)

    twin.training_step = training_step
    # warnings of the copy would repeat the client's own
    with isolate_rng(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        list(Sequential(twin, work, precision or Precision()).run([job]))
    return torch.stack([*estimates, row_distribution(layer.weight.detach())]).cpu()


def copy_client(client: ClientModule) -> Any:
    """Return a copy of a client module with its own weights.

    Factories of nets and optimizers are shared: under the command line they hold the parser, which can't be copied.

    Args:
        client: the client module.
    """
    shared = {id(value): value for value in vars(client).values() if callable(value)}
    return copy.deepcopy(client, shared)
