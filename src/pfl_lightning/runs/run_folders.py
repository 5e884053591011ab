"""A Trainer whose runs have folders of their own."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from pfl_lightning.runs.standing import is_bare


class RunFolders(Trainer):
    """Lightning's Trainer, with a folder for each run under one for its method and data.

    Attributes:
        own_logger: whether the logger is not the user's but a CSVLogger by the name of the run.
    """

    own_logger = False

    @property
    def log_dir(self) -> str | None:
        """The run's folder: record, configuration and checkpoints are in it, whatever the logger.

        Lightning's asks the first rank, and so can't be looked at by one rank alone.
        """
        if self.logger is None:
            return self.default_root_dir
        if isinstance(self.logger, (CSVLogger, TensorBoardLogger)):
            return str(self.logger.log_dir)
        version = self.logger.version
        version = version if isinstance(version, str) else f"version_{version}"
        return str(Path(self.logger.save_dir or self.default_root_dir, str(self.logger.name), version))

    @property
    def run_root(self) -> Path:
        """The folder of this method's runs."""
        save_dir = None if self.logger is None else self.logger.save_dir
        return Path(save_dir or self.default_root_dir, *([] if self.logger is None else [str(self.logger.name)]))

    def name_run(self, name: str, version: str | None = None) -> None:
        """Gives runs a folder, if the logger is not the user's.

        Args:
            name: of the method and the data.
            version: of a run to go on in its folder; None makes a new one.
        """
        if self.own_logger:
            self.logger = CSVLogger(self.default_root_dir, name, version=version, flush_logs_every_n_steps=1)

    def go_on_in(self, ckpt_path: str | None) -> None:
        """Lets a resumed run go on in the folder of its checkpoint, so that nothing of it lies in two places.

        The user's logger goes on with the run that it has there.
        """
        run = None if ckpt_path is None else Path(ckpt_path).resolve().parent.parent
        if run is not None and run.parent == self.run_root.resolve():
            self.name_run(run.parent.name, run.name)
            go_on_logging(self.logger, run.name)

    def take_over(self) -> None:
        """Lets a new run have the folder of the last one, if that was killed when it had only begun."""
        if not self.own_logger or not self.is_global_zero or Path(str(self.log_dir)).exists():
            return
        last = self.run_root / f"version_{int(self.logger.version) - 1}"  # type: ignore[union-attr, arg-type]
        if is_bare(last):
            self.name_run(last.parent.name, last.name)


def go_on_logging(logger: Logger | None, version: str) -> None:
    """Lets a logger go on with an earlier run, unless the user has said with which one.

    Lightning's loggers can be told so only when they are made, which is before anyone knows the checkpoint. Others than
    these are left as they are.

    Args:
        logger: as the user made it, without a run yet.
        version: of the earlier run; that of Weights & Biases is the run's id.
    """
    if isinstance(logger, WandbLogger) and logger.version is None:
        logger._id = logger._wandb_init["id"] = version
    # asked for its version it would take a new one
    elif isinstance(logger, (CSVLogger, TensorBoardLogger)) and logger._version is None:
        logger._version = version
