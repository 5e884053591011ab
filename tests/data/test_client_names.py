import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import IID, Digits, TensorData
from pfl_lightning.data.client_names import client_id, client_label
from pfl_lightning.tasks import Classification


def named(names, **settings):
    client = [name for name in names for _ in range(4)]
    data = TensorData(
        torch.zeros(len(client), 2), torch.zeros(len(client)).long(), Classification(2), client=client, **settings
    )
    data.setup()
    return data


def test_a_client_has_a_name_and_an_id():
    data = named(["Ulm", "Bremen", "Erfurt"], val_fraction=0.0)
    assert data.client_names == ["Bremen", "Erfurt", "Ulm"]
    for id, name in enumerate(data.client_names):
        assert data.client_id(name) == data.client_id(id) == id
        assert data.client_label(id) == f"{id} ({name})"


def test_newcomers_have_names_and_ids_too():
    data = named(["Ulm", "Bremen", "Erfurt"], val_fraction=0.0, new_clients=1)
    (new,) = data.newcomers
    assert data.client_id(data.client_names[new]) == data.client_id(new) == new == 2


@pytest.mark.parametrize("client", ["bremen", "Brehmen", "Rom", "", "0", 3, -1, True, None, 1.0])
def test_a_stranger_is_refused_with_the_names(client):
    with pytest.raises(MisconfigurationException, match="Bremen") as refusal:
        client_id(client, ["Bremen", "Erfurt", "Ulm"], 3)
    assert repr(client) in str(refusal.value)


@pytest.mark.parametrize("client", [20, -1, "20", "-1", "Bremen", "²", True])
def test_clients_without_names_are_known_by_id_alone(client):
    data = Digits(num_clients=20, partitioner=IID(), download=False)
    data.setup()
    assert data.client_names == []
    assert data.client_id(7) == data.client_id("7") == 7 and data.client_label(7) == "7"
    with pytest.raises(MisconfigurationException, match="0 to 19"):
        data.client_id(client)


def test_a_number_that_is_one_clients_id_and_anothers_name_is_refused():
    names = ["0", "10", "2"]
    assert client_id("2", names, 3) == 2 and client_id(2, names, 3) == 2 and client_id(10, names, 3) == 1
    assert client_label(1, names) == "1 (10)" and client_label(2, names) == "2"
    swapped = ["1", "0"]
    assert [client_id(name, swapped, 2) for name in swapped] == [0, 1]
    with pytest.raises(MisconfigurationException, match="client=0"):
        client_id(0, swapped, 2)
