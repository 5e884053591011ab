"""Arrays, lists and files of numbers as trees of tensors."""

import numpy as np
import pytest
import scipy.sparse
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import FederatedDataModule, FolderData, Loaded, TensorData
from pfl_lightning.data.trees import as_tensor, cell
from pfl_lightning.tasks import Classification, Regression

X = np.arange(24, dtype=np.float64).reshape(12, 2)
Y = np.arange(12) % 3


def ready(x, y=Y, task=None):
    data = TensorData(x, y, task or Classification(3), np.arange(12) // 6)
    data.setup()
    return data


def whole(data):
    parts = [data.part(client, split) for client in range(2) for split in ("train", "val", "test")]
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


def test_a_reversed_array_becomes_a_tensor_in_its_order():
    array = np.arange(6.0).reshape(3, 2)
    assert as_tensor(array[::-1]).tolist() == [[4, 5], [2, 3], [0, 1]]
    assert as_tensor(array[:, ::-1]).tolist() == [[1, 0], [3, 2], [5, 4]]
    # other arrays keep their memory
    assert as_tensor(array[:, 1]).data_ptr() == array[:, 1].ctypes.data


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("kind", [">f8", ">f4", ">i4", np.longdouble, "<f2"])
def test_all_numbers_of_numpy_are_taken(kind, stored, tmp_path):
    x = X.astype(kind)
    if stored:
        np.save(tmp_path / "x.npy", x)
    found, y = whole(ready(tmp_path / "x.npy" if stored else x, Y.astype(">i8")))
    assert found.double().equal(whole(ready(X))[0].double()) and y.equal(whole(ready(X))[1])


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.tolist(), Y.tolist()),
        (X, list(Y)),
        (X, tuple(Y.tolist())),
        (X, [torch.tensor(number) for number in Y]),
        (torch.nn.Parameter(torch.from_numpy(X)), torch.from_numpy(Y)),
    ],
    ids=["lists", "scalars", "tuple", "tensors", "parameter"],
)
def test_lists_of_numbers_are_arrays(x, y):
    found, targets = whole(ready(x, y))
    assert found.equal(whole(ready(X))[0]) and targets.equal(whole(ready(X))[1]) and not found.requires_grad


def test_a_tuple_of_lists_is_a_tree():
    part = ready((X.tolist(), {"b": Y.tolist()})).part(0, "train")
    assert part.x[0].shape == (3, 2) and part.x[1]["b"].shape == (3,)


BAD = {
    "texts": (np.full((12, 2), "ab"), "type <U2"),
    "bytes": (np.full((12, 2), b"ab"), "type .S2"),
    "dates": (np.full((12, 2), "2024-01-01", dtype="datetime64[D]"), "type datetime64"),
    "records": (np.zeros(12, dtype=[("a", "f4")]), "type .*'a'"),
    "objects": (np.full((12, 2), None), "type object"),
    "list of texts": (["a", "b"] * 6, "type <U1"),
    "ragged": ([[1.0], [1.0, 2.0]], "rows of different lengths"),
    "number": (np.array(3.0), "is a single number"),
    "tensor": (torch.tensor(3.0), "is a single number"),
    "sparse": (torch.eye(12).to_sparse(), "sparse_coo tensor"),
    "scipy": (scipy.sparse.csr_matrix(X), "is a csr_matrix"),
    "meta": (torch.zeros(12, 2, device="meta"), "meta tensor"),
    "module": (torch.nn.Linear(2, 2), "is a Linear"),
    "nothing": (None, "is a NoneType"),
    "tree": ({"a": [X, "x.npy"]}, r"\['a'\]\[1\] is a str"),
}


@pytest.mark.parametrize(("values", "says"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["x", "y"])
def test_what_is_no_array_of_numbers_is_refused(name, values, says):
    with pytest.raises(MisconfigurationException, match=f"^data.{name}.*{says}"):
        ready(**{"x": X, name: values})


class Own(FederatedDataModule):
    """A data set of one's own, whose ``load`` returns something."""

    input_shape, num_classes = (2,), 3

    def __init__(self, loaded):
        super().__init__(num_clients=2)
        self.loaded = loaded

    def load(self):
        return self.loaded


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        (None, "NoneType"),
        (torch.from_numpy(X), "a Tensor"),
        ((X, Y, Y), "a tuple"),
        (Loaded(X, Y[:5]), "12, 5 rows"),
        ((X[:0], Y[:0]), "0 rows"),
        ((X, None), "y of load"),
        ((["a"] * 12, Y), "x of load"),
        ((X, Y.astype(float)), "float64 targets"),
        ((X, Y + 1), "from 1 to 3"),
    ],
)
def test_a_load_that_returns_something_else_is_refused(loaded, says):
    with pytest.raises(MisconfigurationException, match=says):
        Own(loaded).setup()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "x"}, r"Own\.task='x'"),
        ({"original_test": [1]}, r"original_test is list"),
        ({"original_test": torch.ones(12) > 0}, r"original_test is torch\.bool"),
        ({"original_test": torch.tensor([12])}, r"original_test has positions from 12 to 12"),
        ({"strata": lambda y: [0] * 12}, r"strata\(\) gave a list"),
        ({"loaded": Loaded(X, Y, client=3)}, "a int as the client column"),
        ({"loaded": Loaded(X, Y, time=3)}, "a int as the time column"),
    ],
)
def test_a_class_that_says_something_else_is_refused(settings, says):
    class Own(FederatedDataModule):
        input_shape, num_classes, task, loaded = (2,), 3, Classification(3), (X, Y)

        def load(self):
            return self.loaded

    data = Own(num_clients=2)
    for name, value in settings.items():
        setattr(data, name, value)
    with pytest.raises(MisconfigurationException, match=says):
        data.setup()


def test_a_class_without_a_task_is_refused():
    class Own(FederatedDataModule):
        input_shape = (2,)

        def load(self):
            return X, Y

    with pytest.raises(MisconfigurationException, match="neither num_classes nor task"):
        Own(num_clients=2).setup()


def test_columns_of_a_data_frame_are_taken_by_position():
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    order = np.random.default_rng(0).permutation(12)
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y}, index=order)
    found, y = whole(ready(table[["a", "b"]], table["y"]))
    assert found.equal(whole(ready(X))[0]) and y.equal(whole(ready(X))[1])


def test_a_reader_that_gives_other_rows_is_refused():
    class Pairs(Own):
        def __len__(self):
            return 12

        def __getitem__(self, rows):
            return X[rows], X[rows]

    with pytest.raises(MisconfigurationException, match="Pairs gave 2 rows for 1 positions"):
        TensorData(Pairs(None), Y, Classification(3))


def test_a_load_may_return_arrays_and_lists():
    data = Own((X.astype(">f4"), Y.tolist()))
    data.setup()
    assert data.part(0, "train").x.dtype == torch.float32


def write(folder, x):
    (folder / "site").mkdir()
    torch.save(x, folder / "site" / "x.pt")
    torch.save(torch.from_numpy(X.sum(1)), folder / "site" / "y.pt")


@pytest.mark.parametrize("held", [{"a": torch.zeros(12, 2)}, [torch.zeros(12)] * 12, 3], ids=["dict", "list", "number"])
def test_files_of_something_else_are_refused(held, tmp_path):
    write(tmp_path, held)
    with pytest.raises(MisconfigurationException, match=r"x.pt.* a (dict|list|int)"):
        FolderData(str(tmp_path), Regression()).setup()


@pytest.mark.parametrize("task", ["x", Classification, None, torch.nn.Linear(1, 1)], ids=str)
def test_a_task_is_a_task(task):
    with pytest.raises(MisconfigurationException, match=r"^data.task="):
        TensorData(X, Y, task)


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (float("inf"), (4,), "x is inf in row 4"),
        (1e300, (4,), "x is 1e+300, beyond single precision, in row 4"),
        (float("nan"), (17, 3), "x is nan in row 17, column 3"),
        (float("nan"), (17, 3, 5), "x is nan in row 17 at [3, 5]"),
    ],
)
def test_a_number_that_no_net_takes_is_named_with_its_place(value, place, words):
    assert cell("x", value, place) == words
