import math

import pytest
import torch

from pfl_lightning.flower.sketch import Sketch
from pfl_lightning.flower.template import Refused, Spec, check, check_counts, check_finite, check_norm
from pfl_lightning.tasks import Segmentation


@pytest.mark.parametrize(
    ("record", "like"),
    [
        ({"loss": 0.5, "acc": math.nan}, {str: float}),
        ({}, {str: float}),
        ({"client": 3, "after": {"val": {"acc": 0.5}}}, {"client": int, "after": {str: {str: float}}}),
        ({"w": Spec(torch.float32, (3,))}, {"w": torch.ones(3)}),
        ({9: torch.ones(2)}, {0: torch.zeros(2), 3: torch.zeros(2)}),
        ({}, {0: torch.zeros(2)}),
        ([None, "text"], [None, str]),
        ([torch.ones(5, 2), torch.ones(2, 3)], [torch.ones(5, 0), torch.ones(0, 3)]),
    ],
)
def test_what_looks_like_its_template(record, like):
    check(record, like, keys=10)


@pytest.mark.parametrize(
    ("record", "like", "sentence"),
    [
        ({"loss": 1}, {str: float}, "record.'loss' is int and should be float."),
        ({0: 0.5}, {str: float}, "record has the entry 0, which is no name."),
        ({"client": True}, {"client": int}, "record.client is bool and should be int."),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, "record.w is float32 [2] and should be float32 [3]."),
        ({"w": torch.ones(3).half()}, {"w": torch.ones(3)}, "record.w is float16 [3] and should be float32 [3]."),
        ([torch.ones(4, 2)], [torch.ones(5, 0)], "record.0 is float32 [4, 2] and should be float32 [5, 0]."),
        ({"w": 3}, {"w": torch.ones(3)}, "record.w is int and should be float32 [3]."),
        ({"w": torch.ones(3)}, {"w": {}}, "record.w is float32 [3] and should be dict."),
        ({10: torch.ones(2)}, {0: torch.ones(2)}, "record has the entry 10, which is none of 0 to 9."),
        ({True: torch.ones(2)}, {0: torch.ones(2)}, "record has the entry True, which is none of 0 to 9."),
        ({"v": 1}, {"w": 1}, "record has an entry 'v', which isn't wanted."),
        ({}, {"w": 1}, "record has no entry 'w'."),
        ([1], [1, 2], "record has 1 parts and should have 2."),
        ((1,), [1], "record is tuple and should be list."),
        ({"w" * 1000: 1}, {}, "record has an entry 'wwwwwwwwwwww...wwwwwwwwwwwww', which isn't wanted."),
    ],
)
def test_what_does_not(record, like, sentence):
    with pytest.raises(Refused) as refusal:
        check(record, like, keys=10)
    assert str(refusal.value) == sentence


def test_finite_float16_whose_sum_overflows_is_finite():
    check_finite({"w": torch.full((100,), 60_000.0, dtype=torch.float16)})
    with pytest.raises(Refused, match=r"update.w.1 has a NaN"):
        check_finite({"w": [torch.ones(1), torch.tensor([torch.nan])]}, "update")


def test_the_norm_is_of_what_changed():
    payload = {"weights": {"w": torch.full((2,), 100.0)}, "round": torch.tensor(3)}
    update = {"weights": {"w": torch.tensor([103.0, 104.0])}, "num_samples": torch.tensor(10**6)}
    check_norm(update, payload, 5.0)
    with pytest.raises(Refused, match=r"the norm 5, which is more than max_norm=4.9"):
        check_norm(update, payload, 4.9)
    # what wasn't received counts as it is
    check_norm(update | {"p": {0: torch.tensor([12.0])}}, payload, 13.0)
    with pytest.raises(Refused, match="the norm 13"):
        check_norm(update | {"p": {0: torch.tensor([12.0])}}, payload, 12.9)


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_no_norm_overflows(value):
    with pytest.raises(Refused, match="the norm"):
        check_norm({"w": torch.full((3,), value)}, {"w": torch.zeros(3)}, 1e29)


def test_a_large_norm_is_a_number():
    check_norm({"w": torch.full((4,), 1e30)}, {"w": torch.zeros(4)}, 2.1e30)


def test_a_list_of_another_length_is_no_base():
    with pytest.raises(Refused, match="the norm 5"):
        check_norm({"l": [torch.tensor([3.0]), torch.tensor([4.0])]}, {"l": [torch.tensor([3.0])]}, 4.0)
    check_norm({"l": [torch.tensor([3.0]), torch.tensor([4.0])]}, {"l": [torch.tensor([3.0]), torch.ones(1)]}, 3.0)


def test_counts_are_those_of_the_start():
    update = {"num_samples": torch.tensor(7), "class_counts": torch.tensor([3, 0, 4])}
    check_counts(update, 7)
    check_counts({}, 7)
    with pytest.raises(Refused, match="num_samples is 7, and was 8 at first"):
        check_counts(update, 8)
    for counts in ([8, 0, -1], [3, 0, 5]):
        with pytest.raises(Refused, match="class_counts"):
            check_counts(update | {"class_counts": torch.tensor(counts)}, 7)


@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 3, 4, 5)])
def test_sketches_of_masks_have_a_class_for_each_pixel(shape):
    task = Segmentation(3)
    (samples,) = Sketch(task, shape).parts([0], "train")
    task.check(samples.y, "sketch")
    assert samples.x.shape == (6, *shape) and samples.y.shape == (6, *shape[1:])
