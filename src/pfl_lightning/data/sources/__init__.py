"""Data of any task with named clients, from files or from memory."""

from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.data.sources.chat_data import ChatData
from pfl_lightning.data.sources.client_datasets import ClientDatasets
from pfl_lightning.data.sources.flower_datasets import FlowerDatasets
from pfl_lightning.data.sources.folder_data import FolderData
from pfl_lightning.data.sources.hf_data import HFData
from pfl_lightning.data.sources.leaf_data import LeafData
from pfl_lightning.data.sources.pfllib_data import PFLlibData
from pfl_lightning.data.sources.preference_data import PreferenceData
from pfl_lightning.data.sources.series_data import SeriesData
from pfl_lightning.data.sources.table_data import TableData
from pfl_lightning.data.sources.tensor_data import TensorData
from pfl_lightning.data.sources.vision_data import VisionData

__all__ = [
    "ChatData",
    "ClientDatasets",
    "FlowerDatasets",
    "FolderData",
    "HFData",
    "LeafData",
    "OwnedData",
    "PFLlibData",
    "PreferenceData",
    "SeriesData",
    "TableData",
    "TensorData",
    "VisionData",
]
