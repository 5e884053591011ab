import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.settings import check_choices


def test_a_setting_that_is_none_of_its_choices_is_refused():
    check_choices("model", buffers=("local", ("average", "local")))
    with pytest.raises(MisconfigurationException, match=r"model\.order='b' must be one of x, y\."):
        check_choices("model", buffers=("local", ("average", "local")), order=("b", ("x", "y")))
