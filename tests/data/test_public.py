"""Samples of another data set at the server."""

from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl, refusal, summary
from pfl_lightning.data import CIFAR10, CIFAR100, IID, MNIST, Digits, FederatedDataModule, Pathological
from tiny_datasets import write

SPLITS = ("train", "val", "test")


class Numbered(FederatedDataModule):
    """300 samples that are their own numbers."""

    num_classes = 4
    input_shape = (1,)

    def load(self):
        return torch.arange(300).unsqueeze(1), torch.arange(300) % 4


class Public(FederatedDataModule):
    """200 bytes of 5 classes, doubled for the net; the last 50 are an original test half."""

    num_classes = 5
    input_shape = (1,)
    prepared = False

    def prepare_data(self):
        self.prepared = True

    def load(self):
        assert self.prepared
        self.original_test = torch.arange(150, 200)
        return torch.arange(200, dtype=torch.uint8).unsqueeze(1), torch.arange(200) % 5

    def transform(self, x):
        return 2.0 * x


class Wide(Public):
    input_shape = (2,)


def ready(public=None, **settings):
    data = Numbered(num_clients=3, partitioner=IID(), public=public, **settings)
    data.setup()
    return data


def numbers(part):
    return part.x.flatten().tolist()


def test_the_server_holds_samples_of_another_data_set_as_they_are_stored():
    samples = ready(Public(), public_samples=50).server_samples()
    assert samples.x.dtype == torch.uint8
    assert torch.bincount(samples.y).tolist() == [10] * 5
    assert torch.equal(samples.x.flatten() % 5, samples.y)


def test_they_are_transformed_by_their_own_data_set():
    data = ready(Public(), public_samples=50)
    assert torch.equal(data.server_data().x, 2.0 * data.server_samples().x)
    assert torch.equal(data.server_data().y, data.server_samples().y)


def test_its_original_test_half_is_left_out():
    assert sorted(numbers(ready(Public(), public_samples=150).server_samples())) == list(range(150))


def test_they_are_a_function_of_the_seed_of_the_clients_data():
    one, again, other = (
        numbers(ready(Public(seed=public), public_samples=50, seed=seed).server_samples())
        for public, seed in ((1, 1), (2, 1), (1, 2))
    )
    assert one == again != other


def test_clients_and_the_central_test_set_don_t_see_them():
    with_public, without = (ready(public, public_samples=50, central_test=0.1) for public in (Public(), None))
    for client in range(3):
        assert all(numbers(with_public.part(client, s)) == numbers(without.part(client, s)) for s in SPLITS)
    assert numbers(with_public.central_data()) == numbers(without.central_data())
    assert without.server_samples() is without.server_data() is None


def test_how_it_would_be_divided_has_no_effect():
    public = Public(num_clients=200, partitioner=Pathological(classes_per_client=2), max_samples=200, val_fraction=0.5)
    assert numbers(ready(public, public_samples=50).server_samples()) == numbers(
        ready(Public(), public_samples=50).server_samples()
    )


def test_a_share_of_the_central_test_set_is_stored_too():
    data = ready(central_test=0.5, server_fraction=0.2)
    assert len(data.server_samples()) == 30
    assert torch.equal(data.server_samples().x, data.server_data().x)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"public": Wide()}, r"data\.public=Wide has inputs of shape \(2,\) and Numbered of \(1,\)"),
        ({"public": Public()}, r"data\.public_samples=3000 must be at most the 150 samples that Public has outside"),
        ({"public_samples": 0}, r"data\.public_samples=0 must be at least 1"),
        (
            {"public": Public(), "central_test": 0.1, "server_fraction": 0.1},
            r"data\.server_fraction=0\.1 and data\.public=Public both",
        ),
    ],
)
def test_what_the_server_can_t_hold_is_refused(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**settings)


def test_missing_files_are_looked_for_where_its_own_setting_says():
    class Large(Numbered):
        input_shape = (1, 28, 28)

    data = Large(num_clients=3, partitioner=IID(), public=MNIST(root="nowhere", download=False))
    with pytest.raises(MisconfigurationException, match=r"data\.public\.root='nowhere': .* set data\.public\.root"):
        data.setup()


def test_a_public_data_set_is_no_hyperparameter():
    hparams = dict(Digits(public=Digits(), public_samples=7).hparams)
    assert "public" not in hparams and hparams["public_samples"] == 7


def test_cifar100_for_cifar10(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    roots = [write(name, tmp_path / name, 600) for name in ("CIFAR10", "CIFAR100")]
    public = CIFAR100(root=str(roots[1]), download=False)
    data = CIFAR10(
        root=str(roots[0]), num_clients=2, partitioner=IID(), public=public, public_samples=100, download=False
    )
    data.setup()
    samples = data.server_samples()
    assert samples.x.shape == (100, 3, 32, 32) and samples.x.dtype == torch.uint8
    assert int(samples.y.max()) >= 10


FILE = """
model: {class_path: FedAvg, init_args: {net: {class_path: MLP, init_args: {hidden: [8]}}}}
data:
  class_path: Digits
  init_args:
    num_clients: 3
    max_samples: 200
    public:
      class_path: Digits
      init_args: {num_clients: 5}
    public_samples: 20
trainer: {max_rounds: 1}
"""


@pytest.mark.exhaustive
def test_the_command_line_reads_and_prints_it(capsys):
    Path("public.yaml").write_text(FILE)
    with pytest.raises(SystemExit):
        pfl("fit --config public.yaml --print_config")
    text = capsys.readouterr().out
    public = yaml.safe_load(text)["data"]["init_args"]["public"]
    assert public["class_path"].endswith("Digits") and public["init_args"]["num_clients"] == 5
    Path("again.yaml").write_text(text)
    pfl(f"fit --config again.yaml {QUIET}")
    assert summary("FedAvg-Digits/version_0")["final"]["test/acc"] >= 0
    kept = yaml.safe_load(Path("runs/FedAvg-Digits/version_0/config.yaml").read_text())
    assert kept["data"]["init_args"]["public"] == public


def test_the_command_line_takes_it_by_name_and_refuses_in_a_sentence(capsys):
    line = f"fit --model Local --model.net MLP --data Digits --data.public MNIST {QUIET}"
    assert refusal(line, capsys).startswith("data.public=MNIST has inputs of shape (1, 28, 28) and Digits of (1, 8, 8)")
