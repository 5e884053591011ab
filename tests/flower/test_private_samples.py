"""Differential privacy of samples, where clients are at sites."""

from collections import Counter

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from federations import Spy, equal, fit, make_client
from pfl_lightning.aggregators import FedDisco
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.flower.link import Quorum
from pfl_lightning.methods import FedPer
from pfl_lightning.privacy import DPSGD

SECURE = {"example_privacy": DPSGD(1.0, 0.5)}


@pytest.mark.parametrize("method", [None, FedPer])
@pytest.mark.by_default("None")
def test_sites_draw_noise_that_no_seed_tells(method, tmp_path):
    def make():
        return make_client(*filter(None, [method]))

    grid = grid_of(make, tmp_path, **SECURE)
    remote = deploy(grid, make, **SECURE)
    here = fit(make(), **SECURE)
    assert not equal(remote.weights, here.weights)
    # what is spent is that of the simulation
    assert remote.federation.options.example_privacy.spent == here.federation.options.example_privacy.spent
    for name in ("bytes/up", "privacy/epsilon"):
        assert [row[name] for row in remote.rows] == [row[name] for row in here.rows]
    assert {row["privacy/noise"] for row in remote.rows} == {"secure"}
    assert not equal(deploy(grid_of(make, tmp_path / "again", **SECURE), make, **SECURE).weights, remote.weights)


def test_sites_draw_secure_noise_whatever_the_server_asks(tmp_path):
    """Its configuration is the site's too, and the site has the last word."""
    seeded = {"example_privacy": DPSGD(1.0, 0.5, noise="seeded")}
    grid = grid_of(make_client, tmp_path, **seeded)
    with pytest.raises(MisconfigurationException, match=r"example_privacy\.noise=seeded .* take secure"):
        deploy(grid, make_client, **seeded)
    with pytest.raises(MisconfigurationException, match="has said within"):
        deploy(grid, make_client, **SECURE)


def test_a_target_that_sites_would_share_out_otherwise_is_refused(tmp_path):
    target = {"example_privacy": DPSGD(epsilon=8.0)}
    with pytest.raises(MisconfigurationException, match=r"example_privacy\.epsilon=8\.0 .* give noise_multiplier"):
        deploy(grid_of(make_client, tmp_path, **SECURE), make_client, **target)


def test_sites_add_noise_to_class_counts(tmp_path):
    counted, spy = {"example_privacy": DPSGD(1.0, 0.5, counts_epsilon=0.3)}, Spy()
    grid = grid_of(make_client, tmp_path, **counted)
    remote = deploy(grid, make_client, aggregator=FedDisco(), callbacks=[spy], **counted)
    here = fit(make_client(), aggregator=FedDisco(), **counted)
    assert remote.federation.options.example_privacy.spent == here.federation.options.example_privacy.spent
    sums = [int(u["class_counts"].sum()) - int(u["num_samples"]) for round in spy.updates for u in round.values()]
    assert len(sums) == 12 and any(sums)


def test_who_trains_and_does_not_answer_in_time_has_spent(tmp_path):
    grid = grid_of(make_client, tmp_path, **SECURE)
    grid.silent.add(12)
    with pytest.raises(MisconfigurationException, match="has said within"):
        deploy(grid, make_client, **SECURE)
    grid.silent.clear()
    before = grid._reply

    def silent_in_training(message):
        reply = before(message)
        return None if message.metadata.dst_node_id == 12 and message.metadata.message_type == "train" else reply

    grid._reply = silent_in_training
    here = fit(make_client(), max_rounds=1, **SECURE)
    with pytest.warns(UserWarning, match="2 of the round's clients gave nothing"):
        remote = deploy(grid, make_client, max_rounds=1, serving={"timeout": 0.5}, **SECURE)
    assert remote.federation.options.example_privacy.spent == here.federation.options.example_privacy.spent


def test_lost_rounds_of_a_deployment_count(tmp_path):
    class Ends(FederatedCallback):
        """In the third round, before there is a checkpoint of the second."""

        def on_round_start(self, trainer, federation, cohort):
            if federation.round == 2:
                raise ZeroDivisionError

    first = ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}", save_last=False)
    grid = grid_of(make_client, tmp_path / "sites", **SECURE)
    with pytest.raises(ZeroDivisionError):
        deploy(grid, make_client, tmp_path, callbacks=[Ends(), first], **SECURE)
    checkpoint = next(tmp_path.rglob("epoch=0*.ckpt"))
    remote = deploy(grid, make_client, tmp_path, ckpt_path=str(checkpoint), **SECURE)
    here = fit(make_client(), **SECURE)
    for client, (own,) in here.federation.options.example_privacy.spent.items():
        # three rounds, one that was recorded and lost, and one that had begun
        assert remote.federation.options.example_privacy.spent[client] == [own._replace(steps=own.steps // 3 * 5)]


def test_who_is_asked_twice_has_spent_twice(tmp_path):
    grid, asked, before = grid_of(make_client, tmp_path, **SECURE), Counter(), None
    before = grid._reply

    def lost_once(message):
        reply, node = before(message), message.metadata.dst_node_id
        if message.metadata.message_type != "train" or node != 12:
            return reply
        asked[node] += 1
        if asked[node] > 1:
            return reply
        grid.away.add(node)
        gone = before(message)
        grid.away.clear()
        return gone

    grid._reply = lost_once
    remote = deploy(grid, make_client, max_rounds=1, serving={"quorum": Quorum(wait_for_lost=5)}, **SECURE)
    here = fit(make_client(), max_rounds=1, **SECURE)
    for client, own in here.federation.options.example_privacy.spent.items():
        (spent,) = remote.federation.options.example_privacy.spent[client]
        assert spent.steps == own[0].steps * (2 if client in (1, 3) else 1)
