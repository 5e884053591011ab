import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from federations import (
    CLASSES,
    HIDDEN,
    OneClient,
    Pause,
    Spy,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    noisy,
    plain,
    points,
)
from pfl_lightning import AggregatorList, Server, WeightedAverage
from pfl_lightning.client import Phase
from pfl_lightning.client.module import payloads_of
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.internals.of_torch import is_wrapped
from pfl_lightning.messages import Others, Pool, num_bytes, pooled, tensors
from pfl_lightning.methods import Local
from pfl_lightning.methods.apple import APPLE, CorePool

ALONE = partial(APPLE, start="own", rho_lr=0.0)
# all of its parts at work
FAST = partial(APPLE, rho_lr=0.1, mu=0.5, penalty_share=1.0)
PFLLIB = partial(APPLE, rho_lr=0.1, mu=0.5, mode="pfllib")


def nets(run):
    """Each client's core, as it last trained it, with its own buffers."""
    clients = sorted(run.federation.clients.items())
    return {k: {n: t for n, t in state.personal.items() if n.startswith("net.")} for k, state in clients}


def rho(run, client):
    return run.federation.clients[client].personal["rho"]


def losses(run):
    return [row["val/loss"] for row in run.rows]


def core_of(seed):
    return {f"net.{name}": t for name, t in make_client(seed=seed).double().net.named_parameters()}


def client(own=1, clients=3, **settings):
    """A client among others, in float64, with relationships that aren't all alike."""
    model = make_client(partial(APPLE, **settings)).double().eval()
    model.assign(core_of(own))
    cores = {m: core_of(m) for m in range(clients) if m != own}
    with torch.no_grad():
        p = torch.arange(1, clients + 1) / sum(range(clients + 1))
        model.on_download({"models": cores, "shares": p}, None)
    return model, {**cores, own: core_of(own)}


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.by_default("plain")
def test_t12_with_its_own_core_alone_and_no_relationships_learnt_it_is_local_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    apple, local = (fit(make_client(method, **settings)) for method in (ALONE, Local))
    assert equal(nets(apple), nets(local))
    assert losses(apple) == losses(local)
    assert torch.equal(rho(apple, 2), torch.eye(4)[2])


def test_clients_of_one_pool_share_its_stack_and_compute_what_they_compute_of_copies():
    pool, shares = Pool({m: core_of(m) for m in range(3)}), torch.tensor([1.0, 2.0, 3.0]) / 6
    (one, _), (other, _) = client(own=0), client(own=2)
    x = points(7, seed=0)[0].double()
    with torch.no_grad():
        alone = other(x)
        for own, model in ((0, one), (2, other)):
            model.on_download({"models": Others(pool, own), "shares": shares}, None)
        assert torch.equal(other(x), alone)
        # of what others received of its own core it takes nothing
        pool.stack("net.classifier.weight", x)[2] += 1
        assert torch.equal(other(x), alone)
    assert all(one.cores[name] is other.cores[name] for name in one.cores)


class Watched(APPLE):
    """Notes the shapes of the cores that steps and evaluations read, and that they have none for each client."""

    def mixture(self):
        assert not any(map(is_wrapped, self.cores.values()))
        assert {len(rows) for rows in self.cores.values()} == {5} and is_wrapped(self.rho)
        return super().mixture()


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-12), ("32-true", 1e-5)])
@pytest.mark.parametrize("mode", ["paper", "pfllib"])
@pytest.mark.parametrize("settings", [{}, {"clients_per_round": 3, "evaluate": "both"}], ids=["all", "some"])
@pytest.mark.by_default("all-paper-64-true-1e-12", "some-pfllib-64-true-1e-12")
def test_all_clients_at_once_share_the_cores_and_give_what_each_gives_alone(mode, settings, precision, tolerance):
    method = partial(APPLE, rho_lr=0.1, mu=0.5, penalty_share=1.0, mode=mode)
    sizes, ends = (31, 12, 44, 9, 16), []
    for engine in ("sequential", "vectorised"):
        run = fit(make_client(method), blobs(*sizes), engine=engine, precision=precision, max_rounds=4, **settings)
        ends.append([*tensors([run.federation.federation_state()])])
        ends[-1] += [torch.tensor(value) for row in run.rows for name, value in sorted(row.items()) if "loss" in name]
    for alone, at_once in zip(*ends, strict=True):
        torch.testing.assert_close(at_once, alone, rtol=tolerance, atol=tolerance)


def test_a_checkpoint_s_clients_share_the_cores_again(tmp_path):
    run = fit(make_client(FAST), root=tmp_path, engine="vectorised")
    saved = torch.load(run.last, weights_only=True)["federation"]
    received = [payload["models"] for payload in pooled(payloads_of(saved)).values()]
    assert len(received) == 4 and len({id(models.pool) for models in received}) == 1
    for client, models in enumerate(received):
        assert equal(dict(models), dict(run.federation.aggregator.download(client)["models"]))


def test_a_block_of_clients_has_the_cores_once():
    # "both" evaluates clients of one block after training
    fit(make_client(Watched), blobs(31, 12, 44, 9, 16), engine="vectorised", evaluate="both", max_rounds=2)


@pytest.mark.parametrize(("first", "second"), [("sequential", "vectorised"), ("vectorised", "vectorised")])
@pytest.mark.by_default("vectorised-vectorised")
def test_a_run_goes_on_under_the_vectorised_engine(tmp_path, first, second):
    run = partial(fit, max_rounds=4, precision="64-true", clients_per_round=3)
    whole = run(make_client(FAST), blobs(31, 12, 44, 9, 16), engine=first)
    begun = run(make_client(FAST), blobs(31, 12, 44, 9, 16), tmp_path, engine=first, callbacks=[Pause(2)])
    last = str(begun.last)
    resumed = run(make_client(FAST), blobs(31, 12, 44, 9, 16), tmp_path, engine=second, ckpt_path=last)
    tolerance = 0 if first == second else 1e-12
    for a, b in zip(*(tensors([nets(run), rho(run, 0)]) for run in (whole, resumed)), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_learning_relationships_changes_the_weights():
    fixed, learnt = (fit(make_client(partial(APPLE, rho_lr=lr))) for lr in (0.0, 0.1))
    assert not any(equal(nets(fixed)[k], nets(learnt)[k]) for k in range(4))
    assert torch.equal(rho(fixed, 0), fixed.federation.aggregator.download(0)["shares"])
    assert not torch.equal(rho(learnt, 0), rho(fixed, 0))


def test_the_personalised_model_is_the_weighted_sum_of_cores():
    model, cores = client()
    x, _ = points(7, seed=0)
    weights = {name: sum(model.rho[m] * cores[m][name] for m in cores) for name in cores[0]}
    with torch.no_grad():
        expected = functional_call(model.net, {n.removeprefix("net."): t for n, t in weights.items()}, (x.double(),))
        torch.testing.assert_close(model(x.double()), expected, rtol=0, atol=1e-12)
        assert not torch.allclose(expected, model.net(x.double()))


@pytest.mark.parametrize("round", [0, 5, 10])
def test_a_step_by_hand(round):
    eta, eta_2, mu = 0.2, 0.03, 0.4
    model, cores = client(rho_lr=eta_2, mu=mu, penalty_share=0.5)
    model.round, model.num_rounds, model.optimizer = round, 20, partial(SGD, lr=eta)
    with torch.no_grad():
        model.rho.copy_(torch.tensor([0.7, 0.5, -0.3]))
    p, before = torch.tensor([1.0, 2.0, 3.0]).double() / 6, model.rho.detach().clone()
    x, y = points(9, seed=1)
    w = {name: sum(before[m] * cores[m][name].detach() for m in cores).requires_grad_() for name in cores[0]}
    loss = F.cross_entropy(
        functional_call(model.net, {n.removeprefix("net."): t for n, t in w.items()}, (x.double(),)), y
    )
    g = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
    fade = {0: 1.0, 5: 0.5, 10: 0.0}[round]

    optimizer = model.local_optimizer(Phase(), list(model.parameters()))
    values = model.training_step((x.double(), y), 0)
    values["loss"].backward()
    optimizer.step()

    assert float(values["loss"].detach()) == pytest.approx(
        float(loss.detach() + fade * mu / 2 * (before - p).square().sum())
    )
    for name, tensor in model.net.named_parameters():
        expected = cores[1][f"net.{name}"] - eta * before[1] * g[f"net.{name}"]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-9)
    inner = torch.stack([sum((g[name] * cores[m][name]).sum() for name in g) for m in range(3)])
    torch.testing.assert_close(
        model.rho.detach(), before - eta_2 * (inner + fade * mu * (before - p)), rtol=0, atol=1e-7
    )


def test_steps_and_an_upload_of_pfllib_by_hand():
    eta, eta_2, mu = 0.2, 0.03, 0.4
    model, cores = client(rho_lr=eta_2, mu=mu, mode="pfllib")
    model.optimizer = partial(SGD, lr=eta)
    rho, p = torch.full((3,), 1 / 3).double(), torch.tensor([1.0, 2.0, 3.0]).double() / 6
    cores = {m: {name: t.detach().clone() for name, t in core.items()} for m, core in cores.items()}
    batches = [(x.double(), y) for x, y in (points(9, seed=1), points(6, seed=2))]

    def personalised():
        return {name: sum(rho[m] * cores[m][name] for m in cores) for name in cores[0]}

    for x, y in batches:
        w = {name: tensor.requires_grad_() for name, tensor in personalised().items()}
        inputs = {name.removeprefix("net."): tensor for name, tensor in w.items()}
        loss = F.cross_entropy(functional_call(model.net, inputs, (x,)), y)
        g = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        means = torch.stack([sum((g[name] * cores[m][name]).mean() for name in g) / len(g) for m in range(3)])
        cores[1] = {name: c - 3 * eta * rho[1] * g[name] for name, c in cores[1].items()}
        rho = rho - eta_2 * (means + mu * (rho - p))

    model.train()
    optimizer = model.local_optimizer(Phase(), list(model.parameters()))
    for batch in batches:
        optimizer.zero_grad()
        model.training_step(batch, 0)["loss"].backward()
        optimizer.step()
    torch.testing.assert_close(model.rho.detach(), rho, rtol=0, atol=1e-7)
    model.eval()
    model.steps_done = len(batches)
    with torch.no_grad():
        sent = model.upload(ClientData(OneClient(Samples(*batches[0])), 0))["weights"]
        assert torch.equal(model(batches[0][0]), model.net(batches[0][0]))
    for name, tensor in personalised().items():
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=1e-7)


def test_under_pfllib_the_next_core_is_the_last_model_and_that_is_evaluated(tmp_path):
    run = fit(make_client(PFLLIB), root=tmp_path, evaluate="both")
    model, part = load_client(APPLE, run.last, client=2).eval(), run.data.part(2, "test")
    with torch.no_grad():
        assert torch.equal(model(part.x), model.net(part.x))
    assert equal(nets(run)[2], {f"net.{name}": tensor for name, tensor in model.net.state_dict().items()})
    assert [row["val/loss"] for row in run.rows] == pytest.approx([row["val_after/loss"] for row in run.rows])
    assert not equal(nets(run)[2], nets(fit(make_client(FAST)))[2])


def test_under_pfllib_a_client_without_a_batch_keeps_its_core():
    model, cores = client(mode="pfllib")
    with torch.no_grad():
        sent = model.upload(ClientData(OneClient(Samples(*points(4, seed=0))), 0))["weights"]
    assert equal(sent, {name: tensor.detach() for name, tensor in cores[1].items()})


@pytest.mark.exhaustive
def test_the_penalty_draws_relationships_to_p_and_fades():
    def distance(**settings):
        run = fit(make_client(partial(APPLE, rho_lr=0.5, **settings)), max_rounds=3)
        shares = run.federation.aggregator.state["shares"]
        return sum(float((rho(run, k) - shares).norm()) for k in range(4))

    held, free = distance(mu=0.5, penalty_share=1.0), distance(mu=0.0)
    assert held < distance(mu=0.5, penalty_share=0.4) < free == distance(mu=0.5, penalty_share=0.0)


@pytest.mark.parametrize(
    ("mode", "rounds", "fades"),
    [("paper", 20, [1, 0.5, 0, 0]), ("paper", 40, [1, 0.853553, 0.5, 0.146447]), ("pfllib", 20, [1, 1, 0.5, 0])],
)
def test_the_penalty_fades_over_a_share_of_the_run_whatever_its_length(mode, rounds, fades):
    model, _ = client(mode=mode, penalty_share=0.2)
    model.num_rounds = rounds
    seen = []
    for model.round in (0, 2, 4, 6) if mode == "paper" else (0, 1, 3, 5):
        seen.append(model.fade())
    assert seen == pytest.approx(fades, abs=1e-6)


def test_clients_know_the_length_of_the_run():
    model = make_client(APPLE)
    assert fit(model, max_rounds=2).model.num_rounds == 2


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, [1 / 6, 2 / 6, 3 / 6]),
        ({"start": "uniform"}, [1 / 3] * 3),
        ({"start": "own"}, [0.0, 1.0, 0.0]),
        ({"mode": "pfllib"}, [1 / 3] * 3),
        ({"mode": "pfllib", "start": "samples"}, [1 / 6, 2 / 6, 3 / 6]),
    ],
)
def test_first_relationships(settings, first):
    model, _ = client(**settings)
    torch.testing.assert_close(model.rho.detach(), torch.tensor(first).double(), rtol=0, atol=1e-7)
    # what is learnt is no view of what is compared with
    with torch.no_grad():
        model.rho.add_(1)
    torch.testing.assert_close(model.p, torch.tensor([1.0, 2.0, 3.0]).double() / 6, rtol=0, atol=1e-7)


def test_p_is_by_training_samples():
    run = fit(make_client(APPLE), max_rounds=1)
    n = torch.tensor([float(run.data.size(k, "train")) for k in range(4)])
    torch.testing.assert_close(run.federation.aggregator.download(0)["shares"], n / n.sum())


def test_relationships_have_a_learning_rate_of_their_own_and_follow_the_schedule():
    model, _ = client(rho_lr=0.03)
    rates = [group["lr"] for group in model.local_optimizer(Phase(), list(model.parameters())).param_groups]
    assert rates == [0.1, 0.03]
    model, _ = client(rho_lr=0.03, mode="pfllib")
    rates = [group["lr"] for group in model.local_optimizer(Phase(), list(model.parameters())).param_groups]
    assert rates == pytest.approx([0.3, 0.03])
    still = partial(ExponentialLR, gamma=0.0)
    stops, once = fit(make_client(FAST, lr_scheduler=still)), fit(make_client(FAST), max_rounds=1)
    assert equal(nets(stops), nets(once)) and torch.equal(rho(stops, 3), rho(once, 3))


def test_one_client_trains_its_core_alone():
    run = fit(make_client(ALONE, net=noisy), blobs(30))
    assert equal(nets(run), nets(fit(make_client(Local, net=noisy), blobs(30))))
    assert rho(fit(make_client(APPLE), blobs(30)), 0).shape == (1,)


def test_cores_travel_and_relationships_do_not():
    spy = Spy()
    run = fit(make_client(FAST, net=noisy), callbacks=[spy])
    size = num_bytes(dict(run.model.net.named_parameters()))
    assert {row["bytes/down"] for row in run.rows} == {4 * (3 * size + 4 * 4)}
    assert {row["bytes/up"] for row in run.rows} == {4 * (size + 8)}
    for k, net in nets(run).items():
        sent = spy.updates[-1][k]["weights"]
        assert equal(sent, {name: net[name] for name in sent})
        assert not any("running" in name for name in sent)
    one, other = (run.federation.clients[k].personal["net.features.1.running_mean"] for k in range(2))
    assert not torch.equal(one, other)


def test_payloads_are_the_kept_cores_themselves():
    run = fit(make_client(APPLE), max_rounds=2)
    aggregator = run.federation.aggregator
    for k in range(4):
        sent = aggregator.download(k)["models"]
        assert list(sent) == [other for other in range(4) if other != k]
        for other, core in sent.items():
            kept = aggregator.state["models"][other]
            assert all(tensor.data_ptr() == kept[name].data_ptr() for name, tensor in core.items())


def test_who_has_not_taken_part_has_the_initial_core_once_in_memory():
    aggregator, data = CorePool(), blobs()
    data.setup()
    weights = dict(make_client().state_dict())
    aggregator.setup(Server(4, weights, make_client(), data, seed=0))
    aggregator.aggregate({1: {"weights": core_of(1)}}, round=0)
    assert all(aggregator.download(1)["models"][k] is weights for k in (0, 2, 3))
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(aggregator.state, before)


def test_a_client_that_stays_away_keeps_its_core_and_its_relationships():
    spy = Spy()
    run = fit(make_client(FAST), callbacks=[spy], clients_per_round=2, max_rounds=4)
    last = {k: update["weights"] for updates in spy.updates for k, update in updates.items()}
    assert set(spy.cohorts[-1]) < set(last)
    for k, core in last.items():
        assert equal(nets(run)[k], core)
        assert rho(run, k).shape == (4,)
    whole = fit(make_client(FAST), callbacks=[Pause(3)], clients_per_round=2, max_rounds=4)
    for k in set(whole.federation.clients) - set(spy.cohorts[-1]):
        assert torch.equal(rho(run, k), rho(whole, k))


def test_evaluation_is_of_the_personalised_model_before_and_after_training(tmp_path):
    run = fit(make_client(FAST), root=tmp_path, evaluate="both")
    before = fit(make_client(FAST))
    assert losses(run) == losses(before) and equal(nets(run), nets(before))
    assert run.rows[-1]["val/loss"] != run.rows[-1]["val_after/loss"]
    model, part = load_client(APPLE, run.last, client=2), run.data.part(2, "test")
    with torch.no_grad():
        loss = F.cross_entropy(model(part.x), part.y)
        assert not torch.allclose(model(part.x), model.net(part.x))
    assert run.federation.evaluations.results["test"][2]["loss"] == pytest.approx(float(loss), abs=1e-6)


def test_after_a_run_the_module_is_a_core_and_can_be_tested_on_checkpoints(tmp_path):
    run = fit(make_client(FAST), root=tmp_path)
    x, _ = points(5, seed=0)
    with torch.no_grad():
        assert torch.equal(run.model(x), run.model.net(x))
    last = run.test()
    (metrics,) = run.trainer.test(ckpt_path=str(run.last), datamodule=run.data, verbose=False)
    assert metrics["test/acc"] == pytest.approx(run.federation.evaluations.summary_of("test", last)["test/acc"])
    assert load_client(APPLE, run.last).rho.shape == (0,)


def test_a_global_model_beside_it_is_tested_as_it_is(tmp_path):
    data = partial(blobs, central_test=0.2)
    together = AggregatorList([WeightedAverage(), CorePool()])
    run = fit(make_client(FAST, net=plain), data(), tmp_path, aggregator=together, test_every_round=True)
    part = run.data.central_data()
    with torch.no_grad():
        logits = functional_call(run.model, run.federation.aggregator.global_model(), (part.x,))
    expected = float((logits.argmax(1) == part.y).double().mean())
    assert run.rows[-1]["test/global_acc"] == pytest.approx(expected)


def test_clients_of_one_class_each_and_batches_of_one_run():
    run = fit(make_client(FAST), blobs(40, 40, 40, by_class=True, batch_size=1), max_rounds=2)
    assert run.rows[-1]["clients_diverged"] == 0 and math.isfinite(losses(run)[-1])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("64-true", torch.float64)])
def test_it_trains_in_other_precisions(precision, dtype):
    run = fit(make_client(FAST, net=noisy), precision=precision, max_rounds=2)
    assert run.rows[-1]["clients"] == 4 and math.isfinite(losses(run)[-1])
    assert rho(run, 0).dtype == dtype


def test_mixing_is_done_in_full_precision():
    model = make_client(APPLE).eval()
    shape = {f"net.{name}": torch.ones_like(t) for name, t in model.net.named_parameters()}
    with torch.no_grad():
        model.on_download({"models": {1: shape}, "shares": torch.tensor([0.5, 0.5])}, None)
        model.rho.copy_(torch.tensor([0.0, 1 + 2**-12]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight = model.mixture()["classifier.weight"]
    assert torch.equal(weight, torch.full((CLASSES, HIDDEN), 1 + 2**-12))


@pytest.mark.parametrize("settings", [{"rho_lr": -0.1}, {"mu": -1.0}, {"penalty_share": -0.1}, {"penalty_share": 1.5}])
def test_settings_out_of_range_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value}"):
        make_client(partial(APPLE, **settings))
