"""Parameters that the net is built with frozen: they exist once, whatever the method."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    NETS,
    Pause,
    Spy,
    blobs,
    equal,
    fit,
    load,
    make_client,
    make_trainer,
    noisy,
    plain,
    same_end,
)
from pfl_lightning.aggregators import ClusterModels, FedLAW
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.client.common import common_parameters, trained_parameters, whole_model
from pfl_lightning.client.module import payloads_of
from pfl_lightning.messages import detached, digest, num_bytes, tensors
from pfl_lightning.methods import (
    APPLE,
    GPFL,
    IFCA,
    MOON,
    CloudProx,
    ControlVariates,
    Ditto,
    FedALA,
    FedAS,
    FedAvg,
    FedBABU,
    FedBN,
    FedClassAvg,
    FedCP,
    FedFomo,
    FedGH,
    FedPer,
    FedProx,
    FedRep,
    FedRoD,
    LGFedAvg,
    Local,
    PFedMe,
)
from pfl_lightning.nets import Net
from sweeps import all_but

WEIGHT = "net.features.0.weight"
ROOM = HIDDEN * HIDDEN + HIDDEN
"""Trained numbers of the features of `half_frozen`."""
HEAD = CLASSES * HIDDEN + CLASSES
METHODS = [FedAvg, FedPer, Ditto, ControlVariates, MOON, PFedMe]


def half_frozen(input_shape, num_classes):
    """A frozen layer under a trained one."""
    first = nn.Linear(input_shape[0], HIDDEN).requires_grad_(False)
    body = nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    return Net(body, nn.Linear(HIDDEN, num_classes))


def frozen_norm(input_shape, num_classes):
    net = noisy(input_shape, num_classes)
    net.features[:2].requires_grad_(False)
    return net


class Watch(FederatedCallback):
    """Keeps the names of all entries that travel or stay, and the numbers in a client's."""

    def __init__(self):
        self.names, self.sent, self.kept = set(), 0, 0

    def on_aggregate_start(self, trainer, federation, updates):
        self.note(updates)
        self.sent = num_bytes(updates[0]["weights"])

    def on_train_epoch_end(self, trainer, federation):
        self.note({client: vars(state) for client, state in federation.clients.items()})
        self.note(federation.federation_state())
        self.kept = num_bytes(federation.clients[0].personal)

    def note(self, record):
        if isinstance(record, dict):
            self.names |= {name for name in record if isinstance(name, str)}
            for value in record.values():
                self.note(value)
        elif isinstance(record, (list, tuple)):
            for value in record:
                self.note(value)


def single(entries):
    return {name: tensor.detach().float().clone() for name, tensor in entries.items()}


def run(method, engine="sequential", net=half_frozen, **settings):
    watch = Watch()
    model = make_client(method, net=net, optimizer=partial(SGD, lr=0.05))
    before = single(common_parameters(model))
    assert before
    done = fit(model, engine=engine, callbacks=[watch], **settings)
    assert digest(single(common_parameters(model))) == digest(before)
    assert digest(single({name: done.weights[name] for name in before})) == digest(before)
    assert not watch.names & model.common_names
    return done, watch


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("precision", "near"), [pytest.param("32-true", 1e-6, marks=pytest.mark.exhaustive), ("64-true", 1e-9)]
)
def test_frozen_parameters_are_nowhere_and_stay_under_both_engines(method, precision, near):
    runs = [run(method, engine, precision=precision)[0] for engine in ("sequential", "vectorised")]
    ends = [(r.weights, [vars(r.federation.clients[client]) for client in range(4)]) for r in runs]
    for one, other in zip(*map(tensors, ends), strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=near)


@pytest.mark.parametrize(
    ("method", "sent", "kept"),
    [
        (FedAvg, ROOM + HEAD, 0),
        (FedPer, ROOM, HEAD),
        (FedProx, ROOM + HEAD, 0),
        (CloudProx, ROOM + HEAD, ROOM + HEAD),
        (ControlVariates, ROOM + HEAD, ROOM + HEAD),
        (Ditto, ROOM + HEAD, ROOM + HEAD + 1 / 4),
        (PFedMe, ROOM + HEAD, ROOM + HEAD + 1 / 4),
        (MOON, ROOM + HEAD, ROOM + 1 / 4),
        (FedALA, ROOM + HEAD, 2 * HEAD + 2),
        (FedFomo, ROOM + HEAD, 2 * (ROOM + HEAD)),
        (APPLE, ROOM + HEAD, ROOM + HEAD + 4),
        (partial(FedClassAvg, contrastive=False), HEAD, ROOM),
    ],
)
def test_bytes_are_those_of_what_is_trained(method, sent, kept):
    _, watch = run(method, max_rounds=2)
    assert (watch.sent, watch.kept) == (4 * sent, 4 * kept)


def test_what_controls_scaffold_is_as_long_as_what_is_trained():
    done, _ = run(ControlVariates, max_rounds=1)
    assert done.federation.aggregator.state["control"].shape == (ROOM + HEAD,)
    run(partial(ControlVariates, option="I"), max_rounds=2)


@pytest.mark.parametrize(("method", "server"), [(IFCA, ClusterModels), (FedAvg, FedLAW)])
def test_server_sides_that_run_nets_keep_none(method, server):
    run(method, aggregator=server())


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_common_where_nothing_was_frozen(method):
    model = make_client(method, net=noisy)
    fit(model, max_rounds=1)
    assert not model.common_names and list(whole_model(model)) == list(model.state_dict())


def test_copies_of_a_net_share_what_is_frozen():
    for method, name in ((Ditto, "personal"), (PFedMe, "personal"), (FedFomo, "old")):
        model = make_client(method, net=half_frozen)
        copied = model.get_submodule(name)
        assert copied.features[0].weight is model.net.features[0].weight
        assert copied.features[2].weight is not model.net.features[2].weight
        assert f"{name}.features.0.weight" in model.common_names
        assert f"{name}.features.2.weight" not in model.common_names
        assert list(trained_parameters(model, name)) == list(trained_parameters(model, "net"))


def test_an_older_model_of_moon_has_none_of_its_own():
    model = make_client(MOON, net=half_frozen)
    assert list(model.previous.tensors()) == ["2.weight", "2.bias"]
    x = torch.randn(3, FEATURES)
    with torch.no_grad():
        assert torch.equal(model.previous(x), model.net.features(x))
        model.net.features[2].weight.add_(1)
        assert not torch.equal(model.previous(x), model.net.features(x))
        model.previous.take_from(model.net.features)
        assert torch.equal(model.previous(x), model.net.features(x))
        assert torch.equal(model.double().previous(x.double()), model.net.features(x.double()))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_statistics_of_frozen_layers_move_and_travel(engine):
    done, watch = run(FedAvg, engine, frozen_norm, max_rounds=1)
    assert "net.features.1.running_mean" in watch.names and done.weights["net.features.1.running_mean"].any()
    done, watch = run(partial(FedAvg, buffers="local"), engine, frozen_norm, max_rounds=1)
    kept = done.federation.clients[0].personal
    assert kept["net.features.1.running_mean"].any() and watch.sent == 4 * HEAD


def frozen_late(method):
    """A method whose constructor freezes a layer of the net when it is built."""

    class Late(method):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.net.features[0].requires_grad_(False)

    return Late


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        (FedPer, "sequential"),
        (FedPer, "processes"),
        (FedPer, "vectorised"),
        (APPLE, "sequential"),
        (APPLE, "vectorised"),
    ],
)
def test_what_a_subclass_freezes_is_common_too(method, engine):
    settings = {"max_rounds": 2, "engine": engine}
    first = fit(make_client(method, net=half_frozen), **settings)
    late = fit(make_client(frozen_late(method), net=trained_twice), **settings)
    assert late.model.common_names == first.model.common_names
    assert equal(late.federation.aggregator.state, first.federation.aggregator.state)
    assert equal(late.weights, first.weights)


def trained_twice(input_shape, num_classes):
    """As `half_frozen`, and nothing is frozen."""
    return half_frozen(input_shape, num_classes).requires_grad_(True)


@pytest.mark.exhaustive
def test_what_is_frozen_before_fit_is_common_and_its_run_goes_on(tmp_path):
    def made(seed=3):
        model = make_client(FedPer, seed=seed, net=trained_twice)
        model.net.features[0].requires_grad_(False)
        return model

    whole = fit(made(), max_rounds=4)
    paused = fit(made(), root=tmp_path, callbacks=[Pause(2)], max_rounds=4)
    assert WEIGHT in paused.model.common_names
    assert not any(WEIGHT in payload["weights"] for payload in payloads_of(load(paused.last)["federation"]).values())
    resumed = fit(made(seed=8), root=tmp_path, ckpt_path="last", resume_changed=True, max_rounds=4)
    assert same_end(whole, resumed)
    loaded = frozen_late(FedPer).load_from_checkpoint(paused.last, client=1, net=trained_twice, weights_only=True)
    assert equal(loaded.state_dict()[WEIGHT], whole.weights[WEIGHT])


def test_another_run_counts_what_is_frozen_then():
    model = make_client(net=trained_twice)
    assert not fit(model, max_rounds=1).model.common_names
    model.net.features[0].requires_grad_(False)
    spy = Spy()
    fit(model, max_rounds=1, callbacks=[spy])
    assert WEIGHT not in spy.updates[0][0]["weights"] and "net.features.2.weight" in spy.updates[0][0]["weights"]
    model.net.requires_grad_(True)
    assert not fit(model, max_rounds=1).model.common_names


@pytest.mark.parametrize("method", [Ditto, FedProx, MOON, ControlVariates])
def test_what_is_frozen_when_it_has_been_copied_is_refused(method):
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net: requires_grad of net\.features\.0\.bias "):
        fit(make_client(frozen_late(method), net=trained_twice))


def test_a_phase_that_fails_leaves_nothing_frozen():
    class Failing(FedRep):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = make_client(Failing)
    with pytest.raises(ZeroDivisionError):
        fit(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_modules_of_its_own_that_a_method_freezes_stay_its_own():
    class Teacher(FedAvg):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.teacher = nn.Linear(2, 2).requires_grad_(False)

    model = make_client(Teacher)
    done = fit(model, max_rounds=1)
    assert not model.common_names
    assert list(done.federation.clients[0].personal) == ["teacher.weight", "teacher.bias"]


def test_it_is_common_whatever_a_method_says_of_it():
    class Everything(FedAvg):
        def is_shared(self, name):
            return True

        def is_personal(self, name):
            return True

    for engine in ("sequential", "vectorised"):
        run(Everything, engine, max_rounds=1)


@pytest.mark.parametrize("method", [FedAvg, Ditto, MOON])
def test_processes_give_the_same_bits(method):
    one, other = (run(method, engine, max_rounds=2)[0] for engine in ("sequential", "processes"))
    assert same_end(one, other)


@pytest.mark.parametrize("method", all_but([MOON, PFedMe], [FedPer, Ditto, MOON, PFedMe, ControlVariates]))
@pytest.mark.by_default("Ditto")
def test_a_run_goes_on_with_what_its_checkpoint_has_frozen(method, tmp_path):
    make = partial(make_client, method, net=half_frozen)
    whole = fit(make(), max_rounds=4)
    paused = fit(make(), root=tmp_path, callbacks=[Pause(2)], max_rounds=4)
    again = make(seed=8)
    assert not equal(again.state_dict()[WEIGHT], whole.weights[WEIGHT])
    assert same_end(whole, fit(again, root=tmp_path, ckpt_path="last", resume_changed=True, max_rounds=4))
    saved = load(paused.last)
    once = {name: saved["state_dict"][name].data_ptr() for name in again.common_names}
    assert len(set(once.values())) == 2 and WEIGHT in once
    assert not any(WEIGHT in part for part in (*saved["federation"]["initial"], saved["federation"]["start"]))


class FrozenWide(NETS[1]):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.features[0].requires_grad_(False)


class FrozenSmall(NETS[0]):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.features.bias.requires_grad_(False)


@pytest.mark.exhaustive
def test_each_network_of_a_list_has_its_own(tmp_path):
    nets = [FrozenSmall, FrozenWide]
    make = partial(make_client, partial(FedClassAvg, contrastive=False, share="classifier"), net=nets)
    whole = fit(make(), max_rounds=3)
    fit(make(), root=tmp_path, callbacks=[Pause(2)], max_rounds=3)
    resumed = fit(make(seed=8), root=tmp_path, ckpt_path="last", resume_changed=True, max_rounds=3)
    assert same_end(whole, resumed)
    path = resumed.last
    settings = {"net": nets, "optimizer": partial(SGD, lr=0.1), "weights_only": True}
    torch.manual_seed(0)
    for client, trained in ((2, whole.federation.architectures[0]), (1, whole.federation.architectures[1])):
        model = FedClassAvg.load_from_checkpoint(path, client=client, **settings)
        frozen = common_parameters(model)
        assert frozen and equal({name: p.detach() for name, p in frozen.items()}, detached(common_parameters(trained)))


def test_a_model_out_of_a_checkpoint_has_them(tmp_path):
    done = fit(make_client(Ditto, net=half_frozen), root=tmp_path, max_rounds=1)
    model = Ditto.load_from_checkpoint(done.last, client=1, net=half_frozen, weights_only=True)
    assert equal(detached(common_parameters(model)), detached(common_parameters(done.model)))
    assert equal(model.personal.features[0].weight.detach(), done.weights[WEIGHT])


@pytest.mark.parametrize("hook", ["training_step", "upload", "on_download"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_who_changes_them_is_stopped(hook, engine):
    class Moves(FedAvg):
        pass

    def moved(self, *args):
        with torch.no_grad():
            self.net.features[0].weight.mul_(0.5)
        return getattr(FedAvg, hook)(self, *args)

    setattr(Moves, hook, moved)
    with pytest.raises(MisconfigurationException, match=r"changes net\.features\.0\.weight, which"):
        fit(make_client(Moves, net=half_frozen), engine=engine)


def all_frozen(input_shape, num_classes):
    net = plain(input_shape, num_classes)
    net.requires_grad_(False)
    return net


def frozen_body(input_shape, num_classes):
    net = plain(input_shape, num_classes)
    net.features.requires_grad_(False)
    return net


def test_something_must_be_trained():
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net has no parameter to train"):
        make_client(net=all_frozen)
    for engine in ("sequential", "vectorised"):
        with pytest.raises(MisconfigurationException, match=r"FedRep trains in its phase 'body' are frozen"):
            fit(make_client(FedRep, net=frozen_body), engine=engine)
        with pytest.raises(MisconfigurationException, match=r"it has no parameter of those that FedRep trains"):
            fit(make_client(FedRep, net=linear), engine=engine)


def frozen_head(input_shape, num_classes):
    net = plain(input_shape, num_classes)
    net.classifier.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", [FedPer, FedBABU, FedRep, FedAS, FedRoD, FedCP])
def test_a_method_that_would_keep_nothing_is_refused(method):
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net: all that .*FedAvg\.$"):
        fit(make_client(method, net=frozen_head))


@pytest.mark.parametrize("method", [LGFedAvg, FedGH, FedClassAvg])
def test_features_that_would_stay_and_are_frozen_are_refused(method):
    settings = {"contrastive": False} if method is FedClassAvg else {}
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net: all that .* such as net\.features"):
        fit(make_client(method, net=frozen_body, **settings))


def linear(input_shape, num_classes):
    """A classifier of the inputs themselves."""
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


@pytest.mark.parametrize(("method", "net"), [(FedPer, linear), (FedPer, frozen_body), (LGFedAvg, frozen_head)])
def test_a_method_that_would_share_nothing_says_so(method, net):
    with pytest.warns(UserWarning, match=rf"^model\.net=Net: .*{method.__name__} would share"):
        done = fit(make_client(method, net=net), max_rounds=1)
    if method is FedPer:
        alone = fit(make_client(Local, net=net), max_rounds=1)
        assert [row["val/acc"] for row in done.rows] == [row["val/acc"] for row in alone.rows]


@pytest.mark.exhaustive
def test_methods_that_have_both_say_nothing(recwarn):
    for method in (FedAvg, FedPer, LGFedAvg, FedRoD, Ditto, Local):
        fit(make_client(method), max_rounds=1)
    # which keep statistics, and a condition for features
    fit(make_client(FedBN, net=frozen_norm), max_rounds=1)
    fit(make_client(GPFL, net=frozen_head), max_rounds=1)
    fit(make_client(FedAvg, net=half_frozen, buffers="local"), max_rounds=1)
    assert not [warning for warning in recwarn if "would share" in str(warning.message)]


def test_the_central_model_is_tested_with_them():
    data = blobs(client_test="own", central_test=0.2)
    done = fit(make_client(net=half_frozen), data, max_rounds=1)
    assert "test/global_acc" in done.federation.test_global() and 0 < done.federation.test_global()["test/global_acc"]


def test_only_what_travels_is_in_an_update():
    spy = Spy()
    fit(make_client(net=half_frozen), callbacks=[spy], max_rounds=1)
    assert list(spy.updates[0][0]["weights"]) == [
        *("net.features.2.weight", "net.features.2.bias", "net.classifier.weight", "net.classifier.bias")
    ]


def test_a_checkpoint_is_tested_with_its_own(tmp_path):
    done = fit(make_client(FedPer, net=half_frozen), root=tmp_path, max_rounds=2)
    other = make_client(FedPer, net=half_frozen, seed=8)
    trainer = make_trainer()
    trainer.test(other, datamodule=blobs(), ckpt_path=str(done.last))
    tested = trainer.lightning_module.evaluations.results["test"]
    assert tested == done.test() and equal(other.state_dict()[WEIGHT], done.weights[WEIGHT])
