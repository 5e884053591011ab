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


def test_all_is_standardised():
    x, y = (loaded := Diabetes().load()).x, loaded.y
    assert x.dtype == y.dtype == torch.float32
    assert torch.allclose(x.mean(0), torch.zeros(10), atol=1e-5) and torch.allclose(x.std(0), torch.ones(10), atol=0.01)
    assert abs(float(y.mean())) < 1e-5 and abs(float(y.std()) - 1) < 0.01
