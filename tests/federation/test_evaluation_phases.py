"""What clients do before they are evaluated: on a copy, without a trace."""

from functools import partial

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from federations import Blobs, Shuffled, blobs, equal, fit, make_client, noisy, read_csv, same_end, untimed
from pfl_lightning import Phase
from pfl_lightning.methods import Local
from pfl_lightning.methods.fedavg import FedAvg
from sweeps import all_but


class Tuned(FedAvg):
    """Fine-tunes its classifier for two epochs before it is used."""

    def evaluation_phases(self):
        return [Phase("tune", trains=lambda name: name.startswith("net.classifier."), epochs=2)]


class OneStep(FedAvg):
    """Takes one step on one batch before it is used."""

    def evaluation_phases(self):
        return [Phase("adapt", steps=1)]


def test_federated_training_is_that_of_the_parent_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    tuned, plain = (fit(make_client(cls, **settings)) for cls in (Tuned, FedAvg))
    assert equal(tuned.weights, plain.weights)
    assert all(equal(vars(tuned.federation.clients[i]), vars(plain.federation.clients[i])) for i in range(4))
    for name in ("val/acc", "val/loss"):
        received = [row[name.replace("/", "_received/")] for row in tuned.rows]
        # clients with the same model are evaluated together, which rounds losses otherwise
        assert received == pytest.approx([row[name] for row in plain.rows], rel=1e-6)
        assert [row[name] for row in tuned.rows] != received


def test_what_is_evaluated_is_the_adapted_model():
    run = fit(make_client(partial(Tuned, optimizer=partial(SGD, lr=0.1))), blobs(30, 30), max_rounds=1)
    federation = run.federation
    job = federation.job(1, ("test",))
    federation.engines[0].evaluate(job)
    tuned = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    received = federation.aggregator.download(1)["weights"]
    assert equal(tuned["net.features.0.weight"], received["net.features.0.weight"])
    assert not equal(tuned["net.classifier.weight"], received["net.classifier.weight"])
    part = run.data.part(1, "test")
    run.model.load_state_dict(tuned)
    run.model.eval()
    accuracy = float((run.model(part.x).argmax(1) == part.y).float().mean())
    assert run.logger.clients[1]["test/acc"] == accuracy
    assert "test_received/acc" in run.logger.clients[1]


def test_steps_count_batches():
    class Counted(OneStep):
        seen = 0

        def training_step(self, batch, batch_idx):
            Counted.seen += self.phase.name == "adapt"
            return super().training_step(batch, batch_idx)

    run = fit(make_client(Counted), blobs(30, 30), max_rounds=1)
    # two clients, validated in the round and tested at the end
    assert Counted.seen == 4
    assert run.rows[0]["train/loss"] > 0


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_phase_may_keep_the_configured_rate(scheduled):
    rates = []

    class Rates(FedAvg):
        def evaluation_phases(self):
            return [Phase("adapt", steps=1, scheduled=scheduled)]

        def training_step(self, batch, batch_idx):
            if self.phase.name == "adapt":
                rates.append(self.learning_rate)
            return super().training_step(batch, batch_idx)

    fit(make_client(Rates, lr_scheduler=partial(ExponentialLR, gamma=0.5)), blobs(30), max_rounds=2)
    assert rates == pytest.approx([0.05, 0.025, 0.025] if scheduled else [0.1] * 3)


def test_a_phase_of_training_may_be_of_steps_too():
    class Short(Local):
        def local_phases(self):
            return [Phase(steps=3)]

    class Epochs(Local):
        pass

    short, steps = fit(make_client(Short), local_epochs=2), fit(make_client(Epochs), local_steps=3)
    assert equal(short.federation.clients[0].personal, steps.federation.clients[0].personal)


@pytest.mark.parametrize("evaluate", all_but(["after"], ["before", "after", "both"]))
@pytest.mark.by_default("before")
def test_it_is_reproducible_and_leaves_no_trace(evaluate, tmp_path):
    settings = {"evaluate": evaluate, "test_every_round": True}
    make = partial(make_client, Tuned, net=noisy, optimizer_lifetime="run")
    whole = fit(make(), root=tmp_path / "whole", **settings)
    assert same_end(whole, fit(make(), root=tmp_path / "shuffled", engine=Shuffled, **settings))
    fit(make(), root=tmp_path / "halves", **{**settings, "max_rounds": 2})
    resumed = fit(make(), root=tmp_path / "halves", ckpt_path="last", **settings)
    assert same_end(whole, resumed)
    tables = [untimed(read_csv(run.folder / "rounds.csv")) for run in (whole, resumed)]
    assert tables[0] == tables[1]
    columns = {"before": {"val_received/acc"}, "after": {"val_received/acc"}, "both": {"val_received_after/acc"}}
    assert columns[evaluate] <= set(whole.rows[-1])


class WithTest(Blobs):
    """The first twelve points are the original test half."""

    def load(self):
        self.original_test = torch.arange(12)
        return super().load()


def central(**settings):
    return blobs(30, 30, data=WithTest, central_test="original", **settings)


def test_the_server_s_model_is_tested_on_the_central_test_set():
    run = fit(make_client(net=noisy), central(), test_every_round=True)
    part = run.data.central_data()
    run.model.load_state_dict(run.weights)
    run.model.eval()
    accuracy = float((run.model(part.x).argmax(1) == part.y).float().mean())
    assert run.rows[-1]["test/global_acc"] == accuracy == run.logger.summary["final"]["test/global_acc"]
    known = [row["test/global_acc"] for row in run.rows]
    assert len(known) == 3
    best = run.logger.summary["best_global"]
    assert best["test/global_acc"] == max(known) and best["round"] == 1 + known.index(max(known))
    assert best["ten_best_mean"] == pytest.approx(sum(known) / 3)


def test_its_evaluation_changes_nothing():
    one, other = (fit(make_client(net=noisy), data, test_every_round=True) for data in (central(), central()))
    assert same_end(one, other)
    without = fit(make_client(net=noisy), central(), test_every_round=False)
    assert equal(one.weights, without.weights)
    assert "test/global_acc" not in without.rows[-1]
    assert without.logger.summary["final"]["test/global_acc"] == one.rows[-1]["test/global_acc"]


def test_it_is_tested_where_clients_have_no_test_parts(tmp_path):
    run = fit(make_client(), central(test_fraction=0.0), tmp_path, test_every_round=True)
    assert run.logger.summary["final"]["test/acc"] is None
    (values,) = run.trainer.test(run.model, datamodule=run.data, ckpt_path=str(run.last), verbose=False)
    assert values["test/global_acc"] == pytest.approx(run.rows[-1]["test/global_acc"])


def test_a_method_without_a_whole_model_has_nothing_to_test():
    run = fit(make_client(Local), central(), test_every_round=True)
    assert "test/global_acc" not in run.rows[-1]
    assert "best_global" not in run.logger.summary
