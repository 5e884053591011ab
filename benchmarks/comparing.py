"""CPU seconds of a comparison of short runs, as a ratio to those of its training alone.

    python benchmarks/comparing.py [--methods Local FedAvg FedPer Ditto] [--seeds 0 1 2] [--rounds 10]

A comparison is ``pfl-lightning compare`` at the digits, with all of its processes: imports, options, runs, report.
Training alone is ``trainer.fit`` of the same runs, one after another in one process, without imports and options; the
first run is made twice, and counts once.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

COMMON = ["--config", "protocols/digits_dir0.1"]
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]


def compared(methods: Sequence[str], seeds: Sequence[str], rounds: int, folder: Path) -> float:
    """Return the CPU seconds of a comparison and all of its processes."""
    words = ["compare", "--methods", *methods, "--seeds", *seeds, *COMMON, "--trainer.max_rounds", str(rounds)]
    command = [sys.executable, "-m", "pfl_lightning", *words, "--out", str(folder)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def trained(methods: Sequence[str], seeds: Sequence[str], rounds: int, folder: Path) -> float:
    """Return the CPU seconds that the same runs spend in ``trainer.fit``."""
    from pfl_lightning.cli.main import main
    from pfl_lightning.trainer import FederatedTrainer

    fit, seconds = FederatedTrainer.fit, list[float]()

    def timed(self: FederatedTrainer, *args: object, **kwargs: object) -> None:
        start = time.process_time()
        fit(self, *args, **kwargs)  # type: ignore[arg-type]
        seconds.append(time.process_time() - start)

    with patch.object(FederatedTrainer, "fit", timed):
        runs = [(method, seed) for seed in seeds for method in methods]
        # the first run imports on need, and is left out
        for place, (method, seed) in enumerate([runs[0], *runs]):
            words = ["--config", f"methods/{method.lower()}", *COMMON, "--seed_everything", seed, *QUIET]
            where = ["--trainer.max_rounds", str(rounds), "--trainer.default_root_dir", str(folder / str(place))]
            scores = ["--trainer.callbacks+=SampleScores", "--trainer.callbacks.optional=true"]
            main(["fit", *words, *where, *scores])
    return sum(seconds[1:])


def main() -> None:
    """Print seconds and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["Local", "FedAvg", "FedPer", "Ditto"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = (given.methods, given.seeds, given.rounds)
        whole = compared(*settings, Path(folder, "compared"))
        training = trained(*settings, Path(folder, "trained"))
    runs = len(given.methods) * len(given.seeds)
    print(f"{runs} runs: {whole:.1f} CPU s, of training {training:.1f}; ratio {whole / training:.2f}")


if __name__ == "__main__":
    main()
