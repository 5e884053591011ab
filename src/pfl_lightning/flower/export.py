"""Save a client's model at a site as a checkpoint, loadable without a federation."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import whole_model
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.engines import Job
from pfl_lightning.federation.checkpoint import storable
from pfl_lightning.federation.prediction import kept_model
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions, written
from pfl_lightning.runs.checkpoint_io import BEST, MODEL, save

CONFIG = "config.yaml"
"""The site's configuration, in the folder of all states."""


def keep_model(
    states: StateVersions,
    job: Job,
    architectures: Sequence[ClientModule],
    architecture: int,
    site: Site,
    run: Mapping[str, Any],
    base: str | None = None,
) -> None:
    """Save a client's model as received from the server, replacing the client's earlier checkpoint.

    Where a run evaluates an earlier round once more, this is the best round, and the last round's checkpoint stays.

    Args:
        states: the site's folder of client states.
        job: the client's work, with the payload and the personal parameters.
        architectures: the client modules, one per network.
        architecture: index of the client's module in ``architectures``; the module is left in the client's state.
        site: the site's clients and data.
        run: ``id`` of the run, and those of its ``settings`` that predictions look at.
        base: fingerprint of the module's frozen weights, which are left out then; None saves them.

    Raises:
        OSError: if the file can't be written; the earlier checkpoint stays.
    """
    folder = states.of(job.client)
    folder.mkdir(mode=0o700, exist_ok=True)
    hparams = dict(architectures[0].hparams)
    if isinstance(nets := hparams.get("net"), list):
        # the client's net alone: a loaded checkpoint would else take the first net of the list
        hparams |= {"net": [nets[architecture]], "assign_nets": "turn"}
    personal, module = job.state.personal, architectures[architecture]
    # received again, as an evaluation may have trained the module further
    module.become(job.client, job.round, personal, job.payload)
    data = site.data
    inputs = {type(data).__qualname__: data.state_dict()}
    local = site.local(job.client)
    kept = kept_model(job, 0, local, inputs)
    name = site.names.get(job.client, local)
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": whole_model(module, common=base is None),
        "hyper_parameters": hparams,
        # with the payload: some methods build from it what no state_dict has
        "federation": {
            "round": job.round,
            "clients": {job.client: {"personal": personal}},
            "initial": [personal],
            "payloads": [{"clients": [[job.client, job.client + 1]], "payload": job.payload}],
            # by the federation's id too; by the id at the site never, which is another client's elsewhere
            "own": {**({name: kept} if isinstance(name, str) else {}), str(job.client): kept},
            **run,
            **({} if base is None else {"base": [base]}),
        },
        **inputs,
    }
    earlier = latest(folder / MODEL)
    is_same_run = earlier.get("id") == run["id"]
    if not is_same_run:
        (folder / BEST).unlink(missing_ok=True)
    with written(folder / (BEST if is_same_run and job.round < earlier["round"] else MODEL)) as partial:
        save(storable(checkpoint, "the model of a client", settings=True), partial)


def latest(path: Path) -> dict[str, Any]:
    """Return the entry ``federation`` of a client's checkpoint; empty without one."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["federation"]
    # missing, or damaged and about to be replaced
    except Exception:
        return {}
    return saved


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
    read_checkpoint(source, f"client={client}: {source}", instead="let the site run another round")
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with written(Path(path).absolute()) as partial:
        shutil.copyfile(source, partial)
