import torch

from federations import FEATURES, OneClient, equal, fit, make_client, plain, points
from pfl_lightning.client import Phase
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.personal_net import PersonalNet


class Personal(PersonalNet, FedAvg):
    """Trains a personal net alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.make_personal(self.net)

    def local_phases(self):
        return [Phase(trains=lambda name: name.startswith("personal."))]

    def training_step(self, batch, batch_idx):
        x, target = batch
        features = self.personal.features(x)
        return {"loss": self.loss(features, self.personal.classifier(features), target)}


def test_the_copy_is_one_and_stays_with_its_client():
    client = make_client(Personal, net=plain)
    assert equal(client.personal.state_dict(), client.net.state_dict())
    assert client.personal is not client.net
    names = {f"personal.{name}" for name in client.net.state_dict()} | {"has_personal"}
    assert {name for name in client.state_dict() if client.is_personal(name)} == names


def test_a_client_answers_by_it_once_it_has_made_a_step():
    client = make_client(Personal).eval()
    data = ClientData(OneClient(Samples(*points(4, seed=0))), 0)
    x = torch.randn(3, FEATURES)
    with torch.no_grad():
        client.personal.classifier.bias.fill_(5.0)
        assert torch.equal(client(x), client.net(x))
        client.upload(data)
        assert torch.equal(client(x), client.net(x)) and not client.has_personal
        client.steps_done = 1
        sent = client.upload(data)
        assert torch.equal(client(x), client.personal(x)) and client.has_personal
    assert set(sent["weights"]) == {f"net.{name}" for name in client.net.state_dict()}


def test_who_stays_away_has_none():
    run = fit(make_client(Personal), clients_per_round=2, max_rounds=1)
    has = [bool(run.federation.job(client).state.personal["has_personal"]) for client in range(4)]
    assert sum(has) == 2 and has == [client in run.federation.clients for client in range(4)]
