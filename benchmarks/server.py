"""Seconds that servers take for one aggregation, as ratios to FedAvg's and to FedAWA's: the FedAWA paper's table.

`benchmarks/growth.py` has the other servers, and shows how time and memory grow with clients.

    python benchmarks/server.py [--clients 20] [--rounds 15] [--fedlaw 1] [--threads 1]

Uploads of ResNet-20 clients (272,474 parameters, 128 entries), which walk at random from round to round; FedLAW's proxy
set is 1,000 random images. All run in one process and take turns on the same uploads: what else the machine does hits
all of them. Medians over rounds; FedLAW, which trains on its proxy set for minutes without a GPU, has a number of
rounds of its own. Beside them stand the ratios to FedAWA that the FedAWA paper reports, of its authors' code and
machine.
"""

import argparse
import statistics
import time

import torch

from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import LDAWA, FedAWA, FedDisco, FedLAW
from pfl_lightning.data import Samples
from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CifarResNet

CLASSES, SHAPE = 10, (3, 32, 32)
REPORTED = {"FedAWA-L": 18.5, "FedLAW": 12.3, "LDAWA": 3.1}


class Public:
    """What FedLAW asks of a data module."""

    def server_data(self) -> Samples:
        """Random images with random labels."""
        return Samples(torch.randn(1000, *SHAPE), torch.randint(0, CLASSES, (1000,)))


def walk(weights: StateDict, size: float = 0.01) -> StateDict:
    """A model, one random step away."""
    return {
        name: tensor + size * torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 1
        for name, tensor in weights.items()
    }


def uploads(weights: StateDict, clients: int) -> Updates:
    """Updates of clients that each took a step from the same model."""
    return {
        number: {
            "weights": walk(weights),
            "num_samples": torch.tensor(100 + number),
            "class_counts": torch.randint(1, 20, (CLASSES,)),
        }
        for number in range(clients)
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fedlaw", type=int, default=1, help="rounds of FedLAW; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    client = FedAvg(CifarResNet, SHAPE, CLASSES)
    weights = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    rules: list[WeightedAverage] = [WeightedAverage(), FedDisco(), FedAWA(), LDAWA(warmup=0)]
    servers = {type(rule).__name__: rule for rule in [*rules, *([FedLAW()] if args.fedlaw else [])]}
    servers["FedAWA-L"] = FedAWA(group="module")
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for server in servers.values():
        server.setup(Server(args.clients, weights, client, Public(), seed=0))  # type: ignore[arg-type]
    for number in range(max(args.rounds, args.fedlaw)):
        updates = uploads(weights, args.clients)
        for name, server in servers.items():
            times = seconds[name]
            if len(times) < (args.fedlaw if isinstance(server, FedLAW) else args.rounds):
                start = time.perf_counter()
                server.aggregate(updates, round=number)
                times.append(time.perf_counter() - start)
        weights = walk(weights)
    print(f"{args.clients} clients, {args.rounds} rounds, threads {args.threads}; medians of seconds an aggregation")
    print(f"{'':16}{'seconds':>9}{'/ FedAvg':>10}{'/ FedAWA':>10}{'in the paper':>14}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        ratios = (median / medians[other] for other in ("WeightedAverage", "FedAWA"))
        print(
            f"{name:16}{median:9.4f}" + "".join(f"{ratio:10.2f}" for ratio in ratios) + f"{REPORTED.get(name, ''):>14}"
        )


if __name__ == "__main__":
    main()
