"""LightningModules with a training step, metrics or an optimizer of their own, as networks of clients."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics import Metric

from pfl_lightning.internals.of_lightning import attached
from pfl_lightning.nets.base import Net
from pfl_lightning.nets.inputs import called, candidates, logits_of, way_of
from pfl_lightning.nets.item_lists import unpacked
from pfl_lightning.nets.modes import kept_modes

TRAINING = ("training_step", "configure_optimizers")
"""Hooks by which a LightningModule has a training of its own."""
EPOCHS = tuple(f"on_{split}_epoch_{end}" for split in ("validation", "test") for end in ("start", "end"))
CALLED = {*TRAINING, *EPOCHS, "validation_step", "test_step", "predict_step", "forward"}
"""Hooks that clients call."""
IGNORED = (
    "setup teardown configure_model configure_sharded_model configure_callbacks configure_gradient_clipping backward "
    "manual_backward optimizer_step optimizer_zero_grad lr_scheduler_step train_dataloader val_dataloader "
    "test_dataloader predict_dataloader prepare_data transfer_batch_to_device on_before_batch_transfer "
    "on_after_batch_transfer on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start "
    "on_train_epoch_end on_train_batch_start on_train_batch_end on_validation_start on_validation_end on_test_start "
    "on_test_end on_validation_batch_start on_validation_batch_end on_test_batch_start on_test_batch_end "
    "on_before_backward on_after_backward on_before_zero_grad on_before_optimizer_step on_save_checkpoint "
    "on_load_checkpoint"
).split()
"""Hooks that no client calls."""
REDUCED = (None, "mean", "default", torch.mean)
"""Reductions of logged values over batches that are means."""


class NeedsOutputs(MisconfigurationException):
    """A method computes with features or outputs of a batch, and a LightningModule gives the loss alone."""


class Deferred:
    """A stand-in for the features or outputs of a batch where a LightningModule computes the loss by itself.

    A method may hand it to its net's classifier and to the task's loss. Any other use is refused.

    Args:
        body: the LightningModule.
        x: the batch's inputs.
        output: the output layer, once the classifier has been called.
        weights: parameters and buffers of body and output layer at their calls, which may be others than now.
    """

    def __init__(self, body: "Body", x: Any, output: "Output | None", weights: dict[str, Tensor]) -> None:
        self.body, self.x, self.output, self.weights = body, x, output, weights

    def call(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of a function of the module, at the weights of the moment of the calls.

        Args:
            run: the function.

        Returns:
            The result, and whether these weights are the module's own.
        """
        pair = Pair(self.body, self.output)
        # the usual case; functional_call takes as long as a small net's step
        if all(self.weights[name] is entry for name, entry in entries_of(pair).items()):
            return run(), True
        return functional_call(pair, self.weights, (run,)), False

    def loss(
        self, target: Any, place: "Place | None" = None, batch_idx: int = 0, resets: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the module's ``training_step`` on the batch, and the logged values.

        Args:
            target: the batch's targets.
            place: the client's place in the run; None inside `deferring`.
            batch_idx: number of the batch.
            resets: whether to reset the module's metrics, as an evaluation of several batches does at its end.

        Raises:
            MisconfigurationException: if ``training_step`` returns no loss.
        """
        body, logged = self.body, Logged()
        place = place or cast(Place, body.place)
        batch = self.x, target
        returned, own = self.call(lambda: body.run("training_step", self.output, batch, place, logged, batch_idx))
        if resets:
            body.forget()
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise MisconfigurationException(
                f"{body.name}.training_step returned {type(returned).__name__} without a loss; return the loss of each "
                "batch, or a dict with 'loss' in it."
            )
        # values at other weights, such as pFedMe's, are no record of the training, and belong to a transform that takes
        # gradients
        return loss, logged.taken() if own else {}

    def __getattr__(self, name: str) -> NoReturn:
        # copying and pickling look for hooks such as __deepcopy__, which aren't there
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse functions of torch."""
        held = [*args, *(kwargs or {}).values()]
        held += [each for part in held if isinstance(part, (list, tuple)) for each in part]
        next(each for each in held if isinstance(each, cls)).refuse(getattr(function, "__name__", str(function)))

    def refuse(self, use: str) -> NoReturn:
        """Raise the error of a use beside the loss.

        Args:
            use: the name of the use.

        Raises:
            NeedsOutputs: always.
        """
        name, method = self.body.name, self.body.method
        part = "outputs (logits)" if self.output is not None else "features"
        raise NeedsOutputs(
            f"model {method} needs the {part} of each batch ({use}), and model.net={name} gives its loss alone, by its "
            f"own training_step; override loss or training_step of {method} to compute without, give the network of "
            f"{name} without its training, or take a method of loss and weights, such as FedAvg, FedPer or Ditto."
        )


def refused(use: str) -> Callable[..., NoReturn]:
    """Return an operator for the refusal of each use.

    Args:
        use: the operator's name.
    """

    def operator(self: Deferred, *_: Any) -> NoReturn:
        self.refuse(use)

    return operator


OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow neg matmul rmatmul getitem len iter lt le gt ge float bool"
for operator in OPERATORS.split():
    setattr(Deferred, f"__{operator}__", refused(operator))


class Pair(nn.Module):
    """Body and output layer as one module, for calls with other weights.

    Args:
        features: the body.
        classifier: the output layer, or None.
    """

    def __init__(self, features: "Body", classifier: "Output | None") -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, run: Callable[[], Any]) -> Any:
        """Return the result of a function."""
        return run()


def entries_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name.

    Args:
        module: the module.
    """
    return dict(module.named_parameters()) | dict(module.named_buffers())


class Place:
    """Stands for the Trainer of a LightningModule inside a client.

    Args:
        round: the current round, from 0, which the module sees as ``current_epoch``.
        num_rounds: number of rounds of the run.
        stage: ``train``, ``validate`` or ``test``.
    """

    global_rank = local_rank = node_rank = 0
    world_size = num_devices = num_nodes = 1
    is_global_zero = True
    sanity_checking = predicting = fast_dev_run = barebones = False
    logger = progress_bar_callback = None
    loggers: tuple[Any, ...] = ()

    def __init__(self, round: int, num_rounds: int, stage: str) -> None:
        self.current_epoch, self.max_epochs = round, num_rounds
        self.training, self.validating, self.testing = stage == "train", stage == "validate", stage == "test"

    def __getattr__(self, name: str) -> NoReturn:
        # copying and pickling look for hooks such as __deepcopy__, which aren't there
        if name.startswith("__"):
            raise AttributeError(name)
        raise MisconfigurationException(
            f"a LightningModule in a federation has no trainer.{name}: its current_epoch is the round, and engines "
            "make the steps; compute without it, or write a subclass of the client module, such as of FedAvg."
        )


class Logged:
    """The values logged by a LightningModule for one batch, or for the batches of an evaluation.

    Args:
        keeps_metrics: whether metrics are computed at the end, over all batches.
    """

    def __init__(self, keeps_metrics: bool = False) -> None:
        self.keeps_metrics = keeps_metrics
        self.rows = 1
        self.values: dict[str, list[tuple[int, Tensor]]] = {}
        self.metrics: dict[str, Metric] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take a value, as Lightning's ``log`` does.

        Args:
            name: the value's name.
            value: a number, a tensor of one number, or a metric.
            *args: without effect.
            **kwargs: the same by name, except ``reduce_fx``.

        Raises:
            MisconfigurationException: if batches are to be reduced otherwise than by their mean.
        """
        if kwargs.get("reduce_fx") not in REDUCED:
            raise MisconfigurationException(
                f"self.log({name!r}, reduce_fx={kwargs['reduce_fx']!r}): clients record means over batches; leave it "
                "out, or log a metric of torchmetrics."
            )
        # the mean of a metric over batches is not the metric of all rows
        if isinstance(value, Metric) and self.keeps_metrics:
            self.metrics[name] = value
            return
        value = value.compute() if isinstance(value, Metric) else value
        self.values.setdefault(name, []).append((self.rows, torch.as_tensor(value).detach().squeeze()))

    def taken(self) -> dict[str, Tensor]:
        """Return the value of each name: the mean over batches, weighted by rows."""
        found = {name: weighted(pairs) for name, pairs in self.values.items()}
        return found | {name: metric.compute() for name, metric in self.metrics.items()}


class Measurement:
    """The values logged by a LightningModule in an evaluation of several batches, and the loss.

    Args:
        split: ``val`` or ``test``.
        place: the client's place in the run.
    """

    def __init__(self, split: str, place: Place) -> None:
        self.split, self.place = split, place
        self.logged = Logged(keeps_metrics=True)
        self.losses: list[tuple[int, Tensor]] = []
        self.has_loss = True
        self._body: Body | None = None

    def add(self, deferred: Deferred, target: Any, rows: int, batch_idx: int) -> None:
        """Add a batch.

        Args:
            deferred: what the net gave for the batch's inputs.
            target: the batch's targets.
            rows: number of samples.
            batch_idx: number of the batch.
        """
        body, self.logged.rows = deferred.body, rows
        step, epoch = hooks_of(body, self.split)
        if self._body is None:
            self._body, self._output = body, deferred.output
            # of the client before
            body.forget()
            self._hook(f"{epoch}_start")
        returned = None
        if step:
            batch = deferred.x, target
            returned = body.run(step, deferred.output, batch, self.place, self.logged, batch_idx)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) and not any(own_name(name) == "loss" for name in self.logged.values):
            # the training step's loss in evaluation mode, where nothing else says what it is
            loss = self._loss_of_training(deferred, target, batch_idx, bool(step))
        if isinstance(loss, Tensor) and not loss.dim():
            self.losses.append((rows, loss.detach()))

    def _loss_of_training(self, deferred: Deferred, target: Any, batch_idx: int, measures: bool) -> Tensor | None:
        """Return the training step's loss in evaluation mode; None if the module has none in this mode.

        Args:
            deferred: as for `add`.
            target: as for `add`.
            batch_idx: as for `add`.
            measures: whether the module has an evaluation step, so that its values are known without a loss.
        """
        if not self.has_loss:
            return None
        try:
            return deferred.loss(target, self.place, batch_idx, resets=False)[0]
        except Exception as error:
            if not measures:
                raise
            # TorchVision's detection models give losses in training mode, and predictions in evaluation mode
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            tell(
                f"{deferred.body.name}.training_step gives no loss in evaluation mode ({reason}), so that evaluations "
                "have none; log val_loss for one."
            )
            self.has_loss = False
            return None

    def values(self) -> dict[str, float]:
        """Return the values by name, without the prefixes of splits, including ``loss``.

        Raises:
            MisconfigurationException: if a value is no number.
        """
        body = cast(Body, self._body)
        self._hook(f"{hooks_of(body, self.split)[1]}_end")
        found = {own_name(name): value for name, value in self.logged.taken().items()}
        body.forget()
        if "loss" not in found and self.losses:
            found["loss"] = weighted(self.losses)
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
                raise MisconfigurationException(
                    f"{body.name} logs {name} {what} in evaluations; log one number by each name, of a metric with "
                    "several in on_validation_epoch_end."
                )
        values = {name: float(value) for name, value in found.items()}
        if body.gives_minus_one:
            values = {name: math.nan if value == -1 else value for name, value in values.items()}
        return values if self.has_loss else {"loss": math.nan} | values

    def _hook(self, hook: str) -> None:
        """Call a hook of the module around an evaluation, if overridden."""
        body = cast(Body, self._body)
        if body.has(hook):
            with body.whole(self._output) as module, attached(module, self.place, self.logged.log):
                getattr(module, hook)()


@cache
def tell(sentence: str) -> None:
    """Write a sentence to the log, once in a process, as evaluations of all clients come to the same.

    Args:
        sentence: the sentence.
    """
    rank_zero_info(sentence)


def hooks_of(body: "Body", split: str) -> tuple[str, str]:
    """Return the names of a LightningModule's evaluation step, empty without one, and of the hooks around the step.

    Args:
        body: the LightningModule.
        split: ``val`` or ``test``; each takes the other's hook where it has none of its own.
    """
    steps = ["validation", "test"] if split.startswith("val") else ["test", "validation"]
    name = next((each for each in steps if body.has(f"{each}_step")), "")
    return f"{name}_step" if name else "", f"on_{name or steps[0]}_epoch"


def own_name(name: str) -> str:
    """Return the name of a logged value without the name of a split in front.

    >>> own_name("val_acc"), own_name("test/loss"), own_name("value")
    ('acc', 'loss', 'value')

    Args:
        name: the name as logged.
    """
    return re.sub(r"^(val|valid|validation|test)[/_]", "", name)


def weighted(pairs: list[tuple[int, Tensor]]) -> Tensor:
    """Return the mean of values of batches, weighted by rows; a single value is unchanged.

    Args:
        pairs: rows and value of each batch.
    """
    total = sum(rows for rows, _ in pairs)
    return pairs[0][1] if len(pairs) == 1 else torch.stack([rows / total * value for rows, value in pairs]).sum(0)


class Body(nn.Module):
    """A LightningModule without the output layer, which has another place in the net.

    Inside `run` the module is whole again: its own code sees all its layers where it has put them.

    Args:
        module: the LightningModule; its output layer is taken out.
        layer: the output layer; None leaves the module whole.
    """

    module: LightningModule

    def __init__(self, module: LightningModule, layer: nn.Module | None) -> None:
        super().__init__()
        self.module = module
        self.name, self.method = type(module).__name__, "ClientModule"
        # set while losses are asked for instead of outputs, see `deferring`
        self.place: Place | None = None
        # a layer may have several names, and its weights shall have one: methods share one part of a net, not the other
        places = [path for path, each in module.named_modules(remove_duplicate=False) if layer and each is layer]
        blank = nn.Identity()
        # a plain list: registered modules would give the layer's weights a second name again
        self.places = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in places]
        self.blank = blank
        for parent, key in self.places:
            setattr(parent, key, blank)
        self.metrics = [each for each in module.modules() if isinstance(each, Metric)]
        for metric in self.metrics:
            # a rank has clients of its own, so nothing is reduced over ranks; bool() is False
            metric.distributed_available_fn = bool
        # only a module that has the metric has imported its file, which isn't read here for all others
        of_boxes = getattr(sys.modules.get("torchmetrics.detection.mean_ap"), "MeanAveragePrecision", ())
        self.gives_minus_one = any(isinstance(each, of_boxes) for each in self.metrics)
        """Whether -1 stands for an undefined value, as mean average precision has it without any object."""

    def has(self, hook: str) -> bool:
        """Return whether the LightningModule overrides a hook.

        Args:
            hook: the hook's name.
        """
        return overrides(self.module, hook)

    def forward(self, x: Any) -> Deferred:
        """Return the stand-in for the features of a batch.

        Args:
            x: the batch's inputs.
        """
        return Deferred(self, x, None, {f"features.{name}": entry for name, entry in entries_of(self).items()})

    @contextmanager
    def whole(self, output: "Output | None") -> Iterator[LightningModule]:
        """Yield the LightningModule with the output layer in place.

        Args:
            output: the output layer.
        """
        layer = None if output is None else output.layer
        # unknown, so that nothing was taken out
        if layer is None:
            yield self.module
            return
        for parent, key in self.places:
            setattr(parent, key, layer)
        try:
            yield self.module
        finally:
            for parent, key in self.places:
                setattr(parent, key, self.blank)

    def run(
        self, hook: str, output: "Output | None", batch: tuple[Any, Any], place: Place, logged: Logged, batch_idx: int
    ) -> Any:
        """Return the result of a hook of the LightningModule on a batch.

        Args:
            hook: the hook's name.
            output: the output layer.
            batch: inputs and targets.
            place: the client's place in the run.
            logged: takes logged values.
            batch_idx: number of the batch.
        """
        with self.whole(output) as module, attached(module, place, logged.log):
            function = getattr(module, hook)
            # as under Lightning, where a step may leave out `batch_idx`
            takes = len(inspect.signature(function).parameters)
            return function(*(own_batch(*batch), batch_idx)[:takes])

    def forget(self) -> None:
        """Reset the module's metrics, which one client mustn't leave to the next."""
        for metric in self.metrics:
            metric.reset()


class Output(nn.Module):
    """The output layer of a LightningModule.

    Args:
        layer: the layer; None if it is unknown.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: Deferred) -> Deferred:
        """Return the stand-in for the outputs of a batch.

        Args:
            features: the result of `Body.forward`.
        """
        own = {f"classifier.{name}": entry for name, entry in entries_of(self).items()}
        return Deferred(features.body, features.x, self, features.weights | own)


@contextmanager
def deferring(module: nn.Module, place: Place) -> Iterator[None]:
    """Let LightningModules in a module, called as a whole, give a `Deferred` in place of outputs inside this context.

    Args:
        module: the client module.
        place: the client's place in the run.
    """
    bodies = [each for each in module.modules() if isinstance(each, Body)]
    for body in bodies:
        vars(body)["place"] = place
    try:
        yield
    finally:
        for body in bodies:
            vars(body)["place"] = None


class LightningNet(Net):
    """A LightningModule as a net: the output layer is the classifier, and all other layers are the features.

    Training asks the module's own ``training_step`` for the loss of a batch; the net's parts give a `Deferred`, which
    the task's loss takes. Called as a whole, the net gives the module's outputs.

    Args:
        module: the LightningModule.
        layer: its output layer; None if it is unknown.
    """

    features: Body
    classifier: Output

    def __init__(self, module: LightningModule, layer: nn.Module | None) -> None:
        super().__init__(Body(module, layer), Output(layer))

    def forward(self, x: Any) -> Any:
        """Return the module's outputs, by ``predict_step`` for a batch without a target.

        Args:
            x: inputs.
        """
        body = self.features
        if body.place is not None:
            return self.classifier(body(x))
        x = unpacked(x)
        with body.whole(self.classifier) as module:
            # forward may take a part of such a batch
            if not isinstance(x, Tensor) and body.has("predict_step"):
                return module.predict_step(*(x, 0)[: len(inspect.signature(module.predict_step).parameters)])
            return module(x)

    def give_weights(self, module: LightningModule) -> None:
        """Copy the weights into another object of the LightningModule's class.

        Args:
            module: the object, with the same layers.
        """
        with self.features.whole(self.classifier) as own:
            module.load_state_dict(own.state_dict())

    def configure_optimizers(self, place: Place) -> Any:
        """Return the result of the module's own ``configure_optimizers``.

        Args:
            place: the client's place in the run.
        """
        with self.features.whole(self.classifier) as module, attached(module, place, Logged().log):
            return module.configure_optimizers()


def own_batch(x: Any, target: Any) -> Any:
    """Return a batch in the form of a LightningModule's own data loader.

    Args:
        x: inputs, or a whole batch.
        target: targets; those without a number, of shape [n, 0], stand for none.
    """
    none = isinstance(target, Tensor) and target.dim() == 2 and not target.shape[1]
    return unpacked(x if none else (x, target))


def overrides(module: LightningModule, hook: str) -> bool:
    """Return whether a LightningModule overrides a hook.

    Args:
        module: the LightningModule.
        hook: the hook's name.
    """
    return getattr(type(module), hook, None) is not getattr(LightningModule, hook, None)


def trains_itself(module: nn.Module) -> bool:
    """Return whether a module is a LightningModule with own training step or optimizer.

    Args:
        module: any module.
    """
    return isinstance(module, LightningModule) and any(overrides(module, hook) for hook in TRAINING)


def lightning_net(module: LightningModule, input_shape: tuple[int, ...]) -> LightningNet:
    """Return a LightningModule as a net.

    The output layer is the module's ``classifier``; else the innermost layer with parameters that gives the outputs of
    ``forward`` for ``example_input_array``, or for inputs of ``input_shape``; else the layer with parameters that is
    called last there. It is unknown where ``forward`` takes neither.

    Args:
        module: the LightningModule.
        input_shape: shape of one input, without the batch.

    Raises:
        MisconfigurationException: if it has no training step, a hook that no client would call, or its own steps of
            optimizers.
    """
    name = type(module).__name__
    if not overrides(module, "training_step"):
        raise MisconfigurationException(
            f"model.net={name} has its own configure_optimizers and no training_step; give it the training_step of its "
            "loss, or leave configure_optimizers out and set model.optimizer."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"model.net={name} has automatic_optimization=False, and engines make the steps of clients; return one "
            "loss from training_step, or write a subclass of the client module, such as of FedAvg."
        )
    if hook := next((hook for hook in IGNORED if overrides(module, hook)), None):
        raise MisconfigurationException(
            f"model.net={name} overrides {hook}, which no client would call; clients call "
            f"{', '.join(sorted(CALLED - set(EPOCHS)))} and on_validation_epoch_end; move its work there, or into the "
            "client module or trainer.callbacks."
        )
    # sentences and the head of a run name a net by its class, which the user knows as the module's
    kind: type[LightningNet] = type(name, (LightningNet,), {"__module__": type(module).__module__})
    return kind(module, output_layer(module, input_shape))


def output_layer(module: LightningModule, input_shape: tuple[int, ...]) -> nn.Module | None:
    """Return a LightningModule's output layer, or None if unknown; see `lightning_net`.

    Args:
        module: the LightningModule.
        input_shape: shape of one input, without the batch.
    """
    # the user's word goes before any guess
    if isinstance(named := getattr(module, "classifier", None), nn.Module):
        return named
    example = module.example_input_array
    # forward may take a part of a batch, most often the first one
    examples = [*candidates(input_shape), *candidates(tuple(input_shape))] if example is None else [example]
    calls: list[tuple[nn.Module, Any]] = []
    for x in examples:
        calls.clear()
        hooks = [
            each.register_forward_hook(lambda each, _, result: calls.append((each, result)))
            for each in module.modules()
            if each is not module and any(True for _ in each.parameters()) and not isinstance(each, Metric)
        ]
        try:
            with kept_modes(module), torch.no_grad():
                module.eval()
                outputs = logits_of(called(module, x, way_of(module, x)))
        # inputs of another kind: the layer stays unknown, and methods that need it say so
        except Exception:
            continue
        finally:
            for hook in hooks:
                hook.remove()
        # a log_softmax or a sigmoid may follow the last layer, as the parts are never called by themselves
        exact = [each for each, result in calls if result is outputs]
        leaves = [each for each, _ in calls if not any(True for _ in each.children())]
        return exact[0] if exact else leaves[-1] if leaves else None
    return None
