"""The same federation at sites that keep their data, over Flower; needs the extra ``flower``."""

from pfl_lightning.flower.light_start import import_torchmetrics

# Flower starts a process for each message; this comes before all that imports Lightning, and with it torchmetrics
import_torchmetrics()
