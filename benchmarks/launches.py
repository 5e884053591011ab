r"""Methods whose vectorised rounds launch more kernels, or wait more often, where more clients train.

    python benchmarks/launches.py [--methods scaffold fedala]

Counted on a CPU, operation by operation, in the second round of 6 and of 12 clients with as many samples each: what
gives floating numbers, from the clients' jobs to their updates. Without copies of rows, which are made on the CPU
wherever clients train. A wait is an operation that reads a value, such as ``.item()`` or ``nonzero``. The last column
says what runs client by client.
"""

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_lightning.cli.main import main as command
from pfl_lightning.client.at_once import runs_at_once
from pfl_lightning.engines.vmap import block_io
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.methods import registry

CONFIGS = Path(__file__).parent.parent / "configs"
LOOKS = {"clone", "copy_", "_to_copy", "detach", "_unsafe_view", "squeeze_", "empty_like", "new_empty"}
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}


class Operations(TorchDispatchMode):
    """Counts launches, and waits for values of floating or boolean tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        floating = isinstance(first, torch.Tensor) and first.is_floating_point() and not func.is_view
        # classes that clients have are found on the CPU, among booleans
        if name in WAITS and (args[0].is_floating_point() or (args[0].dtype == torch.bool and name != "nonzero")):
            self.waits[name] += 1
        elif name not in LOOKS and (floating or name.startswith("_foreach")):
            self.launches[name] += 1
        return result


class Growth(NamedTuple):
    """A method's counts in rounds of few and of many clients.

    Args:
        few: launches with few clients.
        many: launches with twice as many.
        waits: further waits with these.
        alone: hooks that run client by client.
        refused: why clients can't train at once; empty if they can.
    """

    few: int
    many: int
    waits: int
    alone: list[str]
    refused: str = ""

    @property
    def grows(self) -> bool:
        """Whether a round of more clients takes more launches or waits."""
        return not self.refused and (self.many > self.few or self.waits > 0)

    @property
    def reason(self) -> str:
        """What runs client by client."""
        if self.refused:
            return f"not vectorised: {self.refused}"
        return f"{', '.join(self.alone) or 'other work'} client by client" if self.grows else ""


def growth(method: str) -> Growth:
    """Counts rounds of a method's file in ``configs/methods``."""
    counts: list[Operations] = []
    alone: set[str] = set()

    def run(engine: Vectorised, jobs: Any, of: Any = Vectorised.run) -> Any:
        jobs, operations = list(jobs), Operations()
        with operations:
            outcomes = list(of(engine, jobs))
        counts.append(operations)
        hooks = engine.block_io.hooks
        alone.update(
            hook for hook in ("on_download", "upload") if not runs_at_once(engine.module, hook) or hook in hooks.refused
        )
        return iter(outcomes)

    adapters = any(each.file == method and "adapters" in each.client.requires for each in registry.METHODS)
    ends = []
    kept, Vectorised.run = Vectorised.run, run  # type: ignore[method-assign]
    # updates are looked through on the CPU, where they have arrived by then
    judge, block_io.is_finite = block_io.is_finite, lambda record: True
    try:
        for clients in (6, 12):
            with tempfile.TemporaryDirectory() as folder:
                words = ["fit", "--config", str(CONFIGS / "protocols" / "digits_dir0.1.yaml")]
                words += ["--config", str(CONFIGS / "methods" / f"{method}.yaml")]
                words += ["--data.partitioner", "IID", "--data.num_clients", str(clients), "--data.batch_size", "20"]
                words += ["--data.max_samples", str(100 * clients), "--data.central_test", "0.2"]
                words += ["--data.server_fraction", "0.2", "--trainer.limit_val_batches", "0"]
                words += ["--trainer.engine", "vectorised", "--trainer.max_rounds", "2", "--trainer.logger", "false"]
                words += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
                words += ["--trainer.default_root_dir", folder]
                words += ["--model.net", "Adapted", "--model.net.net", "MLP"] if adapters else ["--model.net", "MLP"]
                said = io.StringIO()
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                    try:
                        command(words)
                    except SystemExit:
                        return Growth(0, 0, 0, [], (said.getvalue().strip().splitlines() or ["refused"])[-1])
            ends.append(counts[-1])
    finally:
        Vectorised.run = kept  # type: ignore[method-assign]
        block_io.is_finite = judge
    few, many = ends
    more = many.waits.total() - few.waits.total()
    return Growth(few.launches.total(), many.launches.total(), more, sorted(alone))


def main() -> None:
    """Prints a line for each method that isn't constant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="names of files in configs/methods; all by default")
    parser.add_argument("--all", action="store_true", help="also those that are constant")
    args = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    methods = args.methods or sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
    print(f"{'method':<24} {'6 clients':>10} {'12 clients':>11} {'further waits':>14}  reason")
    for method in methods:
        found = growth(method)
        if found.grows or found.refused or args.all:
            print(f"{method:<24} {found.few:>10} {found.many:>11} {found.waits:>14}  {found.reason}", flush=True)


if __name__ == "__main__":
    main()
