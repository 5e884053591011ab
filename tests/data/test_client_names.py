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


SPELLINGS = [("Ulm", "Ulm "), ("Ulm", "ulm"), ("K\xf6ln", "Ko\u0308ln"), ("STRASSE", "stra\xdfe"), (1, "1")]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_two_spellings_of_one_name_are_refused_with_both(one, other):
    with pytest.raises(MisconfigurationException) as refused:
        named([one, other])
    told = str(refused.value)
    # names that look the same are told apart by their letters' codes
    assert all(repr(name) in told or ascii(name) in told for name in (one, other))
    assert one != "K\xf6ln" or "\\u0308" in told


def test_codes_are_texts():
    assert named(["01", "1", "10"]).client_names == ["01", "1", "10"]
    with pytest.raises(MisconfigurationException, match="'01' is no client"):
        client_id("01", [], 3)
    assert client_id("1", ["01", "1"], 2) == 1


@pytest.mark.parametrize("asked", ["k\xf6ln", "Ko\u0308ln", " K\xf6ln"])
def test_another_spelling_of_a_client_is_told_the_name(asked):
    with pytest.raises(MisconfigurationException, match=r"did you mean '?K(ö|\\xf6)ln'?\?"):
        client_id(asked, ["Bremen", "K\xf6ln"], 2)
