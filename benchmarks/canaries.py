"""The power of an audit by canaries: how often runs with less noise than is claimed are found, by how many canaries.

    python benchmarks/canaries.py --unit sample --canaries 100 1000 --factors 1 0.5 0.1 --seeds 10
    python benchmarks/canaries.py --unit client --canaries 100 --noise_multiplier 2 --data.num_clients 20

Further settings are as for ``pfl-lightning fit``. Each run adds ``factor`` times the noise that its guarantee counts,
as a mistake in the code would, so every bound above the claim is right where the factor is below 1, and a false alarm
where it is 1.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from pfl_lightning.cli.main import main as pfl_lightning
from pfl_lightning.privacy import DPSGD, DPAverage
from pfl_lightning.runs.tables import markdown_table

SETTINGS = ["--config", "methods/fedavg", "--config", "protocols/digits_iid", "--data.num_clients", "10"]
QUIET = [
    *("--trainer.max_rounds", "1", "--trainer.test_every_round", "false"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
]
BOUNDS = {"audited_epsilon": "by guesses", "audited_epsilon_gaussian": "by Gaussian noise"}


@contextlib.contextmanager
def noise_times(factor: float) -> Iterator[None]:
    """Multiply the noise of both units inside this context, behind the back of the accountant."""
    steps, sums = DPSGD.drawn_noise, DPAverage._drawn
    with (
        patch.object(DPSGD, "drawn_noise", lambda *args: factor * steps(*args)),
        patch.object(DPAverage, "_drawn", lambda *args: factor * sums(*args)),
    ):
        yield


def audited(unit: str, z: float, canaries: int, factor: float, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return what the summary of a run says of its audit, and the run's ``seconds``."""
    where = "trainer.example_privacy" if unit == "sample" else "aggregator"
    own = [] if unit == "sample" else ["--aggregator", "DPAverage"]
    own += [f"--{where}.noise_multiplier", str(z), f"--{where}.delta", "1e-5"]
    own += ["--trainer.callbacks+=CanaryAudit", "--trainer.callbacks.canaries", str(canaries)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        own += ["--seed_everything", str(seed), "--trainer.default_root_dir", folder]
        start = time.perf_counter()
        said = io.StringIO()
        try:
            with noise_times(factor), contextlib.redirect_stderr(said):
                pfl_lightning(["fit", *SETTINGS, *QUIET, *own, *settings])
        except SystemExit:
            sys.exit(said.getvalue())
        (summary,) = Path(folder).rglob("summary.json")
        audit: dict[str, Any] = json.loads(summary.read_text())["audit"]
    return audit | {"seconds": time.perf_counter() - start}


def main() -> None:
    """Run all, and print a table with a line for each factor and number of canaries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", choices=("client", "sample"), default="sample")
    parser.add_argument("--noise_multiplier", type=float, default=1.0, help="that is claimed")
    parser.add_argument("--canaries", type=int, nargs="+", default=[100])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1])
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0")
    own, settings = parser.parse_known_args()
    lines = [["canaries", "noise", "claim", *(f"{name} | found" for name in BOUNDS.values()), "seconds a run"]]
    for canaries in own.canaries:
        for factor in own.factors:
            runs = [
                audited(own.unit, own.noise_multiplier, canaries, factor, seed, settings) for seed in range(own.seeds)
            ]
            claims = [run["epsilon"] for run in runs]
            line = [str(canaries), f"{factor:g}", f"{median(claims):.2f}"]
            for name in BOUNDS:
                bounds = [run[name] for run in runs]
                found = sum(bound > claim for bound, claim in zip(bounds, claims, strict=True))
                line.append(f"{median(bounds):.2f} ({min(bounds):.2f} to {max(bounds):.2f}) | {found} of {len(runs)}")
            lines.append([*line, f"{median(run['seconds'] for run in runs):.0f}"])
            print(*lines[-1], flush=True)
    print(markdown_table(lines))


if __name__ == "__main__":
    main()
