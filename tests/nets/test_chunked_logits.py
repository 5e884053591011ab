"""Losses whose logits are computed chunk by chunk: the same values and gradients as with all logits at once."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from language_models import LENGTH, TOKENS, texts, write_models
from pfl_lightning import FederatedTrainer
from pfl_lightning.methods import FedALT, FedAvg, FedDPA, FedExLoRA, FedProx
from pfl_lightning.nets import CausalLM
from pfl_lightning.nets.chunked_logits import ChunkedLogits
from pfl_lightning.tasks import NextToken

CHUNK = 5
"""Positions of a chunk, of which batches have several."""
TASK = NextToken(TOKENS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def net_of(models, chunk_tokens=CHUNK, family="llama", **settings):
    torch.manual_seed(0)
    settings = {"lora": {"r": 2}, **settings}
    return CausalLM((LENGTH,), TOKENS, model=str(models / family), chunk_tokens=chunk_tokens, **settings)


def batch_of(ignored=True):
    tokens = torch.randint(0, TOKENS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    targets = tokens[:, 1:].clone()
    if ignored:
        targets[0, 3:] = targets[1, :5] = targets[2, 2:4] = -100
    return tokens[:, :-1], targets


def result(net, x, target, reduction="mean"):
    """The loss, and the gradients of all trained parameters, at adapters that have moved from 0."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    net.train()
    torch.manual_seed(3)
    outputs = net(x)
    loss = TASK.loss(outputs, target, reduction)
    loss.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return isinstance(outputs, ChunkedLogits), loss.detach(), gradients


def check_same(models, x, target, tolerance=1e-5, reduction="mean", change=lambda net: net, **settings):
    is_chunked, loss, gradients = result(change(net_of(models, **settings)), x, target, reduction)
    is_plain, expected, wanted = result(change(net_of(models, None, **settings)), x, target, reduction)
    assert is_chunked and not is_plain and gradients.keys() == wanted.keys()
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-4
    assert torch.allclose(loss, expected, rtol=tolerance, atol=0)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, name


def left_padded():
    x, targets = batch_of(ignored=False)
    mask = torch.ones_like(x)
    mask[0, :4] = mask[2, :7] = 0
    return {"input_ids": x, "attention_mask": mask}, targets.masked_fill(mask == 0, -100)


def packed():
    x, targets = batch_of()
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(4, 1)
    targets[:, 4] = -100
    return {"input_ids": x, "position_ids": positions}, targets


@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        (batch_of(), {}),
        (batch_of(ignored=False), {"family": "qwen2"}),
        # GPT-2 has dropout below its output layer
        (batch_of(), {"family": "gpt2"}),
        (batch_of(), {"lora": {"r": 2, "targets": ["q_proj", "lm_head"]}}),
        (batch_of(), {"lora": {"r": 2, "modules_to_save": ["lm_head"]}}),
        (batch_of(), {"lora": None}),
        (batch_of(), {"gradient_checkpointing": True}),
        (batch_of(), {"reduction": "sum"}),
        (left_padded(), {}),
        (packed(), {}),
    ],
    ids=["ignored", "all", "dropout", "adapted_head", "own_head", "whole", "checkpointing", "sum", "left", "packed"],
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(models, batch, settings):
    check_same(models, *batch, **settings)


def test_in_double_precision_nothing_but_rounding_differs(models):
    check_same(models, *batch_of(), tolerance=1e-12, change=nn.Module.double)


def test_weights_of_half_precision(models):
    # hidden states, and so their gradients, are rounded to 8 bits in either case
    check_same(models, *batch_of(), tolerance=0.01, dtype="bfloat16")


def test_under_autocast(models):
    with torch.autocast("cpu", torch.bfloat16):
        check_same(models, *batch_of(), tolerance=0.01)


def test_a_batch_without_counted_targets_has_the_loss_of_none(models):
    x, targets = batch_of()
    outputs = net_of(models).train()(x)
    assert TASK.loss(outputs, torch.full_like(targets, -100)).isnan()


def test_only_counted_positions_go_through_the_output_layer_a_chunk_at_a_time(models):
    net, (x, targets) = net_of(models).train(), batch_of()
    seen = []
    run = net.classifier.output.forward
    net.classifier.output.forward = lambda hidden: seen.append(len(hidden)) or run(hidden)
    TASK.loss(net(x), targets).backward()
    counted = int((targets != -100).sum())
    # once forward, and once more backward
    assert max(seen) == CHUNK and sum(seen) == 2 * counted < 2 * targets.numel()


def test_evaluations_have_all_logits(models):
    net, (x, _) = net_of(models), batch_of()
    assert net.eval()(x).shape == (4, LENGTH, TOKENS)
    with torch.no_grad():
        assert net.train()(x).shape == (4, LENGTH, TOKENS)


def trained(models, method, chunk_tokens, data=None, **settings):
    def build(input_shape, num_classes):
        return net_of(models, chunk_tokens, lora={"r": 2, "targets": ["q_proj", "lm_head"]})

    client = method(build, (LENGTH,), task=TASK, optimizer=partial(SGD, lr=0.2))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    fixed = {"max_rounds": 2, "accelerator": "cpu", "enable_checkpointing": False, "engine": "sequential"}
    trainer = FederatedTrainer(**{**quiet, **fixed, **settings})
    trainer.fit(client, datamodule=data or texts())
    federation = trainer.lightning_module
    return federation.global_model(common=False) | {
        f"{k}.{name}": entry for k, state in federation.clients.items() for name, entry in state.personal.items()
    }


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedDPA, FedALT, FedExLoRA])
def test_methods_train_the_same_models(models, method):
    chunked, plain = (trained(models, method, chunk) for chunk in (CHUNK, None))
    assert chunked.keys() == plain.keys()
    for name, entry in plain.items():
        assert torch.allclose(chunked[name], entry, atol=1e-5), name


def test_accumulated_batches_and_clipped_gradients(models):
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    chunked, plain = (trained(models, FedAvg, chunk, **settings) for chunk in (CHUNK, None))
    assert all(torch.allclose(chunked[name], entry, atol=1e-6) for name, entry in plain.items())


def test_the_engine_vectorised_is_refused_and_not_taken(models):
    with pytest.raises(MisconfigurationException, match=r"chunk_tokens.*sequential"):
        trained(models, FedAvg, CHUNK, engine="vectorised")
    trained(models, FedAvg, CHUNK, engine="auto")


@pytest.mark.parametrize("use", [lambda logits: logits.softmax(-1), torch.exp, lambda logits: 2 * logits])
def test_other_uses_of_logits_are_refused(models, use):
    logits = net_of(models).train()(batch_of()[0])
    with pytest.raises(MisconfigurationException, match="chunk_tokens=null"):
        use(logits)


@pytest.mark.parametrize("chunk_tokens", [0, -1, 2.5, True])
def test_a_chunk_has_at_least_one_position(models, chunk_tokens):
    with pytest.raises(MisconfigurationException, match=f"chunk_tokens={chunk_tokens}"):
        net_of(models, chunk_tokens)
