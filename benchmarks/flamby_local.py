"""FLamby's Local on its six regions in plain PyTorch, by seed: initial weights and batches as its code draws them.

    python benchmarks/flamby_local.py DATA 42 43 44 45 46

The published five seeds happen to agree more than others do: run other ones to see by how much.
"""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning.data import FedTcgaBrca
from pfl_lightning.tasks import Survival


def cox(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean over patients, of whom those without an event count as zero, as FLamby's loss does."""
    falling = target[:, 0].argsort(descending=True, stable=True)
    # in float32 the gradient of an event whose risk is far above all others is rounding, which Adam makes large
    risk, event = scores[falling, 0].double(), target[falling, 1]
    return ((risk.logcumsumexp(0) - risk) * event).mean()


def main(root: str, seeds: list[int]) -> None:
    """Print each region's concordance index on its test patients, and the mean of regions, by seed."""
    data = FedTcgaBrca(root=root, val_fraction=0.0)
    data.setup()
    means = []
    for seed in seeds:
        torch.manual_seed(seed)
        initial = nn.Linear(39, 1).state_dict()
        found = []
        for region in range(data.num_clients):
            train, test = (data.part(region, split) for split in ("train", "test"))
            net = nn.Linear(39, 1)
            net.load_state_dict(initial)
            torch.manual_seed(seed)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            batches = DataLoader(TensorDataset(train.x, train.y), batch_size=8, shuffle=True)
            for _ in range(30):
                for x, y in batches:
                    optimizer.zero_grad()
                    cox(net(x), y).backward()
                    optimizer.step()
            metric = Survival().configure_metrics()
            with torch.no_grad():
                metric.update(net(test.x), test.y)
            found.append(float(metric.compute()["c_index"]))
        means.append(sum(found) / len(found))
        print(f"seed {seed}:", *(f"{value:.3f}" for value in found), f" mean {means[-1]:.4f}", flush=True)
    print(f"{len(means)} seeds: {torch.tensor(means).mean():.4f} ± {torch.tensor(means).std():.4f}")


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
