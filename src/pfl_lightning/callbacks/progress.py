"""Progress within a round, on Lightning's own progress bars."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation


class RoundProgress(FederatedCallback):
    """Show the round and the number of finished clients on Lightning's TQDM or Rich bar, if the user asked for one."""

    reads_updates = False

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Reset the count of clients."""
        self._done, self._all = 0, len(cohort)
        # asked for once per round: Lightning searches all callbacks at each access
        self._bar = trainer.progress_bar_callback
        self._show(trainer, federation)

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Count a client."""
        self._done += 1
        self._show(trainer, federation)

    def _show(self, trainer: Trainer, federation: Federation) -> None:
        bar = self._bar
        if bar is None:
            return
        text = f"Round {federation.round + 1}/{trainer.max_epochs}, clients {self._done}/{self._all}"
        # the two bars have no common way to set the text
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            bar.train_progress_bar.set_description(text)
        elif isinstance(bar, RichProgressBar) and bar.progress and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, description=text, refresh=True)
