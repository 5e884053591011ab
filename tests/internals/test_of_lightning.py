"""Each private name of Lightning that the package uses or overrides."""

import inspect
import os
from functools import partial

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy

from pfl_lightning.cli.load_config import Configured
from pfl_lightning.cli.trainer_commands import PflCLI
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.internals import of_lightning as names
from pfl_lightning.trainer import FederatedTrainer

OVERRIDDEN = [
    (Trainer, FederatedTrainer, "_run_stage"),
    (DDPStrategy, ClientParallel, "_configure_launcher"),
    (LightningCLI, PflCLI, "_parse_ckpt_path"),
]


@pytest.mark.parametrize(("base", "own", "name"), OVERRIDDEN)
def test_what_is_overridden_is_there_and_takes_the_same(base, own, name):
    assert name in vars(base) and name in vars(own)
    assert inspect.signature(vars(base)[name]).parameters == inspect.signature(vars(own)[name]).parameters
    assert f"{base.__name__}.{name}" in names.__doc__


def test_a_run_goes_through_its_stage(tmp_path):
    stages = []

    class Watched(Trainer):
        def _run_stage(self):
            stages.append(self.state.fn)
            return super()._run_stage()

    trainer = Watched(
        fast_dev_run=True, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False
    )
    trainer.fit(BoringModel(), datamodule=BoringDataModule())
    trainer.test(BoringModel(), datamodule=BoringDataModule(), verbose=False)
    assert stages == ["fit", "test"]


class TwoSettings(BoringModel):
    """A model with settings, which a checkpoint keeps."""

    def __init__(self, width: int = 3, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_the_command_line_takes_settings_of_a_checkpoint_by_one_method(tmp_path, monkeypatch):
    path = tmp_path / "model.ckpt"
    torch.save({"hyper_parameters": {"width": 5, "depth": 1, "_instantiator": "x"}}, path)

    class Plain(LightningCLI):
        def instantiate_classes(self):
            raise Ready(self.config["fit"]["model"]["width"])

    class Given(Plain):
        def _parse_ckpt_path(self):
            pass

    class Ready(Exception):
        pass

    for cli, width in ((Plain, 5), (Given, 4)):
        with pytest.raises(Ready) as reached:
            cli(TwoSettings, BoringDataModule, args=["fit", "--model.width=4", f"--ckpt_path={path}"])
        assert reached.value.args == (width,)


def test_a_method_of_the_command_line_s_goes_before_the_trainer_s():
    given = []

    class Asked(LightningCLI):
        def fit(self, **kwargs):
            given.append(sorted(kwargs))

    line = ["fit", "--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.enable_checkpointing=false"]
    cli = Asked(TwoSettings, BoringDataModule, args=line)
    assert {"model", "datamodule", "ckpt_path"} <= set(given[0]) and cli.trainer.current_epoch == 0
    assert "fit" in vars(Configured)


def test_the_command_line_notes_class_and_instantiator():
    class Asked(LightningCLI):
        def fit(self, **kwargs):
            pass

    line = ["fit", "--model=TwoSettings", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    cli = Asked(BoringModel, BoringDataModule, subclass_mode_model=True, args=line)
    assert set(names.COMMAND_LINE_NOTES) <= set(cli.model.hparams)


def test_keeping_arguments_sets_these_attributes():
    added = vars(TwoSettings()).keys() - vars(BoringModel()).keys()
    assert added - {"_hparams"} == set(names.KEPT_ARGUMENTS)
    assert not set(names.KEPT_ARGUMENTS) & vars(LightningModule()).keys()


def test_ranks_are_started_without_an_observer(monkeypatch):
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **kwargs: started.append(kwargs["env"]["LOCAL_RANK"]))
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    launcher = names.ScriptLauncher(LightningEnvironment(), 3, 1)
    assert launcher.procs == []
    names.start_ranks(launcher)
    assert started == ["1", "2"] and len(launcher.procs) == 2 and os.environ["WORLD_SIZE"] == "3"


def test_a_strategy_s_launcher_is_lightning_s_until_it_is_replaced():
    strategy = DDPStrategy(cluster_environment=LightningEnvironment(), parallel_devices=[torch.device("cpu")] * 2)
    strategy._configure_launcher()
    assert type(strategy.launcher) is names.ScriptLauncher
    other = names.ScriptLauncher(LightningEnvironment(), 2, 1)
    names.set_launcher(strategy, other)
    assert strategy.launcher is other


@pytest.mark.parametrize("kind", [partial(CSVLogger, name="run"), partial(TensorBoardLogger, name="run")])
def test_a_logger_goes_on_with_a_version(kind, tmp_path):
    logger = kind(tmp_path)
    names.continue_run(logger, "version_3")
    assert logger.version == "version_3" and logger.log_dir == str(tmp_path / "run" / "version_3")
    names.continue_run(logger, "version_4")
    assert logger.version == "version_3"


def test_weights_and_biases_goes_on_with_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    started = []
    monkeypatch.setattr(wandb, "init", lambda **settings: started.append(settings["id"]))
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    names.continue_run(logger, "abc")
    assert logger.version == "abc"
    names.continue_run(logger, "other")
    assert logger.version == "abc"
    _ = logger.experiment
    assert started == ["abc"]
