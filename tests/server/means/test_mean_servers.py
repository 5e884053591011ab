"""Rules in place of the mean, in the servers that take one."""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import seed_everything
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from command import QUICKSTART, QUIET, pfl, refusal
from federations import Spy, check_order_and_resume, drawn_update, equal, fit, make_client, noisy, set_up
from pfl_lightning.aggregators import (
    CFL,
    SCAFFOLD,
    AdapterAverage,
    AdaptiveProximal,
    Aggregator,
    ClassMeans,
    ClusterModels,
    DomainConsensus,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Mean,
    PrimalDualAverage,
    WeightedAverage,
)
from pfl_lightning.callbacks import BufferAttack
from pfl_lightning.cli.class_names import subclasses
from pfl_lightning.data import IID, Digits
from pfl_lightning.engines import Sequential, Vectorised
from pfl_lightning.methods import IFCA, AdaptiveFedProx, ControlVariates, FedADMM, FedAvg, FedDBE, FedIT, FedProto
from pfl_lightning.methods.fedas import FisherAverage
from pfl_lightning.methods.fedcac import CriticalAverage
from pfl_lightning.methods.fednova import NormalizedAverage
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPAverage
from pfl_lightning.server.means import (
    Bucketing,
    Bulyan,
    CentredClipping,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    TrimmedMean,
)
from sweeps import swept

BAD = 1
SERVERS = {
    "weighted": (FedAvg, WeightedAverage),
    "momentum": (FedAvg, FedAvgM),
    "adagrad": (FedAvg, FedAdagrad),
    "adam": (FedAvg, FedAdam),
    "yogi": (FedAvg, FedYogi),
    "ahead": (FedAvg, FedACG),
    "admm": (FedADMM, PrimalDualAverage),
    "scaffold": (ControlVariates, SCAFFOLD),
    "consensus": (FedDBE, DomainConsensus),
    "clusters": (IFCA, ClusterModels),
    "cfl": (FedAvg, CFL),
    "prototypes": (FedProto, ClassMeans),
    "adaptive": (AdaptiveFedProx, AdaptiveProximal),
    "adapters": (FedIT, AdapterAverage),
}
SWEPT = pytest.mark.parametrize("name", swept(SERVERS, {"weighted", "scaffold", "prototypes"}, name=str))


def updates_of(model, bad=None, n=7, **entries):
    """Updates of n clients with random weights, of whom one has sent a million times too much."""
    updates = {client: drawn_update(model, client, **entries) for client in range(n)}
    if bad is not None:
        updates[bad]["weights"] = {
            k: 1e6 * t if t.is_floating_point() else t for k, t in updates[bad]["weights"].items()
        }
    return updates


def distance(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_all_that_take_a_mean_are_here():
    declared = {cls for cls in subclasses(WeightedAverage) if cls.takes_mean and cls.__module__.startswith("pfl")}
    assert declared | {ClassMeans, CFL, ClusterModels} == {server for _, server in SERVERS.values()}


# The rule in its place


def test_without_a_rule_it_is_what_it_was():
    for make in (WeightedAverage, FedAvgM, SCAFFOLD):
        assert "means" not in set_up(make(), make_client()).state and make().name == make.__name__
    assert WeightedAverage().needs == {"weights", "num_samples"} and WeightedAverage().sums_only


@pytest.mark.parametrize("make", [WeightedAverage, FedAvgM, FedAdam, FedYogi])
def test_the_model_follows_the_rule_and_not_who_sends_most(make):
    model = make_client()
    ends = []
    for bad in (None, BAD):
        aggregator = set_up(make(mean=TrimmedMean(1)), model, 7)
        aggregator.aggregate(updates_of(model, bad), 0)
        ends.append(aggregator.global_model())
    plain = set_up(make(), model, 7)
    plain.aggregate(updates_of(model, BAD), 0)
    assert 1e-3 < distance(*ends) < 3
    assert make is FedAdam or make is FedYogi or distance(ends[0], plain.global_model()) > 1e4


def test_samples_that_clients_claim_do_not_count_unless_the_rule_says_so():
    model = make_client()
    updates = updates_of(model)
    ends = {}
    for mean in (MultiKrum(0, keep=7), GeometricMedian(), GeometricMedian(weighted=True)):
        for claim in (10, 10_000):
            aggregator = set_up(WeightedAverage(mean=mean), model, 7)
            assert ("num_samples" in aggregator.needs) == mean.weighted
            aggregator.aggregate(updates | {0: updates[0] | {"num_samples": torch.tensor(claim)}}, 0)
            ends.setdefault(mean, []).append(aggregator.global_model())
    moved = [not equal(*pair) for pair in ends.values()]
    assert moved == [False, False, True]


def test_shares_tell_who_was_left_out():
    model = make_client()
    aggregator = set_up(WeightedAverage(mean=MultiKrum(2)), model, 7)
    assert aggregator.aggregate(updates_of(model, BAD), 0) == {"left_out": 2.0}
    shares = aggregator.state["shares"]
    assert list(shares) == list(range(7)) and shares[BAD] == 0 and sum(shares.values()) == pytest.approx(1)
    by_coordinate = set_up(WeightedAverage(mean=CoordinateMedian()), model, 7)
    assert by_coordinate.aggregate(updates_of(model), 0) == {} and by_coordinate.state["shares"] == {}


def test_a_server_learning_rate_goes_towards_the_rules_result():
    model = make_client()
    whole, half = (set_up(WeightedAverage(rate, mean=CoordinateMedian()), model) for rate in (1.0, 0.5))
    start = half.global_model()
    for aggregator in (whole, half):
        aggregator.aggregate(updates_of(model), 0)
    for name, end in whole.global_model().items():
        assert torch.allclose(half.global_model()[name], (start[name] + end) / 2, atol=1e-6)


@pytest.mark.parametrize(
    "mean", [Krum(1), Bulyan(1), Bucketing(CoordinateMedian()), CentredClipping(), TrimmedMean(1)], ids=lambda m: m.name
)
def test_the_order_of_updates_changes_no_bit(mean):
    model = make_client(net=noisy)
    updates = updates_of(model)
    ends = []
    for order in (range(7), [3, 0, 6, 1, 5, 2, 4]):
        aggregator = set_up(WeightedAverage(mean=mean), model, 7)
        for round in range(2):
            aggregator.aggregate({client: updates[client] for client in order}, round)
        ends.append(aggregator.state)
    assert equal(*ends)


def test_what_is_not_finite_is_left_out():
    model = make_client()
    updates = updates_of(model)
    next(iter(updates[2]["weights"].values())).view(-1)[0] = torch.nan
    aggregator, without = (set_up(WeightedAverage(mean=MultiKrum(1)), model, 7) for _ in range(2))
    with pytest.warns(UserWarning, match="MultiKrum leaves out what isn't finite, of clients 2"):
        aggregator.aggregate(updates, 0)
    without.aggregate({k: u for k, u in updates.items() if k != 2}, 0)
    assert equal(aggregator.global_model(), without.global_model()) and aggregator.state["shares"][2] == 0


def test_a_round_without_anything_finite_changes_nothing():
    model = make_client()
    aggregator = set_up(WeightedAverage(mean=TrimmedMean()), model)
    start = dict(aggregator.global_model())
    updates = {0: drawn_update(model, 0)}
    updates[0]["weights"] = {name: torch.full_like(t, torch.inf) for name, t in start.items()}
    with pytest.warns(UserWarning, match="isn't finite"):
        aggregator.aggregate(updates, 0)
    assert equal(aggregator.global_model(), start)


def test_buffers_have_no_say_in_distances_and_counters_no_maximum():
    model = make_client(net=noisy)
    updates = updates_of(model)
    buffers = [name for name, _ in model.named_buffers() if name in updates[0]["weights"]]
    assert len(buffers) >= 3
    changed = {k: u | {"weights": dict(u["weights"])} for k, u in updates.items()}
    for name in buffers:
        changed[3]["weights"][name] = updates[3]["weights"][name] + 10**6
    one, other = (set_up(WeightedAverage(mean=MultiKrum(1)), model, 7) for _ in range(2))
    one.aggregate(updates, 0)
    other.aggregate(changed, 0)
    assert one.state["shares"] == other.state["shares"]
    counter = next(name for name in buffers if name.endswith("num_batches_tracked"))
    assert int(other.global_model()[counter]) < 100


def test_tied_parameters_are_no_buffers():
    class Tied(torch.nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.alias = self.weight

    model = make_client(net=lambda shape, classes: Net(torch.nn.Identity(), Tied(shape[0], classes)))
    aggregator = set_up(WeightedAverage(mean=MultiKrum(1)), model, 7)
    assert aggregator.averaging.buffers == set()
    updates = updates_of(model)
    alias = next(name for name in updates[0]["weights"] if name.endswith("alias"))
    for update in updates.values():
        update["weights"][alias] = update["weights"][alias.replace("alias", "weight")]
    aggregator.aggregate(updates, 0)
    end = aggregator.global_model()
    assert torch.equal(end[alias], end[alias.replace("alias", "weight")])


def test_bucketing_draws_anew_in_each_round():
    model = make_client()
    aggregator = set_up(WeightedAverage(mean=Bucketing(CoordinateMedian())), model, 7)
    ends = []
    for round in range(3):
        aggregator.aggregate(updates_of(model), round)
        ends.append(aggregator.global_model())
    assert aggregator.state["means"] == 3 and not equal(ends[0], ends[1]) and not equal(ends[1], ends[2])


# Other things that are averaged


def test_control_variates_have_a_rule_of_their_own():
    model = make_client(ControlVariates)
    size = len(model.vector())
    changes = {k: torch.randn(size, generator=torch.Generator().manual_seed(k)) for k in range(7)}
    changes[BAD] = torch.full((size,), 1e6)
    aggregator = set_up(SCAFFOLD(mean=CoordinateMedian()), model, 14)
    aggregator.aggregate({k: drawn_update(model, k, control=c) for k, c in changes.items()}, 0)
    expected = 7 / 14 * np.median(torch.stack(list(changes.values())).double().numpy(), axis=0)
    assert np.allclose(aggregator.state["control"], expected, atol=1e-6)


def test_prototypes_are_taken_class_by_class():
    model = make_client(FedProto)
    aggregator = set_up(ClassMeans(mean=CoordinateMedian()), model)
    assert aggregator.needs == {"prototypes"} and aggregator.name == "ClassMeans+CoordinateMedian"
    rows = {k: {c: torch.full((3,), float(k + c)) for c in range(k + 1)} for k in range(3)} | {
        3: {0: torch.full((3,), 1e6)}
    }
    aggregator.aggregate({k: {"prototypes": own} for k, own in rows.items()}, 0)
    means = aggregator.state["means"]
    assert [float(means[c][0]) for c in (0, 1, 2)] == [1.5, 2.5, 4.0]
    with pytest.raises(MisconfigurationException, match="leave one of the two out"):
        ClassMeans(exclude_self=True, mean=CoordinateMedian())


def test_clusters_have_a_mean_each():
    model = make_client(IFCA)
    aggregator = set_up(ClusterModels(2, mean=CoordinateMedian()), model, 7)
    updates = updates_of(model, BAD)
    for client, update in updates.items():
        update["cluster"] = torch.tensor(int(client > 3))
    aggregator.aggregate(updates, 0)
    for cluster, members in enumerate(([0, 1, 2, 3], [4, 5, 6])):
        for name, tensor in aggregator.state["models"][cluster].items():
            stack = torch.stack([updates[k]["weights"][name] for k in members]).numpy()
            assert np.allclose(tensor, np.median(stack, axis=0), rtol=1e-5)


@pytest.mark.parametrize("cluster", [2, -1, 10**9])
def test_a_cluster_that_is_none_leaves_its_client_out(cluster):
    model = make_client(IFCA)
    ends = []
    for left in (False, True):
        aggregator = set_up(ClusterModels(2, mean=CoordinateMedian()), model, 7)
        updates = {k: u | {"cluster": torch.tensor(k % 2)} for k, u in updates_of(model).items()}
        if left:
            del updates[3]
            aggregator.aggregate(updates, 0)
        else:
            updates[3]["cluster"] = torch.tensor(cluster)
            with pytest.warns(UserWarning, match=f"leaves out client 3: its cluster={cluster} is no model's number"):
                aggregator.aggregate(updates, 0)
        ends.append(aggregator.state["models"])
    assert equal(*ends)


def test_the_first_consensus_is_a_rules_too():
    model = make_client(FedDBE)
    aggregator = set_up(DomainConsensus(mean=CoordinateMedian()), model)
    updates = {k: drawn_update(model, k, feature_mean=torch.full((4,), float(10**k))) for k in range(5)}
    aggregator.aggregate(updates, 0)
    assert aggregator.state["consensus"]["mean"].tolist() == [100.0] * 4


# Whole runs


BORNE = [
    CoordinateMedian(),
    TrimmedMean(1),
    Krum(1),
    MultiKrum(1),
    Bulyan(1),
    GeometricMedian(),
    CentredClipping(),
    NormBound(),
    Bucketing(TrimmedMean(1)),
    NearestNeighbourMixing(TrimmedMean(1), 1),
    NearestNeighbourMixing(MultiKrum(1), 1),
    FLTrust(epochs=3, optimizer=partial(SGD, lr=0.1)),
]


def normed(shape, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return Net(body, nn.Linear(32, classes))


def digits_run(mean, *callbacks, rounds=6, **settings):
    """20 clients alike with BatchNorm, and 70 samples at the server."""
    data = Digits(20, partitioner=IID(), batch_size=20, last_batch="drop", central_test=0.15, server_fraction=0.3)
    seed_everything(0, verbose=False)
    model = FedAvg(input_shape=(1, 8, 8), num_classes=10, net=normed, optimizer=partial(SGD, lr=0.1))
    settings = {"engine": Vectorised, "local_epochs": 3, "check_val_every_n_epoch": rounds, **settings}
    aggregator = WeightedAverage(mean=mean)
    return fit(model, data, aggregator=aggregator, callbacks=list(callbacks), max_rounds=rounds, **settings)


def variances(run):
    return next(t for name, t in run.federation.aggregator.global_model().items() if name.endswith("running_var"))


@pytest.mark.parametrize(
    "mean", swept(BORNE, {"MultiKrum", "FLTrust", "NearestNeighbourMixing+TrimmedMean"}, name=lambda rule: rule.name)
)
def test_one_client_of_twenty_that_sends_far_buffers_costs_no_three_points(mean):
    accuracies = {}
    for fraction in (0.0, 0.05):
        run = digits_run(mean, BufferAttack(fraction))
        assert run.rows[-1]["attack/fraction"] == fraction
        accuracies[fraction] = run.rows[-1]["benign/val/acc"]
    assert accuracies[0.0] > 0.7 and accuracies[0.05] > accuracies[0.0] - 0.03


def test_the_mean_falls_to_it():
    assert digits_run(None, BufferAttack(0.05)).rows[-1]["benign/val/acc"] < 0.3


@pytest.mark.parametrize("mean", [MultiKrum(1), CentredClipping(), TrimmedMean(1)], ids=lambda rule: rule.name)
def test_negative_variances_of_one_leave_all_others_finite(mean):
    run = digits_run(mean, BufferAttack(0.05, value=-1e6, buffer="running_var"), rounds=2)
    assert float(variances(run).min()) > 0 and math.isfinite(run.rows[-1]["val/loss"])


def test_trust_leads_no_variance_below_zero():
    run = digits_run(FLTrust(epochs=20, batch_size=8, optimizer=partial(SGD, lr=0.3)), rounds=3, local_epochs=1)
    shares = run.federation.aggregator.state["shares"]
    assert sum(shares.values()) > 1.5 and float(variances(run).min()) > 0 and run.rows[-1]["val/acc"] > 0.5


@SWEPT
def test_a_run_resumes_whatever_the_order(name, tmp_path):
    method, server = SERVERS[name]
    mean = Bucketing(CoordinateMedian()) if name != "prototypes" else CoordinateMedian()
    aggregators = iter([server(mean=mean) for _ in range(5)])

    class Robust(method):
        def configure_aggregator(self):
            return next(aggregators, None) or server(mean=mean)

    check_order_and_resume(Robust, tmp_path)


@pytest.mark.parametrize("mean", [TrimmedMean(1), MultiKrum(0.0)], ids=lambda m: m.name)
def test_engines_agree(mean):
    ends = [
        fit(make_client(), aggregator=WeightedAverage(mean=mean), engine=e).weights for e in (Sequential, Vectorised)
    ]
    assert distance(*ends) < 1e-5


@SWEPT
def test_a_whole_run_goes_by_a_rule_of_a_rule(name):
    method, server = SERVERS[name]
    run = fit(make_client(method), aggregator=server(mean=NearestNeighbourMixing(TrimmedMean())), max_rounds=2)
    assert run.federation.aggregator.name == f"{server.__name__}+NearestNeighbourMixing+TrimmedMean"
    assert run.rows[-1]["clients"] == 4


def test_a_round_of_nobody_leaves_the_model():
    spy = Spy()
    aggregator = set_up(WeightedAverage(mean=Krum()), make_client())
    start = aggregator.global_model()
    assert aggregator.aggregate({}, 0) == {} and aggregator.global_model() is start and not spy.updates


# Refusals


@pytest.mark.parametrize("server", [FisherAverage, CriticalAverage, NormalizedAverage], ids=lambda s: s.__name__)
def test_servers_whose_shares_are_the_method_refuse_a_mean(server):
    with pytest.raises(MisconfigurationException, match=f"aggregator.mean=Krum: {server.__name__} combines what"):
        server(mean=Krum())


def test_a_server_of_ones_own_refuses_a_mean_until_it_says_otherwise():
    class Mine(WeightedAverage):
        pass

    class Declared(WeightedAverage):
        takes_mean = True

    class Below(Declared):
        """Not declared: the marker isn't inherited."""

    for server in (Mine, Below):
        with pytest.raises(MisconfigurationException, match=f"mean=Krum: {server.__name__} .* takes_mean = True"):
            server(mean=Krum())
    assert Declared(mean=Krum()).mean.f == 0.2


def test_every_other_server_takes_none():
    taking = {server for _, server in SERVERS.values()}
    for cls in subclasses(Aggregator) - taking:
        if cls.__module__.startswith("pfl_lightning.") and "abstract" not in cls.__name__.lower():
            with pytest.raises((MisconfigurationException, TypeError)):
                cls(mean=Krum())
    with pytest.raises(TypeError):
        DPAverage(noise_multiplier=1.0, mean=Krum())


def test_what_no_round_can_bear_is_refused_before_the_first():
    with pytest.raises(MisconfigurationException, match="f=1 is 1 of a round's 4 uploads, and Krum needs 5"):
        fit(make_client(), aggregator=WeightedAverage(mean=Krum(1)))
    with pytest.raises(MisconfigurationException, match="trim=1 is 1 of a round's 2 uploads"):
        fit(make_client(), aggregator=WeightedAverage(mean=TrimmedMean(1)), clients_per_round=2)


# The command line

SMALL = f"fit {QUICKSTART} {QUIET} --data.max_samples 300 --trainer.max_rounds 1 --data.num_clients 6 --model FedAvg"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--aggregator WeightedAverage --aggregator.mean TrimmedMean --aggregator.mean.trim 0.3", "trim: 0.3"),
        ("--aggregator.mean TrimmedMean", "trim: 0.2"),
        ("--aggregator.mean=Krum --aggregator.mean.f 1", "f: 1"),
        ("--config own.yaml", "size: 3"),
        ("--config own.yaml --aggregator.mean CoordinateMedian", "CoordinateMedian"),
        ("--aggregator.mean Bucketing --aggregator.mean.mean TrimmedMean --aggregator.mean.mean.trim 1", "trim: 1"),
    ],
)
@pytest.mark.by_default(
    "--aggregator WeightedAverage -", "--config own.yaml --aggregator", "--aggregator.mean Bucketing --"
)
def test_a_rule_is_chosen_on_the_command_line(words, kept):
    Path("own.yaml").write_text(
        "aggregator: {class_path: WeightedAverage, init_args: {mean: {class_path: Bucketing, "
        "init_args: {size: 3, mean: {class_path: TrimmedMean}}}}}"
    )
    pfl(f"{SMALL} {words}")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("FedAvg+WeightedAverage+")
    assert re.search(rf"\b{re.escape(kept)}\b", (folder / "version_0" / "config.yaml").read_text())


def test_a_rule_alone_goes_to_the_models_own_server():
    pfl(f"{SMALL} --model FedProto --aggregator.mean CoordinateMedian")
    assert Path("runs/FedProto+ClassMeans+CoordinateMedian-Digits").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--aggregator.mean TrimedMean", "aggregator.mean=TrimedMean is no known class; did you mean TrimmedMean"),
        ("--aggregator.mean TrimmedMean --aggregator.mean.trm 1", "did you mean aggregator.mean.trim?"),
        ("--aggregator.mean.trim 0.2", "aggregator.mean has settings and no class; choose from Bucketing, Bulyan, "),
        ("--aggregator WeightedAverage --aggregator.mean.trim 0.2", "aggregator.mean has settings and no class"),
        ("--aggregator.mean TrimmedMean --aggregator.mean.trim x", "aggregator.mean.trim=x must be"),
        ("--aggregator.mean TrimmedMean --aggregator.mean.trim 0.5", "trim=0.5 must be a number of clients such as 2"),
        ("--aggregator.mean TrimmedMean --aggregator.mean.trim 3", "needs 7 to bear that; take 2 or less"),
        ("--aggregator FedDisco --aggregator.mean Krum", "aggregator.mean is not a setting of FedDisco"),
        ("--aggregator DPAverage --aggregator.mean Krum", "aggregator.mean is not a setting of DPAverage"),
        ("--model WDR --aggregator.mean Krum", "aggregator.mean is not a setting of CwFedAvg"),
        ("--model FedPorx --aggregator.mean Krum", "model=FedPorx is no known class; did you mean FedProx"),
    ],
)
def test_mistakes_are_told_in_one_sentence(words, sentence, capsys):
    assert sentence in refusal(f"{SMALL} {words}", capsys)


def test_all_rules_are_exported():
    import pfl_lightning.server.means as means

    rules = {cls.__name__ for cls in subclasses(Mean) - {Mean} if cls.__module__.startswith("pfl_lightning.")}
    assert rules == {name for name in means.__all__ if isinstance(getattr(means, name), type)} - {
        "Averaging",
        "Combined",
        "Mean",
    }
