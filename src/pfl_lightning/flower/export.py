"""Save a client's model at a site as a checkpoint, loadable without a federation."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import whole_model
from pfl_lightning.engines import Job
from pfl_lightning.flower.states import StateVersions, written
from pfl_lightning.runs.checkpoint_io import compare_checksums, save

MODEL = "model.ckpt"


def keep_model(states: StateVersions, job: Job, architectures: Sequence[ClientModule], architecture: int) -> None:
    """Save a client's model as received from the server, replacing the client's earlier checkpoint.

    Args:
        states: the site's folder of client states.
        job: the client's work, with the payload and the personal parameters.
        architectures: the client modules, one per network.
        architecture: index of the client's module in ``architectures``; the module is left in the client's state.

    Raises:
        OSError: if the file can't be written; the earlier checkpoint stays.
    """
    hparams = dict(architectures[0].hparams)
    if isinstance(nets := hparams.get("net"), list):
        # the client's net alone: a loaded checkpoint would else take the first net of the list
        hparams |= {"net": [nets[architecture]], "assign_nets": "turn"}
    personal, module = job.state.personal, architectures[architecture]
    # received again, as an evaluation may have trained the module further
    with torch.no_grad():
        module.receive(personal, job.payload, data=None)
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": whole_model(module),
        "hyper_parameters": hparams,
        # with the payload: some methods build from it what no state_dict has
        "federation": {
            "round": job.round,
            "clients": {job.client: {"personal": personal}},
            "initial": [personal],
            "payloads": {job.client: job.payload},
        },
    }
    states.of(job.client).mkdir(mode=0o700, exist_ok=True)
    with written(states.of(job.client) / MODEL) as partial:
        save(checkpoint, partial)


def export(state_dir: Path | str, client: int, path: Path | str) -> None:
    """Copy a client's latest model from a site's folder to a checkpoint.

    ``FedPer.load_from_checkpoint(path, client=3)`` loads client 3's model, as from a checkpoint of a federation.

    Args:
        state_dir: the site's folder of client states.
        client: the client's id in the federation.
        path: path of the checkpoint; an existing file is replaced.

    Raises:
        MisconfigurationException: if the site has no model of the client, or the model's file is damaged.
    """
    source = Path(state_dir) / str(client) / MODEL
    if not source.is_file():
        there = sorted(int(file.parent.name) for file in Path(state_dir).glob(f"*/{MODEL}"))
        instead = (
            f"it has those of clients {', '.join(map(str, there))}" if there else "give the one of a site that ran"
        )
        raise MisconfigurationException(f"client={client} has no model in state-dir={str(state_dir)!r}; {instead}.")
    try:
        compare_checksums(source)
    except Exception as error:  # as many kinds as there are damages
        raise MisconfigurationException(
            f"client={client}: {source} is damaged ({error}); let the site run another round."
        ) from error
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with written(Path(path).absolute()) as partial:
        shutil.copyfile(source, partial)
