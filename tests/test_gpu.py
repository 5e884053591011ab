"""What a GPU gives, against the CPU and among its engines; without one there is nothing to compare, and all is skipped.

    pytest tests/test_gpu.py -m "" -n 4

The other tests run on a GPU with ``ACCELERATOR=gpu`` in the environment.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from command import CONFIGS, QUIET, pfl
from federations import blobs, equal, fit, make_client, noisy, plain
from pfl_lightning.data import datamodule
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import tensors
from pfl_lightning.methods import Ditto, FedPer, FedProx, registry
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.nets import Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")

METHODS = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
DIGITS = (
    "--data.num_clients 4 --data.max_samples 240 --data.batch_size 25 --data.central_test 0.2 "
    "--data.server_fraction 0.4 "
    "--data.partitioner.alpha 1.0 --data.partitioner.min_size 20 --trainer.max_rounds 2"
)
DRAWS = {"fedclassavg", "fedclassavg_cl", "fedclassavg_weight", "fedcp", "fedgen", "fedsr", "floco"}
"""Methods whose clients draw numbers, which are others on another device."""
ROUNDING = {"fedkd": 1e-6}
"""Of float64, through two rounds: 1e-7 but for directions of nearly equal singular values."""


@pytest.fixture(autouse=True)
def one_result_a_sum(monkeypatch):
    """What ``deterministic`` asks for: products that add in the same order each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def inputs_of_the_cpu(monkeypatch):
    """Inputs with the same bits: a GPU multiplies by 1 / 127.5 where the CPU divides, in float32."""
    monkeypatch.setattr(datamodule, "net_inputs", lambda x, of=datamodule.net_inputs: of(x.cpu()).to(x.device))


def end(method, accelerator, engine, precision="64-true", more=""):
    """The last checkpoint of a run of a method's file, which anybody without a GPU can read."""
    root = f"{accelerator}-{engine}-{precision}"
    files = f"--config {CONFIGS / 'protocols' / 'digits_dir0.1.yaml'} --config {CONFIGS / 'methods' / method}.yaml"
    if any(each.file == method and "adapters" in each.client.requires for each in registry.METHODS):
        files += " --model.net Adapted --model.net.net MLP"
    pfl(
        f"fit {files} {DIGITS} {QUIET} --trainer.accelerator {accelerator} --trainer.engine {engine} "
        f"--trainer.precision {precision} --trainer.default_root_dir {root} {more}"
    )
    (path,) = Path(root).rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert {tensor.device.type for tensor in tensors(checkpoint)} == {"cpu"}
    return checkpoint


def near(one, other, tolerance):
    found, expected = (list(tensors([each["state_dict"], each["federation"]])) for each in (one, other))
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.usefixtures("inputs_of_the_cpu")
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_the_same_on_a_gpu_as_on_the_cpu_and_under_both_engines(method):
    alone = end(method, "gpu", "sequential")
    if method not in DRAWS:
        near(alone, end(method, "cpu", "sequential"), ROUNDING.get(method, 1e-7))
    try:
        together = end(method, "gpu", "vectorised")
    except SystemExit:
        # refused in a sentence, as on the CPU
        return
    near(together, alone, ROUNDING.get(method, 1e-7))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    "method", ["fedavg", "fedper", "scaffold", "ditto", "cwfedavg", "fedproto", "fedawa", "fedrema"]
)
def test_mixed_precision_trains_and_goes_on(method, engine, precision):
    end(method, "gpu", engine, precision)
    on = end(method, "gpu", engine, precision, "--trainer.max_rounds 3 --ckpt_path last")
    assert all(t.isfinite().all() for t in tensors(on["state_dict"]) if t.is_floating_point())


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedPer, Ditto, ControlVariates], ids=lambda m: m.__name__)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("states", ["memory", "device"])
def test_interrupted_it_ends_with_the_same_bits(tmp_path, method, engine, states):
    settings = {"accelerator": "gpu", "engine": engine, "deterministic": True, "clients_per_round": 0.6}
    model = partial(make_client, method, net=noisy, optimizer=partial(SGD, lr=0.05, momentum=0.9))
    whole = fit(model(optimizer_lifetime="run"), blobs(), tmp_path / "whole", max_rounds=4, **settings)
    settings["client_states"] = states
    cut = fit(model(optimizer_lifetime="run"), blobs(), tmp_path / "cut", max_rounds=2, **settings)
    kept = {tensor.device.type for state in cut.federation.clients.values() for tensor in tensors(state.personal)}
    assert kept <= {"cuda" if states == "device" else "cpu"}
    assert {tensor.device.type for tensor in tensors(torch.load(cut.last, weights_only=True))} == {"cpu"}
    on = fit(model(optimizer_lifetime="run"), blobs(), tmp_path / "cut", max_rounds=4, ckpt_path="last", **settings)
    assert equal(dict(on.weights), dict(whole.weights))
    assert equal(*(torch.load(run.last, weights_only=True)["federation"]["clients"] for run in (on, whole)))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [FedAvg, FedPer], ids=lambda m: m.__name__)
def test_after_a_fit_models_are_tested_joined_and_used_where_there_is_no_gpu(tmp_path, method, engine):
    settings = {"accelerator": "gpu", "engine": engine, "clients_per_round": 1.0}
    run = fit(make_client(method), blobs(*[20] * 4, new_clients=1), tmp_path, **settings)
    (before,) = run.trainer.test(run.model, datamodule=run.data, ckpt_path="last", verbose=False)
    run.trainer.join(run.model, run.data, rounds=1)
    rows = run.data.part(0, "test")
    (on_gpu,) = run.trainer.predict(run.model, rows.x, ckpt_path=run.last, clients=[0]).values()
    model = method.load_from_checkpoint(run.last, client=0, net=plain, map_location="cpu")
    with torch.no_grad():
        on_cpu = model.eval()(rows.x)
    assert before["test/acc"] > 1 / 3
    assert on_gpu.classes.tolist() == on_cpu.argmax(1).tolist()


def test_compiled_steps_of_a_gpu_are_those_of_the_uncompiled():
    runs = [fit(make_client(), blobs(*[20] * 4), accelerator="gpu", engine="vectorised", compile=c) for c in (0, 1)]
    for a, b in zip(*(run.weights.values() for run in runs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


class Large(Net):
    """A net of 10 MiB."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Linear(input_shape[0], 2**18), nn.Linear(2**18, num_classes))


def test_a_block_that_does_not_fit_is_halved(monkeypatch):
    # what other tests of this process have left
    torch.cuda.empty_cache()
    gigabyte = 2**30 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gigabyte)
    monkeypatch.setattr(Vectorised, "_room", lambda *_: 40)
    try:
        ended = fit(make_client(net=Large), blobs(*[3] * 40), accelerator="gpu", engine="vectorised")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [row["clients_diverged"] for row in ended.rows] == [0, 0, 0]
    (engine,) = ended.federation.engines
    assert engine.fitting < 40
