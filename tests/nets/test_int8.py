"""Frozen weights in 8 bits."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import Run, make_trainer, near, same_end
from language_models import LENGTH, TOKENS, texts, write_models
from pfl_lightning.client import export_adapters
from pfl_lightning.engines.memory_plan import planned
from pfl_lightning.methods import FedExLoRA, FedSALoRA
from pfl_lightning.nets import CausalLM
from pfl_lightning.nets.int8 import Int8Linear, hold_in_int8
from pfl_lightning.tasks import NextToken


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def linear(bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias)
    layer.weight.data[2] = 0
    return layer


def test_weights_are_rounded_to_steps_of_each_row():
    layer = linear()
    held = Int8Linear(layer)
    weights = held.weight.double() * held.scale[:, None].double()
    assert held.weight.dtype == torch.int8 and not any(p.requires_grad for p in held.parameters())
    assert (weights - layer.weight).abs().max() <= layer.weight.abs().max() / 127.5 / 2 * 1.001
    largest = held.weight.double().abs().amax(1)
    assert largest[2] == 0 and set(largest[[0, 1, 3]].tolist()) <= {127.0, 128.0}


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_rounded_weights(bias):
    layer = linear(bias).double()
    held = Int8Linear(layer)
    layer.weight.data = held.weight.double() * held.scale[:, None]
    one, other = (torch.randn(5, 3, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    other.data = one.data.clone()
    for each, x in ((layer, one), (held, other)):
        each(x).square().sum().backward()
    torch.testing.assert_close(held(one), layer(one))
    torch.testing.assert_close(other.grad, one.grad)
    # of each sample by itself, as engines and guarantees of samples compute them
    alone = torch.vmap(torch.func.grad(lambda x: held(x).square().sum()))(one.detach())
    torch.testing.assert_close(alone, one.grad)


def test_no_floating_weights_are_kept_for_the_backward_pass():
    held, kept = Int8Linear(linear()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        held(torch.randn(5, 6, requires_grad=True))
    assert [t.dtype for t in kept if t.dim() == 2] == [torch.int8]


def test_the_numbers_are_those_of_torchao():
    quantization = pytest.importorskip("torchao.quantization", reason="the library to compare with")
    layer, x = linear(), torch.randn(5, 6)
    held, theirs = Int8Linear(layer), nn.Sequential(deepcopy(layer))
    quantization.quantize_(theirs, quantization.Int8WeightOnlyConfig())
    assert torch.equal(held.weight, theirs[0].weight.qdata)
    torch.testing.assert_close(held.scale[:, None], theirs[0].weight.scale)
    torch.testing.assert_close(held(x), theirs(x))


def run(models, method=FedSALoRA, root="unused", quantize="int8", **settings):
    lora = {"r": 2, "targets": ["q_proj", "v_proj"]}
    net = partial(CausalLM, model=str(models / "llama"), lora=lora, quantize=quantize)
    torch.manual_seed(1)
    client = method(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.5))
    trainer = make_trainer(root, **{"max_rounds": 2, "checkpoint_common": False, **settings})
    data = texts()
    trainer.fit(client, datamodule=data)
    return Run(trainer, client, data), net


def test_clients_learn_on_frozen_bytes_and_the_engines_agree(models):
    (alone, _), (together, _) = (run(models, engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights), atol=1e-4)
    assert alone.rows[1]["val/loss"] < alone.rows[0]["val/loss"]
    held = [layer for layer in alone.model.modules() if isinstance(layer, Int8Linear)]
    # seven linear layers of each of two, and not the output layer
    assert len(held) == 14 and not isinstance(alone.model.net.classifier.output, Int8Linear)
    plain, _ = run(models, quantize=None)
    assert alone.rows[1]["val/loss"] == pytest.approx(plain.rows[1]["val/loss"], rel=0.01)
    assert alone.rows[1]["val/loss"] != plain.rows[1]["val/loss"]


def test_resuming_is_the_same_bits_and_folders_fit(models, tmp_path):
    (whole, _), (_, _) = run(models), run(models, root=tmp_path, max_rounds=1)
    trainer = make_trainer(tmp_path, max_rounds=2, checkpoint_common=False)
    lora = {"r": 2, "targets": ["q_proj", "v_proj"]}
    net = partial(CausalLM, model=str(models / "llama"), lora=lora, quantize="int8")
    client = FedSALoRA(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.5))
    trainer.fit(client, datamodule=(data := texts()), ckpt_path="last")
    assert same_end(whole, Run(trainer, client, data))
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert export_adapters(checkpoint, tmp_path / "adapters", FedSALoRA, net=net)


def test_copies_of_a_net_share_the_bytes(models):
    net = CausalLM((LENGTH,), TOKENS, model=str(models / "llama"), lora={"r": 2}, quantize="int8")
    held, copied = (next(m for m in each.modules() if isinstance(m, Int8Linear)) for each in (net, deepcopy(net)))
    assert held is not copied and held.weight is copied.weight and held.scale is copied.scale


def test_the_memory_plan_counts_a_byte_a_weight_and_no_floating_weights_between_passes(models):
    def plan(quantize):
        lora = {"r": 2, "targets": ["q_proj", "v_proj"]}
        with torch.device("meta"):
            net = CausalLM((LENGTH,), TOKENS, model=str(models / "llama"), lora=lora, quantize=quantize)
            client = FedSALoRA(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.5))
        held = [layer for layer in net.modules() if isinstance(layer, Int8Linear)]
        tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
        made = planned(client, (tokens, tokens.clone()), nullcontext)
        saved = sum(3 * layer.weight.numel() - 4 * len(layer.scale) for layer in held)
        return made, saved

    (plain, none), (held, saved) = plan(None), plan("int8")
    assert none == 0 and plain.frozen - held.frozen == saved > 0
    # each layer's output once more, before it is scaled
    assert held.activations < 2 * plain.activations


def test_what_bytes_cannot_do_is_refused_by_name(models, monkeypatch):
    with pytest.raises(MisconfigurationException, match="FedExLoRA adds to the weights"):
        run(models, FedExLoRA)
    with pytest.raises(MisconfigurationException, match=r"model\.net\.quantize=int8"):
        CausalLM((LENGTH,), TOKENS, model=str(models / "gpt2"), quantize="int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bits in ("8bit", "4bit"):
        with pytest.raises(MisconfigurationException, match=rf"model\.net\.quantize={bits} computes on a GPU"):
            CausalLM((LENGTH,), TOKENS, model=str(models / "llama"), quantize=bits)


def test_a_module_without_linear_layers_stays():
    module = nn.Sequential(nn.Conv1d(2, 2, 1))
    assert hold_in_int8(module) == 0
