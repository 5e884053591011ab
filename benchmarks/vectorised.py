"""Seconds of training and of evaluation by the vectorised engine, compiled or not, as ratios to the sequential one.

    python benchmarks/vectorised.py [--rounds 9] [--threads 1] [--device cpu]

All engines run the same jobs in one process and take turns, round by round. Training is all that an engine does
between jobs and outcomes: reception, training and hand-over of every client, without evaluation and without the
server. Evaluation is reception, forward pass and metrics of every client, on as many samples as it trains on. Seconds
are the process's on a CPU, so that what else the machine does counts less, and the clock's elsewhere.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import Precision
from rounds import BATCH, LR, Noise
from torch.optim import SGD

from pfl_lightning.engines import ClientState, Engine, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN, MLP, NetFactory

ENGINES: dict[str, Callable[..., Engine]] = {
    "sequential": Sequential,
    "vectorised": Vectorised,
    "compiled": partial(Vectorised, compile=True),
}
WORKLOADS: dict[str, Callable[[], tuple[NetFactory, Noise, int]]] = {
    "100 clients x 30, MLP 64-64-10": lambda: (partial(MLP, hidden=(64,)), Noise(100, 30, (1, 8, 8)), 1),
    "the same, 5 local epochs": lambda: (partial(MLP, hidden=(64,)), Noise(100, 30, (1, 8, 8)), 5),
    "10 clients x 50, CNN of 582,026 parameters": lambda: (CNN, Noise(10, 50, (1, 28, 28)), 1),
}


def compare(
    net: NetFactory, data: Noise, epochs: int, rounds: int, engines: list[str], device: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, without the first four, by what was done and by engine."""
    seed_everything(0, verbose=False)
    data.setup()
    client = FedAvg(net, data.input_shape, data.num_classes, optimizer=partial(SGD, lr=LR)).to(device)
    work = LocalWork(epochs, batch_size=BATCH)
    made = {name: ENGINES[name](client, work, Precision()) for name in engines}
    payload = {"weights": detached(client.state_dict())}
    clients = [data.client(k) for k in range(data.num_clients)]
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in engines} for what in ("training", "evaluation")
    }
    # the first four rounds aren't counted: in them steps are compiled, and compared with what they were
    for round in range(rounds + 4):
        jobs = [Job(k, round, ClientState(), payload, samples, seed=k) for k, samples in enumerate(clients)]
        asked = [job._replace(evaluate=("train",)) for job in jobs]
        for name, engine in made.items():
            for what, run in (
                ("training", partial(engine.run, jobs)),
                ("evaluation", partial(engine.evaluate_all, asked)),
            ):
                start = clock()
                results = list(run())
                seconds[what][name].append(clock() - start)
                assert len(results) == len(jobs)
    return {what: {name: times[4:] for name, times in by_engine.items()} for what, by_engine in seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each engine, at least 5")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--device", default="cpu", help="where clients train")
    parser.add_argument(
        "--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="the first is what ratios are to"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), batch {BATCH}, {args.device}, medians")
    print(f"{'workload':<45} {'what':<11} {'engine':<12} {'seconds':>9} {'ratio':>6}")
    for workload, make in WORKLOADS.items():
        seconds = compare(*make(), max(args.rounds, 5), args.engines, args.device)
        for what, by_engine in seconds.items():
            first = statistics.median(by_engine[args.engines[0]])
            for name, times in by_engine.items():
                median = statistics.median(times)
                print(f"{workload:<45} {what:<11} {name:<12} {median:>9.4f} {median / first:>6.3f}")


if __name__ == "__main__":
    main()
