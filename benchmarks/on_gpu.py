r"""Learn all about a GPU, in stages of at most ten minutes.

    python benchmarks/on_gpu.py install --wheels WHEELS  # where packages can't be downloaded; before the others
    python benchmarks/on_gpu.py tests --jobs 8     # every method: GPU against CPU, engine against engine
    python benchmarks/on_gpu.py rooms --jobs 8     # the default tests, trained on the GPU
    python benchmarks/on_gpu.py speed
    python benchmarks/on_gpu.py accuracy --data.root DATA
    python benchmarks/on_gpu.py protocols --data.root DATA
    python benchmarks/on_gpu.py all --dry_run      # what the stages do, small and on the CPU

A stage is a list of commands, each with a limit of its own; protocols run several at a time. What a command says is in
a file of its own in --out as soon as it says it, and stages.csv gets a row when it ends: its seconds, and how it ended.
A command that is in it as done isn't run again, so that a stage that was cut short goes on; runs of `compare` go on
where they were.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PFL = [sys.executable, "-m", "pfl_lightning.cli.main"]
PYTEST = [sys.executable, "-m", "pytest"]
PRECISIONS = ("32-true", "bf16-mixed")
PROTOCOLS = {
    "cwfedavg": ("cifar10_dir0.1", ["local", "fedavg", "cwfedavg"]),
    "fedawa": ("cifar10_fedawa_dir0.5", ["fedavg", "fedawa"]),
    "fedrema": ("cifar10_dominant_s0.2", ["local", "fedavg", "fedpac", "fedrema"]),
}
"""The papers' protocols that fit, with their methods."""


class Command(NamedTuple):
    """A command of a stage.

    Args:
        name: of its row and its file.
        words: the command.
        minutes: its limit.
    """

    name: str
    words: list[str]
    minutes: float


def commands_of(stage: str, args: argparse.Namespace) -> Iterator[Command]:
    """The commands of a stage."""
    accelerator = "cpu" if args.dry_run else "gpu"
    if stage == "install":
        wheels = ["--no-index", "--find-links", args.wheels] if args.wheels else []
        needed = ["jsonargparse[signatures]", "typeshed_client", "docstring_parser", "pytest", "pytest-xdist"]
        yield Command("install packages", [sys.executable, "-m", "pip", "install", *wheels, *needed], 3)
        own = ["install", "--no-index", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
        yield Command("install pfl-lightning", [sys.executable, "-m", "pip", *own], 2)
    elif stage == "tests":
        yield Command("tests", [*PYTEST, str(ROOT / "tests/test_gpu.py"), "-m", "", "-n", str(args.jobs), "-rs"], 9)
    elif stage == "rooms":
        # what the default tests see on a CPU; those of processes and ranks stay on it
        rooms = [str(ROOT / "tests" / room) for room in (["tasks"] if args.dry_run else args.rooms)]
        yield Command("rooms", ["env", f"ACCELERATOR={accelerator}", *PYTEST, *rooms, "-n", str(args.jobs), "-rs"], 9)
    elif stage == "speed":
        script = [sys.executable, str(ROOT / "benchmarks/rounds.py"), "--accelerator", accelerator]
        script += ["--rounds", "1" if args.dry_run else "5"]
        # a process for each precision: on a fresh machine its imports take longer than a workload
        workloads = ("W5",) if args.dry_run else ("W1", "W4", "U2", "W5", "W6")
        for precision in PRECISIONS:
            words = [*script, "--engines", "vectorised", "sequential", "--precision", precision]
            yield Command(f"rounds {precision}", [*words, "--workloads", *workloads], 3)
        yield Command("compiled", [*script, "--engines", "compiled", "--workloads", workloads[0]], 2)
        shapes = [sys.executable, str(ROOT / "benchmarks/convolutions.py"), "--accelerator", accelerator]
        yield Command("convolutions", [*shapes, "--repeats", "1" if args.dry_run else "21"], 1)
    elif stage == "accuracy":
        script = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *data_of("cifar10_dir0.1", args)]
        small = ["--rounds", "3", "--clients", "5", "--seeds", "0", "--precisions", "32-true"] if args.dry_run else []
        yield Command("accuracy", [*script, *small, "--trainer.accelerator", accelerator], 9.5)
    elif stage == "protocols":
        for name, (protocol, methods) in PROTOCOLS.items():
            for method in methods[:1] if args.dry_run else methods:
                words = [*PFL, "compare", "--methods", method, "--seeds", "0", *data_of(protocol, args)]
                words += ["--out", str(args.out / name), "--trainer.accelerator", accelerator]
                words += ["--trainer.max_rounds", "2"] if args.dry_run else []
                yield Command(f"{name} {method}", words, 9)


def data_of(protocol: str, args: argparse.Namespace) -> list[str]:
    """The options of a protocol's data; a dry run has the digits, which need no download."""
    if args.dry_run:
        return ["--config", "protocols/digits_dir0.1", "--data.num_clients", "5"]
    return ["--config", f"protocols/{protocol}", *(["--data.root", args.root] if args.root else [])]


def run(command: Command, args: argparse.Namespace) -> None:
    """Runs a command within its limit, and writes its row."""
    start = time.perf_counter()
    with (args.out / f"{command.name.replace(' ', '_')}.txt").open("ab") as output:
        try:
            code = subprocess.run(
                command.words, stdout=output, stderr=subprocess.STDOUT, timeout=60 * command.minutes, check=False
            ).returncode
            ended = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            ended = f"cut short after {command.minutes} minutes"
    seconds = time.perf_counter() - start
    with (args.out / "stages.csv").open("a", newline="") as table:
        csv.writer(table).writerow([command.name, f"{seconds:.1f}", ended])
    print(f"{command.name}: {ended}, {seconds:.1f} s", flush=True)


def main() -> None:
    """Runs a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = ["install", "tests", "rooms", "speed", "accuracy", "protocols"]
    parser.add_argument("stage", choices=[*stages, "all"])
    parser.add_argument("--out", type=Path, default=Path("runs/on_gpu"))
    parser.add_argument("--wheels", help="folder of packages to install from")
    parser.add_argument("--data.root", dest="root", help="where the data sets are")
    parser.add_argument("--jobs", type=int, default=4, help="tests and protocols at a time")
    rooms = ["methods", "engines", "federation", "client", "aggregators", "tasks"]
    parser.add_argument("--rooms", nargs="+", default=rooms, help="folders of tests that run on the GPU too")
    parser.add_argument("--dry_run", action="store_true", help="small, on the CPU and on the digits")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / "stages.csv"
    done = {row[0] for row in csv.reader(table.open()) if row[2] == "done"} if table.exists() else set()
    for stage in stages[1:] if args.stage == "all" else [args.stage]:
        commands = [command for command in commands_of(stage, args) if command.name not in done]
        # what is timed runs alone
        with ThreadPoolExecutor(args.jobs if stage == "protocols" else 1) as pool:
            list(pool.map(lambda command: run(command, args), commands))


if __name__ == "__main__":
    main()
