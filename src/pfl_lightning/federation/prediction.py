"""Predict for raw rows with the models that evaluations use for clients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pfl_lightning.client import ClientModule
from pfl_lightning.client.joined_clients import KeptModels, joined_models
from pfl_lightning.client.module import complete, payloads_of
from pfl_lightning.data import CHUNK, ClientData, FederatedDataModule, Samples, TargetScale
from pfl_lightning.data.trees import Tree, rows_in
from pfl_lightning.engines import ClientState, Engine, Job, LocalWork, Sequential
from pfl_lightning.engines.evaluation import OUTPUTS
from pfl_lightning.federation.checkpoint import saved_job
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.nets.item_lists import holds_items
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Task

NEW = "new"
MOST_NAMED = 5
"""Largest number of clients that a warning names."""
"""Name, in place of a client's, for a client that the federation doesn't know."""


class NeedsSamples(MisconfigurationException):
    """Raised where a client's model can't be made without the client's samples, or the server."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise. Not frozen: Lightning refuses that.
@dataclass(eq=False)
class Predictions:
    """One client's predictions, on the CPU; a row of each tensor is a row of the data.

    Args:
        outputs: the model's outputs ``[n, ...]``, such as logits, floating; quantities are in the target's unit.
        classes: the most probable class number of each row ``[n]``, int64, or of each position of a row; for a
            multi-label task the labels ``[n, labels]``, bool; None for a task without classes.
        probabilities: probabilities of the classes ``[n, num_classes]``, or of the labels; None without classes.
        values: predicted quantities ``[n, quantities]``; None for a task with classes.
        class_names: names of the classes by number; empty if classes have numbers alone.
        labels: further columns of the table by name, such as the time after which a forecast begins, from
            `FederatedDataModule.prediction_labels`.
        errors: error of each row ``[n]``, from `Task.row_errors`, such as of a reconstruction; None for other tasks.
    """

    outputs: Tensor
    classes: Tensor | None = None
    probabilities: Tensor | None = None
    values: Tensor | None = None
    class_names: list[str] = field(default_factory=list)
    labels: dict[str, list[Any]] = field(default_factory=dict)
    errors: Tensor | None = None

    def __len__(self) -> int:
        return len(self.outputs)

    def columns(self) -> dict[str, list[Any]]:
        """Return a table as columns by name, for a data frame or a CSV file.

        ``prediction`` has the class, by its name where classes have names, and ``p_CLASS`` a class's probability; a
        regression has ``prediction``, or ``prediction_0``, ``prediction_1``, … for several quantities. A reconstruction
        has ``error``, of the row, alone. The ``labels`` come first.

        Raises:
            MisconfigurationException: if each row has predictions at several positions, such as an image's pixels.
        """
        if self.errors is not None:
            return self.labels | {"error": self.errors.tolist()}
        table = self.outputs if self.values is None else self.values
        if table.dim() > 2 or (self.classes is not None and self.probabilities is not None and table.dim() != 2):
            raise MisconfigurationException(
                f"predictions of shape {list(table.shape)} have several positions a row, which no table of rows holds; "
                "take the tensors, outputs, classes and probabilities"
            )
        if self.classes is None or self.probabilities is None:
            parts = table.view(len(table), -1)
            names = ["prediction"] if parts.shape[1] == 1 else [f"prediction_{k}" for k in range(parts.shape[1])]
            return self.labels | dict(zip(names, parts.T.tolist(), strict=True))
        names = self.class_names or [str(number) for number in range(self.probabilities.shape[1])]
        shares = {f"p_{name}": column for name, column in zip(names, self.probabilities.T.tolist(), strict=True)}
        if self.classes.dim() > 1:
            labels = zip(names, self.classes.T.long().tolist(), strict=True)
            return self.labels | {f"prediction_{name}": column for name, column in labels} | shares
        return self.labels | {"prediction": [names[number] for number in self.classes.tolist()]} | shares


class NoSamples:
    """Stand-in for clients' samples where there are none: any access raises.

    Args:
        task: the prediction task.
        reason: beginning of the sentence.
    """

    is_absent = True

    def __init__(self, task: Task, reason: str) -> None:
        self.task = task
        self.reason = reason

    def parts(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            NeedsSamples: always.
        """
        raise NeedsSamples(
            f"{self.reason}, which aren't in the checkpoint; give the data module of the run, with its data"
        )

    size = parts


def no_samples(module: ClientModule, whose: str) -> ClientData:
    """Return a client's data without samples.

    Args:
        module: the client module.
        whose: the client, in words.
    """
    return ClientData(NoSamples(module.task, f"{type(module).__name__} makes the model of {whose} from its samples"), 0)


class Recipe(NamedTuple):
    """How a client's model is made: by which engine, from which state and payload.

    Args:
        engine: an engine around the client module.
        job: the client's job.
        adapts: whether the method adapts the received model before an evaluation; not that of a client that never
            trained.
    """

    engine: Engine
    job: Job
    adapts: bool = True


def kept_model(
    job: Job,
    architecture: int,
    local: int | str,
    inputs: Mapping[str, Any],
    adapts: bool = True,
) -> dict[str, Any]:
    """Return one client's model as plain values and tensors, from which `kept_recipe` makes it again.

    Args:
        job: the client's work.
        architecture: index of the client's network.
        local: the client's name, or its id where clients have no names, in the data that made its inputs.
        inputs: the entry of these data in a checkpoint, by the name of their class.
        adapts: whether the method adapts the model before an evaluation.
    """
    return {
        "client": job.client,
        "architecture": architecture,
        "personal": job.state.personal,
        "payload": job.payload,
        "is_trained": job.state.is_trained,
        "adapts": adapts,
        "round": job.round,
        "seed": job.seed,
        "lr_factor": float(job.lr_factor),
        "local": local,
        "inputs": inputs,
    }


def kept_recipe(engine: Sequential, kept: Mapping[str, Any], samples: ClientData) -> Recipe:
    """Return the recipe of a client with a kept model.

    Args:
        engine: an engine around the client module.
        kept: the result of `kept_model`.
        samples: the client's data.
    """
    state = ClientState(kept["personal"], is_trained=kept["is_trained"])
    job = Job(kept["client"], kept["round"], state, kept["payload"], samples, kept["seed"], kept["lr_factor"])
    return Recipe(engine, job, kept["adapts"])


def become(recipe: Recipe) -> ClientData:
    """Turn the engine's module into the model that evaluations of a client use; return the client's data."""
    engine, job, adapts = recipe
    module = engine.module
    try:
        data = engine.become(job)
    except NeedsSamples:
        # only caches may hold what comes from samples and isn't in the kept model
        if not job.state.is_trained or module.caches:
            raise
        data = job.data
        engine.receive(job, None)
    phases = module.evaluation_phases() if adapts else []
    if phases:
        with torch.enable_grad():
            engine.adapt(phases, job, data)
    return data


def predicted(
    recipe: Recipe,
    x: Tree,
    class_names: Sequence[str],
    scale: TargetScale | None,
    labels: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> Predictions:
    """Return the predictions of a client's model, computed in batches of an evaluation's size.

    Args:
        recipe: the client's recipe.
        x: inputs ``[n, ...]``, as the net takes them; None takes the client's test split.
        class_names: names of the classes.
        scale: mean and deviation of standardised targets, which predictions get back; None for none.
        labels: further columns of the predictions' table.

    Raises:
        MisconfigurationException: if the client has no test split, or batches are lists of items.
    """
    engine, module, job = recipe.engine, recipe.engine.module, recipe.job
    with undisturbed():
        data = become(recipe)
        if x is None:
            held = data.test
        else:
            held = Samples(x, torch.arange(rows_in(x))).to(engine.device, cast(torch.dtype, module.dtype))
        if not len(held):
            raise MisconfigurationException(f"client {job.client} has no test samples to predict for; give data=")

        def forward(part: Tree) -> Tensor:
            with engine.forward_context():
                outputs: Tensor = module(part)
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).cpu()
            return outputs if scale is None else scale.undone(outputs)

        first, _ = next(held.chunks(1))
        if holds_items(first):
            raise MisconfigurationException(
                f"model.net={type(module.net).__name__} takes lists of items, and predictions are a tensor with a row "
                "for each sample; call the net of trainer.client(NAME) with a list of your own."
            )
        size = max(1, min(CHUNK, OUTPUTS // max(1, forward(first).numel())))
        found, errors = [], []
        for part, _ in held.chunks(size):
            outputs = forward(part)
            found.append(outputs)
            # here and not at the end: inputs may be larger than memory
            errors.append(module.task.row_errors(outputs, part))
        whole = torch.cat(found)
        of_rows = None if errors[0] is None else torch.cat(cast(list[Tensor], errors))
    named = {name: list(values) for name, values in labels.items()}
    made = module.task.predictions(whole)
    return Predictions(whole, **made, errors=of_rows, class_names=list(class_names), labels=named)


def with_tests(clients: list[int], data: FederatedDataModule) -> list[int]:
    """Return the clients that have test samples, and warn of the others.

    Args:
        clients: ids of all clients.
        data: the data module.

    Raises:
        MisconfigurationException: if no client has any.
    """
    # a client without test samples must not take the predictions of all others away
    there = [client for client in clients if data.size(client, "test")]
    if not there:
        raise MisconfigurationException("no client has test samples to predict for; give data=, with rows of inputs")
    if out := [data.client_label(client) for client in clients if client not in set(there)]:
        more = f" and {len(out) - MOST_NAMED} more" if len(out) > MOST_NAMED else ""
        rank_zero_warn(f"no test samples to predict for at client {', '.join(out[:MOST_NAMED])}{more}.")
    return there


Batch: TypeAlias = tuple[int | str, Tree, list[str], TargetScale | None, dict[str, list[Any]]]
"""A client's id, or the name of one with a kept model that isn't in the data; the inputs to predict for, None for its
test split; names of the classes; the scale of its targets; and labels of the predictions."""


class Asked:
    """Sized iterable of the clients to predict for, looked up when Lightning's loop begins.

    Only then the checkpoint is loaded, and the data's clients have the ids of the federation.

    Args:
        clients: names or ids, or `NEW`; None takes all clients of the federation. A mapping has each one's own rows.
        rows: raw rows for all of ``clients``; None takes each client's test split.
        data: returns the data module.
        kept: returns the models of clients that may not be in the data, by name.
        tested: takes the ids of the clients that predict for their own test split, before the first prediction.
    """

    def __init__(
        self,
        clients: Iterable[int | str] | Mapping[Any, Any] | None,
        rows: Any,
        data: Callable[[], FederatedDataModule],
        kept: Callable[[], KeptModels],
        tested: Callable[[Sequence[int]], None] = lambda clients: None,
    ) -> None:
        self.clients = clients
        self.rows = rows
        self._data = data
        self._kept = kept
        self._tested = tested

    @cached_property
    def requests(self) -> list[tuple[int | str, Any]]:
        """Ids of the clients, or names of those with kept models alone, each with its raw rows."""
        data = self._data()
        if self.clients is None:
            # ids as they are, since one may be the name of another client
            clients = list(range(data.num_clients))
            return [(client, self.rows) for client in (clients if self.rows is not None else with_tests(clients, data))]
        own = self.clients if isinstance(self.clients, Mapping) else {}
        return [(self._id_of(client, data), own.get(client, self.rows)) for client in self.clients]

    def _id_of(self, client: int | str, data: FederatedDataModule) -> int | str:
        if client == NEW and NEW not in data.client_names:
            return data.num_clients + len(data.newcomers)
        try:
            return data.client_id(client)
        except MisconfigurationException as error:
            if str(client) in self._kept():
                return str(client)
            raise MisconfigurationException(
                f"{error}; a client that the federation doesn't know is client={NEW!r}"
            ) from None

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Batch]:
        data = self._data()
        self._tested([client for client, rows in self.requests if rows is None and isinstance(client, int)])
        for client, rows in self.requests:
            source, local = data, client
            if isinstance(client, str):
                kept = self._kept()[client]
                source, local = data_in(kept["inputs"]), kept["local"]
            elif client >= data.num_clients + len(data.newcomers):
                local = NEW
            x = None if rows is None else source.inputs(rows, local)
            labels = source.prediction_labels(rows, local)
            yield client, x, source.class_names, source.target_scale(local), labels

    def named(self, results: Iterable[Predictions]) -> dict[int | str, Predictions]:
        """Return results by the client's name, or by its id where clients have no names or ids as names.

        Args:
            results: the results in the order of the clients.
        """
        data = self._data()
        names: list[int | str] = [*(data.client_names or range(data.num_clients + len(data.newcomers))), NEW]
        every: Iterable[Any] = names if self.clients is None else self.clients
        named: dict[int | str, Predictions] = {}
        for (id, _), asked, result in zip(self.requests, every, results, strict=False):
            name = id if isinstance(id, str) else names[id]
            named[asked if str(asked) == str(name) else name] = result
        return named


class SavedClients(LightningModule):
    """The clients of a checkpoint, to predict without the run's server.

    Args:
        client: a client module of the checkpoint's method, with the checkpoint's net.
        checkpoint: the loaded checkpoint, of a federation or of a client at its site.
        path: the checkpoint's file, for messages.
        source: the data at a client's site, set up; None predicts without samples.

    Raises:
        MisconfigurationException: if the checkpoint is of no federation, or of another method or net.
    """

    def __init__(
        self,
        client: ClientModule,
        checkpoint: Mapping[str, Any],
        path: str,
        source: FederatedDataModule | None = None,
    ) -> None:
        super().__init__()
        if "federation" not in checkpoint:
            raise MisconfigurationException(f"ckpt_path={path} is not of a federation.")
        self.saved = checkpoint["federation"]
        self.payloads = payloads_of(self.saved)
        self.path = path
        self.source = source
        own = self.saved.get("own", {})
        self.kept: KeptModels = own or joined_models(path, self.saved)
        # ids in a site's data are others than in the federation, so that names of kept models alone count there
        self.data = data_in(checkpoint, **({"clients": [], "num_clients": 0} if own else {}))
        warn_of_trained(self.saved["settings"].get("trainer.evaluate", "before"))
        self.modules_of_clients, checkpoint = client.architectures(), dict(checkpoint)
        # Lightning moves them to the device
        self.architectures = nn.ModuleList(self.modules_of_clients)
        for index, module in enumerate(self.modules_of_clients):
            module.settle_common()
            complete(module, checkpoint, index)
            module.assign(self.saved.get("common", {}).get(index, {}))
        try:
            client.load_state_dict(checkpoint["state_dict"])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise MisconfigurationException(f"ckpt_path={path} holds another method or net: {reason}") from error
        self._engines: dict[int, Sequential] = {}

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> Predictions:
        """Return one client's predictions.

        Args:
            batch: the client's id or name, inputs, names of the classes, the targets' scale, and labels.
            batch_idx: number of the batch.

        Raises:
            NeedsSamples: if the client's model can't be made from the checkpoint alone.
        """
        client, *given = batch
        if isinstance(client, str):
            kept = self.kept[client]
            source, local = self.source, kept["local"]
            samples = self._nothing(client) if source is None else ClientData(source, source.client_id(local))
            return predicted(kept_recipe(self._engine(kept["architecture"]), kept, samples), *given)
        first, total = self.modules_of_clients[0], len(self.payloads)
        if self.saved["clients"].get(client, {}).get("kept") is not None:
            raise MisconfigurationException(
                f"client={client}: its personal entries are at its site and not in {self.path}; predict there, by "
                "pfl-lightning predict --state-dir."
            )
        is_new = client >= total
        index = first.architecture_of(client % total, total)
        samples = self._nothing(client)
        job = (
            self._first_job(client, index, samples)
            if is_new
            else saved_job(self.saved, client, index, self.payloads[client], samples, ())
        )
        return predicted(Recipe(self._engine(index), job, adapts=not is_new), *given)

    def _engine(self, index: int) -> Sequential:
        if index not in self._engines:
            module = self.modules_of_clients[index]
            self._engines[index] = Sequential(module, LocalWork(), self.trainer.precision_plugin)
        return self._engines[index]

    def _nothing(self, client: int | str) -> ClientData:
        """Return a client's data without samples."""
        return no_samples(self.modules_of_clients[0], f"client {client}")

    def _first_job(self, client: int, architecture: int, samples: ClientData) -> Job:
        """Return the job of a new client, with the payload that the checkpoint keeps for one."""
        saved = self.saved
        if not (payload := saved.get("newcomer")):
            raise NeedsSamples(
                f"client={NEW}: the checkpoint has no model for a new client; give the data module of the run, or let "
                "the client join by trainer.join"
            )
        seed = derive_seed(saved["seed"], "join", saved["round"], client)
        state = ClientState(saved["initial"][architecture])
        return Job(client, saved["round"], state, payload, samples, seed, saved["lr_factor"])


def warn_of_trained(evaluate: str) -> None:
    """Warn if a run's figures are of models that aren't kept.

    Args:
        evaluate: the setting ``trainer.evaluate``.
    """
    if evaluate == "after":
        rank_zero_warn(
            "trainer.evaluate=after measures models after local training, which aren't kept; predictions are of the "
            "models before the next round's training."
        )


def data_in(states: Mapping[str, Any], **replaced: Any) -> FederatedDataModule:
    """Return a data module without samples, only to make inputs of raw rows.

    Its class must have been imported: the author of a checkpoint must not choose the code that runs on loading.

    Args:
        states: entries of data modules by the names of their classes, such as a checkpoint.
        **replaced: values in place of those of the class's entry.

    Raises:
        MisconfigurationException: if no such class has been imported, or it makes inputs by code of its own that may
            need the samples.
    """
    classes: list[Any] = [FederatedDataModule]
    for each in classes:
        # the list grows while the loop runs, until it has all descendants
        classes += each.__subclasses__()
    kind: type[FederatedDataModule] | None
    kind = next((each for each in reversed(classes) if each.__qualname__ in states), None)
    if kind is None or not works_alone(kind):
        reason = f"{kind.__qualname__} may need the samples" if kind else "no class of data that it names is imported"
        raise NeedsSamples(
            f"the checkpoint alone can't make inputs of raw rows, as {reason}; give the run's data module"
        )
    return cast(FederatedDataModule, kind.from_state({**states[kind.__qualname__], **replaced}))


def works_alone(kind: type[FederatedDataModule]) -> bool:
    """Return whether a data module's class makes inputs from its entry in a checkpoint, without ``__init__``."""
    # an author's class that takes its entry back knows what its own code needs
    if not kind.load_state_dict.__module__.startswith("pfl_lightning."):
        return True
    fits = kind.fitted_on is not FederatedDataModule.fitted_on and kind.inputs is FederatedDataModule.inputs
    return not fits and all(made.__module__.startswith("pfl_lightning.") for made in (kind.transform, kind.inputs))
