import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_pinball_loss,
    mean_poisson_deviance,
    r2_score,
)
from torch.nn import functional as F

from federations import fit, near, untimed
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data.trees import shortened
from pfl_lightning.engines.evaluation import pooled_value, state_of
from pfl_lightning.methods import Ditto, FedAvg, FedLC
from pfl_lightning.nets import CharGRU
from pfl_lightning.tasks import (
    Classification,
    Monitor,
    MultiLabel,
    NextToken,
    Poisson,
    Quantile,
    Regression,
    Segmentation,
    Survival,
)
from pfl_lightning.tasks.class_metrics import Brier
from pfl_lightning.tasks.next_token import Perplexity, TokenAccuracy
from pfl_lightning.tasks.plain import made, plain
from pfl_lightning.tasks.regression import AbsoluteError
from tasks_and_data import Kind, OfKind, client_of, drawn, kinds, labels

TASKS = [
    *(Classification(3), Regression(2), MultiLabel(4), Segmentation(3, 255), NextToken(7)),
    *(Survival(), Poisson(2), Quantile(2, (0.05, 0.5)), Segmentation(3, metrics=["dice", "dice_1"], dice_weight=1.0)),
]


def outputs_of(kind):
    torch.manual_seed(0)
    return kind.net(tuple(kind.x.shape[1:]), kind.task.outputs)(kind.x).detach()


def measured(metrics, outputs, target):
    metrics.update(outputs, target)
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize("name", [name for name in kinds() if not kinds()[name].task.samples_meet])
def test_the_sum_of_errors_over_their_number_is_the_mean(name):
    kind = kinds()[name]
    outputs = outputs_of(kind)
    mean = kind.task.loss(outputs, kind.y)
    halves = [(outputs[:30], kind.y[:30]), (outputs[30:], kind.y[30:])]
    total = sum(kind.task.loss(*half, "sum") for half in halves)
    assert float(total) / float(kind.task.weight(kind.y)) == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.parametrize("name", kinds())
def test_states_of_clients_add_up_to_the_metric_of_all(name):
    kind = kinds()[name]
    outputs = outputs_of(kind)
    for metric in kind.task.pooled().values():
        states = []
        for rows in (slice(20), slice(20, 21), slice(21, None)):
            metric.reset()
            metric.update(outputs[rows], kind.y[rows])
            states.append(state_of(metric))
        metric.reset()
        metric.update(outputs, kind.y)
        whole = float(metric.compute())
        assert pooled_value(metric, states) == (pytest.approx(whole, rel=1e-5), 0)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_task_survives_as_plain_values(task):
    assert made(plain(task)) == task


class Counts(Regression):
    """A task of a user."""


def test_a_task_of_ones_own_survives_too():
    task = made(plain(Counts(2)))
    assert type(task) is Counts and task.quantities == 2


@pytest.mark.parametrize("path", ["os.system", "pathlib.Path", "this.d", "pfl_lightning.nets.MLP", "Counts"])
def test_plain_values_import_and_call_nothing(path):
    with pytest.raises(MisconfigurationException, match=f"task={path} is no Task that has been imported; import its"):
        made({"class_path": path, "init_args": {}})
    assert "this" not in sys.modules


def test_regression_is_scored_as_scikit_learn_does():
    y, outputs = drawn(50, 2), drawn(50, 2, seed=1)
    values = measured(Regression(2).configure_metrics(), outputs, y)
    assert values["mae"] == pytest.approx(mean_absolute_error(y, outputs), rel=1e-5)
    assert values["r2"] == pytest.approx(r2_score(y, outputs), rel=1e-5)
    assert float(Regression(2).loss(outputs, y)) == pytest.approx(float(F.mse_loss(outputs, y)))


def test_targets_of_one_quantity_may_have_no_dimension_for_it():
    y, outputs = drawn(50), drawn(50, 1, seed=1)
    task = Regression()
    task.check(y, "x")
    assert measured(task.configure_metrics(), outputs, y) == measured(task.configure_metrics(), outputs, y[:, None])
    assert torch.equal(task.loss(outputs, y), task.loss(outputs, y[:, None]))


@pytest.mark.parametrize("y", [torch.tensor([2.0]), torch.tensor([1e6, 1e6, 1e6])])
def test_r2_without_variance_is_not_defined(y):
    assert math.isnan(measured(Regression().configure_metrics(), torch.zeros(len(y), 1), y)["r2"])


def test_several_labels_are_scored_as_scikit_learn_does():
    y, outputs = labels(60, 4, classes=2), drawn(60, 4)
    values = measured(MultiLabel(4).configure_metrics(), outputs, y)
    assert values["map"] == pytest.approx(average_precision_score(y, outputs), rel=1e-4)
    assert values["f1"] == pytest.approx(f1_score(y, outputs > 0, average="micro"), rel=1e-5)


def test_labels_that_nobody_has_are_no_part_of_the_mean_precision():
    y, outputs = labels(60, 4, classes=2), drawn(60, 4)
    y[:, 2] = 0
    with_positives = [0, 1, 3]
    expected = average_precision_score(y[:, with_positives], outputs[:, with_positives])
    assert measured(MultiLabel(4).configure_metrics(), outputs, y)["map"] == pytest.approx(expected, rel=1e-4)


def test_without_any_label_nothing_is_defined():
    values = measured(MultiLabel(4).configure_metrics(), -torch.ones(3, 4), torch.zeros(3, 4))
    assert all(map(math.isnan, values.values()))


def test_small_logits_are_no_probabilities():
    y, outputs = labels(60, 4, classes=2), torch.rand(60, 4, generator=torch.Generator().manual_seed(3)) - 0.5
    near, far = (measured(MultiLabel(4).configure_metrics(), factor * outputs, y)["map"] for factor in (1, 9))
    assert near == pytest.approx(far, rel=1e-5)


def test_intersection_over_union_by_hand():
    predicted, y = torch.tensor([[0, 0, 1, 1, 2]]), torch.tensor([[0, 1, 1, 1, 255]])
    outputs = F.one_hot(predicted, 3).movedim(-1, 1).float()[:, :, None]
    values = measured(Segmentation(3, 255).configure_metrics(), outputs, y[:, None])
    # class 0: 1 of 2; class 1: 2 of 3; class 2 occurs only where nothing counts
    assert values["miou"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert values["pixel_acc"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 5, 4)])
def test_dice_is_the_f1_of_each_class(shape):
    y, outputs = labels(*shape, classes=4), drawn(shape[0], 4, *shape[1:])
    y[y == 3] = 255
    outputs[:, 3] = -9
    task = Segmentation(4, 255, metrics=("dice", "dice_0", "dice_1", "dice_2", "dice_3"))
    values = measured(task.configure_metrics(), outputs, y)
    counted = y != 255
    expected = f1_score(y[counted], outputs.argmax(1)[counted], average=None, labels=[0, 1, 2])
    assert [values[f"dice_{k}"] for k in range(3)] == pytest.approx(expected, rel=1e-5)
    # class 3 neither occurs nor is predicted, and class 0 is the background
    assert math.isnan(values["dice_3"])
    assert values["dice"] == pytest.approx((expected[1] + expected[2]) / 2, rel=1e-5)
    assert task.monitor == "dice" and set(task.pooled()) == set(values)


def dice_by_hand(logits, target, ignored):
    """The mean soft Dice of the classes but the background in one sample, pixel by pixel."""
    shares = []
    for k in range(1, logits.shape[0]):
        both = predicted = actual = 0.0
        for place in zip(*(target != ignored).nonzero(as_tuple=True), strict=True):
            chance = logits[(slice(None), *place)].softmax(0)[k].item()
            is_k = float(target[place] == k)
            both, predicted, actual = both + chance * is_k, predicted + chance, actual + is_k
        shares.append((2 * both + 1e-5) / (predicted + actual + 1e-5))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 5, 4)])
def test_the_loss_of_dice_is_a_mean_over_samples_by_their_counted_pixels(shape):
    y, outputs = labels(*shape, classes=4), drawn(shape[0], 4, *shape[1:])
    # the first sample has fewer pixels, and lacks class 3
    y[0][y[0] == 3] = 255
    pixels = (y != 255).flatten(1).sum(1)
    dice = [dice_by_hand(*sample, 255) for sample in zip(outputs, y, strict=True)]
    expected = sum((1 - each) * int(count) for each, count in zip(dice, pixels, strict=True))
    plain, task = Segmentation(4, 255), Segmentation(4, 255, dice_weight=0.5)
    for reduction, size in (("sum", 1), ("mean", int(pixels.sum()))):
        own = task.loss(outputs, y, reduction) - plain.loss(outputs, y, reduction)
        assert own.item() == pytest.approx(0.5 * expected / size, rel=1e-4)
    # batches add up, as evaluations and engines assume
    parts = sum(task.loss(outputs[k : k + 1], y[k : k + 1], "sum") for k in range(shape[0]))
    assert parts.item() == pytest.approx(task.loss(outputs, y, "sum").item(), rel=1e-5)
    assert torch.equal(Segmentation(4, 255, dice_weight=0).loss(outputs, y), plain.loss(outputs, y))


def test_the_loss_of_dice_of_a_class_without_a_pixel():
    y = torch.zeros(1, 2, 2, dtype=torch.int64)
    task = Segmentation(2, dice_weight=1.0)
    sure = torch.tensor([40.0, -40.0]).view(1, 2, 1, 1).expand(1, 2, 2, 2)
    # neither there nor predicted is right, and predicted without being there is wrong
    assert task.loss(sure, y).item() == pytest.approx(0, abs=1e-4)
    assert (task.loss(-sure, y) - Segmentation(2).loss(-sure, y)).item() == pytest.approx(1, abs=1e-4)
    # nothing counts
    assert task.loss(sure, torch.full_like(y, -100), "sum").item() == 0


@pytest.mark.parametrize(("settings", "message"), [((3, -1.0), "must be 0 or more"), ((1, 1.0), "2 or more")])
def test_weights_of_dice_that_cannot_be_are_refused(settings, message):
    with pytest.raises(MisconfigurationException, match=rf"^task\.dice_weight={settings[1]} .*{message}"):
        Segmentation(settings[0], dice_weight=settings[1])


@pytest.mark.parametrize("metrics", [(), ("dice", "dice"), ("dice_3",), ("acc",)])
def test_unknown_metrics_of_pixels_are_refused(metrics):
    with pytest.raises(MisconfigurationException, match=r"^task\.metrics=.* different names among miou, .* dice_2\."):
        Segmentation(3, metrics=metrics)


def test_volumes_without_a_channel_are_named():
    with pytest.raises(MisconfigurationException, match="with a dimension too few; give inputs a dimension of channel"):
        Segmentation(2).check_outputs(torch.zeros(3, 2, 8, 8), torch.zeros(3, 4, 8, 8).long(), "UNet")


def test_perplexity_by_hand():
    y = torch.tensor([[1, 2, -100]])
    outputs = torch.zeros(1, 3, 7)
    outputs[0, 2] = 50 * drawn(7)
    values = measured(NextToken(7).configure_metrics(), outputs, y)
    assert values["perplexity"] == pytest.approx(7)
    assert math.isnan(measured(NextToken(7).configure_metrics(), outputs, torch.full_like(y, -100))["perplexity"])


@pytest.mark.parametrize(
    ("task", "target", "sentence"),
    [
        (Classification(3), torch.zeros(4), "torch.float32 targets of shape"),
        (Classification(3), torch.tensor([0, 3]), "from 0 to 3; task Classification.* allows 0 to 2"),
        (Regression(), torch.tensor([1, 2]), "takes 1 floating number a sample"),
        (Regression(), torch.zeros(4, 2), "takes 1 floating number a sample"),
        (Regression(2), torch.zeros(4), "takes 2 floating numbers a sample"),
        (Regression(), torch.tensor([1.0, math.nan, math.inf]), "2 targets that are NaN or infinite"),
        (MultiLabel(2), torch.tensor([[0, 2]]), "values from 0 to 2; .* takes 2 zeros and ones"),
        (MultiLabel(3), torch.tensor([[0, 1]]), "takes 3 zeros and ones a sample"),
        (Segmentation(3), torch.tensor([1, 2]), r"of shape \[samples, height, width\]"),
        (Segmentation(3), torch.full((1, 2, 2), 3), "from 3 to 3; .* and -100 "),
        (Segmentation(3), torch.zeros(1, 1, 2, 2, 2).long(), r"or \[samples, depth, height, width\] of volumes"),
        (NextToken(7), torch.tensor([[7, -100]]), "from 7 to 7; .* allows 0 to 6"),
        (NextToken(7), {"a": torch.zeros(3)}, "targets that are a dict"),
        (Regression(), [torch.zeros(3)], "targets that are a list"),
        (Poisson(), (torch.zeros(3),), "targets that are a tuple"),
    ],
)
def test_targets_of_another_task_are_refused(task, target, sentence):
    with pytest.raises(MisconfigurationException, match=f"load.. has .*{sentence}"):
        task.check(target, "load()")


@pytest.mark.parametrize("name", kinds())
def test_targets_of_the_task_are_taken(name):
    kinds()[name].task.check(kinds()[name].y, "load()")


@pytest.mark.parametrize("name", kinds())
def test_outputs_of_another_shape_are_refused(name):
    kind = kinds()[name]
    outputs = outputs_of(kind)
    kind.task.check_outputs(outputs, kind.y, "Net")
    with pytest.raises(MisconfigurationException, match=r"model\.net: Net gives outputs of shape .* needs shape"):
        kind.task.check_outputs(outputs[:, :1].repeat(1, 9, *[1] * (outputs.dim() - 2)), kind.y, "Net")


@pytest.mark.parametrize("make", [Classification, MultiLabel, Segmentation, NextToken, Regression])
def test_a_task_has_an_output(make):
    with pytest.raises(MisconfigurationException, match="must have at least 1 output"):
        make(0)


def test_the_worst_is_at_the_other_end_where_less_is_better():
    most, least = (Monitor("x", mode).spread([1.0, 2.0, 9.0]) for mode in ("max", "min"))
    assert (most["x_worst"], least["x_worst"]) == (1.0, 9.0)
    assert most["x_p10"] < 2 < least["x_p90"]


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_worst_tenth_is_a_mean_over_its_clients_rounded_up(mode, clients, tenth):
    values = torch.rand(clients, generator=torch.Generator().manual_seed(clients), dtype=torch.float64)
    plainly = values.sort(descending=mode == "min").values[:tenth].mean()
    assert Monitor("x", mode).spread(values.tolist())["x_worst10"] == pytest.approx(float(plainly), rel=1e-12)


@pytest.mark.parametrize("quantities", [1, 2])
def test_poisson_is_scored_as_torch_and_scikit_learn_do(quantities):
    y, outputs = labels(40, quantities, classes=4).float(), drawn(40, quantities)
    task = Poisson(quantities)
    expected = F.poisson_nll_loss(outputs, y, log_input=True, full=False)
    assert float(task.loss(outputs, y)) == pytest.approx(float(expected), rel=1e-5)
    assert float(task.loss(outputs, y, "sum")) == pytest.approx(40 * float(expected), rel=1e-5)
    values = measured(task.configure_metrics(), outputs, y)
    assert values["deviance"] == pytest.approx(mean_poisson_deviance(y.flatten(), outputs.exp().flatten()), rel=1e-5)
    assert values["mae"] == pytest.approx(mean_absolute_error(y, outputs.exp()), rel=1e-5)
    y[3, 0] = -1
    with pytest.raises(MisconfigurationException, match="1 targets below 0"):
        task.check(y, "load()")


@pytest.mark.parametrize("quantities", [1, 2])
def test_quantiles_are_scored_as_scikit_learn_does(quantities):
    levels = (0.1, 0.4, 0.8)
    task = Quantile(quantities, levels)
    y, outputs = drawn(40, quantities), drawn(40, 3 * quantities, seed=1)
    predicted = outputs.view(40, quantities, 3)
    pinball = [mean_pinball_loss(y, predicted[..., k], alpha=level) for k, level in enumerate(levels)]
    assert float(task.loss(outputs, y)) == pytest.approx(sum(pinball) / 3, rel=1e-5)
    assert float(task.loss(outputs, y, "sum")) == pytest.approx(40 * sum(pinball) / 3, rel=1e-5)
    values = measured(task.configure_metrics(), outputs, y)
    assert values["pinball"] == pytest.approx(sum(pinball) / 3, rel=1e-5)
    assert values["mae"] == pytest.approx(mean_absolute_error(y, predicted[..., 1]), rel=1e-5)
    inside = (predicted[..., 0] <= y) & (y <= predicted[..., 2])
    assert values["coverage"] == pytest.approx(float(inside.float().mean()))
    task.check_outputs(outputs, y, "Net")


@pytest.mark.parametrize("levels", [(), (0.0, 0.5), (0.5, 0.1), (0.5, 1.0)])
def test_levels_that_do_not_rise_from_0_to_1_are_refused(levels):
    with pytest.raises(MisconfigurationException, match=r"task\.levels="):
        Quantile(1, levels)


@pytest.mark.parametrize("task", [Poisson(), Quantile(), Survival(bins=(2.0, 3.0))], ids=str)
def test_further_tasks_are_the_same_under_both_engines(task):
    kind = kinds()["Survival" if isinstance(task, Survival) else "Regression"]
    kind = replace(kind, task=task, y=kind.y.abs(), rate=0.02)
    found = {}
    for engine in ("sequential", "vectorised"):
        record = RoundLogger()
        settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = FederatedTrainer(max_rounds=2, engine=engine, callbacks=[record], accelerator="cpu", **settings)
        trainer.fit(client_of(kind, Ditto), datamodule=OfKind(kind))
        found[engine] = [v for row in record.clients for name, v in row.items() if name.startswith("test/")]
    assert found["vectorised"] == pytest.approx(found["sequential"], rel=1e-4, nan_ok=True)
    assert not all(map(math.isnan, found["sequential"]))


def test_answers_are_matched_as_wholes():
    task = NextToken(4, exact_match=True)
    y = torch.tensor([[1, 2, -100, 3, -100], [-100, 1, 2, -100, -100], [-100] * 5])
    said = torch.tensor([[1, 0, 0, 3, 0], [2, 1, 2, 2, 2], [0] * 5])
    # three answers: 1 2, of which the second token is wrong; 3; 1 2
    values = measured(task.configure_metrics(), F.one_hot(said, 4).float(), y)
    assert values["exact_match"] == pytest.approx(2 / 3)
    assert math.isnan(measured(task.configure_metrics(), F.one_hot(said[2:], 4).float(), y[2:])["exact_match"])
    assert "exact_match" not in NextToken(4).configure_metrics()


def test_batches_end_with_their_last_counted_position():
    task = NextToken(4, cut_padding=True)
    y = torch.full((2, 3, 40), -100)
    y[1, 2, 8] = 1
    x = {"input_ids": torch.arange(240).view(2, 3, 40), "kind": torch.zeros(2, 3)}
    # nine positions, rounded up to sixteen
    assert task.length(y) == 16
    short, target = shortened(x, y, 16)
    assert torch.equal(target, y[..., :16]) and torch.equal(short["input_ids"], x["input_ids"][..., :16])
    assert short["kind"].shape == (2, 3)
    assert task.length(torch.full_like(y, -100)) == 8
    y[0, 0, 39] = 1
    for asked in (task, NextToken(4)):
        assert shortened(x, y, asked.length(y))[1] is y


def test_cut_batches_train_the_same_model():
    texts = torch.randint(1, 7, (40, 30), generator=torch.Generator().manual_seed(0))
    inputs, targets = texts[:, :-1].clone(), texts[:, 1:].clone()
    sizes = torch.randint(3, 14, (40, 1), generator=torch.Generator().manual_seed(1))
    targets[torch.arange(29) >= sizes] = -100
    seen, ends = [], []

    def seeing(input_shape, outputs):
        net = CharGRU(input_shape, outputs, width=8)
        net.features.register_forward_pre_hook(lambda layer, x: seen.append(x[0].shape[1]))
        return net

    for cut in (False, True):
        task = NextToken(7, cut_padding=cut)
        kind = Kind(task, inputs, targets, seeing, 0.5)
        ends.append(fit(client_of(kind, FedAvg), OfKind(kind), max_rounds=2, engine="sequential"))
        # no batch has more than 13 counted positions, which are 16 in eights; whole texts check the net's shapes
        assert ({8, 16} >= set(seen) - {29}) and (16 in seen) == cut
        seen.clear()
    assert near(ends[0].weights, ends[1].weights) and near(untimed(ends[0].rows), untimed(ends[1].rows))


SHARES = torch.tensor([0.5, 0.3, 0.2])


def shared(values):
    return torch.tensordot(SHARES, values, 1)


@pytest.mark.parametrize(
    ("task", "shape", "prediction"),
    [
        (Classification(3), (4, 3), partial(torch.softmax, dim=-1)),
        (Regression(2), (4, 2), lambda o: o),
        (Quantile(), (4, 3), lambda o: o),
        (Poisson(), (4, 1), torch.exp),
        (MultiLabel(3), (4, 3), torch.sigmoid),
        (Segmentation(3), (4, 3, 2, 2), partial(torch.softmax, dim=-3)),
        (Segmentation(3), (4, 3, 2, 2, 2), partial(torch.softmax, dim=-4)),
        (NextToken(5), (4, 6, 5), partial(torch.softmax, dim=-1)),
        (Survival(), (4, 1), lambda o: o),
        # survival at the end of each bin
        (Survival(bins=(1, 2, 5)), (4, 3), lambda o: (1 - o.sigmoid()).cumprod(-1)),
    ],
)
def test_the_mean_of_models_is_of_what_outputs_predict(task, shape, prediction):
    outputs = 3 * drawn(3, *shape)
    assert torch.allclose(prediction(task.combined(outputs, SHARES)), shared(prediction(outputs)), atol=1e-5)
    # one model alone, and models without weight
    assert torch.allclose(prediction(task.combined(outputs[:1], torch.ones(1))), prediction(outputs[0]), atol=1e-5)
    first = task.combined(outputs, torch.tensor([1.0, 0.0, 0.0]))
    assert torch.allclose(prediction(first), prediction(outputs[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("task", "shape", "classes", "of_one"),
    [
        (Classification(3), (4, 3), (4,), lambda p: p.sum(1)),
        (Segmentation(3), (4, 3, 2, 2), (4, 2, 2), lambda p: p.sum(1)),
        (Segmentation(3), (4, 3, 2, 2, 2), (4, 2, 2, 2), lambda p: p.sum(1)),
        (NextToken(5), (4, 6, 5), (4, 6), lambda p: p.sum(2)),
        (MultiLabel(3), (4, 3), (4, 3), None),
    ],
)
def test_predictions_are_the_likeliest_classes_and_all_probabilities(task, shape, classes, of_one):
    predicted = task.predictions(3 * drawn(*shape))
    assert predicted["classes"].shape == classes and predicted["probabilities"].shape == shape
    if of_one is None:
        # any number of labels
        assert torch.equal(predicted["classes"], predicted["probabilities"] > 0.5)
        return
    assert torch.allclose(of_one(predicted["probabilities"]), torch.ones(()))
    dim = shape.index(task.outputs, 1)
    assert torch.equal(predicted["classes"], predicted["probabilities"].argmax(dim))


def test_predictions_without_classes_are_the_outputs():
    outputs = drawn(4, 2)
    assert Regression(2).predictions(outputs) == {"values": outputs}


@pytest.mark.parametrize("given", ["balanced", [0.5, 2.0, 0.0]])
def test_weights_of_classes_multiply_the_losses_of_single_samples(given):
    task, outputs, target = Classification(3, class_weights=given), drawn(4, 3), torch.tensor([0, 1, 0, 0])
    weights = task.weights(torch.tensor([3, 1, 0]))
    expected = torch.tensor([4 / 6, 2.0, 0.0] if given == "balanced" else given)
    assert torch.allclose(weights, expected)
    losses = F.cross_entropy(outputs, target, reduction="none") * expected[target]
    assert torch.allclose(task.loss(outputs, target, weights=weights), losses.sum() / 4)
    assert torch.allclose(task.loss(outputs, target, "sum", weights), losses.sum())


@pytest.mark.parametrize("given", [Regression, "Regression", {"init_args": {}}])
def test_what_is_no_task_is_refused(given):
    with pytest.raises(MisconfigurationException, match=r"^model\.task=.* is no task; give an instance"):
        made(given)


def test_methods_of_classes_refuse_a_task_without_any():
    with pytest.raises(MisconfigurationException, match=r"^model FedLC needs the class .* Regression.* has none"):
        FedLC(lambda shape, outputs: torch.nn.Linear(*shape, outputs), (4,), task=Regression(2))


@pytest.mark.parametrize(
    ("metric", "outputs", "target"),
    [
        (AbsoluteError(), torch.ones(3, 1), torch.ones(3)),
        (Brier(), 1e3 * torch.eye(3), torch.arange(3)),
        (Perplexity(-1), 1e3 * torch.eye(3)[None], torch.arange(3)[None]),
        (TokenAccuracy(-1), torch.eye(3)[None], torch.tensor([[1, 2, 0]])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_least_value_of_a_metric_is_its_lower_bound(metric, outputs, target):
    metric.update(outputs, target)
    assert float(metric.compute()) == metric.plot_lower_bound
