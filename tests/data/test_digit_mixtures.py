import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import DigitMixtures, Digits
from pfl_lightning.tasks import Classification


def codes(data):
    """The code of each image ``[clients, images]``, and the rows of the images among scikit-learn's."""
    x, digits = Digits().load()
    rows = {bytes(image.flatten().tolist()): row for row, image in enumerate(x)}
    loaded = data.load()
    found = torch.tensor([rows[bytes(image.flatten().tolist())] for image in loaded.x])
    assert [*loaded.client] == sorted(loaded.client)
    return ((loaded.y - digits[found]) % 10).view(len(set(loaded.client)), -1), found


def test_each_client_mixes_the_codes_by_shares_of_its_own():
    data = DigitMixtures(codes=3, alpha=0.4, clients=20)
    assert data.task == Classification(10) and data.input_shape == (1, 8, 8)
    drawn, rows = codes(data)
    assert drawn.shape == (20, 89) and set(drawn.flatten().tolist()) == {0, 1, 2}
    assert len(rows.unique()) == 20 * 89
    largest = torch.stack([(drawn == code).float().mean(1) for code in range(3)]).amax(0)
    # the expected largest of three shares of Dir(0.4) is 0.77
    assert 0.65 < float(largest.mean()) < 0.9 and float(largest.min()) < 0.6


def test_alpha_decides_how_clean_clients_are():
    clean, even = (codes(DigitMixtures(alpha=alpha))[0] for alpha in (0.001, 1000.0))
    assert all(len(own.unique()) == 1 for own in clean) and len(clean.unique()) == 3
    assert all(own.bincount(minlength=3).min() > 15 for own in even)


def test_one_code_leaves_the_digits_as_they_are_and_seeds_draw_others():
    assert int(codes(DigitMixtures(codes=1))[0].max()) == 0
    same, other = DigitMixtures(seed=1), DigitMixtures(seed=2)
    assert torch.equal(same.load().y, DigitMixtures(seed=1).load().y)
    assert not torch.equal(same.load().y, other.load().y)


def test_clients_are_those_of_the_data():
    data = DigitMixtures(clients=12, batch_size=8)
    data.setup()
    assert data.num_clients == 12 and data.client_names == [f"{number:02}" for number in range(1, 13)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"codes": 0}, r"data\.codes=0 .* 1 to 10"),
        ({"codes": 11}, r"data\.codes=11 .* 1 to 10"),
        ({"codes": 2.5}, r"data\.codes=2\.5"),
        ({"alpha": 0.0}, r"data\.alpha=0\.0 .* above 0"),
        ({"alpha": float("inf")}, r"data\.alpha=inf .* finite"),
        ({"clients": 0}, r"data\.clients=0 .* 1"),
        ({"clients": 900}, r"data\.clients=900 .* 599"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "".join(map(str, value)),
)
def test_what_no_data_can_be_is_refused_by_name(settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        DigitMixtures(**settings).load()
