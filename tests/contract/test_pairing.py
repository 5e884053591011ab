"""Settings that no method can use, for every method there is."""

import inspect
import math
from functools import partial
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from command import QUICKSTART, QUIET, refusal
from federations import CLASSES, FEATURES, fit, make_client, plain
from pfl_lightning import AggregatorList, WeightedAverage
from pfl_lightning.aggregators import FedAMP, FedDisco, KTpFL
from pfl_lightning.contract.pairing import check_finite, check_requirements, check_tells, check_tied
from pfl_lightning.methods import (
    MOON,
    CloudProx,
    ControlVariates,
    Ditto,
    FedALA,
    FedBABU,
    FedDecorr,
    FedFomo,
    FedIT,
    FedPCL,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    Local,
)
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import MLP, Net
from pfl_lightning.selection import Uniform
from pfl_lightning.tasks import Regression
from sweeps import servers

CLIENTS: set[Any] = {method.client for method in METHODS}
AGGREGATORS: set[Any] = {type(server) for server in servers().values()}


def floats(cls: type) -> set[str]:
    """Names of the numbers that a class takes, and of those that it hands on to its bases."""
    names: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        names |= {p.name for p in parameters if isinstance(p.default, float) or "float" in str(p.annotation)}
        if "__init__" in vars(base) and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def settings_of(classes: set[Any]) -> list[tuple[Any, str]]:
    return [(cls, name) for cls in classes for name in floats(cls)]


def alone_or_in_a_list(cls: Any, name: str, value: float) -> Any:
    """The value, or a list of it where a setting takes several numbers."""
    return [value] if "Sequence" in str(inspect.signature(cls.__init__).parameters.get(name)) else value


def test_the_methods_have_numbers():
    assert floats(CloudProx) == {"mu"} and floats(FedAMP) == {"alpha", "sigma", "min_own"}
    assert floats(KTpFL) == {"rho", "coefficient_lr"} and not floats(Local)


INFINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("value", INFINITE)
def test_a_number_of_a_client_must_be_finite(value):
    for cls, name in settings_of(CLIENTS):
        with pytest.raises(MisconfigurationException, match=rf"model\.{name}(\.0)?=\[?{value}"):
            check_finite(cls(net=MLP, **{name: alone_or_in_a_list(cls, name, value)}), WeightedAverage())


@pytest.mark.parametrize("value", INFINITE)
def test_a_number_of_an_aggregator_must_be_finite(value):
    client = make_client()
    for cls, name in settings_of(AGGREGATORS):
        with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value}"):
            check_finite(client, cls(**{name: value}))


class Numbers(FedAvg):
    def __init__(self, first: Any, second: Any = None, third: Any = None, ceiling: float = math.inf, **kwargs: Any):
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"first": math.nan}, "model.first=nan"),
        ({"first": [1.0, (2.0, -math.inf)]}, "model.first.1.1=-inf"),
        ({"first": {"a": {"b": math.inf}}}, "model.first.a.b=inf"),
        ({"first": 0, "optimizer": partial(SGD, lr=math.nan)}, "model.optimizer.lr=nan"),
    ],
)
def test_numbers_within_settings_must_be_finite(settings, name):
    with pytest.raises(MisconfigurationException, match=rf"^{name} must be finite\.$"):
        fit(make_client(Numbers, **settings), max_rounds=1)


def test_settings_that_are_given_by_position_have_their_names():
    with pytest.raises(MisconfigurationException, match=r"model\.second=nan"):
        check_finite(make_client(partial(Numbers, 1.0, math.nan)), WeightedAverage())


def test_server_sides_of_one_server_side_must_be_finite_too():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.aggregators\.1\.rho=inf"):
        check_finite(make_client(), AggregatorList([WeightedAverage(), KTpFL(rho=math.inf)]))


def test_what_is_infinite_by_default_may_be_so():
    for ceiling in (math.inf, float("inf"), 3.0):
        check_finite(make_client(partial(Numbers, first=0, ceiling=ceiling)), WeightedAverage())
    with pytest.raises(MisconfigurationException, match=r"model\.ceiling=-inf"):
        check_finite(make_client(partial(Numbers, first=0, ceiling=-math.inf)), WeightedAverage())


@pytest.mark.exhaustive
def test_settings_that_say_nothing_of_numbers_are_left_alone():
    for method in METHODS:
        check_finite(method.client(net=MLP), method.new_aggregator())


@pytest.mark.parametrize("cls", [MOON, FedProx, FedALA])
def test_a_run_is_refused_before_its_first_round(cls):
    with pytest.raises(MisconfigurationException, match=r"model\.(mu|eta)=nan"):
        fit(make_client(partial(cls, **{"eta" if cls is FedALA else "mu": math.nan})))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--model MOON --model.mu nan", "model.mu=nan must be"),
        ("--model FedALA --model.eta .nan", "model.eta=nan must be"),
        ("--model FedAvg --aggregator FedNH --aggregator.rho=-inf", "aggregator.rho=-inf must be"),
        ("--model.wdr_scale .inf", "model.wdr_scale=inf must be finite."),
    ],
)
def test_the_command_refuses_it_by_name(line, sentence, capsys):
    assert refusal(f"fit {QUICKSTART} {QUIET} {line}", capsys).startswith(sentence)


class Tied(Net):
    """A linear autoencoder whose classifier is its first layer."""

    def __init__(self, input_shape: Any, num_classes: int) -> None:
        body = nn.Sequential(nn.Linear(input_shape[0], input_shape[0]), nn.Tanh())
        super().__init__(body, nn.Linear(input_shape[0], input_shape[0]))
        self.classifier.weight = body[0].weight


class FrozenTied(Tied):
    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.classifier.weight.requires_grad_(False)


@pytest.mark.parametrize("method", [FedPer, LGFedAvg, FedBABU, FedRep])
def test_a_tensor_that_is_shared_under_one_name_and_personal_under_another_is_refused(method):
    with pytest.raises(
        MisconfigurationException, match=r"^model\.net=Tied has one tensor for net\.\S+weight, which"
    ) as e:
        fit(make_client(method, net=Tied))
    assert "net.features.0.weight" in str(e.value) and "net.classifier.weight" in str(e.value)


@pytest.mark.parametrize("method", [FedAvg, Ditto, Local, MOON, ControlVariates, CloudProx, FedFomo])
def test_a_tensor_with_two_names_may_be_all_shared_or_all_personal(method):
    check_tied(make_client(method, net=Tied))


def test_a_frozen_tensor_with_two_names_is_neither():
    model = make_client(FedPer, net=FrozenTied)
    check_tied(model)
    assert model.common_names == {"net.features.0.weight", "net.classifier.weight"}


def no_body(input_shape: Any, num_classes: int) -> Net:
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


def maps(input_shape: Any, num_classes: int) -> Net:
    """Features with two dimensions a sample."""
    return Net(nn.Unflatten(1, (2, 3)), nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], num_classes)))


def frozen(part: str) -> Any:
    def net(input_shape: Any, num_classes: int) -> Net:
        made = plain(input_shape, num_classes)
        made.get_submodule(part).requires_grad_(False)
        return made

    return net


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_client(task=Regression(1)), r"model\.task=Regression.*, and Blobs has Classification"),
        (lambda: FedIT(plain, (FEATURES,), CLASSES), r"model FedIT is about low-rank adapters, and model\.net=Net has"),
        (lambda: make_client(FedPCL, net=no_body), r"model\.net=Net has no parameter to train below its classifier"),
        (
            lambda: FedAvg(plain, (FEATURES + 1,), CLASSES),
            r"model\.input_shape=\(7,\), and samples of Blobs",
        ),
        (lambda: make_client(FedDecorr, net=maps), r"FedDecorr compares features as vectors .* are \[2, 2, 3\]"),
        (lambda: make_client(net=[plain, no_body]), r"model\.net: Net and Net differ in net\.\S+, which FedAvg shares"),
        (
            lambda: make_client(FedPer, net=frozen("classifier")),
            r"all that FedPer keeps with each client",
        ),
    ],
    ids=["task", "adapters", "body", "shape", "vectors", "networks", "frozen"],
)
def test_a_client_module_that_the_data_or_the_method_has_no_use_for_is_refused(make, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        fit(make(), max_rounds=1)


def test_clients_with_nothing_to_share_but_what_is_frozen_are_told_of():
    with pytest.warns(UserWarning, match=r"all parameters that FedPer would share are frozen"):
        fit(make_client(FedPer, net=frozen("features")), max_rounds=1)


def test_a_server_side_of_classes_refuses_a_task_without_any():
    with pytest.raises(MisconfigurationException, match=r"^aggregator FedDisco needs the class of each sample"):
        check_requirements(make_client(task=Regression(1)), FedDisco())
    check_requirements(make_client(), FedDisco())


def test_a_selection_by_reports_that_clients_do_not_make_is_refused():
    class Moody(Uniform):
        asks = frozenset({"mood"})

    with pytest.raises(MisconfigurationException, match=r"^trainer\.cohort=Moody asks clients for mood, which FedAvg"):
        check_tells(make_client(), Moody())
    check_tells(make_client(), Uniform())
