"""How servers grow with clients: seconds and peak memory for one round of uploads, each in a forked process of its own.

For any number and size of uploads; `benchmarks/server.py` is the FedAWA paper's table, for one net and 20 clients.

    python benchmarks/growth.py [--clients 20 100 400] [--parameters 1000000] [--threads 1]

Uploads are of a square linear layer with about that many parameters, and a classifier of 10 classes. An aggregation has
in it every client's payload, one after another. Memory is the growth of the peak (``ru_maxrss``) beyond the process
with all uploads, as a ratio to the uploads' own. A Gram product is ``x @ x.T`` of all uploads as a matrix, in float32.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch
from torch import nn

from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import Aggregator, CwFedAvg, FedAMP, FedAWA, means
from pfl_lightning.messages import Updates, num_bytes
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net

RULES = ("Krum", "GeometricMedian", "TrimmedMean", "CoordinateMedian", "Bulyan")
SERVERS = ("WeightedAverage", "CwFedAvg", "FedAWA", "FedAMP", *RULES)
CLASSES = 10


def server_of(name: str) -> Aggregator:
    """Return a server side by its name."""
    if name in RULES:
        return WeightedAverage(mean=getattr(means, name)())
    return (
        CwFedAvg(layers="all")
        if name == "CwFedAvg"
        else {"FedAWA": FedAWA, "FedAMP": FedAMP}.get(name, WeightedAverage)()
    )


def peak() -> int:
    """Return the bytes of resident memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str, clients: int, parameters: int) -> dict[str, float]:
    """Return an aggregation's seconds, CPU and clock, with all payloads, and the further memory to the uploads' own."""
    width = round(parameters**0.5)
    module = FedAvg(lambda shape, k: Net(nn.Linear(*shape, width), nn.Linear(width, k)), (width,), CLASSES)
    weights = {entry: tensor.clone() for entry, tensor in module.state_dict().items()}
    aggregator = server_of(name) if name != "Gram" else None
    updates: Updates = {
        client: {
            "weights": {entry: tensor + 0.01 * torch.randn_like(tensor) for entry, tensor in weights.items()},
            "num_samples": torch.tensor(100 + client),
        }
        for client in range(clients)
    }
    before = peak()
    start, begun = time.process_time(), time.perf_counter()
    if aggregator is None:
        models = torch.stack([next(iter(update["weights"].values())).flatten() for update in updates.values()])
        start, begun = time.process_time(), time.perf_counter()
        models @ models.T
    else:
        aggregator.setup(Server(clients, weights, module, None, seed=0))  # type: ignore[arg-type]
        aggregator.aggregate(updates, round=0)
        for client in range(clients):
            aggregator.download(client)
    seconds, clock = time.process_time() - start, time.perf_counter() - begun
    own = num_bytes([update["weights"] for update in updates.values()])
    return {"seconds": seconds, "clock": clock, "ratio": (peak() - before) / own}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 400])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--servers", nargs="+", default=["Gram", *SERVERS])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.parameters:,} parameters, threads {args.threads}: CPU and clock seconds, memory to the uploads' own")
    print(f"{'clients':17}" + "".join(f"{clients:>23}" for clients in args.clients))
    for name in args.servers:
        cells = []
        for clients in args.clients:
            # forked, since the imports take longer than most aggregations
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
                try:
                    found = process.submit(measure, name, clients, args.parameters).result()
                except BrokenProcessPool:
                    cells.append("killed, no memory")
                    continue
            cells.append(f"{found['seconds']:9.2f} {found['clock']:6.2f} {found['ratio']:6.2f}")
        print(f"{name:17}" + "".join(f"{cell:>23}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
