import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    OneClient,
    Sizes,
    TwoGroups,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    equal,
    fit,
    load_client,
    make_client,
    near,
    noisy,
    points,
)
from pfl_lightning.data import Samples
from pfl_lightning.data.client_data import ClientData
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedEM
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Classification, NextToken, Regression, Survival

TWO = partial(FedEM, num_learners=2)
SIZE = (120, 120, 120, 120)


class Crowd(TwoGroups):
    """Four times as many points."""

    def load(self):
        return points(480, seed=0)


class Mixed(Crowd):
    """Clients that call the classes of a fourth of their samples by other names, odd ids of three fourths."""

    def alter(self, part, client, split):
        rows = torch.arange(len(part.y)) % 4
        other = rows == 0 if client % 2 == 0 else rows > 0
        return Samples(part.x, (part.y + other.long()) % CLASSES)


def losses(run):
    return [row["val/loss"] for row in run.rows]


def shares(run):
    return {k: state.personal["pi"] for k, state in sorted(run.federation.clients.items())}


def received(client, pi=None, training=True, client_id=0, data=None):
    """A client after a download of its own learners, and its samples."""
    data = data or blobs()
    data.setup()
    client.eval()
    if pi is not None:
        client.pi.copy_(torch.tensor(pi))
    client.training_follows = training
    with torch.no_grad():
        client.on_download({"weights": client.shared_state()}, data.client(client_id))
    return client, data.client(client_id)


def by_hand(client, x, y):
    """The responsibilities of a client's learners in evaluation mode, and the new weights."""
    with torch.no_grad():
        errors = torch.stack([F.cross_entropy(net(x), y, reduction="none") for net in client.learners()], 1)
    q = client.pi * torch.exp(-errors)
    q = q / q.sum(1, keepdim=True)
    return q, q.mean(0)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_one_learner_is_fedavg_bit_for_bit(engine):
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    one, average = (
        fit(make_client(method, **settings), clients_per_round=3, engine=engine)
        for method in (partial(FedEM, num_learners=1), FedAvg)
    )
    assert equal(one.weights, average.weights)
    assert losses(one) == losses(average)


def test_learners_start_apart_the_first_as_the_common_one_and_no_other_draw_is_disturbed():
    common, state = make_client(net=noisy).net.state_dict(), torch.get_rng_state()
    three = make_client(FedEM, net=noisy)
    assert torch.equal(torch.get_rng_state(), state)
    assert equal(dict(three.net.state_dict()), dict(common))
    heads = [float(net.classifier.weight.detach().sum()) for net in three.learners()]
    assert len(set(heads)) == 3
    two = make_client(TWO, net=noisy)
    assert equal(dict(two.learner_1.state_dict()), dict(three.learner_1.state_dict()))
    other = make_client(TWO, seed=4, net=noisy)
    assert not equal(dict(two.learner_1.state_dict()), dict(other.learner_1.state_dict()))


def test_responsibilities_are_by_the_weights_and_the_losses_of_each_sample():
    client, data = received(make_client(FedEM, net=noisy), [0.6, 0.3, 0.1])
    x, y = data.train.x, data.train.y
    q, new = by_hand(client, x, y)
    ours = client.responsibilities(client.learners(), x, y).detach()
    torch.testing.assert_close(ours, q)
    torch.testing.assert_close(client.posterior, new)
    assert float((ours - ours.mean(0)).abs().max()) > 0.01, "choose other learners: they agree on all samples"


def test_samples_of_a_round_keep_the_weights_and_the_learners_from_before_it():
    client, data = received(make_client(FedEM, net=noisy), [0.6, 0.3, 0.1])
    q, new = by_hand(client, data.train.x, data.train.y)
    client.train()
    optimizer = SGD(client.parameters(), lr=0.5)
    for index in range(3):
        optimizer.zero_grad()
        client.training_step((data.train.x, data.train.y), index)["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        # dropout and batches' statistics would change them
        torch.testing.assert_close(client.responsibilities(client.received(), data.train.x, data.train.y), q)
    client.eval().upload(data)
    torch.testing.assert_close(client.pi, new)


def test_a_learner_without_weight_stands_still_and_the_other_learns_alone():
    client, data = received(make_client(TWO), [1.0, 0.0])
    batch = data.train.x, data.train.y
    client.training_step(batch, 0)["loss"].backward()
    assert all(float(p.grad.abs().max()) == 0 for p in client.learner_1.parameters())
    alone = make_client()
    alone.training_step(batch, 0)["loss"].backward()
    for ours, expected in zip(client.net.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    client.upload(data)
    assert client.pi.tolist() == [1, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.by_default("0")
def test_opposite_groups_take_a_learner_each_and_are_better_off(seed):
    run = fit(make_client(TWO, seed=seed), blobs(*SIZE, data=Crowd), max_rounds=10)
    pi = shares(run)
    first = int(pi[0].argmax())
    assert all(float(pi[k][first if k % 2 == 0 else 1 - first]) > 0.9 for k in pi), pi
    together = fit(make_client(seed=seed), blobs(*SIZE, data=Crowd), max_rounds=10)
    assert run.rows[-1]["val/acc"] > together.rows[-1]["val/acc"] + 0.2


@pytest.mark.exhaustive
def test_weights_are_the_shares_of_a_client_s_distributions():
    run = fit(make_client(TWO, seed=0), blobs(*SIZE, data=Mixed), max_rounds=25)
    pi = torch.stack(list(shares(run).values()))
    if pi[0, 0] < 0.5:
        pi = pi.flip(1)
    expected = torch.tensor([[0.75, 0.25], [0.25, 0.75]] * 2)
    assert float((pi - expected).abs().max()) < 0.1, pi


def test_equal_learners_would_never_part():
    client = make_client(TWO)
    client.learner_1.load_state_dict(client.net.state_dict())
    run = fit(client, blobs(data=TwoGroups))
    assert all(torch.allclose(pi, torch.tensor([0.5, 0.5])) for pi in shares(run).values())


def test_predictions_mix_probabilities_and_regressions_mix_values():
    client, data = received(make_client(FedEM), [0.6, 0.3, 0.1], training=False)
    client.fitted.fill_(True)
    x = data.test.x
    p = sum(share * net(x).softmax(1) for share, net in zip(client.pi, client.learners(), strict=True))
    torch.testing.assert_close(client(x), p.log())
    client = FedEM(net=lambda shape, n: Net(nn.Linear(*shape, 4), nn.Linear(4, n)), input_shape=(6,), task=Regression())
    client.fitted.fill_(True)
    client.pi.copy_(torch.tensor([0.6, 0.3, 0.1]))
    values = sum(share * net(x) for share, net in zip(client.pi, client.learners(), strict=True))
    torch.testing.assert_close(client(x), values)


def test_a_client_that_has_trained_is_evaluated_by_the_weights_of_its_training():
    client, data = received(make_client(FedEM))
    client.upload(data)
    kept = client.pi.clone()
    client.assign({"net.classifier.bias": torch.tensor([9.0, 0.0, 0.0])})
    received(client, training=False)
    assert equal(client.pi, kept)
    p = sum(share * net(data.test.x).softmax(1) for share, net in zip(kept, client.learners(), strict=True))
    torch.testing.assert_close(client(data.test.x), p.log())


def test_rounds_of_joining_are_steps_of_the_weights_with_learners_that_stand_still():
    data = TwoGroups(num_clients=4, new_clients=1, partitioner=Sizes(24, 16, 30, 20, 28), batch_size=5)
    run = fit(make_client(FedEM), data)
    for rounds in (1, 4):
        metrics = run.trainer.join(run.model, data, rounds=rounds)
        client = run.model.eval()
        (new,) = data.newcomers
        client.assign(run.federation.aggregator.state["weights"])
        client.pi.fill_(1 / 3)
        for _ in range(rounds):
            client.pi.copy_(by_hand(client, data.part(new, "train").x, data.part(new, "train").y)[1])
        client.fitted.fill_(True)
        test = data.part(new, "test")
        with torch.no_grad():
            expected = float(F.cross_entropy(client(test.x), test.y))
        assert metrics["new/loss"] == pytest.approx(expected, rel=1e-5)
        assert (metrics["new/loss"] == pytest.approx(metrics["new_received/loss"])) == (rounds == 1)


def test_texts_count_by_the_mean_of_their_positions_and_pull_by_the_sum():
    torch.manual_seed(0)
    task = NextToken(5)
    client = FedEM(net=lambda _, n: Net(nn.Embedding(n, 4), nn.Linear(4, n)), input_shape=(6,), task=task)
    x, y = torch.randint(5, (3, 6)), torch.randint(5, (3, 6))
    y[1, 2:] = task.ignore_index
    y[2] = task.ignore_index
    outputs = client.net(x)
    mean, total = client.sample_errors(outputs, y)
    for row, counted in ((0, 6), (1, 2)):
        expected = F.cross_entropy(outputs[row, :counted], y[row, :counted])
        torch.testing.assert_close(mean[row], expected)
        torch.testing.assert_close(total[row], counted * expected)
    assert float(mean[2].detach()) == float(total[2].detach()) == 0
    for frozen, net in zip(client.received(), client.learners(), strict=True):
        frozen.take_from(net)
    client.pi.copy_(torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(client.training_step((x, y), 0)["loss"], task.loss(outputs, y))


def test_class_weights_count_in_both_steps():
    task = Classification(CLASSES, class_weights=(1.0, 2.0, 3.0))
    client, data = received(FedEM(net=noisy, input_shape=(FEATURES,), task=task))
    client._class_weights.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x, y = data.train.x, data.train.y
    expected = F.cross_entropy(client.net(x), y, reduction="none") * (y + 1)
    torch.testing.assert_close(client.sample_errors(client.net(x), y)[0], expected)


def test_engines_agree():
    settings = {"clients_per_round": 3, "max_rounds": 2}
    alone = fit(make_client(FedEM, net=plainly), **settings)
    at_once = fit(make_client(FedEM, net=plainly), engine="vectorised", **settings)
    assert near(alone.weights, at_once.weights) and near(shares(alone), shares(at_once))
    assert near(losses(alone), losses(at_once))


def plainly(input_shape, num_classes):
    """With BatchNorm, and without draws."""
    body = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return Net(body, nn.Linear(HIDDEN, num_classes))


def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    check_order_and_resume(FedEM, tmp_path)


def test_a_client_of_a_checkpoint_has_its_own_weights(tmp_path):
    run = fit(make_client(FedEM), blobs(data=TwoGroups), tmp_path)
    loaded = load_client(FedEM, run.last, client=1)
    assert equal(loaded.pi, shares(run)[1]) and bool(loaded.fitted)
    held = run.data.part(1, "test")
    with torch.no_grad():
        acc = float((loaded.eval()(held.x).argmax(1) == held.y).float().mean())
    assert acc == run.test()[1]["acc"]


def test_bytes_are_all_learners_both_ways_and_weights_stay():
    run = fit(make_client(FedEM, net=noisy), max_rounds=1)
    size = 3 * num_bytes(run.model.net.state_dict())
    assert run.rows[0]["bytes/down"] == 4 * size and run.rows[0]["bytes/up"] == 4 * (size + 8)
    assert set(run.federation.clients[0].personal) == {"pi", "fitted"}


def test_running_statistics_stay_with_clients_where_they_are_local():
    run = fit(make_client(FedEM, net=noisy, buffers="local"), max_rounds=2)
    assert not any("running" in name for name in run.federation.aggregator.state["weights"])
    own = [state.personal["learner_2.features.1.running_mean"] for state in run.federation.clients.values()]
    assert not torch.equal(own[0], own[1]) and all(math.isfinite(loss) for loss in losses(run))


def test_frozen_layers_exist_once():
    def half(input_shape, num_classes):
        net = noisy(input_shape, num_classes)
        net.features[0].requires_grad_(False)
        return net

    run = fit(make_client(FedEM, net=half), max_rounds=2)
    assert len({net.features[0].weight.data_ptr() for net in run.model.learners()}) == 1
    assert not any(name.endswith("features.0.weight") for name in run.federation.aggregator.state["weights"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_it_trains_in_other_precisions(precision):
    run = fit(make_client(FedEM, net=noisy), precision=precision, max_rounds=2)
    kind = torch.float64 if precision == "64-true" else torch.float32
    assert {pi.dtype for pi in shares(run).values()} == {kind}
    assert all(math.isfinite(loss) for loss in losses(run))


def test_batches_of_one_and_one_client_learn():
    check_batches_of_one(make_client(FedEM), 2)
    assert fit(make_client(FedEM), blobs(30)).rows[-1]["clients"] == 1


def test_a_client_without_training_samples_keeps_equal_weights():
    client = make_client(FedEM).eval()
    nothing = Samples(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))
    client.on_download({"weights": client.shared_state()}, ClientData(OneClient(nothing), 0))
    torch.testing.assert_close(client.posterior, torch.full((3,), 1 / 3))


def test_what_can_t_work_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.num_learners=0 .* 1 .* 3"):
        make_client(partial(FedEM, num_learners=0))
    with pytest.raises(MisconfigurationException, match=r"model\.num_learners=3 .* task Survival\(\)"):
        FedEM(net=noisy, input_shape=(FEATURES,), task=Survival())
    FedEM(net=noisy, input_shape=(FEATURES,), task=Survival((1.0, 2.0)))
    FedEM(net=noisy, input_shape=(FEATURES,), task=Survival(), num_learners=1)
    with pytest.raises(MisconfigurationException, match=r"model\.net=Net .* model\.num_learners=3"):
        make_client(FedEM, net=noisy((FEATURES,), CLASSES))
