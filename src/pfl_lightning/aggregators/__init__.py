"""The server side: aggregators combine the updates of a round into each client's next payload."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pfl_lightning.aggregators.aggregator_list import AggregatorList
from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.aggregators.class_means import ClassMeans
from pfl_lightning.aggregators.means import Mean
from pfl_lightning.aggregators.model_pool import ModelPool, inner_products, mean_loss
from pfl_lightning.aggregators.weighted_average import (
    WeightedAverage,
    Weighting,
    client_weights,
    mean_model,
    moved_model,
)

if TYPE_CHECKING:
    from pfl_lightning.methods.adaptive_fedprox import AdaptiveProximal
    from pfl_lightning.methods.apple import CorePool
    from pfl_lightning.methods.ccvr import VirtualFeatures
    from pfl_lightning.methods.cfl import CFL
    from pfl_lightning.methods.cwfedavg import CwFedAvg
    from pfl_lightning.methods.cyclic import CyclicTransfer
    from pfl_lightning.methods.fedalt import RestOfWorld
    from pfl_lightning.methods.fedamp import FedAMP
    from pfl_lightning.methods.fedas import FisherAverage
    from pfl_lightning.methods.fedasync import FedAsync
    from pfl_lightning.methods.fedawa import FedAWA
    from pfl_lightning.methods.fedawa_l import FedAWAL
    from pfl_lightning.methods.fedbuff import FedBuff
    from pfl_lightning.methods.fedcac import CriticalAverage
    from pfl_lightning.methods.fedcross import FedCross
    from pfl_lightning.methods.feddbe import DomainConsensus
    from pfl_lightning.methods.feddf import FedDF
    from pfl_lightning.methods.feddg_ga import GeneralizationAdjustment
    from pfl_lightning.methods.feddisco import FedDisco
    from pfl_lightning.methods.feddyn import DynamicAverage
    from pfl_lightning.methods.fedex_lora import ResidualAverage
    from pfl_lightning.methods.fedexp import FedExP
    from pfl_lightning.methods.fedfomo import AffinityPool
    from pfl_lightning.methods.fedgen import FeatureGenerator
    from pfl_lightning.methods.fedgh import GlobalHeader
    from pfl_lightning.methods.fedit import AdapterAverage
    from pfl_lightning.methods.fedkd import LowRankAverage
    from pfl_lightning.methods.fedlaw import FedLAW
    from pfl_lightning.methods.fedmd import Consensus
    from pfl_lightning.methods.fednh import FedNH
    from pfl_lightning.methods.fednova import NormalizedAverage
    from pfl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
    from pfl_lightning.methods.fedpac import ClassifierCombination, FedPAC
    from pfl_lightning.methods.fedpcl import PrototypeTables
    from pfl_lightning.methods.fedpm import BetaMean
    from pfl_lightning.methods.fedrema import FedReMa
    from pfl_lightning.methods.fedselect import MaskedAverage
    from pfl_lightning.methods.fedtgp import TrainablePrototypes
    from pfl_lightning.methods.flexlora import ProductAverage
    from pfl_lightning.methods.floco import SubregionAverage
    from pfl_lightning.methods.flora import StackedAverage
    from pfl_lightning.methods.hetlora import NormAverage
    from pfl_lightning.methods.ifca import ClusterModels
    from pfl_lightning.methods.knowledge_coefficients import KnowledgeCoefficients
    from pfl_lightning.methods.kt_pfl import KTpFL
    from pfl_lightning.methods.kt_pfl_weight import KTpFLWeight
    from pfl_lightning.methods.ldawa import LDAWA
    from pfl_lightning.methods.pfedfda import FeatureStatistics
    from pfl_lightning.methods.pfedgraph import CollaborationGraph
    from pfl_lightning.methods.pfedhn import HyperNetwork
    from pfl_lightning.methods.pfedsim import PFedSim
    from pfl_lightning.methods.q_fedavg import FairAverage
    from pfl_lightning.methods.scaffold import SCAFFOLD

__all__ = [
    "CFL",
    "LDAWA",
    "SCAFFOLD",
    "AdapterAverage",
    "AdaptiveProximal",
    "AffinityPool",
    "Aggregator",
    "AggregatorList",
    "BetaMean",
    "ClassMeans",
    "ClassifierCombination",
    "ClusterModels",
    "CollaborationGraph",
    "Consensus",
    "CorePool",
    "CriticalAverage",
    "CwFedAvg",
    "CyclicTransfer",
    "DomainConsensus",
    "DynamicAverage",
    "FairAverage",
    "FeatureGenerator",
    "FeatureStatistics",
    "FedAMP",
    "FedAWA",
    "FedAWAL",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvgM",
    "FedBuff",
    "FedCross",
    "FedDF",
    "FedDisco",
    "FedExP",
    "FedLAW",
    "FedNH",
    "FedPAC",
    "FedReMa",
    "FedYogi",
    "FisherAverage",
    "GeneralizationAdjustment",
    "GlobalHeader",
    "HyperNetwork",
    "KTpFL",
    "KTpFLWeight",
    "KnowledgeCoefficients",
    "LowRankAverage",
    "MaskedAverage",
    "Mean",
    "ModelPool",
    "NormAverage",
    "NormalizedAverage",
    "PFedSim",
    "ProductAverage",
    "PrototypeTables",
    "ResidualAverage",
    "RestOfWorld",
    "Server",
    "StackedAverage",
    "SubregionAverage",
    "TrainablePrototypes",
    "VirtualFeatures",
    "WeightedAverage",
    "Weighting",
    "client_weights",
    "inner_products",
    "mean_loss",
    "mean_model",
    "moved_model",
]

SERVERS = {
    "AdapterAverage": "fedit",
    "AdaptiveProximal": "adaptive_fedprox",
    "AffinityPool": "fedfomo",
    "BetaMean": "fedpm",
    "CFL": "cfl",
    "ClassifierCombination": "fedpac",
    "ClusterModels": "ifca",
    "CollaborationGraph": "pfedgraph",
    "Consensus": "fedmd",
    "CorePool": "apple",
    "CriticalAverage": "fedcac",
    "CwFedAvg": "cwfedavg",
    "CyclicTransfer": "cyclic",
    "DomainConsensus": "feddbe",
    "DynamicAverage": "feddyn",
    "FairAverage": "q_fedavg",
    "FeatureGenerator": "fedgen",
    "FeatureStatistics": "pfedfda",
    "FedAMP": "fedamp",
    "FedAWA": "fedawa",
    "FedAWAL": "fedawa_l",
    "FedAdagrad": "fedopt",
    "FedAdam": "fedopt",
    "FedAsync": "fedasync",
    "FedAvgM": "fedopt",
    "FedBuff": "fedbuff",
    "FedCross": "fedcross",
    "FedDF": "feddf",
    "FedDisco": "feddisco",
    "FedExP": "fedexp",
    "FedLAW": "fedlaw",
    "FedNH": "fednh",
    "FedPAC": "fedpac",
    "FedReMa": "fedrema",
    "FedYogi": "fedopt",
    "FisherAverage": "fedas",
    "GeneralizationAdjustment": "feddg_ga",
    "GlobalHeader": "fedgh",
    "HyperNetwork": "pfedhn",
    "KTpFL": "kt_pfl",
    "KTpFLWeight": "kt_pfl_weight",
    "KnowledgeCoefficients": "knowledge_coefficients",
    "LDAWA": "ldawa",
    "LowRankAverage": "fedkd",
    "MaskedAverage": "fedselect",
    "NormAverage": "hetlora",
    "NormalizedAverage": "fednova",
    "PFedSim": "pfedsim",
    "ProductAverage": "flexlora",
    "PrototypeTables": "fedpcl",
    "ResidualAverage": "fedex_lora",
    "RestOfWorld": "fedalt",
    "SCAFFOLD": "scaffold",
    "StackedAverage": "flora",
    "SubregionAverage": "floco",
    "TrainablePrototypes": "fedtgp",
    "VirtualFeatures": "ccvr",
}
"""Server sides of methods, each with the module of `pfl_lightning.methods` that defines it."""

# hidden from type checkers, which would take any name for one of the package
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # imported on first use: a method's file, with both sides, is built on the aggregators of this package
        if name in SERVERS:
            return getattr(import_module(f"pfl_lightning.methods.{SERVERS[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
