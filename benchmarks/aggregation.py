"""Time and memory of cwFedAvg's aggregation, as ratios to the one matrix product that it can't do without.

    python benchmarks/aggregation.py [--clients 100] [--classes 100] [--threads 1]

Uploads of the 4-layer CNN for 100 classes (924,708 parameters), all layers averaged by class; the product is
[clients, clients] x [clients, parameters] in float32. Both take turns, medians of 5.
"""

import argparse
import resource
import statistics
import time

import torch

from pfl_lightning import Server
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.messages import Updates, num_bytes
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN


def peak() -> float:
    """Peak memory of the process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def uploads(client: FedAvg, clients: int) -> Updates:
    """Random updates of the client module's shapes."""
    return {
        number: {
            "weights": {name: torch.randn_like(tensor) for name, tensor in client.state_dict().items()},
            "num_samples": torch.tensor(100 + number),
        }
        for number in range(clients)
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    client = FedAvg(CNN, (3, 32, 32), args.classes)
    updates = uploads(client, args.clients)
    aggregator = CwFedAvg(layers="all")
    weights = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    aggregator.setup(Server(args.clients, weights, client, None, seed=0))  # type: ignore[arg-type]
    before = peak()
    seconds: dict[str, list[float]] = {"aggregation": [], "product": []}
    for number in range(5):
        start = time.perf_counter()
        aggregator.aggregate(updates, round=number)
        for receiver in range(args.clients):
            aggregator.download(receiver)
        seconds["aggregation"].append(time.perf_counter() - start)
        if number == 0:
            above = peak() - before
            shares = torch.rand(args.clients, args.clients)
            models = torch.randn(args.clients, sum(tensor.numel() for tensor in weights.values()))
        start = time.perf_counter()
        shares @ models
        seconds["product"].append(time.perf_counter() - start)
    aggregation, product = (statistics.median(values) for values in seconds.values())
    parameters = num_bytes(weights) // 4
    print(f"{args.clients} clients x {parameters:,} parameters x {args.classes} classes, threads {args.threads}")
    print(f"the clients' own tensors: {num_bytes(updates) / 2**20:,.0f} MiB")
    print(f"aggregation, with everybody's start: {aggregation:.3f} s")
    print(f"one matrix product: {product:.3f} s; ratio {aggregation / product:.2f}")
    print(f"peak memory above the clients' own tensors: {above / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
