"""What holds for all tests."""

import gc
import logging
import sys
from collections.abc import Generator, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.exceptions import MisconfigurationException

TESTS = Path(__file__).parent
collect_ignore = ["like_windows"]
"""Its module makes any process that imports it like one on Windows, and pytest imports modules to look for examples."""
PORTABLE = {"client", "contract", "methods", "runs", "selection", "server", "tasks"}
PORTABLE |= {"test_messages.py", "test_packaging.py", "test_settings.py", "test_systems.py"}
"""Folders and files of tests that run on Windows and macOS too; those of networks, ranks and terminals aren't here."""

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
    # what imports and collecting make stays until the end: see `pytest_collection_finish`
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have garbage collections pass over a million objects of imports and of tests, 0.3 seconds a collection."""
    # methods that were made to be asked for their names, over a gigabyte
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks cases as exhaustive that the ``by_default`` of their test leaves out."""
    tests: dict[str, dict[str, pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("by_default"):
            tests.setdefault(item.nodeid.split("[")[0], {})[item.callspec.id] = item
    # where a case is asked for by its name, the others aren't collected
    whole = not any("[" in argument for argument in config.args)
    for name, cases in tests.items():
        mark = next(iter(cases.values())).get_closest_marker("by_default")
        only, but = (
            {case for word in words for case in named(word, cases, whole and name)}
            for words in (mark.args, mark.kwargs.get("but", ()))
        )
        for case in set(cases) - only if only else but:
            cases[case].add_marker(pytest.mark.exhaustive)
    for item in items:
        place = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else None
        if place is not None and {str(place), place.parts[0]} & PORTABLE:
            item.add_marker(pytest.mark.portable)


def named(word: str, cases: Iterable[str], test: str | bool) -> list[str]:
    """Cases of a name, or else those that have it in theirs; an error where a test has none."""
    found = [case for case in cases if case == word] or [case for case in cases if word in case]
    if test and not found:
        raise pytest.UsageError(f"{test} has no case of the name {word!r}")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skips a test of the engine `processes` where the package itself refuses it, as on Windows."""
    try:
        return (yield)
    # the second is of a test that expects another refusal
    except (MisconfigurationException, AssertionError) as error:
        if sys.platform != "win32" or "trainer.engine=processes forks" not in str(error):
            raise
        pytest.skip("trainer.engine=processes forks processes, which this system doesn't")


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


@pytest.fixture(autouse=True, scope="session")
def quick_libraries() -> Iterator[None]:
    """Each run writes its settings by PyYAML and asks for GPUs anew, a tenth of a tiny federation."""
    with pytest.MonkeyPatch.context() as patch:
        if yaml.__with_libyaml__:
            patch.setattr(yaml, "dump", partial(yaml.dump, Dumper=yaml.CDumper))
            # the parser's own texts and those of Lightning's command line
            patch.setattr(yaml, "SafeDumper", yaml.CSafeDumper)
            patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
        patch.setattr(torch.cuda, "device_count", cache(torch.cuda.device_count))
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
