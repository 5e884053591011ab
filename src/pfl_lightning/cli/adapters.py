"""The command ``pfl-lightning adapters``: write the adapters in a checkpoint as folders."""

from pathlib import Path

import pfl_lightning.methods  # noqa: F401
from pfl_lightning.cli.usage import Arguments
from pfl_lightning.client.adapter_folders import GLOBAL, export_adapters

DESCRIPTION = """\
Write the adapters in a checkpoint as folders that peft loads: one for each client, by its name, and "global".

    pfl-lightning adapters runs/FedAvg-ChatData/version_0/checkpoints/best.ckpt adapters

At a site of a deployment, STATES/3/model.ckpt has those of its client 3. The net is built by the checkpoint's own
settings, from the same model's folder. What peft loads has the outputs of the client's model; methods whose models
no adapters give, such as FedALT, are refused. A run from Python writes them by
pfl_lightning.client.export_adapters, or by the callback AdapterFolders.
"""


def main(args: list[str]) -> int:
    """Run ``pfl-lightning adapters``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.
    """
    made = Arguments("adapters", usage="%(prog)s CKPT FOLDER", description=DESCRIPTION)
    made.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint of a run")
    made.add_argument("folder", type=Path, metavar="FOLDER", help="parent of the folders, made if missing")
    options = made.parse_args(args)
    names = [path.name for path in export_adapters(options.checkpoint, options.folder)]
    count, whole = len(names) - names.count(GLOBAL), " and of the global model" * (GLOBAL in names)
    print(f"adapters of {count} client{'s' * (count != 1)}{whole}: {options.folder}")
    return 0
