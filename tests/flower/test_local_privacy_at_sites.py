"""Updates noised at sites, against a server that nobody trusts."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

import torch
from deployments import deploy, grid_of, rewrite
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, equal, fit, make_client
from pfl_lightning.flower.wire import names, unpack
from pfl_lightning.methods import FedPer
from pfl_lightning.privacy import Laplace, PrivUnit
from pfl_lightning.privacy.local import Cap

PRIVATE = {"local_privacy": PrivUnit(4.0, clip=0.5), "limit_val_batches": 0}


class Curious:
    """A server that keeps all that sites send, and asks each for metrics of all splits, before and after training."""

    def __init__(self, grid):
        self.answers, self.grid = {}, grid
        before, grid.spoil = grid._reply, self.keep

        def asked(message):
            if message.metadata.message_type == "train":
                rewrite(message.content, self.ask)
            return before(message)

        grid._reply = asked

    def ask(self, records):
        for row in records["jobs"].values():
            row["evaluate"] = row["measure"] = "val test"

    def keep(self, node, kind, content):
        if kind == "train":
            self.answers |= {(node, name, len(self.answers)): unpack(content, name) for name in names(content)}


@pytest.mark.parametrize("method", [None, FedPer])
@pytest.mark.by_default("FedPer")
def test_a_server_that_asks_for_more_gets_noised_weights_alone(method, tmp_path):
    def make():
        return make_client(*filter(None, [method]))

    grid = grid_of(make, tmp_path, **PRIVATE)
    server = Curious(grid)
    remote = deploy(grid, make, **PRIVATE)
    answers = [told for (_, name, _), told in server.answers.items() if name.endswith("/answer")]
    assert len(answers) == 12 and not [told["error"] for told in answers if "error" in told]
    for told in answers:
        assert told["metrics"] == {} and told["after"] == {} and not told.get("before") and told["finite"]
    assert {row["privacy/noise"] for row in remote.rows} == {"secure"}
    assert remote.federation.privacy()["epsilon"] == 12.0


def test_sites_noise_as_a_simulation_does_but_by_no_seed(tmp_path):
    spy = Spy()
    remote = deploy(grid_of(make_client, tmp_path, **PRIVATE), make_client, callbacks=[spy], **PRIVATE)
    here = fit(make_client(), **PRIVATE)
    assert not equal(remote.weights, here.weights)
    for name in ("bytes/up", "privacy/epsilon", "clients"):
        assert [row[name] for row in remote.rows] == [row[name] for row in here.rows]
    assert remote.federation.options.local_privacy.spent == here.federation.options.local_privacy.spent
    start = make_client().state_dict()
    for update in spy.updates[0].values():
        change = torch.cat([(update["weights"][n].double() - start[n].double()).flatten() for n in update["weights"]])
        assert float(change.norm()) == pytest.approx(0.5 / Cap.of(4.0, len(change)).mean, rel=1e-4)
    again = deploy(grid_of(make_client, tmp_path / "again", **PRIVATE), make_client, **PRIVATE)
    assert not equal(again.weights, remote.weights)


def test_settings_that_would_tell_are_refused(tmp_path):
    grid = grid_of(make_client, tmp_path, **PRIVATE)
    with pytest.raises(MisconfigurationException, match=r"trainer\.limit_val_batches=1 asks sites for metrics"):
        deploy(grid, make_client, local_privacy=PrivUnit(4.0))
    seeded = PRIVATE | {"local_privacy": Laplace(4.0, noise="seeded")}
    with pytest.raises(MisconfigurationException, match=r"local_privacy\.noise=seeded .* take secure"):
        deploy(grid, make_client, **seeded)
