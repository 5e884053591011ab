from functools import partial

import pytest
import torch
import yaml
from torch.nn import functional as F
from torch.optim import SGD

from federations import Spy, blobs, equal, fit, flat, make_client, noisy
from pfl_lightning.cli.configs import FOLDER as CONFIGS
from pfl_lightning.methods import MRMTL, Local

STEP = partial(SGD, lr=0.1)


def nets(run):
    """Each client's own net, as it last trained it."""
    return {
        client: {name: t for name, t in state.personal.items() if name.startswith("net.")}
        for client, state in sorted(run.federation.clients.items())
    }


def test_without_its_penalty_it_is_local_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    free = fit(make_client(MRMTL, mu=0.0, **settings))
    local = fit(make_client(Local, **settings))
    assert equal(nets(free), nets(local))
    assert [row["val/loss"] for row in free.rows] == [row["val/loss"] for row in local.rows]


def test_two_rounds_by_hand_with_the_mean_moved_by_changes():
    data = blobs(30, 24, batch_size=100)
    settings = {"precision": "64-true", "local_epochs": 2, "max_rounds": 2}
    run = fit(make_client(MRMTL, mu=0.7, optimizer=STEP), data, **settings)
    net = make_client().net.double()
    parameters = list(net.parameters())
    start = [p.detach().clone() for p in parameters]
    parts = [data.part(client, "train") for client in range(2)]
    share = [len(part) / sum(map(len, parts)) for part in parts]
    own, mean = [start, start], start
    for _ in range(2):
        changes = []
        for client, part in enumerate(parts):
            w = own[client]
            for _ in range(2):
                for p, tensor in zip(parameters, w, strict=True):
                    p.data.copy_(tensor)
                grads = torch.autograd.grad(F.cross_entropy(net(part.x.double()), part.y), parameters)
                w = [t - 0.1 * (g + 0.7 * (t - a)) for t, g, a in zip(w, grads, mean, strict=True)]
            changes.append([new - old for new, old in zip(w, own[client], strict=True)])
            own[client] = w
        # the official code's server adds the weighted changes
        mean = [a + share[0] * one + share[1] * two for a, one, two in zip(mean, *changes, strict=True)]
    for client, kept in nets(run).items():
        for tensor, hand in zip(kept.values(), own[client], strict=True):
            torch.testing.assert_close(tensor, hand)
    for tensor, hand in zip(run.federation.aggregator.global_model().values(), mean, strict=True):
        torch.testing.assert_close(tensor, hand)


def test_the_penalty_draws_models_together():
    def spread(weight):
        models = [flat(net, net) for net in nets(fit(make_client(MRMTL, mu=weight))).values()]
        return float(torch.stack(models).var(0).sum())

    far, near, nearer = map(spread, (0.0, 1.0, 4.0))
    assert far > near > nearer > 0


def test_the_packaged_penalty_and_the_class_s_own_are_felt():
    packaged = yaml.safe_load((CONFIGS / "methods" / "mr_mtl.yaml").read_text())["model"]["init_args"]

    def spread(method, **settings):
        run = fit(make_client(method, **settings), blobs(30, 30, 30, by_class=True), max_rounds=10)
        return float(torch.stack([flat(net, net) for net in nets(run).values()]).std(0).norm())

    # with a penalty too small to feel, a table has Local twice
    assert max(spread(MRMTL), spread(MRMTL, **packaged)) < 0.9 * spread(Local)


def test_buffers_stay_and_clients_keep_their_models_over_rounds_without_them():
    spy = Spy()
    run = fit(make_client(MRMTL, net=noisy), callbacks=[spy], clients_per_round=2)
    assert not any("running" in name for updates in spy.updates for u in updates.values() for name in u["weights"])
    assert set(nets(run)) == {client for cohort in spy.cohorts for client in cohort}
    part = run.data.part(2, "test")
    net = make_client(net=noisy).net.eval()
    own = nets(run).get(2, {f"net.{name}": t for name, t in net.state_dict().items()})
    net.load_state_dict({name.removeprefix("net."): t for name, t in own.items()})
    assert run.test()[2]["acc"] == float((net(part.x).argmax(1) == part.y).float().mean())


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True), blobs(30), blobs(8, 8, batch_size=1)])
def test_it_trains_where_there_is_little(data):
    run = fit(make_client(MRMTL), data)
    assert run.rows[-1]["clients_diverged"] == 0
    assert not equal(nets(run)[0], {f"net.{name}": t for name, t in make_client().net.state_dict().items()})
