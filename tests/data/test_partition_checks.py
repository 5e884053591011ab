"""What a partitioner of the user's may give, and what is said of it."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUICKSTART, QUIET, refusal
from pfl_lightning.data import IID, DominantLabels, FederatedDataModule, Partitioner

N = 60


class Numbered(FederatedDataModule):
    """Each input is its own position in the pool."""

    num_classes = 3
    input_shape = (1,)

    def load(self):
        return torch.arange(N).unsqueeze(1), torch.arange(N) % 3


class Answers(Partitioner):
    """Gives what it was made with."""

    def __init__(self, parts):
        self.parts = parts

    def split(self, classes, num_clients, rng):
        return self.parts


class Called(Answers):
    """The same, without the base's own steps."""

    def __call__(self, labels, num_clients, num_classes, seed):
        return self.parts


class Growing(Answers):
    """The same, with a smallest size."""

    min_size = 1


class SevenParts(Partitioner):
    """Seven clients, whatever is asked for."""

    def split(self, classes, num_clients, rng):
        return np.array_split(np.concatenate(classes), 7)


def ready(partitioner, num_clients=3, **settings):
    data = Numbered(num_clients=num_clients, partitioner=partitioner, **settings)
    data.setup()
    return data


def tensors(*starts, size=10):
    return [torch.arange(start, start + size) for start in starts]


BAD = {
    "too many": (tensors(0, 10, 20, 30), r"returned 4 parts for data\.num_clients=3; return a list"),
    "too few": (tensors(0, 10), r"returned 2 parts for data\.num_clients=3"),
    "no list": ({0: torch.arange(9)}, r"returned a dict for data\.num_clients=3"),
    "nothing": (None, r"returned a NoneType for data\.num_clients=3"),
    "floats": (
        [*tensors(0, 10), torch.arange(20.0, 30)],
        r"client 2 positions as torch\.float32 of shape \[10\]; .*int64",
    ),
    "masks": ([torch.arange(N) % 3 == c for c in range(3)], r"client 0 positions as torch\.bool of shape \[60\]"),
    "short integers": ([rows.to(torch.uint8) for rows in tensors(0, 10, 20)], r"torch\.uint8"),
    "arrays": (
        [rows.numpy() for rows in tensors(0, 10, 20)],
        "client 0 positions as ndarray; give each client an int64",
    ),
    "tables": ([*tensors(0, 10), torch.zeros(2, 5, dtype=torch.int64)], r"of shape \[2, 5\]"),
    "beyond the end": (tensors(0, 10, 55), "positions from 0 to 64 for 60 samples; give positions from 0 to 59"),
    "before the start": (tensors(-2, 10, 20), "positions from -2 to 29 for 60 samples"),
    "overlap": (tensors(0, 10, 19), "sample 19 to clients 1 and 2, which could be trained and tested on it; give each"),
    "twice": ([torch.tensor([4, 5, 6, 4]), *tensors(10, 20)], "sample 4 to client 0 twice"),
    "empty": (
        [*tensors(0, 10), torch.tensor([])],
        "left client 2 with 0 of 60 samples, too few for 3 non-empty parts; ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_partition_is_refused(case):
    parts, says = BAD[case]
    with pytest.raises(MisconfigurationException, match=rf"^Called .*{says}"):
        ready(Called(parts))


@pytest.mark.parametrize("num_clients", [5, 9])
def test_a_partitioner_with_a_number_of_its_own_is_refused(num_clients):
    with pytest.raises(MisconfigurationException, match=rf"^SevenParts returned 7 parts .*num_clients={num_clients};"):
        ready(SevenParts(), num_clients)


def test_overlap_is_refused_whatever_way_it_was_made():
    with pytest.raises(MisconfigurationException, match=r"^Answers gave sample 5 to clients 0 and 1"):
        ready(Answers([np.arange(10), np.arange(5, 15), np.arange(20, 30)]))


def test_a_function_is_named_too():
    def halves(labels, num_clients, num_classes, seed):
        return tensors(0, 10)

    with pytest.raises(MisconfigurationException, match=r"^halves returned 2 parts"):
        ready(halves)


@pytest.mark.parametrize(
    ("cls", "settings", "least", "remedy"),
    [
        (Called, {}, 3, "or give each at least 3"),
        (Growing, {}, 3, "or min_size=3"),
        (Called, {"val_fraction": 0.0}, 2, "or give each at least 2"),
        (Called, {"val_fraction": 0.0, "test_fraction": 0.0}, 1, "or give each at least 1"),
    ],
)
def test_a_client_needs_a_sample_for_each_of_its_parts(cls, settings, least, remedy):
    clients = [*tensors(0, 10), torch.arange(20, 20 + least - 1)]
    says = (
        rf"left client 2 with {least - 1} of 60 samples, too few for {least} .*fewer clients or more samples, {remedy}"
    )
    with pytest.raises(MisconfigurationException, match=says):
        ready(cls(clients), **settings)
    clients[2] = torch.arange(20, 20 + least)
    assert ready(cls(clients), **settings).size(2, "train") == 1


def test_lists_of_positions_will_do():
    data = ready(Answers([[5, 6, 7], [0, 1, 2], [9, 8, 3]]), val_fraction=0.0)
    assert set(data.part(2, "train").x.flatten().tolist()) <= {9, 8, 3}


def lines(caplog):
    return [line for line in caplog.messages if "to no client" in line]


def test_what_is_left_out_is_said_with_its_size(caplog):
    ready(Called(tensors(0, 10, 20)))
    assert lines(caplog) == ["Called leaves 30 of 60 samples to no client."]


def test_a_class_that_runs_out_is_said_too(caplog):
    ready(DominantLabels(samples_per_client=6, dominant=1, groups=3, iid_fraction=0.0))
    assert lines(caplog) == ["DominantLabels leaves 42 of 60 samples to no client."]


def test_nothing_is_said_where_all_is_divided(caplog):
    ready(IID())
    assert not lines(caplog)


def test_the_central_test_set_is_not_left_out(caplog):
    ready(IID(), central_test=0.2)
    assert not lines(caplog)


def test_the_command_line_refuses_in_a_sentence(capsys):
    line = f"fit {QUICKSTART} {QUIET} --data.partitioner test_partition_checks.SevenParts"
    assert refusal(line, capsys).startswith("SevenParts returned 7 parts for data.num_clients=10")


class Unfinished(Partitioner):
    """Lacks a method."""


def test_a_partitioner_that_lacks_a_method_is_told_so(capsys):
    line = f"fit {QUICKSTART} {QUIET} --data.partitioner test_partition_checks.Unfinished"
    assert refusal(line, capsys).startswith("data.partitioner=test_partition_checks.Unfinished is abstract; define")
