import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from federations import Blobs, make_client, points
from pfl_lightning import Server
from pfl_lightning.aggregators import ModelPool, inner_products, mean_loss
from pfl_lightning.data import CHUNK, Samples
from pfl_lightning.messages import COLUMNS
from pfl_lightning.tasks import Classification


def test_inner_products_are_those_of_the_long_vectors():
    sizes = {"a": (3, COLUMNS), "b": (7,), "c": (), "left out": (5,)}
    generator = torch.Generator().manual_seed(0)
    models = [{name: torch.randn(size, generator=generator) for name, size in sizes.items()} for _ in range(3)]
    rows = torch.stack([torch.cat([model[name].flatten() for name in "abc"]) for model in models]).double()
    torch.testing.assert_close(inner_products(models, "abc"), rows @ rows.T, rtol=1e-12, atol=0)


def test_products_with_an_origin_are_of_differences_and_of_itself_last():
    sizes = {"a": (3, COLUMNS), "b": (7,), "c": ()}
    generator = torch.Generator().manual_seed(0)
    origin, *steps = [{name: torch.randn(size, generator=generator) for name, size in sizes.items()} for _ in range(4)]
    models = [{name: origin[name] + 1e-4 * step[name] for name in sizes} for step in steps]
    theta_g, *theta = (torch.cat([model[name].flatten() for name in "abc"]).double() for model in (origin, *models))
    rows = torch.stack([*(vector - theta_g for vector in theta), theta_g])
    products = inner_products(models, "abc", origin)
    torch.testing.assert_close(products.diagonal(), rows.square().sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(products, rows @ rows.T, rtol=1e-12, atol=1e-12)


class Operations(TorchDispatchMode):
    """Counts operations, each a launch on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_origin", [True, False])
def test_products_of_more_models_take_no_more_operations(dtype, has_origin):
    counts = []
    for size in (5, 10):
        models = [{"w": row} for row in torch.randn(size, 40)]
        with Operations() as operations:
            inner_products(models, ["w"], models[0] if has_origin else None, dtype)
        counts.append(operations.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("count", [1, 72, 73, 150])
def test_strips_of_many_models_are_put_together(count):
    rows = torch.randn(count, 40, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    products = inner_products([{"w": row} for row in rows], ["w"])
    torch.testing.assert_close(products, rows @ rows.T, rtol=1e-12, atol=1e-12)
    assert torch.equal(products, products.T)


def test_the_loss_is_a_mean_over_samples_however_many_go_through_at_once():
    x, y = points(CHUNK + 5, seed=0)
    model = make_client()
    with torch.no_grad():
        assert mean_loss(model, Samples(x, y), Classification(3)) == pytest.approx(
            float(F.cross_entropy(model(x), y)), rel=1e-5
        )


def test_a_loss_that_is_no_number_is_infinite():
    x, y = points(3, seed=0)
    assert mean_loss(lambda x: torch.full((len(x), 3), math.nan), Samples(x, y), Classification(3)) == math.inf


def test_a_pool_hands_out_what_it_keeps_by_id_and_without_the_client_s_own():
    pool = ModelPool()
    pool.setup(Server(4, {}, make_client(), Blobs(), seed=0))
    assert pool.download(0) == {"models": {}}
    models = {client: {"w": torch.full((2,), float(client))} for client in range(4)}
    pool.aggregate({client: {"weights": models[client]} for client in (1, 3)}, round=0)
    pool.aggregate({client: {"weights": models[client]} for client in (0, 1)}, round=1)
    assert list(pool.state["models"]) == [0, 1, 3]
    assert list(pool.download(1)["models"]) == [0, 3]
    assert list(pool.download(2)["models"]) == [0, 1, 3]
    assert all(pool.download(2)["models"][client]["w"] is models[client]["w"] for client in (0, 1, 3))
    before = pool.state["models"]
    assert pool.aggregate({}, round=2) == {} and pool.state["models"] == before
