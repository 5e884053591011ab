"""Sums as whole numbers: rounding, ranges, and that a stand-in has the sums of those for whom it stands."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.privacy.noise import seeded_normal
from pfl_lightning.privacy.secure_sum import Encoding, NoiseShare, SecureSum, Unsummable


def update(seed, size=None, scale=1.0, steps=3):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "b": scale * torch.randn(4, generator=generator),
        "a": scale * torch.randn(2, 3, generator=generator),
        "steps": torch.tensor(steps),
    }
    return {"weights": weights, **({} if size is None else {"num_samples": torch.tensor(size)})}


def summed(encoding, updates, sizes):
    vectors = {client: encoding.vector(own) for client, own in updates.items()}
    assert {vector.dtype for vector in vectors.values()} == {encoding.dtype}
    return encoding.stand_ins(encoding.total(vectors.values()), sizes)


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_a_weighted_mean_is_right_to_rounding(bits):
    sizes = {2: 10, 5: 40, 7: 25}
    updates = {client: update(client, size) for client, size in sizes.items()}
    encoding = Encoding(SecureSum(bits=bits), updates[2], 3, 40)
    stand_ins = summed(encoding, updates, sizes)
    assert [int(stand_ins[client]["num_samples"]) for client in sizes] == list(sizes.values())
    for name in ("a", "b"):
        mean = sum(size / 75 * updates[client]["weights"][name].double() for client, size in sizes.items())
        error = (stand_ins[5]["weights"][name] - mean).abs().max()
        assert error <= 3 / 2 ** (bits + 1) / (75 / 40) + 1e-6
        # not finer than it says
        assert bits > 8 or error > 1e-4


def test_a_plain_mean_and_whole_numbers():
    updates = {client: update(client, steps=client) for client in (1, 2, 4)}
    mean = summed(Encoding(SecureSum(bits=30), updates[1], 3), updates, dict.fromkeys(updates, 9))[1]
    expected = torch.stack([own["weights"]["b"] for own in updates.values()]).mean(0)
    assert torch.allclose(mean["weights"]["b"], expected, atol=1e-6)
    assert mean["weights"]["steps"].dtype == torch.int64 and int(mean["weights"]["steps"]) == 3
    assert set(mean) == {"weights"} and list(mean["weights"]) == ["b", "a", "steps"]


def test_a_sum_goes_through_the_ring_whatever_is_added_and_taken_away():
    updates = {client: update(client) for client in range(3)}
    encoding = Encoding(SecureSum(), updates[0], 3)
    vectors = [encoding.vector(own) for own in updates.values()]
    mask = torch.randint(-(2**31), 2**31, (encoding.length,), generator=torch.Generator().manual_seed(0))
    hidden = [(vectors[0] + mask).to(encoding.dtype), (vectors[1] - mask).to(encoding.dtype), vectors[2]]
    assert torch.equal(encoding.total(hidden), encoding.total(vectors))
    assert torch.equal(encoding.total(vectors), sum(vector.long() for vector in vectors))


def test_the_ring_holds_the_largest_sum():
    own = {"weights": {"w": torch.full((5,), 8.0)}}
    narrow, wide = Encoding(SecureSum(), own, 4000), Encoding(SecureSum(), own, 5000)
    assert (narrow.dtype, wide.dtype) == (torch.int32, torch.int64)
    vector = narrow.vector(own)
    assert bool((narrow.total([vector] * 4000)[1:] == 4000 * 8 * 2**16).all())
    with pytest.raises(MisconfigurationException, match="bits=40"):
        Encoding(SecureSum(bits=40, range=2**20), own, 10)


def test_entries_outside_of_the_range_are_refused_or_bounded_and_counted():
    large = {"weights": {"w": torch.tensor([1.0, -9.0, 20.0])}}
    with pytest.raises(Unsummable, match=r"2 entries outside of trainer.secure_sum.range=8, up to 20"):
        Encoding(SecureSum(), large, 2).vector(large)
    encoding = Encoding(SecureSum(overflow="clip"), large, 2)
    total = encoding.total([encoding.vector(large)] * 2)
    assert int(total[0]) == 4
    assert encoding.stand_ins(total, {0: 1, 1: 1})[0]["weights"]["w"].tolist() == [1.0, -8.0, 8.0]
    for bad in (torch.nan, torch.inf):
        wrong = {"weights": {"w": torch.tensor([1.0, bad, 0.0])}}
        with pytest.raises(Unsummable, match="1 entries"):
            Encoding(SecureSum(), large, 2).vector(wrong)
    with pytest.raises(Unsummable, match="1 entries"):
        encoding.vector({"weights": {"w": torch.tensor([1.0, torch.nan, 0.0])}})


def test_counts_that_a_sum_cannot_hold_are_refused():
    own = update(0, steps=2**30)
    Encoding(SecureSum(), own, 1).vector(own)
    with pytest.raises(Unsummable, match="counts beyond 536870911"):
        Encoding(SecureSum(), own, 4).vector(own)


def test_an_update_of_other_shape_or_weight_is_refused():
    encoding = Encoding(SecureSum(), update(0, 10), 2, 20)
    other = update(1, 10)
    other["weights"]["a"] = other["weights"]["a"][:1]
    with pytest.raises(Unsummable, match="other shapes"):
        encoding.vector(other)
    with pytest.raises(Unsummable, match="21 training samples"):
        encoding.vector(update(1, 21))
    with pytest.raises(Unsummable, match="0 training samples"):
        encoding.vector(update(1))
    with pytest.raises(MisconfigurationException, match="a float at loss"):
        Encoding(SecureSum(), {"loss": 1.0}, 2)


def test_a_sum_that_cannot_be_one_is_told():
    encoding = Encoding(SecureSum(), update(0), 3)
    noise = torch.randint(-(2**31), 2**31, (encoding.length,), generator=torch.Generator().manual_seed(0))
    with pytest.raises(Unsummable, match="the sum"):
        encoding.stand_ins(encoding.total([encoding.vector(update(0)), noise]), {0: 1, 1: 1})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("bits", 4), ("range", 0), ("threshold", 0.5), ("threshold", 1.1), ("honest", 0.9), ("overflow", "wrap")],
)
def test_settings_out_of_their_range_are_refused(setting, value):
    with pytest.raises(MisconfigurationException, match=f"trainer.secure_sum.{setting}={value!r}"):
        SecureSum(**{setting: value})


def test_noise_of_all_shares_is_as_large_as_the_guarantee_needs():
    clients, size = 8, 20_000
    like = {"weights": {"w": torch.zeros(size)}}
    share = NoiseShare(clip=0.5, multiplier=2.0, secure=False)
    encoding = Encoding(SecureSum(bits=24, honest=0.5), like, clients, noise=share)
    draws = [encoding.vector(like, like, lambda n, c=c: seeded_normal(n, c)) for c in range(clients)]
    # half of the clients are enough
    for count, std in ((4, 1.0), (8, 2**0.5)):
        mean = encoding.stand_ins(encoding.total(draws[:count]), dict.fromkeys(range(count), 1), like)[0]
        found = count * mean["weights"]["w"].double()
        assert abs(float(found.std()) / std - 1) < 0.02 and abs(float(found.mean())) < 0.05


def test_a_client_moves_a_noisy_sum_by_the_bound_at_most():
    received = {"weights": {"w": torch.ones(50)}}
    encoding = Encoding(SecureSum(bits=20), received, 4, noise=NoiseShare(0.3, 1.0, secure=False))

    def none(size):
        return torch.zeros(size, dtype=torch.float64)

    for sent in (torch.full((50,), 9.0), torch.ones(50) + 0.01, torch.full((50,), torch.nan)):
        numbers = encoding.vector({"weights": {"w": sent}}, received, none)[1:]
        assert float(numbers.double().norm()) <= 0.3 * 2**20
        assert bool(numbers.any()) or bool(sent.isnan().any())


def test_noise_that_the_grid_would_swallow_is_refused():
    like = {"weights": {"w": torch.zeros(5)}}
    with pytest.raises(MisconfigurationException, match=r"bits=8.*take 14 bits"):
        Encoding(SecureSum(bits=8), like, 4, noise=NoiseShare(0.03, 1.0, secure=True))
