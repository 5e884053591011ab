from functools import partial
from math import inf, nan

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from federations import CLASSES, Spy, Wide, blobs, equal, fit, make_client, noisy, plain
from pfl_lightning import Phase, WeightedAverage
from pfl_lightning.aggregators import FedLAW
from pfl_lightning.client import ClientModule
from pfl_lightning.client.module import net_of_python, trained_class
from pfl_lightning.methods import FedPer, FedProx
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Classification, Regression

PLAIN = {"state_dict": {}, "pytorch-lightning_version": "2.5.0"}


def test_everything_of_the_net_is_shared_unless_buffers_stay_local():
    average, local = make_client(net=noisy), make_client(net=noisy, buffers="local")
    assert all(average.is_shared(name) and not average.is_personal(name) for name in average.state_dict())
    buffers = {name for name, _ in local.named_buffers()}
    assert buffers and {name for name in local.state_dict() if local.is_personal(name)} == buffers


def test_a_download_replaces_the_shared_entries():
    model, other = make_client(seed=1), make_client(seed=2)
    model.on_download({"weights": other.state_dict()}, None)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))


def test_personal_entries_are_in_place_before_a_download():
    model = make_client(FedPer)
    classifier = {"net.classifier.bias": torch.ones(CLASSES)}
    seen = []
    model.on_download = lambda payload, data: seen.append(model.net.classifier.bias.clone())
    model.receive(classifier, {}, None)
    assert seen[0].tolist() == [1.0] * CLASSES


def test_an_entry_that_the_module_lacks_is_an_error():
    with pytest.raises(MisconfigurationException, match=r"client 0, FedAvg\.assign: 'nowhere'.* is not in \["):
        make_client().assign({"nowhere": torch.zeros(1)})


def test_an_entry_of_another_shape_is_an_error_and_is_not_spread_over_the_client_s():
    with pytest.raises(MisconfigurationException, match=r"'net\.classifier\.bias' of shape \(1,\) is of shape \(3,\)"):
        make_client().assign({"net.classifier.bias": torch.zeros(1)})


def test_an_upload_counts_training_samples():
    data = blobs()
    data.setup()
    update = make_client().upload(data.client(2))
    assert int(update["num_samples"]) == data.size(2, "train")
    assert set(update) == FedAvg.sends


def test_the_objective_is_cross_entropy_of_the_cut_net():
    model = make_client()
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    loss = model.training_step((x, y), 0)["loss"]
    assert torch.equal(loss, torch.nn.functional.cross_entropy(model(x), y))
    assert loss.requires_grad


def test_defaults_of_hooks():
    model = make_client()
    assert [phase.name for phase in model.local_phases()] == ["train"] and Phase().trains("anything")
    assert isinstance(model.configure_aggregator(), WeightedAverage)
    metrics = model.configure_metrics()
    assert float(metrics(torch.eye(3), torch.tensor([0, 1, 0]))["acc"]) == pytest.approx(2 / 3)


def test_hyper_parameters_have_classes_where_the_task_has():
    assert FedProx(net=plain, input_shape=(4,), num_classes=7).hparams["num_classes"] == 7
    assert FedProx(net=plain, input_shape=(4,), task=Classification(3)).hparams["num_classes"] == 3
    assert "num_classes" not in FedProx(net=plain, input_shape=(4,), task=Regression(2)).hparams


def test_a_bad_optimizer_setting_is_refused_at_once():
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer"):
        make_client(optimizer=partial(SGD, lr=-1))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (partial(SGD, lr=nan), r"^model\.optimizer\.lr=nan must be finite"),
        (partial(SGD, lr=0.1, momentum=inf), r"^model\.optimizer\.momentum=inf must be finite"),
        (partial(SGD, lr=0.1, dampening=nan), r"^model\.optimizer\.dampening=nan must be finite"),
        (partial(SGD, lr=None), r"^model\.optimizer: "),
        (partial(Adam, betas=(nan, 0.9)), r"^model\.optimizer: "),
        (partial(Adam, lr=inf), r"^model\.optimizer\.lr=inf must be finite"),
        (LBFGS, r"^model\.optimizer=LBFGS computes the loss again"),
        (None, r"^model\.optimizer=None is no optimizer; name a class"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_by_its_setting(optimizer, words):
    with pytest.raises(MisconfigurationException, match=words):
        make_client(optimizer=optimizer)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (ReduceLROnPlateau, "ReduceLROnPlateau waits for a metric"),
        (
            partial(StepLR, step_size=0),
            r"StepLR can't go on after round 1 of trainer\.max_rounds=3: integer .* by zero",
        ),
        (partial(ExponentialLR, gamma=-1), r"ExponentialLR gives round 2 the learning rate -0\.1"),
        (
            partial(OneCycleLR, max_lr=1, total_steps=2, cycle_momentum=False),
            "OneCycleLR can't go on after round 3 .*: Tried to step",
        ),
    ],
)
def test_a_schedule_that_cannot_last_is_refused_before_the_first_round(schedule, words):
    spy = Spy()
    with pytest.raises(MisconfigurationException, match=rf"^model\.lr_scheduler={words}"):
        fit(make_client(lr_scheduler=schedule), callbacks=[spy])
    assert not spy.cohorts


def test_a_server_s_optimizer_is_refused_by_its_setting():
    with pytest.raises(MisconfigurationException, match=r"^aggregator\.optimizer\.lr=inf must be finite"):
        FedLAW(optimizer=partial(SGD, lr=inf))


@pytest.mark.parametrize("name", ["optimizer_lifetime", "buffers", "assign_nets"])
def test_what_is_none_of_the_choices_is_refused(name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}='other' must be one of "):
        make_client(**{name: "other"})


def test_a_net_that_is_not_cut_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net has no modules for features and classifier"):
        make_client(net=Net)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"net": 3}, r"model\.net=3 builds no network"),
        ({"net": [plain, "cnn"]}, r"model\.net='cnn' builds no network"),
        ({"net": torch.nn.Linear(2, 2)}, r"model\.net=Linear can't be called with inputs of shape"),
        ({"task": "x"}, r"model\.task='x' is no task; give an instance"),
        ({"task": Classification}, r"model\.task=Classification is no task; give an instance"),
    ],
)
def test_something_else_than_a_net_or_a_task_is_refused_by_its_setting(settings, words):
    with pytest.raises(MisconfigurationException, match=f"^{words}"):
        make_client(**settings)


def test_a_checkpoint_from_python_asks_for_its_net(tmp_path):
    run = fit(make_client(net=Wide), root=tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match=r"run from Python .*Wide.*net=\.\.\."):
        FedAvg.load_from_checkpoint(run.last)
    # another mistake than this keeps its own error
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        FedAvg.load_from_checkpoint(run.last, net=plain)


def test_a_client_module_trains_and_predicts_under_a_plain_trainer(tmp_path):
    model = make_client(optimizer=partial(SGD, lr=0.1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=5))
    assert not equal(before, dict(model.state_dict()))
    logits = torch.cat(trainer.predict(model, DataLoader(TensorDataset(x, y), batch_size=7)))
    inputs_only = torch.cat(trainer.predict(model, DataLoader(x, batch_size=7)))
    assert torch.equal(logits, inputs_only) and logits.shape == (20, 3)


# Checkpoints of a federation, as models


def test_a_checkpoint_of_a_python_run_gives_the_global_model(tmp_path):
    run = fit(make_client(net=noisy), root=tmp_path)
    model = FedAvg.load_from_checkpoint(run.last, net=noisy, weights_only=True)
    assert equal(dict(model.state_dict()), dict(run.weights))
    assert model.num_classes == CLASSES


def test_a_checkpoint_gives_each_client_s_own_model(tmp_path):
    run = fit(make_client(FedPer, net=noisy, buffers="local"), root=tmp_path, clients_per_round=2, max_rounds=1)
    tested = {row["client"]: row["test/acc"] for row in run.logger.clients}
    for client in range(4):
        model = FedPer.load_from_checkpoint(run.last, client=client, net=noisy, buffers="local").eval()
        part = run.data.part(client, "test")
        assert float((model(part.x).argmax(1) == part.y).float().mean()) == tested[client]
    assert len(run.federation.clients) == 2


def test_a_client_that_is_not_there_is_refused_by_number(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match=r"client=9 .* clients 0 to 3"):
        FedAvg.load_from_checkpoint(run.last, client=9, net=plain)


def test_a_client_module_without_a_server_side_says_how_to_name_one():
    with pytest.raises(MisconfigurationException, match="names no server side"):
        make_client(ClientModule).configure_aggregator()


def test_gradients_stay_the_loss_s_own_unless_a_method_changes_them():
    gradients = {"net.classifier.bias": torch.ones(CLASSES)}
    assert make_client().adjust_gradients(gradients) is gradients


def test_outside_of_a_federation_values_are_logged_by_lightning():
    with pytest.warns(UserWarning, match=r"self\.trainer.* reference is not registered"):
        make_client().log("mine", 1.0)


def test_a_checkpoint_of_plain_lightning_names_no_network_of_a_federation(tmp_path):
    torch.save(PLAIN, tmp_path / "plain.ckpt")
    assert net_of_python(tmp_path / "plain.ckpt") == ""


def test_the_class_of_models_is_asked_for_where_the_checkpoint_does_not_name_it(tmp_path):
    torch.save(PLAIN | {"federation": {"method": "ClientModule+FedAvg"}}, tmp_path / "base.ckpt")
    assert trained_class(tmp_path / "base.ckpt") is ClientModule
    torch.save(PLAIN | {"federation": {"method": "FedPer"}}, tmp_path / "other.ckpt")
    with pytest.raises(MisconfigurationException, match=r"of FedPer, and ClientModule would receive"):
        trained_class(tmp_path / "other.ckpt")
