"""Progress within a round, on Lightning's own bars where a user asks for them."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation


class RoundProgress(FederatedCallback):
    """Shows the round and the clients done in it on Lightning's TQDM or Rich bar."""

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Starts to count."""
        self._done, self._all = 0, len(cohort)
        # asked for once: Lightning looks for it among all callbacks
        self._bar = trainer.progress_bar_callback
        self._show(trainer, federation)

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Counts a client."""
        self._done += 1
        self._show(trainer, federation)

    def _show(self, trainer: Trainer, federation: Federation) -> None:
        bar = self._bar
        if bar is None:
            return
        text = f"Round {federation.round + 1}/{trainer.max_epochs}, clients {self._done}/{self._all}"
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            bar.train_progress_bar.set_description(text)
        elif isinstance(bar, RichProgressBar) and bar.progress and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, description=text, refresh=True)
