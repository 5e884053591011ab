"""The folders of runs: a run's own, and those of earlier runs of its method."""

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path | None:
    """The run's folder, made if need be.

    None where nothing shall be written: without a logger, in a trial run, and by every rank but the first.
    """
    if not trainer.loggers or trainer.log_dir is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return None
    folder = Path(trainer.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def checkpoint_of_run(root: Path, name: str, begun: bool) -> Path | None:
    """The checkpoint of the newest run.

    Args:
        root: the folder of runs, each in a folder of its own.
        name: ``best`` or ``last``.
        begun: whether the newest run counts that has begun, with a checkpoint or without, so that what was
            interrupted before its first checkpoint starts anew; else the newest that has this checkpoint.

    Returns:
        The file, which may not be there if ``begun``; None if there is no run.
    """
    # a run that began has one of these; an evaluation leaves a folder without them
    marks = ("config.yaml", "rounds.csv") if begun else (f"checkpoints/{name}.ckpt",)
    runs = {root / mark.relative_to(root).parts[0] for pattern in marks for mark in root.glob(f"*/{pattern}")}
    # a run's folder is touched when files come into it, first of all when it starts
    newest = max(runs, key=lambda run: run.stat().st_mtime, default=None)
    return None if newest is None else newest / "checkpoints" / f"{name}.ckpt"
