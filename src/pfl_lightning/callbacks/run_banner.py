"""The banner printed at the start of a run."""

from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer

from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.tables import labelled


class RunBanner(Callback):
    """Print method, data, net, rounds and the run's folder at the start of ``fit``.

    Stands in for Lightning's table of layers; ``callbacks=ModelSummary()`` brings the table back, and
    ``enable_model_summary=False`` prints neither.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the banner on rank 0."""
        if not trainer.is_global_zero:
            return
        federation = cast(Federation, pl_module)
        data, options, client = federation.data, federation.options, federation.client
        clients = data.num_clients
        samples = sum(federation.sizes(range(clients), "train").values())
        own, server = type(client).__name__, federation.aggregator.name
        nets = []
        for module in federation.architectures:
            sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.net.parameters()]  # type: ignore[union-attr]
            frozen = sum(size for size, trained in sizes if not trained)
            note = f", of which {frozen:,} are frozen" if frozen else ""
            nets.append(f"{type(module.net).__name__}, {sum(size for size, _ in sizes):,} parameters{note}")
        lines = [
            ("method", f"{federation.method} (client {own}, aggregator {server})"),
            ("data", f"{type(data).__name__}, {clients} clients with {samples:,} training samples"),
            *data.head_lines,
            ("net", "; ".join(dict.fromkeys(nets))),
            ("rounds", f"{trainer.max_epochs}, each of {options.updates(clients)} clients"),
        ]
        if federation.round:
            # a resumed run says so first: a wrong --ckpt_path shows here, not after hours
            lines.append(("goes on", f"behind round {federation.round}"))
        if folder := run_folder(trainer):
            lines.append(("files", str(folder)))
        print(labelled(lines) + "\n", flush=True)
