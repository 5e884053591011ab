"""A client's model at its site, as a checkpoint that is loaded without a federation."""

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
    """Writes the model that a client has received, in the place of the one that it had before.

    Args:
        states: where the site keeps what is its clients'.
        job: the client's work: what stays with it, and what it is sent.
        architectures: the client modules, one a network.
        architecture: which of them the client has; it becomes the client, as where a checkpoint is loaded.

    Raises:
        OSError: if it can't be written; the earlier one stays.
    """
    hparams = dict(architectures[0].hparams)
    if isinstance(nets := hparams.get("net"), list):
        # the client's alone, so that whoever loads it gets that one
        hparams |= {"net": [nets[architecture]], "assign_nets": "turn"}
    personal, module = job.state.personal, architectures[architecture]
    # once more, as it may have been trained on for an evaluation
    with torch.no_grad():
        module.receive(personal, job.payload, data=None)
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": whole_model(module),
        "hyper_parameters": hparams,
        # with the payload, out of which a method may make what is in no state_dict
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
    """Writes a client's model, as it was received last, to a checkpoint of its own.

    ``FedPer.load_from_checkpoint(path, client=3)`` loads client 3's, as it does from a checkpoint of a federation.

    Args:
        state_dir: where the site keeps what is its clients'.
        client: the client's id in the federation.
        path: the checkpoint; an earlier one is replaced.

    Raises:
        MisconfigurationException: if the site has no model of the client, or a damaged one.
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
