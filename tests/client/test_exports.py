"""Files of clients' models for other programs, of every method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from federations import FEATURES, MOMENTUM, blobs, fit, make_client, make_trainer, noisy, plain, points
from pfl_lightning.data import IID, TensorData
from pfl_lightning.methods import APFL, Ditto, FedAvg, FedRoD, KNNPer
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import Net
from pfl_lightning.nets.inputs import InputShape, Spread
from pfl_lightning.tasks import Regression
from sweeps import swept

ROWS = points(7, seed=5)[0]
SETTINGS: dict[str, dict[str, Any]] = {"FedClassAvg": {"contrastive": False}}
BRANCHES = {"Ditto", "APFL", "FedRoD", "FedPHP", "kNN-Per", "FedProto", "FedSR", "APPLE"}
"""Methods with a predicting module of their own, and two whose outputs formats took for a constant number of rows."""


def read(path: Path) -> Any:
    """The function in a file, as a user without this package calls it."""
    if path.suffix == ".ts":
        return torch.jit.load(path)
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime beside the extra onnx")
    session = runtime.InferenceSession(path)
    (given,) = session.get_inputs()
    return lambda rows: torch.from_numpy(session.run(None, {given.name: rows.numpy()})[0])


def check(model: Any, path: Path, rows: Tensor = ROWS) -> None:
    """The file gives the client's outputs, for any number of rows."""
    model.export(path)
    exported, model = read(path), model.eval().cpu()
    for some in (rows, rows[:1], rows.repeat(9, 1)):
        assert torch.allclose(exported(some), model(some), atol=1e-5), path.suffix


def client_of(method: Any, root: Path) -> Any:
    make = make_client(method.client, net=noisy, **SETTINGS.get(method.name, {}))
    return fit(make, root=root, aggregator=method.new_aggregator(), max_rounds=2).trainer.client(1)


@pytest.mark.parametrize("method", swept(METHODS, BRANCHES))
@pytest.mark.by_default("Ditto", "kNN-Per")
def test_a_client_of_each_method_leaves_as_torch_reads_it(method, tmp_path):
    model = client_of(method, tmp_path)
    for kind in ("ts", "pt2"):
        check(model, tmp_path / f"model.{kind}")


@pytest.mark.parametrize("method", swept(METHODS, {"Ditto", "kNN-Per"}))
def test_a_client_of_each_method_leaves_as_onnx(method, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    check(client_of(method, tmp_path), tmp_path / "model.onnx")


@pytest.mark.parametrize("method", [Ditto, APFL, FedRoD])
def test_a_client_before_its_first_training_leaves_with_the_received_model(method, tmp_path):
    model = make_client(method)
    check(model, tmp_path / "model.pt2")
    assert torch.equal(read(tmp_path / "model.pt2")(ROWS), model.net(ROWS))


@pytest.mark.exhaustive
def test_mixed_weights_and_neighbours_of_a_regression_leave_too(tmp_path):
    weights = fit(make_client(APFL, mix="parameters"), max_rounds=1).trainer.client(0)
    assert weights.has_personal
    x = points(40, seed=2)[0]
    data = TensorData(x, x.sum(1), Regression(), num_clients=2, partitioner=IID())
    near = fit(KNNPer(plain, (FEATURES,), task=data.task), data, max_rounds=1).trainer.client(0)
    for model in (weights, near):
        for kind in ("ts", "pt2"):
            check(model, tmp_path / f"model.{kind}")


def test_neighbours_that_no_checkpoint_keeps_are_asked_for(tmp_path):
    run = fit(make_client(KNNPer), root=tmp_path, max_rounds=1)
    model = KNNPer.load_from_checkpoint(run.last, client=1, net=plain)
    with pytest.raises(MisconfigurationException, match=r"share=0\.5 .*trainer\.client"):
        model.export(tmp_path / "model.ts")
    with_data = make_trainer()
    with_data.predict(make_client(KNNPer), ROWS, datamodule=blobs(), ckpt_path=run.last)
    check(with_data.client(1), tmp_path / "model.ts")


class Doubled(Ditto):
    """A user's method, which knows of no hook."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.personal(x)


class Halved(Doubled):
    """A user's method with the hook."""

    def predicting_module(self) -> torch.nn.Module:
        return self.net


def test_a_forward_counts_before_the_hooks_of_classes_above(tmp_path):
    model = fit(make_client(Doubled), max_rounds=1).trainer.client(1)
    check(model, tmp_path / "model.pt2")
    make_client(Halved).export(tmp_path / "own.ts")
    assert torch.equal(read(tmp_path / "own.ts")(ROWS), make_client(Halved).net(ROWS))
    assert isinstance(make_client(FedAvg).predicting_module(), torch.nn.Module)


def test_a_net_that_a_format_cannot_hold_is_refused_with_the_reason(tmp_path):
    class Branching(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    client = make_client(net=lambda shape, classes: Net(Branching(*shape, 4), torch.nn.Linear(4, classes)))
    with pytest.raises(MisconfigurationException, match=r"^model\.net=Net can't be exported to \.pt2: "):
        client.export(tmp_path / "model.pt2")


class Lengths(torch.nn.Module):
    """Computes with the length of a text, which a program holds for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * len(str(x.sum().item()))


class Masked(torch.nn.Module):
    """Takes codes and a mask; with ``branches``, more of them where many are known."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.codes = torch.nn.Embedding(2, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        known = (self.codes(ids) * mask.unsqueeze(-1)).sum(1)
        return known / mask.sum(1, keepdim=True) if self.branches and (mask == 1).all() else known


class Cut(torch.nn.Module):
    """Takes one side of zero or the other, by the sign of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else -x


def rows_of(ids: list[int]) -> Any:
    return InputShape.of({"shape": ids, "inputs": {name: {"shape": ids, "dtype": "int64"} for name in ("ids", "mask")}})


@pytest.mark.parametrize("kind", ["ts", "pt2"])
def test_a_net_of_codes_and_a_mask_leaves_and_is_compared_at_other_rows(kind, tmp_path):
    def built(branches: bool) -> Any:
        net = Net(Spread(Masked(branches), "names"), torch.nn.Linear(4, 2))
        return FedAvg(lambda *_: net, rows_of([5]), num_classes=2, optimizer=MOMENTUM)

    built(False).export(tmp_path / f"model.{kind}")
    with pytest.raises(MisconfigurationException, match=rf"^model\.net=Net can't be exported to \.{kind}: "):
        built(True).export(tmp_path / f"model.{kind}")


@pytest.mark.parametrize(("module", "kind"), [(Lengths(), "pt2"), (Lengths(), "ts"), (Cut(), "ts")])
def test_a_file_that_would_be_wrong_at_other_inputs_is_refused_and_not_written(module, kind, tmp_path):
    client = make_client(net=lambda shape, classes: Net(module, torch.nn.Linear(*shape, classes)))
    with pytest.raises(MisconfigurationException, match=rf"\.{kind}: for other inputs its outputs would be wrong"):
        client.export(tmp_path / f"model.{kind}")
    assert not list(tmp_path.iterdir())
