import re
from functools import partial, partialmethod

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call, grad, vmap

from federations import (
    CLASSES,
    FEATURES,
    OneClient,
    Shuffled,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    noisy,
    plain,
    points,
    same_end,
)
from pfl_lightning import AggregatorList, Server, WeightedAverage
from pfl_lightning.aggregators import ClassMeans, CwFedAvg
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import detached
from pfl_lightning.methods import FedAvg, Local
from pfl_lightning.methods.alternate_training import AlternateAlignment, AlternateTraining
from pfl_lightning.methods.class_vectors import ClassVectors, class_means, class_table
from pfl_lightning.methods.feature_alignment import FeatureAlignment
from pfl_lightning.methods.feddistill import FedDistill
from pfl_lightning.methods.fedpac import PACClient
from pfl_lightning.methods.fedproto import FedProto

FAMILY = [FeatureAlignment, AlternateTraining, AlternateAlignment, FedProto, PACClient, FedDistill]


def family(function):
    return pytest.mark.parametrize("method", FAMILY)(function)


# A client's means


def of_one(x, y):
    return ClientData(OneClient(Samples(x, y)), 0)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_class_means_by_hand_in_chunks_of_any_size(monkeypatch, chunk):
    monkeypatch.setattr(Samples, "chunks", partialmethod(Samples.chunks, chunk))
    monkeypatch.setattr(OneClient, "num_classes", 2 * CLASSES)
    x, y = points(20, seed=4)
    means = class_means(torch.sin, of_one(x, y * 2), 2 * CLASSES)
    assert list(means) == [0, 2, 4]
    for c, mean in means.items():
        torch.testing.assert_close(mean, x[y * 2 == c].sin().mean(0))


def test_class_means_of_one_sample_are_its_value():
    x, y = points(1, seed=0)
    assert equal(class_means(lambda x: 3 * x, of_one(x, y), CLASSES), {int(y): 3 * x[0]})


def test_class_means_keep_the_type_and_sum_in_a_wide_one():
    data = of_one(torch.ones(1000, 2), torch.zeros(1000, dtype=torch.int64))
    (mean,) = class_means(lambda x: (1.01 * x).bfloat16(), data, CLASSES).values()
    assert mean.dtype == torch.bfloat16 and torch.equal(mean, torch.full((2,), 1.01).bfloat16())
    (mean,) = class_means(lambda x: x.double() / 3, data, CLASSES).values()
    assert mean.dtype == torch.float64 and torch.allclose(mean, torch.ones(2).double() / 3, rtol=0, atol=1e-12)


def test_a_table_has_zeros_for_absent_classes_as_class_vectors_have():
    x, y = points(9, seed=4)
    means, present = class_table(torch.sin, of_one(x[y != 1], y[y != 1]), CLASSES)
    assert present.tolist() == [True, False, True] and not means[1].any()
    table, other = ClassVectors(CLASSES, FEATURES), ClassVectors(CLASSES, FEATURES)
    table.put(means + ~present[:, None], present)
    other.take(class_means(torch.sin, of_one(x[y != 1], y[y != 1]), CLASSES))
    assert torch.equal(table.vectors, other.vectors) and torch.equal(table.known, other.known)


def test_class_vectors_are_rebuilt_and_no_part_of_a_client_s_state():
    table = ClassVectors(CLASSES, 2)
    table.take({0: torch.ones(2), 2: torch.zeros(2)})
    target, default = torch.tensor([2, 1, 0, 1]), torch.arange(8.0).view(4, 2)
    assert table(target, default).tolist() == [[0, 0], [2, 3], [1, 1], [6, 7]]
    table.take({1: torch.ones(2)})
    assert table.known.tolist() == [False, True, False] and not table.vectors[0].any()
    table.take({})
    assert not table.known.any() and not table.vectors.any()
    assert not table.state_dict()


# Their mean at a server


def server(**settings):
    aggregator = ClassMeans(**settings)
    aggregator.setup(Server(3, {}, None, None, seed=0))
    return aggregator


def upload(counts, seed=0, dtype=torch.float32):
    """Prototypes of the classes that are counted."""
    vectors = torch.randn(len(counts), 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return {
        "prototypes": {c: vectors[c] for c, count in enumerate(counts) if count},
        "class_counts": torch.tensor(counts),
    }


UPDATES = {0: upload([2, 0, 6], 0), 4: upload([6, 0, 0], 1), 7: upload([4, 3, 0], 2)}
F0, F4, F7 = (update["prototypes"] for update in UPDATES.values())


def close(one, other):
    assert list(one) == list(other)
    for c in one:
        torch.testing.assert_close(one[c], other[c], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("weighted", "shares"), [(True, (2 / 12, 6 / 12, 4 / 12)), (False, (1 / 3, 1 / 3, 1 / 3))])
def test_the_mean_of_a_class_is_over_the_clients_that_have_it(weighted, shares):
    aggregator = server(weighted=weighted)
    assert aggregator.aggregate(UPDATES, 0) == {"prototypes_fed": 3.0}
    a, b, c = shares
    close(aggregator.download(0)["prototypes"], {0: a * F0[0] + b * F4[0] + c * F7[0], 1: F7[1], 2: F0[2]})
    assert equal(*(aggregator.download(client) for client in (0, 5)))


@pytest.mark.parametrize("settings", [{}, {"weighted": False}, {"weighted": False, "exclude_self": True}])
def test_a_class_that_one_client_has_keeps_its_bits(settings):
    aggregator = server(**settings)
    aggregator.aggregate({4: upload([7, 0, 3], 5)}, 0)
    assert equal(aggregator.download(0)["prototypes"], upload([7, 0, 3], 5)["prototypes"])


def test_without_its_own_part_a_client_receives_the_mean_of_the_others():
    aggregator = server(weighted=False, exclude_self=True)
    aggregator.aggregate(UPDATES, 0)
    close(aggregator.download(0)["prototypes"], {0: (F4[0] + F7[0]) / 2, 1: F7[1]})
    close(aggregator.download(4)["prototypes"], {0: (F0[0] + F7[0]) / 2, 1: F7[1], 2: F0[2]})
    close(aggregator.download(7)["prototypes"], {0: (F0[0] + F4[0]) / 2, 2: F0[2]})
    close(aggregator.download(5)["prototypes"], {0: (F0[0] + F4[0] + F7[0]) / 3, 1: F7[1], 2: F0[2]})
    weighted = server(exclude_self=True)
    weighted.aggregate(UPDATES, 0)
    close(weighted.download(7)["prototypes"], {0: (2 * F0[0] + 6 * F4[0]) / 8, 2: F0[2]})


@pytest.mark.parametrize("exclude_self", [False, True])
def test_a_class_that_nobody_fed_keeps_its_last_mean(exclude_self):
    aggregator = server(exclude_self=exclude_self)
    aggregator.aggregate(UPDATES, 0)
    before = detached(aggregator.state)
    assert aggregator.aggregate({}, 1) == {} and equal(aggregator.state, before)
    later = upload([0, 5, 0], 9)
    assert aggregator.aggregate({4: later}, 2) == {"prototypes_fed": 1.0}
    close(aggregator.download(5)["prototypes"], {0: before["means"][0], 1: later["prototypes"][1], 2: F0[2]})
    # it is no longer the one who fed class 1
    assert equal(aggregator.download(7)["prototypes"][1], later["prototypes"][1])
    assert (1 in aggregator.download(4)["prototypes"]) is not exclude_self


@pytest.mark.parametrize("exclude_self", [False, True])
def test_relabelled_clients_receive_what_they_did(exclude_self):
    names = {0: 7, 4: 0, 7: 4}
    one, other = server(exclude_self=exclude_self), server(exclude_self=exclude_self)
    one.aggregate(UPDATES, 0)
    other.aggregate(dict(sorted((names[client], update) for client, update in UPDATES.items())), 0)
    for old, new in names.items():
        close(one.download(old)["prototypes"], dict(sorted(other.download(new)["prototypes"].items())))


def test_averaging_changes_no_upload_and_goes_through_a_checkpoint(tmp_path):
    before, aggregator = detached(UPDATES), server(exclude_self=True)
    aggregator.aggregate(UPDATES, 0)
    assert equal(UPDATES, before)
    torch.save(aggregator.state, tmp_path / "state")
    again = server(exclude_self=True)
    again.state = torch.load(tmp_path / "state", weights_only=True)
    assert all(equal(aggregator.download(client), again.download(client)) for client in (0, 4, 5, 7))


def test_means_are_in_float64_and_leave_in_the_type_that_they_came_in():
    thirds = {k: {"prototypes": {0: torch.full((1,), 2.0**k)}} for k in (0, 26, 27)}
    aggregator = server(weighted=False, exclude_self=True)
    aggregator.aggregate(thirds, 0)
    # in float32, what is left after 2^27 is taken out would be 0
    assert aggregator.download(27)["prototypes"][0].item() == torch.tensor((1 + 2**26) / 2).item()
    assert aggregator.download(27)["prototypes"][0].dtype == torch.float32


def test_counts_are_asked_for_where_clients_count_by_them():
    assert ClassMeans("outputs").needs == {"outputs", "class_counts"}
    assert ClassMeans("outputs", weighted=False).needs == ClassMeans("outputs").sends == {"outputs"}


@pytest.mark.parametrize("method", [FedAvg, Local])
def test_clients_without_prototypes_are_refused(method):
    with pytest.raises(MisconfigurationException, match=f"ClassMeans needs .*prototypes, which {method.__name__}"):
        fit(make_client(method), aggregator=ClassMeans())


# What holds for each method of the family


@family
def test_the_order_of_uploads_changes_nothing(method):
    data = partial(blobs, 20, 16, 24, by_class=True)
    assert same_end(
        *(fit(make_client(method), data(), engine=engine, max_rounds=2) for engine in ("sequential", Shuffled))
    )


@family
@pytest.mark.by_default("AlternateAlignment", "FedDistill")
def test_partial_participation_resumes_bit_for_bit(method, tmp_path):
    def run(root, rounds, ckpt_path=None):
        client, data = make_client(method, net=noisy, optimizer_lifetime="run"), blobs(24, 26, 30, by_class=True)
        return fit(client, data, root, max_rounds=rounds, clients_per_round=0.5, ckpt_path=ckpt_path)

    whole, half = run(tmp_path / "whole", 4), run(tmp_path / "half", 2)
    assert same_end(whole, run(tmp_path / "half", 4, half.last))


@family
@pytest.mark.parametrize(
    ("net", "data"),
    [
        (noisy, partial(blobs, 40)),
        (noisy, partial(blobs, 40, 40, by_class=True)),
        (plain, partial(blobs, 24, 8, batch_size=1)),
        (noisy, partial(blobs, 30, 2, 2, test_fraction=0, val_fraction=0.3)),
    ],
    ids=["one client", "one class a client", "batches of one", "one sample a client"],
)
def test_few_clients_classes_and_samples_give_finite_numbers(method, net, data):
    run = fit(make_client(method, net=net), data(), max_rounds=2)
    assert all(row["clients_diverged"] == 0 for row in run.rows)
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())
    assert all("nan" not in str(value) for row in run.rows for value in row.values())


@family
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_low_precision_trains_and_evaluates(method, precision):
    rows = fit(make_client(method), blobs(30, 30), precision=precision, max_rounds=2).rows
    assert rows[-1]["clients"] == 2 and rows[-1]["val/acc"] > 0.2


@family
def test_what_is_received_is_no_entry_of_the_state_and_comes_back_from_a_checkpoint(method, tmp_path):
    run = fit(make_client(method), root=tmp_path, max_rounds=2)
    assert set(run.weights) == set(make_client().state_dict())
    personal = set(run.weights) if issubclass(method, Local) else set()
    assert all(set(state.personal) == personal for state in run.federation.clients.values())
    part = run.data.part(2, "test")
    loaded = load_client(method, run.last, client=2).eval()
    assert float((loaded(part.x).argmax(1) == part.y).float().mean()) == run.logger.clients[2]["test/acc"]


@pytest.mark.parametrize("method", [FeatureAlignment, partial(FeatureAlignment, align="l2"), FedProto, FedDistill])
def test_steps_of_many_clients_at_once_are_the_steps_of_each(method):
    client = make_client(method).double()
    weights = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in client.named_parameters()}
    size = next(table for table in client.modules() if isinstance(table, ClassVectors)).vectors.shape[1]
    tables = [{0: torch.ones(size)}, {1: torch.arange(size)}]
    buffers, (x, y) = [], points(2 * 8, seed=3)
    for received in tables:
        table = next(table for table in client.modules() if isinstance(table, ClassVectors))
        table.take({c: vector.double() for c, vector in received.items()})
        buffers.append({name: buffer.clone() for name, buffer in client.named_buffers()})
    buffers = {name: torch.stack([one[name] for one in buffers]) for name in buffers[0]}

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.client = client

        def forward(self, x, y):
            return self.client.training_step((x, y), 0)["loss"]

    step = Step()

    def loss(weights, buffers, x, y):
        entries = {f"client.{name}": tensor for name, tensor in (weights | buffers).items()}
        return functional_call(step, entries, (x, y))

    x, y = x.double().view(2, 8, FEATURES), y.view(2, 8)
    together = vmap(grad(loss))(weights, buffers, x, y)
    for k in range(2):
        alone = grad(loss)(*({n: t[k] for n, t in tree.items()} for tree in (weights, buffers)), x[k], y[k])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name][k], tensor)


def test_models_and_prototypes_go_by_any_two_server_sides():
    class_wise = AggregatorList([CwFedAvg(), ClassMeans(weighted=False)])
    runs = (fit(make_client(FeatureAlignment), aggregator=server, max_rounds=2) for server in (class_wise, None))
    assert not equal(*(run.weights for run in runs))
    fit(make_client(PACClient), aggregator=AggregatorList([WeightedAverage(), ClassMeans()]), max_rounds=1)


@pytest.mark.parametrize(
    ("method", "aggregator", "sentence"),
    [
        (FeatureAlignment, WeightedAverage(), "FeatureAlignment needs prototypes, which WeightedAverage does not send"),
        (FedProto, AggregatorList([WeightedAverage(), ClassMeans()]), "which FedProto does not send"),
        (FedDistill, ClassMeans(), "ClassMeans needs class_counts and prototypes, which FedDistill does not send"),
        (PACClient, ClassMeans(), "PACClient needs weights, which ClassMeans does not send"),
    ],
)
def test_what_doesn_t_fit_is_refused(method, aggregator, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        fit(make_client(method), aggregator=aggregator)
