"""Partitions of Hugging Face data sets; stand-ins have the interface of ``flwr_datasets``."""

from itertools import chain

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import FlowerDatasets
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

datasets = pytest.importorskip("datasets", reason="needs the extra hf")


def rows(first, count):
    numbers = range(first, first + count)
    return datasets.Dataset.from_dict(
        {"size": [float(n) for n in numbers], "one": [1.0] * count, "label": [n % 2 for n in numbers]}
    )


class Partitioner:
    """As those of ``flwr_datasets``: it knows its number of partitions once it has a data set."""

    def __init__(self, dataset, parts, names=None):
        self.dataset, self.parts, self.asked = dataset, parts, False
        if names:
            self.partition_id_to_natural_id = dict(enumerate(names))

    @property
    def num_partitions(self):
        assert self.asked
        return self.parts

    def load_partition(self, partition_id):
        self.asked = True
        return self.dataset.shard(self.parts, partition_id, contiguous=True)


class Federated:
    def __init__(self, **partitioners):
        self.partitioners = partitioners

    def load_partition(self, partition_id, split=None):
        assert split is not None or len(self.partitioners) == 1
        return self.partitioners[split or next(iter(self.partitioners))].load_partition(partition_id)


def ready(partitions, **settings):
    data = FlowerDatasets(partitions, "label", Classification(2), **settings)
    data.setup()
    return data


def sizes(data, client):
    """The column "size" of a client's samples, by split."""
    return {split: sorted(data.part(client, split).x[:, 0].tolist()) for split in ("train", "val", "test")}


def test_each_split_of_a_federated_data_set_has_a_partition_a_client():
    federated = Federated(
        train=Partitioner(rows(0, 30), 3, ["Ulm", "Bonn", "Kiel"]), test=Partitioner(rows(100, 12), 3)
    )
    data = ready(federated, val_fraction=0.0)
    assert data.client_names == ["Bonn", "Kiel", "Ulm"]
    assert sizes(data, 2) == {"train": [*range(10)], "val": [], "test": [*range(100, 104)]}
    assert sizes(data, 0) == {"train": [*range(10, 20)], "val": [], "test": [*range(104, 108)]}
    run = fit(FedAvg(MLP, data.input_shape, 2), data, max_rounds=1)
    assert 0 <= run.logger.summary["final"]["test/acc"] <= 1


@pytest.mark.parametrize("made", [lambda one: Federated(train=one), lambda one: one], ids=["federated", "partitioner"])
def test_partitions_of_train_alone_are_split(made):
    data = ready(made(Partitioner(rows(0, 40), 4)), test_fraction=0.2, val_fraction=0.25)
    assert data.num_clients == 4 and data.input_shape == (2,)
    for client in range(4):
        parts = sizes(data, client)
        assert [len(part) for part in parts.values()] == [6, 2, 2]
        assert sorted(chain(*parts.values())) == [*range(10 * client, 10 * client + 10)]


def test_lists_and_mappings_of_data_sets_are_clients():
    split = datasets.DatasetDict({"train": rows(0, 6), "validation": rows(6, 2), "test": rows(8, 2)})
    data = ready({"B": split, "A": {"train": rows(20, 5), "valid": rows(25, 1), "test": rows(26, 1)}})
    assert data.client_names == ["A", "B"]
    assert sizes(data, 1) == {"train": [*range(6)], "val": [6, 7], "test": [8, 9]}
    assert sizes(data, 0)["val"] == [25]
    listed = ready([rows(0, 8).select([7, 1, 2, 3, 4, 5]), rows(20, 10)], val_fraction=0.0)
    assert sorted(chain(*sizes(listed, 0).values())) == [1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize(
    ("partitions", "says"),
    [
        ([], "has no samples"),
        ([rows(0, 0)], "has no samples"),
        ("mnist", "partitions=str must be a FederatedDataset"),
        ([[1, 2]], "train of client 0 is a list"),
        ([{"unsupervised": rows(0, 4)}], "client 0 has a split 'unsupervised'"),
        ([rows(0, 4), datasets.Dataset.from_dict({"size": ["small"], "label": [1]})], "differ in their columns"),
        (Federated(train=Partitioner(rows(0, 9), 3), test=Partitioner(rows(0, 4), 2)), "'train': 3, 'test': 2"),
    ],
)
def test_other_partitions_are_refused(partitions, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(partitions)
