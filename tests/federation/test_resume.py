import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

from federations import (
    Run,
    Spy,
    blobs,
    equal,
    fit,
    load,
    make_client,
    make_trainer,
    noisy,
    plain,
    read_csv,
    same_end,
    untimed,
)
from pfl_lightning import Aggregator, WeightedAverage
from pfl_lightning.methods import FedAvg, FedPer, FedProx, Local
from pfl_lightning.runs.checkpoint_io import AtomicCheckpointIO
from sweeps import all_but

EVERYTHING = {
    "net": noisy,
    "optimizer_lifetime": "run",
    "lr_scheduler": partial(ExponentialLR, gamma=0.9),
}


def run(
    root: Path, rounds: int, method: Any = FedPer, ckpt_path: Any = None, model: Any = EVERYTHING, **trainer: Any
) -> Run:
    trainer = {"clients_per_round": 0.4, "max_rounds": rounds, **trainer}
    return fit(make_client(method, **model), blobs(24, 16, 30, 20, 12), root, ckpt_path=ckpt_path, **trainer)


def assert_same(whole: Run, resumed: Run) -> None:
    assert same_end(whole, resumed)
    tables = [untimed(read_csv(run.folder / "rounds.csv")) for run in (whole, resumed)]
    assert tables[0] == tables[1] and len(tables[0]) == len(whole.rows)
    for name in ("round", "aggregator", "clients", "lr_factor", "initial"):
        ends = [load(run.last)["federation"][name] for run in (whole, resumed)]
        assert equal(*ends), name
    assert read_csv(whole.folder / "clients.csv") == read_csv(resumed.folder / "clients.csv")
    assert whole.trainer.global_step == resumed.trainer.global_step == len(whole.rows)


@pytest.mark.parametrize("method", all_but([FedAvg, FedProx], [FedAvg, FedPer, FedProx, Local]))
def test_a_run_in_two_halves_equals_a_whole_one_bit_for_bit(method, tmp_path):
    whole = run(tmp_path / "whole", 6, method)
    half = run(tmp_path / "halves", 3, method)
    assert not equal(half.weights, whole.weights) or method is Local
    assert_same(whole, run(tmp_path / "halves", 6, method, "last"))


@pytest.mark.parametrize(
    "trainer",
    [
        {"check_val_every_n_epoch": 2},
        {"limit_val_batches": 0},
        {"evaluate": "both", "test_every_round": True},
        {"local_steps": 3, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.by_default("evaluate-test_every_round", "local_steps-gradient_clip_val", "precision0")
def test_it_does_so_under_other_settings_of_the_trainer(trainer, tmp_path):
    whole = run(tmp_path / "whole", 6, **trainer)
    run(tmp_path / "halves", 3, **trainer)
    assert_same(whole, run(tmp_path / "halves", 6, ckpt_path="last", **trainer))


@pytest.mark.parametrize(
    "model",
    [
        {"net": noisy, "buffers": "local"},
        {"net": noisy, "optimizer_lifetime": "run", "optimizer": partial(Adam, lr=0.01)},
        {"net": noisy, "optimizer": partial(SGD, lr=0.1)},
    ],
    ids=["local-buffers", "adam", "plain-sgd"],
)
def test_it_does_so_under_other_settings_of_the_model(model, tmp_path):
    whole = run(tmp_path / "whole", 6, model=model)
    run(tmp_path / "halves", 3, model=model)
    assert_same(whole, run(tmp_path / "halves", 6, ckpt_path="last", model=model))


@pytest.mark.parametrize("end", ["validation", "epoch"])
def test_every_round_s_checkpoint_goes_on_to_the_same_end(end, tmp_path):
    def keep_all():
        return ModelCheckpoint(
            filename="{epoch}", save_top_k=-1, monitor="val/acc", save_on_train_epoch_end=end == "epoch"
        )

    whole = run(tmp_path / "whole", 4, callbacks=[keep_all()])
    files = sorted((whole.folder / "checkpoints").glob("epoch=*.ckpt"))
    assert len(files) == 4
    for path in files[:-1]:
        assert same_end(whole, run(tmp_path / path.stem, 4, ckpt_path=path, callbacks=[keep_all()]))


def test_a_resumed_run_does_not_depend_on_the_seed_of_the_process(tmp_path):
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "halves", 2)
    spy = Spy()
    other = {"model": {**EVERYTHING, "seed": 99}, "resume_changed": True}
    resumed = run(tmp_path / "halves", 4, ckpt_path="last", callbacks=[spy], **other)
    assert same_end(whole, resumed) and resumed.federation.seed == 3
    assert len(spy.cohorts) == 2


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path):
    half = run(tmp_path, 2)
    resumed = run(tmp_path, 4, ckpt_path="last")
    assert resumed.folder == half.folder
    assert [row["round"] for row in read_csv(resumed.folder / "rounds.csv")] == ["1", "2", "3", "4"]
    assert len(read_csv(resumed.folder / "metrics.csv")) == 4
    assert len(list(half.folder.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "own",
    [
        ModelCheckpoint,
        partial(ModelCheckpoint, every_n_epochs=2, save_last=True),
        partial(ModelCheckpoint, "kept", monitor="val/acc", mode="max", save_top_k=2),
        partial(ModelCheckpoint, save_top_k=0),
    ],
    ids=["plain", "rare", "elsewhere", "none"],
)
def test_last_and_best_are_kept_beside_checkpoints_of_the_user_s_own(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = run(tmp_path / "whole", 4)
    half, spy = run(tmp_path / "halves", 3, callbacks=[own()]), Spy()
    assert load(half.last)["federation"]["round"] == 3
    resumed = run(tmp_path / "halves", 4, ckpt_path="last", callbacks=[own(), spy])
    assert same_end(whole, resumed) and len(spy.cohorts) == 1
    assert resumed.logger.summary["selected"] == whole.logger.summary["selected"]
    best = load(resumed.folder / "checkpoints" / "best.ckpt")["federation"]["round"]
    assert best == resumed.logger.summary["selected"]["round"]


def test_a_checkpoint_of_the_same_name_is_refused(tmp_path):
    for name in ("best", "last"):
        with pytest.raises(MisconfigurationException, match=f"ModelCheckpoint filename={name} is that of a checkpoint"):
            make_trainer(tmp_path, callbacks=[ModelCheckpoint(filename=name)])
        make_trainer(tmp_path, callbacks=[ModelCheckpoint(tmp_path, name)])


def test_last_is_the_last_round_whatever_the_metric_did(tmp_path):
    class WorseInTheEnd(FedPer):
        """From the fifth round on its clients unlearn."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            return {"loss": -loss if self.round >= 4 else loss}

    whole = run(tmp_path, 6, method=WorseInTheEnd, model={**EVERYTHING, "seed": 4})
    accuracies = [row["val/acc"] for row in whole.rows]
    assert accuracies.index(max(accuracies)) < 5
    assert load(whole.last)["federation"]["round"] == 6
    best = load(whole.folder / "checkpoints" / "best.ckpt")
    assert best["federation"]["round"] == accuracies.index(max(accuracies)) + 1


def test_last_and_best_are_of_the_newest_run(tmp_path):
    run(tmp_path, 2)
    newest = run(tmp_path, 3)
    resumed = run(tmp_path, 5, ckpt_path="last")
    assert resumed.folder == newest.folder and len(resumed.rows) == 5


def test_last_of_a_method_that_never_ran_starts_anew(tmp_path):
    run(tmp_path, 2, FedAvg)
    assert same_end(run(tmp_path / "other", 2), run(tmp_path, 2, FedPer, "last"))


def test_a_finished_run_has_nothing_to_do(tmp_path):
    whole = run(tmp_path, 3)
    weights = whole.weights
    assert equal(weights, run(tmp_path, 3, ckpt_path="last").weights)


def test_checkpoints_hold_nothing_but_plain_values_and_tensors(tmp_path):
    whole = run(tmp_path, 2)
    for path in (whole.folder / "checkpoints").iterdir():
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["federation"]["method"] == "FedPer"
        assert set(checkpoint["state_dict"]) == set(whole.weights)
        assert all(name != "net" and name != "optimizer" for name in checkpoint["hyper_parameters"])
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": make_client}, "of FedPer and this run of FedAvg"),
        ({"data": partial(blobs, 24, 16)}, r"has 4 clients and data.num_clients=2"),
        ({"data": partial(blobs, 30, 16, 24, 20)}, "other numbers of samples"),
        ({"model": partial(make_client, FedPer, net=noisy)}, "another net"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, words, tmp_path):
    run_of = {"model": partial(make_client, FedPer), "data": blobs}
    path = fit(run_of["model"](), run_of["data"](), tmp_path, max_rounds=1).last
    other = run_of | change
    with pytest.raises(MisconfigurationException, match=words):
        fit(other["model"](), other["data"](), tmp_path / "other", ckpt_path=path, max_rounds=2)


def test_a_checkpoint_with_another_aggregator_is_refused(tmp_path):
    class Other(WeightedAverage):
        pass

    path = fit(make_client(), root=tmp_path, max_rounds=1).last
    with pytest.raises(MisconfigurationException, match=r"FedAvg\+Other"):
        fit(make_client(), root=tmp_path, ckpt_path=path, aggregator=Other())
    assert isinstance(Other(), Aggregator)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_or_missing_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "some.ckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MisconfigurationException, match=r"some\.ckpt"):
        fit(make_client(), root=tmp_path, ckpt_path=path)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    path = fit(make_client(), root=tmp_path, max_rounds=1).last
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(MisconfigurationException, match=r"last\.ckpt"):
        fit(make_client(), root=tmp_path, ckpt_path=path)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_flipped_bit_is_refused_unless_it_stands_between_the_parts(mapped, tmp_path):
    path = fit(make_client(), root=tmp_path, max_rounds=1).last
    whole, content = load(path), path.read_bytes()
    refused = 0
    for place in random.Random(0).sample(range(len(content)), 60):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            assert equal(AtomicCheckpointIO(mapped).load_checkpoint(path, weights_only=True), whole)
        except MisconfigurationException as error:
            refused += 1
            assert str(error).startswith(f"ckpt_path='{path}' can't be read as a checkpoint (")
            assert "; take another one, such as" in str(error)
    assert refused > 30


class Stranger:
    """An object of a class, whose code would run when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("client_states", ["memory", "disk"])
def test_a_checkpoint_runs_no_code(client_states, tmp_path, monkeypatch):
    # where torch's own default is given up, too
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = fit(make_client(), root=tmp_path, max_rounds=1).last
    torch.save(load(path) | {"hyper_parameters": {"net": Stranger()}}, path)
    with pytest.raises(MisconfigurationException, match=r"last\.ckpt"):
        fit(make_client(), root=tmp_path, ckpt_path=path, client_states=client_states)
    for client in (None, 1):
        with pytest.raises(MisconfigurationException, match="code"):
            FedAvg.load_from_checkpoint(path, client=client, net=plain)
    assert not Path("ran").exists()


def test_a_checkpoint_without_checksums_is_loaded(tmp_path):
    whole = load(fit(make_client(), root=tmp_path, max_rounds=1).last)
    torch.save(whole, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert equal(AtomicCheckpointIO().load_checkpoint(tmp_path / "old.ckpt", weights_only=True), whole)


@pytest.mark.parametrize("lost", ["state_dict", "federation", "pytorch-lightning_version"])
def test_a_checkpoint_without_an_entry_of_ours_is_refused(lost, tmp_path):
    other = load(fit(make_client(), root=tmp_path, max_rounds=1).last)
    del other[lost]
    for name, content in {"one": other, "two": torch.ones(3), "three": [other]}.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(MisconfigurationException, match=rf"{name}'.* is not of a federation; take another one"):
            fit(make_client(), root=tmp_path, ckpt_path=tmp_path / name)


def test_a_save_that_is_cut_short_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    def cut(checkpoint, file):
        file.write(b"half")
        raise KeyboardInterrupt

    path = fit(make_client(), root=tmp_path, max_rounds=1).last
    before = path.read_bytes()
    monkeypatch.setattr("torch.save", cut)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({}, path)
    assert path.read_bytes() == before and not list(tmp_path.rglob("*.partial"))
