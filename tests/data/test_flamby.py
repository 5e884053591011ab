"""FLamby's tables: small files of the same layout, and the real ones where they are (in $DATA, or in data/)."""

import os
from functools import partial
from itertools import count, islice
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import fit
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FedAdagrad, FedAdam, FedYogi
from pfl_lightning.data import FedHeartDisease, FedTcgaBrca
from pfl_lightning.data.batches import epoch_order
from pfl_lightning.data.flamby import splits_of
from pfl_lightning.methods import FedAvg, FedProx
from pfl_lightning.nets import MLP
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Classification, Survival
from tiny_datasets import write

REAL = Path(os.environ.get("DATA", Path(__file__).parents[2] / "data"))
SPLITS = ("train", "test")


def made(kind, root, **settings):
    data = kind(root=str(root), val_fraction=0.0, **settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def heart(tmp_path_factory):
    return write("FedHeartDisease", tmp_path_factory.mktemp("data") / "heart", 160)


@pytest.fixture(scope="module")
def brca(tmp_path_factory):
    return write("FedTcgaBrca", tmp_path_factory.mktemp("data") / "brca", 120)


def test_hospitals_are_clients_without_patients_with_gaps(heart):
    data = made(FedHeartDisease, heart)
    assert data.client_names == ["Cleveland", "Hungary", "Long Beach", "Switzerland"]
    # 39 of 40 patients are whole; of these 66 % train
    assert [[data.size(client, split) for split in SPLITS] for client in range(4)] == [[25, 14]] * 4
    assert data.task == Classification(2) and data.input_shape == (13,)
    # two of Switzerland's 39 patients are healthy, in the file's first two rows
    labels = torch.cat([data.part(3, split).y for split in SPLITS])
    assert labels.tolist().count(0) == 2


def test_features_are_standardised_by_each_client_s_training_patients_with_sample_deviations(heart):
    data = made(FedHeartDisease, heart)
    assert data.preprocessing["features"][-5:] == ["cp 2", "cp 3", "cp 4", "restecg 1", "restecg 2"]
    for client in range(4):
        x = data.part(client, "train").x
        constant = x.std(0) == 0
        # fbs and exang are 0 for all
        assert constant.nonzero().flatten().tolist() == [4, 6] and not x[:, constant].any()
        assert x.mean(0).abs().max() < 1e-6
        assert torch.allclose(x[:, ~constant].std(0), torch.ones(11), atol=1e-6)
    means = data.preprocessing["mean"]["chol"]
    assert np.diff(means).tolist() == pytest.approx([10, 20, -10], abs=2) and data.fitted_on == "each client"


def test_table_standardises_by_the_training_patients_of_all_clients(heart):
    data = made(FedHeartDisease, heart, standardize="table")
    x = torch.cat([data.part(client, "train").x for client in range(4)])
    assert x.mean(0).abs().max() < 1e-5 and x[:, 3].std() == pytest.approx(1, abs=1e-5)
    assert data.part(0, "train").x[:, 3].mean() < -0.5 and data.fitted_on == "all clients"
    with pytest.raises(MisconfigurationException, match=r"standardize=client: .*central_test=0\.1"):
        FedHeartDisease(central_test=0.1)


def test_without_standardising_features_stay_in_their_units(heart):
    data = made(FedHeartDisease, heart, standardize=None)
    means = [float(data.part(client, "train").x[:, 3].mean()) for client in range(4)]
    known = made(FedHeartDisease, heart).preprocessing["mean"]["chol"]
    assert means == pytest.approx(known, rel=1e-5) and data.fitted_on == "nothing"
    assert "mean" not in data.preprocessing


def test_a_rare_label_is_not_divided_and_others_keep_their_mix():
    ill = np.array([0] * 20 + [1] * 30)
    tested = np.array(splits_of(ill)) == "test"
    assert tested.sum() == 17 and ill[tested].sum() == 10
    rare = np.array([0, 0, *[1] * 10])
    assert splits_of(rare).count("test") == 5


def test_regions_are_clients_with_times_and_events(brca):
    data = made(FedTcgaBrca, brca)
    assert data.client_names == ["Canada", "Europe", "Midwest", "Northeast", "South", "West"]
    assert data.task == Survival() and data.input_shape == (39,)
    assert sum(data.size(client, split) for client in range(6) for split in SPLITS) == 119
    # the Northeast's patients are those of the first code: rows 0, 6, 12, ..., each fourth to test on
    test = data.part(3, "test").y
    assert test[:2].tolist() == [[1.0, 1.0], [25.0, 1.0]]
    assert data.preprocessing["features"][1] == "feature 0, coded"


def test_a_federation_trains_on_survival(brca):
    data = made(FedTcgaBrca, brca, batch_size=8)
    run = fit(FedAvg(input_shape=data.input_shape, task=data.task, net=MLP), data, max_rounds=1)
    assert 0 <= run.logger.summary["final"]["test/c_index"] <= 1


def linear(data, method=FedAvg, lr=0.1, **settings):
    """A client with a linear net, whose initial weights a seed determines."""
    lightning.seed_everything(3, verbose=False)
    net, optimizer = partial(MLP, hidden=()), partial(torch.optim.SGD, lr=lr)
    return method(input_shape=data.input_shape, task=data.task, net=net, optimizer=optimizer, **settings)


def endless(part, size, seed):
    """A client's batches as FLamby's loader draws them: shuffled epochs in a row, with their last batch."""
    for epoch in count():
        order = epoch_order(len(part), size, "keep", torch.Generator().manual_seed(derive_seed(seed, epoch)))
        yield from ((part.x[rows].double(), part.y[rows].double()) for rows in order.split(size))


def by_hand(run, net, size, loss, lr, server, mu=0.0, rounds=3, steps=12):
    """FLamby's rounds in plain PyTorch, float64: steps at each client, the mean by samples, the server's step."""
    parts = [run.data.part(client, "train") for client in range(run.data.num_clients)]
    batches = [
        endless(part, size, derive_seed(run.federation.seed, "epochs", client)) for client, part in enumerate(parts)
    ]
    total = sum(map(len, parts))
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in net.parameters()]
    for _ in range(rounds):
        start = [p.detach().clone() for p in net.parameters()]
        change = [torch.zeros_like(p) for p in start]
        for part, own in zip(parts, batches, strict=True):
            for p, q in zip(net.parameters(), start, strict=True):
                p.data = q.clone()
            optimizer = torch.optim.SGD(net.parameters(), lr)
            for x, y in islice(own, steps):
                optimizer.zero_grad()
                far = sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), start, strict=True))
                (loss(net(x), y) + mu / 2 * far).backward()
                optimizer.step()
            for d, p, q in zip(change, net.parameters(), start, strict=True):
                d += (p.detach() - q) * len(part) / total
        for p, q, d, both in zip(net.parameters(), start, change, moments, strict=True):
            p.data = q + server(d, both)
    return net


def adaptive(lr, second):
    """The server's step of FedAdagrad, FedAdam and FedYogi, with FLamby's betas and tau."""

    def step(d, both):
        both[0], both[1] = 0.9 * both[0] + 0.1 * d, second(both[1], d * d)
        return lr * both[0] / (both[1].sqrt() + 1e-8)

    return step


def cox(scores, y):
    """FLamby's loss: falling times, and events times the log of the sum of those at risk without the own score."""
    falling = y[:, 0].argsort(descending=True)
    risk, event = scores[falling, 0], y[falling, 1]
    return (event * (risk.logcumsumexp(0) - risk)).mean()


def mean(d, both):
    return d


SERVER = {"beta1": 0.9, "tau": 1e-8, "initial": "zero"}
HEART = {
    "FedAvg": (FedAvg, {}, WeightedAverage(), mean),
    "FedProx": (FedProx, {"mu": 1.0}, WeightedAverage(), mean),
    "FedAdagrad": (FedAvg, {}, FedAdagrad(server_lr=0.05, **SERVER), adaptive(0.1, lambda v, s: v + s)),
    "FedAdam": (
        FedAvg,
        {},
        FedAdam(server_lr=0.05, beta2=0.999, **SERVER),
        adaptive(0.1, lambda v, s: 0.999 * v + 0.001 * s),
    ),
    "FedYogi": (
        FedAvg,
        {},
        FedYogi(server_lr=0.05, beta2=0.999, **SERVER),
        adaptive(0.1, lambda v, s: v - 0.001 * s * torch.sign(v - s)),
    ),
}


@pytest.mark.parametrize("strategy", HEART)
def test_two_logits_at_half_the_rate_are_flamby_s_one_logit(heart, strategy):
    method, settings, aggregator, server = HEART[strategy]
    data = FedHeartDisease(root=str(heart), val_fraction=0.0, batch_size=4)
    client = linear(data, method, lr=0.01, **settings)
    net = torch.nn.Linear(13, 1, dtype=torch.float64)
    weight, bias = (p.detach().double() for p in client.net.parameters())
    with torch.no_grad():
        net.weight.copy_(weight[1:] - weight[:1])
        net.bias.copy_(bias[1:] - bias[:1])
    run = fit(client, data, aggregator=aggregator, local_steps=12, steps_continue=True, max_rounds=3)

    def loss(logit, y):
        return F.binary_cross_entropy(logit[:, 0].sigmoid(), y)

    by_hand(run, net, 4, loss, 0.02, server, mu=settings.get("mu", 0.0) / 2)
    weight, bias = run.weights.values()
    # an adaptive step divides by the change, which float32 knows to some 4 digits
    near = 1e-6 if server is mean else 1e-4
    assert torch.allclose((weight[1] - weight[0]).double(), net.weight[0], rtol=0, atol=near)
    assert float(bias[1] - bias[0]) == pytest.approx(float(net.bias.detach()), abs=near)


def test_rounds_on_survival_are_flamby_s(brca):
    data = FedTcgaBrca(root=str(brca), val_fraction=0.0, batch_size=8)
    client = linear(data, lr=0.001)
    net = torch.nn.Linear(39, 1, dtype=torch.float64)
    net.load_state_dict(dict(zip(("weight", "bias"), client.net.state_dict().values(), strict=True)))
    before = net.weight.detach().clone()
    run = fit(client, data, local_steps=12, steps_continue=True, max_rounds=3)
    by_hand(run, net, 8, cox, 0.001, mean)
    weight, _ = run.weights.values()
    assert torch.allclose(weight.double(), net.weight, rtol=0, atol=1e-6)
    assert (net.weight - before).abs().max() > 0.01


@pytest.mark.parametrize(
    ("kind", "file", "text", "says"),
    [
        (FedHeartDisease, "heart_disease/processed.va.data", None, "there is no .*processed.va.data"),
        (FedHeartDisease, "heart_disease/processed.va.data", "1,2,3\n", "has 3 columns, UCI's file 14"),
        (FedHeartDisease, "heart_disease/processed.va.data", "1,2,3\n1,2\n", "no table of numbers"),
        (FedTcgaBrca, "tcga_brca/centers.csv", None, "there is no .*centers.csv"),
        (FedTcgaBrca, "tcga_brca/centers.csv", "Code,Region\nA0,West\n", "no column 'TSS Code'"),
        (FedTcgaBrca, "tcga_brca/centers.csv", "TSS Code,Region\nA0,West\n", "without region .*'A1'"),
        (FedTcgaBrca, "tcga_brca/train_test_split.csv", "pid,fold\nx,train\n", "no patient of brca.csv"),
        (FedTcgaBrca, "tcga_brca/brca.csv", "pid,E,T\nTCGA-A0-0000,0,1\n", "has 0 features, FLamby's file 39"),
    ],
)
def test_files_that_are_missing_or_others_are_named(kind, file, text, says, tmp_path):
    root = write(kind.__name__, tmp_path / "data", 40)
    (root / file).unlink() if text is None else (root / file).write_text(text)
    with pytest.raises(MisconfigurationException, match=says):
        made(kind, root)


@pytest.mark.skipif(not (REAL / "heart_disease").is_dir(), reason=f"needs {REAL / 'heart_disease'}")
def test_the_real_hospitals_have_flamby_s_sizes_and_statistics():
    data = made(FedHeartDisease, REAL)
    sizes = {name: tuple(data.size(k, split) for split in SPLITS) for k, name in enumerate(data.client_names)}
    assert sizes == {"Cleveland": (199, 104), "Hungary": (172, 89), "Long Beach": (85, 45), "Switzerland": (30, 16)}
    moments = [[data.preprocessing[kind][name][0] for name in ("age", "sex")] for kind in ("mean", "deviation")]
    assert np.array(moments) == pytest.approx(np.array([[54.1758794, 0.68341709], [9.14442045, 0.4663163]]))
    ill = [int(data.part(client, "train").y.sum()) for client in range(4)]
    assert ill == [91, 65, 66, 30]


@pytest.mark.skipif(not (REAL / "tcga_brca").is_dir(), reason=f"needs {REAL / 'tcga_brca'}")
def test_the_real_regions_have_flamby_s_sizes():
    data = made(FedTcgaBrca, REAL)
    sizes = {name: tuple(data.size(k, split) for split in SPLITS) for k, name in enumerate(data.client_names)}
    assert sizes == {
        "Canada": (40, 11),
        "Europe": (129, 33),
        "Midwest": (129, 33),
        "Northeast": (248, 63),
        "South": (156, 40),
        "West": (164, 42),
    }
