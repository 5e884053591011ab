import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import FEATURES, Spy, blobs, equal, fit, make_client, noisy, points, set_up
from pfl_lightning.aggregators import BetaMean
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedPM
from pfl_lightning.methods.fedcac import packed, unpacked
from pfl_lightning.nets import Net

LARGE = partial(Adam, lr=0.1)
W = "features/0/weight"


def after(masks_by_round, **settings):
    """The server after some rounds, and the probabilities of one tensor."""
    model = make_client(FedPM)
    server = set_up(BetaMean(**settings), model)
    for number, masks in enumerate(masks_by_round):
        rest = {name: torch.zeros(t.shape) > 0 for name, t in model.scores.items()}
        updates = {k: {"masks": {n: packed(t) for n, t in (rest | {W: mask}).items()}} for k, mask in masks.items()}
        logs = server.aggregate(updates, number)
    return server, server.state["weights"][f"scores.{W}"].sigmoid(), logs


def drawn(*seeds):
    return {seed: torch.rand(5, FEATURES, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in seeds}


def test_the_mean_of_clipped_masks_by_the_official_rule():
    masks = drawn(0, 1, 3)
    alpha = 1 + sum(torch.where(mask, 0.99, 0.01) for mask in masks.values())
    beta = 1 + sum(1 - torch.where(mask, 0.99, 0.01) for mask in masks.values())
    _, theta, logs = after([drawn(7), masks])
    torch.testing.assert_close(theta, (alpha - 1) / (alpha + beta - 2))
    sizes = [t.numel() for t in make_client(FedPM).scores.values()]
    assert logs["kept"] == pytest.approx(float(sum(mask.sum() for mask in masks.values())) / 3 / sum(sizes))
    _, theta, _ = after([drawn(7), masks], reset=2)
    everything = [torch.where(mask, 0.99, 0.01) for mask in (*drawn(7).values(), *masks.values())]
    torch.testing.assert_close(theta, torch.stack(everything).mean(0))


def test_unanimous_masks_keep_scores_finite_and_opposite_ones_give_a_half():
    mask = drawn(0)[0]
    _, theta, _ = after([{0: mask, 1: mask}])
    torch.testing.assert_close(theta, torch.where(mask, 0.99, 0.01))
    server, theta, _ = after([{0: mask, 1: ~mask}])
    torch.testing.assert_close(theta, torch.full_like(theta, 0.5))
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_a_step_by_hand():
    model = make_client(FedPM).double()
    x, y = points(9, seed=1)
    torch.manual_seed(5)
    model.training_step((x.double(), y), 0)["loss"].backward()
    torch.manual_seed(5)
    net, kept = dict(model.net.named_parameters()), {}
    for name in net:
        theta = model.scores[name.replace(".", "/")].detach().sigmoid()
        kept[name] = (torch.rand(theta.shape, dtype=torch.float64) < theta).double().requires_grad_()
    F.cross_entropy(functional_call(model.net, {n: kept[n] * net[n] for n in net}, (x.double(),)), y).backward()
    for name, mask in kept.items():
        s = model.scores[name.replace(".", "/")]
        theta = s.detach().sigmoid()
        # the draw's gradient is times theta, and then the sigmoid's
        torch.testing.assert_close(s.grad, mask.grad * theta * theta * (1 - theta))


def test_weights_have_one_size_a_layer_and_stand_still():
    run = fit(make_client(FedPM, optimizer=LARGE))
    first = make_client(FedPM)
    for layer, inputs in ((run.model.net.features[0], FEATURES), (run.model.net.classifier, 5)):
        for tensor in (layer.weight, layer.bias):
            torch.testing.assert_close(tensor.abs(), torch.full_like(tensor, math.e / math.sqrt(inputs)))
    assert equal(dict(run.model.net.state_dict()), dict(first.net.state_dict()))
    assert torch.equal(make_client(FedPM, init="net").net.classifier.weight, make_client().net.classifier.weight)


def test_a_bit_a_weight_travels_up_and_the_scores_down():
    spy = Spy()
    run = fit(make_client(FedPM, net=noisy, optimizer=LARGE), callbacks=[spy])
    size = sum(p.numel() for p in make_client(net=noisy).parameters())
    masks = spy.updates[0][0]["masks"]
    assert num_bytes(masks) == sum(math.ceil(t.numel() / 8) for t in run.model.scores.values())
    assert run.rows[0]["bytes/down"] == 4 * 4 * size
    assert all("running" in name or "batches" in name for name in run.federation.clients[0].personal)


@pytest.mark.exhaustive
def test_it_learns_and_predicts_by_a_mask_or_by_the_mean():
    for predict in ("sample", "mean"):
        run = fit(make_client(FedPM, optimizer=LARGE, predict=predict), max_rounds=5, local_epochs=2)
        # up and down: the mean of four masks has five values
        assert min(row["val/loss"] for row in run.rows[1:]) < run.rows[0]["val/loss"]
        x = points(9, seed=1)[0]
        model = run.model.eval()
        model.receive({}, run.federation.aggregator.download(0), None)
        theta = {name: t.detach() for name, t in model.probabilities().items()}
        if predict == "sample":
            theta = {name: (model.draws.tensors()[name] < t).float() for name, t in theta.items()}
        weights = {name: theta[name] * p for name, p in model.net.named_parameters()}
        torch.testing.assert_close(model(x), functional_call(model.net, weights, (x,)))


def test_sure_scores_give_the_net_with_its_weights():
    model = make_client(FedPM).eval()
    for score in model.scores.values():
        nn.init.constant_(score, 20.0)
    x, y = points(9, seed=1)
    torch.testing.assert_close(model(x), model.net(x))
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(model.net(x), y))
    model.client_id = 1
    sent = model.upload(None)["masks"]
    assert all(unpacked(bits, model.scores[name].numel()).all() for name, bits in sent.items())


def sent(seed, **settings):
    """Each client's masks by round, of scores that are the same for all seeds and never trained."""
    model, spy = make_client(FedPM, optimizer=partial(SGD, lr=0.0)), Spy()
    torch.manual_seed(seed)
    fit(model, callbacks=[spy], max_rounds=2, **settings)
    return [[update["masks"] for _, update in sorted(updates.items())] for updates in spy.updates]


def test_masks_differ_by_seed_round_and_client():
    first, second = sent(3)
    masks = [*first, *second, *sent(4)[0]]
    # theta is the same in the first round, and so draws alone differ
    assert not any(equal(one, other) for at, one in enumerate(masks) for other in masks[:at])
    bits = [unpacked(each[W], 5 * FEATURES) for each in (*first, *masks[-4:])]
    # by chance alone two draws are equal at 0.5 to 0.7 of the places
    assert torch.stack([a == b for a, b in zip(bits[:4], bits[4:], strict=True)]).float().mean() < 0.8


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_masks_are_the_same_under_each_engine(engine):
    assert equal(sent(3), sent(3, engine=engine))


def test_scores_are_float64_with_64_true():
    spy = Spy()
    run = fit(make_client(FedPM, optimizer=LARGE), callbacks=[spy], max_rounds=1, precision="64-true")
    for name, score in run.model.scores.items():
        bits = [unpacked(update["masks"][name], score.numel()) for update in spy.updates[0].values()]
        theta = 0.01 + 0.98 * torch.stack(bits).double().mean(0).reshape(score.shape)
        torch.testing.assert_close(run.weights[f"scores.{name}"], (theta / (1 - theta)).log(), rtol=1e-14, atol=1e-14)


def test_what_the_net_has_frozen_has_no_score():
    def frozen(input_shape, num_classes):
        body = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 4))
        body[0].requires_grad_(False)
        return Net(body, nn.Linear(4, num_classes))

    model = make_client(FedPM, net=frozen, optimizer=LARGE)
    assert not any("features/0/" in name for name in model.scores)
    assert torch.equal(model.net.features[0].weight, make_client(net=frozen).net.features[0].weight)
    assert fit(model).rows[-1]["clients_diverged"] == 0


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(FedPM, optimizer=LARGE), data).rows[-1]["clients_diverged"] == 0


def test_settings_out_of_range_are_refused_by_name():
    for setting, value in (("epsilon", 0), ("epsilon", 0.5), ("reset", 0)):
        with pytest.raises(MisconfigurationException, match=rf"aggregator\.{setting}={value}"):
            BetaMean(**{setting: value})
    for setting in ("init", "predict"):
        with pytest.raises(MisconfigurationException, match=rf"model\.{setting}='other'"):
            make_client(FedPM, **{setting: "other"})
