import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUICKSTART, QUIET, pfl, refusal, summary
from federations import Pause, Spy, blobs, equal, fit, make_client, make_trainer, noisy, same_end
from pfl_lightning.aggregators import LDAWA, WeightedAverage
from pfl_lightning.callbacks.attacks import (
    ALIE,
    IPM,
    AdaptiveAttack,
    Backdoor,
    BufferAttack,
    FreeRider,
    GaussianUpload,
    LabelFlip,
    MinMax,
    MinSum,
    ModelReplacement,
    SignFlip,
)
from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.data import Digits
from pfl_lightning.engines import Processes, Sequential, Vectorised
from pfl_lightning.methods import IFCA, FedAvg, FedPer, FedProto, Local
from pfl_lightning.nets import Net
from pfl_lightning.server.means import (
    Bucketing,
    CentredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    TrimmedMean,
)
from sweeps import swept

SIZES = (12, 18, 15, 15, 12, 18, 15, 15)
UPLOADS = {
    "sign_flip": SignFlip,
    "gaussian": GaussianUpload,
    "free_rider": FreeRider,
    "replacement": ModelReplacement,
    "alie": ALIE,
    "ipm": IPM,
    "min_max": MinMax,
    "min_sum": MinSum,
    "adaptive": AdaptiveAttack,
}
EVERY_UPLOAD = pytest.mark.parametrize("attack", list(UPLOADS.values()), ids=list(UPLOADS))
EVERY = pytest.mark.parametrize(
    "attack", swept([*UPLOADS.values(), LabelFlip], {"SignFlip", "ALIE", "LabelFlip"}, name=lambda kind: kind.__name__)
)


def attacked(*attacks, method=FedAvg, spy=True, **settings):
    """A run of eight clients, and what the server got in each round."""
    watch = Spy()
    settings = {"max_rounds": 1, **settings}
    run = fit(make_client(method), blobs(*SIZES), callbacks=[*attacks, *([watch] if spy else [])], **settings)
    return run, watch.updates


def vectors(updates):
    """The models of a round, as rows in the order of the ids, in float64."""
    return np.stack(
        [torch.cat([t.flatten() for t in u["weights"].values()]).double().numpy() for u in updates.values()]
    )


def rounds_first(attack, **settings):
    """The initial model, what clients trained, what they sent, and who is bad; of the first round."""
    _, (honest, *_) = attacked(**settings)
    run, (sent, *_) = attacked(attack, **settings)
    start = vectors({0: {"weights": initial()}})[0]
    return start, vectors(honest), vectors(sent), sorted(attack.bad(run.federation))


def initial():
    model = make_client()
    return {name: tensor for name, tensor in model.state_dict().items() if model.is_shared(name)}


# Definitions


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (SignFlip(0.25), lambda x, w: 2 * x - w),
        (SignFlip(0.25, scale=3.0), lambda x, w: x - 3 * (w - x)),
        (FreeRider(0.25), lambda x, w: x),
        (ModelReplacement(0.25), lambda x, w: x + 4 * (w - x)),
        (ModelReplacement(0.25, scale=0.5), lambda x, w: (x + w) / 2),
    ],
    ids=["sign_flip", "scaled", "free_rider", "replacement", "replacement_scaled"],
)
def test_what_is_sent_by_who_knows_but_its_own_model(attack, expected):
    x, honest, sent, bad = rounds_first(attack)
    assert len(bad) == 2
    for client in range(8):
        right = expected(x, honest[client]) if client in bad else honest[client]
        assert np.allclose(sent[client], right, atol=1e-6)


@pytest.mark.parametrize(
    "attack", [GaussianUpload(0.25, std=0.5), FreeRider(0.25, std=0.5)], ids=["gaussian", "hidden"]
)
def test_noise_around_the_received_model_has_its_deviation(attack):
    x, _, sent, bad = rounds_first(attack)
    noise = (sent[bad] - x) / 0.5
    assert abs(noise.mean()) < 0.25 and 0.8 < noise.std() < 1.2 and not np.array_equal(*noise)


def statistics(honest, bad, knowledge):
    known = np.delete(honest, bad, axis=0) if knowledge == "omniscient" else honest[bad]
    return known, known.mean(0), known.std(0)


@pytest.mark.parametrize("knowledge", ["omniscient", "own"])
@pytest.mark.parametrize("attack", [ALIE, IPM, MinMax, MinSum], ids=["alie", "ipm", "min_max", "min_sum"])
def test_what_is_sent_by_who_knows_others(attack, knowledge):
    made = attack(0.375, knowledge=knowledge)
    x, honest, sent, bad = rounds_first(made)
    known, mean, deviation = statistics(honest, bad, knowledge)
    assert len(bad) == 3 and np.array_equal(np.delete(sent, bad, axis=0), np.delete(honest, bad, axis=0))
    assert all(np.array_equal(sent[bad[0]], sent[client]) for client in bad)
    forged = sent[bad[0]]
    if attack is ALIE:
        # n = 8, f = 3: s = 2 supporters, 3 of 5 honest ones
        assert np.allclose(forged, mean - 0.2533471 * deviation, atol=1e-6)
    elif attack is IPM:
        assert np.allclose(forged, x - 0.5 * (mean - x), atol=1e-6)
    else:
        if attack is MinMax:
            largest = max(np.linalg.norm(one - other) for one in known for other in known)
            reached = np.linalg.norm(known - forged, axis=1).max()
        else:
            largest = max(((known - one) ** 2).sum() for one in known)
            reached = ((known - forged) ** 2).sum()
        assert reached == pytest.approx(largest, rel=1e-5)
        moved = deviation > 1e-6
        gammas = (mean - forged)[moved] / deviation[moved]
        assert gammas.std() < 1e-2 and gammas.mean() > 0


class Replay(FederatedCallback):
    """Puts random models of a given seed in place of those that were trained."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def on_aggregate_start(self, trainer, federation, updates):
        for client, update in updates.items():
            drawn = {n: t + torch.randn(t.shape, generator=self.generator) for n, t in update["weights"].items()}
            updates[client] = update | {"weights": drawn}


def led_astray(attack, rule, seed):
    """How far the server's model ends from the mean of the benign random models."""
    watch = Spy()
    callbacks = [Replay(seed), attack, watch]
    run = fit(
        make_client(),
        blobs(*SIZES),
        callbacks=callbacks,
        max_rounds=1,
        aggregator=WeightedAverage(weighting="uniform", mean=rule),
    )
    sent = vectors(watch.updates[0])
    benign = np.delete(sent, sorted(attack.bad(run.federation)), axis=0)
    weights = {n: t for n, t in run.weights.items() if n in watch.updates[0][0]["weights"]}
    return np.linalg.norm(vectors({0: {"weights": weights}})[0] - benign.mean(0))


PROBED = {
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(2),
    "krum": Krum(2),
    "multi_krum": MultiKrum(2),
    "geometric": GeometricMedian(),
    "clipping": CentredClipping(),
    "bound": NormBound(),
    "bucketing": Bucketing(CoordinateMedian()),
    "mixing": NearestNeighbourMixing(TrimmedMean(2), 2),
}


@pytest.mark.parametrize("name", swept(PROBED, ("median", "krum", "mixing"), str))
@pytest.mark.by_default(but=["median"])
def test_an_attack_that_knows_the_rule_leads_it_no_less_far_than_those_that_do_not(name):
    rule = PROBED[name]
    for seed in range(2):
        blind = [led_astray(attack(0.25), rule, seed) for attack in (MinMax, MinSum)]
        best = led_astray(AdaptiveAttack(0.25), rule, seed)
        assert best > 0.9999 * max(blind) and best > 0.97 * led_astray(
            AdaptiveAttack(0.25, direction="sign"), rule, seed
        )


def test_an_attack_that_knows_the_rule_finds_more_than_those_that_do_not():
    for name in ("trimmed", "krum", "bound"):
        blind = max(led_astray(attack(0.25), PROBED[name], 0) for attack in (MinMax, MinSum))
        assert led_astray(AdaptiveAttack(0.25), PROBED[name], 0) > 1.1 * blind, name


def test_an_attack_that_knows_of_a_plain_mean_goes_as_far_as_it_may():
    one, ten, hundred = (led_astray(AdaptiveAttack(0.25, limit=limit), None, 0) for limit in (1, 10, 100))
    blind = max(led_astray(attack(0.25), None, 0) for attack in (MinMax, MinSum))
    assert ten == pytest.approx(10 * one, rel=1e-3) and hundred == pytest.approx(10 * ten, rel=1e-3)
    assert led_astray(AdaptiveAttack(0.25, direction="std", limit=1), None, 0) == pytest.approx(blind, rel=1e-3)


def test_trying_uploads_changes_nothing_that_the_server_keeps_or_draws():
    # the same uploads, sent without trying any
    rule = Bucketing(CoordinateMedian())
    attack, watch = AdaptiveAttack(0.25), Spy()
    run = fit(
        make_client(), blobs(*SIZES), callbacks=[attack, watch], max_rounds=2, aggregator=WeightedAverage(mean=rule)
    )

    class Send(FederatedCallback):
        def on_aggregate_start(self, trainer, federation, updates):
            updates.update(watch.updates[federation.round])

    again = fit(make_client(), blobs(*SIZES), callbacks=[Send()], max_rounds=2, aggregator=WeightedAverage(mean=rule))
    assert equal(run.weights, again.weights)
    assert equal(run.federation.aggregator.state, again.federation.aggregator.state)


def test_a_larger_inner_product_turns_the_mean_around():
    x, honest, sent, bad = rounds_first(IPM(0.25, scale=4.0))
    ahead = np.delete(honest, bad, axis=0).mean(0) - x
    assert (sent.mean(0) - x) @ ahead < 0 < (honest.mean(0) - x) @ ahead


def test_a_lone_replacement_becomes_the_mean_where_others_stand_still():
    x, honest, sent, bad = rounds_first(ModelReplacement(0.125))
    (one,) = bad
    assert np.allclose(x + (sent[one] - x) / 8, honest[one], atol=1e-6)


def test_flipping_twice_is_no_attack():
    once, twice = attacked(SignFlip(0.25)), attacked(SignFlip(0.25), SignFlip(0.25))
    none = attacked()
    assert np.allclose(vectors(twice[1][0]), vectors(none[1][0]), atol=1e-6)
    assert not np.allclose(vectors(once[1][0]), vectors(none[1][0]), atol=1e-3)


@EVERY_UPLOAD
def test_buffers_and_other_entries_stay(attack):
    spy, watch = Spy(), Spy()
    fit(make_client(net=noisy), blobs(*SIZES), callbacks=[spy, attack(0.25), watch], max_rounds=1)
    for client, update in watch.updates[0].items():
        before = spy.updates[0][client]
        assert update.keys() == before.keys() and equal(update["num_samples"], before["num_samples"])
        assert list(update["weights"]) == list(before["weights"])
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            entry = next(entry for entry in update["weights"] if entry.endswith(name))
            assert torch.equal(update["weights"][entry], before["weights"][entry])


@pytest.mark.parametrize(
    ("attack", "kind"),
    [
        (BufferAttack(0.25), "running_mean"),
        (BufferAttack(0.25, value=-2.5, buffer="running_var"), "running_var"),
        (BufferAttack(0.25, value=1e9, buffer="num_batches_tracked"), "num_batches_tracked"),
    ],
    ids=["mean", "variance", "counter"],
)
def test_an_attack_on_buffers_changes_these_alone(attack, kind):
    spy, watch = Spy(), Spy()
    run = fit(make_client(net=noisy), blobs(*SIZES), callbacks=[spy, attack, watch], max_rounds=1)
    bad = attack.bad(run.federation)
    assert len(bad) == 2
    for client, update in watch.updates[0].items():
        before = spy.updates[0][client]
        assert update.keys() == before.keys() and list(update["weights"]) == list(before["weights"])
        for name, tensor in update["weights"].items():
            changed = client in bad and name.endswith(kind)
            expected = torch.full_like(tensor, attack.value) if changed else before["weights"][name]
            assert torch.equal(tensor, expected) and tensor.dtype == before["weights"][name].dtype


def test_an_attack_on_buffers_of_nobody_leaves_a_run_its_bits():
    plain, run = (
        fit(make_client(net=noisy), blobs(*SIZES), callbacks=callbacks) for callbacks in ([], [BufferAttack(0.0)])
    )
    assert equal(plain.weights, run.weights)
    assert equal(plain.federation.federation_state(), run.federation.federation_state())


@pytest.mark.exhaustive
def test_an_attack_on_buffers_is_the_same_in_a_resumed_run_and_in_every_engine(tmp_path):
    def run(**settings):
        callbacks = [BufferAttack(0.25), *settings.pop("further", [])]
        return fit(make_client(net=steady), blobs(*SIZES), callbacks=callbacks, max_rounds=4, **settings)

    whole = run()
    run(root=tmp_path, further=[Pause(2)])
    assert same_end(whole, run(root=tmp_path, ckpt_path="last"))
    assert equal(whole.weights, run(engine=Processes).weights)
    vectorised = run(engine=Vectorised).weights
    assert all(torch.allclose(whole.weights[name], vectorised[name], rtol=1e-4, atol=1e-4) for name in vectorised)


def steady(input_shape, num_classes):
    """With BatchNorm, and without the dropout that engines draw in other orders."""
    body = torch.nn.Sequential(torch.nn.Linear(input_shape[0], 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    return Net(body, torch.nn.Linear(6, num_classes))


# Who is bad


@EVERY
def test_a_fraction_of_zero_leaves_a_run_its_bits(attack):
    plain, _ = attacked(max_rounds=2, spy=False)
    run, _ = attacked(attack(0.0), max_rounds=2, spy=False)
    assert equal(plain.weights, run.weights)
    assert equal(plain.federation.federation_state(), run.federation.federation_state())
    assert all(row["attack/fraction"] == 0 and row["benign/val/acc"] == row["val/acc"] for row in run.rows)


def test_the_bad_are_the_same_for_every_method_attack_and_engine():
    runs = [
        (made := attack(0.4), attacked(made, method=method, engine=engine, spy=False)[0])
        for attack, method, engine in (
            (SignFlip, FedAvg, Sequential),
            (LabelFlip, Local, Vectorised),
            (ALIE, FedPer, Processes),
        )
    ]
    bad = {frozenset(attack.bad(run.federation)) for attack, run in runs}
    (clients,) = bad
    assert len(clients) == 3
    assert {row["attack/fraction"] for _, run in runs for row in run.rows} == {3 / 8}


def test_more_of_them_include_those_of_fewer_and_seeds_differ():
    run, _ = attacked(spy=False)
    groups = [SignFlip(fraction).bad(run.federation) for fraction in (0.1, 0.25, 0.5, 0.9)]
    assert list(map(len, groups)) == [1, 2, 4, 7] and all(one < other for one, other in pairwise(groups))
    drawn = set()
    for seed in range(10):
        run.federation.seed = seed
        drawn.add(frozenset(SignFlip(0.25).bad(run.federation)))
    assert len(drawn) > 5


@EVERY
@pytest.mark.by_default("LabelFlip")
def test_a_resumed_run_is_the_whole_one(attack, tmp_path):
    def run(**settings):
        callbacks = [attack(0.25), *settings.pop("further", [])]
        return fit(make_client(), blobs(*SIZES), callbacks=callbacks, max_rounds=4, clients_per_round=5, **settings)

    whole = run()
    run(root=tmp_path, further=[Pause(2)])
    assert same_end(whole, run(root=tmp_path, ckpt_path="last"))


@EVERY
@pytest.mark.by_default("SignFlip")
def test_engines_agree(attack):
    ends = [attacked(attack(0.25), max_rounds=2, engine=e, spy=False)[0].weights for e in (Sequential, Vectorised)]
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-4) for name in ends[0])
    assert equal(ends[0], attacked(attack(0.25), max_rounds=2, engine=Processes, spy=False)[0].weights)


def test_a_round_may_have_none_of_them_or_nobody_else():
    run, _ = attacked(ALIE(0.5), clients_per_round=1, max_rounds=8, spy=False)
    assert {row["attack/fraction"] for row in run.rows} == {0.0, 1.0}


# The record


def test_benign_clients_are_reported_apart():
    attack = SignFlip(0.25)
    run, _ = attacked(attack, spy=False)
    tested = run.test()
    benign = sorted(set(range(8)) - attack.bad(run.federation))
    sizes = [run.data.size(client, "test") for client in benign]
    accuracies = [tested[client]["acc"] for client in benign]
    final = run.logger.summary["final"]
    assert final["benign/test/acc"] == pytest.approx(np.average(accuracies, weights=sizes))
    assert final["benign/test/acc_mean"] == pytest.approx(np.mean(accuracies))
    assert final["benign/test/acc_worst"] == min(accuracies) and "benign/val/acc" in run.rows[-1]
    assert run.logger.clients[0].keys() == attacked(spy=False)[0].logger.clients[0].keys()


def test_a_test_reports_them_too(tmp_path):
    attack = SignFlip(0.25)
    run, _ = attacked(attack, spy=False, root=tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[attack])
    (metrics,) = trainer.test(make_client(), datamodule=blobs(*SIZES), ckpt_path=str(run.last))
    final = run.logger.summary["final"]
    assert metrics["benign/test/acc"] == pytest.approx(final["benign/test/acc"])
    assert metrics["test/acc"] == pytest.approx(final["test/acc"]) != metrics["benign/test/acc"]


def test_a_plain_run_has_no_columns_of_it():
    run, _ = attacked(spy=False)
    assert not [name for name in run.rows[-1] if name.startswith(("benign", "attack"))]


def test_a_median_bears_what_a_mean_does_not():
    attack = GaussianUpload(0.25, std=20.0)
    ends = [
        fit(make_client(), blobs(*SIZES), callbacks=[attack], aggregator=server, max_rounds=5).rows[-1][
            "benign/val/loss"
        ]
        for server in (WeightedAverage(), WeightedAverage(mean=CoordinateMedian()))
    ]
    assert ends[0] > 10 * ends[1]


# Samples


def test_flipped_classes_are_those_of_training_samples_of_bad_clients_and_end_with_the_run():
    seen = {}

    class Look(Spy):
        def on_round_start(self, trainer, federation, cohort):
            seen.update({(c, s): federation.data.part(c, s).y for c in cohort for s in ("train", "val", "test")})

    attack = LabelFlip(0.25)
    data = blobs(*SIZES)
    run = fit(make_client(), data, callbacks=[attack, Look()], max_rounds=1)
    bad = attack.bad(run.federation)
    for (client, split), y in seen.items():
        true = data.part(client, split).y
        assert torch.equal(y, data.num_classes - 1 - true if client in bad and split == "train" else true)
    assert "parts" not in vars(data)


def test_one_class_may_be_flipped_to_another():
    run, _ = attacked(LabelFlip(0.25, source=1, target=2), spy=False)
    flipped = LabelFlip(0.25, source=1, target=2).poisoned(run.data.part(0, "train"), 0, run.federation).y
    true = run.data.part(0, "train").y
    assert torch.equal(flipped, torch.where(true == 1, 2, true)) and (true == 1).any()


def test_data_are_given_back_when_a_run_fails():
    class Fails(Spy):
        def on_aggregate_start(self, trainer, federation, updates):
            raise RuntimeError("in the middle")

    data = blobs(*SIZES)
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(make_client(), data, callbacks=[LabelFlip(0.25), Fails()])
    assert "parts" not in vars(data)


def digits(**settings):
    return Digits(num_clients=5, max_samples=600, **settings)


def digit_client(method=FedAvg, lr=0.1):
    from functools import partial

    from pfl_lightning.nets import MLP

    torch.manual_seed(0)
    return method(
        input_shape=(1, 8, 8), num_classes=10, net=partial(MLP, hidden=[32]), optimizer=partial(torch.optim.SGD, lr=lr)
    )


@pytest.mark.exhaustive
def test_a_backdoor_that_was_trained_succeeds_and_one_that_was_not_has_the_base_rate():
    runs = [
        fit(digit_client(), digits(), callbacks=[Backdoor(fraction, target=3)], max_rounds=8, local_epochs=2)
        for fraction in (0.0, 0.4)
    ]
    base, trained = (run.rows[-1]["attack/success"] for run in runs)
    assert base < 0.2 and trained > 0.6
    assert runs[1].rows[-1]["benign/val/acc"] > 0.7


@pytest.mark.parametrize("engine", [Vectorised, Processes], ids=lambda e: e.__name__)
@pytest.mark.by_default("Processes")
def test_success_does_not_depend_on_the_engine(engine):
    ends = [
        fit(digit_client(), digits(), callbacks=[Backdoor(0.4, share=0.5)], max_rounds=2, engine=e).rows[-1]
        for e in (Sequential, engine)
    ]
    assert ends[0]["attack/success"] == pytest.approx(ends[1]["attack/success"], abs=0.02)


def test_success_is_counted_over_benign_images_of_other_classes():
    attack = Backdoor(0.4, target=3, patch=3, value=0.5)
    run = fit(digit_client(), digits(), callbacks=[attack], max_rounds=2)
    hits = total = 0
    for client in sorted(set(range(5)) - attack.bad(run.federation)):
        held = run.data.part(client, "test")
        x = held.x[held.y != 3].clone()
        x[:, :, 5:, 5:] = 0.5
        run.model.receive({}, run.federation.aggregator.download(client), None)
        run.model.eval()
        hits, total = hits + int((run.model.net(x).argmax(1) == 3).sum()), total + len(x)
    assert run.rows[-1]["attack/success"] == pytest.approx(hits / total, abs=1e-6)


@pytest.mark.parametrize(("share", "count"), [(1.0, 30), (0.1, 3), (0.11, 4), (1e-6, 1)])
def test_so_many_images_have_the_patch(share, count):
    attack = Backdoor(0.4, target=3, share=share)
    run = fit(digit_client(), digits(), callbacks=[attack], max_rounds=1)
    own = run.data.part(0, "train").take(slice(30))
    own.y.fill_(5)
    changed = attack.poisoned(own, 0, run.federation)
    assert int((changed.y == 3).sum()) == count
    marked = (changed.x[:, :, 6:, 6:] == 1).all(-1).all(-1).all(-1)
    assert bool(marked[changed.y == 3].all()) and torch.equal(changed.x[changed.y == 5], own.x[changed.y == 5])


def test_a_backdoor_may_be_enlarged():
    plain, enlarged = (
        fit(digit_client(), digits(), callbacks=callbacks, max_rounds=1).rows[-1]["attack/success"]
        for callbacks in ([Backdoor(0.2)], [Backdoor(0.2), ModelReplacement(0.2)])
    )
    assert enlarged > plain + 0.2


# Refusals


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SignFlip(1.0), "SignFlip: fraction=1.0 must be 0"),
        (lambda: SignFlip(-0.1), "fraction=-0.1 must be 0"),
        (lambda: SignFlip(math.nan), "fraction=nan must be 0"),
        (lambda: SignFlip(0.1, scale=0.0), "SignFlip: scale=0.0 must be above 0"),
        (lambda: GaussianUpload(0.1, std=-1.0), "std=-1.0 must be above 0"),
        (lambda: FreeRider(0.1, std=-1.0), "std=-1.0 must be 0 or more"),
        (lambda: ModelReplacement(0.1, scale=-1.0), "scale=-1.0 must be above 0"),
        (lambda: ALIE(0.1, z=0.0), "ALIE: z=0.0 must be above 0"),
        (lambda: MinMax(0.1, knowledge="all"), "knowledge='all' must be one of omniscient, own"),
        (lambda: AdaptiveAttack(0.1, limit=0.5), "AdaptiveAttack: limit=0.5 must be 1 or more"),
        (lambda: AdaptiveAttack(0.1, limit=math.nan), "limit=nan must be 1 or more"),
        (lambda: AdaptiveAttack(0.1, direction="up"), "direction='up' must be one of best, std, mean, sign"),
        (lambda: BufferAttack(0.1, value=math.inf), "BufferAttack: value=inf must be finite"),
        (lambda: Backdoor(0.1, share=0.0), "share=0.0 must be above 0"),
        (lambda: Backdoor(0.1, patch=0), "patch=0 at least 1"),
    ],
)
def test_settings_out_of_their_range_are_refused(make, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        make()


@pytest.mark.parametrize(
    ("attack", "method", "sentence"),
    [
        (SignFlip(0.2), FedProto, "SignFlip changes models that clients receive and send, and FedProto sends none"),
        (SignFlip(0.2), IFCA, "and ClusterModels sends none as weights"),
        (ALIE(0.2), Local, "and Local sends none as weights"),
        (BufferAttack(0.2), FedAvg, "buffer='running_mean' is the end of no .* FedAvg send; take a net with BatchNorm"),
        (Backdoor(0.2), FedAvg, "Backdoor puts a patch of 2 x 2 pixels on images, and inputs have the shape"),
        (LabelFlip(0.2, source=9), FedAvg, "LabelFlip: source=9 must be a class number from 0 to 2"),
    ],
    ids=["no_weights", "clusters", "local", "no_buffers", "no_images", "class"],
)
def test_what_it_cannot_attack_is_refused_before_the_first_round(attack, method, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        attacked(attack, method=method)


def test_a_server_that_takes_no_mean_is_refused_by_an_attack_that_tries_it():
    with pytest.raises(MisconfigurationException, match=r"AdaptiveAttack .* LDAWA .*; take MinMax"):
        attacked(AdaptiveAttack(0.2), aggregator=LDAWA())


def test_buffers_that_stay_with_clients_or_have_another_name_are_refused():
    for settings, sentence in (({"buffers": "local"}, "take a net with BatchNorm"), ({}, "take one of num_batches_tr")):
        buffer = "running_mean" if settings else "running_men"
        with pytest.raises(MisconfigurationException, match=sentence):
            fit(make_client(net=noisy, **settings), blobs(*SIZES), callbacks=[BufferAttack(0.2, buffer=buffer)])


def test_the_command_line(capsys):
    small = f"fit {QUICKSTART} {QUIET} --data.max_samples 300 --trainer.max_rounds 1 --model FedAvg"
    pfl(f"{small} --trainer.callbacks+=SignFlip --trainer.callbacks.fraction 0.2 --aggregator.mean CoordinateMedian")
    assert 0 < summary("FedAvg+WeightedAverage+CoordinateMedian-Digits/version_0")["final"]["benign/test/acc"] < 1
    assert Path("runs").exists()
    capsys.readouterr()
    assert "did you mean SignFlip?" in refusal(f"{small} --trainer.callbacks+=SignFlp", capsys)
    line = f"{small} --trainer.callbacks+=SignFlip --trainer.callbacks.fraction 2"
    assert "SignFlip: fraction=2.0 must be 0" in refusal(line, capsys)
