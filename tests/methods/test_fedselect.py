import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import CONFIGS
from federations import FEATURES, Spy, blobs, drawn_update, fit, make_client, noisy, plain, points, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import MaskedAverage
from pfl_lightning.client import Phase
from pfl_lightning.methods import FedAvg, FedSelect
from pfl_lightning.methods.fedcac import packed
from pfl_lightning.methods.fedselect import largest

W = "features.0.weight"


class Twice(FedAvg):
    """Trains as FedSelect without personal entries: a pass that changes nothing, and another."""

    def local_phases(self):
        return [Phase("idle", epochs=1), Phase("shared", epochs=1)]

    def adjust_gradients(self, gradients):
        return {name: 0 * g for name, g in gradients.items()} if self.phase.name == "idle" else gradients


def test_while_nothing_is_personal_it_is_a_plain_average_of_double_passes():
    select = fit(make_client(FedSelect, every=9, optimizer_lifetime="run"))
    average = fit(make_client(Twice, optimizer_lifetime="run"), aggregator=WeightedAverage(weighting="uniform"))
    for name, tensor in average.weights.items():
        torch.testing.assert_close(select.weights[name], tensor)


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_the_entries_of_largest_change_are_taken_by_the_official_rule(rate):
    change = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    candidates = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    ordered = sorted(change[candidates].tolist())
    cutoff = ordered[round((1 - rate) * len(ordered))]
    assert torch.equal(largest(change, candidates, rate), change >= cutoff)
    # a tie takes all, and so does a tensor that hasn't moved
    assert largest(torch.zeros(4), torch.ones(4, dtype=torch.bool), rate).all()
    assert int(largest(torch.arange(3.0), torch.ones(3, dtype=torch.bool), 0.1).sum()) == 1


def after(rounds, **settings):
    spy = Spy()
    run = fit(make_client(FedSelect, every=1, **settings), max_rounds=rounds, callbacks=[spy])
    return run, spy, {client: state.personal for client, state in sorted(run.federation.clients.items())}


def test_masks_grow_from_the_second_round_on_and_biases_stay_shared():
    for rounds, share in ((1, 0), (2, 8 / 30), (3, 14 / 30)):
        _, _, personal = after(rounds)
        for own in personal.values():
            assert float(own[f"mask.{W.replace('.', '/')}"].float().mean()) == pytest.approx(share, abs=0.01)
            assert not own["mask.features/0/bias"].any()
    _, _, personal = after(6, bound=0.4)
    # one more step beyond the bound, and no further
    assert float(personal[0][f"mask.{W.replace('.', '/')}"].float().mean()) == pytest.approx(14 / 30, abs=0.01)


def test_with_the_bound_at_1_a_tensor_becomes_personal_as_a_whole_and_stays_so():
    run, _, personal = after(4, bound=1, rate=1.0)
    for own in personal.values():
        assert own[f"mask.{W.replace('.', '/')}"].all() and not own["mask.features/0/bias"].any()
    assert run.rows[-1]["clients_diverged"] == 0


def test_new_personal_entries_begin_at_the_mean_and_stay_apart_from_then_on():
    run, spy, personal = after(2)
    name = W.replace(".", "/")
    mask, own = personal[0][f"mask.{name}"], personal[0][f"own.{name}"]
    assert torch.equal(mask, personal[0][f"fresh.{name}"]) and mask.any()
    run.model.receive(personal[0], run.federation.aggregator.download(0), None)
    received = run.weights[f"net.{W}"]
    assert torch.equal(run.model.entries()[W], received) and not torch.equal(own[mask], received[mask])
    # the round sent its mask as it was in training
    assert not any(bits.any() for bits in spy.updates[1][0]["masks"].values())
    run, spy, personal = after(3)
    was = mask
    run.model.receive(personal[0], run.federation.aggregator.download(0), None)
    kept = was & ~personal[0][f"fresh.{name}"]
    assert torch.equal(run.model.entries()[W][kept], personal[0][f"own.{name}"][kept])
    assert torch.equal(spy.updates[2][0]["masks"][W], packed(was))


def test_each_phase_moves_its_own_entries_with_any_optimizer():
    model = make_client(FedSelect).double()
    mask = torch.rand(5, FEATURES, generator=torch.Generator().manual_seed(0)) < 0.5
    model.mask.tensors()[W].copy_(mask)
    x, y = points(9, seed=1)
    model.training_step((x.double(), y), 0)["loss"].backward()
    own, net = model.own[W.replace(".", "/")].grad, model.net.features[0].weight.grad
    assert not own[~mask].any() and not net[mask].any() and own[mask].all() and net[~mask].all()
    alone = make_client().double()
    alone.training_step((x.double(), y), 0)["loss"].backward()
    torch.testing.assert_close(own + net, alone.net.features[0].weight.grad)


def test_the_server_averages_over_the_clients_that_share_an_entry():
    model = make_client(FedSelect, net=plain)
    server = set_up(MaskedAverage(), model)
    x = dict(server.state["weights"])
    updates = {client: drawn_update(model, client, size=10 * (client + 1)) for client in (0, 2, 3)}
    masks = {}
    for client, update in updates.items():
        generator = torch.Generator().manual_seed(client)
        masks[client] = {name: torch.rand(t.shape, generator=generator) < 0.6 for name, t in update["weights"].items()}
        update["masks"] = {name.removeprefix("net."): packed(mask) for name, mask in masks[client].items()}
    logs = server.aggregate(updates, 0)
    for name, start in x.items():
        for at in range(start.numel()):
            holders = [k for k in updates if not masks[k][name].flatten()[at]]
            values = [float(updates[k]["weights"][name].flatten()[at]) for k in holders]
            expected = sum(values) / len(values) if values else float(start.flatten()[at])
            assert float(server.state["weights"][name].flatten()[at]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    personal = torch.cat([mask.flatten() for own in masks.values() for mask in own.values()])
    assert logs["personal"] == pytest.approx(float(personal.float().mean()))
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_the_first_mean_of_float64_uploads_is_float64():
    model = make_client(FedSelect, net=plain)
    server = set_up(MaskedAverage(), model)
    updates = {client: drawn_update(model.double(), client) for client in (0, 2, 3)}
    for update in updates.values():
        none = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in update["weights"].items()}
        update["masks"] = {name.removeprefix("net."): packed(mask) for name, mask in none.items()}
    server.aggregate(updates, 0)
    for name, mean in server.state["weights"].items():
        expected = sum(update["weights"][name] for update in updates.values()) / 3
        torch.testing.assert_close(mean, expected, rtol=1e-14, atol=1e-14)


def test_running_statistics_stay_and_clients_differ():
    run, spy, _ = after(3, net=noisy)
    assert not any("running" in name for name in spy.updates[0][0]["weights"])
    assert 0 < run.rows[-1]["server/personal"] < 1
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(FedSelect, every=1), data).rows[-1]["clients_diverged"] == 0


def test_a_round_is_two_epochs_and_thirty_with_the_official_code_s_alternations():
    paths = (CONFIGS / "methods" / "fedselect.yaml", CONFIGS / "paper" / "fedselect_official.yaml")
    usual, official = (yaml.safe_load(path.read_text())["model"]["init_args"] for path in paths)
    for settings, epochs in ((usual, 2), (usual | official, 30)):
        phases = make_client(FedSelect, **settings).local_phases()
        assert len(phases) == epochs and {phase.epochs for phase in phases} == {1}


@pytest.mark.parametrize("setting, value", [("rate", 0), ("bound", 1.1), ("every", 0), ("alternations", 0)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(FedSelect, **{setting: value})
