"""Following the distribution that an output layer shows through one round of a client."""

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
    """Class distribution shown by the output layer's rows at each step of a round that starts from a client's weights.

    A copy is trained: the client module and the random state are left as they are.

    Args:
        client: the client module, with the weights to start from.
        data: whose data to train on.
        work: how much.
        seed: seed of the batches and of dropout.
        output_layer: name of the linear layer with a row a class, where the net's classifier has more than one.

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
    """As `trace_distribution`, for a job as a federation sets it.

    Args:
        client: the client module.
        job: what the client receives, and its data.
        work: how much it trains.
        precision: the Trainer's precision plugin; None computes in the module's own type.
        output_layer: name of the linear layer with a row a class, where the net's classifier has more than one.
    """
    twin = copy_client(client)
    named = output_layer or getattr(client, "output_layer", None)
    layer = cast(nn.Linear, twin.get_submodule(find_output_layer(twin, twin.num_classes, named)))
    estimates: list[Tensor] = []
    train: Callable[[Batch, int], dict[str, Tensor]] = twin.training_step

    def training_step(batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        estimates.append(row_distribution(layer.weight.detach()))
        return train(batch, batch_idx)

    twin.training_step = training_step
    # what the copy has to warn of, the client itself will say
    with isolate_rng(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        list(Sequential(twin, work, precision or Precision()).run([job]))
    return torch.stack([*estimates, row_distribution(layer.weight.detach())]).cpu()


def copy_client(client: ClientModule) -> Any:
    """A client module with weights of its own.

    Factories of nets and optimizers are shared: under the command line they hold its parser, which can't be copied.
    """
    shared = {id(value): value for value in vars(client).values() if callable(value)}
    return copy.deepcopy(client, shared)
