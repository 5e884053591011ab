"""A search over settings of FedProx by Optuna: trials are chosen on validation, and the best one alone is tested.

    pip install 'pfl-lightning[optuna]'
    python examples/sweep_optuna.py --trials 20

A trial is a run with a folder of its own. Its validation accuracy is told round by round, and trials that fall behind
the others' median are ended.
"""

import argparse
from functools import partial

import lightning as L
import optuna
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import Digits, Dirichlet
from pfl_lightning.methods import FedProx
from pfl_lightning.nets import MLP


class Pruning(Callback):
    """Tells a trial the validation accuracy of each round, and ends it where that falls behind other trials'.

    Args:
        trial: the trial.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called once a round."""
        self.trial.report(float(trainer.callback_metrics["val/acc"]), trainer.global_step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial, rounds: int) -> float:
    """Runs a trial.

    Args:
        trial: which chooses the settings.
        rounds: of the run.

    Returns:
        The best round's validation accuracy over clients, from 0 to 1.
    """
    # all trials begin with the same net, clients and cohorts
    L.seed_everything(0, verbose=False)
    data = Digits(num_clients=10, partitioner=Dirichlet(alpha=0.1, min_size=40))
    client = FedProx(
        mu=trial.suggest_float("mu", 1e-4, 1.0, log=True),
        net=MLP,
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        optimizer=partial(SGD, lr=trial.suggest_float("lr", 0.005, 0.2, log=True)),
    )
    record = RoundLogger()
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=trial.suggest_categorical("local_epochs", [1, 2, 5]),
        callbacks=[record, Pruning(trial)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, datamodule=data)
    selected = record.summary["selected"]
    trial.set_user_attr("test/acc", selected["test/acc"])
    trial.set_user_attr("folder", trainer.log_dir)
    return float(selected["val/acc"])


def search(trials: int, rounds: int) -> optuna.Study:
    """The search, which gives the same trials each time.

    Args:
        trials: how many there are.
        rounds: of each.
    """
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(partial(objective, rounds=rounds), n_trials=trials)
    return study


def main() -> None:
    """Searches, and says what the best trial is."""
    parser = argparse.ArgumentParser(description="A search over settings of FedProx by Optuna.")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    best = search(given.trials, given.rounds).best_trial
    print(f"best on validation: {best.params}, validation accuracy {best.value:.2%}")
    print(f"its test accuracy: {best.user_attrs['test/acc']:.2%}, files in {best.user_attrs['folder']}")


if __name__ == "__main__":
    main()
