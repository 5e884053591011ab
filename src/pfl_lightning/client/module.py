"""The client module: one client of a federation as a LightningModule, with the hooks of a method's client side."""

import copy
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.optim import SGD, Optimizer
from torchmetrics import Metric, MetricCollection

from pfl_lightning.client.joined_clients import joined_models
from pfl_lightning.client.optimizers import (
    Configured,
    check_first_rate,
    check_optimizer,
    check_schedule,
    checked_optimizer,
    parts_of,
    restricted,
)
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData
from pfl_lightning.data.client_names import client_id
from pfl_lightning.data.files import PLAIN, read_checkpoint
from pfl_lightning.data.target_scale import TargetScale, saved_scale, undone_by
from pfl_lightning.data.trees import rows_in
from pfl_lightning.internals.of_lightning import COMMAND_LINE_NOTES
from pfl_lightning.messages import Message, StateDict, digest, tree_map
from pfl_lightning.nets import CNN, Net, NetFactory
from pfl_lightning.nets.any_module import as_net
from pfl_lightning.nets.base import ModuleFactory, checked_list, checked_net
from pfl_lightning.nets.inputs import InputShape
from pfl_lightning.nets.lightning_net import Deferred, LightningNet, Place, deferring, trains_itself
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import as_call, check_choices, live
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.base import Reduction, number_of_classes, task_for
from pfl_lightning.tasks.own_loss import OwnLoss
from pfl_lightning.tasks.plain import hparams, made

Batch: TypeAlias = tuple[Any, Any]
"""Inputs and targets, each a tensor or a tree of tensors."""
Value = TypeVar("Value")


class ClientSettings(TypedDict, total=False):
    """Settings of `ClientModule`, for the ``**kwargs`` of subclasses."""

    net: list[NetFactory] | NetFactory | ModuleFactory
    input_shape: tuple[int, ...] | dict[str, Any]
    num_classes: int
    optimizer: OptimizerCallable
    lr_scheduler: LRSchedulerCallable | None
    optimizer_lifetime: Literal["round", "run"]
    buffers: Literal["average", "local"]
    assign_nets: Literal["turn", "block"]
    task: Task | None


class ClientModule(LightningModule):
    """A client of a federation, and the hooks of a method's client side.

    The hooks are `loss` or `training_step`, `local_phases`, `is_shared`, `is_personal`, `on_download`, `upload`,
    `configure_aggregator`, and for low-rank adapters `adapter_state`. Without overrides, a client receives a model,
    trains all of it, and sends all of it back.

    **A client is its** ``state_dict``. Engines run many clients through one module, so every entry that a client owns
    is in the ``state_dict``: *shared* (it travels), *personal* (it stays with the client between rounds), or both. What
    each download makes anew is a buffer with ``persistent=False``. No other attribute survives a round. Parameters of
    the net that are frozen (``requires_grad=False``) when the federation is set up are *common*: one copy exists for
    all clients, and it never travels or changes. A parameter frozen later stands still but travels. Buffers of frozen
    layers are like all buffers: running statistics move, and the setting `buffers` decides whether they travel.

    Engines call `on_download` and `upload` in evaluation mode, without gradients and in full precision. They tell the
    module where it is: ``client_id``, ``round`` (from 0), ``num_rounds`` (of the run), ``phase``, ``learning_rate`` of
    the phase, ``steps_done`` (optimizer steps in this round), and ``requested`` (the entries of `offers` that the
    server needs). While `on_download` runs, ``training_follows`` and ``evaluation_follows`` tell the purpose of the
    download, so that a method can skip a pass over the client's samples that the other purpose needs.

    It is a complete LightningModule: a plain ``lightning.Trainer`` can train it further or predict with it.

    Args:
        net: builds the network from the shape of the data: a `Net` class or a function; or a module, of which each
            client module has a copy with the same weights. Any ``nn.Module`` is cut at its output layer, as by
            `cut_net`. A list gives clients different networks, for methods that share only what all have in common.
        assign_nets: deals out a list of networks: ``turn`` gives client i network i modulo their number; ``block``
            gives the first clients the first network, the next ones the second, in blocks of equal size.
        input_shape: shape of one sample, without the batch. The command line takes it and the task from the data. For
            inputs of several tensors, such as dicts, ``data.input_shape`` has an example, by which any module is cut.
        num_classes: number of classes, where the task is classification.
        optimizer: builds the local optimizer from the trained parameters; unused where a subclass overrides
            `configure_optimizers`.
        lr_scheduler: builds the schedule of the learning rate from the optimizer; it steps once a round.
        optimizer_lifetime: ``round`` starts each round with a new optimizer; ``run`` keeps its state with the client.
        buffers: treatment of the net's floating-point buffers (BatchNorm's running statistics): ``average`` shares them
            like parameters, ``local`` leaves them with each client.
        task: the kind of prediction, which is the data module's ``task``. None is ``Classification(num_classes)``.

    Raises:
        MisconfigurationException: if an argument is none of its choices, or the optimizer or schedule refuses its
            settings.
    """

    sends: ClassVar[frozenset[str]] = frozenset({"weights", "num_samples"})
    """Entries of this client's updates."""
    offers: ClassVar[frozenset[str]] = frozenset({"class_counts"})
    """Entries that an update has only if the aggregator needs them, because they reveal something about the data."""
    tells: ClassVar[frozenset[str]] = frozenset({"received_loss", "loss", "loss_squared", "seconds"})
    """Numbers about local training that ``trainer.cohort`` may ask for to choose the clients of a round."""
    logs: ClassVar[frozenset[str]] = frozenset({"loss"})
    """Names of the scalars that `training_step` returns or logs; a deployment's server takes no others from sites."""
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    """Entries that a payload must have."""
    model_needs: ClassVar[frozenset[str] | None] = None
    """Payload entries that a client's model depends on, which checkpoints keep; None stands for all of them."""
    requires: ClassVar[frozenset[str]] = frozenset()
    """Requirements on data and net: ``classes``, one a sample; ``vector features`` ``[n, d]``; a ``body``; lora
    ``adapters``. A net with a body has parameters to train in its ``features``."""
    pools: ClassVar[bool] = False
    """True if one client trains for all in each round, on the training samples of all clients."""
    client_level: ClassVar[bool] = False
    """True if others learn about this client from its ``weights`` alone, as `DPAverage` needs it.

    It isn't inherited: each class sets it, since a subclass may send more.
    """
    example_level: ClassVar[bool] = False
    """True if others learn about its samples through gradients of single samples alone. It isn't inherited either."""
    follows: ClassVar[frozenset[str]] = frozenset()
    """Entries of `sends` that follow from received and trained weights alone, with ``example_level``; not inherited."""
    keeps_rows: bool = False
    """Whether evaluations keep outputs and targets of single rows, as the callback `SampleScores` asks."""
    sends_counts: bool = False
    """Whether metrics of all clients' samples are computed from counts, as at sites, which send no outputs of rows."""
    caches: ClassVar[frozenset[str]] = frozenset()
    """Plain attributes that each round computes anew, such as ``gains`` or ``net.mask``.

    They are functions of the client's state, payload and data. A change of any other attribute ends the run, as it
    would leak from one client to the next. Engine ``vectorised`` refuses training steps that read an attribute which
    differs between clients; let steps read buffers.
    """

    target_scale: TargetScale | None = None
    """Mean and deviation of standardised targets, outside a federation; ``forward`` is of standardised outputs.

    `predict_step`, `validation_step`, `test_step` and `export` give outputs in the target's unit. None where targets
    weren't standardised, and for the global model where each client has its own scale.
    """

    _class_weights: Tensor | None
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _architecture: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keep copies of the constructor's arguments, so that `architectures` can build further modules.

        Copies are taken before any ``__init__`` can change the arguments.
        """
        made = super().__new__(cls)
        vars(made).update(_made_with=(own_containers(args), own_containers(kwargs)), _architecture=0)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with the same builders of nets and optimizers, and without the Trainer."""
        # nobody changes builders, and those of the command line lead to the Trainer, its engines and its open files
        builders = (self._made_with, self.nets, self._build, self.optimizer, self.lr_scheduler)
        memo.update({id(builder): builder for builder in builders})
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def extra_repr(self) -> str:
        """Return the settings that differ from their defaults, for the first lines of the module's text."""
        text = as_call(self).partition("(")[2].removesuffix(")")
        # `hparams` hold a task as plain values, which a checkpoint can have
        return text.replace("task=dict", f"task={type(self.task).__name__}")

    def __init__(
        self,
        # the list first: jsonargparse serialises a value as the first type that accepts it
        net: list[NetFactory] | NetFactory | ModuleFactory = CNN,
        input_shape: tuple[int, ...] | dict[str, Any] = (1, 28, 28),
        num_classes: int = 10,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        optimizer_lifetime: Literal["round", "run"] = "round",
        buffers: Literal["average", "local"] = "average",
        assign_nets: Literal["turn", "block"] = "turn",
        task: Task | None = None,
    ) -> None:
        super().__init__()
        # the order below matters: nets need the task, and `save_hyperparameters` reads the arguments of this very call
        args, kwargs = self._made_with
        if task is None and len(args) < 3 and "num_classes" not in kwargs and trains_itself(first_of(net)):
            # nothing says that samples have classes
            task = OwnLoss()
        self.task = task_for(self, Classification(num_classes) if task is None else made(task))
        # Lightning warns of modules among hyper-parameters, which go below anyway
        built = ["net"] if isinstance(net, nn.Module) else []
        self.save_hyperparameters(ignore=["task", "num_classes", *built])
        # a checkpoint is loaded with `weights_only=True`, which refuses functions and classes
        for name in live(self.hparams):
            del self.hparams[name]
        shape = InputShape.of(input_shape)
        self.hparams.update(hparams(self.task), input_shape=shape.plain())
        self.nets = checked_list(net)
        check_choices(
            "model",
            optimizer_lifetime=(optimizer_lifetime, ("round", "run")),
            buffers=(buffers, ("average", "local")),
            assign_nets=(assign_nets, ("turn", "block")),
        )
        self.assign_nets = assign_nets
        self._build = partial(self.nets[self._architecture], shape, self.task.outputs)
        self.net = self.new_net()
        weighs = isinstance(self.task, Classification) and self.task.class_weights is not None
        # a buffer: clients' weights differ, and engines give each client its own buffers
        own_weights = torch.ones(self.task.outputs) if weighs else None
        self.register_buffer("_class_weights", own_weights, persistent=False)
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.optimizer_lifetime, self.buffers_policy = optimizer_lifetime, buffers
        self.phase = Phase()
        self.requested = self.withheld = frozenset[str]()
        self._logged: dict[str, Tensor] | None = None
        self._doubts: list[tuple[Tensor, Callable[..., str], tuple[Tensor, ...]]] | None = None
        self._batch_idx = self.client_id = self.round = self.steps_done = 0
        self.num_rounds, self.learning_rate = 1, 0.0
        self.training_follows = self.evaluation_follows = True
        # before a subclass registers buffers of its own, which `buffers` isn't about
        self._buffer_names = frozenset(name for name, _ in self.named_buffers())
        self.common_names = frozen_names(self, "net")
        self.relied_on, self.settled = set[str](), False
        checked_optimizer(optimizer, list(self.parameters()), "model.optimizer")
        # a subclass's `configure_optimizers` isn't called yet: it may read attributes that its `__init__` sets after
        # this one
        if not self._configures_optimizers():
            check_first_rate(lambda: parts_of(ClientModule.configure_optimizers(self), "model"))
        elif self._net_configures():
            check_own(cast(LightningNet, self.net), optimizer, lr_scheduler)
        if weighs and isinstance(self.net, LightningNet):
            raise MisconfigurationException(
                f"task.class_weights={self.task.class_weights!r} has no effect, as model.net={self.net.features.name} "  # type: ignore[attr-defined]
                "computes its own loss; leave it out, and weight classes in training_step."
            )

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input, with an example of inputs of several tensors."""
        return InputShape.of(self.hparams["input_shape"])

    @property
    def num_classes(self) -> int:
        """Number of classes of the task.

        Raises:
            MisconfigurationException: if samples have no classes.
        """
        return number_of_classes(self.task, f"model {type(self).__name__}")

    def new_net(self) -> Net:
        """Build a further net of the same architecture, with initial weights from the global random state.

        Raises:
            MisconfigurationException: if the net takes other arguments, or has no ``features`` and ``classifier`` and
                can't be cut into them.
        """
        shape, outputs = self._build.args[-2:]
        try:
            built = self._build()
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            raise MisconfigurationException(
                f"model.net can't be built from the input's shape and the number of outputs ({error}); let it take "
                "(input_shape, num_classes), or give a built module from Python."
            ) from error
        net = checked_net(as_net(built, shape, outputs))
        if isinstance(net, LightningNet):
            net.features.method = type(self).__name__
        return net

    def architectures(self) -> list["ClientModule"]:
        """Return one client module per network of the list; the first is this module itself.

        Each further net draws its initial weights with a seed of its own, so that the first net's weights don't depend
        on the length of the list.
        """
        modules = [self]
        for index in range(1, len(self.nets)):
            args, kwargs = own_containers(self._made_with)
            other = type(self).__new__(type(self), *args, **kwargs)
            # set before `__init__`, which builds the network with this index
            vars(other)["_architecture"] = index
            with isolate_rng():
                torch.manual_seed(derive_seed(torch.initial_seed(), "net", index))
                type(self).__init__(other, *args, **kwargs)
            modules.append(other)
        return modules

    def architecture_of(self, client: int, num_clients: int) -> int:
        """Return the index in `architectures` of a client's network.

        Args:
            client: the client's id.
            num_clients: number of clients of the federation.
        """
        return client % len(self.nets) if self.assign_nets == "turn" else client // -(-num_clients // len(self.nets))

    def settle_common(self) -> None:
        """Fix the set of common parameters: all of the net with ``requires_grad=False`` now.

        The trainer calls it when the federation is set up, so that a subclass's constructor and the user's own code
        before ``trainer.fit`` can still freeze layers.

        Raises:
            MisconfigurationException: if ``requires_grad`` changed after the method had built a copy or a vector of the
                net.
        """
        # `add_copy` enters the frozen parameters of its copies under names of their own
        copies = {name for name in self.common_names if not name.startswith("net.")}
        now = frozen_names(self, "net")
        changed = now ^ (self.common_names - copies)
        if late := sorted(name for name in changed if name.startswith(tuple(self.relied_on))):
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__}: requires_grad of {late[0]} was changed after "
                f"{type(self).__name__} had copied what the net trains; let the class or function that builds the net "
                "set it."
            )
        self.common_names = now | copies
        self.settled = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs, as used for evaluation and prediction.

        Args:
            x: inputs ``[n, *input_shape]``.

        Returns:
            Outputs ``[n, ...]``, as the task defines them.
        """
        outputs: Tensor = self.net(x)
        return outputs

    def predicting_module(self) -> nn.Module:
        """Return a module with the present client's outputs of `forward`, for `export`.

        An override of `forward` that branches on the client's state, such as a client that hasn't trained yet, needs
        an override of this hook too: formats for other programs have no such branches. The hook takes the branch once,
        and returns a net, or ``Forward(self, outputs)`` for a method ``outputs`` from inputs to outputs. By
        default it is `forward` itself.
        """
        return Forward(self)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the local objective on one batch.

        An override makes no call of ``.item()`` and counts nothing, so that engines can run many clients at once.

        Args:
            batch: inputs ``[n, *input_shape]`` and targets ``[n, ...]``, each a tensor or a tree of tensors.
            batch_idx: number of the batch.

        Returns:
            ``loss``, which is minimised, and any other scalars. Their means over the round are in its record as
            ``train/NAME``, like those of values given to ``self.log``. An override may return the loss alone.
        """
        x, target = batch
        features = self.net.features(x)
        return {"loss": self.loss(features, self.net.classifier(features), target)}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Add a scalar to the results of `training_step` in a federation; elsewhere call Lightning's ``log``.

        Args:
            name: its name in the record; ``train/`` in front of it is optional.
            value: a scalar.
            *args: as for Lightning's ``log``; without effect in a federation.
            **kwargs: the same by name.
        """
        # engines set a dict around each step: Lightning's own `log` needs its own loops, and can't run under vmap
        if self._logged is None:
            super().log(name, value, *args, **kwargs)
        else:
            self._logged[name.removeprefix("train/")] = torch.as_tensor(value).detach()

    def loss(self, features: Tensor, logits: Tensor, target: Any) -> Tensor:
        """Return the task's loss, which is cross-entropy for classification; methods add their terms.

        Args:
            features: the classifier's input ``[n, d]``.
            logits: the classifier's output ``[n, outputs]``.
            target: the task's targets; class numbers ``[n]`` for classification.
        """
        return self.task_loss(logits, target)

    def task_loss(self, outputs: Tensor, target: Any, reduction: Reduction = "mean") -> Tensor:
        """Return the task's loss for local training, with the client's class weights if the task has them.

        Args:
            outputs: the outputs ``[n, outputs]``, of the net or of other weights in it.
            target: the task's targets.
            reduction: the mean over the errors that the task's `Task.weight` counts, or their sum.
        """
        if isinstance(outputs, Deferred):
            loss, logged = outputs.loss(target, self.place("train"), self._batch_idx)
            # losses in evaluation mode are of no step, such as those in a download
            if self._logged is not None or self.training:
                for name, value in logged.items():
                    self.log(name.removeprefix("train_"), value)
            return loss if reduction == "mean" else loss * self.task.weight(target)
        if isinstance(self.net, LightningNet):
            raise MisconfigurationException(
                f"model {type(self).__name__} computes a loss of outputs, and model.net={self.net.features.name} has "
                f"its own by its training_step; override training_step of {type(self).__name__}, give the network "
                "without its training, or take a method of loss and weights, such as FedAvg, FedPer or Ditto."
            )
        if self._class_weights is None:
            return self.task.loss(outputs, target, reduction)
        return cast(Classification, self.task).loss(outputs, target, reduction, self._class_weights)

    def local_phases(self) -> list[Phase]:
        """Return the phases of local training in a round, in order; by default one phase with all parameters."""
        return [Phase()]

    def evaluation_phases(self) -> list[Phase]:
        """Return the phases of training before each evaluation; by default none.

        They run on a copy of the client's model, as MAML-like methods need it. The record's columns ``val`` and
        ``test`` are then of the adapted model, ``val_received`` and ``test_received`` of the same model before these
        phases.
        """
        return []

    def joining_phases(self) -> list[Phase]:
        """Return the phases of a newcomer's training when the run is over; by default `local_phases`.

        Override it where the paper trains newcomers otherwise, such as the classifier alone on finished features. The
        resulting model is evaluated without `evaluation_phases`.
        """
        return self.local_phases()

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        """Return the gradients for the optimizer's step; by default the loss's own.

        Clipping comes later. An override may read parameters and buffers but changes none, so that engines can call it
        for many clients at once.

        Args:
            gradients: gradients by parameter name, such as ``net.classifier.bias``; of parameters in the loss alone.

        Returns:
            Gradients with the same names and shapes.
        """
        return gradients

    def is_shared(self, name: str) -> bool:
        """Return whether an entry of the ``state_dict`` travels; by default all of the net except common entries.

        Args:
            name: name of the entry, such as ``net.classifier.weight``.
        """
        stays = self._buffer_names if self.buffers_policy == "local" else ()
        return name.startswith("net.") and name not in stays and name not in self.common_names

    def is_personal(self, name: str) -> bool:
        """Return whether an entry of the ``state_dict`` stays with its client between rounds; by default unless shared.

        Args:
            name: name of the entry.
        """
        return not self.is_shared(name) and name not in self.common_names

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the server's payload; the personal entries are already in place.

        Engines call it before local training and before each evaluation of the model as received. A pass over the
        client's samples that serves one purpose alone is best skipped where ``training_follows`` or
        ``evaluation_follows`` is false. `evaluation_phases` count as training. One download may serve several clients
        with the same state and payload if it looks at none of them.

        Args:
            payload: the aggregator's payload for this client.
            data: the client's data on the module's device; None outside a federation.
        """
        self.assign(payload["weights"])

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the current shared entries of the ``state_dict``, by name, as references."""
        return {n: t for n, t in self.state_dict().items() if self.is_shared(n) and n not in self.common_names}

    def adapter_state(self) -> StateDict:
        """Return what the client's folder of adapters has in place of the net's own adapters; by default nothing.

        The folder, as `save_adapters` and callback `AdapterFolders` write it, is then ``net.adapted``, and
        ``peft.PeftModel.from_pretrained(base, folder)`` has the outputs of `forward`. An override of `forward` that
        computes with more than the net's adapters is promised no folder without an override of this hook: it is
        refused by name. What nobody sees is a net whose own layers add something beside its ``PeftModel``.

        Returns:
            Adapters by name in the net, such as ``features.0.lora_A.default.weight``. Factors may have another rank
            than the net's, and each layer keeps the scale of its product.

        Raises:
            MisconfigurationException: by overrides whose `forward` no folder of peft gives.
        """
        return {}

    def upload(self, data: ClientData) -> Message:
        """Return the client's update after local training, with an entry for each name in `sends`.

        References will do: the engine copies them.

        Args:
            data: the client's data.
        """
        update: Message = {"weights": self.shared_state()}
        # `DPAverage` withholds the count: how many samples a client has is private, and its mean doesn't use it
        if "num_samples" not in self.withheld:
            size = data.size("train")
            # the numbers of many clients at once are a tensor; `torch.as_tensor` takes four times as long
            update["num_samples"] = size if isinstance(size, Tensor) else torch.scalar_tensor(size, dtype=torch.int64)
        return update | ({"class_counts": data.class_counts} if "class_counts" in self.requested else {})

    def warn_if(self, doubt: Tensor, text: Callable[..., str], *numbers: Tensor) -> None:
        """Warn of a client where a flag is set; a hook marked by `at_once` can't ask for the flag's value itself.

        Args:
            doubt: the flag, a boolean scalar.
            text: returns the warning from the numbers, at a time when ``client_id`` is the client's.
            *numbers: scalars for the text.
        """
        if self._doubts is not None:
            self._doubts.append((doubt, text, numbers))
        # one boolean to wait for on a GPU
        elif doubt:
            rank_zero_warn(text(*map(float, numbers)))

    def configure_aggregator(self) -> Any:
        """Return the `Aggregator` for this client module, unless the user chooses another.

        Raises:
            MisconfigurationException: if the client module names none.
        """
        raise MisconfigurationException(
            f"{type(self).__name__} names no server side; let its configure_aggregator return an Aggregator, or "
            "subclass FedAvg, whose server averages."
        )

    def configure_metrics(self) -> MetricCollection | Metric:
        """Return the metrics of a client's evaluation, each one number from outputs and targets; by default the task's.

        A client with an undefined (NaN) metric is left out of that metric's mean over clients.
        """
        return self.task.configure_metrics()

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return a new optimizer for one phase of local training.

        It is built by the setting ``optimizer`` or by an overridden `configure_optimizers`, without the parameters that
        the phase leaves still.

        Args:
            phase: the phase.
            parameters: the parameters that the phase trains.

        Raises:
            MisconfigurationException: if `configure_optimizers` returns an optimizer without any of ``parameters``.
        """
        if not self._configures_optimizers():
            return self.optimizer(parameters)
        if not self._net_configures():
            return restricted(self.configured(), parameters, phase.name)
        # the net, or a copy with weights of its own, such as a personal one
        nets = [each for each in self.modules() if isinstance(each, LightningNet)]
        owned = [(each, {id(parameter) for parameter in each.parameters()}) for each in nets]
        trained = {id(parameter) for parameter in parameters}
        net = next((each for each, own in owned if trained <= own), None)
        if net is None:
            raise MisconfigurationException(
                f"model {type(self).__name__} trains parameters beside those of model.net={self.net.features.name} in "
                f"its phase {phase.name!r}, and {self.net.features.name}.configure_optimizers has none of them; leave "
                "it out and set model.optimizer."
            )
        return restricted(self.configured(net), parameters, phase.name)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all trainable parameters, with a schedule of the learning rate if there is one.

        Clients train by an override: one optimizer, with one schedule or none, in any of Lightning's forms. The
        schedule steps once a round. Engines call it for each client and phase, so let it be quick and draw no random
        numbers.
        """
        if self._net_configures():
            return cast(LightningNet, self.net).configure_optimizers(self.place("train"))
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def _configures_optimizers(self) -> bool:
        """Return whether `configure_optimizers` is overridden: in the class, on the object, or by the net."""
        return self._has_own_optimizers() or self._net_configures()

    def _has_own_optimizers(self) -> bool:
        """Return whether `configure_optimizers` is overridden in the class or on the object."""
        own = type(self).configure_optimizers is not ClientModule.configure_optimizers
        return own or "configure_optimizers" in vars(self)

    def _net_configures(self) -> bool:
        """Return whether optimizers are those of the net, a LightningModule; an override here goes before it."""
        by_net = isinstance(self.net, LightningNet) and self.net.features.has("configure_optimizers")
        return by_net and not self._has_own_optimizers()

    def place(self, stage: str) -> Place:
        """Return the stand-in for the Trainer, for a LightningModule as the net.

        Args:
            stage: ``train``, ``validate`` or ``test``.
        """
        return Place(self.round, self.num_rounds, stage)

    @property
    def measures_itself(self) -> bool:
        """Whether evaluations take the values logged by a LightningModule, the net or a copy."""
        if not isinstance(self.net, LightningNet):
            return False
        return isinstance(self.task, OwnLoss) or any(map(self.net.features.has, ("validation_step", "test_step")))

    def configured(self, net: LightningNet | None = None) -> Configured:
        """Return the optimizer and schedule from `configure_optimizers`, and the learning rates before the schedule.

        Args:
            net: the LightningModule whose ``configure_optimizers`` counts; None takes the client module's.

        Raises:
            MisconfigurationException: if it returns several optimizers or schedules, or none.
        """
        if self._net_configures():
            net = net or cast(LightningNet, self.net)
            returned = net.configure_optimizers(self.place("train"))
            return parts_of(returned, f"{net.features.name}.configure_optimizers")
        if self._configures_optimizers():
            return parts_of(self.configure_optimizers(), f"{type(self).__name__}.configure_optimizers")
        made = parts_of(self.configure_optimizers(), "model")
        # some schedules, such as OneCycleLR, overwrite the optimizer's learning rate; engines multiply that of the
        # setting
        plain = self.optimizer([p for p in self.parameters() if p.requires_grad])
        return made._replace(rates=[group["lr"] for group in plain.param_groups])

    def check_optimizers(self, rounds: int) -> None:
        """Check the optimizer and schedule of `configure_optimizers` before training.

        Args:
            rounds: number of rounds to be run; 0 checks no learning rate of the schedule yet.

        Raises:
            MisconfigurationException: if the optimizer can't be used, or the schedule ends before the run.
        """
        made = self.configured()
        if self._configures_optimizers():
            check_optimizer(made.optimizer, self.parameters(), made.source)
            if self.lr_scheduler is not None and made.scheduler is None:
                raise MisconfigurationException(
                    f"{made.source} gives no schedule, so that model.lr_scheduler has no effect; leave it out, or "
                    "return {'optimizer': ..., 'lr_scheduler': self.lr_scheduler(optimizer)}."
                )
        check_schedule(made, rounds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint without frozen weights by this model's own.

        Args:
            checkpoint: the checkpoint, completed in place.
        """
        complete(self, checkpoint)
        # a checkpoint from a site is of a single client
        own = list(checkpoint.get("federation", {}).get("own", {}).values())
        self.target_scale = saved_scale(own[0]["inputs"], own[0]["local"]) if own else saved_scale(checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the targets' scale to a checkpoint of a plain ``lightning.Trainer``; a federation's has its data's entry.

        Args:
            checkpoint: the checkpoint, completed in place.
        """
        if (scale := self.target_scale) is not None:
            moments = {"target_mean": scale.mean, "target_deviation": scale.deviation}
            named = {name: {str(place): number for place, number in enumerate(own)} for name, own in moments.items()}
            checkpoint["target_scale"] = {"preprocessing": named}

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the outputs for a batch of inputs, or of inputs and targets, in the target's unit.

        Args:
            batch: inputs, or a list or tuple that begins with inputs.
            batch_idx: number of the batch.
        """
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        return self._in_units(self(x))

    def _in_units(self, values: Tensor) -> Tensor:
        """Return outputs or targets in the target's unit, at least in single precision."""
        if self.target_scale is None:
            return values
        # half precision has three digits, too few for 300,000 dollars
        return self.target_scale.undone(values.to(torch.promote_types(values.dtype, torch.float32)))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics ``val/…``, under a plain ``lightning.Trainer``.

        Args:
            batch: inputs and targets.
            batch_idx: number of the batch.
        """
        self._measure(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics ``test/…``, under a plain ``lightning.Trainer``.

        Args:
            batch: inputs and targets.
            batch_idx: number of the batch.
        """
        self._measure(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all batches."""
        self._log_measured("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of all batches."""
        self._log_measured("test")

    def _measure(self, batch: Batch, split: str) -> None:
        """Log a batch's loss, and add the batch to the metrics."""
        x, target = batch
        outputs = self(x)
        outputs = self._in_units(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        target = target if self.target_scale is None else self._in_units(target)
        loss = self.task.loss(outputs, target)
        super().log(f"{split}/loss", loss, on_step=False, on_epoch=True, batch_size=rows_in(target))
        # past nn.Module, which would make a submodule of the metrics and so change the modules that engines see
        if "_measured" not in vars(self):
            vars(self)["_measured"] = MetricCollection([self.configure_metrics()]).to(self.device)
        vars(self)["_measured"].update(outputs, target)

    def _log_measured(self, split: str) -> None:
        """Log the metrics of all batches of a split, and forget them."""
        if (metrics := vars(self).pop("_measured", None)) is not None:
            for name, value in metrics.compute().items():
                super().log(f"{split}/{name}", value, on_step=False, on_epoch=True)

    def export(self, path: str | Path) -> None:
        """Write this model to a file for use without this package: from inputs as the net takes them to outputs.

        What makes inputs of raw rows, such as scaling and codes of texts, is not in the file; outputs are those of the
        net, such as logits, and in the target's unit where targets were standardised. ``.pt2`` is torch's own format
        (``torch.export.load(path).module()``), ``.ts`` is TorchScript (``torch.jit.load``), and ``.onnx`` needs the
        extra ``onnx``.

        Args:
            path: the file; its ending names the format.

        Raises:
            MisconfigurationException: if there is no such format, a package is missing, or the net doesn't allow it, as
                where the file's outputs aren't the net's for other inputs than those that it was made with.
        """
        kind = Path(path).suffix
        if kind not in (".pt2", ".ts", ".onnx"):
            raise MisconfigurationException(f"path={str(path)!r} must end in .pt2, .ts or .onnx, the format to write.")
        if kind == ".onnx" and (lacking := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]):
            raise MisconfigurationException(
                f"path={str(path)!r}: ONNX needs the package {lacking[0]}; pip install 'pfl-lightning[onnx]', or take "
                ".pt2."
            )
        # two rows: one would be taken for a constant
        shape = self.input_shape
        example = torch.zeros(2, *shape, device=self.device, dtype=cast(torch.dtype, self.dtype))
        if shape.example is not None:
            example = tree_map(lambda t: t.to(self.device), shape.example)
        # frozen, as TorchScript takes no parameters for constants that could still be trained
        client = copy.deepcopy(self).eval().requires_grad_(False)
        # a hook is of the outputs of its own class and of those above
        knows = next(kind for kind in type(self).__mro__ if vars(kind).keys() & {"forward", "predicting_module"})
        model = client.predicting_module() if "predicting_module" in vars(knows) else Forward(client)
        if self.target_scale is not None:
            wide = torch.promote_types(cast(torch.dtype, self.dtype), torch.float32)
            model = InUnits(model, self.target_scale, wide).to(self.device)
        model.eval()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # TorchScript is deprecated, and there are programs that read nothing else
                warnings.simplefilter("ignore")
                if kind == ".ts":
                    script = traced(model, example)
                    compare(model, script, example)
                    script.save(str(path))
                else:
                    program = exported(model, example)
                    compare(model, program.module(), example)
                    if kind == ".pt2":
                        torch.export.save(program, str(path))
                    else:
                        # one file, where torch would write the weights into a second one; it has 2 GB at most
                        torch.onnx.export(program, f=str(path), external_data=False, verbose=False)
        # torch raises many types for what it can't write
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__} can't be exported to {kind}: {reason}."
            ) from error

    @torch.no_grad()
    def assign(self, entries: Mapping[str, Tensor]) -> None:
        """Copy tensors into the entries of the same names.

        Args:
            entries: tensors by name.

        Raises:
            MisconfigurationException: if an entry doesn't exist or has another shape.
        """
        # `state_dict()` takes long, and many methods have no personal entries
        own = self.state_dict() if entries else {}
        for name, tensor in entries.items():
            # checked here, since `copy_` would broadcast a smaller tensor in silence
            if name not in own or own[name].shape != tensor.shape:
                is_there = f"of shape {tuple(own[name].shape)}" if name in own else f"not in {sorted(own)}"
                raise MisconfigurationException(
                    f"client {self.client_id}, {type(self).__name__}.assign: {name!r} of shape {tuple(tensor.shape)} "
                    f"is {is_there} in the client's state_dict; take names from named_parameters(), and for entries of "
                    "a payload, let the aggregator send what upload gave it, by the same names."
                )
            own[name].copy_(tensor)

    def receive(self, personal: Mapping[str, Tensor], payload: Message, data: ClientData | None) -> None:
        """Load a client's personal entries, then the server's payload; `become` also gives the module the client's id.

        Args:
            personal: the client's personal entries, by name.
            payload: the aggregator's payload for the client.
            data: the client's data; None outside a federation.
        """
        # the weights are of local training alone, which needs samples
        if self._class_weights is not None and data is not None and not data.is_absent:
            weights = cast(Classification, self.task).weights(data.class_counts)
            self._class_weights.copy_(weights)
        self.assign(personal)
        if not isinstance(self.net, LightningNet):
            self.on_download(payload, data)
            return
        # what a method computes here of its net's outputs can be a loss alone
        with deferring(self, self.place("train")):
            self.on_download(payload, data)

    @torch.no_grad()
    def become(
        self,
        client: int,
        round: int,
        personal: Mapping[str, Tensor],
        payload: Message,
        data: ClientData | None = None,
        *,
        training_follows: bool = True,
        evaluation_follows: bool = True,
        is_trained: bool = False,
        steps_done: int = 0,
    ) -> None:
        """Turn this module into one client: the only way, of engines, predictions, checkpoints and sites.

        Args:
            client: the client's id.
            round: the round's number, from 0.
            personal: as for `receive`.
            payload: as for `receive`.
            data: as for `receive`.
            training_follows: whether local training may follow.
            evaluation_follows: whether an evaluation may follow.
            is_trained: whether ``personal`` is the whole model, trained after the payload had come; then it stays as it
                is.
            steps_done: the client's optimizer steps so far in this round.
        """
        # past nn.Module.__setattr__, which searches parameters and buffers first, once per client and attribute
        table = vars(self)
        table.update(client_id=client, round=round, steps_done=steps_done)
        table.update(training_follows=training_follows, evaluation_follows=evaluation_follows)
        try:
            self.receive(personal, payload, data)
        finally:
            # for other callers of `receive`, after which both may follow
            table.update(training_follows=True, evaluation_follows=True)
        if is_trained:
            own = self.state_dict()
            # unchanged entries stay, as an own `assign` may forget what came with the payload
            self.assign({name: t for name, t in personal.items() if not torch.equal(own[name], t.to(own[name]))})

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, client: int | str | None = None, **kwargs: Any
    ) -> Any:
        """Load a model from a federation's checkpoint, for use without a federation.

        The result is an ordinary LightningModule: a plain ``lightning.Trainer`` fits, validates, tests and predicts
        with it. A method that fits a client's model to its samples before evaluations, such as Per-FedAvg or kNN-Per,
        has no samples here; ``trainer.predict`` and ``trainer.client`` do.

        Args:
            checkpoint_path: a checkpoint of `FederatedTrainer`.
            client: name or id of a client, for its model as the next round would begin with it, or as
                `FederatedTrainer.join` has trained it; None loads the global model.
            *args: as for ``LightningModule.load_from_checkpoint``.
            **kwargs: the same, with ``weights_only=True`` by default; a run from Python needs ``net=`` and
                ``optimizer=`` if they are not the defaults.

        Raises:
            MisconfigurationException: if ``net=`` is missing, or the federation has no such client.
        """
        if cls is ClientModule and (kind := trained_class(checkpoint_path)) is not cls:
            return kind.load_from_checkpoint(checkpoint_path, *args, client=client, **kwargs)
        is_local = isinstance(checkpoint_path, (str, os.PathLike)) and "://" not in str(checkpoint_path)
        if is_local and kwargs.get("weights_only") is not False:
            # refused here in one sentence, where torch's own text advises to load without its safeguard
            read_checkpoint(checkpoint_path, needed=PLAIN)
        try:
            model = super().load_from_checkpoint(checkpoint_path, *args, **{"weights_only": True, **kwargs})
        except (MisconfigurationException, RuntimeError) as error:
            # the error is often PyTorch's list of missing entries, which doesn't say that `net=` is what is missing
            if "net" not in kwargs and (built := net_of_python(checkpoint_path)):
                raise MisconfigurationException(
                    f"{checkpoint_path} is of a run from Python with a net of its own, {built}; give the class or "
                    f"function that built it: {cls.__name__}.load_from_checkpoint(path, net=...)."
                ) from error
            raise
        if client is not None:
            checkpoint = read_checkpoint(checkpoint_path, map_location=model.device, mapped=False)
            saved = saved_client(checkpoint_path, checkpoint["federation"], client, model.architecture_of, model.device)
            model = model.architectures()[saved.architecture].to(model.device)
            model.become_saved(saved)
            model.target_scale = scale_of(checkpoint_path, checkpoint, client)
        return model

    def become_saved(self, saved: "SavedClient") -> None:
        """Turn this module into a client of a checkpoint.

        Args:
            saved: the client, with this module's architecture.

        Raises:
            MisconfigurationException: if the checkpoint left out frozen weights, and those of this net are others.
        """
        self.settle_common()
        if saved.architecture:
            complete(self, {"federation": {"base": saved.base}}, saved.architecture)
        self.assign(saved.common)
        # common entries before the payload, which may be computed from them; no data, since a checkpoint has none
        self.become(saved.client, saved.round, saved.personal, saved.payload, is_trained=saved.is_trained)


# `inspect.signature` of a class prefers `__new__` to `__init__` where one class has both, and completion shows it
ClientModule.__new__.__signature__ = inspect.signature(ClientModule.__init__)  # type: ignore[attr-defined]


def first_of(net: Any) -> Any:
    """Return the first network of the setting ``net``, a builder or a module.

    Args:
        net: a network, or a list of some.
    """
    return net[0] if isinstance(net, list) and net else net


def check_own(net: LightningNet, optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse settings without effect beside a LightningModule's own training.

    Args:
        net: the client module's net.
        optimizer: the setting ``optimizer``.
        lr_scheduler: the setting ``lr_scheduler``.

    Raises:
        MisconfigurationException: if a setting is given.
    """
    default = inspect.signature(ClientModule.__init__).parameters["optimizer"].default
    for name, is_given in (("optimizer", optimizer is not default), ("lr_scheduler", lr_scheduler is not None)):
        if is_given:
            raise MisconfigurationException(
                f"model.{name} has no effect, as model.net={net.features.name} has its own configure_optimizers; leave "
                "one of the two out."
            )


def own_containers(value: Value) -> Value:
    """Return a copy of nested lists, tuples and dicts; all other objects in them stay the same objects.

    >>> kept = {"net": [1, {"hidden": [8]}]}
    >>> copy = own_containers(kept)
    >>> copy["net"][1].pop("hidden"), kept
    ([8], {'net': [1, {'hidden': [8]}]})

    Args:
        value: the value to copy.
    """
    made: Any = value
    # exact types: a subclass, such as a named tuple or a config object, may not take its parts in this way
    if type(made) is dict:
        made = {name: own_containers(part) for name, part in made.items()}
    elif type(made) in (list, tuple):
        made = type(made)(map(own_containers, made))
    return made  # type: ignore[no-any-return]


def frozen_names(module: nn.Module, path: str) -> frozenset[str]:
    """Return the full names of a part's frozen entries.

    These are the parameters with ``requires_grad=False``, and what a layer of such parameters alone adds to its
    ``state_dict`` beside parameters and buffers, such as the scales of quantised weights.

    Args:
        module: the whole module.
        path: the part's name in it.
    """
    part = module.get_submodule(path)
    # a tied parameter counts under each of its names, as it does in the `state_dict`
    parameters = dict(part.named_parameters(remove_duplicate=False))
    names = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    buffers = {name for name, _ in part.named_buffers(remove_duplicate=False)}
    for name in part.state_dict().keys() - parameters.keys() - buffers:
        # the layer that writes an entry is the innermost one whose path the entry's name begins with
        layer, key = part, name
        while (first := key.partition("."))[1] and first[0] in dict(layer.named_children()):
            layer, key = layer.get_submodule(first[0]), first[2]
        own = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
        if own and not any(own):
            names.add(name)
    return frozenset(f"{path}.{name}" for name in names)


def loadable(client: ClientModule) -> StateDict:
    """Return the entries of a client module's ``state_dict`` that it can load, as references.

    Others are what quantised layers add beside their parameters and buffers, which belongs to their frozen weights.
    """
    places = {name for name, _ in client.named_parameters(remove_duplicate=False)}
    places |= {name for name, _ in client.named_buffers(remove_duplicate=False)}
    own = client.state_dict()
    return {name: t for name, t in own.items() if name in places or name.endswith("_extra_state")}


def base_digest(module: nn.Module, names: Collection[str]) -> str:
    """Return the fingerprint of some parameters of a module, in the order of their names.

    Args:
        module: the module.
        names: the parameters' names; of several names of a tied parameter, the first.
    """
    parameters = dict(module.named_parameters())
    return digest([parameters[name] for name in sorted(parameters.keys() & names)])


def complete(client: ClientModule, checkpoint: dict[str, Any], architecture: int = 0) -> None:
    """Add a client module's frozen weights to a checkpoint that was saved without, by ``trainer.checkpoint_common``.

    Args:
        client: the client module.
        checkpoint: the checkpoint; its global model is completed in place.
        architecture: index of the client module's net; all but the first have no entries in the global model.

    Raises:
        MisconfigurationException: if the frozen weights are others than those of the checkpoint's run.
    """
    digests = checkpoint.get("federation", {}).get("base")
    if digests is None:
        return
    state = client.state_dict()
    # not `common_names`: the checkpoint says what its run left out
    absent = (
        {name for name in state if name not in checkpoint["state_dict"]} if architecture == 0 else client.common_names
    )
    if (found := base_digest(client, absent)) != digests[architecture]:
        raise MisconfigurationException(
            f"model.net={type(client.net).__name__}: the checkpoint has no frozen weights "
            f"(trainer.checkpoint_common=false), and those of this net ({found}) are not the run's "
            f"({digests[architecture]}); give the net that the run began with."
        )
    if architecture == 0:
        # references, which cost no memory
        state = loadable(client)
        checkpoint["state_dict"] = {name: checkpoint["state_dict"].get(name, entry) for name, entry in state.items()}


def scale_of(path: str | Path, checkpoint: Mapping[str, Any], client: int | str) -> TargetScale | None:
    """Return the scale of a client's targets from a federation's checkpoint; None where targets are as loaded.

    Args:
        path: the checkpoint's file.
        checkpoint: the checkpoint.
        client: the client's name or id.
    """
    saved = checkpoint["federation"]
    # at a site, and after a join, a client has another place in its own data than in the federation
    kept = saved.get("own", {}).get(str(client))
    if kept is None and client not in payloads_of(saved) and str(client) not in saved.get("names", []):
        kept = joined_models(path, saved).get(str(client))
    return saved_scale(checkpoint, client) if kept is None else saved_scale(kept["inputs"], kept["local"])


class InUnits(nn.Module):
    """A model's outputs in the target's unit.

    Args:
        model: the model, whose outputs are of standardised targets.
        scale: the targets' mean and deviation.
        dtype: type of the result, at least single precision.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, scale: TargetScale, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        # buffers, which go with the model into each format
        for name, numbers in zip(scale._fields, scale, strict=True):
            self.register_buffer(name, torch.tensor(numbers, dtype=dtype))

    def forward(self, x: Any) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.model(x)
        return undone_by(outputs.to(self.mean.dtype), self.mean, self.deviation)


class Forward(nn.Module):
    """A client module's outputs alone, without what else a LightningModule is.

    Args:
        model: the client module.
        outputs: its method from inputs to outputs; None takes its ``forward``.
    """

    def __init__(self, model: ClientModule, outputs: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.net = model.net
        # a submodule would bring the Trainer's hooks along; the net's parameters are found by `net`
        vars(self)["outputs"] = outputs or model

    def forward(self, x: Any) -> Tensor:
        """Return the model's outputs."""
        outputs: Tensor = vars(self)["outputs"](x)
        return outputs


def exported(model: nn.Module, example: Any) -> ExportedProgram:
    """Return a module as a program of ``torch.export`` for any number of rows.

    Args:
        model: the module, from inputs to outputs.
        example: inputs of two rows.
    """
    n = torch.export.Dim("n", min=1)
    return torch.export.export(model, (example,), dynamic_shapes=(tree_map(lambda _: {0: n}, example),))


def traced(model: nn.Module, example: Any) -> torch.jit.ScriptModule:
    """Return a module as TorchScript.

    Args:
        model: the module, from inputs to outputs.
        example: inputs of two rows.
    """
    # a tuple would be several arguments
    trace = partial(torch.jit.trace, example_inputs=(example,), strict=isinstance(example, Tensor))
    try:
        made = trace(model)
    except RuntimeError as error:
        if "stateless" not in str(error):
            raise
        # TorchScript refuses `functional_call`, of which a program has the plain operators
        made = trace(exported(model, example).module())
    return cast(torch.jit.ScriptModule, made)


def compare(model: nn.Module, program: nn.Module, example: Any) -> None:
    """Check that a module's program gives the module's outputs for other inputs than those that it was made with.

    Torch writes what a module computes of plain Python numbers, such as ``len(str(x.sum().item()))``, as constants, and
    TorchScript the branch that was taken.

    Args:
        model: the module, from inputs to outputs.
        program: the module as exported or traced.
        example: inputs of two rows, as the program was made with.

    Raises:
        ValueError: if the outputs differ.
    """
    drawing = torch.Generator().manual_seed(0)

    def other(leaf: Tensor) -> Tensor:
        # numbers, indices, and masks may all be 0 or 1; a mask of zeros would leave no position
        drawn = torch.randint(2, (3, *leaf.shape[1:]), generator=drawing)
        drawn.view(3, -1)[:, 0] = 1
        return drawn.to(leaf)

    inputs = tree_map(other, example)
    for rows in (inputs, tree_map(lambda leaf: leaf[:1], inputs)):
        outputs = []
        for module in (model, program):
            # the same draws, where a prediction is drawn
            with torch.random.fork_rng():
                torch.manual_seed(0)
                outputs.append(module(rows).double())
        own, other_own = outputs
        # far more than rounding, and less than another branch
        tolerance = 0.01 * own.abs().max().item()
        if not torch.allclose(own, other_own, atol=tolerance, equal_nan=True):
            difference = (own - other_own).abs().max().item()
            raise ValueError(
                f"for other inputs its outputs would be wrong by up to {difference:.2g}, as forward computes with "
                "Python numbers (item, len of a text) or branches on values; compute with tensors, as by torch.where"
            )


@dataclass(frozen=True)
class SavedClient:
    """One client's part of a federation's checkpoint.

    Args:
        client: the client's id.
        round: the number of the round that the client would train in next, from 0.
        architecture: index of its network in the client module's ``architectures``.
        common: the common entries of its architecture, where they differ from the global model's.
        personal: its personal entries.
        payload: the payload that it would receive in the next round.
        is_trained: whether ``personal`` is the whole model of a client that joined afterwards, as trained in the end.
        base: fingerprints of all architectures' frozen weights, if the checkpoint has none of these.
    """

    client: int
    round: int
    architecture: int
    common: StateDict
    personal: StateDict
    payload: Message
    is_trained: bool = False
    base: list[str] | None = None


def net_of_python(path: str | Path) -> str:
    """Return the name of a checkpoint's network, if the checkpoint can't rebuild the network; else an empty string.

    A run from Python may take any function as its ``net``, and no function is saved.

    Args:
        path: a checkpoint.
    """
    saved = read_checkpoint(path, needed=PLAIN)
    # a checkpoint of plain Lightning, or a net from the command line, whose configuration is in `hyper_parameters`
    if "federation" not in saved or "net" in saved.get("hyper_parameters", {}):
        return ""
    net: str = saved["federation"].get("settings", {}).get("model.net", "a network of its own")
    return net.split("(")[0]


def trained_class(path: str | Path) -> type[ClientModule]:
    """Return the class of a checkpoint's client module, from a run of the command line.

    Args:
        path: a checkpoint.

    Raises:
        MisconfigurationException: if the checkpoint doesn't name its class, or the class hasn't been imported: the
            author of a checkpoint must not choose the code that runs on loading.
    """
    saved = read_checkpoint(path, needed=PLAIN)
    module, _, name = saved.get("hyper_parameters", {}).get(COMMAND_LINE_NOTES[0], "").rpartition(".")
    if module.startswith("pfl_lightning."):
        import_module(module)
    kind = getattr(sys.modules.get(module), name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, ClientModule):
        return kind
    method = saved.get("federation", {}).get("method", "another method")
    if method.split("+")[0] == ClientModule.__name__:
        return ClientModule
    raise MisconfigurationException(
        f"{path} is of {method}, and ClientModule would receive its models otherwise; call load_from_checkpoint of the "
        "class that was trained, such as FedPer.load_from_checkpoint(path)."
    )


def payloads_of(saved: Mapping[str, Any]) -> dict[int, Message]:
    """Return each client's payload from a checkpoint, which has each different one once.

    >>> payloads_of({"payloads": [{"clients": [[0, 1], [2, 4]], "payload": {}}, {"clients": [[1, 2]], "payload": {}}]})
    {0: {}, 1: {}, 2: {}, 3: {}}

    Args:
        saved: the checkpoint's entry ``federation``; ``clients`` beside a payload are runs of ids, up to an end.
    """
    pairs = ((range(*run), each["payload"]) for each in saved["payloads"] for run in each["clients"])
    return dict(sorted((client, payload) for clients, payload in pairs for client in clients))


def saved_client(
    path: str | Path,
    saved: Mapping[str, Any],
    client: int | str,
    architecture_of: Callable[[int, int], int],
    device: torch.device,
) -> SavedClient:
    """Read one client from a federation's checkpoint.

    Args:
        path: the checkpoint.
        saved: its entry ``federation``.
        client: the client's name or id.
        architecture_of: gives the index of a client's architecture from its id and the number of clients.
        device: the device of tensors that come from another file.

    Raises:
        MisconfigurationException: if the federation has no such client, or its personal entries are kept at a site.
    """
    payloads, others = payloads_of(saved), saved.get("own") or joined_models(path, saved)
    if (kept := others.get(str(client))) and client not in payloads and str(client) not in saved.get("names", []):
        common = saved.get("common", {}).get(kept["architecture"], {})
        personal, payload = (tree_map(lambda t: t.to(device), kept[part]) for part in ("personal", "payload"))
        turn, index = (kept["client"], kept["round"]), kept["architecture"]
        return SavedClient(*turn, index, common, personal, payload, kept["is_trained"], saved.get("base"))
    if isinstance(client, str):
        client = client_id(client, saved.get("names", []), len(payloads))
    if client not in payloads:
        raise MisconfigurationException(f"client={client} is not in {path}: it has clients 0 to {len(payloads) - 1}.")
    architecture = architecture_of(client, len(payloads))
    # a client that has never trained still has the initial personal entries
    record = saved["clients"].get(client, {"personal": saved["initial"][architecture]})
    # in a deployment personal entries never leave their site, and the server saves a name for them only
    if record.get("kept") is not None:
        raise MisconfigurationException(
            f"client={client}: its personal entries are at its site and not in {path}; export its model there."
        )
    common = saved.get("common", {}).get(architecture, {})
    turn, personal = (client, saved["round"]), record.get("personal", {})
    return SavedClient(*turn, architecture, common, personal, payloads[client], base=saved.get("base"))
