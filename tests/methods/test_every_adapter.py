"""Every method of adapters on every family of language models."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from federations import Pause, Run, make_trainer, near, same_end
from language_models import ATTENTION, FAMILIES, LENGTH, TOKENS, texts, write_models
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import Adapted, CausalLM, Transformer
from pfl_lightning.tasks import NextToken

OF_ADAPTERS = [method for method in METHODS if "adapters" in method.client.requires]
MODELS = (*FAMILIES, "tiny")
ENGINES = ("sequential", "vectorised")
DIAGONAL = [f"{ENGINES[(i + i // 4) % 2]}-{MODELS[i % 4]}-{method.name}" for i, method in enumerate(OF_ADAPTERS)]
"""Each method once, each model and engine several times."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path


def net_of(folder, model):
    if model == "tiny":
        return partial(Adapted, net=partial(Transformer, width=8, depth=1, heads=2), rank=2)
    lora = {"r": 2, "alpha": 4, "dropout": 0.1}
    return partial(CausalLM, model=str(folder / model), lora=lora, attention=ATTENTION.get(model, "sdpa"))


def fit(method, net, root="unused", ckpt_path=None, **settings):
    torch.manual_seed(1)
    client = method.client(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.5))
    trainer = make_trainer(root, **{"max_rounds": 2, "checkpoint_common": False, **settings})
    data = texts()
    trainer.fit(client, datamodule=data, aggregator=method.new_aggregator(), ckpt_path=ckpt_path)
    return Run(trainer, client, data)


@pytest.mark.parametrize("method", OF_ADAPTERS, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.by_default(*DIAGONAL)
def test_two_rounds_and_resuming_after_one_are_the_same_bits(folder, tmp_path, method, model, engine):
    net = net_of(folder, model)
    whole = fit(method, net, engine=engine)
    assert whole.rows[1]["val/loss"] != whole.rows[0]["val/loss"]
    fit(method, net, tmp_path, engine=engine, callbacks=[Pause(1)])
    assert same_end(whole, fit(method, net, tmp_path, "last", engine=engine))


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", OF_ADAPTERS, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS)
def test_the_engines_agree(folder, method, model):
    alone, together = (fit(method, net_of(folder, model), engine=engine) for engine in ENGINES)
    assert near(dict(alone.weights), dict(together.weights), atol=1e-4)
    for client in alone.federation.clients:
        one, other = (dict(run.federation.clients[client].personal) for run in (alone, together))
        assert near(one, other, atol=1e-4)


def test_the_sweep_has_every_method_of_adapters():
    assert {method.name for method in OF_ADAPTERS} >= {
        *("FedIT", "FFA-LoRA", "FedSA-LoRA", "RoLoRA", "FlexLoRA", "HetLoRA", "FedEx-LoRA", "FLoRA"),
        *("FedDPA", "FedALT", "Fed-SB", "LoRA-SVD"),
    }
