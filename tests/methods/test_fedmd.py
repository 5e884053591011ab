import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, FEATURES, NETS, Blobs, Pause, Spy, blobs, equal, fit, make_client, points, same_end
from pfl_lightning import Server
from pfl_lightning.aggregators import Consensus
from pfl_lightning.data import Samples
from pfl_lightning.methods import FedMD, Local

SHORT = partial(FedMD, initial_epochs=2, distill_batch_size=4)


class Alone(Blobs):
    def server_data(self):
        return None


class Fewer(Blobs):
    def server_data(self):
        return Samples(*points(6, seed=1))


def server():
    aggregator, client, data = Consensus(), make_client(SHORT), blobs()
    data.setup()
    aggregator.setup(Server(4, {}, client, data, seed=0))
    return aggregator


def sent(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"predictions": torch.randn(9, CLASSES, dtype=torch.float64, generator=generator)}


def test_the_consensus_is_the_plain_mean_of_the_round():
    ours = server()
    assert set(ours.download(0)) == {"public"}
    for clients in ((0, 1, 3), (2, 3)):
        updates = {k: sent(k) for k in clients}
        log = ours.aggregate(updates, 0)
        stack = torch.stack([update["predictions"] for update in updates.values()])
        mean = stack.sum(0) / len(clients)
        torch.testing.assert_close(ours.download(1)["targets"], mean)
        assert log == {"disagreement": pytest.approx(float((stack - mean).abs().mean()))}
    before = copy.deepcopy(ours.state)
    assert ours.aggregate({}, 2) == {} and equal(ours.state, before)


def test_the_first_phase_is_the_absolute_distance_of_logits():
    client, ours = make_client(SHORT).double(), server()
    ours.aggregate({k: sent(k) for k in range(2)}, 0)
    client.on_download(ours.download(0), None)
    phase = client.local_phases()[0]
    client.phase = phase
    x, consensus = phase.data.x, phase.data.y
    loss = client.training_step((x, consensus), 0)["loss"]
    z = client.net(x)
    torch.testing.assert_close(loss, (z - consensus).abs().sum() / (9 * CLASSES))
    # each sample and class pulls alike, however far it is
    bias = torch.autograd.grad(loss, client.net.classifier.bias)[0]
    torch.testing.assert_close(bias, (z - consensus).sign().sum(0) / (9 * CLASSES))


def test_private_training_is_longer_in_a_clients_first_round():
    client, ours = make_client(SHORT), server()
    client.on_download(ours.download(0), None)
    assert [(p.name, p.epochs) for p in client.local_phases()] == [("train", 2)]
    ours.aggregate({1: sent(1)}, 0)
    client.on_download(ours.download(0), None)
    assert [(p.name, p.epochs) for p in client.local_phases()] == [("distill", 1), ("train", 2)]
    client.begun.fill_(True)
    assert [(p.name, p.epochs) for p in client.local_phases()] == [("distill", 1), ("train", None)]


def test_answers_are_of_the_trained_model_and_nothing_else_goes_up():
    spy = Spy()
    run = fit(make_client(SHORT), callbacks=[spy], max_rounds=2)
    assert set(spy.updates[1][0]) == {"predictions"}
    module = make_client(SHORT)
    personal = run.federation.clients[0].personal
    assert personal["begun"]
    module.receive(personal, run.federation.aggregator.download(0), None)
    torch.testing.assert_close(spy.updates[1][0]["predictions"], module.net(blobs().server_data().x).detach())


def test_without_distillation_it_is_local_bit_for_bit():
    off = partial(FedMD, initial_epochs=None, distill_epochs=0)
    ours, local, taught = (
        fit(make_client(method)).federation.clients for method in (off, Local, partial(FedMD, initial_epochs=None))
    )
    assert all(equal({n: ours[k].personal[n] for n in local[k].personal}, local[k].personal) for k in local)
    assert not equal(ours[0].personal, taught[0].personal)


def test_different_nets_agree():
    run = fit(make_client(SHORT, net=NETS), blobs(30, 40, 20, 30), max_rounds=5)
    far = [row["server/disagreement"] for row in run.rows]
    assert run.rows[-1]["clients_diverged"] == 0 and far[-1] < far[0]


def test_public_samples_travel_to_a_client_once_however_late_it_comes(tmp_path):
    inputs, answers = 4 * 9 * FEATURES, 4 * 9 * CLASSES
    spy, settings = Spy(), {"clients_per_round": 2, "max_rounds": 5}
    run = fit(make_client(SHORT), callbacks=[spy], **settings)
    met, expected = set(), []
    for round, cohort in enumerate(spy.cohorts):
        expected.append(inputs * len(set(cohort) - met) + answers * len(cohort) * (round > 0))
        met |= set(cohort)
    assert [row["bytes/down"] for row in run.rows] == expected
    assert len(met) > 2 and 2 * answers in expected
    fit(make_client(SHORT), root=tmp_path, callbacks=[Pause(2)], **settings)
    assert same_end(run, fit(make_client(SHORT), root=tmp_path, ckpt_path="last", **settings))


def test_a_client_that_diverged_is_sent_public_samples_again():
    class Diverging(FedMD):
        def training_step(self, batch, batch_idx):
            values = super().training_step(batch, batch_idx)
            return values | {"loss": values["loss"] * (float("nan") if self.round == 0 and self.client_id == 1 else 1)}

    run = fit(make_client(partial(Diverging, initial_epochs=2, distill_epochs=0)), max_rounds=2)
    assert run.rows[0]["clients_diverged"] == 1
    assert run.rows[1]["bytes/down"] == 4 * 9 * FEATURES + 4 * 4 * 9 * CLASSES


def test_clients_of_one_class_batches_of_one_and_one_client_alone_end_finite():
    for data in (blobs(20, 20, 30, by_class=True, batch_size=1), blobs(30), blobs(3, 20)):
        run = fit(make_client(SHORT), data)
        assert all(row["clients_diverged"] == 0 for row in run.rows)


def test_a_server_without_samples_or_with_others_than_before_is_refused(tmp_path):
    with pytest.raises(
        MisconfigurationException, match=r"Consensus teaches by .* Alone gives it none; set data\.public"
    ):
        fit(make_client(SHORT), blobs(data=Alone))
    last = fit(make_client(SHORT), root=tmp_path, max_rounds=1).last
    with pytest.raises(MisconfigurationException, match="answers to 9 public samples, and there are 6"):
        fit(make_client(SHORT), blobs(data=Fewer), ckpt_path=last, resume_changed=True, max_rounds=2)


@pytest.mark.parametrize(("name", "value"), [("initial_epochs", 0), ("distill_epochs", -1), ("distill_batch_size", 1)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value}\b"):
        make_client(partial(FedMD, **{name: value}))
