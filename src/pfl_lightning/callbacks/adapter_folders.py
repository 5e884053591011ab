"""Adapters of a run's clients as folders."""

from copy import deepcopy
from pathlib import Path
from typing import cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from pfl_lightning.client.adapter_folders import GLOBAL, adapted_of, folder_name, save_adapters
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder


class AdapterFolders(Callback):
    """Write each client's adapters at the end of ``fit``, and the global model's, as folders that ``peft`` loads.

    A client's folder has the client's name, or its id where clients have no names; ``global`` is the server's model.
    ``pfl-lightning adapters`` writes the same from a checkpoint.

    Args:
        folder: parent of the folders; None is ``adapters`` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse runs without adapters here.

        Raises:
            MisconfigurationException: if a net has none, clients are at sites, or there is no folder.
        """
        federation = cast(Federation, pl_module)
        for module in federation.architectures:
            adapted_of(module)  # type: ignore[arg-type]
        if federation.data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks=AdapterFolders writes clients' adapters, which are at their sites; leave it out and "
                "export them there."
            )
        if self.folder is None and run_folder(trainer) is None:
            raise MisconfigurationException(
                "trainer.callbacks=AdapterFolders: this run has no folder; give AdapterFolders(folder=...)."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folders."""
        if not trainer.is_global_zero:
            return
        federation = cast(Federation, pl_module)
        folder = Path(self.folder or cast(Path, run_folder(trainer)) / "adapters")
        model = deepcopy(federation.client)
        model.assign(federation.global_model(common=False))
        save_adapters(model, folder / GLOBAL)
        for client in range(federation.data.num_clients):
            save_adapters(federation.model_of(client), folder / folder_name(federation.data.client_name(client)))
