"""The command ``pfl-lightning adapters``: write the adapters in a checkpoint as folders."""

from pathlib import Path

import pfl_lightning.methods  # noqa: F401
from pfl_lightning.cli.usage import Arguments
from pfl_lightning.client.adapter_folders import GLOBAL, export_adapters
from pfl_lightning.client.benchmarks import benchmark

DESCRIPTION = """\
Write the adapters in a checkpoint as folders that peft loads: one for each client, by its name, and "global".

    pfl-lightning adapters runs/FedAvg-ChatData/version_0/checkpoints/best.ckpt adapters

At a site of a deployment, STATES/3/model.ckpt has those of its client 3. The net is built by the checkpoint's own
settings, from the same model's folder. What peft loads has the outputs of the client's model; methods whose models
no adapters give, such as FedALT, are refused. A run from Python writes them by
pfl_lightning.client.export_adapters, or by the callback AdapterFolders.

With --tasks each folder gets the client's whole model in its folder merged, and the scores of lm-evaluation-harness
(pip install 'lm_eval[hf]') in benchmarks.json:

    pfl-lightning adapters best.ckpt adapters --tasks hellaswag arc_easy --limit 200
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
    made.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks of lm-evaluation-harness")
    made.add_argument("--limit", type=int, metavar="N", help="rows of each task (default: all)")
    made.add_argument("--include", type=Path, metavar="FOLDER", help="folder with configurations of further tasks")
    made.add_argument("--batch_size", type=int, default=8, metavar="N", help="texts in a batch (default: 8)")
    made.add_argument("--device", metavar="DEVICE", help="device of the tasks (default: the harness's choice)")
    options = made.parse_args(args)
    folders = export_adapters(options.checkpoint, options.folder)
    names = [path.name for path in folders]
    count, whole = len(names) - names.count(GLOBAL), " and of the global model" * (GLOBAL in names)
    print(f"adapters of {count} client{'s' * (count != 1)}{whole}: {options.folder}")
    if options.tasks:
        settings = {name: getattr(options, name) for name in ("limit", "include", "batch_size", "device")}
        for folder in folders:
            for task, scores in benchmark(folder, options.tasks, **settings).items():
                print(f"{folder.name}: {task}: {', '.join(f'{name} {value:.4g}' for name, value in scores.items())}")
    return 0
