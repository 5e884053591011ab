"""What a site's greeting binds: settings that decide a guarantee or a result are the server's, or it is refused."""

import re
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, equal, fit, make_client, noisy, plain
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.compression import HalfPrecision, TopK
from pfl_lightning.flower import link
from pfl_lightning.flower.link import Quorum
from pfl_lightning.methods import FedPer, FedProx
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD, Laplace, SecureSum
from pfl_lightning.tasks import Classification

PRIVATE = {"example_privacy": DPSGD(2.0, 0.5)}


def mixed_grid(folder, make=make_client, data=blobs, settings=None, other=None, own=None, held=None):
    """Two sites, of which the second, node 12, has settings of its own."""
    settings = settings or {}
    grid = grid_of(make, folder, data, **settings)
    second = grid_of(own or make, folder, held or data, **{**settings, **(other or {})})
    first = grid.app

    def answer(message, context):
        second.max_rounds = grid.max_rounds
        return (first if context.node_id == 11 else second.app)(message, context)

    grid.app = answer
    return grid


def refused_in(grid, make=make_client, data=blobs, serving=None, **settings):
    """Deploy, and return the sentence by which node 12 is refused."""
    with (
        pytest.warns(UserWarning, match="node 12 is refused: ") as told,
        pytest.raises(MisconfigurationException, match="clients 1, 3"),
    ):
        deploy(grid, make, data=data, serving={"patience": 0.2} | (serving or {}), **settings)
    assert {kind for kind, _ in grid.asked} == {"query"}
    (sentence,) = {str(warning.message) for warning in told if "node 12 is refused" in str(warning.message)}
    assert sentence.isprintable() and sentence.endswith(".") and len(sentence) < 700
    return sentence


@pytest.mark.parametrize(
    ("other", "held", "name", "own", "servers"),
    [
        (
            {"example_privacy": DPSGD(0.1, 0.5)},
            blobs,
            "trainer.example_privacy.noise_multiplier",
            "0.1",
            "2.0",
        ),
        ({"local_epochs": 10}, blobs, "trainer.local_epochs", "10", "1"),
        ({}, partial(blobs, batch_size=15), "data.batch_size", "15", "5"),
        ({"example_privacy": None}, blobs, "trainer.example_privacy", "null", "DPSGD"),
    ],
)
def test_a_site_whose_epsilon_would_be_another_is_refused_by_name(tmp_path, other, held, name, own, servers):
    """Each made the server's epsilon of 1.07 untrue."""
    grid = mixed_grid(tmp_path, settings=PRIVATE, other=other, held=held)
    assert f"its {name} is {own} and the server's {servers};" in refused_in(grid, **PRIVATE)


def test_a_site_without_the_noise_of_its_own_updates_is_refused(tmp_path):
    told = {"limit_val_batches": 0}
    grid = mixed_grid(tmp_path, settings={"local_privacy": Laplace(1.0, 1.0), **told}, other={"local_privacy": None})
    sentence = refused_in(grid, local_privacy=Laplace(1.0, 1.0), **told)
    assert "its trainer.local_privacy is null and the server's Laplace;" in sentence


def test_a_site_with_another_configuration_is_refused_by_all_that_differs(tmp_path):
    own = partial(make_client, optimizer=partial(SGD, lr=0.3, momentum=0.9))
    grid = mixed_grid(tmp_path, other={"local_epochs": 20}, own=own, held=partial(blobs, batch_size=1))
    sentence = refused_in(grid)
    for words in ("data.batch_size is 1 and the server's 5", "model.optimizer.lr", "0.3 and the server's 0.1"):
        assert words in sentence
    assert "trainer.local_epochs" in sentence and "20 and the server's 1;" in sentence


class Careless(Net):
    """The weights of `plain`, and dropout between them."""

    def __init__(self, input_shape, num_classes):
        whole = plain(input_shape, num_classes)
        super().__init__(torch.nn.Sequential(*whole.features, torch.nn.Dropout(0.5)), whole.classifier)


CASES = {
    "steps": ({"other": {"local_steps": 3}}, "trainer.local_steps"),
    "continue": ({"settings": {"local_steps": 3}, "other": {"steps_continue": True}}, "trainer.steps_continue"),
    "accumulate": ({"other": {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches"),
    "limit": ({"other": {"limit_train_batches": 2}}, "trainer.limit_train_batches"),
    "last batch": ({"held": partial(blobs, last_batch="drop")}, "data.last_batch"),
    "clip": ({"other": {"gradient_clip_val": 1.0}}, "trainer.gradient_clip_val"),
    "clip by": (
        {"settings": {"gradient_clip_val": 1.0}, "other": {"gradient_clip_algorithm": "value"}},
        "trainer.gradient_clip_algorithm",
    ),
    "precision": ({"other": {"precision": "64-true"}}, "trainer.precision"),
    "compression": ({"other": {"compression": HalfPrecision()}}, "trainer.compression"),
    "how much": ({"settings": {"compression": TopK(0.5)}, "other": {"compression": TopK(0.1)}}, "trainer.compression."),
    "rounds": ({"other": {"max_rounds": 7}}, "trainer.max_rounds"),
    "evaluation": ({"other": {"evaluate": "after"}}, "trainer.evaluate"),
    "bound": (
        {"settings": PRIVATE, "other": {"example_privacy": DPSGD(2.0, 5.0)}},
        "trainer.example_privacy.clip",
    ),
    "counts": (
        {"settings": PRIVATE, "other": {"example_privacy": DPSGD(2.0, 0.5, counts_epsilon=1.0)}},
        "trainer.example_privacy.counts_epsilon",
    ),
    "sum": (
        {"settings": {"secure_sum": SecureSum()}, "other": {"secure_sum": SecureSum(bits=20)}},
        "trainer.secure_sum.bits",
    ),
    "optimizer": ({"own": partial(make_client, optimizer=partial(Adam, lr=0.1))}, "model.optimizer"),
    "momentum": ({"own": partial(make_client, optimizer=partial(SGD, lr=0.1))}, "model.optimizer.momentum"),
    "schedule": ({"own": partial(make_client, lr_scheduler=partial(ExponentialLR, gamma=0.9))}, "model.lr_scheduler"),
    "gamma": (
        {
            "make": partial(make_client, lr_scheduler=partial(ExponentialLR, gamma=0.9)),
            "own": partial(make_client, lr_scheduler=partial(ExponentialLR, gamma=0.5)),
        },
        "model.lr_scheduler.gamma",
    ),
    "lifetime": ({"own": partial(make_client, optimizer_lifetime="run")}, "model.optimizer_lifetime"),
    "class": ({"own": partial(make_client, FedProx, mu=0.0)}, "model"),
    "mu": ({"make": partial(make_client, FedProx, mu=0.1), "own": partial(make_client, FedProx, mu=1.0)}, "model.mu"),
    "dropout": ({"own": partial(make_client, net=Careless)}, "model.net"),
    "class weights": (
        {"own": partial(make_client, task=Classification(3, class_weights=(1.0, 2.0, 3.0)))},
        "model.task.class_weights",
    ),
    "metrics": ({"own": partial(make_client, task=Classification(3, metrics=("acc", "f1")))}, "model.metrics"),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_decides_a_result_is_compared_by_name(tmp_path, case):
    parts, name = CASES[case]
    grid = mixed_grid(tmp_path, **parts)
    sentence = refused_in(grid, parts.get("make", make_client), **parts.get("settings", {}))
    assert re.search(rf"\bits ([\w.]+ .*?, its )*?{re.escape(name)}\S* is .* and the server's ", sentence), sentence


def test_a_site_with_another_machine_and_data_source_is_taken(tmp_path):
    """Engines give the same result up to rounding, and a site has its own files, folder and log."""
    machine = {"engine": "vectorised", "accelerator": "auto", "workers": 2, "client_states": "disk"}
    machine |= {"checkpoint_common": False, "root": str(tmp_path / "runs"), "benchmark": True}
    held = partial(blobs, root="/srv/clinic", download=False)
    grid = mixed_grid(tmp_path, other=machine, held=held)
    run = deploy(grid, make_client)
    assert [row["clients"] for row in run.rows] == [4, 4, 4]


def test_memory_of_private_gradients_is_a_machine_s(tmp_path):
    other = {"example_privacy": DPSGD(2.0, 0.5, samples_at_once=2)}
    grid = mixed_grid(tmp_path, settings=PRIVATE, other=other)
    assert [row["clients"] for row in deploy(grid, make_client, max_rounds=1, **PRIVATE).rows] == [4]


class Joins(FederatedCallback):
    """Lets a site come in the second round."""

    def __init__(self, grid, node):
        self.grid, self.node = grid, node

    def on_aggregate_end(self, trainer, federation, logs):
        self.grid.away.discard(self.node)


def test_a_site_that_comes_later_is_compared_too(tmp_path):
    grid = mixed_grid(tmp_path, other={"local_epochs": 10})
    grid.away.add(12)
    with pytest.warns(UserWarning, match=r"node 12 is refused: its trainer\.local_epochs is 10 and the server's 1;"):
        run = deploy(grid, make_client, callbacks=[Joins(grid, 12)], serving={"quorum": Quorum(min_available=2)})
    assert [row["absent"] for row in run.rows] == ["1 3"] * 3


@pytest.mark.parametrize("seen", [True, False])
def test_a_site_that_restarts_with_other_settings_takes_part_no_longer(tmp_path, seen):
    """Also if it comes back before the server has seen that it was gone, and so isn't greeted."""

    class Restarts(FederatedCallback):
        def on_aggregate_end(self, trainer, federation, logs):
            if federation.round == 0:
                own = mixed_grid(tmp_path, other={"local_epochs": 10}).app
                grid.app = own
                if seen:
                    federation.engines[0].link._greeted.discard(12)

    grid = grid_of(make_client, tmp_path)
    with pytest.warns(UserWarning, match=r"node 12 is refused: its trainer\.local_epochs is 10 and the server's 1;"):
        run = deploy(grid, make_client, callbacks=[Restarts()])
    assert run.rows[0]["clients"] == 4 and run.rows[2]["absent"] == "1 3"
    assert all(row["clients"] == 2 for row in run.rows[1:])


def test_a_refused_site_s_answer_to_an_earlier_question_does_not_count(tmp_path):
    class Restarts(FederatedCallback):
        def on_round_start(self, trainer, federation, cohort):
            grid.spoil = other
            federation.engines[0].link._greeted.discard(12)

    def other(node, kind, content):
        if node == 12 and kind == "query":
            rewrite(content, lambda records: records["hello"].update(initial="0" * 16))

    grid = grid_of(make_client, tmp_path)
    with pytest.warns(UserWarning, match="node 12 is refused: its initial model is another"):
        run = deploy(grid, make_client, max_rounds=1, callbacks=[Restarts()])
    # asked before its greeting was read
    assert grid.asked.count(("train", 12)) == 1
    assert [row["clients"] for row in run.rows] == [2]


def test_a_resumed_server_compares_with_its_own_settings(tmp_path):
    from federations import Pause

    make = partial(make_client, FedPer, net=noisy)
    grid = grid_of(make, tmp_path / "sites")
    deploy(grid, make, tmp_path, callbacks=[Pause(1)])
    other = mixed_grid(tmp_path / "sites", make, other={"local_epochs": 10})
    with (
        pytest.warns(UserWarning, match=r"node 12 is refused: its trainer\.local_epochs is 10 and the server's 1;"),
        pytest.raises(MisconfigurationException, match="clients 1, 3"),
    ):
        deploy(other, make, tmp_path, ckpt_path="last", serving={"patience": 0.2})
    assert equal(deploy(grid, make, tmp_path, ckpt_path="last").weights, fit(make()).weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told.update({f"data.{n}": "1" for n in range(5000)}), "it tells of 50[0-9]{2} settings, and"),
        (
            lambda told: told.update({"data.\x1b[2J\r\nall is well": "1"}),
            "it tells of a setting .*, which can't be one",
        ),
        (lambda told: told.update({"data." + "x" * 9999: "1"}), "it tells of a setting .*, which can't be one"),
        (lambda told: told.update({"": "1"}), "it tells of a setting '', which can't be one"),
        (lambda told: told.update({"trainer.local_epochs": 1}), "is int and should be str"),
        (lambda told: told.update({"trainer.local_epochs": ["1"]}), "is list and should be str"),
        (lambda told: told.update({7: "1"}), "has the entry 7, which is no name"),
        (
            lambda told: told.update({"trainer.local_epochs": "9" * 10**5}),
            "local_epochs is 9{30,60} and the server's 1",
        ),
        (
            lambda told: told.update({"trainer.local_epochs": "\x1b]0;gone\x07\n1\u202e"}),
            "local_epochs is .{0,20} and the server's 1",
        ),
        (lambda told: told.pop("trainer.local_epochs"), "local_epochs is not set and the server's 1"),
        (lambda told: told.update({"trainer.sabotage": "yes"}), "trainer.sabotage is yes and the server's not set"),
        (lambda told: told.clear(), "and the server's"),
    ],
)
def test_a_greeting_that_lies_is_refused_in_a_sentence_and_the_server_goes_on(tmp_path, change, words):
    grid = grid_of(make_client, tmp_path)

    def spoil(node, kind, content):
        if kind == "query" and node == 12:
            rewrite(content, lambda records: change(records["hello"]["settings"]))

    grid.spoil = spoil
    with pytest.warns(UserWarning, match=f"node 12 is refused: .*{words}") as told:
        run = deploy(grid, make_client, max_rounds=1, serving={"quorum": Quorum(min_available=2)})
    for warning in told:
        assert str(warning.message).isprintable() and len(str(warning.message)) < 700
    assert run.rows[0]["absent"] == "1 3"


def test_no_path_of_a_site_is_in_its_greeting(tmp_path):
    """Settings of a site's machine tell the server nothing."""
    secret = str(tmp_path / "only here")
    grid = grid_of(make_client, tmp_path / "states", partial(blobs, root=secret), root=secret)
    told = []
    grid.spoil = lambda node, kind, content: told.append(str(content))
    deploy(grid, make_client, max_rounds=1)
    greetings = [text for text in told if "record/hello" in text]
    assert len(greetings) == 2 and not any("only here" in text or "sequential" in text for text in greetings)


def test_a_private_site_believes_no_server(tmp_path, monkeypatch):
    """A server without privacy, which takes any site, gets noised updates all the same."""
    monkeypatch.setattr(link, "check_settings", lambda *told: None)
    heard = []

    class Reads(FederatedCallback):
        def on_aggregate_start(self, trainer, federation, updates):
            heard.append({client: update["weights"]["net.features.0.weight"] for client, update in updates.items()})

    for name, own in {"plain": {}, "private": {"example_privacy": DPSGD(50.0, 0.5)}}.items():
        deploy(grid_of(make_client, tmp_path / name, **own), make_client, max_rounds=1, callbacks=[Reads()])
    for client, without in heard[0].items():
        # steps of rate 0.1 with noise of 50 times 0.5 over some five samples
        assert float((heard[1][client] - without).abs().mean()) > 0.3
    assert len(heard[0]) == len(heard[1]) == 4
