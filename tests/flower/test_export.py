import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import FEATURES, NETS, Run, blobs, equal, fit, load_client, make_client, plain
from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import personal_entries, shared_entries
from pfl_lightning.engines import ClientState, Job
from pfl_lightning.flower.export import export, keep_model
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.methods import FedBABU, FedFomo, FedPer, FedProto
from pfl_lightning.nets import MLP
from pfl_lightning.runs.checkpoint_io import models_in

X = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(0))


def site_of(run: Run, folder: Path, *clients: int) -> StateVersions:
    """What the site of some clients would have after a run."""
    states = StateVersions(folder)
    federation = run.federation
    for client in clients:
        architecture, job = federation.architecture_of(client), federation.job(client, ("test",))
        federation.engines[architecture].evaluate(job)
        site = Site(run.data, range(run.data.num_clients))
        keep_model(states, job, list(federation.architectures), architecture, site, {"id": 1, "settings": {}})
    return states


def outputs(model: ClientModule) -> Any:
    with torch.no_grad():
        return model.eval()(X)


@pytest.mark.parametrize(
    ("method", "nets"),
    [
        pytest.param(FedPer, plain, id="FedPer"),
        pytest.param(FedProto, plain, id="FedProto", marks=pytest.mark.exhaustive),
        pytest.param(FedProto, NETS, id="two-nets"),
        pytest.param(FedFomo, plain, id="FedFomo", marks=pytest.mark.exhaustive),
        pytest.param(FedBABU, plain, id="trained-for-evaluation"),
    ],
)
@pytest.mark.by_default("trained-for-evaluation")
def test_a_clients_model_is_that_of_the_federations_checkpoint(method, nets, tmp_path):
    run = fit(make_client(method, net=nets), root=tmp_path / "run", max_rounds=2)
    site_of(run, tmp_path / "site", 1, 3)
    for client in (1, 3):
        path = tmp_path / f"{client}.ckpt"
        export(tmp_path / "site", client, path)
        own = nets[client % 2] if isinstance(nets, list) else nets
        load = partial(method.load_from_checkpoint, optimizer=partial(SGD, lr=0.1))
        theirs = load(run.last, client=client, net=nets)
        ours = load(path, client=client, net=own)
        assert equal(ours.state_dict(), theirs.state_dict()) and equal(outputs(ours), outputs(theirs))
        # its entries are the client's without being asked for
        assert equal(load(path, net=own).state_dict(), theirs.state_dict())


def test_what_a_configuration_has_made_needs_no_arguments(tmp_path):
    nets = [{"class_path": "pfl_lightning.nets.MLP", "init_args": {"hidden": [size]}} for size in (4, 9)]
    model = make_client(FedPer, net=[partial(MLP, hidden=[4]), partial(MLP, hidden=[9])])
    # as the command line leaves them
    model.hparams.update(
        net=nets, optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, assign_nets="block"
    )
    model.hparams["_class_path"] = "pfl_lightning.methods.FedPer"
    model.hparams["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    first, second = model.architectures()
    own = {name: torch.ones_like(tensor) for name, tensor in second.state_dict().items()}
    second.assign(own)
    job = Job(3, 1, ClientState(personal_entries(second, own)), {"weights": shared_entries(second, own)}, None, seed=0)
    data = blobs()
    data.setup()
    keep_model(StateVersions(tmp_path / "site"), job, [first, second], 1, Site(data, range(4)), {"id": 1})
    export(tmp_path / "site", 3, tmp_path / "model.ckpt")
    for arguments in ({}, {"client": 3}):
        loaded = FedPer.load_from_checkpoint(tmp_path / "model.ckpt", **arguments)
        assert equal(loaded.state_dict(), own)


class ByTurn(FedPer):
    """Keeps, of each download, whose it is and in which round."""

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.net.classifier.bias.fill_(10 * self.round + self.client_id)


def test_a_download_knows_its_client_and_round_in_a_checkpoint_and_at_a_site(tmp_path):
    run = fit(make_client(ByTurn), root=tmp_path / "run", max_rounds=2)
    states, site = StateVersions(tmp_path / "site"), Site(run.data, range(4))
    # another client's turn was the last
    jobs = [run.federation.job(client, ("test",)) for client in (1, 3)]
    list(run.federation.engines[0].evaluate_all(jobs))
    keep_model(states, jobs[0], [run.model], 0, site, {"id": 1, "settings": {}})
    export(tmp_path / "site", 1, tmp_path / "1.ckpt")
    loaded = [load_client(ByTurn, run.last, client=1)]
    loaded += [load_client(ByTurn, tmp_path / "1.ckpt", client) for client in (None, 1)]
    assert [model.net.classifier.bias.unique().tolist() for model in loaded] == [[21]] * 3


def test_the_last_one_counts_and_is_for_its_owner(tmp_path):
    run = fit(make_client(FedPer), max_rounds=1)
    states = site_of(run, tmp_path / "site", 3)
    first = run.federation.job(3).payload["weights"]
    run.federation.aggregator.state["weights"] = {name: t + 1 for name, t in first.items()}
    site_of(run, tmp_path / "site", 3)
    export(states.folder, 3, tmp_path / "new" / "model.ckpt")
    loaded = torch.load(tmp_path / "new" / "model.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(loaded[name], t + 1) for name, t in first.items())
    for path in (tmp_path / "new" / "model.ckpt", states.of(3) / "model.ckpt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_not_there(tmp_path):
    with pytest.raises(
        MisconfigurationException, match=r"client=2 has no model in .*; give the one of a site that ran"
    ):
        export(tmp_path / "nowhere", 2, tmp_path / "model.ckpt")
    assert not (tmp_path / "nowhere").exists()
    states = site_of(fit(make_client(FedPer), max_rounds=1), tmp_path / "site", 1, 3)
    with pytest.raises(MisconfigurationException, match=r"client=2 has no model in .*; it has those of clients 1, 3"):
        export(states.folder, 2, tmp_path / "model.ckpt")
    model = states.of(3) / "model.ckpt"
    model.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(MisconfigurationException, match=r"client=3: .*damaged"):
        export(states.folder, 3, tmp_path / "model.ckpt")
    assert not (tmp_path / "model.ckpt").exists()


def test_the_best_round_is_kept_beside_the_last_of_the_same_run(tmp_path):
    run, states = fit(make_client(FedPer), max_rounds=2), StateVersions(tmp_path / "site")
    site, federation = Site(run.data, range(4), names=["Bremen", "Ulm", "Jena", "Kiel"]), run.federation

    def kept(round: int, id: int) -> dict[str, int]:
        job = federation.job(3, ("test",))._replace(round=round)
        keep_model(states, job, list(federation.architectures), 0, site, {"id": id})
        found = {}
        for best in (False, True):
            models = models_in(states.folder, best)
            assert list(models) == ["Kiel", "3"]
            found[models["Kiel"].name] = torch.load(models["3"], weights_only=True)["federation"]["round"]
        return found

    # an earlier round counts as the best one, unless another run has begun, such as a resumed one
    assert [kept(1, id=1), kept(2, id=1)] == [{"model.ckpt": 1}, {"model.ckpt": 2}]
    assert kept(1, id=1) == {"model.ckpt": 2, "best.ckpt": 1}
    assert kept(1, id=2) == {"model.ckpt": 1}
    with pytest.raises(MisconfigurationException, match="has no client's model"):
        models_in(tmp_path / "nowhere", best=True)
