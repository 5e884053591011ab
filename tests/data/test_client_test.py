"""Clients that are tested on the original test half, with their own class mix."""

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import CONFIGS
from pfl_lightning import data as data_sets
from pfl_lightning.data import IID, Dirichlet, FederatedDataModule, RandomClasses

SPLITS = ("train", "val", "test")
TRAIN, TEST = 800, 200


class Halves(FederatedDataModule):
    """1,000 samples that are their own numbers; the last 200 are the original test half."""

    num_classes = 4
    input_shape = (1,)

    def load(self):
        self.original_test = torch.arange(TRAIN, TRAIN + TEST)
        return torch.arange(TRAIN + TEST).unsqueeze(1), torch.arange(TRAIN + TEST) % 4


class Whole(Halves):
    def load(self):
        return torch.arange(TRAIN).unsqueeze(1), torch.arange(TRAIN) % 4


class Lacking(Halves):
    """No sample of class 3 in the test half."""

    def load(self):
        x, y = super().load()
        return x, torch.where(x.flatten() < TRAIN, y, y % 3)


def ready(cls=Halves, **settings):
    defaults = {"num_clients": 5, "partitioner": Dirichlet(0.5, min_size=20, equalize=True), "client_test": "original"}
    data = cls(**{**defaults, **settings})
    data.setup()
    return data


def numbers(part):
    return part.x.flatten().tolist()


def held(data):
    return [n for c in range(data.num_clients) for split in ("train", "val") for n in numbers(data.part(c, split))]


def test_clients_share_the_training_half_and_are_tested_on_the_other():
    data = ready()
    assert sorted(held(data)) == list(range(TRAIN))
    assert all(min(numbers(data.part(c, "test"))) >= TRAIN for c in range(5))


def test_tests_are_a_fraction_as_large_as_what_a_client_holds():
    data = ready(test_fraction=0.3)
    assert [tuple(data.size(c, split) for split in SPLITS) for c in range(5)] == [(144, 16, 48)] * 5
    assert ready(test_fraction=0.301).size(0, "test") == 49


def test_tests_have_the_class_mix_of_what_a_client_holds():
    data = ready(test_fraction=0.3, partitioner=Dirichlet(0.5, min_size=20))
    own = data.class_counts("train") + data.class_counts("val")
    test = data.class_counts("test")
    assert (own == 0).any() and len(set(own.sum(1).tolist())) > 1
    assert ((test - test.sum(1, keepdim=True) * own / own.sum(1, keepdim=True)).abs() < 1).all()


def test_no_image_is_drawn_twice_before_all_others_of_its_class_are():
    # 200 images of two classes a client; the test half has 50 of each class
    few, many = (
        ready(num_clients=4, partitioner=RandomClasses(equalize=True), test_fraction=share) for share in (0.5, 0.9)
    )
    for client in range(4):
        assert sorted(numbers(few.part(client, "test"))) == sorted(set(numbers(few.part(client, "test"))))
        assert few.size(client, "test") == 100
        times = torch.tensor(numbers(many.part(client, "test"))).bincount()[TRAIN:]
        assert times.bincount().tolist()[1:] == [20, 80]


def test_tests_are_a_function_of_the_seed_and_the_client():
    one, again, other = ready(partitioner=IID()), ready(partitioner=IID()), ready(partitioner=IID(), seed=2)
    tests = [[numbers(data.part(c, "test")) for c in range(5)] for data in (one, again, other)]
    assert tests[0] == tests[1] != tests[2]
    # drawn alone by each, so that they overlap
    assert len({tuple(test) for test in tests[0]}) == 5
    assert set(tests[0][0]) & set(tests[0][1])


def test_what_clients_train_on_is_what_they_have_without_tests():
    with_tests, without = ready(), ready(client_test="own", central_test="original", test_fraction=0.0)
    for split in ("train", "val"):
        assert all(numbers(with_tests.part(c, split)) == numbers(without.part(c, split)) for c in range(5))


def test_no_tests_are_drawn_where_none_are_asked_for():
    data = ready(test_fraction=0.0)
    assert sum(data.size(c, "test") for c in range(5)) == 0
    assert sorted(held(data)) == list(range(TRAIN))


def test_the_server_s_samples_are_no_tests():
    data = ready(partitioner=IID(), test_fraction=0.9, central_test="original", server_fraction=0.5)
    server = set(numbers(data.server_data()))
    assert len(server) == 100
    assert all(not server & set(numbers(data.part(c, "test"))) for c in range(5))
    assert sorted(held(data)) == list(range(TRAIN))


def test_a_central_share_of_the_pool_is_kept_from_training():
    data = ready(central_test=0.2)
    central = set(numbers(data.central_data()))
    assert any(n < TRAIN for n in central)
    assert set(held(data)) == set(range(TRAIN)) - central


def test_a_subset_of_the_pool_keeps_both_halves_apart():
    data = ready(max_samples=300)
    assert max(held(data)) < TRAIN
    assert all(min(numbers(data.part(c, "test"))) >= TRAIN for c in range(5))


def test_the_smallest_client_needs_no_sample_to_test_on():
    data = ready(num_clients=400, partitioner=IID())
    assert [data.size(0, split) for split in SPLITS] == [1, 1, 1]


@pytest.mark.parametrize(
    ("cls", "settings", "says"),
    [
        (Halves, {"client_test": "other"}, r"^data\.client_test='other' must be one of own, original"),
        (Whole, {}, r"^data\.client_test=original: Whole has no test half of its own here; take own"),
        (Lacking, {}, r"^data\.client_test=original: .*no sample of class 3, on which client \d is to be tested; use"),
    ],
)
def test_what_can_t_be_drawn_is_refused(cls, settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(cls, **settings)


FILES = sorted((CONFIGS / "protocols").glob("*fedclassavg*.yaml"))
# images of a class in the two halves, classes
REAL = {"CIFAR10": (5000, 1000, 10), "ImageFolder": (5000, 1000, 10), "FashionMNIST": (6000, 1000, 10)}
REAL["EMNIST"] = (4800, 800, 26)
SIZES = {"CIFAR10": 2500, "ImageFolder": 2500, "FashionMNIST": 3000, "EMNIST": 6240}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_fedclassavg_s_files_have_the_sizes_that_they_state(path):
    given = yaml.safe_load(path.read_text())["data"]
    settings = {name: value for name, value in given["init_args"].items() if name not in ("root", "split")}
    rule = settings.pop("partitioner")
    train, test, classes = REAL[given["class_path"]]

    class Labels(Halves):
        num_classes = classes

        def load(self):
            self.original_test = torch.arange(train * classes, (train + test) * classes)
            return torch.arange((train + test) * classes).unsqueeze(1), torch.arange((train + test) * classes) % classes

    data = Labels(partitioner=getattr(data_sets, rule["class_path"])(**rule["init_args"]), **settings)
    data.setup()
    # 40 pairs of client and class don't go into 26 classes: each gives half of its images to a client
    size = 4800 if path.stem == "emnist_fedclassavg_skewed" else SIZES[given["class_path"]]
    expected = (size - size // 10, size // 10, size * 3 // 10)
    assert {tuple(data.size(c, split) for split in SPLITS) for c in range(20)} == {expected}
    assert max(held(data)) < train * classes <= min(numbers(data.part(0, "test")))
    assert f"{size:,}" in path.read_text() and f"{expected[2]:,}" in path.read_text()
