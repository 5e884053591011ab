"""Stages of a round: rooms that the core does without, and hooks of a callback of one's own."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import pfl_lightning
from federations import blobs, fit, make_client, near
from pfl_lightning.callbacks import FederatedCallback, SignFlip
from pfl_lightning.compression import TopK
from pfl_lightning.federation.stages import Part, Plan, refuse_pairs
from pfl_lightning.privacy import DPSGD, SecureSum
from pfl_lightning.schedules import Synchronous

PACKAGE = Path(pfl_lightning.__file__).parent
TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "round.md"
ROOMS = {
    # deployments and an audit need it
    "privacy": ["privacy", "flower", "resident.py", "callbacks/canary_audit.py"],
    "compression": ["compression.py", "flower", "resident.py"],
    "schedules": ["schedules"],
    "attacks": ["callbacks/attacks"],
    "audits": ["callbacks/canary_audit.py", "callbacks/membership_audit.py"],
    "deployments": ["flower", "resident.py"],
}
NAMING = {"trainer.py", "callbacks/__init__.py"}
"""The files that name rooms for users: the Trainer's signature, and the list of callbacks."""


def without(room: str, folder: Path) -> Path:
    """A copy of the package without a room, where files that name it have stand-ins."""
    copy = folder / "src" / "pfl_lightning"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ROOMS[room]:
        gone = copy / part
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    lost = tuple(f"pfl_lightning.{part.removesuffix('.py').replace('/', '.')}" for part in ROOMS[room])
    naming = set()
    for path in copy.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for number, node in enumerate(tree.body):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(lost):
                naming.add(str(path.relative_to(copy)))
                names = [alias.asname or alias.name for alias in node.names]
                tree.body[number] = ast.parse(" = ".join([*names, "object"])).body[0]
        if str(path.relative_to(copy)) in naming:
            path.write_text(ast.unparse(tree))
    assert naming <= NAMING
    return folder / "src"


@pytest.mark.exhaustive
@pytest.mark.parametrize("room", ROOMS)
def test_the_core_does_without(room, tmp_path):
    source = without(room, tmp_path)
    files = [*(f"federation/test_{name}.py" for name in ("federation", "resume")), "engines/test_sequential.py"]
    program = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", f"pythonpath={source}"]
    done = subprocess.run(
        [*program, *(str(TESTS / file) for file in files)], capture_output=True, text=True, cwd=TESTS.parent
    )
    assert done.returncode == 0, done.stdout[-3000:]


# Hooks of a callback


class Halved(FederatedCallback):
    """Clients train from half of the model, and send double what they have; the server takes the first ones alone."""

    def __init__(self, first: int = 4) -> None:
        self.first, self.rounds, self.seen = first, [], []

    def on_plan(self, federation, there, size):
        self.rounds.append(federation.round)
        chosen = federation.cohort(there, size)
        return Plan(chosen, chosen[: self.first])

    def on_send(self, federation, job):
        return job._replace(payload={"weights": {name: t / 2 for name, t in job.payload["weights"].items()}})

    def on_upload(self, outcome, job, module):
        weights = {name: 2 * tensor for name, tensor in outcome.update["weights"].items()}
        return outcome._replace(update={**outcome.update, "weights": weights})

    def on_deliver(self, federation, plan, updates):
        self.seen.append((plan.arrived, sorted(updates)))
        return updates


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_callback_changes_what_goes_down_and_what_comes_up(engine):
    still = make_client(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    stage = Halved()
    run, plain = (fit(still, engine=engine, callbacks=callbacks, max_rounds=2) for callbacks in ([stage], []))
    # half of the model, untrained, doubled: the model
    assert near(run.weights, plain.weights) and stage.rounds == [0, 1]


def test_a_callback_decides_who_takes_part():
    stage = Halved(first=2)
    run = fit(make_client(), callbacks=[stage], max_rounds=3)
    assert stage.seen == [([0, 1], [0, 1])] * 3
    assert [row["clients"] for row in run.rows] == [2, 2, 2]
    assert [row["absent"] for row in run.rows] == ["2 3"] * 3


class FirstOnly(FederatedCallback):
    def on_collect(self, federation, cohort, outcomes):
        return {client: outcomes[client] for client in cohort[:1]}


def test_a_callback_decides_what_the_server_takes():
    run = fit(make_client(), callbacks=[FirstOnly()], max_rounds=2)
    alone = fit(make_client(), blobs(), callbacks=[Halved(first=1)], max_rounds=1)
    assert [row["clients"] for row in run.rows] == [1, 1] and alone.rows[0]["clients"] == 1


def rounded():
    """The class of the page about a round."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(block, names)
    return names["Rounded"]()


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_page_s_class_rounds_what_comes_up(engine):
    seen = Spied()
    fit(make_client(), engine=engine, callbacks=[rounded(), seen], max_rounds=2)
    assert len(seen.changes) == 8
    for change in seen.changes:
        steps = change * 1000
        assert torch.allclose(steps, steps.round(), atol=0.01) and steps.abs().max() > 1


class Spied(FederatedCallback):
    def __init__(self) -> None:
        self.changes = []

    def on_aggregate_start(self, trainer, federation, updates):
        received = federation.aggregator.download(0)["weights"]
        for update in updates.values():
            self.changes.append(torch.cat([(update["weights"][n] - t).flatten() for n, t in received.items()]))


def test_the_page_s_class_is_refused_under_sums():
    with pytest.raises(MisconfigurationException, match=r"trainer\.secure_sum .* trainer\.callbacks=Rounded"):
        fit(make_client(), callbacks=[rounded()], secure_sum=SecureSum())


# Pairs


def test_a_pair_is_refused_with_both_reasons():
    one = Part("trainer.one=1", does={"moves": "moves clients"})
    other = Part("trainer.other=2", excludes={"moves": "counts them; take 3"})
    with pytest.raises(MisconfigurationException, match=r"^trainer\.one=1 moves .* trainer\.other=2 .* take 3\.$"):
        refuse_pairs([other, one])
    # an effect of its own is no pair
    refuse_pairs([Part("trainer.one=1", {"moves": "moves"}, {"moves": "stands"})])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compression": TopK(0.5), "secure_sum": SecureSum()}, ["trainer.compression=TopK", "trainer.secure_sum"]),
        ({"schedule": Synchronous(), "example_privacy": DPSGD(1.0)}, ["Synchronous", "trainer.example_privacy"]),
        ({"secure_sum": SecureSum(), "callbacks": [SignFlip(0.5)]}, ["trainer.secure_sum", "SignFlip"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, words):
    with pytest.raises(MisconfigurationException) as refused:
        fit(make_client(), **settings)
    assert all(word in str(refused.value) for word in words)
