"""Runs of drawn tables, Datasets, arrays and settings: each door gives a whole result or one sentence.

Hypothesis draws, and shrinks a case that fails. A draw is the same on each machine, and after each edit of the package:
the seed is fixed, nothing is kept from earlier runs, no clock decides, and all choices are made of single bits, since
Hypothesis mixes constants of the package's source among drawn numbers. `setup.cfg` names one version of Hypothesis, as
another one may draw otherwise.

By default 200 cases are drawn, in some 25 CPU seconds, and the exhaustive tests draw 200 others. The environment sets

    PFL_DRAWS=5000        the number of cases in either part, as in the nightly workflow
    PFL_DRAWS_SEED=7      another seed, for other cases
"""

import logging
import math
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD
from torch.utils.data import Dataset, Subset, TensorDataset

from federations import equal, make_trainer, near, untimed
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import ClientDatasets, Preprocessing, TableData, TensorData
from pfl_lightning.engines import processes
from pfl_lightning.federation.messages import TrainingDiverged
from pfl_lightning.methods import APFL, Ditto, FedAvg, FedPer, FedProto, FedRep, Local
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification, Poisson, Regression, Survival

pd = pytest.importorskip("pandas", reason="needs the extra tables")

DRAWS = int(os.environ.get("PFL_DRAWS", "0"))
SEED = int(os.environ.get("PFL_DRAWS_SEED", "0"))


class Bits:
    """Choices made of bits; the first option is the simplest, to which Hypothesis shrinks."""

    def __init__(self, bit: Callable[[], bool]) -> None:
        self.bit = bit

    def number(self, count: int) -> int:
        """A number below ``count``."""
        # some bits more than needed, so that the remainder favours no option much
        return sum(self.bit() << place for place in range((count - 1).bit_length() + 2)) % count

    def one(self, *options: Any) -> Any:
        return options[self.number(len(options))]

    def some(self, options: Sequence[Any], count: int) -> list[Any]:
        """Distinct options."""
        left = list(options)
        return [left.pop(self.number(len(left))) for _ in range(count)]

    def chance(self, one_in: int) -> bool:
        return self.number(one_in) == one_in - 1

    def settings(self, one_in: int, **options: Sequence[Any]) -> dict[str, Any]:
        """Some settings; the others keep their defaults."""
        return {name: self.one(*values) for name, values in options.items() if self.chance(one_in)}


def drawn(make: Callable[[Bits], Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def strategy(draw: Callable[[Any], bool]) -> Any:
        return make(Bits(lambda: draw(st.booleans())))

    return strategy()


@dataclass
class Case:
    """A drawn run."""

    data: Callable[..., Any]
    """Returns the data module, of the drawn clients or of others, with samples by a number."""
    rows: Callable[[], Any]
    """Returns raw rows to predict for."""
    content: dict[str, Any]
    method: type[FedAvg]
    trainer: dict[str, Any]
    check: str
    task: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return self.trainer.get("precision", "32-true")


# What is drawn: names, columns, tables

NAMES = (
    "Ulm",
    "Köln",
    "北京",
    "a b",
    "x,y",
    'say "a"',
    "a/b",
    "../up",
    "=1+1",
    "01",
    "1",
    "2.5",
    "all",
    "new",
    "Z" * 80,
    "🏥",
)
HEADS = (
    "age",
    "Größe",
    "a b",
    "x.y",
    "p_1",
    "row",
    "prediction",
    "client",
    "年",
    "a,b",
    "x[0]",
    "-",
    "Z" * 80,
    "{}",
    "%s",
)
SIZES, SMALL = (6, 9, 12, 20, 40), (5, 4, 3, 2, 1)


def numbers(rng: np.random.RandomState, n: int) -> Any:
    return rng.normal(size=n).round(3)


def gaps(values: Any, rng: np.random.RandomState, share: float = 0.2) -> Any:
    values = pd.Series(values, dtype=object)
    values[rng.random_sample(len(values)) < share] = None
    return values


COLUMNS: dict[str, Callable[[np.random.RandomState, int], Any]] = {
    "float": numbers,
    "int": lambda rng, n: rng.randint(-3, 9, n),
    "text": lambda rng, n: rng.choice(["low", "high", "größer"], n),
    "bool": lambda rng, n: rng.random_sample(n) < 0.5,
    "float with gaps": lambda rng, n: pd.Series(gaps(numbers(rng, n), rng), dtype=float),
    "text with gaps": lambda rng, n: gaps(rng.choice(["dry", "wet"], n), rng),
    "categorical": lambda rng, n: pd.Categorical(rng.choice(["s", "m"], n), categories=["s", "m", "l"]),
    "ordered numbers": lambda rng, n: pd.Categorical(rng.randint(1, 4, n), categories=[3, 2, 1], ordered=True),
    "constant": lambda rng, n: np.full(n, 7),
    "nothing": lambda rng, n: np.full(n, np.nan),
    "date": lambda rng, n: pd.date_range("2024-01-01", periods=n).astype(str),
    "timestamp": lambda rng, n: pd.date_range("2024-01-01", periods=n, tz=None),
    "zoned": lambda rng, n: pd.date_range("2024-01-01", periods=n, tz="Europe/Berlin"),
    "duration": lambda rng, n: pd.to_timedelta(rng.randint(1, 9, n), unit="D"),
    "id": lambda rng, n: [f"patient-{number}" for number in rng.permutation(n)],
    "number as id": lambda rng, n: rng.permutation(n) + 1000,
    "float16": lambda rng, n: numbers(rng, n).astype(np.float16),
    "byte": lambda rng, n: rng.randint(0, 255, n).astype(np.uint8),
    "Int64": lambda rng, n: pd.array(gaps(rng.randint(0, 9, n), rng), dtype="Int64"),
    "boolean": lambda rng, n: pd.array(gaps(rng.random_sample(n) < 0.5, rng), dtype="boolean"),
    "large": lambda rng, n: numbers(rng, n) * 1e12,
    "infinite": lambda rng, n: np.where(rng.random_sample(n) < 0.1, np.inf, numbers(rng, n)),
    "too large": lambda rng, n: numbers(rng, n) * 1e300,
    "whole beyond floats": lambda rng, n: rng.randint(2**62, 2**63 - 1, n),
    "numbers as texts": lambda rng, n: [f"{value:.2f}" for value in numbers(rng, n)],
    "decimal commas": lambda rng, n: [f"{value:.2f}".replace(".", ",") for value in numbers(rng, n)],
    "mixed": lambda rng, n: pd.Series([value if value > 0 else "low" for value in numbers(rng, n)], dtype=object),
    "complex": lambda rng, n: numbers(rng, n) + 1j,
    "lists": lambda rng, n: pd.Series([[1, 2]] * n, dtype=object),
}
EASY = tuple(COLUMNS)[:8]

TARGETS: dict[str, tuple[Callable[..., Any], Callable[[np.random.RandomState, int], Any]]] = {
    "two": (lambda **k: Classification(2, **k), lambda rng, n: rng.randint(0, 2, n)),
    "three texts": (lambda **k: Classification(3, **k), lambda rng, n: rng.choice(["flu", "cold", "=0"], n)),
    "bool": (lambda **k: Classification(2, **k), lambda rng, n: rng.random_sample(n) < 0.5),
    "rare": (lambda **k: Classification(2, **k), lambda rng, n: (rng.random_sample(n) < 0.06).astype(int)),
    "quantity": (lambda **k: Regression(), numbers),
    "count": (lambda **k: Poisson(), lambda rng, n: rng.poisson(2, n)),
    "text with gaps": (lambda **k: Classification(2, **k), lambda rng, n: gaps(rng.choice(["no", "yes"], n), rng, 0.1)),
    "quantity with gaps": (lambda **k: Regression(), lambda rng, n: pd.Series(gaps(numbers(rng, n), rng), dtype=float)),
    "floats of classes": (lambda **k: Classification(2, **k), lambda rng, n: rng.randint(0, 2, n).astype(float)),
    "from one": (lambda **k: Classification(2, **k), lambda rng, n: rng.randint(1, 3, n)),
    "categorical": (lambda **k: Classification(2, **k), lambda rng, n: pd.Categorical(rng.choice(["b", "a"], n))),
    "all alike": (lambda **k: Classification(2, **k), lambda rng, n: np.ones(n, dtype=int)),
    "texts of another task": (lambda **k: Regression(), lambda rng, n: rng.choice(["no", "yes"], n)),
}
METRICS = (("acc",), ("auroc", "acc"), ("balanced_acc", "f1"), ("average_precision", "ece"), ("brier", "recall"))
METHODS = (FedAvg, FedPer, Ditto, Local, FedProto, APFL, FedRep)
CHECKS = ("rows", "raw rows", "rows", "raw rows", "join", "join", "resume", "vectorised", "processes")


def frame(sites: Sequence[Any], sizes: Sequence[int], columns: dict[str, str], target: str, number: int) -> Any:
    """A table; ``target`` is a kind of `TARGETS`, or ``survival``, of which there are two columns."""
    rng, n = np.random.RandomState(number), sum(sizes)
    table = {"site": pd.Series([site for site, size in zip(sites, sizes, strict=True) for _ in range(size)])}
    table |= {name: pd.Series(COLUMNS[kind](rng, n)) for name, kind in columns.items()}
    if target == "survival":
        table |= {"days": pd.Series(rng.exponential(3, n).round(2) + 0.1), "died": pd.Series(rng.randint(0, 2, n))}
    else:
        table["y"] = pd.Series(TARGETS[target][1](rng, n))
    return pd.DataFrame(table).iloc[rng.permutation(n)]


def task_of(bits: Bits, target: str) -> Any:
    if target == "survival":
        return Survival(bits.one(None, None, [1.0, 3.0]))
    return TARGETS[target][0](**bits.settings(2, metrics=METRICS, class_weights=("balanced",)))


def trainer_of(bits: Bits) -> dict[str, Any]:
    return bits.one({}, {"local_epochs": 2}, {"local_steps": 3}) | bits.settings(
        4,
        clients_per_round=(0.5, 1),
        evaluate=("after", "both"),
        test_every_round=(True,),
        precision=("bf16-mixed", "64-true"),
        accumulate_grad_batches=(2,),
        gradient_clip_val=(0.5,),
        client_states=("disk",),
        limit_train_batches=(1, 0.5),
    )


SPLITS: dict[str, Sequence[Any]] = {
    "batch_size": (1, 4, 100),
    "val_fraction": (0.0, 0.2, 0.5),
    "test_fraction": (0.0, 0.5),
    "last_batch": ("drop", "keep"),
    "client_split": ("stratified",),
    "seed": (3,),
}


def a_table(bits: Bits) -> Case:
    count = 1 + bits.number(4)
    sites, sizes = bits.some(NAMES, count), [bits.one(*(SMALL if bits.chance(20) else SIZES)) for _ in range(count)]
    if bits.chance(6):
        sites = [bits.one(1, 1.5, True), *range(10, 9 + count)]
    columns = {head: bits.one(*COLUMNS if bits.chance(8) else EASY) for head in bits.some(HEADS, 1 + bits.number(3))}
    target = bits.one(*(TARGETS if bits.chance(4) else ("two", "three texts", "bool", "rare", "quantity", "survival")))
    task, number = task_of(bits, target), bits.number(256)
    prepared = bits.one({"standardize": "table"}, {"standardize": "client"}, {})
    if bits.chance(2) or (any("gaps" in kind for kind in columns.values()) and not bits.chance(10)):
        prepared = {"preprocessing": bits.one("auto", Preprocessing(by="client"), Preprocessing(encode="codes"))}
    prepared = prepared | bits.settings(6, drop_missing_target=(True,)) | bits.settings(5, **SPLITS)
    carrier = bits.one("frame", "csv", "frame", "parquet", "shuffled index", "index of texts")
    targets = ["days", "died"] if target == "survival" else "y"

    def data(sites: Sequence[Any] = sites, sizes: Sequence[int] = sizes, number: int = number) -> Any:
        table = frame(sites, sizes, columns, target, number)
        return TableData(carried(table, carrier), targets, task, client="site", **prepared)

    def rows() -> Any:
        table = frame(sites, sizes, columns, target, number)
        return table.drop(columns=["site", "y", "days", "died"], errors="ignore").reset_index(drop=True)

    content = {"sites": sites, "sizes": sizes, "columns": columns, "target": target, "carrier": carrier}
    return case_of(bits, data, rows, content | {"number": number}, task, prepared)


def case_of(bits: Bits, data: Any, rows: Any, content: dict[str, Any], task: Any, given: dict[str, Any]) -> Case:
    """A case of drawn data, with drawn method, trainer and check."""
    method = bits.one(*(method for method in METHODS if task.has_classes or method is not FedProto))
    return Case(data, rows, content, method, trainer_of(bits), bits.one(*CHECKS), task, given)


def carried(table: Any, carrier: str) -> Any:
    """A data frame, or the file that it was written to."""
    if carrier == "csv":
        table.to_csv("table.csv", index=False)
        return "table.csv"
    if carrier == "parquet":
        try:
            table.to_parquet("table.parquet", index=False)
        except Exception:
            # pyarrow doesn't write all columns
            return table
        return "table.parquet"
    if carrier == "index of texts":
        return table.set_axis([f"row {number % 3}" for number in range(len(table))])
    return table if carrier == "shuffled index" else table.reset_index(drop=True)


# What is drawn: Datasets and arrays

FLOATS = (torch.float32, torch.float64, torch.float16, torch.uint8)
TYPES = (*FLOATS, *FLOATS, torch.bfloat16, torch.int64, torch.bool)
SHAPES = ((3,), (1, 4, 4), (2, 3), (3,), (1, 4, 4), (2, 3), ())
LABELS: dict[str, Callable[[Any], Any]] = {
    "classes": lambda y: y,
    "int32": lambda y: y.int(),
    "bytes": lambda y: y.byte(),
    "bool": lambda y: y > 0,
    "quantities": lambda y: y + 0.5,
    "columns": lambda y: y[:, None] + 0.5,
    "one hot": lambda y: torch.eye(3)[y],
    "with a gap": lambda y: torch.where(torch.arange(len(y)) == 1, math.nan, y + 0.5),
    "below 0": lambda y: y - 1,
}
FORMS = ("pair", "alone", "triple", "names", "arrays", "subset", "items", "no test", "noisy")


class Items(Dataset):
    """Items of plain numbers and lists."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.x[row], self.y[row].tolist()


class Noisy(TensorDataset):
    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return x + torch.randn(x.shape), y


def arrays(size: int, dtype: torch.dtype, shape: tuple[int, ...], labels: str, number: int) -> tuple[Any, Any]:
    """Inputs and targets; bytes and whole numbers from 0, and quantities around 0."""
    generator = torch.Generator().manual_seed(number)
    y = torch.arange(size) % 2
    drawn = torch.randn(size, *shape, generator=generator) + y.view(-1, *[1] * len(shape))
    x = drawn.abs() * 9 if dtype in (torch.uint8, torch.int64) else drawn
    return x.to(dtype) if dtype != torch.bool else x > 0, LABELS[labels](y)


def formed(form: str, make: Callable[[int], tuple[Any, Any]], size: int) -> Any:
    """What a client may give to `ClientDatasets`."""
    train, test = make(size), make(max(1, size // 2))
    if form == "arrays":
        return dict(zip("xy", (part.numpy() if part.dtype != torch.bfloat16 else part for part in train), strict=True))
    return {
        "pair": lambda: (TensorDataset(*train), TensorDataset(*test)),
        "alone": lambda: TensorDataset(*train),
        "triple": lambda: (TensorDataset(*train), TensorDataset(*test), TensorDataset(*test)),
        "names": lambda: {"train": TensorDataset(*train), "test": TensorDataset(*test)},
        "subset": lambda: Subset(TensorDataset(*train), range(size - 1, -1, -2)),
        "items": lambda: (Items(*train), Items(*test)),
        "no test": lambda: (TensorDataset(*train), None),
        "noisy": lambda: (Noisy(*train), TensorDataset(*test)),
    }[form]()


def a_federation_of_datasets(bits: Bits) -> Case:
    count = 1 + bits.number(4)
    sites, sizes = bits.some(NAMES, count), [bits.one(*(SMALL if bits.chance(20) else SIZES)) for _ in range(count)]
    kind = bits.one(*(LABELS if bits.chance(3) else ("classes", "quantities", "bytes")))
    task = Regression() if kind in ("quantities", "columns", "with a gap") else Classification(2)
    dtype, shape, form, number = bits.one(*TYPES), bits.one(*SHAPES), bits.one(*FORMS), bits.number(256)
    split = bits.settings(5, **SPLITS, resident=(True, False), num_workers=(0,))
    forms, types, shapes, kinds = ([each] * count for each in (form, dtype, shape, kind))
    if bits.chance(8):
        # the last client differs from the others; in memory, as nobody compares what is read a batch at a time
        forms, split = ["pair"] * count, {name: value for name, value in split.items() if name != "resident"}
        differs, other = bits.one((types, TYPES), (shapes, SHAPES), (kinds, tuple(LABELS)))
        differs[-1] = bits.one(*other)
    elif bits.chance(8):
        forms[-1] = bits.one(*FORMS)
    holder = bits.one("mapping", "mapping", "list", "read")

    def data(sites: Sequence[Any] = sites, sizes: Sequence[int] = sizes, number: int = number) -> Any:
        def client(place: int) -> Any:
            own = types[place], shapes[place], kinds[place]
            return formed(forms[place], lambda size: arrays(size, *own, number=number + place), sizes[place])

        given = {name: client(place) for place, name in enumerate(sites)}
        if holder == "read":
            return ClientDatasets(list(given), task, read=given.__getitem__, **split)
        return ClientDatasets(given if holder == "mapping" else list(given.values()), task, **split)

    def rows() -> Any:
        return arrays(12, types[-1], shapes[-1], "classes", 301)[0]

    content = {"sites": sites, "sizes": sizes, "types": types, "shapes": shapes, "forms": forms, "kinds": kinds}
    content |= {"holder": holder, "number": number}
    return case_of(bits, data, rows, content, task, split)


CARRIERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "reversed": lambda x: x.numpy()[::-1],
    "columns first": lambda x: np.asfortranarray(x.numpy()),
    "other end first": lambda x: x.numpy().astype(x.numpy().dtype.newbyteorder()),
    "read only": lambda x: np.broadcast_to(x.numpy(), x.shape),
    "view": lambda x: torch.cat([x, x])[::2],
    "with gradient": lambda x: x.clone().requires_grad_(x.is_floating_point()),
    "objects": lambda x: x.numpy().astype(object),
}


def a_federation_of_arrays(bits: Bits) -> Case:
    count = 1 + bits.number(4)
    sites, sizes = bits.some(NAMES, count), [bits.one(*(SMALL if bits.chance(20) else SIZES)) for _ in range(count)]
    kind = bits.one(*(LABELS if bits.chance(3) else ("classes", "quantities", "bytes")))
    task = Regression() if kind in ("quantities", "columns", "with a gap") else Classification(2)
    # NumPy has no bfloat16
    dtype, shape, number = (
        bits.one(*(each for each in TYPES if each != torch.bfloat16)),
        bits.one(*SHAPES),
        bits.number(256),
    )
    carriers = bits.one(*CARRIERS), "tensor" if bits.chance(2) else bits.one(*CARRIERS)
    split = bits.settings(5, **SPLITS, resident=(True, False))
    owners = bits.one("texts", "texts", "array", "numbers")

    def data(sites: Sequence[Any] = sites, sizes: Sequence[int] = sizes, number: int = number) -> Any:
        x, y = arrays(sum(sizes), dtype, shape, kind, number)
        names: Any = [name for name, size in zip(sites, sizes, strict=True) for _ in range(size)]
        if owners == "numbers":
            names = [sites.index(name) + 4 for name in names]
        names = np.array(names) if owners == "array" else names
        return TensorData(CARRIERS[carriers[0]](x), CARRIERS[carriers[1]](y), task, client=names, **split)

    def rows() -> Any:
        return arrays(12, dtype, shape, "classes", 301)[0]

    content = {"sites": sites, "sizes": sizes, "type": dtype, "shape": shape, "kind": kind, "carriers": carriers}
    return case_of(bits, data, rows, content | {"owners": owners, "number": number}, task, split)


# Doors and promises

SENTENCE = re.compile(r"\S[^\n]{15,900}")
OUTCOMES: Counter[str] = Counter()


class Refused(Exception):
    """A door has said in a sentence why there is no result."""


def door(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a door; Refused after the sentence of a user's error, and any other error as it comes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments, **named)
    except (MisconfigurationException, TrainingDiverged) as error:
        assert SENTENCE.fullmatch(str(error)), f"no sentence of a user's error: {error}"
        raise Refused(str(error)) from error


@dataclass
class Ran:
    trainer: Any
    model: Any
    data: Any

    @property
    def rows(self) -> list[dict[str, Any]]:
        return next(each for each in self.trainer.callbacks if isinstance(each, RoundLogger)).rows

    @property
    def record(self) -> str:
        """The record but for times; as a text, in which a NaN equals a NaN."""
        return repr(untimed(self.rows))

    @property
    def state(self) -> tuple[Any, Any]:
        federation = self.trainer.lightning_module
        return federation.state_dict(), federation.federation_state()


def run(case: Case, data: Any = None, root: str = "unused", ckpt_path: str | None = None, **trainer: Any) -> Ran:
    data = door(case.data) if data is None else data
    lightning.seed_everything(1, verbose=False)
    shape = door(lambda: data.input_shape)
    model = door(case.method, lambda s, n: MLP(s, n, hidden=(4,)), shape, task=case.task, optimizer=slow)
    made = door(make_trainer, root, **{"max_rounds": 1, "enable_model_summary": False, **case.trainer, **trainer})
    door(made.fit, model, data, ckpt_path=ckpt_path)
    return Ran(made, model, data)


ROUNDING = {"32-true": 1e-4, "64-true": 1e-4, "bf16-mixed": 0.05}


def slow(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.01)


UNDEFINED = ("auroc", "average_precision", "r2", "c_index", "f1", "recall", "balanced_acc", "precision", "specificity")
"""Metrics without a value for some clients, of which a record may be empty."""


def check_record(ran: Ran) -> None:
    for row in ran.rows:
        for name, value in row.items():
            if isinstance(value, float) and math.isnan(value):
                assert any(metric in name for metric in UNDEFINED), f"{name} is NaN in the record"


def check_rows(case: Case, ran: Ran) -> None:
    """As many predictions as rows, in the order of rows, of the client that was asked for; no NaN."""
    names = ran.data.client_names or list(range(ran.data.num_clients))
    for name, whole in door(ran.trainer.predict).items():
        assert name in names
        assert len(whole) == ran.data.size(ran.data.client_id(name), "test")
        assert not whole.outputs.isnan().any()


def check_raw_rows(case: Case, ran: Ran) -> None:
    """As many predictions as rows; neither the order of rows nor other rows change a row's prediction."""
    client, rows = (ran.data.client_names or [ran.data.num_clients - 1])[-1], case.rows()
    last = list(range(len(rows)))[::-1]

    def predicted(rows: Any) -> Any:
        found = door(ran.trainer.predict, None, rows, clients=client)
        assert list(found) == [client]
        assert not found[client].outputs.isnan().any()
        assert all(len(column) == len(rows) for column in found[client].columns().values())
        return found[client].outputs

    chosen = rows.iloc if hasattr(rows, "iloc") else rows
    whole = predicted(rows)
    assert near(whole[last], predicted(chosen[last]), ROUNDING[case.precision]), "the order of rows changes predictions"
    assert near(whole[-1:], predicted(chosen[-1:]), ROUNDING[case.precision]), "other rows change a row's prediction"


def check_join(case: Case, ran: Ran) -> None:
    before = deepcopy(ran.state)
    late = door(case.data, sites=["late"], sizes=[9], number=301)
    door(ran.trainer.join, None, late)
    assert equal(before, ran.state), "joining changed the federation"
    predicted = door(ran.trainer.predict, None, case.rows(), clients="late")
    assert list(predicted) == ["late"]
    assert len(predicted["late"]) == len(case.rows()) and not predicted["late"].outputs.isnan().any()


def check_resume(case: Case) -> None:
    with tempfile.TemporaryDirectory() as root:
        whole = run(case, root=f"{root}/whole", max_rounds=2)
        run(case, root=f"{root}/part", max_rounds=1)
        resumed = run(case, root=f"{root}/part", max_rounds=2, ckpt_path="last")
        assert equal(whole.state, resumed.state), "a resumed run has other weights"
        assert whole.record == resumed.record, "a resumed run has another record"


class Clock:
    """A clock on which everything takes a second, so that workers are always worth their fork."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


def check_processes(case: Case, ran: Ran) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "time", Clock())
        other = run(case, engine="processes", workers=2)
    assert equal(ran.state, other.state), "the engine processes has other weights"
    assert ran.record == other.record, "the engine processes has another record"


def check_vectorised(case: Case, ran: Ran) -> None:
    other = run(case, engine="vectorised")
    check_record(other)
    # bf16 rounds losses and gradients so much that training may part
    if case.precision == "bf16-mixed":
        return
    assert near(ran.state, other.state, ROUNDING[case.precision]), "the vectorised engine differs"


def check(case: Case) -> None:
    """Run a case through its doors."""
    try:
        if case.check == "resume":
            check_resume(case)
        else:
            ran = run(case)
            check_record(ran)
            {
                "rows": check_rows,
                "raw rows": check_raw_rows,
                "join": check_join,
                "processes": check_processes,
                "vectorised": check_vectorised,
            }[case.check](case, ran)
        OUTCOMES["passed"] += 1
    except Refused as refused:
        note(str(refused))
        OUTCOMES["refused"] += 1


DOORS = {"tables": (a_table, 0.4), "datasets": (a_federation_of_datasets, 0.3), "arrays": (a_federation_of_arrays, 0.3)}
"""What is drawn, and its share of all draws."""


def check_drawn(name: str, draws: int, number: int) -> None:
    """Check cases that Hypothesis draws; enough of them must get through their doors."""
    make, share = DOORS[name]
    count = round(share * (DRAWS or draws))

    @seed(1000 * SEED + number)
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn(make))
    def checked(case: Case) -> None:
        check(case)

    OUTCOMES.clear()
    # a failing case says all that there is to say
    logging.disable(logging.CRITICAL)
    try:
        checked()
    finally:
        logging.disable(logging.NOTSET)
    assert OUTCOMES["passed"] >= count / 4, f"of {count} cases too few get through: {dict(OUTCOMES)}"


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.by_default("arrays")
def test_drawn_runs_keep_their_promises_or_end_in_a_sentence(name: str) -> None:
    check_drawn(name, 200, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DOORS)
def test_more_drawn_runs_keep_their_promises_or_end_in_a_sentence(name: str) -> None:
    check_drawn(name, 200, 1)
