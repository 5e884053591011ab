"""Deploy a federation over Flower, with all data kept at sites; needs the extra ``flower``."""

from pfl_lightning.internals.light_start import import_lightning

# first of all; a quick start counts, since Flower starts a process per message
import_lightning()
