import gc
import weakref

import pytest

from federations import Blobs, make_client, make_trainer
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.internals.garbage import are_imports_frozen, uncollected


class Cycle:
    def __init__(self):
        self.other = self


class Watch(FederatedCallback):
    def __init__(self, stops):
        self.stops, self.frozen, self.made = stops, 0, None

    def on_round_start(self, trainer, federation, cohort):
        self.frozen, self.made = gc.get_freeze_count(), weakref.ref(Cycle())
        if self.stops:
            raise ValueError("stopped")


@pytest.fixture
def nothing_frozen():
    """The state of a program, as the tests' own process has frozen its imports."""
    gc.unfreeze()
    are_imports_frozen.cache_clear()
    yield
    gc.freeze()
    are_imports_frozen.cache_clear()


def test_the_search_is_postponed_within_the_context():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("stops", [False, True])
def test_a_run_searches_among_its_own_objects_and_afterwards_among_all(stops):
    watch, before = Watch(stops), weakref.ref(Cycle())
    run = make_trainer(max_rounds=1, callbacks=[watch])
    try:
        run.fit(make_client(), Blobs(num_clients=2))
    except ValueError:
        assert stops
    assert watch.frozen > 100_000 and gc.get_freeze_count() < 10_000
    gc.collect()
    assert watch.made() is None and before() is None


def test_a_program_s_frozen_imports_stay_so_and_nothing_of_a_run_is_added():
    frozen = gc.get_freeze_count()
    make_trainer(max_rounds=1, callbacks=[watch := Watch(stops=False)]).fit(make_client(), Blobs(num_clients=2))
    assert frozen >= watch.frozen >= gc.get_freeze_count() > frozen // 2 > 50_000


def test_objects_are_counted_once_in_a_process_and_not_once_a_stage(monkeypatch):
    are_imports_frozen()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted again"))
    run = make_trainer(max_rounds=1)
    run.fit(make_client(), Blobs(num_clients=2))
    run.validate()
