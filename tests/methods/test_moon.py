import copy
import math
from functools import partial
from itertools import chain

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import HIDDEN, Spy, blobs, equal, fit, load_client, make_client, noisy, points
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.moon import MOON, model_contrast
from pfl_lightning.nets import Net

FIVES = partial(MOON, mu=5.0)


class Contrasts(Spy):
    """Keeps each client's contrastive loss, by round."""

    def __init__(self):
        super().__init__()
        self.rounds = []

    def on_round_start(self, trainer, federation, cohort):
        super().on_round_start(trainer, federation, cohort)
        self.rounds.append({})

    def on_client_fit_end(self, trainer, federation, client, outcome):
        self.rounds[-1][client] = outcome.metrics["contrast"]


def training(model):
    """As engines set it: the mode of every submodule."""
    for module in model.modules():
        module.training = True
    return model


def with_three_models(net, seed=0):
    """A client whose current, received and previous models are three different ones."""
    model = make_client(partial(MOON, mu=2.0, tau=0.3), net=net)
    other = make_client(partial(MOON, mu=2.0, tau=0.3), net=net, seed=seed + 10)
    model.received.take_from(other.net.features)
    other = make_client(partial(MOON, mu=2.0, tau=0.3), net=net, seed=seed + 20)
    model.previous.take_from(other.net.features)
    return model


def features_of(frozen, model):
    """The frozen tensors in an ordinary network in evaluation mode."""
    features = copy.deepcopy(model.net.features).eval()
    with torch.no_grad():
        for tensor, other in zip(chain(features.parameters(), features.buffers()), frozen.buffers(), strict=True):
            tensor.copy_(other)
    return features


def test_without_its_term_it_is_fedavg_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    moon, average = fit(make_client(partial(MOON, mu=0.0), **settings)), fit(make_client(FedAvg, **settings))
    assert equal(moon.weights, average.weights)
    assert [row["val/loss"] for row in moon.rows] == [row["val/loss"] for row in average.rows]
    assert not any(state.personal for state in moon.federation.clients.values())


def test_the_first_round_s_contrast_is_log_2_and_moves_nothing():
    moon, average = (fit(make_client(method, net=noisy), max_rounds=1) for method in (FIVES, FedAvg))
    assert moon.rows[0]["train/contrast"] == pytest.approx(math.log(2), rel=1e-6)
    assert moon.rows[0]["train/loss"] == pytest.approx(average.rows[0]["train/loss"] + 5 * math.log(2), rel=1e-5)
    for name, tensor in average.weights.items():
        torch.testing.assert_close(moon.weights[name], tensor, rtol=0, atol=1e-5)


def test_its_term_changes_the_weights_from_the_second_round_on():
    moon, average = (fit(make_client(method), max_rounds=2) for method in (FIVES, FedAvg))
    assert abs(moon.rows[1]["train/contrast"] - math.log(2)) > 1e-4
    name = "net.features.0.weight"
    assert (moon.weights[name] - average.weights[name]).abs().max() > 1e-3


def test_one_client_s_previous_model_is_the_received_one():
    spy = Contrasts()
    moon = fit(make_client(FIVES), blobs(30), callbacks=[spy])
    assert [contrasts[0] for contrasts in spy.rounds] == pytest.approx([math.log(2)] * 3, rel=1e-6)
    average = fit(make_client(FedAvg), blobs(30))
    for name, tensor in average.weights.items():
        torch.testing.assert_close(moon.weights[name], tensor, rtol=0, atol=1e-5)


def test_the_loss_is_the_paper_s():
    z, z_glob, z_prev = torch.randn(3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def sim(a, b):
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    near, far = torch.exp(sim(z, z_glob) / 0.5), torch.exp(sim(z, z_prev) / 0.5)
    torch.testing.assert_close(model_contrast(z, z_glob, z_prev, 0.5), -torch.log(near / (near + far)).mean())
    assert model_contrast(z, z, -z, 0.001) == 0 < model_contrast(z, -z, z, 0.001) < math.inf


def test_a_step_by_hand_with_batchnorm_and_dropout():
    model = training(with_three_models(noisy))
    x, y = points(12, seed=4)
    z_glob, z_prev = (features_of(frozen, model)(x).detach() for frozen in (model.received, model.previous))
    twin = training(make_client(net=noisy))
    torch.manual_seed(0)
    z = twin.net.features(x)
    cosines = [F.cosine_similarity(z, other) / 0.3 for other in (z_glob, z_prev)]
    contrast = F.cross_entropy(torch.stack(cosines, 1), torch.zeros(12, dtype=torch.int64))
    (F.cross_entropy(twin.net.classifier(z), y) + 2.0 * contrast).backward()
    torch.manual_seed(0)
    values = model.training_step((x, y), 0)
    values["loss"].backward()
    torch.testing.assert_close(values["contrast"], contrast)
    for mine, hand in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, hand.grad)
    assert equal(dict(model.net.named_buffers()), dict(twin.net.named_buffers()))


def test_frozen_models_stand_still_in_training_mode():
    model = training(with_three_models(noisy))
    frozen = {**dict(model.received.named_buffers()), **dict(model.previous.named_buffers(prefix="previous"))}
    before = {name: tensor.clone() for name, tensor in frozen.items()}
    x, y = points(12, seed=4)
    for _ in range(2):
        model.training_step((x, y), 0)["loss"].backward()
    assert equal(before, frozen)
    assert all(module.training for module in model.modules())
    assert not any(tensor.requires_grad for tensor in frozen.values())
    assert torch.equal(model.previous(x), features_of(model.previous, model)(x))
    assert torch.equal(model.previous(x), model.previous(x))
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in make_client(net=noisy).named_parameters()
    ]
    assert model.net.features[1].num_batches_tracked == 2


def test_only_the_previous_feature_extractor_stays_with_a_client_and_nothing_of_it_travels():
    spy = Spy()
    moon = fit(make_client(FIVES, net=noisy), callbacks=[spy])
    average = fit(make_client(FedAvg, net=noisy))
    assert [row["bytes/up"] for row in moon.rows] == [row["bytes/up"] for row in average.rows]
    assert [row["bytes/down"] for row in moon.rows] == [row["bytes/down"] for row in average.rows]
    features = moon.model.net.features.state_dict()
    for client, state in moon.federation.clients.items():
        previous = {f"previous.{name.replace('.', '/')}" for name in features}
        assert set(state.personal) == {"has_previous", *previous}
        assert num_bytes(state.personal) == num_bytes(features) + 1
        for name in features:
            last = spy.updates[-1][client]["weights"][f"net.features.{name}"]
            assert torch.equal(state.personal[f"previous.{name.replace('.', '/')}"], last)


def test_local_running_statistics_are_part_of_the_previous_model():
    run = fit(make_client(FIVES, net=noisy, buffers="local"))
    for state in run.federation.clients.values():
        own = state.personal["net.features.1.running_mean"]
        assert torch.equal(state.personal["previous.1/running_mean"], own)


def test_a_client_contrasts_with_the_model_of_its_own_last_round():
    spy = Contrasts()
    run = fit(make_client(FIVES), callbacks=[spy], clients_per_round=2, max_rounds=5)
    last = {}
    for cohort, contrasts, updates in zip(spy.cohorts, spy.rounds, spy.updates, strict=True):
        for client in cohort:
            assert (abs(contrasts[client] - math.log(2)) < 1e-6) == (client not in last)
        last |= updates
    # late ones were there, and each holds its last upload
    assert len(set(spy.cohorts[0])) < len(last)
    assert set(run.federation.clients) == set(last)
    for client, update in last.items():
        previous = run.federation.clients[client].personal["previous.0/weight"]
        assert torch.equal(previous, update["weights"]["net.features.0.weight"])


def test_evaluation_leaves_the_previous_model_alone():
    settings = {"net": noisy}
    before, both = (fit(make_client(FIVES, **settings), evaluate=when) for when in ("before", "both"))
    for client, state in before.federation.clients.items():
        assert equal(state.personal, both.federation.clients[client].personal)
    assert equal(before.weights, both.weights)


def test_features_that_are_zero_are_no_nan():
    def dead(input_shape, num_classes):
        net = Net(nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, num_classes))
        nn.init.constant_(net.features[0].bias, -1000.0)
        return net

    model = training(make_client(FIVES, net=dead))
    values = model.training_step(points(6, seed=0), 0)
    values["loss"].backward()
    assert values["contrast"].item() == pytest.approx(math.log(2))
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_batches_of_one_are_trained_on():
    run = fit(make_client(FIVES), blobs(8, 8, batch_size=1), max_rounds=2)
    assert run.rows[-1]["clients"] == 2
    assert abs(run.rows[1]["train/contrast"] - math.log(2)) > 1e-4


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("64-true", torch.float64)])
def test_it_trains_in_other_precisions(precision, dtype):
    run = fit(make_client(FIVES, net=noisy), precision=precision, max_rounds=2)
    assert run.rows[0]["train/contrast"] == pytest.approx(math.log(2), rel=1e-2)
    assert run.rows[1]["clients"] == 4
    assert run.federation.clients[0].personal["previous.0/weight"].dtype == dtype


def test_any_net_of_two_parts_will_do():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(2, HIDDEN, batch_first=True)

        def forward(self, x):
            return self.cell(x.view(len(x), -1, 2))[0][:, -1]

    net = with_three_models(lambda shape, classes: Net(Recurrent(), nn.Linear(HIDDEN, classes)))
    x, _ = points(4, seed=0)
    torch.testing.assert_close(net.previous(x), features_of(net.previous, net)(x))


def test_it_is_loaded_from_a_checkpoint_as_a_client(tmp_path):
    run = fit(make_client(FIVES), root=tmp_path)
    client = load_client(MOON, run.last, client=1)
    personal = run.federation.clients[1].personal
    assert torch.equal(client.state_dict()["previous.0/weight"], personal["previous.0/weight"])
    assert client.has_previous and client.mu == 5.0


@pytest.mark.parametrize(("setting", "value"), [("mu", -1), ("tau", 0), ("tau", -0.5)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(partial(MOON, **{setting: value}))
