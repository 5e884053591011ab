"""Adapters of a run's clients as folders."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from pfl_lightning.client.adapter_folders import GLOBAL, exported, folder_name, save_all
from pfl_lightning.client.module import ClientModule
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder


class AdapterFolders(Callback):
    """Write each client's adapters at the end of ``fit``, and the global model's, as folders that ``peft`` loads.

    A client's folder has the client's name, or its id where clients have no names; ``global`` is the server's model.
    What peft loads from a folder has the outputs of the client's model, as the next round would begin with it. Methods
    for which no adapters can have them, such as `FedALT`, are refused; `ClientModule.adapter_state` has the details.
    ``pfl-lightning adapters`` writes the same from a checkpoint.

    Args:
        folder: parent of the folders; None is ``adapters`` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse runs without adapters here, and methods whose models no folder of adapters gives.

        Raises:
            MisconfigurationException: if a net has none, the method's models are more than adapters, clients are at
                sites, or there is no folder.
        """
        federation = cast(Federation, pl_module)
        for module in federation.architectures:
            exported(module)  # type: ignore[arg-type]
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

        def models() -> Iterator[tuple[Path, ClientModule, int]]:
            model = deepcopy(federation.client)
            model.assign(federation.global_model(common=False))
            yield folder / GLOBAL, model, 0
            data = federation.data
            for client in range(data.num_clients):
                architecture = model.architecture_of(client, data.num_clients)
                yield folder / folder_name(data.client_name(client)), federation.model_of(client), architecture

        save_all(models())
