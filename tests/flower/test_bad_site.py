"""A site that tells what it likes: the server ends its rounds, and its record has the task's columns and numbers."""

import math
import random
import re
import warnings
from functools import partial

import pytest
import torch
from torchmetrics import ClasswiseWrapper, MeanAbsoluteError, MetricCollection, R2Score
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassHingeLoss,
    MulticlassMatthewsCorrCoef,
)

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite

from federations import fit, make_client, noisy, read_csv
from pfl_lightning.flower.link import MOST_SAMPLES, VERSION, Link, failure
from pfl_lightning.flower.measured import LARGEST, Measured, range_of
from pfl_lightning.flower.template import Refused, plain
from pfl_lightning.flower.wire import pack
from pfl_lightning.methods import APFL, FedAvg, FedPer, PerFedAvg
from sweeps import all_but
from tasks_and_data import OfKind, client_of, kinds

make = partial(make_client, FedPer, net=noisy)
BAD = 11
"""The node of clients 0 and 2."""
NUMBERS = [0.0, -1.0, 1e-9, 0.5, 2.9e299, -1.43, math.inf, -math.inf, math.nan, 1e308, -5e-324, 3.0]
WORDS = [
    "acc", "loss", "val", "test", "val_received", "f1_pooled", "=cmd|' /C calc'!A0", "+1+1", "@SUM(A1)", "a\nb,c", "",
    "\x1b[31mred", "x" * 5000, "acc_mean", "clients", "round", "bytes/up", "\u202eabc", "\0", "-", "seconds",
]  # fmt: skip
SIZES = [
    0,
    -1,
    7,
    10**15,
    10**20,
    10**400,
    MOST_SAMPLES,
    MOST_SAMPLES + 1,
    True,
    3.0,
    None,
    "7",
    [7],
    {},
    math.inf,
    *[5] * 40,
]


def value(draw, depth=0):
    """Anything that a message can hold."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 6:
        return draw.choice(
            [draw.choice(WORDS), draw.randrange(-(2**70), 2**70), None, True, torch.ones(draw.randrange(3))]
        )
    parts = [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {name(draw): part for part in parts} if kind < 8 else parts


def name(draw):
    return draw.choice(WORDS) + str(draw.randrange(9)) * draw.randrange(2)


def spoiled(grid, change, kinds=("train", "evaluate")):
    """Has the bad site send other records."""

    def spoil(node, kind, content):
        if node == BAD and kind in kinds:
            rewrite(content, change)

    grid.spoil = spoil
    return grid


def sound(row, others):
    """Whether a row has numbers that the task can have, in the columns of others."""
    assert set(row) == set(others)
    for column, number in row.items():
        if isinstance(number, float):
            assert abs(number) <= LARGEST or math.isnan(number), column
        if re.search(r"/acc(_mean|_worst|_p10|_worst10)?$", column):
            assert -1e-6 <= number <= 1 or math.isnan(number), column
    assert row["time/site"] >= 0


def test_a_thousand_invented_greetings_neither_end_the_server_nor_own_a_client(tmp_path):
    grid, own = grid_of(make, tmp_path), {"trainer.local_epochs": "1"}
    draw, link = random.Random(0), Link(grid, 4, "0" * 16, settings=own)
    for _ in range(1000):
        clients = {
            draw.choice([0, 1, 2, 3, 3, 4, -1, 2**40]): {
                split: draw.choice(SIZES) for split in ["train", "val", "test", "all"][: draw.choice([2, 3, 3, 3, 4])]
            }
            for _ in range(draw.randrange(3))
        }
        settings = {"trainer.local_epochs": "1", **({name(draw): value(draw)} if not draw.randrange(4) else {})}
        hello = {"version": VERSION, "initial": "0" * 16, "settings": settings, "secret": ""}
        hello |= {"clients": clients, "new": {}}
        if not draw.randrange(4):
            hello[draw.choice([*hello, *WORDS])] = value(draw)
        content = failure(draw.choice(WORDS)) if not draw.randrange(9) else pack({"hello": hello})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            link._heard(BAD, content)
        assert all(str(warning.message).isprintable() and len(str(warning.message)) < 700 for warning in told)
    assert link.sizes
    for sizes in link.sizes.values():
        assert all(type(size) is int and 0 <= size <= MOST_SAMPLES for size in sizes.values())


@pytest.mark.parametrize("evaluate", all_but(["before"], ["before", "both"]))
@pytest.mark.exhaustive
def test_rounds_with_a_site_that_invents_answers_end_with_the_columns_of_others(tmp_path, evaluate):
    settings = {"max_rounds": 6, "evaluate": evaluate}
    draw = random.Random(1)

    def change(records):
        for record in [record for record in records if record.endswith("answer")]:
            answer = records[record]
            for part in ("after", "metrics"):
                if part in answer:
                    nested = part == "after"
                    invented = {name(draw): draw.choice(NUMBERS) for _ in range(draw.randrange(30))}
                    own = (
                        {split: values | invented for split, values in answer[part].items()} if nested else answer[part]
                    )
                    answer[part] = own | ({name(draw): dict(invented)} if nested else invented)
                    # of known names other numbers
                    for values in answer[part].values() if nested else [answer[part]]:
                        values |= {known: draw.choice(NUMBERS) for known in values if draw.randrange(2)}
            if "seconds" in answer:
                answer["seconds"] = draw.choice(NUMBERS)
            if not draw.randrange(3):
                answer[draw.choice([*answer, *WORDS])] = value(draw)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        honest = deploy(grid_of(make, tmp_path / "honest", **settings), make, tmp_path / "a", **settings)
        run = deploy(spoiled(grid_of(make, tmp_path / "bad", **settings), change), make, tmp_path / "b", **settings)
    assert len(run.rows) == 6
    own = list(honest.rows[0])
    for row in run.rows:
        sound({column: row[column] for column in row if not column.endswith("_clients")}, own)
    tables = [[list(row) for row in read_csv(one.folder / "clients.csv")] for one in (honest, run)]
    assert set(tables[1][0]) <= {*tables[0][0]}
    assert {row["clients"] for row in run.rows} <= {2, 3, 4} and max(row["clients"] for row in run.rows) > 2


def metrics_with(**splits):
    """Changes what the bad site tells of an evaluation."""

    def change(records):
        for record, answer in records.items():
            if record.endswith("answer"):
                for split, values in splits.items():
                    answer["after"][split] = answer["after"].get(split, {}) | values

    return change


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Columns of a record whose sites are all honest."""
    grid = grid_of(make, tmp_path_factory.mktemp("honest"), max_rounds=1)
    return deploy(grid, make, max_rounds=1).rows[0].keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (metrics_with(val={"acc": 2.9e299}), r"val/acc=2\.9e\+299, which is none of 0 to 1"),
        (metrics_with(val={"acc": -1.43}), r"val/acc=-1\.43, which is none of 0 to 1"),
        (metrics_with(val={"loss": math.inf}), r"val/loss=inf, which is none of -1e\+100 to 1e\+100"),
        (metrics_with(val={"=cmd|'x'!A0": 1.0, "a\nb": 2.0}), r"and 1 more that the task doesn't have"),
        (
            metrics_with(val={f"name {index}": 1.0 for index in range(3000)}),
            r"and 2999 more that the task doesn't have",
        ),
        (metrics_with(other={"acc": 1.0}), r"'other' that nobody has asked for"),
    ],
)
@pytest.mark.by_default(but=["inf, which", "299, which", "more that the task"])
def test_an_evaluation_that_cannot_be_is_left_out_and_told_once(tmp_path, change, words, columns):
    settings = {"max_rounds": 2}
    grid = spoiled(grid_of(make, tmp_path, **settings), change, kinds=("evaluate",))
    with pytest.warns(UserWarning) as told:
        run = deploy(grid, make, **settings)
    (warning,) = [str(w.message) for w in told if "leaves out" in str(w.message)]
    assert re.search(words, warning) and f"client 0 at node {BAD}" in warning and warning.isprintable()
    assert len(warning) < 400
    for row in run.rows:
        sound({column: row[column] for column in row if not column.endswith("_clients")}, columns)


@pytest.mark.parametrize("seconds", all_but([math.nan, 1e9], [math.inf, -1.0, math.nan, 1e9]))
def test_seconds_that_cannot_be_do_not_count(tmp_path, seconds):
    def change(records):
        for record, answer in records.items():
            if record.endswith("answer"):
                answer["seconds"] = seconds

    grid = spoiled(grid_of(make, tmp_path, max_rounds=1), change, kinds=("train",))
    with pytest.warns(UserWarning, match=r"leaves out: seconds=.*, which is none of 0 to 5"):
        (row,) = deploy(grid, make, max_rounds=1).rows
    assert row["clients"] == 4 and 0 < row["time/site"] < 5


@pytest.mark.parametrize("column", ["steps", "samples"])
def test_work_that_cannot_be_is_nan_and_the_update_counts(tmp_path, column):
    def change(records):
        for record, answer in records.items():
            if record.endswith("answer"):
                answer[column] = -1.0

    grid = spoiled(grid_of(make, tmp_path, max_rounds=1), change, kinds=("train",))
    with pytest.warns(UserWarning, match=rf"leaves out: {column}=-1, which is none of 0 to"):
        (row,) = deploy(grid, make, max_rounds=1).rows
    other = {"steps": "samples", "samples": "steps"}[column]
    assert row["clients"] == 4 and math.isnan(row[f"local/{column}"]) and row[f"local/{other}"] > 0


def test_a_cohort_goes_on_where_a_site_tells_no_loss(tmp_path):
    from pfl_lightning.selection import PowerOfChoice

    settings = {"max_rounds": 2, "cohort": PowerOfChoice(candidates=4), "clients_per_round": 2}

    def change(records):
        for answer in records.values():
            answer.get("after", {}).get("train", {}).pop("loss", None)

    grid = spoiled(grid_of(make, tmp_path, **settings), change, kinds=("evaluate",))
    with pytest.warns(UserWarning, match="train/loss, which is missing"):
        run = deploy(grid, make, **settings)
    assert [row["cohort"] for row in run.rows] == ["1 3", "1 3"]


@pytest.mark.parametrize("task", ["Regression", "MultiLabel", "Segmentation", "NextToken"])
@pytest.mark.parametrize("number", all_but([-1e300, math.nan, 1e200], [math.inf, -1e300, math.nan, -3.0, 1e200]))
@pytest.mark.by_default("-3.0-NextToken")
def test_sums_of_pooled_metrics_are_looked_at(tmp_path, task, number):
    kind = kinds()[task]
    own, data = partial(client_of, kind, FedPer), partial(OfKind, kind)

    def change(records):
        for answer in records.values():
            for values in answer["after"].values():
                for metric in [metric for metric in values if metric.endswith("_pooled")]:
                    state = values[metric]
                    values[metric] = {
                        key: torch.full_like(t, number if t.is_floating_point() else -(2**62))
                        for key, t in state.items()
                    }

    grid = spoiled(grid_of(own, tmp_path, data, max_rounds=1), change, kinds=("evaluate",))
    with pytest.warns(UserWarning, match="val/.*_pooled"):
        (row,) = deploy(grid, own, data=data, max_rounds=1).rows
    pooled = {column: number for column, number in row.items() if re.search("_pooled$|perplexity$", column)}
    assert pooled and all(math.isfinite(number) for number in pooled.values())


def test_a_site_sends_counts_and_no_outputs_of_rows_for_areas_of_all_samples(tmp_path):
    kind = kinds()["MultiLabel"]
    own, data = partial(client_of, kind, FedPer), partial(OfKind, kind)
    sent = []

    def look(records):
        sent.extend(values["map_pooled"] for answer in records.values() for values in answer["after"].values())

    grid = spoiled(grid_of(own, tmp_path, data, max_rounds=1), look, kinds=("evaluate",))
    (row,) = deploy(grid, own, data=data, max_rounds=1).rows
    assert sent and {tuple(state) for state in sent} == {("counts",)}
    simulated = fit(own(), data(), max_rounds=1).rows[-1]
    assert "val/map_pooled_error" not in simulated
    assert abs(row["val/map_pooled"] - simulated["val/map_pooled"]) <= row["val/map_pooled_error"] < 0.05


class Measuring(FedAvg):
    """With values of each class, and names that only a value tells."""

    def configure_metrics(self):
        classes = {"num_classes": self.task.outputs, "average": None}
        return MetricCollection(
            {
                "auroc": MulticlassAUROC(self.task.outputs),
                "mcc": MulticlassMatthewsCorrCoef(self.task.outputs),
                "own": ClasswiseWrapper(MulticlassAccuracy(**classes), prefix="acc_of_"),
            }
        )


def test_the_names_and_ranges_of_all_kinds_of_metrics_are_known():
    measured = Measured(make_client(Measuring))
    shares = dict.fromkeys(["auroc", *(f"acc_of_{k}" for k in range(measured.module.task.outputs))], (0.0, 1.0))
    anything = (-LARGEST, LARGEST)
    assert measured.ranges == {**shares, "mcc": (-1.0, 1.0), "loss": anything}
    assert range_of(R2Score()) == (-LARGEST, 1.0)
    assert range_of(MeanAbsoluteError()) == range_of(MulticlassHingeLoss(3)) == anything
    own = {
        "Regression": {"mae": (0.0, LARGEST), "r2": (-LARGEST, 1.0)},
        "MultiLabel": {"map": (0.0, 1.0), "f1": (0.0, 1.0)},
        "Segmentation": {"miou": (0.0, 1.0), "pixel_acc": (0.0, 1.0)},
        "NextToken": {"perplexity": (1.0, LARGEST), "token_acc": (0.0, 1.0)},
    }
    for task, ranges in own.items():
        found = Measured(client_of(kinds()[task], FedAvg)).ranges
        assert {name: found[name] for name in ranges} == ranges


def test_metrics_of_each_class_arrive(tmp_path):
    own = partial(make_client, Measuring)
    settings = {"max_rounds": 1, "monitor": "val/auroc"}
    (row,) = deploy(grid_of(own, tmp_path, **settings), own, **settings).rows
    assert {f"val/acc_of_{k}" for k in range(make_client(Measuring).task.outputs)} <= row.keys()


@pytest.mark.parametrize("method", [FedAvg, APFL, PerFedAvg])
def test_a_thousand_invented_answers_are_refused_or_become_numbers(method):
    measured, draw = Measured(make_client(method)), random.Random(2)
    for _ in range(1000):
        found = {draw.choice(["val", "test", name(draw)]): value(draw) for _ in range(draw.randrange(4))}
        for split in [split for split in found if draw.randrange(2)]:
            found[split] = {draw.choice(["acc", "loss", name(draw)]): draw.choice(NUMBERS) for _ in range(5)}
        numbers = {draw.choice(["loss", "alpha", name(draw)]): draw.choice(NUMBERS) for _ in range(5)}
        told, _ = measured.trained(numbers)
        assert told.keys() <= method.logs
        try:
            told, wrong = measured.evaluated(found, ["val"], "after")
        except Refused as reason:
            assert str(reason).isprintable()
            continue
        assert told.keys() <= {"val", "val_received"} and all(word.isprintable() for word in wrong)
        for values in told.values():
            assert list(values) == ["acc", "loss"]
            assert -1e-6 <= values["acc"] <= 1 or math.isnan(values["acc"])


def test_training_metrics_are_those_that_the_method_names(tmp_path):
    class Logging(FedAvg):
        def training_step(self, batch, batch_idx):
            values = super().training_step(batch, batch_idx)
            self.log("rate", torch.tensor(1.0))
            return values

    class Named(Logging):
        logs = FedAvg.logs | {"rate"}

    own = partial(make_client, Logging)
    with pytest.warns(UserWarning, match="'rate' that Logging doesn't name in its `logs`"):
        (row,) = deploy(grid_of(own, tmp_path, max_rounds=1), own, max_rounds=1).rows
    assert "train/rate" not in row and row["train/loss"] > 0
    own = partial(make_client, Named)
    (row,) = deploy(grid_of(own, tmp_path, max_rounds=1), own, max_rounds=1).rows
    assert row["train/rate"] == 1.0


ESCAPED = "the disk\r\n is \x1b[31mfull\x1b[0m\x1b]0;title\x07 of\x07 \u202ebits\x9b2J\0"


@pytest.mark.parametrize(
    "told",
    [
        lambda records: {**records, "0/answer": {"error": ESCAPED}},
        lambda records: {"failure": {"reason": ESCAPED}},
    ],
)
@pytest.mark.by_default("<lambda>0")
def test_a_reason_has_no_commands_to_a_terminal(tmp_path, told):
    def change(records):
        changed = told(records)
        records.clear()
        records.update(changed)

    grid = spoiled(grid_of(make, tmp_path, max_rounds=1), change, kinds=("train",))
    with pytest.warns(UserWarning) as warned:
        deploy(grid, make, max_rounds=1)
    (line,) = [str(w.message) for w in warned if "client 0 is left out" in str(w.message)]
    assert line.isprintable() and "the disk is full of bits" in line


def test_a_token_that_is_none_is_refused(tmp_path):
    def change(records):
        for record, answer in records.items():
            if record.endswith("answer"):
                answer["kept"] = "a b\n" * 1000

    grid = spoiled(grid_of(make, tmp_path, max_rounds=1), change, kinds=("train",))
    with pytest.warns(UserWarning, match="answer.kept is 'a b.* and should be 16 hexadecimal digits"):
        (row,) = deploy(grid, make, max_rounds=1).rows
    assert row["clients_refused"] == 2


def test_a_long_text_is_cut():
    assert plain("x" * 10**6) == "x" * 500 and plain("\x1b[31m" * 9, 300) == ""


def times(factor):
    """Has the bad site's first client send weights that are so many times what they are."""

    def change(records):
        if "0/update" in records:
            update = records["0/update"]
            update["weights"] = {key: t * factor for key, t in update["weights"].items()}

    return change


@pytest.mark.parametrize("factor", [-50, 1])
@pytest.mark.by_default("-50")
def test_an_update_far_above_the_median_norm_is_told_once_and_counts(tmp_path, factor):
    settings = {"max_rounds": 3}
    grid = spoiled(grid_of(make, tmp_path, **settings), times(factor), kinds=("train",))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = deploy(grid, make, **settings)
    lines = [str(w.message) for w in told if "the round's median is" in str(w.message)]
    assert len(lines) == (factor < 0) and [row["clients"] for row in run.rows] == [4, 4, 4]
    if lines:
        found = re.match(
            rf"client 0 at node {BAD} changes the model by the norm (.+), where .* is (.+), and counts", lines[0]
        )
        assert float(found[1]) > 10 * float(found[2]) > 0


def test_with_a_bound_nothing_far_is_told_but_refused(tmp_path):
    grid = spoiled(grid_of(make, tmp_path, max_rounds=1), times(-50), kinds=("train",))
    with pytest.warns(UserWarning) as told:
        (row,) = deploy(grid, make, max_rounds=1, serving={"max_norm": 5.0}).rows
    assert row["clients_refused"] == 1 and not any("median" in str(w.message) for w in told)


def test_of_two_updates_nobody_says_which_is_far(tmp_path):
    settings = {"max_rounds": 1, "clients_per_round": 2}
    grid = spoiled(grid_of(make, tmp_path, **settings), times(-50), kinds=("train",))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        deploy(grid, make, **settings)
    assert not any("median" in str(w.message) for w in told)
