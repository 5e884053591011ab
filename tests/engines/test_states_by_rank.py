"""Clients' states that stay with their rank, and sums in place of updates."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import equal, fit, load, make_client, near, noisy, read_csv, same_end, untimed
from pfl_lightning.aggregators import FedReMa
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.compression import TopK
from pfl_lightning.engines.base import ClientState, Outcome
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.engines.sharded import averaged
from pfl_lightning.methods import APFL, ControlVariates, Ditto, FedAvg, FedPer


def on(ranks, make, root, **settings):
    """The checkpoint and the rounds of a run on some ranks, each with its own clients' states."""
    if ranks > 1:
        settings |= {"devices": ranks, "strategy": ClientParallel(start_method="fork")}
    fit(make(), root=root, **{"client_states": "rank", **settings})
    (folder,) = root.glob("*/*")
    rounds = [{k: v for k, v in row.items() if k != "run"} for row in untimed(read_csv(folder / "rounds.csv"))]
    return load(folder / "checkpoints" / "last.ckpt")["federation"], rounds


@pytest.mark.parametrize("method", [FedPer, ControlVariates, Ditto, APFL])
@pytest.mark.by_default("FedPer")
def test_ranks_with_own_states_end_where_one_rank_does(method, tmp_path):
    make = partial(make_client, method, net=noisy, optimizer_lifetime="run")
    one, three = (on(ranks, make, tmp_path / str(ranks), clients_per_round=0.75) for ranks in (1, 3))
    assert near(one[0], three[0])
    # every client of the last cohort has a state in the checkpoint, which one process wrote
    assert one[0]["clients"] and all(state.get("kept") is None for state in three[0]["clients"].values())
    assert [row["cohort"] for row in one[1]] == [row["cohort"] for row in three[1]]
    assert all(abs(float(a["val/loss"]) - float(b["val/loss"])) < 1e-4 for a, b in zip(one[1], three[1], strict=True))


@pytest.mark.exhaustive
def test_a_server_that_looks_at_updates_gets_each_and_the_same_bits(tmp_path):
    one, three = (on(ranks, make_client, tmp_path / str(ranks), aggregator=FedReMa()) for ranks in (1, 3))
    assert equal(one, three)


@pytest.mark.exhaustive
def test_blocks_of_updates_have_the_same_mean(monkeypatch, tmp_path):
    whole = on(2, make_client, tmp_path / "whole")
    monkeypatch.setattr("pfl_lightning.engines.sharded.TOGETHER", 1)
    assert near(whole[0], on(2, make_client, tmp_path / "blocks")[0])


@pytest.mark.exhaustive
def test_ranks_resume_with_their_clients_states(tmp_path):
    make = partial(make_client, Ditto, net=noisy, optimizer_lifetime="run")
    whole = on(2, make, tmp_path / "whole")
    on(3, make, tmp_path / "part", max_rounds=1)
    assert near(whole[0], on(2, make, tmp_path / "part", ckpt_path="last")[0])


class Ends(FederatedCallback):
    """Ends a run after two rounds, and notes at its end which clients' residuals a rank holds."""

    def __init__(self, folder, rounds):
        self.folder, self.rounds = folder, rounds

    def on_train_epoch_end(self, trainer, federation):
        trainer.should_stop = federation.round == self.rounds

    def on_fit_end(self, trainer, federation):
        held = [client for client, state in sorted(federation.clients.items()) if state.residual]
        (self.folder / f"rank {trainer.global_rank}").write_text(" ".join(map(str, held)))


@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.exhaustive
def test_residuals_stay_with_their_rank_and_a_resumed_run_is_the_same(method, tmp_path):
    make = partial(make_client, method)
    settings = {"compression": TopK(0.2), "max_rounds": 5}
    whole = on(2, make, tmp_path / "whole", **settings)
    on(2, make, tmp_path / "part", **settings, callbacks=[Ends(tmp_path, 2)])
    resumed = on(2, make, tmp_path / "part", **settings, ckpt_path="last", callbacks=[Ends(tmp_path, 5)])
    assert equal(whole, resumed)
    # of the clients that it trains, and of no other rank's
    assert [(tmp_path / f"rank {rank}").read_text() for rank in (0, 1)] == ["0 2", "1 3"]
    # all of them are in the checkpoint, as of one rank
    assert equal(whole[0]["clients"], on(1, make, tmp_path / "one", **settings)[0]["clients"])


class Reads(FederatedCallback):
    """Notes whether each client's update is its own."""

    def __init__(self, folder, says):
        self.folder, self.reads_updates = folder, says

    def on_client_fit_end(self, trainer, federation, client, outcome):
        weight = next(iter(outcome.update["weights"].values())).flatten()[0].item()
        (self.folder / f"{trainer.global_rank}-{client}").write_text(str(weight))


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.exhaustive
def test_a_callback_sees_each_update_unless_it_needs_none(says, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    on(2, make_client, tmp_path / "run", max_rounds=1, callbacks=[Reads(notes, says)])
    seen = {client: (notes / f"1-{client}").read_text() for client in range(4)}
    assert len(set(seen.values())) == (4 if says else 2)


def test_one_rank_keeps_all_states_in_memory():
    make = partial(make_client, FedPer)
    assert same_end(fit(make(), client_states="rank"), fit(make()))


def outcome(client, entries, **fields):
    update = {"num_samples": torch.tensor(client + 1), **entries}
    return Outcome(client, update, ClientState(), {}, **{"finite": True, "after": {}, "seconds": 0.0, **fields})


def weights(*numbers, steps=0):
    return {"weights": {"w": torch.tensor(numbers), "steps": torch.tensor(steps)}}


@pytest.mark.parametrize(("weighted", "mean"), [(True, 4.0), (False, 3.0)])
def test_usable_updates_become_their_mean(weighted, mean):
    given = [outcome(0, weights(0.0, steps=3)), outcome(1, weights(0.0, steps=2)), outcome(2, weights(9.0, steps=1))]
    given[1] = given[1]._replace(update={**given[1].update, **weights(0.0 if not weighted else -1.5, steps=2)})
    given.append(outcome(3, weights(float("nan")), finite=False))
    found = averaged(given, weighted)
    assert [each.client for each in found] == [0, 1, 2, 3]
    assert all(float(each.update["weights"]["w"]) == mean for each in found[:3])
    assert all(int(each.update["weights"]["steps"]) == 3 for each in found[:3])
    assert [int(each.update["num_samples"]) for each in found] == [1, 2, 3, 4]
    assert found[3].update is given[3].update


def test_updates_with_counters_of_their_own_stay():
    given = [outcome(k, weights(float(k)) | {"seen": torch.tensor([k, 1])}) for k in range(2)]
    assert averaged(given, True) == given
    alike = [outcome(k, weights(float(k)) | {"seen": torch.tensor([1, 1])}) for k in range(2)]
    assert averaged(alike, False)[0].update["weights"]["w"] == 0.5


def test_a_model_that_is_on_another_rank_is_refused():
    run = fit(make_client(FedPer), client_states="rank")
    run.federation.clients[1] = ClientState(kept="rank 1")
    with pytest.raises(MisconfigurationException, match="rank 1"):
        run.federation.model_of(1)
    run.federation.model_of(0)


def test_fedavg_has_no_states_to_keep(tmp_path):
    one, two = (on(ranks, partial(make_client, FedAvg), tmp_path / str(ranks)) for ranks in (1, 2))
    assert near(one[0], two[0])
