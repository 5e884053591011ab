import torch

from pfl_lightning.data import Diabetes
from pfl_lightning.tasks import Regression


def test_patients_of_one_sex_and_age_band_are_a_client():
    data = Diabetes(test_fraction=0.2, val_fraction=0.0)
    data.setup()
    parts = [torch.cat([data.part(client, split).x for split in ("train", "test")]) for client in range(10)]
    assert data.task == Regression() and sum(map(len, parts)) == 442
    assert data.client_names[:2] == ["sex 1, 35 to 44", "sex 1, 45 to 54"]
    # columns are age and sex
    assert all(len(part[:, 1].unique()) == 1 for part in parts)
    ends = sorted((float(part[:, 0].min()), float(part[:, 0].max())) for part in parts)
    assert all(ends[k + 1][1] < ends[k + 2][0] for k in range(0, 8, 2))


def test_bands_hold_the_ages_of_their_names():
    data = Diabetes()
    loaded = data.load()
    spans = {
        "under 35": (0, 34),
        "35 to 44": (35, 44),
        "45 to 54": (45, 54),
        "55 to 64": (55, 64),
        "65 and over": (65, 99),
    }
    for (age, sex), owner in zip(loaded.x[:, :2].tolist(), loaded.client, strict=True):
        least, most = spans[owner.removeprefix(f"sex {sex:.0f}, ")]
        assert least <= age < most + 1
    assert len(set(loaded.client)) == 10


def test_all_is_standardised_by_training_patients():
    data = Diabetes(test_fraction=0.4)
    data.setup()
    parts = {split: [data.part(client, split) for client in range(10)] for split in ("train", "test")}
    for split, tolerance in (("train", 1e-5), ("test", 0.3)):
        for values in (torch.cat([part.x for part in parts[split]]), torch.cat([part.y for part in parts[split]])):
            assert values.dtype == torch.float32
            assert values.mean(0).abs().max() < tolerance and (values.std(0, correction=0) - 1).abs().max() < tolerance
            assert split == "train" or values.mean(0).abs().max() > 1e-3
    assert data.fitted_on == "all clients" and 100 < data.preprocessing["mean"]["progression"] < 200
