"""The server's samples from another data set."""

from typing import Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.checks import check_pool, check_strata, rows_of_test_half
from pfl_lightning.data.division import Division
from pfl_lightning.data.preparation import as_loaded
from pfl_lightning.data.samples import Loaded, Samples
from pfl_lightning.data.splits import stratified_rows
from pfl_lightning.data.trees import Tree
from pfl_lightning.tasks import Task


class PublicData(Protocol):
    """The data set of public samples: a `FederatedDataModule` of which only the pool is used."""

    input_shape: tuple[int, ...]
    original_test: Tensor

    @property
    def task(self) -> Task:
        """The prediction task."""

    @property
    def needs_all_clients(self) -> str:
        """Return why the data set's rows alone would make other inputs than the clients', and the remedy.

        The text is empty where they would make the same.
        """

    def prepare_data(self) -> None:
        """Fetch missing files."""

    def load(self) -> Loaded | tuple[Tree, Tree]:
        """Read the whole pool."""

    def strata(self, y: Tree) -> Tensor | None:
        """Return the group of each sample."""

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit preprocessing on training rows, and apply the result to all rows."""


def public_samples(public: PublicData, count: int, seed: int, owner: str, input_shape: tuple[int, ...]) -> Samples:
    """Load another data set and choose the server's samples, before the data set's ``transform``.

    Args:
        public: the data set.
        count: number of samples, chosen outside the original test half, class proportions kept.
        seed: seed of the choice, 0 or more.
        owner: name of the data module whose clients hold other samples.
        input_shape: shape of the clients' inputs.

    Raises:
        MisconfigurationException: if the data set has inputs of another shape, or too few samples.
    """
    name = type(public).__name__
    if tuple(public.input_shape) != tuple(input_shape):
        raise MisconfigurationException(
            f"data.public={name} has inputs of shape {tuple(public.input_shape)} and {owner} of {tuple(input_shape)}; "
            "take a data set whose inputs have the same shape"
        )
    try:
        public.prepare_data()
        loaded = as_loaded(public.load())
    except MisconfigurationException as error:
        # a data set names its own settings in errors; the user must change the public data set's, not the clients'
        raise MisconfigurationException(str(error).replace("data.root", "data.public.root")) from error
    # before the choice, so that wrong numbers outside the chosen samples are refused too, whatever the seed
    check_pool(loaded, public.task, name)
    rows = (~rows_of_test_half(public.original_test, len(loaded), name)).nonzero().flatten()
    # the default of 3000 is more than small data sets have; a silent cut would change the method's cost
    if count > len(rows):
        raise MisconfigurationException(
            f"data.public_samples={count} must be at most the {len(rows)} samples that {name} has outside its original "
            "test half"
        )
    strata, groups = check_strata(public.strata(loaded.y), len(loaded), public.task)
    rows = rows[stratified_rows(strata[rows], count, groups, seed, draw=3)]
    samples = Samples(loaded.x, loaded.y).take(rows)
    # the server learns from all of them, as a client does from its training rows
    none = torch.empty(0, dtype=torch.int64)
    return public.preprocess(samples, Division([{"train": torch.arange(count)}], none, none, []))
