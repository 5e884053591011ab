"""Inputs of clients that change from a round on."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl, summary
from federations import Pause, blobs, equal, fit, make_client, same_end
from pfl_lightning.data import IID, ClientDatasets, Digits, InputDrift, TensorData
from pfl_lightning.data.description import fingerprint
from pfl_lightning.data.input_drift import rotated
from pfl_lightning.flower.site import Site
from pfl_lightning.methods import Pooled
from pfl_lightning.tasks import Classification

START = 3
SUDDEN = InputDrift(START, scale=-1.0, shift=0.5, clients=[1, 3])
GROWING = InputDrift(2, shift=[0.0, 4.0, 0.0, 0.0, 0.0, 1.0], rounds=2, end=4, clients=0.5)


def drifting(*drifts, **settings):
    return blobs(input_drift=list(drifts or (SUDDEN, GROWING)), **{"val_fraction": 0.2, **settings})


def ready(data):
    data.setup()
    return data


def test_all_splits_of_the_named_clients_change_in_their_rounds():
    data, plain = ready(drifting(SUDDEN)), ready(blobs(val_fraction=0.2))
    for round in (START - 1, START, START + 9):
        assert data.go_to(round) == (round == START)
        for client in range(4):
            for split in ("train", "val", "test"):
                x, own = data.part(client, split).x, plain.part(client, split).x
                turned = client in SUDDEN.clients and round >= START
                assert torch.equal(x, -own + 0.5 if turned else own)
                assert torch.equal(data.part(client, split).y, plain.part(client, split).y)
        # gathered together or one by one, on request of several clients in any order
        together = data.parts([3, 0, 1], "train")
        assert all(torch.equal(together[at].x, data.part(client, "train").x) for at, client in enumerate([3, 0, 1]))
    assert data.drifting == {START: frozenset({1, 3})}


def test_a_gradual_change_grows_and_ends():
    data, plain = ready(drifting(GROWING)), ready(blobs(val_fraction=0.2))
    chosen = data.drifting[2]
    assert len(chosen) == 2 and data.drifting == {2: chosen, 4: chosen}
    column = []
    for round in (1, 2, 3, 4):
        assert data.go_to(round) == (round > 1)
        moved = {client: data.part(client, "test").x - plain.part(client, "test").x for client in range(4)}
        assert all(not moved[client].any() for client in range(4) if client not in chosen)
        column.append(float(moved[min(chosen)][0, 1]))
    assert column == pytest.approx([0.0, 2.0, 4.0, 0.0], abs=1e-5)


def test_shares_are_drawn_by_the_seed_and_contain_each_other():
    few, many = (ready(drifting(InputDrift(2, shift=1.0, clients=share))).drifting[2] for share in (0.25, 0.75))
    assert len(few) == 1 and len(many) == 3 and few < many
    seeds = {ready(drifting(InputDrift(2, shift=1.0, clients=0.25), seed=seed)).drifting[2] for seed in range(8)}
    assert len(seeds) > 1


def test_a_batch_at_a_time_has_the_same_inputs():
    data, streamed = ready(drifting()), ready(drifting(resident=False))
    for each in (data, streamed):
        each.go_to(START)
    for client in range(4):
        assert torch.equal(data.part(client, "train").x, streamed.part(client, "train").x)
    part = streamed.part(1, "train")
    streamed.go_to(1)
    # a client's data are of the round in which they were asked for
    assert torch.equal(part.x, data.part(1, "train").x)


@pytest.mark.parametrize("settings", [{}, {"evaluate": "both", "clients_per_round": 2}])
@pytest.mark.parametrize("pause", [START - 1, START])
def test_resuming_across_the_change_is_bit_for_bit(pause, settings, tmp_path):
    settings = {"max_rounds": 5, "test_every_round": True, **settings}
    whole = fit(make_client(), drifting(), **settings)
    fit(make_client(), drifting(), tmp_path, callbacks=[Pause(pause)], **settings)
    assert same_end(whole, fit(make_client(), drifting(), tmp_path, ckpt_path="last", **settings))


def test_training_before_the_change_and_of_others_stays_the_same():
    plain = fit(make_client(), blobs(val_fraction=0.2), max_rounds=4)
    other = fit(make_client(), drifting(SUDDEN), max_rounds=4)
    pairs = zip(other.rows, plain.rows, strict=True)
    assert [row["train/loss"] == own["train/loss"] for row, own in pairs] == [True, True, False, False]
    assert other.rows[1]["val/loss"] == plain.rows[1]["val/loss"] != other.rows[2]["val/loss"]


@pytest.mark.parametrize("engine", ["processes", "vectorised"])
def test_engines_follow(engine):
    settings = {"max_rounds": 4, "evaluate": "both"}
    one, other = (fit(make_client(), drifting(), engine=each, **settings) for each in ("sequential", engine))
    if engine == "processes":
        assert equal(dict(one.weights), dict(other.weights))
    for row, same in zip(one.rows, other.rows, strict=True):
        assert row["val/loss"] == pytest.approx(same["val/loss"], rel=1e-4)


def test_a_run_goes_on_with_the_drift_that_it_had(tmp_path):
    fit(make_client(), drifting(SUDDEN), tmp_path, callbacks=[Pause(1)])
    for other in (blobs(val_fraction=0.2), drifting(InputDrift(START, shift=0.5))):
        with pytest.raises(MisconfigurationException, match=r"data\.input_drift"):
            fit(make_client(), other, tmp_path, ckpt_path="last")
    assert len({fingerprint(ready(data)) for data in (drifting(SUDDEN), drifting(), blobs(val_fraction=0.2))}) == 3


def test_the_best_round_is_tested_on_its_own_inputs(tmp_path):
    run = fit(make_client(), drifting(InputDrift(2, shift=3.0)), tmp_path, max_rounds=4, monitor="loss")
    best = run.trainer.checkpoint_callback.best_model_path
    saved = torch.load(best, weights_only=True)["federation"]["round"]
    run.trainer.test(run.model, datamodule=run.data, ckpt_path=best)
    assert run.data.round == saved


def test_right_angles_move_pixels_and_others_keep_a_disc():
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotated(images, 90), torch.rot90(images, 1, (-2, -1)))
    assert torch.equal(rotated(images, -360), images)
    # nearly a right angle is nearly the same picture: both ways turn in one direction
    assert (rotated(images, 89.9) - rotated(images, 90)).abs().max() < 0.05
    wide = torch.zeros(1, 1, 9, 15)
    wide[..., 4, 7:] = 1
    up = rotated(wide, 60)
    assert up[0, 0, 0, 9] > 0.2 and up[0, 0, 4, 14] == 0
    flat = torch.full((1, 1, 6, 10), 0.25)
    assert torch.allclose(rotated(flat, 33), flat)


def test_images_turn_step_by_step():
    data = Digits(num_clients=4, partitioner=IID(), input_drift=[InputDrift(2, rotate=180, rounds=2, clients=[2])])
    x = ready(data).part(2, "train").x
    data.go_to(2)
    assert torch.equal(data.part(2, "train").x, torch.rot90(x, 1, (-2, -1)))
    data.go_to(3)
    assert torch.equal(data.part(2, "train").x, x.flip(-2, -1))


def test_clients_are_named_and_keep_their_names_elsewhere(tmp_path):
    def sites(*names, drift):
        held = {name: (points(20, k), points(6, 9 + k)) for k, name in enumerate(names)}
        return ClientDatasets(held, Classification(3), input_drift=drift, batch_size=5)

    def points(n, seed):
        x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(x, torch.arange(n) % 3)

    drift = [InputDrift(2, shift=1.0, clients=["Ulm"])]
    run = fit(make_client(), sites("Bremen", "Ulm", "Jena", drift=drift), tmp_path)
    ulm = run.data.client_id("Ulm")
    assert run.data.drifting == {2: frozenset({ulm})}
    # fewer clients, which are given the federation's ids
    other = sites("Ulm", "Bremen", drift=drift)
    assert ready(other).drifting == {2: frozenset({other.client_id("Ulm")})} != run.data.drifting
    run.trainer.test(run.model, datamodule=other)
    assert other.drifting == run.data.drifting
    with pytest.raises(MisconfigurationException, match="Erfurt"):
        ready(sites("Bremen", "Ulm", drift=[InputDrift(2, shift=1.0, clients=["Erfurt"])]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"start": 0, "shift": 1.0}, r"input_drift\.start=0"),
        ({"start": True, "shift": 1.0}, r"input_drift\.start=True"),
        ({"start": 2}, "nothing changes"),
        ({"start": 2, "scale": [1.0, 1.0], "rotate": 720}, "nothing changes"),
        ({"start": 2, "shift": 1.0, "rounds": 0}, r"input_drift\.rounds=0"),
        ({"start": 2, "shift": 1.0, "end": 2}, r"input_drift\.end=2"),
        ({"start": 2, "shift": float("nan")}, r"input_drift\.shift=nan"),
        ({"start": 2, "scale": []}, r"input_drift\.scale=\[\]"),
        ({"start": 2, "rotate": [90.0]}, r"input_drift\.rotate=\[90\.0\]"),
        ({"start": 2, "shift": 1.0, "clients": 1}, r"input_drift\.clients=1 "),
        ({"start": 2, "shift": 1.0, "clients": 0.0}, r"input_drift\.clients=0\.0"),
        ({"start": 2, "shift": 1.0, "clients": []}, r"input_drift\.clients=\[\]"),
    ],
    ids=str,
)
def test_a_change_that_cannot_be_is_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        InputDrift(**settings)


@pytest.mark.parametrize(
    ("drift", "named"),
    [
        (InputDrift(2, rotate=90), r"rotate=90 .*\[6\]"),
        (InputDrift(2, shift=[1.0, 2.0]), r"shift has 2 numbers.*\[6\]"),
        (InputDrift(2, shift=1.0, clients=[4]), "4"),
    ],
)
def test_what_does_not_fit_the_inputs_is_refused(drift, named):
    with pytest.raises(MisconfigurationException, match=named):
        ready(drifting(drift))


def test_codes_are_no_numbers():
    texts = torch.randint(0, 9, (40, 5))
    data = TensorData(texts, torch.arange(40) % 2, Classification(2), torch.arange(40) // 20, input_drift=[SUDDEN])
    with pytest.raises(MisconfigurationException, match="integers"):
        data.setup()


def test_what_would_see_other_inputs_is_refused():
    with pytest.raises(MisconfigurationException, match=r"data\.input_drift"):
        Site(ready(drifting()), [0, 1])
    with pytest.raises(MisconfigurationException, match=r"data\.input_drift=\['a'\]"):
        Digits(input_drift=["a"])
    with pytest.raises(MisconfigurationException, match="resident=true"):
        fit(make_client(Pooled), drifting(resident=False))
    pooled = fit(make_client(Pooled), drifting(), max_rounds=START)
    assert pooled.rows[-1]["train/loss"] != fit(make_client(Pooled), blobs(val_fraction=0.2)).rows[-1]["train/loss"]


def test_a_change_by_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drift.yaml").write_text(
        "data:\n  class_path: Digits\n  init_args:\n    num_clients: 4\n    input_drift:\n"
        "    - {start: 2, scale: -1.0, clients: [0, 1]}\n    - {start: 3, shift: [0.5], rounds: 2, clients: 0.5}\n"
    )
    net = "--model FedAvg --model.net MLP"
    pfl(f"fit --config drift.yaml {net} --trainer.max_rounds 2 {QUIET}")
    assert summary("FedAvg-Digits/version_0")["final"]["round"] == 2
