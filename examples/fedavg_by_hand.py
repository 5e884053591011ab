"""Federated averaging as a plain loop, and the same by the Trainer: the weights are the same, bit for bit.

    python examples/fedavg_by_hand.py

What the package does in a round, without its parts: read this first, then `pfl_lightning.engines.sequential`.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits, Dirichlet
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.seeds import derive_seed

ROUNDS, SEED, BATCH, LR = 3, 0, 10, 0.05


def by_hand(data: Digits) -> dict[str, torch.Tensor]:
    """Rounds of local training and averaging, one client after another."""
    torch.manual_seed(SEED)
    net = MLP(data.input_shape, data.num_classes)
    server = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for number in range(ROUNDS):
        updates, sizes = [], []
        for client in range(data.num_clients):
            net.load_state_dict(server)
            samples = data.part(client, "train")
            optimizer = SGD(net.parameters(), lr=LR)
            # a client's batches depend on the seed, the round and the client, and on nothing else
            generator = torch.Generator().manual_seed(derive_seed(SEED, "train", number, client))
            for batch in torch.randperm(len(samples), generator=generator).split(BATCH):
                loss = cross_entropy(net(samples.x[batch]), samples.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            updates.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
            sizes.append(len(samples))
        for name in server:
            server[name] = torch.zeros_like(server[name])
            for update, size in zip(updates, sizes, strict=True):
                server[name].add_(update[name], alpha=size / sum(sizes))
    return server


def by_trainer(data: Digits) -> dict[str, torch.Tensor]:
    """The same with the package."""
    torch.manual_seed(SEED)
    client = FedAvg(MLP, data.input_shape, data.num_classes, optimizer=lambda parameters: SGD(parameters, lr=LR))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = FederatedTrainer(max_rounds=ROUNDS, engine="sequential", enable_checkpointing=False, **quiet)
    trainer.fit(client, datamodule=data)
    return {name: client.state_dict()[f"net.{name}"] for name in MLP(data.input_shape, data.num_classes).state_dict()}


def main() -> None:
    """Compares the two."""
    data = Digits(num_clients=10, partitioner=Dirichlet(alpha=0.3), batch_size=BATCH)
    data.prepare_data()
    data.setup()
    one, other = by_hand(data), by_trainer(data)
    for name in one:
        print(f"{name:<20} largest difference {float((one[name] - other[name]).abs().max()):.1e}")


if __name__ == "__main__":
    main()
