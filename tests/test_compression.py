"""Compressed updates: what travels, what the server restores, and what is kept for later rounds."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import (
    NETS,
    Spy,
    blobs,
    check_order_and_resume,
    equal,
    fit,
    load,
    make_client,
    noisy,
    same_end,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import SCAFFOLD, FedAMP
from pfl_lightning.callbacks import SignFlip
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.compression import EightBits, HalfPrecision, Sign, TopK
from pfl_lightning.engines import Sequential
from pfl_lightning.messages import num_bytes, tree_map
from pfl_lightning.methods import ControlVariates, Ditto, FedAvg, FedPer, LGFedAvg, Local
from pfl_lightning.privacy import DPSGD, DPAverage, SecureSum

KINDS = {"top-k": TopK(0.25), "sign": Sign(), "8 bits": EightBits(), "half": HalfPrecision()}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def drawn(size, seed=0, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Changes(Spy):
    """Keeps what clients trained, before it is compressed, and what they received and kept."""

    def __init__(self):
        super().__init__()
        self.received, self.residuals = [], []

    def on_round_start(self, trainer, federation, cohort):
        super().on_round_start(trainer, federation, cohort)
        self.received.append({k: federation.aggregator.download(k)["weights"] for k in cohort})

    def on_aggregate_end(self, trainer, federation, logs):
        self.residuals.append({k: state.residual for k, state in federation.clients.items()})


def of_the_page():
    """The class that docs/compression.md shows."""
    page = (Path(__file__).parents[1] / "docs" / "compression.md").read_text()
    made: dict[str, Any] = {"__name__": "mine"}
    exec(page.partition("```python\n")[2].partition("```")[0], made)
    return made["FourBits"]()


# One parameter


def test_the_largest_entries_travel_with_their_places():
    change = torch.tensor([0.5, -3.0, 0.0, 2.0, -1.0])
    packed = TopK(0.4).pack(change)
    assert packed["indices"].tolist() == [1, 3] and packed["values"].tolist() == [-3.0, 2.0]
    assert TopK(0.4).unpack(packed, 5).tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]
    assert [len(TopK(share).pack(drawn(100))["values"]) for share in (0.001, 0.07, 0.071, 1.0)] == [1, 7, 8, 100]


def test_signs_travel_with_the_mean_size():
    change = torch.tensor([0.5, -3.0, 0.0, 2.0, -1.0, 1.0, -1.0, 1.0, -0.5])
    packed = Sign().pack(change)
    assert packed["bits"].dtype == torch.uint8 and len(packed["bits"]) == 2
    scale = float(change.abs().mean())
    assert Sign().unpack(packed, 9).tolist() == pytest.approx([scale if x >= 0 else -scale for x in change])


@pytest.mark.parametrize("size", [1, 1000])
def test_eight_bits_are_off_by_half_a_step_at_most(size):
    change = drawn(size)
    packed = EightBits().pack(change)
    step = float(change.abs().max()) / 127
    assert packed["values"].dtype == torch.int8 and float(packed["scale"]) == pytest.approx(step)
    assert float((EightBits().unpack(packed, size) - change).abs().max()) <= step / 2 * (1 + 1e-5)


def test_half_precision_rounds_to_eleven_bits():
    change = torch.tensor([1 + 2**-11 + 2**-12, -0.1, 7e4])
    packed = HalfPrecision().pack(change)
    assert packed["values"].dtype == torch.float16
    # rounded to the nearest, and bounded by the largest number of the type
    assert HalfPrecision().unpack(packed, 3).tolist() == [1 + 2**-10, float(torch.tensor(-0.1).half()), 65504.0]


@each_kind
@pytest.mark.parametrize("change", [torch.zeros(5), torch.full((5,), 1e-44), torch.full((5,), 1e37)])
def test_extreme_changes_stay_finite(kind, change):
    restored = kind.unpack(kind.pack(change), 5)
    assert restored.isfinite().all() and float((restored - change).abs().max()) <= float(change.abs().max())


@each_kind
@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_what_travels_looks_alike_for_every_change(kind, size):
    one, other = kind.pack(drawn(size)), kind.pack(torch.zeros(size))
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {n: (t.shape, t.dtype) for n, t in other.items()}


@each_kind
def test_the_look_of_an_update_is_that_of_what_travels(kind):
    model = make_client(net=noisy)
    weights = dict(model.state_dict())
    like = {"weights": weights, "num_samples": torch.tensor(1)}
    look = kind.look(like, model)
    assert look["num_samples"] is like["num_samples"]

    def kinds(record):
        return tree_map(lambda tensor: (tensor.shape, tensor.dtype), record)

    names = [name for name, _ in model.named_parameters()]
    assert kinds({name: look["weights"][name] for name in names}) == {
        name: kinds(kind.pack(drawn(weights[name].numel()))) for name in names
    }
    assert all(look["weights"][name] is weights[name] for name in weights.keys() - set(names))


@pytest.mark.parametrize("indices", [[0, 5], [-1, 2], [2, 2], [3, 1]])
def test_places_that_a_parameter_does_not_have_are_refused(indices):
    packed = {"indices": torch.tensor(indices, dtype=torch.int32), "values": torch.ones(2)}
    with pytest.raises(ValueError, match="indices"):
        TopK(0.4).unpack(packed, 5)


# Rounds


@each_kind
def test_what_is_restored_and_what_is_kept_are_the_change_and_what_was_kept(kind):
    plain, seen = Spy(), Changes()
    fit(make_client(), callbacks=[plain], max_rounds=1)
    run = fit(make_client(), callbacks=[seen], max_rounds=3, compression=kind)
    names = trained_parameters(run.federation.client, "net")
    for client in range(4):
        trained, received = plain.updates[0][client]["weights"], seen.received[0][client]
        for name in (f"net.{name}" for name in names):
            sent = seen.updates[0][client]["weights"][name] - received[name]
            left = seen.residuals[0][client][name]
            assert torch.allclose(sent + left, trained[name] - received[name], atol=1e-6)
            assert left.abs().max() > 0
    # with the residual of the round before, it isn't the change of the round alone
    assert not equal(seen.residuals[1], seen.residuals[0])


def test_over_rounds_all_changes_arrive_but_for_the_last_residual():
    kind, total, sent, job_residual = TopK(0.1), torch.zeros(50), torch.zeros(50), torch.zeros(50)
    for round in range(30):
        change = drawn(50, seed=round) + 0.1
        packed = kind.pack(change + job_residual)
        restored = kind.unpack(packed, 50)
        job_residual = change + job_residual - restored
        total, sent = total + change, sent + restored
    assert torch.allclose(sent + job_residual, total, atol=1e-4)


def test_without_compression_a_run_is_what_it_was():
    whole = fit(make_client())
    assert same_end(whole, fit(make_client(), compression=None))
    assert not any(state.residual for state in whole.federation.clients.values())


def test_all_entries_are_plain_training_to_rounding():
    whole, compressed = fit(make_client()), fit(make_client(), compression=TopK(1.0))
    assert all(torch.allclose(whole.weights[n], compressed.weights[n], atol=1e-5) for n in whole.weights)
    assert not equal(whole.weights, fit(make_client(), compression=TopK(0.1)).weights)


@each_kind
def test_bytes_are_those_that_travel(kind):
    run = fit(make_client(net=noisy), max_rounds=2, compression=kind)
    state = run.federation.client.state_dict()
    parameters = {name for name, _ in run.federation.client.named_parameters()}
    expected = 8  # of the number of samples
    for name, tensor in state.items():
        size = tensor.numel()
        by_kind = {
            TopK: 8 * math.ceil(0.25 * size),
            Sign: math.ceil(size / 8) + 4,
            EightBits: size + 4,
            HalfPrecision: 2 * size,
        }
        expected += by_kind[type(kind)] if name in parameters else tensor.nbytes
    assert [row["bytes/up"] for row in run.rows] == [4 * expected] * 2
    whole = fit(make_client(net=noisy), max_rounds=2)
    assert [row["bytes/down"] for row in run.rows] == [row["bytes/down"] for row in whole.rows]


def test_buffers_and_other_entries_travel_whole():
    plain, seen = Spy(), Spy()
    for spy, kind in ((plain, None), (seen, Sign())):
        model = make_client(ControlVariates, net=noisy, optimizer=partial(SGD, lr=0.1))
        fit(model, aggregator=SCAFFOLD(), callbacks=[spy], max_rounds=1, compression=kind)
    for client, update in plain.updates[0].items():
        sent = seen.updates[0][client]
        assert list(sent) == list(update)
        assert all(equal(entry, sent[name]) for name, entry in update.items() if name != "weights")
        weights, whole = sent["weights"], update["weights"]
        buffers = [name for name in whole if "running" in name or "num_batches" in name]
        assert len(buffers) == 3 and all(torch.equal(whole[name], weights[name]) for name in buffers)
        assert not torch.equal(whole["net.classifier.weight"], weights["net.classifier.weight"])


@each_kind
@pytest.mark.by_default("8 bits")
def test_order_and_resuming_change_nothing(kind, tmp_path):
    check_order_and_resume(FedPer, tmp_path, compression=kind)


@pytest.mark.parametrize("where", ["disk", "device"])
@pytest.mark.by_default("disk")
def test_residuals_are_where_states_are(where, tmp_path):
    there = fit(make_client(), root=tmp_path, compression=TopK(0.2), client_states=where)
    here = fit(make_client(), compression=TopK(0.2))
    assert equal(there.weights, here.weights)
    saved = load(there.last)["federation"]["clients"]
    assert all(equal(saved[k]["residual"], state.residual) for k, state in here.federation.clients.items())


@pytest.mark.parametrize("engine", ["processes", "vectorised", "auto"])
@pytest.mark.by_default("auto")
def test_every_engine_compresses(engine):
    reference = fit(make_client(), compression=EightBits())
    run = fit(make_client(), compression=EightBits(), engine=engine)
    assert all(torch.allclose(reference.weights[n], run.weights[n], atol=1e-3) for n in run.weights)
    assert [row["bytes/up"] for row in run.rows] == [row["bytes/up"] for row in reference.rows]
    if engine == "processes":
        assert equal(reference.weights, run.weights)


@pytest.mark.parametrize("method, server", [(Ditto, None), (FedPer, None), (FedAvg, FedAMP)])
def test_personal_methods_are_compressed_from_what_each_client_receives(method, server):
    seen = Changes()
    aggregator = server and server()
    run = fit(make_client(method), aggregator=aggregator, callbacks=[seen], max_rounds=3, compression=TopK(0.2))
    for received, updates in zip(seen.received, seen.updates, strict=True):
        for client, update in updates.items():
            for name, tensor in update["weights"].items():
                changed = int((tensor != received[client][name]).sum())
                assert 0 < changed <= math.ceil(0.2 * tensor.numel())
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_several_networks_are_compressed_by_their_own_parameters():
    run = fit(make_client(LGFedAvg, net=NETS), compression=TopK(0.5), max_rounds=2)
    assert all(state.residual for state in run.federation.clients.values())


def test_in_wider_types_what_is_kept_is_wider_too():
    run = fit(make_client(), compression=Sign(), max_rounds=2, precision="64-true")
    assert {t.dtype for t in run.federation.clients[0].residual.values()} == {torch.float64}
    assert {t.dtype for t in run.weights.values()} == {torch.float64}
    half = fit(make_client(), compression=Sign(), max_rounds=2, precision="bf16-true")
    assert {t.dtype for t in half.federation.clients[0].residual.values()} == {torch.float32}


@each_kind
@pytest.mark.by_default("top-k")
def test_it_learns(kind):
    run = fit(make_client(), compression=kind, max_rounds=8)
    assert run.rows[-1]["val/loss"] < 0.8 * run.rows[0]["val/loss"]


def test_a_client_whose_update_does_not_count_keeps_what_it_owed():
    class Lost(Sequential):
        def run(self, jobs):
            for outcome in super().run(jobs):
                away = self.module.round == 1 and outcome.client == 2
                yield outcome._replace(refused="it was away") if away else outcome

    seen = Changes()
    run = fit(make_client(), callbacks=[seen], max_rounds=2, compression=TopK(0.2), engine=Lost)
    assert run.rows[-1]["clients_refused"] == 1
    assert equal(seen.residuals[0][2], seen.residuals[1][2])
    assert not equal(seen.residuals[0][1], seen.residuals[1][1])


# With other settings


@pytest.mark.exhaustive
def test_private_samples_stay_as_private_and_clients_too():
    for settings in ({"example_privacy": DPSGD(1.0)}, {"aggregator": DPAverage(1.0)}):
        plain, compressed = fit(make_client(), **settings), fit(make_client(), compression=TopK(0.2), **settings)
        column = "privacy/epsilon"
        assert [row[column] for row in plain.rows] == [row[column] for row in compressed.rows]


def test_a_compressed_client_moves_the_private_sum_by_no_more_than_the_bound():
    seen, clip = Changes(), 0.01
    aggregator = DPAverage(noise_multiplier=0.0, clip=clip)
    run = fit(make_client(), blobs(40), aggregator=aggregator, callbacks=[seen], max_rounds=3, compression=Sign())
    ends = [received[0] for received in seen.received] + [run.federation.aggregator.global_model()]
    for one, other in pairwise(ends):
        moved = torch.cat([(other[n] - one[n]).flatten() for n in one]).double().norm()
        assert float(moved) == pytest.approx(clip, rel=1e-4)


def test_attacks_come_after_the_count_of_bytes():
    run = fit(make_client(), callbacks=[SignFlip(0.25)], compression=Sign(), aggregator=WeightedAverage())
    assert run.rows[0]["bytes/up"] == fit(make_client(), compression=Sign()).rows[0]["bytes/up"]


def test_refusals(tmp_path):
    for share in (0, -0.1, 1.1, math.nan):
        with pytest.raises(MisconfigurationException, match=r"share="):
            TopK(share)
    with pytest.raises(MisconfigurationException, match=r"trainer\.compression=Sign"):
        fit(make_client(Local), compression=Sign())
    with pytest.raises(MisconfigurationException, match=r"trainer\.compression='sign'"):
        fit(make_client(), compression="sign")
    fit(make_client(), root=tmp_path, compression=TopK(0.2), max_rounds=1)
    with pytest.raises(MisconfigurationException, match=r"trainer\.compression\.share"):
        fit(make_client(), root=tmp_path, compression=TopK(0.3), max_rounds=2, ckpt_path="last")


def test_updates_are_counted_by_what_travelled_and_not_by_what_was_restored():
    run = fit(make_client(), compression=TopK(0.1), max_rounds=1)
    job = run.federation.job(0)
    outcome = next(iter(run.federation.engines[0].run([job])))
    compressed = TopK(0.1).on_upload(outcome, job, run.federation.client)
    assert num_bytes(compressed.update["weights"]) == num_bytes(compressed.update["weights"].travelled)
    assert num_bytes(dict(compressed.update["weights"])) == num_bytes(outcome.update["weights"])
    assert np.isfinite(num_bytes(compressed.update))


# A compression of one's own


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_page_s_class_packs_two_entries_a_byte(size):
    kind, change = of_the_page(), drawn(size)
    packed = kind.pack(change)
    assert num_bytes(packed) == (size + 1) // 2 + 4
    step = change.abs().max() / 7
    assert (kind.unpack(packed, size) - change).abs().max() <= step / 2 + 1e-6
    assert not kind.unpack(kind.pack(torch.zeros(size)), size).any()


def test_the_page_s_class_has_error_feedback_and_counts_its_bytes(tmp_path):
    kind = of_the_page()
    check_order_and_resume(FedAvg, tmp_path, compression=kind)
    run, whole = (fit(make_client(), max_rounds=6, **settings) for settings in ({"compression": kind}, {}))
    parameters = list(run.model.parameters())
    expected = sum((p.numel() + 1) // 2 + 4 for p in parameters) + 8
    assert run.rows[0]["bytes/up"] == 4 * expected
    assert run.rows[-1]["train/loss"] == pytest.approx(whole.rows[-1]["train/loss"], rel=0.1)
    assert all(state.residual for state in run.federation.clients.values())


def test_a_guarantee_bounds_what_the_page_s_class_restores():
    spy = Changes()
    private = DPAverage(clip=0.01, noise_multiplier=0.0)
    fit(make_client(), aggregator=private, compression=of_the_page(), callbacks=[spy], max_rounds=1)
    before, after = spy.received[0][0], private.global_model()
    moved = torch.cat([(after[n] - before[n]).flatten() for n in before]).norm()
    assert 0 < moved <= 0.01 + 1e-6


def test_secure_sums_refuse_the_page_s_class():
    with pytest.raises(MisconfigurationException, match=r"trainer\.secure_sum.*trainer\.compression=FourBits"):
        fit(make_client(), compression=of_the_page(), secure_sum=SecureSum())
