"""Methods of personalised federated learning, one file each: client modules here, aggregators by `aggregators`."""

# files of server sides alone: imported, a class is known to the command line by its name
from pfl_lightning.methods import (  # noqa: F401
    cfl,
    cwfedavg,
    cyclic,
    fedawa,
    fedawa_l,
    fedcross,
    feddf,
    feddisco,
    fedexp,
    fedlaw,
    fedopt,
    fedrema,
    kt_pfl_weight,
    ldawa,
    pfedsim,
)
from pfl_lightning.methods.adaptive_fedprox import AdaptiveFedProx
from pfl_lightning.methods.alternate_training import AlternateAlignment, AlternateTraining
from pfl_lightning.methods.apfl import APFL
from pfl_lightning.methods.apple import APPLE
from pfl_lightning.methods.ccvr import CCVR
from pfl_lightning.methods.ditto import Ditto
from pfl_lightning.methods.dp_scaffold import DPScaffold
from pfl_lightning.methods.ensemble import Ensemble
from pfl_lightning.methods.feature_alignment import FeatureAlignment
from pfl_lightning.methods.fedala import FedALA
from pfl_lightning.methods.fedalt import FedALT
from pfl_lightning.methods.fedamp import CloudProx
from pfl_lightning.methods.fedas import FedAS
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedbabu import FedBABU
from pfl_lightning.methods.fedbn import FedBN
from pfl_lightning.methods.fedcac import FedCAC
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.fedcp import FedCP
from pfl_lightning.methods.feddbe import FedDBE
from pfl_lightning.methods.feddecorr import FedDecorr
from pfl_lightning.methods.feddg_ga import FedDGGA
from pfl_lightning.methods.feddistill import FedDistill
from pfl_lightning.methods.feddpa import FedDPA
from pfl_lightning.methods.feddyn import FedDyn
from pfl_lightning.methods.fedetf import FedETF
from pfl_lightning.methods.fedex_lora import FedExLoRA
from pfl_lightning.methods.fedfomo import FedFomo
from pfl_lightning.methods.fedgela import FedGELA
from pfl_lightning.methods.fedgen import FedGen
from pfl_lightning.methods.fedgh import FedGH
from pfl_lightning.methods.fedit import FedIT
from pfl_lightning.methods.fedkd import FedKD
from pfl_lightning.methods.fedlc import FedLC
from pfl_lightning.methods.fedlesam import FedLESAM
from pfl_lightning.methods.fedmd import FedMD
from pfl_lightning.methods.fednh import CosineClassifier, NormalizedHead
from pfl_lightning.methods.fednova import FedNova
from pfl_lightning.methods.fedntd import FedNTD
from pfl_lightning.methods.fedpac import PACClient
from pfl_lightning.methods.fedpcl import FedPCL
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.fedphp import FedPHP
from pfl_lightning.methods.fedpm import FedPM
from pfl_lightning.methods.fedproto import FedProto
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedrep import FedRep
from pfl_lightning.methods.fedrod import FedRoD
from pfl_lightning.methods.fedsa_lora import FedSALoRA
from pfl_lightning.methods.fedsam import FedSAM
from pfl_lightning.methods.fedselect import FedSelect
from pfl_lightning.methods.fedsr import FedSR
from pfl_lightning.methods.fedtgp import FedTGP
from pfl_lightning.methods.feduv import FedUV
from pfl_lightning.methods.fenda import FENDA
from pfl_lightning.methods.ffa_lora import FFALoRA
from pfl_lightning.methods.flexlora import FlexLoRA
from pfl_lightning.methods.floco import FLOCO
from pfl_lightning.methods.flora import FLoRA
from pfl_lightning.methods.fml import FML
from pfl_lightning.methods.gpfl import GPFL
from pfl_lightning.methods.growing_epochs import GrowingEpochs
from pfl_lightning.methods.hetlora import HetLoRA
from pfl_lightning.methods.ifca import IFCA
from pfl_lightning.methods.knn_per import KNNPer
from pfl_lightning.methods.kt_pfl import KnowledgeTransfer
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.moon import MOON
from pfl_lightning.methods.mr_mtl import MRMTL
from pfl_lightning.methods.per_fedavg import PerFedAvg
from pfl_lightning.methods.perfcl import PerFCL
from pfl_lightning.methods.pfedfda import PFedFDA
from pfl_lightning.methods.pfedgraph import PFedGraph
from pfl_lightning.methods.pfedhn import PFedHN
from pfl_lightning.methods.pfedme import PFedMe
from pfl_lightning.methods.pooled import Pooled
from pfl_lightning.methods.q_fedavg import QFedAvg
from pfl_lightning.methods.rolora import RoLoRA
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.methods.wdr import WDR

# names of client sides and their parts; `registry` pairs client sides and server sides into methods
__all__ = [
    "APFL",
    "APPLE",
    "CCVR",
    "FENDA",
    "FLOCO",
    "FML",
    "GPFL",
    "IFCA",
    "MOON",
    "MRMTL",
    "WDR",
    "AdaptiveFedProx",
    "AlternateAlignment",
    "AlternateTraining",
    "CloudProx",
    "ControlVariates",
    "CosineClassifier",
    "DPScaffold",
    "Ditto",
    "Ensemble",
    "FFALoRA",
    "FLoRA",
    "FeatureAlignment",
    "FedALA",
    "FedALT",
    "FedAS",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedCP",
    "FedClassAvg",
    "FedDBE",
    "FedDGGA",
    "FedDPA",
    "FedDecorr",
    "FedDistill",
    "FedDyn",
    "FedETF",
    "FedExLoRA",
    "FedFomo",
    "FedGELA",
    "FedGH",
    "FedGen",
    "FedIT",
    "FedKD",
    "FedLC",
    "FedLESAM",
    "FedMD",
    "FedNTD",
    "FedNova",
    "FedPCL",
    "FedPHP",
    "FedPM",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSAM",
    "FedSR",
    "FedSelect",
    "FedTGP",
    "FedUV",
    "FlexLoRA",
    "GrowingEpochs",
    "HetLoRA",
    "KNNPer",
    "KnowledgeTransfer",
    "LGFedAvg",
    "Local",
    "NormalizedHead",
    "PACClient",
    "PFedFDA",
    "PFedGraph",
    "PFedHN",
    "PFedMe",
    "PerFCL",
    "PerFedAvg",
    "Pooled",
    "QFedAvg",
    "RoLoRA",
]
