"""Errors while clients run, in every engine: a user's own stays one, and no client is lost without a word."""

import pickle
import re
import sys
import traceback
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit, make_client, points
from pfl_lightning.engines import Auto, Evaluated, Outcome, Processes, Sequential, Vectorised, processes, sequential
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.engines.errors import ClientsLost, Failure, during
from pfl_lightning.engines.steps import step_values
from pfl_lightning.methods import FedAvg
from pfl_lightning.privacy import DPSGD
from pfl_lightning.stopping import Stopped

ENGINES = ["sequential", "vectorised", "processes", "auto"]


def on_ranks(model, **settings):
    return fit(model, devices=2, strategy=ClientParallel(start_method="fork"), **settings)


@pytest.fixture(autouse=True)
def workers_pay(monkeypatch):
    """Workers are forked for clients that take milliseconds too."""
    monkeypatch.setattr(processes, "WORTH", 1e-9)
    monkeypatch.setattr(Processes, "_workers_for", lambda self, what, jobs: min(2, jobs))


class Broken(FedAvg):
    """Has a misspelt name in its loss."""

    def loss(self, features, logits, target):
        return super().loss(features, logits, target) * self.lamda


class BrokenPrivate(Broken):
    example_level = True


class Adjusting(FedAvg):
    def adjust_gradients(self, gradients):
        return {name: gradient * self.lamda for name, gradient in gradients.items()}


class Downloading(FedAvg):
    def on_download(self, payload, data):
        super().on_download(payload, data)
        return self.lamda


class Uploading(FedAvg):
    def upload(self, data):
        return super().upload(data) | {"lamda": self.lamda}


class Evaluating(FedAvg):
    def forward(self, x):
        return super().forward(x) if self.round < 1 else self.lamda


def text_of(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "phase", "line"),
    [
        (Broken, "training", "* self.lamda"),
        (Adjusting, "training", "* self.lamda"),
        (Downloading, "download", "return self.lamda"),
        (Uploading, "upload", '{"lamda": self.lamda}'),
        (Evaluating, "evaluation", "else self.lamda"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_error_of_the_method_keeps_its_type_and_its_line_and_says_whose_it_is(method, phase, line, engine):
    with pytest.raises(AttributeError, match="lamda") as raised:
        fit(make_client(method), engine=engine, workers=2)
    text = text_of(raised.value)
    assert line in text and "During handling" not in text
    (note,) = raised.value.__notes__
    assert re.match(rf"Raised in the {phase} of client \d (in|for|after) round 1\.$", note)


@pytest.mark.parametrize("engine", ENGINES[:2])
@pytest.mark.parametrize("method", [Broken, Adjusting, Downloading, Uploading, Evaluating])
def test_the_traceback_of_the_methods_error_has_few_frames_above_the_hook(method, engine):
    with pytest.raises(AttributeError, match="lamda") as raised:
        fit(make_client(method), engine=engine)
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    below = names[names.index("pfl_lightning.trainer") :]
    assert __name__ in below
    # six from `FederatedTrainer.fit` to its stage, and what calls the method's own hook: a parent's one, or two methods
    # that a client's download passes
    assert 6 <= sum(name.startswith(("pfl_lightning.", "lightning.")) for name in below) <= 8
    assert not any(name.startswith(("pfl_lightning.engines.", "lightning.pytorch.loops.")) for name in below)


def test_an_error_of_an_engine_keeps_all_frames(monkeypatch):
    monkeypatch.setattr(sequential, "step_values", None)
    with pytest.raises(TypeError, match="NoneType") as raised:
        fit(make_client(), engine="sequential")
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    assert "lightning.pytorch.loops.fit_loop" in names and names[-1] == "pfl_lightning.engines.sequential"


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_so_does_one_in_a_step_of_single_samples(engine):
    private = DPSGD(noise_multiplier=1.0, clip=1.0)
    with pytest.raises(AttributeError, match="lamda") as raised:
        fit(make_client(BrokenPrivate), engine=engine, example_privacy=private)
    assert "* self.lamda" in text_of(raised.value)


def test_so_does_one_of_a_rank():
    with pytest.raises(Exception, match="lamda") as raised:
        on_ranks(make_client(Broken))
    assert "* self.lamda" in text_of(raised.value)


class Exiting(FedAvg):
    def training_step(self, batch, batch_idx):
        sys.exit(0)


@pytest.mark.parametrize("engine", [*ENGINES, "ranks"])
def test_a_hook_that_calls_exit_does_not_end_the_run_as_if_it_were_done(engine):
    run = on_ranks if engine == "ranks" else partial(fit, engine=engine, workers=2)
    with pytest.raises(Exception, match=r"sys\.exit\(0\) was called in the training of clients? \d"):
        run(make_client(Exiting))


def test_a_signal_is_no_exit_of_a_hook():
    with pytest.raises(Stopped), during("training", 0, 1):
        raise Stopped(15)


def renamed(result, client):
    """A result under the id of another client."""
    return result._replace(client=client) if isinstance(result, Outcome) else result._replace(clients=[client])


def leaving_out(kept, engine=Sequential):
    """An engine whose results are changed."""

    class Leaving(engine):
        def run(self, jobs):
            yield from kept(list(super().run(jobs)))

        def evaluate_all(self, jobs):
            together = list(super().evaluate_all(jobs))
            yield from kept([Evaluated.of(k, each.metrics(k)) for each in together for k in each.clients])

    return Leaving


@pytest.mark.parametrize("phase", ["training", "evaluation"])
@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (lambda results: results[2:], r"no result of clients 0, 1 in the {} (in|after) round 1"),
        (lambda results: [*results, results[1]], r"of client 1 in the {} (in|after) round 1\b.* second"),
        (
            lambda results: [renamed(results[0], 9), *results[1:]],
            r"unrequested result of client 9 in the {} (in|after) round 1\b",
        ),
    ],
    ids=["fewer", "twice", "foreign"],
)
@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_results_are_counted_against_clients(engine, kept, says, phase):
    part = leaving_out(kept, engine)
    if phase == "evaluation":
        part.run = engine.run
    with pytest.raises(ClientsLost, match=says.format(phase)):
        fit(make_client(), engine=part)


def test_ranks_and_the_choice_of_an_engine_count_them_too(monkeypatch):
    part = leaving_out(lambda results: results[1:])
    with pytest.raises(Exception, match=r"no result of client \d in the training"):
        on_ranks(make_client(), engine=part)
    monkeypatch.setattr(Auto, "_chosen", lambda self, first: part(self.module, self.work, self.precision))
    with pytest.raises(ClientsLost, match="no result of client 0 in the training"):
        fit(make_client(), engine="auto")


def test_sites_may_be_gone():
    class Sites(leaving_out(lambda results: results[1:])):
        may_miss_clients = True

    assert [row["clients_absent"] for row in fit(make_client(), engine=Sites, max_rounds=2).rows] == [1, 1]


class Unsent(Exception):
    """Takes other arguments than those that it keeps, so that it can't be pickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "type_there", "says"),
    [(KeyError("lost"), KeyError, "lost"), (Unsent(1, 2), RuntimeError, "Unsent: 1 and 2")],
)
def test_an_error_comes_out_of_another_process_with_its_traceback_and_its_note(error, type_there, says):
    with pytest.raises(type(error)), during("upload", 1, 4):
        raise error
    with pytest.raises(type_there, match=says) as raised:
        pickle.loads(pickle.dumps(Failure.of(error))).throw("rank 1")
    assert raised.value.__notes__ == ["Raised in the upload of client 4 in round 2."]
    assert "in rank 1:" in text_of(raised.value) and "raise error" in text_of(raised.value)


@pytest.mark.parametrize("returned", [None, 0.5, {"value": torch.zeros(())}], ids=str)
def test_a_step_without_a_loss_is_refused_by_what_it_returned(returned):
    class Own(FedAvg):
        def training_step(self, batch, batch_idx):
            return returned

    with pytest.raises(MisconfigurationException, match=rf"Own\.training_step returned {type(returned).__name__} "):
        step_values(make_client(Own), points(4, seed=0), 0)
