"""Methods of personalised federated learning, one file each: client modules and aggregators."""

from pfl_lightning.methods.alternate_training import AlternateAlignment, AlternateTraining
from pfl_lightning.methods.apfl import APFL
from pfl_lightning.methods.apple import APPLE, CorePool
from pfl_lightning.methods.cfl import CFL
from pfl_lightning.methods.cwfedavg import CwFedAvg
from pfl_lightning.methods.cyclic import CyclicTransfer
from pfl_lightning.methods.ditto import Ditto
from pfl_lightning.methods.ensemble import Ensemble
from pfl_lightning.methods.feature_alignment import FeatureAlignment
from pfl_lightning.methods.fedala import FedALA
from pfl_lightning.methods.fedamp import CloudProx, FedAMP
from pfl_lightning.methods.fedas import FedAS, FisherAverage
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedawa import FedAWA
from pfl_lightning.methods.fedawa_l import FedAWAL
from pfl_lightning.methods.fedbabu import FedBABU
from pfl_lightning.methods.fedbn import FedBN
from pfl_lightning.methods.fedcac import CriticalAverage, FedCAC
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.fedcp import FedCP
from pfl_lightning.methods.feddbe import DomainConsensus, FedDBE
from pfl_lightning.methods.feddf import FedDF
from pfl_lightning.methods.feddisco import FedDisco
from pfl_lightning.methods.feddistill import FedDistill
from pfl_lightning.methods.feddyn import DynamicAverage, FedDyn
from pfl_lightning.methods.fedfomo import AffinityPool, FedFomo
from pfl_lightning.methods.fedgen import FeatureGenerator, FedGen
from pfl_lightning.methods.fedgh import FedGH, GlobalHeader
from pfl_lightning.methods.fedlaw import FedLAW
from pfl_lightning.methods.fedlc import FedLC
from pfl_lightning.methods.fedmd import Consensus, FedMD
from pfl_lightning.methods.fednh import CosineClassifier, FedNH, NormalizedHead
from pfl_lightning.methods.fednova import FedNova, NormalizedAverage
from pfl_lightning.methods.fedntd import FedNTD
from pfl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from pfl_lightning.methods.fedpac import ClassifierCombination, FedPAC, PACClient
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.fedphp import FedPHP
from pfl_lightning.methods.fedproto import FedProto
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedrema import FedReMa
from pfl_lightning.methods.fedrep import FedRep
from pfl_lightning.methods.fedrod import FedRoD
from pfl_lightning.methods.fedsam import FedSAM
from pfl_lightning.methods.fedtgp import FedTGP, TrainablePrototypes
from pfl_lightning.methods.feduv import FedUV
from pfl_lightning.methods.fml import FML
from pfl_lightning.methods.gpfl import GPFL
from pfl_lightning.methods.growing_epochs import GrowingEpochs
from pfl_lightning.methods.ifca import IFCA, ClusterModels
from pfl_lightning.methods.knn_per import KNNPer
from pfl_lightning.methods.knowledge_coefficients import KnowledgeCoefficients
from pfl_lightning.methods.kt_pfl import KnowledgeTransfer, KTpFL
from pfl_lightning.methods.kt_pfl_weight import KTpFLWeight
from pfl_lightning.methods.ldawa import LDAWA
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.moon import MOON
from pfl_lightning.methods.per_fedavg import PerFedAvg
from pfl_lightning.methods.pfedhn import HyperNetwork, PFedHN
from pfl_lightning.methods.pfedme import PFedMe
from pfl_lightning.methods.pooled import Pooled
from pfl_lightning.methods.q_fedavg import FairAverage, QFedAvg
from pfl_lightning.methods.scaffold import SCAFFOLD, ControlVariates
from pfl_lightning.methods.wdr import WDR

# names of client sides, server sides and parts alike; `registry` pairs them into methods
__all__ = [
    "APFL",
    "APPLE",
    "CFL",
    "FML",
    "GPFL",
    "IFCA",
    "LDAWA",
    "MOON",
    "SCAFFOLD",
    "WDR",
    "AffinityPool",
    "AlternateAlignment",
    "AlternateTraining",
    "ClassifierCombination",
    "CloudProx",
    "ClusterModels",
    "Consensus",
    "ControlVariates",
    "CorePool",
    "CosineClassifier",
    "CriticalAverage",
    "CwFedAvg",
    "CyclicTransfer",
    "Ditto",
    "DomainConsensus",
    "DynamicAverage",
    "Ensemble",
    "FairAverage",
    "FeatureAlignment",
    "FeatureGenerator",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAWA",
    "FedAWAL",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedCP",
    "FedClassAvg",
    "FedDBE",
    "FedDF",
    "FedDisco",
    "FedDistill",
    "FedDyn",
    "FedFomo",
    "FedGH",
    "FedGen",
    "FedLAW",
    "FedLC",
    "FedMD",
    "FedNH",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPHP",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedReMa",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedTGP",
    "FedUV",
    "FedYogi",
    "FisherAverage",
    "GlobalHeader",
    "GrowingEpochs",
    "HyperNetwork",
    "KNNPer",
    "KTpFL",
    "KTpFLWeight",
    "KnowledgeCoefficients",
    "KnowledgeTransfer",
    "LGFedAvg",
    "Local",
    "NormalizedAverage",
    "NormalizedHead",
    "PACClient",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "Pooled",
    "QFedAvg",
    "TrainablePrototypes",
]
