import torch
from torch.optim import SGD

from federations import Spy, blobs, equal, fit, make_client, near, noisy
from peft_nets import peft_net
from pfl_lightning.methods import FedIT, FedSALoRA, Local
from pfl_lightning.methods.ffa_lora import FFALoRA
from pfl_lightning.server.adapters import is_first, is_second


class Still(FedSALoRA, FFALoRA):
    """A is frozen, and so nothing of the adapters travels."""


class Alone(Local):
    requires = frozenset({"adapters"})

    def new_net(self):
        net = super().new_net()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not is_first(name))
        return net


class LocalOnAdapters(Local):
    requires = frozenset({"adapters"})


class Everything(FedSALoRA):
    def is_shared(self, name):
        return FedIT.is_shared(self, name)


def test_b_and_the_classifier_stay_and_a_is_averaged():
    spy = Spy()
    run = fit(make_client(FedSALoRA), callbacks=[spy])
    sent = spy.updates[-1][0]["weights"]
    assert sent and all(map(is_first, sent))
    first, second = (run.federation.clients[client].personal for client in (0, 1))
    assert any(map(is_second, first)) and "net.classifier.weight" in first
    assert all(not torch.equal(first[name], second[name]) for name in first)
    updates = spy.updates[-1]
    sizes = {k: int(u["num_samples"]) for k, u in updates.items()}
    for name in sent:
        mean = sum(n / sum(sizes.values()) * updates[k]["weights"][name] for k, n in sizes.items())
        torch.testing.assert_close(run.weights[name], mean)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_the_classifier_can_be_shared():
    model = make_client(FedSALoRA, keep_classifier=False)
    shared = {name for name in model.state_dict() if model.is_shared(name)}
    assert "net.classifier.weight" in shared and not any(map(is_second, shared))


def test_where_b_is_shared_too_it_is_fedit_bit_for_bit():
    assert equal(fit(make_client(Everything, net=noisy)).weights, fit(make_client(FedIT, net=noisy)).weights)


def test_with_a_frozen_it_is_local_with_a_frozen():
    own, alone = (fit(make_client(kind)) for kind in (Still, Alone))
    for client, state in alone.federation.clients.items():
        kept = own.federation.clients[client].personal
        assert kept.keys() >= {n for n in state.personal if "lora_B" in n or "classifier" in n}
        assert all(torch.equal(kept[name], state.personal[name]) for name in kept)


def test_with_one_client_it_is_local():
    own, alone = (fit(make_client(kind), blobs(40)) for kind in (FedSALoRA, LocalOnAdapters))
    assert own.test() == alone.test()


def test_a_client_that_has_not_trained_is_the_model_without_adapters():
    model = make_client(FedSALoRA, optimizer=lambda parameters: SGD(parameters, lr=0.1))
    run = fit(model, clients_per_round=1, max_rounds=1)
    absent = next(client for client in range(4) if client not in run.federation.clients)
    x = run.data.part(absent, "test").x
    base = make_client(FedSALoRA).eval()
    assert torch.equal(run.trainer.client(absent).eval()(x), base(x))


def test_the_engines_agree():
    alone, together = (fit(make_client(FedSALoRA, net=noisy), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())


def test_it_keeps_b_of_peft():
    torch.manual_seed(0)
    run = fit(FedSALoRA(peft_net, (6,), 3), blobs(24, 16), max_rounds=1)
    shared = {name for name in run.model.state_dict() if run.model.is_shared(name)}
    assert len(shared) == 2 and all(map(is_first, shared))
