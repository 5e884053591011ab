import stat
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, FEATURES, blobs, equal, load, make_client, plain
from pfl_lightning.client.common import personal_entries
from pfl_lightning.engines import ClientState, Job
from pfl_lightning.flower.export import export, keep_model
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.messages import detached
from pfl_lightning.methods import FedPer, FedProto
from pfl_lightning.nets import MLP
