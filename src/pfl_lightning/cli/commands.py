"""Commands of ``pfl-lightning`` that are none of the Trainer's."""

OTHERS = {
    "compare": "pfl_lightning.cli.compare",
    "configs": "pfl_lightning.cli.configs",
    "flower": "pfl_lightning.flower.command",
    "methods": "pfl_lightning.cli.methods_table",
}
"""Each by the module whose ``main`` runs it; modules are read when they are asked for."""
