"""Cut any PyTorch module into a feature extractor and a classifier."""

from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Net
from pfl_lightning.nets.inputs import Spread, called, candidates, logits_of, refusal, way_of
from pfl_lightning.nets.lightning_net import lightning_net, trains_itself
from pfl_lightning.nets.modes import kept_modes


def cut_net(module: nn.Module, input_shape: tuple[int, ...], classifier: str | None = None) -> Net:
    """Return a module as a `Net`: all layers before the output layer as features, the output layer as classifier.

    The weights are the module's own. Its outputs don't change, which is checked on one batch.

    >>> body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> net = cut_net(nn.ModuleDict({"body": body}).body.append(nn.Linear(8, 3)), (4,))
    >>> net.classifier
    Linear(in_features=8, out_features=3, bias=True)

    Args:
        module: any module that maps inputs ``[n, *input_shape]`` to outputs ``[n, ...]``; for inputs of several tensors
            its ``forward`` takes a dict's by their names, a tuple's by their places, or the whole.
        input_shape: shape of one sample, without the batch; the data's own, ``data.input_shape``, has an example of
            inputs of several tensors.
        classifier: dotted name of the module's output layer, such as ``fc`` or ``classifier.6``. None takes the
            innermost layer with parameters whose output is the module's output.

    Raises:
        MisconfigurationException: if the module can't be called with such inputs, has no such layer, or goes on
            computing after this layer.
    """
    name = type(module).__name__
    layers = {path: layer for path, layer in module.named_modules() if path}
    if classifier is not None and classifier not in layers:
        raise MisconfigurationException(
            f"classifier={classifier!r} is no layer of {name}; choose from {', '.join(list(layers)[-8:])}"
        )
    with kept_modes(module), torch.no_grad():
        module.eval()
        x, outputs, last, gives_tensor = traced(module, input_shape)
        way = way_of(module, x)
        if classifier is None and not layers:
            return Net(nn.Identity(), module)
        if classifier is None and not last:
            raise MisconfigurationException(
                f"model.net={name} computes its outputs by no layer of its own, so nothing says which one is the "
                "classifier; let an nn.Module with parameters give the outputs, or build a Net(features, classifier)"
            )
        path = last[0] if classifier is None else classifier
        head = layers[path]
        # a module may have the same layer under several names
        names = [other for other, layer in module.named_modules(remove_duplicate=False) if layer is head]
        for other in names:
            module.set_submodule(other, nn.Identity())
        # a model of transformers gives more than a tensor
        net = Net(module if way == "one" and gives_tensor else Spread(module, way), head)
        if not same_outputs(net, x, outputs):
            for other in names:
                module.set_submodule(other, head)
            raise MisconfigurationException(
                f"model.net={name} goes on computing after its layer {path!r}; name its output layer by "
                "cut_net(..., classifier=NAME), or build a Net(features, classifier)"
            )
    return net


def as_net(module: nn.Module, input_shape: tuple[int, ...], num_outputs: int) -> Net:
    """Return a module as a `Net`, cut at its output layer unless it has modules for features and classifier.

    Args:
        module: any module.
        input_shape: shape of one sample, without the batch.
        num_outputs: outputs that the task needs for each sample.

    Raises:
        MisconfigurationException: if it can't be cut, has another number of outputs, or is a LightningModule whose
            training no client can do.
    """
    if trains_itself(module):
        return lightning_net(module, input_shape)  # type: ignore[arg-type]
    if isinstance(module, Net):
        return module
    if all(isinstance(getattr(module, part, None), nn.Module) for part in ("features", "classifier")):
        with kept_modes(module), torch.no_grad():
            module.eval()
            try:
                x, outputs, *_ = traced(module, input_shape)
            # inputs of another kind, such as several tensors: the two parts are believed
            except MisconfigurationException:
                return module  # type: ignore[return-value]
            # torchvision's AlexNet pools between its `features` and its `classifier`
            if same_outputs(module, x, outputs):
                return module  # type: ignore[return-value]
    net = cut_net(module, input_shape)
    # the 1,000 classes of a net trained on ImageNet would take the labels of any ten in silence
    width = getattr(net.classifier, "out_features", num_outputs)
    if width != num_outputs:
        raise MisconfigurationException(
            f"model.net={type(module).__name__} has {width} outputs, and the data need {num_outputs}; replace its "
            "output layer, or build it for this number of classes"
        )
    return net


def traced(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[Any, Any, list[str], bool]:
    """Call a module once; return inputs, outputs, names of layers with these very outputs, and if it gives a tensor.

    Layers without parameters are left out; inner layers come before outer ones.

    Args:
        module: a module in evaluation mode.
        input_shape: shape of one sample, without the batch.

    Raises:
        MisconfigurationException: if the module raises an error for the example, or for numbers as well as for indices.
    """
    calls: list[tuple[str, Any]] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, result, path=path: calls.append((path, result)))
        for path, layer in module.named_modules()
        if path and any(True for _ in layer.parameters())
    ]
    problem: Exception | None = None
    tried = candidates(input_shape)
    try:
        for x in tried:
            calls.clear()
            try:
                result = called(module, x, way_of(module, x))
            except Exception as error:
                problem = problem or error
                continue
            outputs = logits_of(result)
            names = [path for path, of_layer in calls if of_layer is outputs]
            return x, outputs, names, isinstance(result, Tensor)
    finally:
        for hook in hooks:
            hook.remove()
    raise refusal(module, tried[0], input_shape, cast(Exception, problem)) from problem


def same_outputs(net: Any, x: Any, outputs: Any) -> bool:
    """Return whether the classifier of a net's features gives the outputs.

    Args:
        net: a module with ``features`` and ``classifier``.
        x: inputs.
        outputs: the outputs of the whole module.
    """
    try:
        found = net.classifier(net.features(x))
    # parts that don't fit together, which the whole module may join by operations in between
    except Exception:
        return False
    same_kind = isinstance(found, Tensor) and isinstance(outputs, Tensor) and found.shape == outputs.shape
    return same_kind and torch.allclose(found, outputs, equal_nan=True)
