"""Sums at sites: what the server gets, who may drop out, and what a bad site can do."""

from functools import partial

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import ALL, deploy, grid_of, rewrite
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import NETS, Pause, Spy, equal, fit, make_client, noisy
from pfl_lightning.flower import client_app, link
from pfl_lightning.flower.wire import names, unpack
from pfl_lightning.methods import Ditto, FedAvg, FedBN, FedClassAvg, FedDBE, FedDyn, FedPer
from pfl_lightning.methods.scaffold import SCAFFOLD, ControlVariates
from pfl_lightning.privacy import DPAverage, SecureSum
from pfl_lightning.selection import Selection
from sweeps import swept

FOUR = {11 + client: {"clients": str(client), "allow": ALL} for client in range(4)}
"""Four sites with a client each: node 11 has client 0."""
TWO = {11: {"clients": "0 2", "allow": ALL}, 12: {"clients": "1 3", "allow": ALL}}
OFFER, SHARE, TRAIN, REVEAL = "query.offer", "query.share", "train", "query.reveal"


def deployed(
    tmp_path, make=make_client, nodes=FOUR, aggregator=None, watch=lambda *told: None, as_simulated=True, **settings
):
    """A deployment, and its grid; clients train by the simulation's seeds, so that the two can be compared."""
    settings = {"secure_sum": SecureSum(), **settings}
    at_sites = {name: value for name, value in settings.items() if name in ("secure_sum", "evaluate")}
    serving = settings.pop("serving", None)
    makes = {"aggregator": aggregator or (lambda: None), "as_simulated": as_simulated}
    grid = grid_of(make, tmp_path, nodes=nodes, **makes, **at_sites)
    grid.spoil = partial(watch, grid)
    own = aggregator() if aggregator else None
    return deploy(grid, make, aggregator=own, serving=serving, **settings), grid


METHODS = {
    "FedAvg": (make_client, None),
    "FedBN": (partial(make_client, FedBN, net=noisy), None),
    "SCAFFOLD": (partial(make_client, ControlVariates), SCAFFOLD),
    "FedDyn": (partial(make_client, FedDyn), None),
    "FedDBE": (partial(make_client, FedDBE), None),
    "Ditto": (partial(make_client, Ditto), None),
    "networks": (partial(make_client, FedClassAvg, contrastive=False, net=NETS), None),
}


@pytest.mark.parametrize("nodes", [FOUR, TWO], ids=len)
@pytest.mark.parametrize("name", swept(METHODS, ("SCAFFOLD", "networks"), str))
@pytest.mark.by_default("SCAFFOLD-2")
def test_masks_change_no_bit_of_the_simulation_where_sites_have_its_seeds(name, nodes, tmp_path):
    make, aggregator = METHODS[name]
    remote, grid = deployed(tmp_path, make, nodes, aggregator)
    here = fit(make(), aggregator=aggregator() if aggregator else None, secure_sum=SecureSum())
    plain = fit(make(), aggregator=aggregator() if aggregator else None)
    assert equal(remote.weights, here.weights) and not equal(here.weights, plain.weights)
    for column in ("clients", "bytes/up", "bytes/down", "secure_sum/clipped", "train/loss", "val/acc"):
        assert [row[column] for row in remote.rows] == [row[column] for row in here.rows], column
    # nothing of the secrets is left
    assert not any(grid.memories.values())


def test_sites_train_by_seeds_that_nobody_else_knows(tmp_path):
    seeds, own_seed = [], client_app.secure_seed

    def kept():
        seeds.append(own_seed())
        return seeds[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_app, "secure_seed", kept)
        runs = [deployed(tmp_path / name, as_simulated=False)[0] for name in "ab"]
    one, other = runs
    # one of each client and round, all different: nothing that the server says decides them
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 3
    assert not equal(one.weights, other.weights)
    here = fit(make_client(), secure_sum=SecureSum())
    for run in runs:
        assert [row["clients"] for row in run.rows] == [4, 4, 4]
        assert not equal(run.weights, here.weights)
        assert run.rows[-1]["train/loss"] == pytest.approx(here.rows[-1]["train/loss"], rel=0.5)
    assert one.rows[-1]["train/loss"] < one.rows[0]["train/loss"]


def test_clients_with_another_payload_than_most_are_left_out(tmp_path):
    make = partial(make_client, FedDBE)
    # the client that has reported in no round would report alone, in a sum of its own numbers and zeros
    with pytest.warns(UserWarning, match="client 3 is left out .* another payload"):
        run, _ = deployed(tmp_path, make, watch=lost(TRAIN, 14, first=1))
    assert [row["clients"] for row in run.rows] == [3, 3, 3]


@pytest.mark.exhaustive
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(tmp_path):
    make, settings = partial(make_client, FedPer), {"secure_sum": SecureSum()}
    grid = grid_of(make, tmp_path / "sites", nodes=FOUR, as_simulated=True, **settings)
    deploy(grid, make, tmp_path, callbacks=[Pause(1)], **settings)
    run = deploy(grid, make, tmp_path, ckpt_path="last", **settings)
    assert equal(run.weights, fit(make(), **settings).weights) and len(run.rows) == 3


def test_the_server_gets_no_update_and_its_callbacks_see_one_mean(tmp_path):
    sent, spy = {}, Spy()

    def watch(grid, node, kind, content):
        sent.setdefault(kind, []).append({name: unpack(content, name) for name in names(content)})

    deployed(tmp_path, watch=watch, callbacks=[spy], max_rounds=1)
    assert len(sent[TRAIN]) == 4 and all(
        set(name.split("/")[1] for name in own) == {"answer", "masked"} for own in sent[TRAIN]
    )
    vectors = [own[name]["vector"] for own in sent[TRAIN] for name in own if name.endswith("masked")]
    for vector in vectors:
        # numbers of this size are masks: updates' are below 8 times 2^16
        assert float((vector.abs() > 2**26).float().mean()) > 0.8
    for updates in spy.updates:
        first, *others = (update["weights"] for update in updates.values())
        assert all(equal(first, other) for other in others)


@pytest.mark.exhaustive
def test_bytes_are_those_of_the_messages(tmp_path):
    taken = {"up": 0}

    def watch(grid, node, kind, content):
        if kind in (OFFER, SHARE, TRAIN, REVEAL):
            for name in names(content):
                if not name.endswith("answer"):
                    taken["up"] += sum(part.nbytes for part in unpack(content, name).values())

    run, _ = deployed(tmp_path, watch=watch)
    assert sum(row["bytes/up"] for row in run.rows) == taken["up"]


def leaving(after, nodes=(14,), rounds=1):
    """Has sites go away when they have answered so many messages of a kind."""
    seen = []

    def watch(grid, node, kind, content):
        if node in nodes and kind == after:
            seen.append(node)
            if len([one for one in seen if one == node]) <= rounds:
                grid.silent.add(node) if after == TRAIN else grid.away.add(node)

    return watch


def lost(phase, *nodes, first=99):
    """Loses the first answers of a kind that some sites give."""
    told = []

    def watch(grid, node, kind, content):
        if node in nodes and kind == phase and len(told) < first:
            told.append(node)
            for name in list(content):
                del content[name]

    return watch


@pytest.mark.parametrize("phase", [OFFER, SHARE, TRAIN, REVEAL])
@pytest.mark.by_default("query.reveal")
def test_a_client_may_drop_out_at_any_step(phase, tmp_path):
    with pytest.warns(UserWarning, match="client 3"):
        run, _ = deployed(tmp_path, watch=lost(phase, 14), max_rounds=1)
    # who has sent a vector counts, whether or not it is still there at the end
    clients = 4 if phase == REVEAL else 3
    assert [row["clients"] for row in run.rows] == [clients]
    plain = fit(make_client(), max_rounds=1, **({} if clients == 4 else {"cohort": Without(3)}))
    assert near(run, plain)


def near(run, other):
    return max(float((run.weights[name] - other.weights[name]).abs().max()) for name in other.weights) < 1e-4


@pytest.mark.parametrize("phase", [OFFER, SHARE, REVEAL])
@pytest.mark.by_default("query.reveal")
def test_a_site_that_is_gone_is_not_waited_for_for_ever(phase, tmp_path):
    def watch(grid, node, kind, content):
        if node == 14 and kind == phase:
            grid.away.add(node)

    run, _ = deployed(tmp_path, watch=watch, max_rounds=1, serving={"timeout": 0.5})
    assert [row["clients"] for row in run.rows] == [4 if phase == REVEAL else 3]
    assert run.rows[0]["clients_absent"] == (0 if phase == REVEAL else 1)


class Without(Selection):
    """All clients but one."""

    def __init__(self, client):
        super().__init__()
        self.client = client

    def choose(self, start):
        return [client for client in start.clients if client != self.client]


def test_a_site_that_restarts_has_forgotten_its_secrets_and_is_left_out(tmp_path):
    def watch(grid, node, kind, content):
        if node == 13 and kind == SHARE:
            grid.memories[node].clear()

    with pytest.warns(UserWarning, match="client 2 is left out .* has forgotten the round"):
        run, _ = deployed(tmp_path, watch=watch)
    assert [row["clients_refused"] for row in run.rows] == [1, 1, 1]
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]


@pytest.mark.parametrize("phase", [OFFER, SHARE, TRAIN])
@pytest.mark.by_default("query.offer")
def test_without_enough_sites_a_round_has_no_sum_and_the_run_goes_on(phase, tmp_path):
    with pytest.warns(UserWarning, match="round 1 has no sum: 2 of 4 clients are left"):
        run, _ = deployed(tmp_path, watch=lost(phase, 13, 14, first=2))
    assert [row["clients"] for row in run.rows] == [0, 4, 4]


def wrong_vector(length):
    def watch(grid, node, kind, content):
        if node == 12 and kind == TRAIN:
            rewrite(
                content,
                lambda records: records.update({"1/masked": {"vector": torch.zeros(length, dtype=torch.int32)}}),
            )

    return watch


@pytest.mark.parametrize(("length", "said"), [(3, r"int32 \[3\] and should be int32 \[54\]"), (55, "220 bytes")])
def test_a_vector_of_another_length_leaves_its_site_out(length, said, tmp_path):
    with pytest.warns(UserWarning, match=f"client 1 is left out .* {said}"):
        run, _ = deployed(tmp_path, watch=wrong_vector(length), max_rounds=1)
    assert run.rows[0]["clients"] == 3
    assert near(run, fit(make_client(), max_rounds=1, cohort=Without(1)))


BAD = {
    "a made-up vector": (TRAIN, lambda r: r["1/masked"]["vector"].random_(), "the sum is none of updates"),
    "a wrong share": (REVEAL, lambda r: r["1/shares"][2].fill_(7), "shares of client 2 don't give its secret back"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_site_can_spoil_a_sum_and_not_unseen(bad, tmp_path):
    kind_, change, said = BAD[bad]

    def watch(grid, node, kind, content):
        if node == 12 and kind == kind_:
            rewrite(content, change)

    make = make_client
    with pytest.warns(UserWarning, match=f"round 1 has no sum: .*{said}"):
        run, _ = deployed(tmp_path, watch=watch)
    assert equal(run.weights, make().state_dict()) and len(run.rows) == 3


@pytest.mark.parametrize(
    ("kind_", "change"),
    [
        (OFFER, lambda r: r["1/offer"].update(keys=torch.zeros(3, dtype=torch.uint8))),
        (OFFER, lambda r: r["1/offer"].update(keys=torch.zeros(64, dtype=torch.uint8))),
        (SHARE, lambda r: r["1/sealed"].pop(2)),
        (SHARE, lambda r: r.update({"1/sealed": 3})),
        (SHARE, lambda r: r["1/sealed"][3].fill_(1)),
        (REVEAL, lambda r: r["1/shares"].pop(2)),
        (REVEAL, lambda r: r.pop("1/shares")),
    ],
)
@pytest.mark.by_default(but=["query.share-<lambda>1", "query.reveal-<lambda>0"])
def test_what_a_bad_site_sends_in_the_other_steps_never_ends_the_run(kind_, change, tmp_path):
    def watch(grid, node, kind, content):
        if node == 12 and kind == kind_:
            rewrite(content, change)

    with pytest.warns(UserWarning):
        run, _ = deployed(tmp_path, watch=watch)
    assert len(run.rows) == 3


@pytest.fixture
def takes_any_site(monkeypatch):
    """A server that cheats: it takes sites with other settings than its own."""
    monkeypatch.setattr(link, "check_settings", lambda *told: None)


@pytest.mark.usefixtures("takes_any_site")
@pytest.mark.parametrize("at_sites", [None, SecureSum(bits=20), SecureSum(range=4)])
@pytest.mark.by_default("None")
def test_a_site_that_sums_otherwise_sends_nothing(at_sites, tmp_path):
    grid = grid_of(make_client, tmp_path, nodes=FOUR, secure_sum=at_sites)
    with pytest.warns(UserWarning, match="trainer.secure_sum"):
        run = deploy(grid, make_client, secure_sum=SecureSum())
    assert equal(run.weights, make_client().state_dict())


@pytest.mark.usefixtures("takes_any_site")
def test_a_site_that_sums_gives_no_server_its_update(tmp_path):
    grid = grid_of(make_client, tmp_path, nodes=FOUR, secure_sum=SecureSum())
    with pytest.warns(UserWarning, match="the server asks for its update"):
        run = deploy(grid, make_client)
    assert [row["clients"] for row in run.rows] == [0, 0, 0]


class Diverging(FedAvg):
    """A client whose second round ends in NaN."""

    def upload(self, data):
        update = super().upload(data)
        if self.client_id == 1 and self.round == 1:
            update["weights"]["net.classifier.bias"] = torch.full_like(
                update["weights"]["net.classifier.bias"], torch.nan
            )
        return update


def test_a_client_that_diverges_drops_out(tmp_path):
    make = partial(make_client, Diverging)
    with pytest.warns(UserWarning, match="clients 1"):
        run, _ = deployed(tmp_path, make)
    with pytest.warns(UserWarning, match="clients 1"):
        here = fit(make(), secure_sum=SecureSum())
    assert [row["clients_diverged"] for row in run.rows] == [0, 1, 0]
    assert equal(run.weights, here.weights)


def test_a_norm_that_the_server_cannot_see_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="max-norm=3"):
        deployed(tmp_path, serving={"max_norm": 3.0})


def test_clients_add_the_noise_that_their_own_configuration_says(tmp_path):
    def aggregator(noise):
        return DPAverage(noise_multiplier=1.0, clip=0.5, noise=noise)

    settings = {"secure_sum": SecureSum(bits=24)}
    seeded, _ = deployed(tmp_path / "a", aggregator=partial(aggregator, "seeded"), **settings)
    here = fit(make_client(), aggregator=aggregator("seeded"), **settings)
    assert equal(seeded.weights, here.weights)
    secure, _ = deployed(tmp_path / "b", aggregator=partial(aggregator, None), **settings)
    assert not equal(secure.weights, here.weights)
    assert secure.rows[-1]["privacy/epsilon"] == here.rows[-1]["privacy/epsilon"]
    assert secure.rows[-1]["privacy/noise"] == "secure" and "privacy/assumes" in secure.rows[-1]


@pytest.mark.usefixtures("takes_any_site")
def test_a_server_that_asks_for_less_noise_gets_nothing(tmp_path):
    settings = {"secure_sum": SecureSum(bits=24)}
    at_sites = partial(DPAverage, noise_multiplier=1.0, clip=0.5)
    grid = grid_of(make_client, tmp_path, nodes=FOUR, aggregator=at_sites, **settings)
    with pytest.warns(UserWarning, match="the server sums by other settings"):
        run = deploy(grid, make_client, aggregator=DPAverage(noise_multiplier=0.1, clip=0.5), **settings)
    assert equal(run.weights, make_client().state_dict())
