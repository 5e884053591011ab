"""Modules with inputs of several tensors."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import StackDataset

from federations import MOMENTUM, equal, fit, near
from pfl_lightning.data import ClientDatasets, TensorData
from pfl_lightning.messages import tree_map
from pfl_lightning.methods import Ditto, FedPer
from pfl_lightning.nets import cut_net
from pfl_lightning.nets.inputs import InputShape, way_of
from pfl_lightning.tasks import Classification

ROWS, CLASSES = 48, 3
TABLE = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(ROWS * 5).view(ROWS, 5) % 11
IMAGES = (torch.arange(ROWS * 36).view(ROWS, 1, 6, 6) % 251).to(torch.uint8)
Y = torch.arange(ROWS) % CLASSES


class Both(nn.Module):
    """Words beside a table, by name or by place."""

    def __init__(self):
        super().__init__()
        self.words, self.table, self.out = nn.Embedding(11, 3), nn.Linear(4, 3), nn.Linear(6, CLASSES)

    def forward(self, ids, table):
        return self.out(torch.cat([self.words(ids).mean(1), self.table(table)], 1))


class Whole(Both):
    """The same in one argument."""

    def forward(self, x):
        return super().forward(*(x.values() if isinstance(x, dict) else x))


class Answer:
    """An output as models of transformers give it."""

    def __init__(self, logits):
        self.logits = logits


class Answering(Both):
    def forward(self, ids, table):
        return Answer(super().forward(ids, table))


FORMS = {"dict": {"ids": IDS, "table": TABLE}, "tuple": (IDS, TABLE), "list": [IDS, TABLE]}


def data_of(x, **settings):
    return TensorData(x, Y, Classification(CLASSES), client=torch.arange(ROWS) % 3, batch_size=5, **settings)


def client_of(kind, data, method=FedPer):
    torch.manual_seed(0)
    return method(kind(), data.input_shape, task=data.task, optimizer=MOMENTUM)


@pytest.mark.parametrize("kind", [Both, Whole, Answering])
@pytest.mark.parametrize("form", FORMS)
def test_a_module_takes_several_tensors_by_name_by_place_or_as_a_whole(kind, form):
    data = data_of(FORMS[form])
    client = client_of(kind, data)
    own = {name for name, _ in client.named_parameters() if not client.is_shared(name)}
    assert own == {"net.classifier.weight", "net.classifier.bias"}
    run = fit(client, data, max_rounds=2)
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]
    expected = fit(client_of(Whole, data_of(FORMS["dict"])), data_of(FORMS["dict"]), max_rounds=2)
    assert equal(list(run.weights.values()), list(expected.weights.values()))


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_many_clients_train_at_once(method):
    data = data_of(FORMS["dict"])
    one, many = (fit(client_of(Both, data, method), data, engine=engine) for engine in ("sequential", "vectorised"))
    assert near(one.weights, many.weights)


def test_the_example_is_of_the_inputs_as_a_net_gets_them():
    shape = data_of({"ids": IDS, "image": IMAGES}).input_shape
    assert shape == (5,) and torch.equal(shape.example["ids"], IDS[:2])
    assert shape.example["image"].dtype == torch.float32 and shape.example["image"].min() >= -1
    items = [StackDataset(StackDataset(ids=IDS, table=TABLE), Y)] * 2
    found = ClientDatasets(items, Classification(CLASSES)).input_shape.example
    assert equal(tree_map(lambda t: t.dtype, found), {"ids": torch.int64, "table": torch.float32})
    assert data_of(TABLE).input_shape.example is None


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_s_example_has_shapes_and_types(form, tmp_path):
    data = data_of(FORMS[form])
    run = fit(client_of(Both, data), data, root=tmp_path, max_rounds=1)
    loaded = FedPer.load_from_checkpoint(run.last, net=Both(), client=1, optimizer=MOMENTUM)
    x = data.part(1, "test").x
    assert equal(loaded.eval()(x), run.trainer.client(1).eval()(x))
    assert InputShape.of(loaded.hparams["input_shape"]).plain() == data.input_shape.plain()


@pytest.mark.parametrize("ending", ["pt2", "ts"])
@pytest.mark.by_default("ts")
def test_exports_take_the_same_inputs(ending, tmp_path):
    data = data_of(FORMS["dict"])
    model, path = client_of(Both, data).eval(), tmp_path / f"model.{ending}"
    model.export(path)
    program = torch.export.load(path).module() if ending == "pt2" else torch.jit.load(path)
    x = data_of(FORMS["dict"])._x
    assert torch.allclose(program(x), model(x), atol=1e-6)


def test_a_module_s_own_error_is_shown_whole():
    class Failing(Both):
        def forward(self, ids, table):
            raise ValueError("the reason " + "goes on " * 40 + "to its end")

    with pytest.raises(MisconfigurationException, match=r"Failing.*'ids': 'int64 \[2, 5\]'.*to its end"):
        client_of(Failing, data_of(FORMS["dict"]))
    with pytest.raises(MisconfigurationException, match=r"Linear.*shapes cannot be multiplied \(2x5 and 4x3\)"):
        cut_net(nn.Linear(4, 3), (5,))


@pytest.mark.parametrize(
    ("x", "forward", "way"),
    [
        ({"a": 1, "b": 2}, lambda a, b: 0, "names"),
        ({"a": 1, "b": 2}, lambda **parts: 0, "names"),
        ({"a": 1, "b": 2}, lambda x: 0, "one"),
        ((1, 2), lambda x, mask=None: 0, "places"),
        ((1, 2), lambda x: 0, "one"),
        (torch.zeros(1), lambda x: 0, "one"),
    ],
)
def test_the_signature_says_the_way(x, forward, way):
    module = nn.Module()
    module.forward = forward
    assert way_of(module, x) == way
