"""The client side: the base class of client modules, and the phases of local training."""

from pfl_lightning.client.adapter_folders import export_adapters, save_adapters
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.benchmarks import merge_adapters, run_tasks
from pfl_lightning.client.generation import answers, scores
from pfl_lightning.client.module import Batch, ClientModule, ClientSettings, Forward
from pfl_lightning.client.phases import CLASSIFIER, Phase, everything, in_body, in_classifier

__all__ = [
    "CLASSIFIER",
    "Batch",
    "ClientModule",
    "ClientSettings",
    "Forward",
    "Phase",
    "answers",
    "at_once",
    "everything",
    "export_adapters",
    "in_body",
    "in_classifier",
    "merge_adapters",
    "run_tasks",
    "save_adapters",
    "scores",
]
