"""What holds for all tests."""

import logging
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities import registry

NOISE = (
    ".*LeafSpec.* is deprecated",
    ".* exists and is not empty",
    "LightningCLI's args parameter is intended",
    ".*was deprecated in v4",
    ".*JsonargparseDeprecationWarning",
    ".* module.s. in eval mode at the start of training",
    ".*but have no logger configured",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps back warnings of Lightning and of its parser about what the tests mean to do."""
    # Lightning keeps its messages from other handlers where it is imported before pytest has some
    logging.getLogger("lightning.pytorch").propagate = True
    for text in NOISE:
        config.addinivalue_line("filterwarnings", rf"ignore:\s*{text}")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def one_look_at_what_is_installed() -> Iterator[None]:
    """Each Trainer looks for callbacks in all installed packages, which takes as long as a tiny federation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True)
def outside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test writes to the working directory by mistake stays out of the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_settings_of_weights_and_biases_stay() -> Iterator[None]:
    """A process keeps what its first run has read of the environment, and a test may change it."""
    yield
    # where nothing has begun, finishing would read the environment, which takes longer than most tests
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    if setup and getattr(setup, "_singleton", True):
        wandb = sys.modules["wandb"]
        wandb.finish()
        wandb.teardown()
