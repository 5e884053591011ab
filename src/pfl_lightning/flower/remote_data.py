"""A server's data module: how many samples clients have, who are at their sites, and what the server holds itself."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data import ClientData, FederatedDataModule, Samples, Split
from pfl_lightning.data.division import Division


class AtSites:
    """What becomes of a data module whose clients are at sites; a class of its own kind is made with it."""

    at_sites = True
    num_clients: int
    central_test: Any
    server_fraction: float
    public: Any
    needs_all_clients: str
    _pool: Any
    _sizes: Mapping[int, Mapping[str, int]]

    def prepare_data(self) -> None:
        """Fetches what the server needs for samples of its own, and nothing without."""
        if self._holds_some:
            super().prepare_data()  # type: ignore[misc]

    def setup(self, stage: str | None = None) -> None:
        """Load what the server needs for samples of its own, and nothing without.

        Raises:
            MisconfigurationException: The samples depend on rows of all clients, which are at their sites.
        """
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
        """Those that the server holds, if it does."""
        return super().server_samples() if self._pool is not None else None  # type: ignore[misc]

    def central_data(self) -> Samples | None:
        """Those that the server's model is tested on, if there are some."""
        return super().central_data() if self._pool is not None else None  # type: ignore[misc]

    def client(self, client: int) -> ClientData:
        """A client, whose samples nobody can look at here."""
        return ClientData(cast(FederatedDataModule, self), client)

    def size(self, client: int, split: Split) -> int:
        """Number of samples in one split of one client, as its site has told."""
        return self._sizes[client][split]

    @property
    def newcomers(self) -> range:
        """Nobody."""
        return range(0)

    @property
    def client_names(self) -> list[str]:
        """None that are known here."""
        return []

    @property
    def division(self) -> Division:
        """Unknown here."""
        self._unknown()

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """Unknown here."""
        self._unknown()

    def strata_of(self, client: int, split: Split) -> Tensor:
        """Unknown here."""
        self._unknown()

    def counts_of(self, client: int, split: Split) -> Tensor:
        """Unknown here."""
        self._unknown()

    def _unknown(self) -> NoReturn:
        name = type(self).__name__.removeprefix("Remote")
        raise MisconfigurationException(
            f"data={name}: clients are at sites that keep their samples, and the server was to look at them; take a "
            "method and callbacks that don't, or give the server samples of its own by data.server_fraction."
        )


def check_drift(data: FederatedDataModule) -> None:
    """Refuse data whose clients hold other samples from a round on: at sites, they are what they are.

    Args:
        data: of the server or of a site.

    Raises:
        MisconfigurationException: if they do.
    """
    if data.drifts:
        raise MisconfigurationException(
            f"data={type(data).__name__}: data.drift and division_at say what clients hold in a simulation, and "
            "clients at sites hold their own; leave them out."
        )


def remote_data(data: FederatedDataModule, sizes: Mapping[int, Mapping[str, int]]) -> FederatedDataModule:
    """A data module like one that is configured, whose clients are at sites.

    Args:
        data: as configured, not set up.
        sizes: numbers of samples by client and split.

    Raises:
        MisconfigurationException: if it doesn't say how many clients there are, or has new ones.
    """
    if not data.num_clients:
        raise MisconfigurationException("data.num_clients=null: a server can't find out how many; give their number.")
    if data.new_clients:
        raise MisconfigurationException(
            f"data.new_clients={data.new_clients}: whoever has a site takes part; leave it out."
        )
    check_drift(data)
    # not by its __init__, in which Lightning makes copies of what it finds in the calling frames
    remote: Any = object.__new__(type(f"Remote{type(data).__name__}", (AtSites, type(data)), {}))
    vars(remote).update(vars(data), _sizes=sizes)
    return cast(FederatedDataModule, remote)
