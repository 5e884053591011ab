"""What holds for tests of engines."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """One thread around each test, since engines and ranks set a number of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
