"""Toy methods, a few lines each, for what methods ask of the contract between client, server and engine."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import (
    CLASSES,
    HIDDEN,
    Spy,
    TwoGroups,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    noisy,
    same_end,
)
from pfl_lightning import Aggregator, Phase, WeightedAverage
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedProx, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.losses import proximal
from pfl_lightning.seeds import derive_seed
from sweeps import swept

PLAIN_SGD = partial(SGD, lr=0.1)


def buffers_like(net: nn.Module) -> nn.Module:
    """A tensor for each parameter of a net, as buffers that go into a state dict under dotless names."""
    holder = nn.Module()
    for name, parameter in net.named_parameters():
        holder.register_buffer(name.replace(".", "/"), torch.zeros_like(parameter))
    return holder


def net_of(weights: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for name, tensor in weights.items() if name.startswith("net.")]


# Payloads that are no weights: class prototypes


class PrototypeServer(Aggregator):
    needs = sends = frozenset({"prototypes", "counts"})

    def setup(self, server):
        self.state = {name: getattr(server.module, name).cpu().clone() for name in ("prototypes", "counts")}

    def aggregate(self, updates, round):
        counts = sum(u["counts"] for u in updates.values())
        sums = sum(u["prototypes"] * u["counts"][:, None] for u in updates.values())
        seen = counts > 0
        self.state["prototypes"][seen] = sums[seen] / counts[seen, None]
        self.state["counts"] += counts
        return {"known": float(seen.sum())}

    def download(self, client):
        return dict(self.state)


class PrototypeClient(FedAvg):
    sends = needs = frozenset({"prototypes", "counts"})

    def __init__(self, weight=1.0, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight
        self.register_buffer("prototypes", torch.zeros(CLASSES, HIDDEN), persistent=False)
        self.register_buffer("counts", torch.zeros(CLASSES), persistent=False)

    def is_shared(self, name):
        return False

    def on_download(self, payload, data):
        self.prototypes.copy_(payload["prototypes"])
        self.counts.copy_(payload["counts"])

    def loss(self, features, logits, target):
        gaps = (features - self.prototypes[target]).square().mean(1) * (self.counts[target] > 0)
        return super().loss(features, logits, target) + self.weight * gaps.mean()

    def upload(self, data):
        counts = data.class_counts.float()
        sums = torch.zeros(CLASSES, HIDDEN).index_add_(0, data.train.y, self.net.features(data.train.x))
        return {"prototypes": sums / counts.clamp(min=1)[:, None], "counts": counts}

    def configure_aggregator(self):
        return PrototypeServer()


def test_prototypes_travel_without_any_weights():
    run = fit(make_client(PrototypeClient), data=blobs(30, 45, by_class=True))
    numbers = CLASSES * HIDDEN + CLASSES
    assert {row["bytes/up"] for row in run.rows} == {row["bytes/down"] for row in run.rows} == {2 * 4 * numbers}
    assert run.federation.aggregator.state["counts"].tolist()[2] == 0  # a class that nobody has
    assert run.rows[-1]["server/known"] == 2
    assert not equal(run.federation.clients[0].personal, run.federation.clients[1].personal)


def test_received_prototypes_enter_the_local_objective():
    unpulled = fit(make_client(PrototypeClient, weight=0.0))
    assert equal(net_states(unpulled), net_states(fit(make_client(Local))))
    assert not equal(net_states(unpulled), net_states(fit(make_client(PrototypeClient))))


def test_an_upload_in_evaluation_mode_leaves_batchnorm_and_dropout_of_training_alone():
    unpulled = fit(make_client(PrototypeClient, weight=0.0, net=noisy))
    assert equal(net_states(unpulled), net_states(fit(make_client(Local, net=noisy))))


def net_states(run) -> dict[int, Any]:
    """Each client's own net, after the last round."""
    return {
        client: {name: t for name, t in state.personal.items() if name.startswith("net.")}
        for client, state in sorted(run.federation.clients.items())
    }


# A payload of its own for each client, and what it received sent back


class Neighbours(Aggregator):
    """Client k receives the mean of its own last model and that of client k + 1."""

    needs = frozenset({"weights"})
    sends = frozenset({"weights"})

    def setup(self, server):
        self.state["models"] = [server.weights] * server.num_clients

    def aggregate(self, updates, round):
        for client, update in updates.items():
            self.state["models"][client] = update["weights"]
        return {}

    def download(self, client):
        models = self.state["models"]
        return {"weights": weighted_mean([models[client], models[(client + 1) % len(models)]], [0.5, 0.5])}


class Echo(FedAvg):
    caches = frozenset({"received"})

    sends = frozenset({"weights", "received"})

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.received = {name: tensor.clone() for name, tensor in payload["weights"].items()}

    def upload(self, data):
        return {"weights": super().upload(data)["weights"], "received": getattr(self, "received", {})}


def test_each_client_receives_its_own_mixture():
    spy = Spy()
    fit(make_client(Echo), aggregator=Neighbours(), callbacks=[spy], max_rounds=2)
    first, second = spy.updates
    for client in first:
        models = first[client]["weights"], first[(client + 1) % len(first)]["weights"]
        assert equal(second[client]["received"], weighted_mean(models, [0.5, 0.5]))
    assert not equal(second[0]["received"], second[1]["received"])


def test_evaluation_looks_at_each_client_s_own_mixture():
    run = fit(make_client(Echo), aggregator=Neighbours(), max_rounds=2)
    losses = {client: values["loss"] for client, values in run.federation.evaluations.results["test"].items()}
    for client, loss in losses.items():
        weights = run.federation.aggregator.download(client)["weights"]
        part = run.data.part(client, "test")
        expected = F.cross_entropy(functional_call(run.model, weights, (part.x,)), part.y)
        assert loss == pytest.approx(float(expected), abs=1e-6)


# Personal state: the previous local model


class Previous(FedAvg):
    """Contrasts with the client's last local model (MOON's persistent part)."""

    sends = frozenset({"weights", "num_samples", "previous"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.previous = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, features, logits, target):
        return super().loss(features, logits, target) + 0.1 * proximal(
            self.net.parameters(), self.previous.parameters()
        )

    def upload(self, data):
        previous = {name: t.clone() for name, t in self.previous.state_dict().items()}
        self.previous.load_state_dict(self.net.state_dict())
        return super().upload(data) | {"previous": previous}


def test_personal_state_is_kept_over_rounds_in_which_a_client_does_not_take_part():
    spy = Spy()
    run = fit(make_client(Previous), callbacks=[spy], clients_per_round=0.5, max_rounds=6)
    last: dict[int, list[Tensor]] = {}
    waited = False
    for round, updates in enumerate(spy.updates):
        for client, update in updates.items():
            if client in last:
                waited |= client not in spy.updates[round - 1]
                assert equal(list(update["previous"].values()), last[client])
            last[client] = net_of(update["weights"])
    assert waited, "choose another seed: no client came back after a pause"
    for client, state in run.federation.clients.items():
        assert equal(list(state.personal.values()), last[client])


def test_frozen_modules_of_a_client_are_not_trained_after_a_phase_that_leaves_them_out():
    class Halves(Previous):
        def local_phases(self):
            return [Phase("head", lambda name: name.startswith("net.classifier.")), Phase("all")]

        def loss(self, features, logits, target):
            gap = sum(p.sum() for p in self.previous.parameters())
            return FedAvg.loss(self, features, logits, target) + gap

    model = make_client(Halves)
    run = fit(model, max_rounds=1, callbacks=[spy := Spy()])
    assert equal(list(spy.updates[0][0]["previous"].values()), initial_net(Halves))
    assert len(run.rows) == 1
    assert not any(parameter.requires_grad for parameter in model.previous.parameters())
    assert all(parameter.requires_grad for parameter in model.net.parameters())


def initial_net(cls: type[FedAvg], **settings: Any) -> list[Tensor]:
    return list(make_client(cls, **settings).net.state_dict().values())


# Several global models, of which a client chooses by its own data


class Clusters(Aggregator):
    needs = frozenset({"weights", "num_samples", "choice"})
    sends = frozenset({"models"})

    def setup(self, server):
        self.state["models"] = []
        for number in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(server.seed, "cluster", number))
                net = server.module.new_net()
            self.state["models"].append({f"net.{name}": t.clone() for name, t in net.state_dict().items()})

    def aggregate(self, updates, round):
        for number in range(2):
            chosen = [u for u in updates.values() if int(u["choice"]) == number]
            if chosen:
                share = 1 / len(chosen)
                self.state["models"][number] = weighted_mean([u["weights"] for u in chosen], [share] * len(chosen))
        return {}

    def download(self, client):
        return {"models": self.state["models"]}


class Chooser(FedAvg):
    sends = frozenset({"weights", "num_samples", "choice"})
    needs = frozenset({"models"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("choice", torch.tensor(0))

    @torch.no_grad()
    def on_download(self, payload, data):
        if data is not None:
            losses = []
            for model in payload["models"]:
                self.assign(model)
                losses.append(F.cross_entropy(self(data.train.x), data.train.y))
            self.choice.fill_(int(torch.stack(losses).argmin()))
        self.assign(payload["models"][int(self.choice)])

    def upload(self, data):
        return super().upload(data) | {"choice": self.choice}

    def configure_aggregator(self):
        return Clusters()


def test_clients_choose_among_global_models_by_their_own_data(tmp_path):
    run = fit(make_client(Chooser, seed=2), blobs(data=TwoGroups), tmp_path, max_rounds=6)
    choices = {client: int(state.personal["choice"]) for client, state in run.federation.clients.items()}
    assert choices[0] == choices[2] != choices[1] == choices[3]
    single = fit(make_client(seed=2), blobs(data=TwoGroups), max_rounds=6)
    assert run.rows[-1]["val/acc"] > single.rows[-1]["val/acc"] + 0.2
    loaded = load_client(Chooser, run.last, client=1)
    assert equal(net_of(loaded.state_dict()), net_of(run.federation.aggregator.state["models"][choices[1]]))


# A server that optimises


class LearnedShares(WeightedAverage):
    """Shares of clients by Adam on the server's data."""

    def setup(self, server):
        super().setup(server)
        self.server = server

    def aggregate(self, updates, round):
        data = self.server.data.server_data()
        stacked = {name: torch.stack([u["weights"][name] for u in updates.values()]) for name in self.state["weights"]}
        scores = torch.zeros(len(updates), requires_grad=True)
        optimizer = Adam([scores], lr=0.1)
        losses = []
        for _ in range(20):
            shares = scores.softmax(0)
            weights = {name: torch.einsum("k,k...->...", shares, tensor) for name, tensor in stacked.items()}
            loss = F.cross_entropy(functional_call(self.server.module, weights, (data.x,)), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        self.state["weights"] = {name: tensor.detach() for name, tensor in weights.items()}
        return {"first": losses[0], "last": losses[-1], "shares": float(shares.sum())}


def test_a_server_can_optimise_through_the_net_on_data_of_its_own(tmp_path):
    model = make_client()
    run = fit(model, root=tmp_path, aggregator=LearnedShares())
    for row in run.rows:
        assert row["server/last"] < row["server/first"] and row["server/shares"] == pytest.approx(1)
    assert not any(tensor.requires_grad for tensor in run.weights.values())
    part = run.data.server_data()
    loss = F.cross_entropy(functional_call(model, run.weights, (part.x,)), part.y)
    assert run.rows[-1]["server/last"] == pytest.approx(float(loss), abs=1e-6)


# Local phases


class HeadThenBody(FedAvg):
    """FedRep's two phases; the body travels."""

    caches = frozenset({"after_head"})

    sends = frozenset({"weights", "num_samples", "after_head"})

    def is_shared(self, name):
        return name.startswith("net.features.")

    def local_phases(self):
        return [
            Phase("head", lambda name: name.startswith("net.classifier."), epochs=2),
            Phase("body", lambda name: name.startswith("net.features.")),
        ]

    def training_step(self, batch, batch_idx):
        if self.phase.name == "body" and batch_idx == 0:
            self.after_head = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        in_training = {name.split(".")[0] for name, p in self.net.named_parameters() if p.requires_grad}
        assert in_training == {"head": {"classifier"}, "body": {"features"}}[self.phase.name]
        return super().training_step(batch, batch_idx) | {self.phase.name: torch.ones(())}

    def upload(self, data):
        end = {"end/" + name: p for name, p in self.net.named_parameters()}
        return super().upload(data) | {"after_head": self.after_head | end}


@pytest.mark.parametrize("lifetime", ["round", "run"])
def test_what_a_phase_leaves_out_stands_still_also_under_momentum_and_weight_decay(lifetime):
    spy = Spy()
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    run = fit(make_client(HeadThenBody, optimizer=optimizer, optimizer_lifetime=lifetime), callbacks=[spy])
    received = {name: t for name, t in zip(make_client().state_dict(), initial_net(FedAvg), strict=True)}
    for updates in spy.updates:
        for update in updates.values():
            after_head = update["after_head"]
            for name in ("features.0.weight", "features.0.bias"):
                assert torch.equal(after_head[name], received["net." + name])
                assert not torch.equal(after_head["end/" + name], after_head[name])
            for name in ("classifier.weight", "classifier.bias"):
                assert torch.equal(after_head["end/" + name], after_head[name])
        received = weighted_mean(
            [u["weights"] for u in updates.values()],
            [
                float(u["num_samples"]) / sum(float(v["num_samples"]) for v in updates.values())
                for u in updates.values()
            ],
        )
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    kept = run.federation.clients[0].optimizers
    assert set(kept) == ({"head", "body"} if lifetime == "run" else set())


def test_a_metric_that_only_one_phase_gives_is_a_mean_over_that_phase():
    run = fit(make_client(HeadThenBody), max_rounds=1)
    assert run.rows[0]["train/head"] == run.rows[0]["train/body"] == pytest.approx(1)


# Control variates


class VariateServer(WeightedAverage):
    needs = frozenset({"weights", "num_samples", "control"})
    sends = frozenset({"weights", "control"})

    def setup(self, server):
        super().setup(server)
        control = {name: tensor.cpu().clone() for name, tensor in server.module.own.named_buffers()}
        self.state |= {"control": control, "clients": server.num_clients}

    def aggregate(self, updates, round):
        super().aggregate(updates, round)
        for update in updates.values():
            for name, change in update["control"].items():
                self.state["control"][name] += change / self.state["clients"]
        return {}

    def download(self, client):
        return super().download(client) | {"control": self.state["control"]}


class Variates(FedAvg):
    """SCAFFOLD, option II: the correction is a linear term of the loss."""

    sends = frozenset({"weights", "num_samples", "control"})
    needs = frozenset({"weights", "control"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own, self.common, self.received = (buffers_like(self.net) for _ in range(3))

    def is_personal(self, name):
        return name.startswith("own.")

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.common.load_state_dict(payload["control"])
        for anchor, parameter in zip(self.received.buffers(), self.net.parameters(), strict=True):
            anchor.copy_(parameter.detach())

    def loss(self, features, logits, target):
        triples = zip(self.common.buffers(), self.own.buffers(), self.net.parameters(), strict=True)
        return super().loss(features, logits, target) + sum(((c - ci) * w).sum() for c, ci, w in triples)

    @torch.no_grad()
    def upload(self, data):
        change = {}
        tensors = zip(self.common.buffers(), self.received.buffers(), self.net.parameters(), strict=True)
        for (name, own), (c, x, y) in zip(self.own.named_buffers(), tensors, strict=True):
            change[name] = (x - y) / (self.steps_done * self.learning_rate) - c
            own += change[name]
        return super().upload(data) | {"control": change}

    def configure_aggregator(self):
        return VariateServer()


def test_control_variates_follow_a_straight_line_reference():
    rounds, lr, epochs = 3, 0.1, 4
    data = blobs(24, 16, batch_size=100)
    run = fit(make_client(Variates, optimizer=PLAIN_SGD), data, local_epochs=epochs, max_rounds=rounds)

    net = make_client().net.double()
    w = [p.detach().clone() for p in net.parameters()]
    c = [torch.zeros_like(t) for t in w]
    ci = [[torch.zeros_like(t) for t in w] for _ in range(2)]
    sizes = [data.size(k, "train") for k in range(2)]
    for _ in range(rounds):
        ends, changes = [], []
        for k in range(2):
            part = data.part(k, "train")
            for p, start in zip(net.parameters(), w, strict=True):
                p.data.copy_(start)
            for _ in range(epochs):
                grads = torch.autograd.grad(F.cross_entropy(net(part.x.double()), part.y), list(net.parameters()))
                for p, g, own, common in zip(net.parameters(), grads, ci[k], c, strict=True):
                    p.data -= lr * (g - own + common)
            ends.append([p.detach().clone() for p in net.parameters()])
            new = [
                own - common + (x - y) / (epochs * lr) for own, common, x, y in zip(ci[k], c, w, ends[k], strict=True)
            ]
            changes.append([a - b for a, b in zip(new, ci[k], strict=True)])
            ci[k] = new
        w = [sum(n / sum(sizes) * t for n, t in zip(sizes, ts, strict=True)) for ts in zip(*ends, strict=True)]
        c = [common + sum(ts) / 2 for common, *ts in zip(c, *changes, strict=True)]
    for ours, theirs in zip(net_of(run.weights), w, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(run.federation.aggregator.state["control"].values(), c, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-4)
    assert all(float(t.abs().sum()) > 0 for t in c)


def test_only_what_is_personal_is_stored_for_a_client():
    run = fit(make_client(Variates, optimizer=PLAIN_SGD), clients_per_round=2, max_rounds=1)
    assert len(run.federation.clients) == 2
    for state in run.federation.clients.values():
        assert state.personal and all(name.startswith("own.") for name in state.personal)


# Clients that upload and keep their model, and receive another to stay near to


class Anchors(Neighbours):
    sends = frozenset({"anchor"})

    def download(self, client):
        return {"anchor": super().download(client)["weights"]}


class Anchored(FedAvg):
    """FedAMP's client: keeps its own model, and is drawn to the one that the server made for it."""

    needs = frozenset({"anchor"})

    def __init__(self, weight=1.0, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight
        self.anchor = copy.deepcopy(self.net).requires_grad_(False)

    def is_personal(self, name):
        return name.startswith("net.")

    def local_phases(self):
        return [Phase(trains=lambda name: name.startswith("net."))]

    def on_download(self, payload, data):
        self.assign({name.replace("net.", "anchor.", 1): t for name, t in payload["anchor"].items()})

    def loss(self, features, logits, target):
        pull = proximal(self.net.parameters(), self.anchor.parameters())
        return super().loss(features, logits, target) + self.weight * pull

    def configure_aggregator(self):
        return Anchors()


def test_a_client_can_both_upload_and_keep_its_model(tmp_path):
    spy = Spy()
    run = fit(make_client(Anchored), root=tmp_path, callbacks=[spy])
    for client, state in run.federation.clients.items():
        assert equal(state.personal, spy.updates[-1][client]["weights"])
        loaded = load_client(Anchored, run.last, client=client)
        assert equal(net_of(loaded.state_dict()), net_of(state.personal))


def test_a_kept_model_without_its_anchor_is_local_training():
    run, local = fit(make_client(Anchored, weight=0.0)), fit(make_client(Local))
    assert equal(net_states(run), net_states(local))
    assert not equal(net_states(fit(make_client(Anchored))), net_states(local))


# All other clients' models as payload


class Everyone(Neighbours):
    sends = frozenset({"models"})

    def download(self, client):
        return {"models": {k: model for k, model in enumerate(self.state["models"]) if k != client}}


class BestOfOthers(FedAvg):
    """Starts from the other client's model that is best on its own validation part."""

    caches = frozenset({"losses"})

    needs = frozenset({"models"})
    sends = frozenset({"weights", "taken", "losses"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("taken", torch.tensor(-1))

    @torch.no_grad()
    def on_download(self, payload, data):
        self.losses = torch.zeros(len(payload["models"]) + 1)
        for client, model in payload["models"].items():
            self.assign(model)
            self.losses[client] = -F.cross_entropy(self(data.val.x), data.val.y)
        others = torch.tensor(list(payload["models"]))
        self.taken.copy_(others[self.losses[others].argmax()])
        self.assign(payload["models"][int(self.taken)])

    def upload(self, data):
        losses = getattr(self, "losses", torch.zeros(()))
        return {"weights": super().upload(data)["weights"], "taken": self.taken, "losses": losses}

    def configure_aggregator(self):
        return Everyone()


def test_a_payload_can_be_the_models_of_all_other_clients():
    spy = Spy()
    run = fit(make_client(BestOfOthers), callbacks=[spy])
    one = 4 * sum(t.numel() for t in run.weights.values() if t.is_floating_point())
    assert run.rows[-1]["bytes/down"] == 4 * 3 * one
    for before, updates in zip(spy.updates, spy.updates[1:], strict=False):
        for client, update in updates.items():
            part = run.data.part(client, "val")
            losses = {
                other: float(F.cross_entropy(functional_call(run.model, u["weights"], (part.x,)), part.y))
                for other, u in before.items()
                if other != client
            }
            assert int(update["taken"]) == min(losses, key=losses.get)


# What the contract promises to all of them


ALL = {
    "prototypes": (PrototypeClient, None),
    "mixtures": (Echo, Neighbours),
    "previous": (Previous, None),
    "clusters": (Chooser, None),
    "server-optimiser": (FedAvg, LearnedShares),
    "phases": (HeadThenBody, None),
    "variates": (Variates, None),
    "anchors": (Anchored, None),
    "everyone": (BestOfOthers, None),
}


@pytest.mark.parametrize("name", swept(ALL, ("previous", "server-optimiser", "phases", "everyone"), str))
@pytest.mark.by_default("previous", "server-optimiser")
def test_toy_methods_resume_bit_for_bit(name, tmp_path):
    cls, server = ALL[name]

    def run(root, rounds, ckpt_path=None):
        aggregator = None if server is None else server()
        settings = {"clients_per_round": 0.5, "max_rounds": rounds, "ckpt_path": ckpt_path}
        return fit(make_client(cls, optimizer_lifetime="run"), root=root, aggregator=aggregator, **settings)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "halves", 2)
    assert same_end(whole, run(tmp_path / "halves", 4, "last"))


def test_evaluation_changes_no_state_of_a_federation():
    run = fit(make_client(Chooser), blobs(data=TwoGroups))
    before = copy.deepcopy(run.federation.federation_state())
    run.test()
    assert equal(before, run.federation.federation_state())


class Drawing(FedAvg):
    """Draws random numbers, and uses dropout, while it receives."""

    caches = frozenset({"drawn"})

    sends = frozenset({"weights", "num_samples", "drawn"})

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.drawn = torch.stack([torch.rand(()), F.dropout(torch.ones(20), training=self.training).sum()])

    def upload(self, data):
        return super().upload(data) | {"drawn": self.drawn}


def test_random_numbers_of_a_download_depend_on_seed_round_and_client_alone():
    whole, half = Spy(), Spy()
    fit(make_client(Drawing), callbacks=[whole], max_rounds=4)
    fit(make_client(Drawing), callbacks=[half], max_rounds=4, clients_per_round=0.5)
    drawn = [{client: update["drawn"] for client, update in updates.items()} for updates in whole.updates]
    for all_drawn, some in zip(drawn, half.updates, strict=True):
        for client, update in some.items():
            assert equal(update["drawn"], all_drawn[client])
    assert len({float(values[0]) for row in drawn for values in row.values()}) == 16


class Modes(Drawing):
    """Sets its net to evaluation mode in its hooks, and leaves it so."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.net.eval()

    def upload(self, data):
        self.net.eval()
        return super().upload(data)


def test_a_hook_s_evaluation_mode_reaches_neither_training_nor_the_next_client():
    assert equal(fit(make_client(Modes, net=noisy)).weights, fit(make_client(Drawing, net=noisy)).weights)
    spies = Spy(), Spy()
    for spy, cls in zip(spies, (Modes, Drawing), strict=True):
        fit(make_client(cls, net=noisy), callbacks=[spy])
    assert equal(spies[0].updates, spies[1].updates)


class Draws(Neighbours):
    """Adds noise to the models, from the seed that it was told."""

    def setup(self, server):
        super().setup(server)
        self.server = server

    def aggregate(self, updates, round):
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "noise", round))
        for client, update in updates.items():
            noise = {name: torch.randn(t.shape, generator=generator) for name, t in update["weights"].items()}
            self.state["models"][client] = weighted_mean([update["weights"], noise], [1.0, 0.1])
        return {}


def test_a_server_draws_from_the_run_s_seed_also_when_another_process_goes_on(tmp_path):
    whole = fit(make_client(Echo), root=tmp_path / "whole", aggregator=Draws(), max_rounds=4)
    fit(make_client(Echo), root=tmp_path / "halves", aggregator=Draws(), max_rounds=2)
    again = make_client(Echo, seed=99)
    settings = {"root": tmp_path / "halves", "aggregator": Draws(), "ckpt_path": "last", "resume_changed": True}
    resumed = fit(again, max_rounds=4, **settings)
    assert same_end(whole, resumed)


@pytest.mark.parametrize(
    ("model", "aggregator", "words"),
    [
        (Local, WeightedAverage, "WeightedAverage needs num_samples and weights, which Local does not send"),
        (FedAvg, Clusters, "Clusters needs choice, which FedAvg does not send"),
        (FedAvg, Aggregator, "FedAvg needs weights, which Aggregator does not send"),
        (PrototypeClient, WeightedAverage, "WeightedAverage needs num_samples and weights"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_name(model, aggregator, words):
    with pytest.raises(MisconfigurationException, match=words):
        fit(make_client(model), aggregator=aggregator())


def test_a_client_goes_with_another_method_s_server():
    run = fit(make_client(partial(FedProx, mu=0.1)), aggregator=Neighbours())
    assert run.federation.method == "FedProx+Neighbours"
    assert len(run.rows) == 3


def test_local_buffers_are_personal_and_everything_else_is_shared():
    model = make_client(net=noisy, buffers="local")
    shared = {name for name in model.state_dict() if model.is_shared(name)}
    personal = {name for name in model.state_dict() if model.is_personal(name)}
    assert shared | personal == set(model.state_dict()) and not shared & personal
    assert personal == {f"net.features.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
