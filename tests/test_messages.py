import copy
import io
import pickle
import weakref

import pytest
import torch

from federations import equal
from pfl_lightning.messages import (
    Others,
    Pool,
    Restored,
    Row,
    RunningMean,
    Stack,
    column,
    detached,
    digest,
    fill_means,
    is_finite,
    keep_own,
    num_bytes,
    pooled,
    stacked_means,
    tensors,
    tree_map,
    weighted_mean,
    weighted_means,
)

RECORD = {
    "a": torch.ones(2),
    "b": {"c": [torch.zeros(3, dtype=torch.int64), (torch.ones(1, dtype=torch.bfloat16),)]},
    "n": 3,
}


def test_tensors_are_found_at_any_depth_in_order():
    assert [t.numel() for t in tensors(RECORD)] == [2, 3, 1]


def test_bytes_are_those_of_all_tensors():
    assert num_bytes(RECORD) == 2 * 4 + 3 * 8 + 1 * 2
    assert num_bytes({}) == 0


def test_a_fingerprint_is_of_values_and_not_of_strides():
    wide = torch.arange(12.0).view(3, 4)
    for view in (wide[:1, 1], wide.T, wide[::2], wide[0, 0]):
        assert digest([view]) == digest([view.clone(memory_format=torch.contiguous_format)])
    assert digest([wide]) != digest([wide + 1]) != digest([wide.view(4, 3) + 1])


def test_copies_are_on_the_cpu_and_share_nothing():
    source = torch.ones(2, requires_grad=True)
    record = {"w": [source, 1.5, "x"]}
    copy = detached(record)
    assert not copy["w"][0].requires_grad and copy["w"][1:] == [1.5, "x"]
    copy["w"][0].add_(1)
    assert source.tolist() == [1, 1]


def test_tree_map_keeps_the_structure():
    mapped = tree_map(lambda t: t + 1, RECORD)
    assert isinstance(mapped["b"]["c"][1], tuple) and mapped["n"] == 3 and mapped["a"].tolist() == [2, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_anywhere_is_found(value):
    assert is_finite(RECORD)
    assert not is_finite({"deep": [{"w": torch.tensor([0.0, value, 1.0])}]})


def test_infinities_of_both_signs_do_not_cancel():
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_bfloat16_is_averaged_in_float32():
    values = [1.0, 1.0078125, 1.0078125, 1.0078125]  # neighbours in bfloat16: sums of quarters round there
    states = [{"w": torch.tensor([v], dtype=torch.bfloat16)} for v in values]
    mean = weighted_mean(states, [0.25] * 4)["w"]
    assert mean.dtype == torch.bfloat16
    assert mean.item() == torch.tensor(sum(values) / 4).bfloat16().item()
    many = [{"w": torch.tensor([1.0], dtype=torch.bfloat16)}] * 1000
    assert weighted_mean(many, [0.001] * 1000)["w"].item() == 1.0


def test_float64_is_averaged_in_float64():
    exact = [{"w": torch.tensor([1.0 + k * 2.0**-40], dtype=torch.float64)} for k in (0, 2)]
    assert weighted_mean(exact, [0.5, 0.5])["w"].item() == 1.0 + 2.0**-40


def test_integers_and_flags_take_the_maximum():
    states = [{"n": torch.tensor(k), "seen": torch.tensor([k == 2, False])} for k in (1, 2, 0)]
    mean = weighted_mean(states, [1 / 3] * 3)
    assert mean["n"].item() == 2 and mean["seen"].tolist() == [True, False]


def test_weights_are_used_as_they_are():
    assert weighted_mean([{"w": torch.ones(1)}, {"w": torch.ones(1)}], [0.5, 0.2])["w"].item() == pytest.approx(0.7)


def test_as_many_weights_as_states():
    with pytest.raises(ValueError):
        weighted_mean([{"w": torch.ones(1)}] * 2, [1.0])


# Rows of a stack


def stack(n=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, 3, 2, generator=generator, dtype=torch.float64).to(dtype)
    return Stack({"w": w, "n": torch.arange(n) + seed, "b": torch.randn(n, generator=generator).to(dtype)})


def as_dicts(rows):
    return [{name: stack[row.index] for name, stack in row.stack.entries.items()} for row in rows]


@pytest.mark.parametrize(
    "chosen", [[(0, k) for k in range(4)], [(0, 3), (0, 1)], [(0, 2)], [(0, 3), (1, 0), (0, 0), (1, 2)]]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_of_rows_is_that_of_the_dicts_that_they_are(chosen, dtype):
    stacks = [stack(seed=seed, dtype=dtype) for seed in range(2)]
    rows = [Row(stacks[which], row) for which, row in chosen]
    weights = [1 / (k + 2) for k in range(len(rows))]
    expected = weighted_mean(as_dicts(rows), weights)
    mean = weighted_mean(rows, weights)
    assert list(mean) == list(expected) and mean["n"].equal(expected["n"])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)
    # nobody has looked at a row for it
    assert not any(of_clients.rows for of_clients in stacks)


def test_several_means_of_rows_are_those_of_the_dicts_each_by_itself_and_hold_no_stack():
    stacks = [stack(seed=seed) for seed in range(2)]
    rows = [Row(stacks[which], row) for which, row in [(0, 3), (1, 0), (0, 0), (0, 1), (0, 2), (1, 2)]]
    weights = torch.rand(4, len(rows)).tolist()
    means, expected = weighted_means(rows, weights), weighted_means(as_dicts(rows), weights)
    torch.testing.assert_close(means, expected, rtol=1e-14, atol=1e-14)
    each = [weighted_mean(as_dicts(rows), row) for row in weights]
    torch.testing.assert_close(expected, each, rtol=1e-14, atol=1e-14)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(expected))
    assert not any(of_clients.rows for of_clients in stacks)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(means))


@pytest.mark.parametrize("kind", [list, as_dicts], ids=["rows", "dicts"])
def test_a_mean_may_be_of_some_entries(kind):
    states = kind([Row(stack(), k) for k in range(3)])
    whole = weighted_mean(states, [0.5, 0.3, 0.2])
    assert digest(weighted_mean(states, [0.5, 0.3, 0.2], ["b", "n"])) == digest([whole["b"], whole["n"]])


def test_who_looks_at_an_entry_has_that_one_on_the_cpu_and_leaves_the_others():
    of_clients = stack()
    rows = [Row(of_clients, k) for k in range(4)]
    assert rows[2]["b"].equal(of_clients.entries["b"][2]) and of_clients.rows.keys() == {"b"}
    assert is_finite(rows[1]) and of_clients.rows.keys() == {"b"}
    of_clients.entries["w"][1, 2] = torch.inf
    assert not is_finite(rows[1]) and is_finite(rows[0])


def test_a_column_is_where_the_stacks_are_and_on_the_cpu_with_dicts_among_them():
    stacks = [stack(seed=seed) for seed in range(2)]
    rows = [Row(stacks[1], 2), Row(stacks[0], 1)]
    for found, state in zip(column(rows, "w"), as_dicts(rows), strict=True):
        assert found.equal(state["w"])
    assert not any(of_clients.rows for of_clients in stacks)
    mixed = column([rows[0], *as_dicts(rows[1:])], "w")
    assert all(map(torch.equal, mixed, column(rows, "w"))) and stacks[1].rows.keys() == {"w"}


def test_a_client_that_diverged_is_no_part_of_a_mean_of_the_others():
    of_clients = stack()
    of_clients.entries["w"][1] = torch.nan
    assert is_finite(weighted_mean([Row(of_clients, k) for k in (0, 2, 3)], [1 / 3] * 3))


def test_as_many_weights_as_rows():
    with pytest.raises(ValueError):
        weighted_mean([Row(stack(), 0)] * 2, [1.0])


def test_a_row_reads_as_a_dict_of_views():
    of_clients = stack()
    row, (expected,) = Row(of_clients, 2), as_dicts([Row(of_clients, 2)])
    assert num_bytes({"weights": row}) == 3 * 2 * 8 + 8 + 8 and not of_clients.rows
    assert list(row) == ["w", "n", "b"] and len(row) == 3 and "w" in row
    torch.testing.assert_close(dict(row), expected, rtol=0, atol=0)
    torch.testing.assert_close(row | {"b": expected["n"]}, expected | {"b": expected["n"]}, rtol=0, atol=0)
    assert ({"z": 1, "w": 2} | row)["w"] is row["w"]
    assert row["w"].data_ptr() == of_clients.entries["w"][2].data_ptr()
    assert digest(row) == digest(expected)


def test_a_row_is_a_dict_where_it_is_sent_or_copied():
    row = Row(stack(), 1)
    buffer = io.BytesIO()
    torch.save({"weights": row}, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=False)["weights"], copy.deepcopy(row), detached(row)):
        assert type(other) is dict and digest(other) == digest(row)


def pooled_models():
    return Pool({k: {"w": torch.full((2,), float(k)), "n": torch.tensor(k)} for k in range(3)})


def test_the_models_of_others_read_as_a_dict_without_the_client_s_own():
    others = Others(pool := pooled_models(), 1)
    assert list(others) == [0, 2] and len(others) == 2 and 1 not in others
    assert others[2] is pool.models[2] and others == {k: pool.models[k] for k in (0, 2)}
    assert num_bytes({"models": others}) == num_bytes(dict(others)) == 2 * (2 * 4 + 8)
    stranger = Others(pool, 5)
    assert list(stranger) == [0, 1, 2] and len(stranger) == 3 and num_bytes(stranger) == 3 * (2 * 4 + 8)


def test_the_models_of_others_are_a_dict_where_they_are_sent_or_copied():
    others = Others(pooled_models(), 1)
    for other in (pickle.loads(pickle.dumps(others)), copy.deepcopy(others), detached(others)):
        assert type(other) is dict and list(other) == [0, 2] and digest(other) == digest(others)


def test_a_pool_has_one_stack_for_all_who_ask_for_it():
    pool, like = pooled_models(), torch.zeros((), dtype=torch.float64)
    stacked = pool.stack("w", like)
    assert torch.equal(stacked, torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64))
    assert pool.stack("w", like) is stacked and pool.stack("w", like.float()).dtype == torch.float32


def test_payloads_of_all_others_models_have_a_common_pool_again():
    pool = pooled_models()
    plain = {k: {"models": dict(Others(pool, k)), "shares": torch.tensor(k)} for k in range(3)}
    found = pooled(plain)
    assert found == plain and {type(payload["models"]) for payload in found.values()} == {Others}
    assert len({id(payload["models"].pool) for payload in found.values()}) == 1
    # one of the models is another one
    plain[1]["models"][2] = {name: tensor.clone() for name, tensor in plain[1]["models"][2].items()}
    odd = ({"weights": {}}, {"models": [torch.ones(2)]}, {"models": {0: 1.0, 1: 2.0}})
    for others in (plain, {0: plain[0]}, *({k: payload for k in range(3)} for payload in odd), {}):
        assert not any(type(payload.get("models")) is Others for payload in pooled(others).values())


def test_what_has_been_changed_in_a_row_counts_in_a_mean():
    of_clients = stack()
    rows = [Row(of_clients, k) for k in range(4)]
    rows[0]["w"].zero_()
    assert weighted_mean(rows, [1.0, 0.0, 0.0, 0.0])["w"].count_nonzero() == 0


def test_nothing_is_copied_of_what_is_no_row():
    own = {"mean": torch.zeros(3), "list": [torch.ones(2)]}
    parts = [own["mean"], own["list"][0]]
    of_clients = stack()
    keep_own(own, {0: {"weights": Row(of_clients, 0)}})
    assert own["mean"] is parts[0] and own["list"][0] is parts[1] and not of_clients.rows


def test_stacked_means_are_the_means_also_in_memory_of_earlier_ones():
    states = [{"w": torch.randn(3, 2), "h": torch.randn(5).bfloat16(), "n": torch.tensor(k)} for k in range(7)]
    weights = torch.rand(4, 7).tolist()
    expected = weighted_means(states, weights)
    stacks = stacked_means(states, weights, states[0])
    used = {name: torch.cat([stack, stack[:1]]) * 2 for name, stack in stacks.items()}
    rest = {name: stack[4].clone() for name, stack in used.items()}
    fill_means(used, states, weights)
    for name in states[0]:
        wanted = torch.stack([mean[name] for mean in expected])
        assert torch.equal(stacks[name], wanted) and torch.equal(used[name][:4], wanted)
        # rows beyond the means stay
        assert torch.equal(used[name][4], rest[name])


def models(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(50, generator=generator), "half": torch.randn(9, generator=generator).bfloat16(),
         "steps": torch.tensor(k)}
        for k in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_running_mean_has_the_bits_of_all_at_once_in_any_order(order):
    counts, each = {3: 7.0, 5: 2.0, 8: 4.0}, models()
    mean = RunningMean(counts)
    for k in order:
        mean.add([3, 5, 8][k], each[k], [7.0, 2.0, 4.0][k])
    assert equal(mean.mean(), weighted_mean(each, [7 / 13, 2 / 13, 4 / 13]))
    assert num_bytes(mean) == num_bytes(each[0])
    assert list(mean) == list(each[0]) and len(mean) == 3
    assert mean.is_of({3: 7 / 13, 5: 2 / 13, 8: 4 / 13}) and not mean.is_of({3: 1 / 3, 5: 1 / 3, 8: 1 / 3})


def test_a_missing_client_leaves_the_mean_of_the_others():
    mean, each = RunningMean({3: 7.0, 5: 2.0, 8: 4.0}), models()
    mean.add(8, each[2], 4.0)
    mean.add(3, each[0], 7.0)
    expected = weighted_mean([each[0], each[2]], [7 / 11, 4 / 11])
    assert all(torch.allclose(mean[name], expected[name], rtol=1e-5) for name in expected)
    assert mean.is_of({3: 7 / 11, 8: 4 / 11})


def test_no_more_than_one_model_waits_for_a_running_mean():
    mean, seen = RunningMean(dict.fromkeys(range(6), 1.0)), []
    for client in range(6):
        model = {"w": torch.ones(1000)}
        seen.append(weakref.ref(model["w"]))
        mean.add(client, model, 1.0)
        del model
    assert [ref() for ref in seen] == [None] * 6


def test_what_travelled_is_counted_and_kept_where_restored_weights_are_sent():
    restored = Restored({"w": torch.ones(4)}, {"w": {"bits": torch.ones(1, dtype=torch.uint8)}})
    sent = pickle.loads(pickle.dumps(restored))
    assert num_bytes(restored) == num_bytes(sent) == 1
    assert torch.equal(sent["w"], restored["w"]) and torch.equal(sent.travelled["w"]["bits"], torch.ones(1).byte())
