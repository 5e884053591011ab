"""The client module: one client of a federation as a LightningModule, and the hooks that methods override."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import Metric, MetricCollection

from pfl_lightning.choices import check_choices
from pfl_lightning.client.arguments import live
from pfl_lightning.client.entries import copy_entries, frozen_names, net_of_python, saved_client
from pfl_lightning.client.optimizers import (
    Configured,
    check_first_rate,
    check_optimizer,
    check_schedule,
    checked_optimizer,
    parts_of,
    restricted,
)
from pfl_lightning.client.phased import Phased, own_containers
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.nets import CNN, Net, NetFactory
from pfl_lightning.nets.base import checked_list, checked_net
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Classification, Task
from pfl_lightning.tasks.base import number_of_classes, task_for
from pfl_lightning.tasks.plain import hparams, made

Batch: TypeAlias = tuple[Any, Any]


class ClientModule(Phased):
    """A client of a federation, and the hooks that a method's client side overrides.

    They are `loss` or `training_step`, `local_phases`, `is_shared`, `is_personal`, `on_download`, `upload` and
    `configure_aggregator`. As they stand, a client receives a model, trains all of it, and sends all of it back.

    **A client is its** ``state_dict``. Engines run many clients through one module, so all that a client owns is an
    entry of it, *shared* (travels), *personal* (stays with its client between rounds), or both. What each download
    makes anew is a buffer registered with ``persistent=False``. Nothing in other attributes survives a round. What the
    net has frozen when the federation is set up (``requires_grad=False``) is *common*: it exists once, never travels or
    changes; a parameter that is frozen after that stands still, and travels. Buffers of frozen layers are as others:
    running statistics move, and `buffers` says what becomes of them.

    Engines call `on_download` and `upload` in evaluation mode, without gradients and in full precision, and tell the
    module where it is: ``client_id``, ``round`` (from 0), ``num_rounds`` (of the run), ``phase``, its
    ``learning_rate``, ``steps_done`` (batches trained in this round), and ``requested`` (of the `offers`). While
    `on_download` runs, ``training_follows`` and ``evaluation_follows`` tell the purpose of the download, so that it can
    leave out a pass over the client's samples that only the other needs.

    As a LightningModule it is complete: a plain ``lightning.Trainer`` can train it further or predict with it.

    Args:
        net: builds the network from the shape of the data: a `Net` class, or a function; a list of them gives clients
            different networks, for methods that share only what all networks have alike.
        assign_nets: how a list of networks is dealt: ``turn`` gives client i the network i modulo their number,
            ``block`` the first clients the first network, the next ones the second, in blocks of one size.
        input_shape: shape of one sample, without the batch. On the command line it and the task come from the data.
        num_classes: number of classes of the task, where that is to classify.
        optimizer: builds the local optimizer from the trained parameters; not used where a subclass overrides
            `configure_optimizers`, which then gives it.
        lr_scheduler: builds the schedule of the learning rate from the optimizer; it steps once a round.
        optimizer_lifetime: ``round`` starts each round with a new one; ``run`` lets its state live on with the client.
        buffers: what becomes of the floating buffers of the net (BatchNorm's running statistics): ``average`` shares
            them like parameters, ``local`` leaves them with each client.
        task: what is predicted: the data module's ``task``. None is ``Classification(num_classes)``.

    Raises:
        MisconfigurationException: if an argument is none of its choices, or the optimizer or the schedule can't be
            used with their settings.
    """

    sends: ClassVar[frozenset[str]] = frozenset({"weights", "num_samples"})
    """Entries of this client's updates."""
    offers: ClassVar[frozenset[str]] = frozenset({"class_counts"})
    """Entries that an update has only where the aggregator needs them, because they reveal something."""
    tells: ClassVar[frozenset[str]] = frozenset({"received_loss", "loss", "loss_squared", "seconds"})
    """Numbers of its training that it gives where ``trainer.cohort`` asks for them to choose the clients of a round."""
    logs: ClassVar[frozenset[str]] = frozenset({"loss"})
    """Scalars that `training_step` returns or logs: of others a deployment's server takes none from sites."""
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    """Entries that a payload must have."""
    requires: ClassVar[frozenset[str]] = frozenset()
    """What it can't do without: ``classes``, one a sample, or ``vector features`` ``[n, d]``."""
    client_level: ClassVar[bool] = False
    """Whether others learn of a client by its ``weights`` alone, as `DPAverage` needs it; each class says so itself."""
    example_level: ClassVar[bool] = False
    """Whether others learn of its samples by gradients of one sample each alone; each class says so itself."""
    caches: ClassVar[frozenset[str]] = frozenset()
    """Plain attributes, such as ``gains`` or ``net.mask``, that each round makes anew from the client's state, payload
    and data. Another one that changes ends the run, as it would be taken from client to client. Engine ``vectorised``
    refuses training steps that read one which differs between clients; let them read buffers."""

    def __init__(
        self,
        # the list first: jsonargparse writes a value as the first type that takes it
        net: list[NetFactory] | NetFactory = CNN,
        input_shape: tuple[int, ...] = (1, 28, 28),
        num_classes: int = 10,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        optimizer_lifetime: Literal["round", "run"] = "round",
        buffers: Literal["average", "local"] = "average",
        assign_nets: Literal["turn", "block"] = "turn",
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.task = task_for(self, Classification(num_classes) if task is None else made(task))
        self.save_hyperparameters(ignore=["task", "num_classes"])
        for name in live(self.hparams):
            del self.hparams[name]
        self.hparams.update(hparams(self.task))
        self.nets = checked_list(net)
        check_choices(
            "model",
            optimizer_lifetime=(optimizer_lifetime, ("round", "run")),
            buffers=(buffers, ("average", "local")),
            assign_nets=(assign_nets, ("turn", "block")),
        )
        self.assign_nets = assign_nets
        self._build = partial(self.nets[self._architecture], tuple(input_shape), self.task.outputs)
        self.net = self.new_net()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.optimizer_lifetime, self.buffers_policy = optimizer_lifetime, buffers
        self.phase = Phase()
        self.requested = self.withheld = frozenset[str]()
        self._logged: dict[str, Tensor] | None = None
        self.client_id = self.round = self.steps_done = 0
        self.num_rounds, self.learning_rate = 1, 0.0
        self.training_follows = self.evaluation_follows = True
        self._buffer_names = frozenset(name for name, _ in self.named_buffers())
        self.common_names = frozen_names(self, "net")
        self.relied_on, self.settled = set[str](), False
        checked_optimizer(optimizer, list(self.parameters()), "model.optimizer")
        # not a subclass's own: what that reads may not be there yet
        check_first_rate(lambda: parts_of(ClientModule.configure_optimizers(self), "model"))

    @property
    def num_classes(self) -> int:
        """Number of classes; a MisconfigurationException where samples have none."""
        return number_of_classes(self.task, f"model {type(self).__name__}")

    def new_net(self) -> Net:
        """A net of the same architecture with weights of its own, drawn from the global random state.

        Raises:
            MisconfigurationException: if it isn't cut in two modules.
        """
        return checked_net(self._build())

    def architectures(self) -> list["ClientModule"]:
        """Return client modules like this one, one a network of the list; the first is this module itself.

        Each of the others draws its weights from a stream of its own, so that those of the first one stay.
        """
        modules = [self]
        for index in range(1, len(self.nets)):
            args, kwargs = own_containers(self._made_with)
            other = type(self).__new__(type(self), *args, **kwargs)
            # which of the networks `__init__` builds
            vars(other)["_architecture"] = index
            with isolate_rng():
                torch.manual_seed(derive_seed(torch.initial_seed(), "net", index))
                type(self).__init__(other, *args, **kwargs)
            modules.append(other)
        return modules

    def architecture_of(self, client: int, num_clients: int) -> int:
        """Which of the ``architectures`` a client has, by its id and the number of clients."""
        return client % len(self.nets) if self.assign_nets == "turn" else client // -(-num_clients // len(self.nets))

    def settle_common(self) -> None:
        """Take as common what the net has frozen now, in the constructor of a subclass or before ``trainer.fit`` too.

        Raises:
            MisconfigurationException: if a copy or a vector of the net, made since, has it otherwise.
        """
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
        """Outputs ``[n, ...]``, as the task has them, of inputs ``[n, *input_shape]``: evaluation and prediction."""
        outputs: Tensor = self.net(x)
        return outputs

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The local objective on one batch.

        Free of ``.item()`` and counters, so that engines can run many clients at once.

        Args:
            batch: inputs ``[n, *input_shape]`` and targets ``[n, ...]``, each a tensor or a tree of them.
            batch_idx: number of the batch.

        Returns:
            ``loss``, which is minimised, and any other scalars; their means over the round are in its record as
            ``train/NAME``, as are those of what is given to ``self.log``. An override may return the loss alone.
        """
        x, target = batch
        features = self.net.features(x)
        return {"loss": self.loss(features, self.net.classifier(features), target)}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Adds to what `training_step` returns, where a federation runs it; elsewhere Lightning's own.

        Args:
            name: its name in the record, without ``train/`` before it.
            value: a scalar.
            *args: what Lightning's takes; without effect in a federation.
            **kwargs: the same by name.
        """
        if self._logged is None:
            super().log(name, value, *args, **kwargs)
        else:
            self._logged[name.removeprefix("train/")] = torch.as_tensor(value).detach()

    def loss(self, features: Tensor, logits: Tensor, target: Any) -> Tensor:
        """The task's loss, of which classification's is cross-entropy; methods add their terms.

        Args:
            features: the classifier's input ``[n, d]``.
            logits: its output ``[n, outputs]``.
            target: as the task has it, class numbers ``[n]`` for classification.
        """
        return self.task.loss(logits, target)

    def is_shared(self, name: str) -> bool:
        """Whether an entry of the ``state_dict`` travels; by default all of the net that isn't common."""
        stays = self._buffer_names if self.buffers_policy == "local" else ()
        return name.startswith("net.") and name not in stays and name not in self.common_names

    def is_personal(self, name: str) -> bool:
        """Whether an entry of the ``state_dict`` stays with its client between rounds; by default what isn't shared."""
        return not self.is_shared(name) and name not in self.common_names

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Take what the server sent; the personal entries are already in place.

        It is called before local training and before each evaluation of the model as received: what takes a pass over
        the client's samples and serves one of the two alone is best left out where ``training_follows`` or
        ``evaluation_follows`` is false. `evaluation_phases` count as training.

        Args:
            payload: the aggregator's payload for this client.
            data: the client's data on the module's device; None outside a federation.
        """
        self.assign(payload["weights"])

    def shared_state(self) -> Mapping[str, Tensor]:
        """The entries of the ``state_dict`` that travel, as they stand; engines may give rows of a stack."""
        return {n: t for n, t in self.state_dict().items() if self.is_shared(n) and n not in self.common_names}

    def upload(self, data: ClientData) -> Message:
        """What goes to the server after local training, with an entry for each name in `sends`.

        References will do: the engine copies them.
        """
        update: Message = {"weights": self.shared_state()}
        if "num_samples" not in self.withheld:
            update["num_samples"] = torch.scalar_tensor(data.size("train"), dtype=torch.int64)
        return update | ({"class_counts": data.class_counts} if "class_counts" in self.requested else {})

    def configure_aggregator(self) -> Any:
        """The `Aggregator` that this client belongs to when no other is chosen.

        Raises:
            MisconfigurationException: if the client module names none.
        """
        raise MisconfigurationException(
            f"{type(self).__name__} names no server side; let its configure_aggregator return an Aggregator, or "
            "subclass FedAvg, whose server averages."
        )

    def configure_metrics(self) -> MetricCollection | Metric:
        """Metrics of one client's evaluation, computed on outputs and targets, each a number; by default the task's.

        A client for which a metric is NaN, because it isn't defined there, is left out of its mean.
        """
        return self.task.metrics()

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return a new optimizer for one phase of local training.

        It is the setting ``optimizer``'s or, where a subclass overrides `configure_optimizers`, that method's, without
        the parameters that the phase doesn't train.

        Args:
            phase: the phase.
            parameters: those that it trains.

        Raises:
            MisconfigurationException: if `configure_optimizers` gives an optimizer of none of them.
        """
        if not self._configures_optimizers():
            return self.optimizer(parameters)
        return restricted(self.configured(), parameters, phase.name)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters that carries the learning rate, and its schedule if there is one.

        An override is what clients train by: one optimizer, with one schedule or none, in any of Lightning's forms. The
        schedule steps once a round. It is called for each client and phase, so let it be quick and draw nothing.
        """
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def _configures_optimizers(self) -> bool:
        """Return whether `configure_optimizers` is overridden, by the class or in the object."""
        own = type(self).configure_optimizers is not ClientModule.configure_optimizers
        return own or "configure_optimizers" in vars(self)

    def configured(self) -> Configured:
        """Return the optimizer and the schedule that `configure_optimizers` makes, and the rates without the schedule.

        Raises:
            MisconfigurationException: if it makes others than one optimizer and at most one schedule.
        """
        if self._configures_optimizers():
            return parts_of(self.configure_optimizers(), f"{type(self).__name__}.configure_optimizers")
        made = parts_of(self.configure_optimizers(), "model")
        # some schedules set rates of their own, such as OneCycleLR, and engines multiply the optimizer's
        plain = self.optimizer([p for p in self.parameters() if p.requires_grad])
        return made._replace(rates=[group["lr"] for group in plain.param_groups])

    def check_optimizers(self, rounds: int) -> None:
        """Check that clients can train by what `configure_optimizers` gives.

        Args:
            rounds: rounds to be run; 0 looks at no rate of the schedule yet.

        Raises:
            MisconfigurationException: if the optimizer can't be used, or its schedule not as long.
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

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Logits of a batch of inputs, or of inputs and targets."""
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        return cast(Tensor, self(x))

    @torch.no_grad()
    def assign(self, entries: Mapping[str, Tensor]) -> None:
        """Copies named tensors into the entries of the same names.

        Raises:
            MisconfigurationException: if there is no such entry, or one of another shape.
        """
        if entries:
            copy_entries(entries, self.state_dict(), f"client {self.client_id}, {type(self).__name__}")

    def receive(self, personal: Mapping[str, Tensor], payload: Message, data: ClientData | None) -> None:
        """Becomes a client: its personal entries, then what the server sends it."""
        self.assign(personal)
        self.on_download(payload, data)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, client: int | None = None, **kwargs: Any) -> Any:
        """A model out of a federation's checkpoint, for use without a federation.

        Args:
            checkpoint_path: a checkpoint of `FederatedTrainer`.
            client: id of the client whose model it shall be, as the next round would hand it over; None gives the
                global model.
            *args: as for ``LightningModule.load_from_checkpoint``.
            **kwargs: the same, but ``weights_only=True`` where it isn't given; a run from Python needs ``net=`` and
                ``optimizer=`` if they are not the defaults.

        Raises:
            MisconfigurationException: if ``net=`` is missing, or there is no such client.
        """
        try:
            model = super().load_from_checkpoint(checkpoint_path, *args, **{"weights_only": True, **kwargs})
        except (MisconfigurationException, RuntimeError) as error:
            if "net" not in kwargs and (built := net_of_python(checkpoint_path)):
                raise MisconfigurationException(
                    f"{checkpoint_path} is of a run from Python, whose net, {built}, isn't the default one; give what "
                    f"built it: {cls.__name__}.load_from_checkpoint(path, net=...)."
                ) from error
            raise
        if client is not None:
            saved = saved_client(checkpoint_path, client, model.architecture_of, model.device)
            model = model.architectures()[saved.architecture].to(model.device)
            model.settle_common()
            model.assign(saved.common)
            model.receive(saved.personal, saved.payload, data=None)
        return model
