"""The memory of a run by shapes alone, beside what tensors of real runs take."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from language_models import LENGTH, TOKENS, write_llama, write_models
from pfl_lightning.engines.memory_plan import Living, planned
from pfl_lightning.methods import Ditto, FedAvg, FedPer
from pfl_lightning.nets import CNN, MLP, CausalLM
from pfl_lightning.tasks import NextToken


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def images(rows=16):
    return torch.randn(rows, 1, 28, 28), torch.zeros(rows, dtype=torch.int64)


def client_of(method=FedAvg, net=CNN, optimizer=Adam, **settings):
    return method(net, (1, 28, 28), 10, optimizer=partial(optimizer, lr=0.1), **settings)


def real(client, batch):
    """The peak of a step with real tensors, counted by the same rule."""
    client.train()
    with Living([*client.parameters(), *client.buffers(), *batch]) as living:
        client.training_step(batch, 0)["loss"].backward()
    return living.peak


@pytest.mark.parametrize("net", [CNN, partial(MLP, hidden=[64])])
def test_a_step_takes_what_its_tensors_take(net):
    plan = planned(client_of(net=net), images(), nullcontext)
    assert plan.gradients + plan.activations + plan.logits == real(client_of(net=net), images())
    weights = sum(p.nbytes for p in client_of(net=net).parameters())
    assert (plan.frozen, plan.trained, plan.gradients) == (0, weights, weights)
    # two moments, and the number of steps of each parameter
    assert 2 * weights < plan.optimizer < 2.01 * weights + 100


@pytest.mark.parametrize("chunk_tokens", [None, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_language_model_without_its_weights(models, family, chunk_tokens):
    net = partial(CausalLM, model=str(models / family), chunk_tokens=chunk_tokens)
    made = partial(FedAvg, net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.1))
    batch = torch.zeros(4, LENGTH, dtype=torch.int64), torch.zeros(4, LENGTH, dtype=torch.int64)
    # without weights: a file that isn't there can't be read
    (models / family / "model.safetensors").rename(models / "gone")
    try:
        with torch.device("meta"):
            plan = planned(made(), batch, nullcontext)
    finally:
        (models / "gone").rename(models / family / "model.safetensors")
    client = made()
    assert plan.gradients + plan.activations + plan.logits == real(client, batch)
    assert plan.frozen == sum(t.nbytes for t in {id(t): t for t in parts(client)}.values())
    assert plan.trained == plan.shared == sum(p.nbytes for p in client.parameters() if p.requires_grad)
    assert plan.optimizer == plan.personal == 0


def parts(client):
    return [*(p for p in client.parameters() if not p.requires_grad), *client.buffers()]


@pytest.mark.exhaustive
def test_chunks_bound_the_logits(tmp_path):
    write_llama(tmp_path, vocab_size=2000)

    def plan(chunk_tokens):
        net = partial(CausalLM, model=str(tmp_path), chunk_tokens=chunk_tokens)
        client = FedAvg(net, (LENGTH,), task=NextToken(2000))
        tokens = torch.zeros(64, LENGTH, dtype=torch.int64)
        return planned(client, (tokens, tokens.clone()), nullcontext)

    whole, chunked = plan(None), plan(16)
    assert chunked.activations == whole.activations and chunked.logits < whole.logits / 3
    assert chunked.peak < whole.peak


def test_what_a_client_keeps_and_sends():
    whole = sum(p.nbytes for p in client_of().parameters())
    head = sum(p.nbytes for p in client_of().net.classifier.parameters())
    plan = planned(client_of(FedPer), images(), nullcontext)
    assert (plan.personal, plan.shared) == (head, whole - head)
    # and a flag, whether the personal net has been trained
    assert planned(client_of(Ditto), images(), nullcontext).personal == whole + 1


def test_more_samples_take_more_and_the_module_stays_as_it_is():
    client = client_of()
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    few, many = (planned(client, images(rows), nullcontext) for rows in (8, 16))
    assert 1.5 < many.activations / few.activations < 2.5 and many.evaluation > few.evaluation > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in client.parameters())
