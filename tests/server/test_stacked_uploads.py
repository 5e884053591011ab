"""What servers make of uploads that are rows of stacks: the same as of dicts, where the stacks are."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from federations import HIDDEN, make_client, noisy
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.messages import Row, Stack, keep_own, tensors, weighted_means
from pfl_lightning.methods.cwfedavg import CwFedAvg
from pfl_lightning.methods.fedamp import FedAMP
from pfl_lightning.methods.fedawa import FedAWA
from pfl_lightning.methods.fedrema import FedReMa
from pfl_lightning.methods.kt_pfl_weight import KTpFLWeight
from pfl_lightning.methods.ldawa import LDAWA
from pfl_lightning.server import inner_products, means
from pfl_lightning.server.weighted_average import moved_model

CLIENTS = 7
HEAD = {"net.classifier.weight", "net.classifier.bias"}
LOOKED_AT = {CwFedAvg: {"net.classifier.weight"}, FedReMa: HEAD}
"""What a server needs on the CPU, a client at a time; others look at nothing before they keep something."""

RULES = [
    means.CoordinateMedian(),
    means.TrimmedMean(),
    means.Krum(f=1),
    means.Bulyan(f=1),
    means.GeometricMedian(),
    means.CentredClipping(),
    means.NormBound(1.0),
    means.NearestNeighbourMixing(means.TrimmedMean(1), f=1),
]
SERVERS = {
    "FedAWA": FedAWA,
    "FedAWA-L": partial(FedAWA, group="module"),
    "L-DAWA": partial(LDAWA, 0),
    "FedAMP": partial(FedAMP, sigma=1000.0),
    "KT-pFL+weight": KTpFLWeight,
    "cwFedAvg": CwFedAvg,
    "FedReMa": FedReMa,
    **{rule.name: partial(WeightedAverage, mean=rule) for rule in RULES},
}


def stacks(*sizes):
    """Stacks of models in float64 that differ from each other and from the initial one."""
    generator = torch.Generator().manual_seed(1)
    initial = make_client(net=noisy).double().state_dict()
    return [
        Stack(
            {
                name: tensor + 0.3 * torch.randn(n, *tensor.shape, generator=generator, dtype=tensor.dtype)
                if tensor.is_floating_point()
                else tensor + torch.arange(n)
                for name, tensor in initial.items()
            }
        )
        for n in sizes
    ]


BLOCKS = {
    "a stack": ([CLIENTS], [(0, row) for row in range(CLIENTS)]),
    "two stacks": ([4, 3], [(0, 2), (1, 0), (0, 0), (1, 2), (0, 1), (0, 3), (1, 1)]),
    "a part of a stack": ([CLIENTS + 4], [(0, row) for row in (9, 1, 3, 8, 0, 5, 10)]),
}


def uploads(blocks):
    """The updates, which are rows; and the same as dicts."""
    sizes, chosen = BLOCKS[blocks]
    of_clients = stacks(*sizes)
    rows = [Row(of_clients[which], row) for which, row in chosen]
    dicts = [{name: stack[row.index].clone() for name, stack in row.stack.entries.items()} for row in rows]
    return [
        {k: {"weights": w, "num_samples": torch.tensor(10 + 7 * k)} for k, w in enumerate(each)}
        for each in (rows, dicts)
    ]


def aggregated(make, updates):
    module = make_client(net=noisy).double()
    initial = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    server = make()
    server.setup(Server(CLIENTS, initial, module, None, seed=0))
    logs = server.aggregate(updates, round=0)
    looked_at = {name for k in updates for name in getattr(updates[k]["weights"], "stack", Stack({})).rows}
    keep_own(server.state, updates)
    return logs, [server.download(k) for k in range(CLIENTS)], server.state, looked_at


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
def test_servers_make_the_same_of_rows_as_of_dicts_and_look_at_no_more_than_they_need(make, blocks):
    rows, dicts = uploads(blocks)
    logs, payloads, state, looked_at = aggregated(make, rows)
    expected_logs, expected, *_ = aggregated(make, dicts)
    assert logs == pytest.approx(expected_logs, rel=1e-6)
    torch.testing.assert_close(payloads, expected, rtol=1e-6, atol=1e-9)
    assert looked_at == LOOKED_AT.get(make, set())
    # of nothing that is kept does a file hold more
    of_stacks = {t.untyped_storage().data_ptr() for u in rows.values() for t in u["weights"].stack.entries.values()}
    assert not of_stacks & {tensor.untyped_storage().data_ptr() for tensor in tensors(state)}
    turned = aggregated(make, dict(reversed(uploads(blocks)[0].items())))
    torch.testing.assert_close(turned[1], payloads, rtol=1e-6, atol=1e-9)


def test_the_order_of_uploads_changes_no_mix_of_theirs():
    rows, _ = uploads("two stacks")
    models, weights = [update["weights"] for update in rows.values()], torch.rand(3, CLIENTS).tolist()
    mixed = weighted_means(models, weights)
    turned = weighted_means(models[::-1], [row[::-1] for row in weights])
    torch.testing.assert_close(mixed, turned, rtol=1e-12, atol=1e-12)


def test_of_a_stack_on_an_accelerator_only_results_come_to_the_cpu():
    # no values, and an error where an operation meets two devices
    with FakeTensorMode():
        stack = Stack({"w": torch.empty(4, HIDDEN, 3000, device="cuda"), "n": torch.ones(4, device="cuda").long()})
        rows, origin = [Row(stack, k) for k in (2, 0, 3)], {"w": torch.empty(HIDDEN, 3000)}
        products = inner_products(rows, ["w"], origin)
        mixed = weighted_means(rows, [[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
        updates = {k: {"weights": row} for k, row in enumerate(rows)}
        moved = moved_model(updates, {0: 1.0, 1: 0.5, 2: 0.5}, origin, ["w"])
        vectors = means.vectors.Vectors(rows, origin, ["w"], torch.ones(3) / 3)
        entries = vectors.by_coordinate(means.coordinates.median).entries
    assert not stack.rows and {t.device.type for t in stack.entries.values()} == {"cuda"}
    assert products.shape == (4, 4) and mixed[1]["w"].shape == (HIDDEN, 3000) and mixed[1]["n"].shape == ()
    assert {tensor.device.type for tensor in tensors([{"products": products}, mixed, moved, entries])} == {"cpu"}
