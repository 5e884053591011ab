"""The package's types, as the code of a user sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pfl_lightning

USER = '''
"""A package that builds on this one."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from pfl_lightning import ClientModule, FederatedTrainer, WeightedAverage
from pfl_lightning.aggregators import FedAdam
from pfl_lightning.data import Digits, Dirichlet
from pfl_lightning.messages import Updates
from pfl_lightning.methods import FedAvg, FedProx
from pfl_lightning.nets import MLP


class Confident(FedAvg):
    def __init__(self, *args: Any, weight: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = weight

    def is_shared(self, name: str) -> bool:
        return super().is_shared(name) and not name.endswith(".bias")

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        return super().loss(features, logits, target) - self.weight * logits.logsumexp(1).mean()


class Median(WeightedAverage):
    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        for name in self.state["weights"]:
            stack = torch.stack([update["weights"][name] for update in updates.values()])
            self.state["weights"][name] = stack.median(0).values
        return {"clients": float(len(updates))}


def run(client: ClientModule) -> float:
    trainer = FederatedTrainer(max_rounds=2, clients_per_round=0.5, precision="bf16-mixed")
    data = Digits(num_clients=10, partitioner=Dirichlet(alpha=0.3))
    trainer.fit(client, datamodule=data, aggregator=Median())
    return float(trainer.callback_metrics["val/acc"])


run(Confident(net=MLP, input_shape=(64,), num_classes=10, optimizer=partial(SGD, lr=0.05)))
'''

WRONG = {
    "FederatedTrainer(max_round=3)": 'Unexpected keyword argument "max_round"',
    "FederatedTrainer(max_epochs=3)": 'Unexpected keyword argument "max_epochs"',
    "Digits(n_clients=3)": 'Unexpected keyword argument "n_clients"',
    "FedAvg(nett=MLP)": 'Unexpected keyword argument "nett"',
    "FedProx(MLP, (64,), 10, mu=1, nett=MLP)": 'Unexpected keyword argument "nett"',
    'FederatedTrainer(max_rounds="2")': 'to "FederatedTrainer" has incompatible type "str"; expected "int"',
    "run(Median())": 'Argument 1 to "run" has incompatible type "Median"; expected "ClientModule"',
    "FedAdam(taau=1.0)": 'Unexpected keyword argument "taau"',
    "from pfl_lightning.aggregators import FedAdm": 'has no attribute "FedAdm"',
    "from pfl_lightning.methods import FedYogi": 'has no attribute "FedYogi"',
    'Median().aggregate({"a": {}}, 0)': 'expected "int": "dict[str, Any]"',
}


@pytest.mark.exhaustive
def test_a_user_s_typed_package_is_checked_against_ours(tmp_path):
    pytest.importorskip("mypy", reason="pip install 'pfl-lightning[dev]' for mypy, which this test is about")
    Path("user.py").write_text(USER + "".join(f"{line}\n" for line in WRONG))
    # as an installed package: beside it is nothing but a path, and py.typed says that it has types
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"],
        env={**os.environ, "PYTHONPATH": str(Path(pfl_lightning.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    # without the notes on where something is defined
    *errors, last = [line for line in done.stdout.splitlines() if ": note: " not in line]
    first = USER.count("\n") + 1
    assert [int(error.split(":")[1]) for error in errors] == list(range(first, first + len(WRONG))), done.stdout
    assert all(text in error for text, error in zip(WRONG.values(), errors, strict=True)), done.stdout
    assert last.startswith(f"Found {len(WRONG)} errors")
