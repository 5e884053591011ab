"""Predict for raw rows with the models that evaluations use for clients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pfl_lightning.client import ClientModule
from pfl_lightning.data import CHUNK, ClientData, FederatedDataModule, Samples
from pfl_lightning.data.trees import Tree, rows_in
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.evaluation import OUTPUTS
from pfl_lightning.federation.checkpoint import saved_job
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Task

NEW = "new"
"""Name, in the place of a client's, for a client that the federation doesn't know."""


class NeedsSamples(MisconfigurationException):
    """Raised where a client's model can't be made without the client's samples, or the server."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise. Not frozen: Lightning refuses that.
@dataclass(eq=False)
class Predictions:
    """One client's predictions, on the CPU; a row of each tensor is a row of the data.

    Args:
        outputs: the model's outputs ``[n, ...]``, such as logits, floating.
        classes: the most probable class number of each row ``[n]``, int64, or of each position of a row; for a
            multi-label task the labels ``[n, labels]``, bool; None for a task without classes.
        probabilities: probabilities of the classes ``[n, num_classes]``, or of the labels; None without classes.
        values: predicted quantities ``[n, quantities]``; None for a task with classes.
        class_names: names of the classes by number; empty if classes have numbers alone.
    """

    outputs: Tensor
    classes: Tensor | None = None
    probabilities: Tensor | None = None
    values: Tensor | None = None
    class_names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.outputs)

    def columns(self) -> dict[str, list[Any]]:
        """Return a table as columns by name, for a data frame or a CSV file.

        ``prediction`` has the class, by its name where classes have names, and ``p_CLASS`` a class's probability; a
        regression has ``prediction``, or ``prediction_0``, ``prediction_1``, … for several quantities.

        Raises:
            MisconfigurationException: if each row has predictions at several positions, such as an image's pixels.
        """
        table = self.outputs if self.values is None else self.values
        if table.dim() > 2 or (self.classes is not None and self.probabilities is not None and table.dim() != 2):
            raise MisconfigurationException(
                f"predictions of shape {list(table.shape)} have several positions a row, which no table of rows holds; "
                "take the tensors, outputs, classes and probabilities"
            )
        if self.classes is None or self.probabilities is None:
            parts = table.view(len(table), -1)
            names = ["prediction"] if parts.shape[1] == 1 else [f"prediction_{k}" for k in range(parts.shape[1])]
            return dict(zip(names, parts.T.tolist(), strict=True))
        names = self.class_names or [str(number) for number in range(self.probabilities.shape[1])]
        shares = {f"p_{name}": column for name, column in zip(names, self.probabilities.T.tolist(), strict=True)}
        if self.classes.dim() > 1:
            labels = zip(names, self.classes.T.long().tolist(), strict=True)
            return {f"prediction_{name}": column for name, column in labels} | shares
        return {"prediction": [names[number] for number in self.classes.tolist()]} | shares


class NoSamples:
    """Source of clients' samples where there are none: each access ends the work with a sentence.

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


def become(engine: Sequential, job: Job, is_new: bool) -> ClientData:
    """Turn the engine's module into the model that evaluations of a client use; return the client's data.

    Args:
        engine: an engine around the client module.
        job: the client's job.
        is_new: whether the client never trained: its model is the received one, without an adaptation to its samples.
    """
    data = engine.become(job)
    phases = [] if is_new else engine.module.evaluation_phases()
    if phases:
        with torch.enable_grad():
            engine.adapt(phases, job, data)
    return data


def predicted(engine: Sequential, job: Job, is_new: bool, x: Tree, class_names: Sequence[str]) -> Predictions:
    """Return the predictions of a client's model, computed in batches of an evaluation's size.

    Args:
        engine: an engine around the client module.
        job: the client's job.
        is_new: whether the client never trained.
        x: inputs ``[n, ...]``, as the net takes them; None takes the client's test split.
        class_names: names of the classes.

    Raises:
        MisconfigurationException: if the client has no test split.
    """
    module = engine.module
    with undisturbed():
        data = become(engine, job, is_new)
        if x is None:
            held = data.test
        else:
            held = Samples(x, torch.arange(rows_in(x))).to(engine.device, cast(torch.dtype, module.dtype))
        if not len(held):
            raise MisconfigurationException(f"client {job.client} has no test samples to predict for; give data=")

        def forward(part: Tree) -> Tensor:
            with engine.forward_context():
                outputs: Tensor = module(part)
            return outputs.to(torch.promote_types(outputs.dtype, torch.float32)).cpu()

        first, _ = next(held.chunks(1))
        size = max(1, min(CHUNK, OUTPUTS // max(1, forward(first).numel())))
        whole = torch.cat([forward(part) for part, _ in held.chunks(size)])
    return Predictions(whole, **module.task.predictions(whole), class_names=list(class_names))


Batch: TypeAlias = tuple[int, Tree, list[str]]
"""A client's id, the inputs to predict for, None for its test split, and names of the classes."""


class Asked:
    """Sized iterable of the clients to predict for, looked up when Lightning's loop begins.

    Only then the checkpoint is loaded, and the data's clients have the ids of the federation.

    Args:
        clients: names or ids, or `NEW`; None takes all clients of the federation. A mapping has each one's own rows.
        rows: raw rows for all of ``clients``; None takes each client's test split.
        data: returns the data module.
    """

    def __init__(
        self,
        clients: Iterable[int | str] | Mapping[Any, Any] | None,
        rows: Any,
        data: Callable[[], FederatedDataModule],
    ) -> None:
        self.clients = clients
        self.rows = rows
        self._data = data

    @cached_property
    def found(self) -> list[tuple[int, Any]]:
        """Ids of the clients, each with its raw rows."""
        data = self._data()
        every: Iterable[Any] = range(data.num_clients) if self.clients is None else self.clients
        own = self.clients if isinstance(self.clients, Mapping) else {}
        return [(self._id_of(client, data), own.get(client, self.rows)) for client in every]

    @staticmethod
    def _id_of(client: int | str, data: FederatedDataModule) -> int:
        if client == NEW and NEW not in data.client_names:
            return data.num_clients + len(data.newcomers)
        try:
            return data.client_id(client)
        except MisconfigurationException as error:
            raise MisconfigurationException(
                f"{error}; a client that the federation doesn't know is client={NEW!r}"
            ) from None

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Batch]:
        data = self._data()
        for client, rows in self.found:
            known = client if client < data.num_clients + len(data.newcomers) else NEW
            yield client, None if rows is None else data.inputs(rows, known), data.class_names

    def named(self, results: Iterable[Predictions]) -> dict[int | str, Predictions]:
        """Return results by the client's name, or by its id where clients have no names or ids as names.

        Args:
            results: the results in the order of the clients.
        """
        data = self._data()
        names: list[int | str] = [*(data.client_names or range(data.num_clients + len(data.newcomers))), NEW]
        every: Iterable[Any] = range(data.num_clients) if self.clients is None else self.clients
        found = zip(self.found, every, results, strict=False)
        return {asked if str(asked) == str(names[id]) else names[id]: result for (id, _), asked, result in found}


class SavedClients(LightningModule):
    """The clients of a checkpoint, to predict without the run's data and server.

    Args:
        client: a client module of the checkpoint's method, with the checkpoint's net.
        checkpoint: the loaded checkpoint.
        path: the checkpoint's file, for messages.

    Raises:
        MisconfigurationException: if the checkpoint is of no federation, or of another method or net.
    """

    def __init__(self, client: ClientModule, checkpoint: Mapping[str, Any], path: str) -> None:
        super().__init__()
        if "federation" not in checkpoint:
            raise MisconfigurationException(f"ckpt_path={path} is not of a federation.")
        self.saved = checkpoint["federation"]
        self.path = path
        self.data = data_of(checkpoint)
        warn_of_trained(self.saved.get("settings", {}).get("trainer.evaluate", "before"))
        self.modules_of_clients = client.architectures()
        # Lightning moves them to the device
        self.architectures = nn.ModuleList(self.modules_of_clients)
        for index, module in enumerate(self.modules_of_clients):
            module.settle_common()
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
            batch: the client's id, inputs and the names of classes.
            batch_idx: number of the batch.

        Raises:
            NeedsSamples: if the client's model can't be made from the checkpoint alone.
        """
        client, x, class_names = batch
        first, total = self.modules_of_clients[0], len(self.saved["payloads"])
        name = type(first).__name__
        if self.saved["clients"].get(client, {}).get("kept") is not None:
            raise MisconfigurationException(
                f"client={client}: its personal entries are at its site and not in {self.path}; export its model there."
            )
        is_new = client >= total
        index = first.architecture_of(client % total, total)
        if index not in self._engines:
            module = self.modules_of_clients[index]
            self._engines[index] = Sequential(module, LocalWork(), self.trainer.precision_plugin)
        samples = ClientData(
            NoSamples(first.task, f"{name} makes the model of client {client} from its samples"), client
        )
        job = self._first_job(client, index, samples) if is_new else saved_job(self.saved, client, index, samples, ())
        return predicted(self._engines[index], job, is_new, x, class_names)

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


def data_of(checkpoint: Mapping[str, Any]) -> FederatedDataModule:
    """Return the data module of a checkpoint, without samples, only to make inputs of raw rows.

    Its class must have been imported: the author of a checkpoint must not choose the code that runs on loading.

    Args:
        checkpoint: a loaded checkpoint.

    Raises:
        MisconfigurationException: if no such class has been imported, or it makes inputs by code of its own that may
            need the samples.
    """
    saved = checkpoint["federation"]
    known: list[Any] = [FederatedDataModule]
    for each in known:
        # the list grows while the loop runs, until it has all descendants
        known += each.__subclasses__()
    kind: type[FederatedDataModule] | None
    kind = next((each for each in reversed(known) if each.__qualname__ in checkpoint), None)
    if kind is None or not works_alone(kind):
        reason = f"{kind.__qualname__} may need the samples" if kind else "no class of data that it names is imported"
        raise NeedsSamples(
            f"the checkpoint alone can't make inputs of raw rows, as {reason}; give the run's data module"
        )
    names = {"clients": saved.get("names", []), "num_clients": len(saved["payloads"])}
    return cast(FederatedDataModule, kind.from_state(names | checkpoint[kind.__qualname__]))


def works_alone(kind: type[FederatedDataModule]) -> bool:
    """Return whether a data module's class makes inputs from its entry in a checkpoint, without ``__init__``."""
    # an author's class that takes its entry back knows what its own code needs
    if not kind.load_state_dict.__module__.startswith("pfl_lightning."):
        return True
    fits = kind.fitted_on is not FederatedDataModule.fitted_on and kind.inputs is FederatedDataModule.inputs
    return not fits and all(made.__module__.startswith("pfl_lightning.") for made in (kind.transform, kind.inputs))
