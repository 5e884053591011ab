"""Datasets of LightningDataModules, one for each client, from their loaders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from pfl_lightning.data.datamodule import FederatedDataModule

LOADERS = {
    "train": "train_dataloader",
    "val": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""Methods of a LightningDataModule, by the part of the data."""
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks on batches, for which a federation has no place."""
ADVICE = "or give ClientDatasets the Datasets themselves"


class ModulesData(NamedTuple):
    """The contents of clients' LightningDataModules.

    Args:
        datasets: each client's Datasets by ``train``, ``val`` and ``test``.
        predict: each client's Dataset to predict for, of clients that have one.
        settings: ``batch_size``, ``last_batch``, ``collate_fn`` and ``num_workers`` of all loaders, for
            `ClientDatasets`.
    """

    datasets: dict[Any, dict[str, Any]]
    predict: dict[Any, Any]
    settings: dict[str, Any]


def are_modules(given: Any) -> bool:
    """Return whether a value is a mapping or a list of LightningDataModules."""
    held = (
        list(given.values() if isinstance(given, Mapping) else given)
        if isinstance(given, (Mapping, list, tuple))
        else []
    )
    return bool(held) and all(isinstance(each, LightningDataModule) for each in held)


def read_modules(modules: Mapping[Any, LightningDataModule] | Sequence[LightningDataModule]) -> ModulesData:
    """Set clients' LightningDataModules up, and return their Datasets and the settings of their loaders.

    Args:
        modules: a LightningDataModule by the client's name, or a list of them.

    Raises:
        MisconfigurationException: if the value is neither, or if a loader has what clients' training can't carry on.
    """
    if not are_modules(modules):
        raise MisconfigurationException(
            f"datamodule={type(modules).__name__} must be a mapping from clients' names to LightningDataModules, or a "
            "list of them, with at least one."
        )
    pairs = dict(modules) if isinstance(modules, Mapping) else dict(enumerate(modules))
    loaders = {client: loaders_of(client, module) for client, module in pairs.items()}
    trained = {client: own["train"] for client, own in loaders.items()}
    settings = {
        "batch_size": common(trained, "batch_size", lambda loader: loader.batch_size),
        "last_batch": "drop" if common(trained, "drop_last", lambda loader: loader.drop_last) else "keep",
        # workers change no number, so that clients may differ
        "num_workers": max(loader.num_workers for loader in trained.values()),
    }
    used = {(client, part): loader for client, own in loaders.items() for part, loader in own.items()}
    collate = common(used, "collate_fn", lambda loader: loader.collate_fn)
    # torch's default makes the tensors that a federation holds anyway
    settings["collate_fn"] = None if collate is default_collate else collate
    datasets = {
        client: {part: loader.dataset for part, loader in own.items() if part != "predict"}
        for client, own in loaders.items()
    }
    predict = {client: own["predict"].dataset for client, own in loaders.items() if "predict" in own}
    return ModulesData(datasets, predict, settings)


def loaders_of(client: Any, module: LightningDataModule) -> dict[str, Any]:
    """Return a client's loaders by part, after the module's ``prepare_data`` and ``setup``.

    Args:
        client: the client's name.
        module: the LightningDataModule.

    Raises:
        MisconfigurationException: if the module is of a whole federation, trains on nothing, changes batches by hooks,
            or has a loader that can't be carried on.
    """
    whose = f"datamodule: client {client!r}, {type(module).__name__}"
    if isinstance(module, FederatedDataModule):
        raise MisconfigurationException(f"{whose}, holds clients itself; give it alone.")
    if changed := [name for name in TRANSFERS if is_own(module, name)]:
        raise MisconfigurationException(
            f"{whose}: {changed[0]} would never be called; let the Dataset or collate_fn do its work, {ADVICE}."
        )
    there = [part for part, name in LOADERS.items() if is_own(module, name)]
    if "train" not in there:
        raise MisconfigurationException(f"{whose}, has no train_dataloader; give one, or leave the client out.")
    module.prepare_data()
    # as Lightning's Trainer would, each stage once; "fit" also sets up validation
    for stage in ("fit", *(part for part in ("test", "predict") if part in there)):
        module.setup(stage)
    return {part: checked_loader(f"{whose}: {LOADERS[part]}", getattr(module, LOADERS[part])(), part) for part in there}


def is_own(module: LightningDataModule, name: str) -> bool:
    """Return whether a module's class overrides a method, or ``from_datasets`` has set one."""
    return name in vars(module) or getattr(type(module), name) is not getattr(LightningDataModule, name)


def checked_loader(name: str, loader: Any, part: str) -> Any:
    """Return a loader of a Dataset, for the settings common to all clients.

    Args:
        name: the loader's name in messages.
        loader: the loader.
        part: ``train``, ``val``, ``test`` or ``predict``.

    Raises:
        MisconfigurationException: if there is more to it.
    """
    # a list of one, as older code returns it
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        (loader,) = loader
    if not isinstance(loader, DataLoader):
        count = f"{len(loader)} loaders" if isinstance(loader, (list, tuple, dict)) else f"a {type(loader).__name__}"
        raise MisconfigurationException(f"{name} gives {count}; give one DataLoader, {ADVICE}.")
    sampler: Any = loader.sampler
    lost = ""
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        lost = f"{type(loader.batch_sampler).__name__} as batch_sampler" if loader.batch_sampler else "batch_size=None"
    elif type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
        lost = f"{type(sampler).__name__} as sampler"
    elif len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        lost = f"a sampler of {len(sampler)} samples"
    if lost:
        raise MisconfigurationException(
            f"{name} has {lost}, and each round draws batches of a client's samples by data.batch_size; leave it out, "
            f"{ADVICE}."
        )
    if part == "train" and type(sampler) is SequentialSampler:
        raise MisconfigurationException(
            f"{name} keeps an order, and each local epoch draws a new one; give shuffle=True, {ADVICE}."
        )
    return loader


def common(loaders: Mapping[Any, Any], name: str, value_of: Callable[[Any], Any]) -> Any:
    """Return a setting that all loaders share.

    Args:
        loaders: the loaders by client, or by client and part.
        name: the setting's name.
        value_of: returns a loader's value.

    Raises:
        MisconfigurationException: if two loaders differ.
    """
    (first, loader), *others = loaders.items()
    value = value_of(loader)
    for client, other in others:
        if value_of(other) != value:
            shown = " and ".join(
                f"{words(each)} of {label(whose)}" for whose, each in ((first, value), (client, value_of(other)))
            )
            raise MisconfigurationException(
                f"datamodule: loaders have {name}={shown}, and all clients share one; give the same, {ADVICE}."
            )
    return value


def label(whose: Any) -> str:
    """Return a client, or a client and the part, in words."""
    return " of client ".join(map(str, reversed(whose))) if isinstance(whose, tuple) else f"client {whose!r}"


def words(value: Any) -> str:
    """Return a setting's value: a function by its name."""
    return str(getattr(value, "__qualname__", value))
