"""Refuse Lightning hooks without a use in a federation, and name the replacement of each."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from pfl_lightning.client.module import ClientModule

LOOPS = "a callback's on_round_start, on_client_fit_start or on_client_fit_end"
BATCHES = "training_step, which sees each batch"
STEPS = "adjust_gradients, on_after_backward and on_before_optimizer_step, which see gradients, or local_optimizer"
METRICS = "configure_metrics and forward, which say what is measured of each client"
DATA = "the data module"

# a user who ports a LightningModule would otherwise see a hook do nothing, and no error
ADVICE = {
    LOOPS: (
        "on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end "
        "on_validation_start on_validation_end on_test_start on_test_end"
    ),
    BATCHES: "on_train_batch_start on_train_batch_end",
    STEPS: (
        "backward manual_backward on_before_backward on_before_zero_grad optimizer_step optimizer_zero_grad "
        "lr_scheduler_step toggle_optimizer"
    ),
    "on_before_optimizer_step, or trainer.gradient_clip_val": "configure_gradient_clipping clip_gradients",
    METRICS: (
        "validation_step test_step on_validation_epoch_start on_validation_epoch_end on_validation_batch_start "
        "on_validation_batch_end on_test_epoch_start on_test_epoch_end on_test_batch_start on_test_batch_end "
        "on_validation_model_eval on_validation_model_train on_validation_model_zero_grad on_test_model_eval "
        "on_test_model_train"
    ),
    DATA: (
        "train_dataloader val_dataloader test_dataloader prepare_data transfer_batch_to_device "
        "on_before_batch_transfer on_after_batch_transfer"
    ),
    "__init__, or on_download, which begins each round": "setup teardown configure_model configure_sharded_model",
    "trainer.callbacks": "configure_callbacks",
    "state_dict, which is all that is saved of a client": "on_save_checkpoint on_load_checkpoint",
}
"""Lightning hooks that nothing calls on a client module, by the advice that the error gives."""


def overrides(module: LightningModule, hook: str) -> bool:
    """Return True if a client module overrides a hook, in the class or on the object.

    Args:
        module: the client module.
        hook: name of the hook.
    """
    return getattr(type(module), hook, None) is not getattr(ClientModule, hook, None) or hook in vars(module)


def check_hooks(client: ClientModule) -> None:
    """Refuse a client module with overridden hooks outside the federation's own loop.

    Args:
        client: the client module.

    Raises:
        MisconfigurationException: if it overrides such a hook, or sets ``automatic_optimization`` to False.
    """
    for advice, hooks in ADVICE.items():
        for hook in hooks.split():
            if overrides(client, hook):
                raise MisconfigurationException(
                    f"{type(client).__name__}.{hook} would never be called, as a federation trains many clients in one "
                    f"module; use {advice}."
                )
    # under manual optimization Lightning users step optimizers in `training_step`, which engines would do once more
    if not client.automatic_optimization:
        raise MisconfigurationException(
            f"{type(client).__name__}.automatic_optimization=False has no effect, as engines make the steps; leave it "
            f"out, and use {STEPS}."
        )
