"""The base class of data with named clients, for any task."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule, SplitSettings, net_inputs
from pfl_lightning.data.division import Division
from pfl_lightning.data.partitioners import Natural, Partitioner
from pfl_lightning.data.preprocessing import trained_on
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.trees import Tree, mapped, read, with_leaves
from pfl_lightning.messages import tree_map
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import OwnLoss, Regression, Task
from pfl_lightning.tasks.plain import plain

RESIDENT = 2**30
"""Bytes of inputs up to which files are read once and kept in memory; larger inputs are read one client at a time."""
LARGE = 100
"""Root mean square of a regression's targets above which a warning is shown."""
BY_SETTING = "data.standardize_target=table or client brings them to mean 0 and deviation 1 while a net learns"
BY_TABLE = (
    "give a data frame or a file to TableData, whose standardize_target brings targets to mean 0 and deviation 1 while "
    "a net learns, and predictions back to their unit; or give targets in a larger unit"
)


class SourceSettings(SplitSettings, total=False):
    """Settings of `FederatedDataModule` but for those of a division, which has other defaults here."""

    root: str


class OwnedSettings(SourceSettings, total=False):
    """Settings of `FederatedDataModule` but for ``partitioner``, for data whose smallest clients can't be split."""

    num_clients: int | None


class OwnedData(FederatedDataModule):
    """Data of any task, by default divided among the clients that the data name, all of them.

    Args:
        task: the prediction task.
        num_clients: number of clients M; None takes all named clients, a number draws this many of them.
        partitioner: how the pool is divided among the clients.
        **kwargs: settings of `FederatedDataModule`.
    """

    def __init__(
        self,
        task: Task,
        num_clients: int | None = None,
        partitioner: Partitioner = Natural(),  # noqa: B008 - immutable, and a literal for --print_config
        **kwargs: Unpack[SourceSettings],
    ) -> None:
        if not isinstance(task, Task):
            raise MisconfigurationException(
                f"data.task={getattr(task, '__name__', repr(task))} must be a task of pfl_lightning.tasks, such as "
                "Regression() or Classification(num_classes=10)"
            )
        if "standardize_target" in kwargs:
            raise MisconfigurationException(
                f"data.standardize_target is a setting of tables, and none of {type(self).__name__}; {BY_TABLE}"
            )
        super().__init__(num_clients=num_clients, partitioner=partitioner, **kwargs)
        self._task = task
        # without classes there is no number of classes, and the attribute stays unset
        if task.has_classes:
            self.num_classes = task.outputs

    def __getattr__(self, name: str) -> Any:
        """Raise the error of a missing attribute; for ``num_classes`` with the argument of client modules.

        Args:
            name: the attribute.

        Raises:
            AttributeError: always.
        """
        hint = "; without classes, make the client module with task=data.task" if name == "num_classes" else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    @property
    def task(self) -> Task:
        """The prediction task."""
        return self._task

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Warn of quantities too large for a loss of squares; see `FederatedDataModule.preprocess`.

        Args:
            samples: the pool, as loaded.
            division: the pool positions of each client's rows.
        """
        if type(self.task) is Regression and isinstance(samples.y, Tensor):
            quantities = samples.y[trained_on(division)]
            warn_of_targets(quantities.reshape(len(quantities), -1), ["y"], BY_TABLE)
        return samples

    def transform(self, x: Tree) -> Tree:
        """Make inputs ready for the net: as in `FederatedDataModule.transform`, and in single precision.

        Under `OwnLoss` inputs stay as they are.

        Args:
            x: some inputs of the pool, shape [n, ...].
        """
        # data made from a checkpoint's entry have no task, only its plain values
        saved = self._saved.get("task", {}).get("class_path")
        if isinstance(vars(self).get("_task"), OwnLoss) or saved == plain(OwnLoss())["class_path"]:
            # a LightningModule's own steps take batches as its data loader gives them
            return x
        return tree_map(lambda t: single(net_inputs(t)), x)


def single(values: Tensor) -> Tensor:
    """Return double precision, NumPy's default, as single precision, the type of nets; return other types unchanged.

    Args:
        values: a tensor.
    """
    return values.float() if values.dtype == torch.float64 else values


def targets_of(values: Tree) -> Tree:
    """Return targets in the types of tasks: integers as int64, quantities in single precision.

    Args:
        values: an array, a list of numbers, a tensor, or an object that returns an array for ``values[positions]``; or
            a tree of these.
    """
    return mapped(with_leaves(values, "y"), lambda leaf: target_of(read(leaf, slice(None))))


def target_of(y: Tensor) -> Tensor:
    """Return a tensor of targets in the type of tasks; see `targets_of`.

    Args:
        y: the targets.
    """
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    # bool stays bool: multi-label tasks take it, and as int64 it would look like class numbers
    return y.long() if whole else single(y)


def resident(leaf: Any, num_bytes: int) -> Any:
    """Return a file's contents if small, else the leaf unchanged, to be read in parts.

    Args:
        leaf: an object with a length that returns an array or a tensor for ``leaf[positions]``.
        num_bytes: size of all rows in memory.
    """
    return read(leaf, slice(None)) if num_bytes <= RESIDENT else leaf


def warn_of_targets(y: Tensor, names: list[str], remedy: str) -> None:
    """Warn if quantities are so large that squared errors make usual learning rates diverge.

    Args:
        y: targets of training rows, shape [n, quantities].
        names: names of the quantities, or one for all.
        remedy: a way to bring them nearer to 1, for the message.
    """
    sizes = y.double().square().mean(0).sqrt().tolist()
    size, name = max(zip(sizes, names * len(sizes), strict=False), default=(0, ""))
    if size > LARGE:
        rank_zero_warn(
            f"data: values of target {name!r} are around {size:.3g}, and training by squared errors of such a size may "
            f"diverge; {remedy}."
        )
