"""Several devices: Lightning starts the ranks, and no module is wrapped."""

import warnings
from typing import Any

from lightning.pytorch.strategies import DDPStrategy


class ClientParallel(DDPStrategy):
    """Lightning's processes and collectives for a federation whose clients are shared out to devices.

    Nothing is reduced between steps, as a client trains on one device; `Sharded` gathers once a round. The Trainer
    takes it where ``devices`` or ``num_nodes`` ask for more than one.

    Args:
        **kwargs: the arguments of Lightning's ``DDPStrategy``, such as ``start_method``, ``timeout`` or
            ``process_group_backend``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # every rank logs the same value
        warnings.filterwarnings("ignore", message=".*sync_dist=True")

    def configure_ddp(self) -> None:
        """Leaves the federation as it is."""
