"""What client modules and aggregators may not do, and would do wrong in silence."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning import Aggregator, AggregatorList, FederatedTrainer, WeightedAverage
from pfl_lightning.aggregators import FedAWA, FedDisco
from pfl_lightning.contract.attributes import Attributes, content
from pfl_lightning.engines import Auto, Processes, Sequential, Vectorised
from pfl_lightning.methods import FedPer
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server.base import check_buffers

ENGINES = [Sequential, Processes, Vectorised, Auto]

# What clients keep


class MisplacedDyn(FedAvg):
    """FedDyn as a newcomer writes it: the linear term is a plain attribute and not a buffer."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.start = None
        self.h = torch.zeros(sum(p.numel() for p in self.net.parameters()))

    def vector(self):
        return torch.cat([p.flatten() for p in self.net.parameters()])

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.register_buffer("start", self.vector().detach(), persistent=False)

    def loss(self, features, logits, target):
        gap = self.vector() - self.start
        return super().loss(features, logits, target) - self.h @ self.vector() + 0.05 * gap @ gap

    def upload(self, data):
        self.h = self.h - 0.1 * (self.vector().detach() - self.start)
        return super().upload(data)

    def __setattr__(self, name, value):
        if name == "start" and value is None:
            return
        super().__setattr__(name, value)


class Tensors(FedAvg):
    """Keeps a tensor that hooks change in place."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = torch.zeros(1)

    def upload(self, data):
        self.seen += 1
        return super().upload(data)


class ById(FedAvg):
    """Keeps a dictionary of clients, as other libraries' examples do."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.memory = {}

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.memory[self.client_id] = len(self.memory)


class Counting(FedAvg):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


LEAKS = [
    (MisplacedDyn, "upload", "h"),
    (Tensors, "upload", "seen"),
    (ById, "on_download", "memory"),
    (Counting, "training_step", "steps"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "hook", "attribute"), LEAKS)
def test_what_would_go_over_to_the_next_client_ends_the_run(method, hook, attribute, engine):
    with pytest.raises(
        MisconfigurationException,
        match=rf"{method.__name__}: {hook} changes the attribute {attribute},.*register_buffer",
    ):
        fit(make_client(method), engine=engine)


def test_a_part_of_the_net_that_keeps_something_is_named_by_its_path():
    class Remembering(nn.Tanh):
        def forward(self, x):
            self.last = x.detach()
            return super().forward(x)

    class Own(FedAvg):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.net.features[1] = Remembering()

    with pytest.raises(
        MisconfigurationException, match=r"Own: training_step changes the attribute net\.features\.1\.last"
    ):
        fit(make_client(Own))
    Own.caches = frozenset({"net.features.1.last"})
    assert equal(fit(make_client(Own)).weights, fit(make_client()).weights)


def test_what_begins_to_leak_later_is_found_too():
    class Late(FedAvg):
        late = 0

        def upload(self, data):
            if self.round == 3:
                self.late = self.client_id
            return super().upload(data)

    fit(make_client(Late), max_rounds=3)
    with pytest.raises(MisconfigurationException, match="Late: local work changes the attribute late"):
        fit(make_client(Late), max_rounds=4)


@pytest.mark.parametrize("engine", [Sequential, Processes])
def test_a_declared_cache_is_kept_and_changes_nothing(engine):
    class Cached(FedAvg):
        caches = frozenset({"mean"})

        def on_download(self, payload, data):
            super().on_download(payload, data)
            self.mean = None if data is None else data.train.x.mean(0)

    assert equal(fit(make_client(Cached), engine=engine).weights, fit(make_client()).weights)


def test_parameters_that_are_listed_may_change():
    class Listed(FedAvg):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.listed = list(self.net.parameters())

    assert equal(fit(make_client(Listed)).weights, fit(make_client()).weights)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda value: value.append(3)),
        ({"a": {"b": [0]}}, lambda value: value["a"]["b"].append(1)),
        ({1, 2}, lambda value: value.add(3)),
        (torch.zeros(2), lambda value: value.add_(1)),
        (np.zeros(2), lambda value: np.add(value, 1, out=value)),
        (nn.Linear(1, 1), lambda value: nn.init.zeros_(value.weight)),
        (torch.Generator(), lambda value: torch.rand(1, generator=value)),
        (np.random.default_rng(0), lambda value: value.random()),
        (np.random.RandomState(0), lambda value: value.rand()),
        (random.Random(0), lambda value: value.random()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_in_place_show(value, change):
    class Keeping(WeightedAverage):
        def __init__(self):
            super().__init__()
            self.kept = value

        def aggregate(self, updates, round):
            logs = super().aggregate(updates, round)
            if round == 1:
                change(self.kept)
            return logs

    fit(make_client(), aggregator=Keeping(), max_rounds=1)
    with pytest.raises(MisconfigurationException, match=r"Keeping: aggregate changes the attribute kept,.*self\.state"):
        fit(make_client(), aggregator=Keeping(), max_rounds=2)


def test_nan_is_no_change():
    assert content(float("nan")) != content(float("nan"))
    model = make_client()
    model.unknown = float("nan")
    fit(model)


@pytest.mark.parametrize("kind", [list, tuple, lambda values: dict(enumerate(values)), lambda values: [[*values]]])
def test_a_change_of_any_value_in_a_collection_shows(kind):
    tensor, layer, holder = torch.ones(2), nn.Linear(2, 2), SimpleNamespace()
    look = Attributes({"Holder": holder}, set())
    values = [1, "a", tensor, layer, {3}]
    holder.kept = kind(values)
    before = look.look()
    holder.kept = kind(values)
    assert look.changed(before, look.look()) is None
    for place, other in enumerate((2, "b", torch.ones(2), nn.Linear(2, 2), {3})):
        holder.kept = kind([*values[:place], other, *values[place + 1 :]])
        assert look.changed(before, look.look()) == "Holder.kept"
    holder.kept = kind(values)
    tensor.add_(1)
    assert look.changed(before, look.look()) == "Holder.kept"


class Thawing(FedAvg):
    """Changes a parameter that its net has frozen."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        with torch.no_grad():
            self.net.features[0].bias.add_(1)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_change_of_a_frozen_parameter_is_refused_by_its_name(engine):
    model = make_client(Thawing)
    for parameter in model.net.features[0].parameters():
        parameter.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"Thawing: on_download changes net\.features\.0\.bias, which"):
        fit(model, engine=engine)


# What servers keep


def test_memory_of_the_server_outside_its_state_ends_the_run():
    class Momentum(WeightedAverage):
        velocity = None

        def aggregate(self, updates, round):
            before = self.state["weights"]
            logs = super().aggregate(updates, round)
            after = self.state["weights"]
            self.velocity = {n: after[n] - before[n] + 0.9 * (self.velocity or before)[n] for n in after}
            return logs

    with pytest.raises(
        MisconfigurationException, match=r"Momentum: aggregate changes the attribute velocity,.*self\.state"
    ):
        fit(make_client(), aggregator=Momentum())


def test_memory_that_download_keeps_ends_the_run_in_the_next_round():
    class Generous(WeightedAverage):
        asked = 0

        def download(self, client):
            self.asked += 1
            return super().download(client)

    with pytest.raises(
        MisconfigurationException, match="Generous: download or global_model changes the attribute asked"
    ):
        fit(make_client(), aggregator=Generous())


def test_an_optimizer_of_the_server_is_memory():
    class Learning(WeightedAverage):
        def setup(self, server):
            super().setup(server)
            self.weight = nn.Parameter(torch.zeros(1))
            self.optimizer = SGD([self.weight], lr=0.1, momentum=0.9)

        def aggregate(self, updates, round):
            self.weight.grad = torch.ones(1)
            self.optimizer.step()
            return super().aggregate(updates, round)

    with pytest.raises(MisconfigurationException, match="Learning: aggregate changes the attribute weight"):
        fit(make_client(), aggregator=Learning())


# Hooks of Lightning


def half_signs(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.sign_().mul_(0.5)


@pytest.mark.parametrize("engine", [Sequential, Processes, Auto])
def test_gradient_hooks_are_called_before_clipping(engine):
    class Signs(FedAvg):
        def on_after_backward(self):
            for parameter in self.net.parameters():
                parameter.grad.mul_(7)

        def on_before_optimizer_step(self, optimizer):
            half_signs(optimizer)

    class ByHand(FedAvg):
        def local_optimizer(self, phase, parameters):
            optimizer = super().local_optimizer(phase, parameters)
            optimizer.register_step_pre_hook(half_signs)
            return optimizer

    settings = {"optimizer": partial(SGD, lr=0.01)}
    run = fit(make_client(Signs, **settings), engine=engine)
    assert equal(run.weights, fit(make_client(ByHand, **settings)).weights)
    assert not equal(run.weights, fit(make_client(**settings)).weights)
    clipped = fit(make_client(Signs, **settings), engine=engine, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert not equal(clipped.weights, run.weights)


def near(run, other):
    return all(torch.allclose(tensor, other.weights[name], rtol=0, atol=1e-6) for name, tensor in run.weights.items())


@pytest.mark.parametrize("engine", [Sequential, Processes, Vectorised])
def test_gradients_may_be_adjusted_by_what_each_client_holds(engine):
    class Decay(FedAvg):
        def adjust_gradients(self, gradients):
            assert gradients.keys() == dict(self.named_parameters()).keys()
            return {name: gradients[name] + 0.3 * w for name, w in self.named_parameters()}

    rate = partial(SGD, lr=0.01)
    run = fit(make_client(Decay, optimizer=rate), engine=engine)
    assert near(run, fit(make_client(optimizer=partial(rate, weight_decay=0.3))))
    assert not near(run, fit(make_client(optimizer=rate)))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_adjusted_gradients_are_clipped(engine):
    class Larger(FedAvg):
        def adjust_gradients(self, gradients):
            return {name: 1000 * gradient for name, gradient in gradients.items()}

    class ByHand(FedAvg):
        def on_after_backward(self):
            for parameter in self.net.parameters():
                parameter.grad.mul_(1000)

    settings = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    run = fit(make_client(Larger), engine=engine, **settings)
    assert near(run, fit(make_client(ByHand), **settings))
    assert not near(run, fit(make_client(), **settings))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_adjusted_gradients_are_of_the_same_parameters(engine):
    class Fewer(FedAvg):
        def adjust_gradients(self, gradients):
            return dict(list(gradients.items())[1:])

    with pytest.raises(MisconfigurationException, match=r"Fewer\.adjust_gradients must return gradients of the names"):
        fit(make_client(Fewer), engine=engine)


def test_many_clients_at_once_have_no_gradient_of_one():
    class Hooked(FedAvg):
        def on_after_backward(self):
            """Something."""

    with pytest.raises(MisconfigurationException, match="'vectorised' can't run Hooked: its on_after_backward"):
        fit(make_client(Hooked), engine=Vectorised)


@pytest.mark.parametrize(
    ("hook", "advice"),
    [
        ("on_train_batch_start", "training_step"),
        ("on_train_epoch_end", "on_round_start"),
        ("configure_gradient_clipping", "gradient_clip_val"),
        ("optimizer_step", "local_optimizer"),
        ("validation_step", "configure_metrics"),
        ("setup", "__init__"),
        ("train_dataloader", "data module"),
        ("on_save_checkpoint", "state_dict"),
    ],
)
def test_a_hook_that_would_never_be_called_is_refused(hook, advice):
    hooked = type("Hooked", (FedAvg,), {hook: lambda self, *args: None})
    with pytest.raises(MisconfigurationException, match=rf"Hooked\.{hook} would never be called.*{advice}"):
        fit(make_client(hooked))


def test_manual_optimization_is_refused():
    model = make_client()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False has no effect"):
        fit(model)


# What steps return


class Alone(FedAvg):
    """As Lightning's tutorials have it."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train/double", 2 * loss, prog_bar=True)
        self.log_dict({"constant": 3})
        return loss


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_may_return_its_loss_alone_and_log(engine):
    run = fit(make_client(Alone), engine=engine)
    assert equal(run.weights, fit(make_client(), engine=engine).weights)
    for row in run.rows:
        assert row["train/double"] == pytest.approx(2 * row["train/loss"]) and row["train/constant"] == 3


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda loss: None, "returned NoneType without a loss"),
        (lambda loss: {"value": loss}, "returned dict without a loss"),
        (lambda loss: {"loss": loss, "each": loss.expand(3)}, r"each is of shape \(3,\)"),
        (lambda loss: {"loss": loss, "name": "b"}, "name is a str"),
    ],
)
def test_a_step_that_returns_something_else_is_refused(returned, reason):
    class Odd(FedAvg):
        def training_step(self, batch, batch_idx):
            return returned(super().training_step(batch, batch_idx)["loss"])

    with pytest.raises(MisconfigurationException, match=rf"Odd\.training_step.* {reason}; return"):
        fit(make_client(Odd))


# What travels


def test_an_aggregator_class_is_no_aggregator():
    with pytest.raises(MisconfigurationException, match=r"aggregator=FedAWA is a class; give an instance, FedAWA\(\)"):
        fit(make_client(), aggregator=FedAWA)
    with pytest.raises(MisconfigurationException, match="aggregator=dict is no Aggregator"):
        FederatedTrainer(logger=False).fit(make_client(), datamodule=blobs(), aggregator={})


class Adding(WeightedAverage):
    def download(self, client):
        return {"weights": super().download(client)["weights"] | {"net.extra": torch.zeros(1)}}


class Lacking(WeightedAverage):
    def download(self, client):
        return {"weights": {n: t for n, t in super().download(client)["weights"].items() if "bias" not in n}}


@pytest.mark.parametrize(
    ("aggregator", "reason"), [(Adding, "with net.extra"), (Lacking, "without net.classifier.bias")]
)
def test_payloads_that_do_not_cover_what_clients_share_are_refused(aggregator, reason):
    with pytest.raises(MisconfigurationException, match=rf"{aggregator.__name__}\.download\(0\) gave weights {reason}"):
        fit(make_client(), aggregator=aggregator())


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize(
    ("payload", "words"), [({}, r"gave client 2 no weights, which FedAvg needs"), (None, "gave client 2 a NoneType")]
)
def test_a_download_that_forgets_a_client_is_refused(payload, words, engine):
    class Forgetful(WeightedAverage):
        def download(self, client):
            return payload if client == 2 else super().download(client)

    with pytest.raises(MisconfigurationException, match=rf"^Forgetful {words}.*download"):
        fit(make_client(), aggregator=Forgetful(), engine=engine)


def test_an_error_in_download_keeps_its_own_words():
    class Own(WeightedAverage):
        def download(self, client):
            return {"weights": {}[client]}

    with pytest.raises(KeyError):
        fit(make_client(), aggregator=Own())


@pytest.mark.parametrize("together", [False, True])
def test_an_aggregate_without_a_dict_is_refused(together):
    class Silent(WeightedAverage):
        def aggregate(self, updates, round):
            super().aggregate(updates, round)

    with pytest.raises(MisconfigurationException, match=r"^Silent\.aggregate returned a NoneType; return a dict"):
        fit(make_client(), aggregator=AggregatorList([Silent()]) if together else Silent())


class Carried(WeightedAverage):
    """A server that moves all entries by half of the mean change, or only parameters, the buffers by its parent."""

    def __init__(self, buffers):
        super().__init__()
        self.buffers = buffers

    def setup(self, server):
        super().setup(server)
        names = server.weights if self.buffers else server.parameter_names(remove_duplicate=False)
        self.names = list(names)

    def aggregate(self, updates, round):
        old = self.state["weights"]
        logs = super().aggregate(updates, round)
        mean = self.state["weights"]
        self.state["weights"] = mean | {name: old[name] + 0.5 * (mean[name] - old[name]) for name in self.names}
        return logs


def test_a_server_that_makes_a_fraction_of_a_counter_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^Carried\.aggregate left '.*batches_tracked'.*float32"):
        fit(make_client(net=noisy), aggregator=Carried(buffers=True))
    fit(make_client(net=noisy), aggregator=Carried(buffers=False))


def test_a_negative_variance_ends_the_run_where_it_is_the_server_s_fault_alone():
    class Negative(WeightedAverage):
        def aggregate(self, updates, round):
            super().aggregate(updates, round)
            self.state["weights"] |= {n: -t for n, t in self.state["weights"].items() if n.endswith("running_var")}
            return {}

    with pytest.raises(MisconfigurationException, match=r"^Negative\.aggregate left 'net.*running_var'.*less than 0"):
        fit(make_client(net=noisy), aggregator=Negative())


def test_a_negative_variance_of_a_client_doesnt_end_the_federation_of_all_others():
    name, variance = "net.body.1.running_var", torch.ones(2)
    updates = {0: {"weights": {name: -3 * variance}}, 1: {"weights": {name: variance}}}
    check_buffers({name: -variance}, {name: variance}, updates, "WeightedAverage")
    with pytest.raises(MisconfigurationException, match="-1, less than 0"):
        check_buffers({name: -variance}, {name: variance}, {1: updates[1]}, "WeightedAverage")


def uploading(change, who):
    """A client module some of whose clients send something else."""

    class Uploading(FedAvg):
        def upload(self, data):
            update = super().upload(data)
            return change(update) if self.client_id in who else update

    return Uploading


def without_bias(update):
    return update | {"weights": {name: t for name, t in update["weights"].items() if name != "net.classifier.bias"}}


def misshapen(update):
    return update | {"weights": update["weights"] | {"net.classifier.bias": torch.zeros(4)}}


def changed(name, change):
    """An update whose entry of a name is changed."""
    return lambda update: update | {name: change(update[name])}


def as_integers(weights):
    return weights | {"net.classifier.bias": weights["net.classifier.bias"].long()}


def in_half(weights):
    return {name: tensor.half() for name, tensor in weights.items()}


WRONG = [
    (without_bias, "weights without net.classifier.bias"),
    (misshapen, r"weights whose net.classifier.bias has the shape \(4,\) and not \(3,\)"),
    (lambda update: {"num_samples": update["num_samples"]}, "no weights"),
    (lambda update: None, "a NoneType and no dict"),
    (changed("weights", as_integers), r"weights whose net.classifier.bias is of type torch.int64 and not torch.float3"),
    (changed("weights", in_half), r"weights whose .* is of type torch.float16 and not torch.float32"),
    (changed("num_samples", lambda count: -count), "num_samples=-.* and no tensor of one integer from 1 up"),
    (changed("num_samples", lambda count: 0 * count), "num_samples=0 and"),
    (changed("num_samples", lambda count: count / 2), "num_samples=.* and"),
    (changed("num_samples", lambda count: count.repeat(2)), "num_samples=tensor.* and"),
    (changed("num_samples", int), "num_samples=.* and"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_a_wrong_update_leaves_its_client_out_and_is_counted(change, reason):
    spy = Spy()
    with pytest.warns(UserWarning, match=f"client 2 is left out of the aggregation: Uploading.upload gave {reason}"):
        run = fit(make_client(uploading(change, {2})), callbacks=[spy])
    assert [list(updates) for updates in spy.updates] == [[0, 1, 3]] * 3
    counts = [
        (row["clients"], row["clients_refused"], row["clients_diverged"], row["clients_absent"]) for row in run.rows
    ]
    assert counts == [(3, 1, 0, 0)] * 3


@pytest.mark.parametrize(("change", "reason"), [WRONG[1], *WRONG[2:]])
def test_updates_that_are_all_wrong_end_the_run(change, reason):
    with pytest.raises(MisconfigurationException, match=f"client 0: Uploading.upload gave {reason}"):
        fit(make_client(uploading(change, range(4))))


def test_numbers_of_a_class_are_not_negative():
    counted = uploading(changed("class_counts", lambda counts: counts - 100), range(4))
    with pytest.raises(MisconfigurationException, match=r"client 0: Uploading\.upload gave class_counts=.* from 0 up"):
        fit(make_client(counted), aggregator=FedDisco())


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_updates_have_the_type_of_the_precision(engine, precision):
    run = fit(make_client(), engine=engine, precision=precision, max_rounds=2)
    assert [row["clients"] for row in run.rows] == [4, 4]


def test_a_server_may_send_more_digits_and_no_integers():
    class Wider(WeightedAverage):
        kind = torch.float64

        def download(self, client):
            return {"weights": {name: tensor.to(self.kind) for name, tensor in self.state["weights"].items()}}

    assert equal(fit(make_client(), aggregator=Wider()).weights, fit(make_client()).weights)
    Wider.kind = torch.int64
    with pytest.raises(MisconfigurationException, match=r"Wider\.download\(0\) gave weights whose .* torch\.int64"):
        fit(make_client(), aggregator=Wider())


class Absent(Sequential):
    """Never hears from client 1, and from nobody in the second round."""

    may_miss_clients = True

    def run(self, jobs):
        for outcome in super().run(jobs):
            if outcome.client != 1 and self.module.round != 1:
                yield outcome


def test_clients_that_give_nothing_are_absent_and_not_diverged():
    with pytest.warns(UserWarning, match="round 2: 4 of the round's clients gave nothing"):
        run = fit(make_client(FedPer, net=noisy), engine=Absent)
    counts = [(row["clients"], row["clients_absent"], row["clients_diverged"]) for row in run.rows]
    assert counts == [(3, 1, 0), (0, 4, 0), (3, 1, 0)]


def test_the_base_aggregator_has_nothing_to_watch():
    assert same_end(*(fit(make_client(FedPer), aggregator=WeightedAverage()) for _ in range(2)))
    assert Aggregator.caches == FedAvg.caches == frozenset()
