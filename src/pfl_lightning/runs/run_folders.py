"""Folders of runs, for a Trainer."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from pfl_lightning.internals.of_lightning import continue_run
from pfl_lightning.runs.run_status import is_bare


class RunFolders(Trainer):
    """Lightning's Trainer with one folder per run, below a folder for method and data.

    Attributes:
        own_logger: True if the logger is a CSVLogger made here, named after the run, and not the user's.
    """

    own_logger = False

    @property
    def log_dir(self) -> str | None:
        """The run's folder, with record, configuration and checkpoints, whatever the logger.

        Lightning's own property communicates with the first rank, so a single rank can't read it.
        """
        if self.logger is None:
            return self.default_root_dir
        if isinstance(self.logger, (CSVLogger, TensorBoardLogger)):
            return str(self.logger.log_dir)
        version = self.logger.version
        # as Lightning's ModelCheckpoint names the folders of other loggers
        version = version if isinstance(version, str) else f"version_{version}"
        return str(Path(self.logger.save_dir or self.default_root_dir, str(self.logger.name), version))

    @property
    def run_root(self) -> Path:
        """The parent of this method's runs."""
        save_dir = None if self.logger is None else self.logger.save_dir
        return Path(save_dir or self.default_root_dir, *([] if self.logger is None else [str(self.logger.name)]))

    def name_run(self, name: str, version: str | None = None) -> None:
        """Name the folder of the run, unless the logger is the user's.

        Args:
            name: name of method and data.
            version: name of an earlier run to continue; None makes a new run.
        """
        if self.own_logger:
            # flushed at each step, so that a killed run keeps all rows
            self.logger = CSVLogger(self.default_root_dir, name, version=version, flush_logs_every_n_steps=1)

    def go_on_in(self, ckpt_path: str | None) -> None:
        """Continue a resumed run in the folder of its checkpoint, so that one run lies in one place.

        The user's logger continues with the run in this folder, unless the user has named a run.

        Args:
            ckpt_path: the checkpoint, or None.
        """
        run = None if ckpt_path is None else Path(ckpt_path).resolve().parent.parent
        # a checkpoint from elsewhere, such as a copy on another machine, starts a new run
        if run is not None and run.parent == self.run_root.resolve():
            self.name_run(run.parent.name, run.name)
            if isinstance(self.logger, (CSVLogger, TensorBoardLogger, WandbLogger)):
                continue_run(self.logger, run.name)

    def take_over(self) -> None:
        """Give a new run the folder of the last run, if the last run was killed before its first round."""
        if not self.own_logger or not self.is_global_zero or Path(str(self.log_dir)).exists():
            return
        # else each attempt that fails early would leave an empty version_N
        last = self.run_root / f"version_{int(self.logger.version) - 1}"  # type: ignore[union-attr, arg-type]
        if is_bare(last):
            self.name_run(last.parent.name, last.name)
