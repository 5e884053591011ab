import pytest
import torch

from pfl_lightning.messages import detached, digest, is_finite, num_bytes, tensors, tree_map, weighted_mean

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
