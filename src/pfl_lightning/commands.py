"""Commands of ``pfl-lightning`` that are none of the Trainer's."""

OTHERS = {"compare": "pfl_lightning.comparison", "methods": "pfl_lightning.survey"}
"""Each by the module whose ``main`` runs it; modules are read when they are asked for."""
