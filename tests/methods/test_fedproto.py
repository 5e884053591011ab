import re

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import HIDDEN, Spy, blobs, equal, fit, make_client, near, noisy, plain, points
from pfl_lightning.aggregators import ClassMeans
from pfl_lightning.methods import Local
from pfl_lightning.methods.fedproto import FedProto
from pfl_lightning.nets import Net


def models(run):
    return {client: state.personal for client, state in sorted(run.federation.clients.items())}


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.parametrize("settings", [{}, {"clients_per_round": 0.5}])
def test_without_its_term_it_trains_as_local_bit_for_bit(net, settings):
    proto = fit(make_client(FedProto, align_lambda=0.0, net=net, predict="head"), **settings)
    local = fit(make_client(Local, net=net), **settings)
    assert equal(models(proto), models(local))
    assert near([row["val/loss"] for row in proto.rows], [row["val/loss"] for row in local.rows])


def test_its_term_changes_the_models_as_soon_as_there_are_prototypes():
    for rounds, same in ((1, True), (2, False)):
        assert equal(*(models(fit(make_client(m), max_rounds=rounds)) for m in (FedProto, Local))) is same


def test_prototypes_and_counts_travel_and_no_weights():
    spy = Spy()
    run = fit(make_client(FedProto), blobs(40, 60, by_class=True), callbacks=[spy])
    assert all(set(update) == {"prototypes", "class_counts"} for update in spy.updates[0].values())
    prototype, counts = 4 * HIDDEN, 3 * 8
    assert {row["bytes/up"] for row in run.rows} == {3 * prototype + 2 * counts}
    assert [row["bytes/down"] for row in run.rows] == [0, 2 * 3 * prototype, 2 * 3 * prototype]
    plainly = fit(make_client(FedProto), blobs(40, 60, by_class=True), aggregator=ClassMeans(weighted=False))
    assert {row["bytes/up"] for row in plainly.rows} == {3 * prototype}


def test_clients_count_by_their_samples_unless_told_otherwise():
    spy = Spy()
    run = fit(make_client(FedProto), callbacks=[spy])
    sent, counts = spy.updates[-1], run.data.counts.double()
    for c, prototype in run.federation.aggregator.download(0)["prototypes"].items():
        shares = counts[:, c] / counts[:, c].sum()
        torch.testing.assert_close(prototype, sum(shares[k].float() * u["prototypes"][c] for k, u in sent.items()))


def test_the_nearest_prototype_is_predicted():
    client = make_client(FedProto).eval()
    x, _ = points(9, seed=5)
    features = client.net.features(x)
    prototypes = {0: features[0].detach(), 2: features[4].detach()}
    client.prototypes.take(prototypes)
    logits = client(x)
    for c, prototype in prototypes.items():
        torch.testing.assert_close(logits[:, c], -(features - prototype).square().sum(1))
    assert (logits[:, 1] == -torch.inf).all()
    assert logits[0].argmax() == 0 and logits[4].argmax() == 2
    assert not torch.isnan(logits.softmax(1)).any()


def test_small_distances_between_long_vectors_are_told_apart():
    client = make_client(FedProto, net=lambda shape, classes: plain((HIDDEN,), classes)).eval()
    client.net.features = torch.nn.Identity()
    x = 1000 + torch.rand(40, HIDDEN)
    client.prototypes.take({0: x[0], 1: x[1]})
    assert client(x)[[0, 1], [0, 1]].tolist() == [0, 0]


@pytest.mark.parametrize("predict", ["proto", "head"])
def test_the_classifier_predicts_where_it_is_told_to_and_before_there_are_prototypes(predict):
    client = make_client(FedProto, predict=predict).eval()
    x, _ = points(9, seed=5)
    assert torch.equal(client(x), client.net(x))
    client.prototypes.take({0: torch.zeros(HIDDEN)})
    assert torch.equal(client(x), client.net(x)) is (predict == "head")


def test_evaluation_looks_at_the_server_s_prototypes():
    run = fit(make_client(FedProto))
    part, received = run.data.part(1, "test"), run.federation.aggregator.download(1)
    run.model.receive(run.federation.clients[1].personal, received, None)
    features = run.model.eval().net.features(part.x)
    distances = torch.stack([(features - received["prototypes"][c]).norm(dim=1) for c in range(3)], 1)
    assert run.logger.clients[1]["test/acc"] == float((distances.argmin(1) == part.y).float().mean())


def test_a_negative_weight_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=re.escape("model.align_lambda=-1")):
        make_client(FedProto, align_lambda=-1)


def deeper(input_shape, num_classes):
    net = plain(input_shape, num_classes)
    net.features.append(torch.nn.Linear(HIDDEN, HIDDEN))
    return net


def wider(input_shape, num_classes):
    return Net(torch.nn.Linear(input_shape[0], HIDDEN + 2), torch.nn.Linear(HIDDEN + 2, num_classes))


def test_clients_may_have_different_networks_with_features_of_one_width():
    run = fit(make_client(FedProto, net=[plain, deeper]))
    assert [len(model) for model in models(run).values()] == [4, 6, 4, 6]
    with pytest.raises(MisconfigurationException, match="prototypes of widths 5, 7, which have no mean"):
        fit(make_client(FedProto, net=[plain, wider]))
