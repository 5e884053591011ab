"""How well losses tell training samples from others."""

import math
import runpy
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve
from torch.nn import functional as F
from torch.optim import SGD

from federations import Blobs, Spy, blobs, equal, fit, make_client, plain, read_csv
from pfl_lightning.callbacks import MembershipAudit
from pfl_lightning.callbacks.membership_audit import likelihood_ratios, scaled_confidences, told_apart
from pfl_lightning.methods import FedAvg, FedPer, Local
from pfl_lightning.tasks import Classification, Regression, Survival

LIRA = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "lira.py"))
PARTS = ("auc", "advantage", "tpr_at_1", "tpr_at_01")


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_measures_are_those_of_the_curve(ties):
    rng = np.random.default_rng(0)
    members, others = rng.exponential(1.0, 300), rng.exponential(1.5, 250)
    if ties:
        members, others = members.round(1), others.round(1)
    found = told_apart(members, others)
    labels = np.r_[np.ones(300), np.zeros(250)]
    false, true, _ = roc_curve(labels, -np.r_[members, others], drop_intermediate=False)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, -np.r_[members, others]), abs=1e-12)
    assert found["advantage"] == pytest.approx((true - false).max(), abs=1e-12)
    assert found["tpr_at_1"] == pytest.approx(true[false <= 0.01].max(), abs=1e-12)
    assert found["tpr_at_01"] == pytest.approx(true[false <= 0.001].max(), abs=1e-12)


def test_extremes():
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert told_apart(low, high) == dict.fromkeys(PARTS, 1.0)
    assert told_apart(high, low) == dict.fromkeys(PARTS, 0.0)
    assert told_apart(low, low)["auc"] == 0.5 and told_apart(low, low)["advantage"] == 0.0


def audited(method=FedAvg, every=None, **settings):
    watch = Spy()
    audits = [watch, MembershipAudit(every)]
    return fit(make_client(method), blobs(30, 40, 50, test_fraction=0.3), callbacks=audits, **settings), watch


def plainly(run, nets):
    """By one loss after another of each client's net."""
    found = {"train": [], "test": []}
    for client, net in nets.items():
        net.eval()
        for split, losses in found.items():
            part = run.data.part(client, split)
            losses += [float(F.cross_entropy(net(x[None]), y[None])) for x, y in zip(part.x, part.y, strict=True)]
    return told_apart(*map(np.array, found.values()))


def test_it_is_of_the_models_that_clients_receive_and_of_those_that_they_send():
    run, watch = audited(max_rounds=3)
    row = run.rows[-1]
    net = run.model.net
    net.load_state_dict({name.removeprefix("net."): t for name, t in run.federation.aggregator.global_model().items()})
    expected = plainly(run, dict.fromkeys(range(3), net))
    assert {part: row[f"membership/model/{part}"] for part in PARTS} == pytest.approx(expected, abs=1e-9)
    members, others = [], []
    for client, update in watch.updates[-1].items():
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in update["weights"].items()})
        for split, losses in (("train", members), ("test", others)):
            part = run.data.part(client, split)
            losses += F.cross_entropy(net(part.x), part.y, reduction="none").tolist()
    expected = told_apart(np.array(members), np.array(others))
    assert {part: row[f"membership/upload/{part}"] for part in PARTS} == pytest.approx(expected, abs=0.02)


def test_it_audits_the_last_round_or_every_so_many():
    name = "membership/model/auc"
    assert [name in row for row in audited(max_rounds=4)[0].rows] == [False, False, False, True]
    assert [name in row for row in audited(every=2, max_rounds=5)[0].rows] == [False, True, False, True, False]


@pytest.mark.parametrize("method", [FedPer, Local], ids=lambda m: m.__name__)
def test_what_does_not_send_its_whole_net_has_no_upload_to_audit(method):
    row = audited(method, max_rounds=2)[0].rows[-1]
    assert "membership/model/auc" in row and "membership/upload/auc" not in row


def test_it_changes_nothing():
    data = blobs(30, 40, 50, test_fraction=0.3)
    assert equal(audited(every=1, max_rounds=3)[0].weights, fit(make_client(), data, max_rounds=3).weights)


def test_refusals():
    with pytest.raises(MisconfigurationException, match="every=0 must be 1 or more"):
        MembershipAudit(0)
    with pytest.raises(MisconfigurationException, match=r"no client has both; set data\.test_fraction"):
        fit(make_client(), blobs(30, 40, 50, test_fraction=0.0), callbacks=[MembershipAudit()])


@pytest.mark.parametrize(
    ("audit", "data", "words"),
    [
        (MembershipAudit(), {"at_sites": True}, "the clients of these data are at sites"),
        (MembershipAudit(), {"task": Survival()}, "compares samples of a batch"),
        (MembershipAudit(), {}, r"trainer\.max_rounds isn't given; set every"),
        (MembershipAudit(1, scores="scores.csv"), {"task": Regression()}, "scores='scores.csv' are of classifications"),
    ],
    ids=["sites", "batches", "rounds", "scores"],
)
def test_data_and_tasks_without_a_loss_of_single_samples_here_are_refused(audit, data, words):
    settings = {"at_sites": False, "task": Classification(3)} | data
    federation, trainer = SimpleNamespace(data=SimpleNamespace(**settings)), SimpleNamespace(max_epochs=-1)
    with pytest.raises(MisconfigurationException, match=words):
        audit.on_fit_start(trainer, federation)


# Likelihood ratios


def test_confidences_are_logits_of_probabilities():
    outputs, targets = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
    p = outputs.double().softmax(1)[range(20), targets]
    assert torch.allclose(scaled_confidences(outputs, targets), (p / (1 - p)).log(), atol=1e-6)
    # a probability that is 1 in floating point still has a confidence
    assert scaled_confidences(torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([0])).isfinite().all()


def plain_ratio(confidences, members, target, sample):
    """One sample's ratio, by hand, with variances over all samples."""
    shadows = [run for run in range(len(confidences)) if run != target]

    def group(sample, inside):
        chosen = [confidences[run][sample] for run in shadows if bool(members[run][sample]) == inside]
        return [value for value in chosen if not math.isnan(value)]

    likelihood = {}
    for inside in (True, False):
        residuals, freedom = 0.0, 0
        for other in range(len(confidences[0])):
            values = group(other, inside)
            residuals += sum((value - fmean(values)) ** 2 for value in values)
            freedom += max(len(values) - 1, 0)
        if not (values := group(sample, inside)):
            return math.nan
        likelihood[inside] = norm.logpdf(confidences[target][sample], fmean(values), math.sqrt(residuals / freedom))
    return likelihood[True] - likelihood[False]


def drawn(runs, samples, shift, seed=0):
    rng = np.random.default_rng(seed)
    members = rng.random((runs, samples)) < 0.5
    return rng.normal(size=(runs, samples)) + rng.normal(size=samples) * 3 + shift * members, members


def test_likelihood_ratios_are_those_by_hand():
    confidences, members = drawn(6, 8, 1.0)
    confidences[1, 3] = confidences[0, 5] = math.nan
    members[:, 6] = True
    for target in (0, 4):
        found = likelihood_ratios(confidences, members, target)
        expected = [plain_ratio(confidences, members, target, sample) for sample in range(8)]
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
        assert math.isnan(found[6])


def test_many_shadows_have_a_variance_for_each_sample():
    confidences, members = drawn(70, 5, 1.0)
    found = likelihood_ratios(confidences, members, 0)
    for sample in range(5):
        own = {side: confidences[1:, sample][members[1:, sample] == side] for side in (True, False)}
        parts = {side: norm.logpdf(confidences[0, sample], v.mean(), v.std(ddof=1)) for side, v in own.items()}
        assert found[sample] == pytest.approx(parts[True] - parts[False], abs=1e-9)


def test_they_see_through_samples_of_different_difficulty():
    confidences, members = drawn(17, 2000, 2.0)
    lira = told_apart(*(-likelihood_ratios(confidences, members, 0)[side] for side in (members[0], ~members[0])))
    threshold = told_apart(*(-confidences[0, side] for side in (members[0], ~members[0])))
    assert lira["auc"] > 0.85 and lira["auc"] > threshold["auc"] + 0.1 and lira["tpr_at_1"] > 0.2
    confidences, members = drawn(17, 2000, 0.0)
    assert told_apart(*(-likelihood_ratios(confidences, members, 0)[side] for side in (members[0], ~members[0])))[
        "auc"
    ] == pytest.approx(0.5, abs=0.05)


class Labels(Blobs):
    """Points of many features with labels of chance, which a net can only know by heart."""

    input_shape = (40,)

    def load(self):
        generator = torch.Generator().manual_seed(5)
        return torch.randn(120, 40, generator=generator), torch.randint(3, (120,), generator=generator)


def shadow_runs(root, rate, rounds, runs=6):
    """Attacks on runs, each of which has other members."""
    for seed in range(runs):
        data = blobs(60, 60, test_fraction=0.5, val_fraction=0.1, seed=seed, data=Labels, batch_size=20)
        lightning.seed_everything(seed, verbose=False)
        model = FedAvg(net=plain, optimizer=partial(SGD, lr=rate, momentum=0.9), input_shape=(40,), num_classes=3)
        audits = [MembershipAudit(scores="confidences.csv")]
        fit(
            model,
            data,
            root / str(seed),
            callbacks=audits,
            max_rounds=rounds,
            local_epochs=5,
            enable_checkpointing=False,
        )
    found = LIRA["attacks"](*LIRA["collected"](sorted(root.glob("*/*/*/confidences.csv")), "model"))
    return {attack: fmean(run["auc"] for run in of_runs) for attack, of_runs in found.items()}


@pytest.mark.exhaustive
def test_a_model_that_knows_its_samples_by_heart_is_found_and_an_untrained_one_is_not(tmp_path):
    found = shadow_runs(tmp_path / "overfitted", 0.1, 4)
    assert found["LiRA"] > 0.75 and found["LiRA"] > found["threshold"], found
    assert shadow_runs(tmp_path / "untrained", 1e-9, 1)["LiRA"] == pytest.approx(0.5, abs=0.08)


def test_scores_are_of_all_samples_by_their_places_in_the_pool(tmp_path):
    run = fit(
        make_client(),
        blobs(30, 40, test_fraction=0.3),
        tmp_path,
        callbacks=[MembershipAudit(scores="confidences.csv")],
        max_rounds=2,
    )
    rows = {int(row["sample"]): row for row in read_csv(run.folder / "confidences.csv")}
    held = {
        int(sample): (str(client), str(int(split == "train")))
        for client in range(2)
        for split in ("train", "test")
        for sample in run.data.division.clients[client][split]
    }
    assert {sample: (row["client"], row["member"]) for sample, row in rows.items()} == held
    net = plain((6,), 3)
    net.load_state_dict({name.removeprefix("net."): t for name, t in run.federation.aggregator.global_model().items()})
    part, sample = run.data.part(1, "test"), int(run.data.division.clients[1]["test"][4])
    expected = float(scaled_confidences(net(part.x[4:5]), part.y[4:5]))
    assert float(rows[sample]["model"]) == pytest.approx(expected, abs=1e-5)
    assert math.isfinite(float(rows[sample]["upload"]))


def test_refusals_of_scores(tmp_path):
    for name in ("scores", "a/b.csv"):
        with pytest.raises(MisconfigurationException, match="scores="):
            MembershipAudit(scores=name)
    with pytest.raises(MisconfigurationException, match=r"logger=false"):
        fit(make_client(), blobs(30, 40, test_fraction=0.3), callbacks=[MembershipAudit(scores="c.csv")])
