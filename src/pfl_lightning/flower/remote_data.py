"""Data module of a server with clients at sites: numbers of clients' samples, and samples of the server's own."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split
from pfl_lightning.data.client_names import distinct
from pfl_lightning.data.datamodule import ClientLoader
from pfl_lightning.data.division import Division


class AtSites:
    """Base class for turning a data module into a server's; `remote_data` makes a class of both."""

    at_sites = True
    num_clients: int
    central_test: Any
    server_fraction: float
    public: Any
    needs_all_clients: str
    _pool: Any
    most_clients: int
    _sizes: Mapping[int, Mapping[str, int]]
    _names: list[str]

    def prepare_data(self) -> None:
        """Download data for samples of the server's own; without such samples, download nothing."""
        if self._holds_some:
            super().prepare_data()  # type: ignore[misc]

    def setup(self, stage: str | None = None) -> None:
        """Load data for samples of the server's own; without such samples, load nothing.

        Raises:
            MisconfigurationException: if the samples depend on rows of all clients, which are at sites.
        """
        # `setup` divides what it loads, and may count other clients than the sites have
        clients = self.num_clients
        if self._holds_some:
            super().setup(stage)  # type: ignore[misc]
            if reason := self.needs_all_clients:
                raise MisconfigurationException(reason)
        self.num_clients = clients

    @property
    def _holds_some(self) -> bool:
        return self.public is not None or self.central_test is not None or self.server_fraction > 0

    def server_samples(self) -> Samples | None:
        """Return the server's own samples; None without."""
        # without a pool nothing has been loaded, and the base class would look into it
        return super().server_samples() if self._pool is not None else None  # type: ignore[misc]

    def central_data(self) -> Samples | None:
        """Return the central test samples; None without."""
        return super().central_data() if self._pool is not None else None  # type: ignore[misc]

    def client(self, client: int) -> ClientData:
        """Return a client's data with the numbers of samples; reading the samples is refused."""
        return ClientData(cast(FederatedDataModule, self), client)

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples in a split of a client by the report of the client's site; 0 before."""
        return self._sizes.get(client, {}).get(split, 0)

    def grow(self, names: Sequence[str]) -> None:
        """Count further clients, under the next ids.

        Args:
            names: their names.
        """
        self._names.extend(names)
        self.num_clients += len(names)

    def train_dataloader(self) -> ClientLoader:
        """Return a loader of one batch, the ids of all clients at the time."""
        return ClientLoader([Everybody(self)])

    def val_dataloader(self) -> ClientLoader:
        """Return a loader as a data module does, of one batch with the ids of all clients at the time."""
        return ClientLoader([Everybody(self)] if len(super().val_dataloader()) else [])  # type: ignore[misc]

    @property
    def newcomers(self) -> range:
        """Return an empty range, as a server has no newcomers."""
        return range(0)

    @property
    def client_names(self) -> list[str]:
        """Return the names that the server's settings give; an empty list without."""
        return list(self._names)

    @property
    def division(self) -> Division:
        """Refuse, as the division of samples is known at sites alone."""
        self._unknown()

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """Refuse, as samples are known at sites alone."""
        self._unknown()

    def strata_of(self, client: int, split: Split) -> Tensor:
        """Refuse, as strata are known at sites alone."""
        self._unknown()

    def counts_of(self, client: int, split: Split) -> Tensor:
        """Refuse, as counts are known at sites alone."""
        self._unknown()

    def _unknown(self) -> NoReturn:
        # the user knows the class by the name in the configuration
        name = type(self).__name__.removeprefix("Remote")
        raise MisconfigurationException(
            f"data={name}: clients are at sites that keep their samples, and the server was to look at them; take a "
            "method and callbacks that don't, or give the server samples of its own by data.server_fraction."
        )


class Everybody(Sequence[int]):
    """The ids of all clients, also of those that join later.

    Args:
        data: the server's data module.
    """

    def __init__(self, data: AtSites) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.num_clients

    def __getitem__(self, index: Any) -> Any:
        return range(self._data.num_clients)[index]


def check_drift(data: FederatedDataModule) -> None:
    """Refuse data with drift, as a simulation changes clients' samples between rounds and a site doesn't.

    Args:
        data: data module of the server or of a site.

    Raises:
        MisconfigurationException: if the data drift.
    """
    if data.drifts:
        raise MisconfigurationException(
            f"data={type(data).__name__}: data.drift, data.input_drift and division_at say what clients hold in a "
            "simulation, and clients at sites hold their own; leave them out."
        )


def remote_data(
    data: FederatedDataModule,
    sizes: Mapping[int, Mapping[str, int]],
    names: Sequence[str] = (),
    most_clients: int = 0,
) -> FederatedDataModule:
    """Return a copy of a data module for a server with clients at sites.

    Args:
        data: the data module, not set up.
        sizes: numbers of samples by client and split; may be filled in later.
        names: names of the clients by id; empty for clients known by ids alone. A list gets the names of clients that
            join.
        most_clients: the largest number of clients, with those that join; 0 is the data's own number.

    Raises:
        MisconfigurationException: if the data have no number of clients, newcomers or drift, or names don't fit.
    """
    if not data.num_clients:
        raise MisconfigurationException("data.num_clients=null: a server can't find out how many; give their number.")
    if data.new_clients:
        raise MisconfigurationException(
            f"data.new_clients={data.new_clients}: whoever has a site takes part; leave it out."
        )
    check_drift(data)
    if names and len(distinct(names, "names")) != data.num_clients:
        raise MisconfigurationException(
            f"names={', '.join(names)!r} must be {data.num_clients} names, as data.num_clients says; correct "
            "one of the two."
        )
    # without __init__, where Lightning collects hyperparameters out of the calling frames; a subclass of the module's
    # class, so that a user's checks of the kind of data still hold
    remote: Any = object.__new__(type(f"Remote{type(data).__name__}", (AtSites, type(data)), {}))
    # the same list as the connection's, so that both know a client that joins
    shared = names if isinstance(names, list) else list(names)
    vars(remote).update(vars(data), _sizes=sizes, _names=shared, most_clients=most_clients or data.num_clients)
    return cast(FederatedDataModule, remote)
