from functools import partial

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.settings import check_choices, check_least, is_count, kept_arguments, live, value_text


def test_a_setting_that_is_none_of_its_choices_is_refused():
    check_choices("model", buffers=("local", ("average", "local")))
    with pytest.raises(MisconfigurationException, match=r"model\.order='b' must be one of x, y\."):
        check_choices("model", buffers=("local", ("average", "local")), order=("b", ("x", "y")))


@pytest.mark.parametrize("value", [0, float("nan")])
def test_a_setting_below_its_bound_is_refused(value):
    check_least("aggregator", rounds=(1, 1))
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.batch={value} must be 1 or more\."):
        check_least("aggregator", rounds=(1, 1), batch=(value, 1))


def test_a_count_is_an_integer_from_1_up():
    assert [value for value in (1, 7, 0, -1, True, 1.0, "1", None) if is_count(value)] == [1, 7]


def test_functions_and_classes_are_no_values_for_a_checkpoint():
    assert live({"net": dict, "nets": [1, len], "sizes": [1, 2], "name": "x", "made": partial(int, 3)}) == [
        *("net", "nets", "made")
    ]


class Kept:
    def __init__(self, size, rate=0.1, lost=3):
        self.size, self.rate, self.hparams = size, rate, {"seed": 7}


def test_arguments_are_kept_as_attributes_or_hyper_parameters():
    assert kept_arguments(Kept(5)) == {"size": 5, "rate": 0.1, "seed": 7}
    assert kept_arguments(3) == {}


def test_a_value_is_named_by_what_makes_it():
    made = partial(isinstance, Kept, rate=partial(max, key=len))
    assert value_text(made) == "Kept(rate=max(key=len))"
    assert [value_text(value) for value in (Kept, len, 0.5, "a" * 90, Kept(1))] == ["Kept", "len", "0.5", "str", "Kept"]
