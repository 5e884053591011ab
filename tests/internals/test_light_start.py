"""What an import of Lightning leaves out is there for whoever asks, and works as torch has it."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc
import sys
from pfl_lightning.internals import light_start
from pfl_lightning.internals.light_start import COMPILER, import_lightning, uncollected

with uncollected(freeze=True):
    assert not gc.isenabled()
    import_lightning()
assert gc.isenabled() and gc.get_freeze_count()
assert COMPILER not in sys.modules and "sympy" not in sys.modules
assert light_start.hidden == light_start.LEFT_OUT and not light_start.LEFT_OUT & sys.modules.keys()

import torch
from lightning.fabric.wrappers import OptimizedModule
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn, optim

excluded, step = optim.Optimizer.zero_grad, optim.SGD.step
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, index):
        assert torch.is_grad_enabled()
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


net = Net()
before = net.layer.weight.detach().clone()
trainer = Trainer(
    max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
trainer.fit(net, torch.utils.data.DataLoader([torch.ones(2)] * 2))
# the second step's momentum is a half of the first step
assert torch.allclose(before - net.layer.weight, torch.full((1, 2), 0.5 + 0.75))
kinds = [kind for kind in vars(optim).values() if isinstance(kind, type) and kind not in (optim.Optimizer, optim.LBFGS)]
for kind in kinds:
    wide = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([wide], **({"lr": 0.1}))
    wide.grad = torch.zeros(2, 2).to_sparse() if kind is optim.SparseAdam else torch.ones(2, 2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert wide.requires_grad and wide.grad is None and not isinstance(net, OptimizedModule)
assert COMPILER not in sys.modules
assert "__dynamo_disable" in vars(excluded.__wrapped__) and "_dynamo" not in step.__code__.co_names

compiled = torch.compile(net, backend="eager")
from torch._dynamo import OptimizedModule as Real
import torch._dynamo.config
assert "__dynamo_disable" not in vars(excluded.__wrapped__) and "_dynamo" in step.__code__.co_names
assert type(compiled) is Real and isinstance(compiled, OptimizedModule) and not isinstance(net, OptimizedModule)
assert from_compiled(compiled) is net
optimizer = net.configure_optimizers()


@torch.compile(backend="eager")
def stepped(x):
    optimizer.zero_grad()
    compiled(x).sum().backward()
    optimizer.step()


net.training_step = net.forward = lambda x, index=None: net.layer(x).sum()
weight = net.layer.weight.detach().clone()
stepped(torch.ones(1, 2))
assert torch.allclose(weight - net.layer.weight, torch.full((1, 2), 0.5))
assert torch._dynamo is sys.modules[COMPILER] and torch._dynamo.is_compiling() is False

import matplotlib, scipy, torchvision
from lightning_utilities.core.imports import RequirementCache
assert RequirementCache("matplotlib")
print("done")
"""

OTHER = """
import sys, torch
from pfl_lightning.internals.light_start import COMPILER, compiler_on_demand
step = torch.optim.SGD.step.__code__
with compiler_on_demand():
    stand_in = torch._dynamo
    from torch._dynamo import disable, OptimizedModule

    @disable
    def one(): return 1

    @disable(recursive=False)
    def two(): return 2

    assert (one(), two()) == (1, 2) and torch._dynamo is stand_in is sys.modules[COMPILER]
    assert torch.optim.SGD.step.__code__ is not step
    # any other name
    assert callable(torch._dynamo.graph_break)
    assert torch._dynamo is not stand_in and torch.optim.SGD.step.__code__ is step
assert torch._dynamo is sys.modules[COMPILER] is not stand_in and (one(), two()) == (1, 2)
finders = list(sys.meta_path)
with compiler_on_demand():
    assert sys.meta_path == finders
print("done")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.endswith("done\n"), done.stderr


def test_a_run_works_without_the_compiler_and_a_later_import_restores_everything():
    run(PROGRAM)


def test_whoever_asks_for_more_meanwhile_gets_the_compiler():
    run(OTHER)
