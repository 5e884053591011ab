"""Compiled steps: those of the vectorised engine, or its own where they can't be."""

from functools import partial
from itertools import chain

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from test_engine import RAGGED, client_modules, compare
from torch import nn
from torch._dynamo import lookup_backend
from torch._inductor import config
from torch.optim import SGD

from federations import CLASSES, FEATURES, HIDDEN, MOMENTUM, blobs, fit, make_client, noisy, plain, same_end
from pfl_lightning.engines import Vectorised
from pfl_lightning.engines.vmap.compiled import Compiled
from pfl_lightning.methods import FedAvg, FedPer, FedRep, Local
from pfl_lightning.nets import Net


class Compiling(Vectorised):
    def __init__(self, *args):
        super().__init__(*args[:4], compile=True)


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Steps are followed and differentiated as for any compiler, but not made machine code, which takes its time."""
    monkeypatch.setattr(Compiled, "backend", "aot_eager")
    torch._dynamo.reset()


def normed(input_shape, num_classes):
    """With BatchNorm and a parameter that nothing depends on."""
    net = Net(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, CLASSES))
    net.unused = nn.Parameter(torch.ones(2))
    return net


def trusted(run):
    is_trusted = run.federation.engines[0].trainer.compiled.trusted
    if not is_trusted and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("before torch 2.7 compilers don't follow the context managers of 64-true; steps stay as they are")
    return is_trusted


UNCOMPILED = {"PFedMe": "setattr", "PerFedAvg": "other results"}
"""Why steps stay as they are; PerFedAvg's in some versions of torch, which take its inner gradient otherwise."""
# whose steps have more to follow than FedAvg's: other models, phases, gradients of gradients, what entries require
INVOLVED = ["Ditto", "FedProx", "FedRoD", "MOON", "PACClient", "PFedMe", "PerFedAvg", "WDR"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", INVOLVED)
def test_methods_give_what_they_give_uncompiled(name, recwarn):
    _, run = compare(client_modules()[name], settings={"net": plain}, engine=Compiling, max_rounds=2, local_epochs=1)
    assert trusted(run) == (name not in UNCOMPILED) or name == "PerFedAvg"
    told = [str(w.message) for w in recwarn if "trainer.compile" in str(w.message)]
    assert len(told) == (not trusted(run))
    assert all(f"steps of {name} stay uncompiled: " in text and UNCOMPILED[name] in text for text in told)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lifetime", ["round", "run"])
@pytest.mark.parametrize("method", [FedAvg, Local, FedRep])
def test_running_statistics_momentum_decay_and_clients_of_any_size_are_as_ever(method, lifetime):
    # decay would move a parameter that had a gradient of zeros instead of none
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    settings = {"net": normed, "optimizer": optimizer, "optimizer_lifetime": lifetime}
    _, run = compare(method, settings=settings, engine=Compiling, clients_per_round=3)
    assert trusted(run)


@pytest.mark.exhaustive
def test_blocks_may_have_several_sizes():
    class Halves(Compiling):
        def __init__(self, *args):
            super().__init__(*args)
            self.block_size = 3

    assert trusted(compare(engine=Halves, settings={"net": normed})[1])


@pytest.mark.exhaustive
def test_it_computes_in_the_trainer_s_precision():
    runs = [
        fit(make_client(net=plain), blobs(*RAGGED), engine=engine, precision="bf16-mixed")
        for engine in (Vectorised, Compiling)
    ]
    assert trusted(runs[1])
    single = fit(make_client(net=plain), blobs(*RAGGED), engine=Vectorised)
    error = [max(float((run.weights[name] - tensor).norm()) for name, tensor in single.weights.items()) for run in runs]
    assert error[0] > 1e-4
    assert error[1] == pytest.approx(error[0], rel=0.5)


@pytest.mark.exhaustive
def test_dropout_stays_as_it_is_with_each_client_s_own_stream():
    with pytest.warns(UserWarning, match="steps of FedAvg stay uncompiled"):
        _, run = compare(engine=Compiling, settings={"net": noisy})
    assert not trusted(run)


class Astray(FedAvg):
    """Whose step is another one when it is compiled."""

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        return {"loss": values["loss"] * (2.0 if torch.compiler.is_compiling() else 1.0)}


@pytest.mark.exhaustive
def test_what_would_be_something_else_stays_as_it_is():
    with pytest.warns(UserWarning, match="steps of Astray stay uncompiled: .* other results"):
        compare(Astray, engine=Compiling, settings={"net": normed})


class Later(FedAvg):
    """Whose classifier learns from the second round on."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = (self.net.features(x) ** 2).mean()
        return {"loss": loss + super().training_step(batch, batch_idx)["loss"] if self.round else loss}


class Bent(Later):
    """Which is another one when it is compiled, from the second round on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return {"loss": loss * (2.0 if self.round and torch.compiler.is_compiling() else 1.0)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [Later, Bent])
def test_each_course_of_a_step_is_compared(method, recwarn):
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    _, run = compare(method, engine=Compiling, settings={"net": plain, "optimizer": optimizer})
    assert trusted(run) == (method is Later)


@pytest.mark.exhaustive
def test_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, FedPer, net=normed, optimizer_lifetime="run")
    settings = {"engine": "vectorised", "compile": True, "max_rounds": 4}
    whole = fit(make(), blobs(*RAGGED), **settings)
    fit(make(), blobs(*RAGGED), tmp_path, **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), blobs(*RAGGED), tmp_path, ckpt_path="last", **settings))
    assert trusted(whole)


def is_symbolic(tensor):
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


class Replayed:
    """A compiler of steps whose results are in the same memory each time, as those of a CUDA graph are."""

    def __init__(self):
        self.captures = []
        self.fixed = True
        self.begun = 0

    def __call__(self, graph, inputs):
        run, results = lookup_backend("aot_eager")(graph, inputs), {}
        self.captures.append(config.triton.cudagraphs)
        self.fixed &= all(isinstance(tensor, torch.Tensor) and not is_symbolic(tensor) for tensor in inputs)

        def replay(*args):
            # what the last step has left is gone before this one begins
            for result in chain.from_iterable(results.values()):
                result.fill_(torch.nan if result.is_floating_point() else -1)
            new = [result.detach() for result in run(*args)]
            own = results.setdefault(tuple(t.shape for t in new), [torch.empty_like(t) for t in new])
            torch._foreach_copy_(own, new)
            return own

        return replay

    def begin(self):
        self.begun += 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("lifetime", ["round", "run"])
@pytest.mark.parametrize("method", [FedAvg, Local, FedRep])
def test_a_captured_step_may_overwrite_what_the_last_one_gave(monkeypatch, method, lifetime):
    replayed = Replayed()
    monkeypatch.setattr(Compiled, "backend", staticmethod(replayed))
    monkeypatch.setattr(Compiled, "captured_on", {"cpu"})
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", replayed.begin)
    settings = {"net": normed, "optimizer": MOMENTUM, "optimizer_lifetime": lifetime}
    # sums of several batches are taken before the next batch overwrites the gradients
    accumulate = 2 if method is FedRep else 1
    _, run = compare(method, settings=settings, engine=Compiling, accumulate_grad_batches=accumulate)
    assert trusted(run)
    assert set(replayed.captures) == {True}
    assert replayed.begun > 3 * len(replayed.captures)


@pytest.mark.exhaustive
def test_steps_have_one_shape_whatever_their_clients_and_last_batches(monkeypatch):
    replayed = Replayed()
    monkeypatch.setattr(Compiled, "backend", staticmethod(replayed))
    # other rows in each step, as clients end and as last batches have their own sizes
    _, run = compare(engine=Compiling, settings={"net": normed}, clients_per_round=3)
    assert trusted(run)
    # one for the number 0 and one for all others; a number or size among what they are given would be one for each
    assert len(replayed.captures) == 2
    assert replayed.fixed


@pytest.mark.exhaustive
def test_it_is_made_machine_code(monkeypatch):
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except Exception:
        pytest.skip("there is no C++ compiler, which torch.compile needs on a CPU")
    monkeypatch.setattr(Compiled, "backend", "inductor")
    assert trusted(compare(engine=Compiling, settings={"net": plain}, max_rounds=1)[1])


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_engines_that_cannot_refuse(engine):
    with pytest.raises(MisconfigurationException, match=rf"trainer\.compile=true .*trainer\.engine='{engine}'"):
        fit(make_client(), engine=engine, compile=True)


@pytest.mark.exhaustive
def test_auto_passes_it_on():
    run = fit(make_client(), engine="auto", compile=True)
    assert run.federation.engines[0]._engine.trainer.compiled.trusted


def test_steps_are_compiled_for_few_numbers_of_rows():
    compiled = Compiled(make_client(), Precision())
    assert [compiled.rows("train", 100, needed) for needed in (100, 26, 25, 9, 8, 1)] == [100, 100, 25, 25, 8, 8]
    assert [compiled.rows("train", 6, needed) for needed in (6, 1)] == [6, 6]
    # the compiler has room for so many versions alone
    assert [compiled.rows("head", 100, needed) for needed in (100, 1, 20)] == [100, 8, 100]
