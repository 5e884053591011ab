"""How many products of all models, and sums over them, a round of a server with a mix for each client takes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_lightning import Server
from pfl_lightning.aggregators import CFL, FedAMP, FedReMa
from pfl_lightning.methods.class_vectors import ClassVectors
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.pfedgraph import CollaborationGraph
from pfl_lightning.nets import Net
from pfl_lightning.server import ClassMeans

CLIENTS = 72
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2)}


class Work(TorchDispatchMode):
    """Counts multiplications of matrix products, and calls and elements of running sums."""

    def __init__(self):
        super().__init__()
        self.multiplications = self.sums = self.summed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            one, other = (args[place] for place in PRODUCTS[name])
            self.multiplications += one.numel() * other.shape[1]
        if name == "add_":
            self.sums += 1
            self.summed += args[0].numel()
        return func(*args, **(kwargs or {}))


def a_round(server, spread=1.0):
    """Products and elements summed in a round, as multiples of those of all models' Gram matrix and of all models."""
    torch.manual_seed(0)
    module = FedAvg(lambda shape, k: Net(nn.Linear(*shape, 4), nn.Linear(4, k)), (4,), 100)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    updates = {
        client: {
            "weights": {name: tensor + spread * torch.randn_like(tensor) for name, tensor in weights.items()},
            "num_samples": torch.tensor(10 + client),
        }
        for client in range(CLIENTS)
    }
    server.setup(Server(CLIENTS, weights, module, None, seed=0))
    with Work() as work:
        server.aggregate(updates, round=30)
        for client in range(CLIENTS):
            server.download(client)
    size = sum(tensor.numel() for tensor in weights.values())
    return work.multiplications / (CLIENTS**2 * size), work.summed / (CLIENTS * size)


@pytest.mark.parametrize(
    ("server", "most"),
    [(CollaborationGraph, 3), (CFL, 2), (FedAMP, 2), (FedReMa, 2), (lambda: FedReMa(segmentation="above_all"), 2)],
)
def test_a_round_takes_few_products_and_sums_of_all_models(server, most):
    # products have their rows rounded up to a dozen
    products, summed = a_round(server())
    assert products < most * 1.2**2
    assert summed < 3


def test_many_peers_are_averaged_as_one_by_one(monkeypatch):
    found = []
    for sums in (0, 10**9):
        monkeypatch.setattr("pfl_lightning.methods.fedrema.SUMS", sums)
        server = FedReMa()
        a_round(server)
        found.append(server.state["classifiers"])
    for client in range(CLIENTS):
        for name, tensor in found[0][client].items():
            torch.testing.assert_close(tensor, found[1][client][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known", [range(1000), range(0, 1000, 3), ()])
def test_vectors_of_a_thousand_classes_are_taken_in_few_operations(known):
    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    table = ClassVectors(1000, 8)
    received = {c: torch.full((8,), float(c + 1), dtype=torch.float64) for c in known}
    with Calls() as calls:
        table.take(received)
    assert calls.count < 20
    expected = torch.zeros(1000, 8)
    for c in known:
        expected[c] = c + 1
    assert table.vectors.equal(expected) and table.vectors.dtype == torch.float32
    assert table.known.nonzero().flatten().tolist() == list(known)


def test_all_clients_get_the_same_class_means_and_keep_those_of_their_round():
    server = ClassMeans(weighted=False)
    server.setup(None)
    server.aggregate({0: {"prototypes": {0: torch.ones(2)}}}, round=0)
    first = server.download(0)["prototypes"]
    assert first is server.download(1)["prototypes"]
    server.aggregate({0: {"prototypes": {0: torch.zeros(2), 1: torch.ones(2)}}}, round=1)
    assert first.keys() == {0} and first[0].equal(torch.ones(2))
    assert server.download(0)["prototypes"].keys() == {0, 1}
