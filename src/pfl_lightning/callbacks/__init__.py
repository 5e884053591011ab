"""Callbacks: base class, record of a run, progress, checkpoints, reports for loggers, pictures, attacks and audits."""

from pfl_lightning.callbacks.adapter_folders import AdapterFolders
from pfl_lightning.callbacks.aggregation_pictures import AggregationPictures
from pfl_lightning.callbacks.answer_scores import AnswerScores
from pfl_lightning.callbacks.attacks import (
    ALIE,
    IPM,
    AdaptiveAttack,
    Attack,
    Backdoor,
    BufferAttack,
    FreeRider,
    GaussianUpload,
    LabelFlip,
    MinMax,
    MinSum,
    ModelReplacement,
    SignFlip,
)
from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.calibration_pictures import CalibrationPictures
from pfl_lightning.callbacks.canary_audit import CanaryAudit
from pfl_lightning.callbacks.channels_last import ChannelsLast
from pfl_lightning.callbacks.checkpoints import BestCheckpoint, LastCheckpoint, best_checkpoint, is_pair
from pfl_lightning.callbacks.class_pictures import ClassPictures
from pfl_lightning.callbacks.distribution_estimate import DistributionEstimate
from pfl_lightning.callbacks.drift_pictures import DriftPictures
from pfl_lightning.callbacks.edge_table import EdgeTable
from pfl_lightning.callbacks.feature_pictures import FeaturePictures
from pfl_lightning.callbacks.first_rounds import FirstRounds
from pfl_lightning.callbacks.flop_counter import FlopCounter
from pfl_lightning.callbacks.generation_samples import GenerationSamples
from pfl_lightning.callbacks.matmul_precision import MatmulPrecision
from pfl_lightning.callbacks.membership_audit import MembershipAudit
from pfl_lightning.callbacks.progress import RoundProgress, RunBanner, RunBar
from pfl_lightning.callbacks.round_logger import RoundLogger
from pfl_lightning.callbacks.sample_scores import SampleScores
from pfl_lightning.callbacks.similarity_pictures import SimilarityPictures
from pfl_lightning.callbacks.trackers import TensorBoardReport, WandbReport

__all__ = [
    "ALIE",
    "IPM",
    "AdapterFolders",
    "AdaptiveAttack",
    "AggregationPictures",
    "AnswerScores",
    "Attack",
    "Backdoor",
    "BestCheckpoint",
    "BufferAttack",
    "CalibrationPictures",
    "CanaryAudit",
    "ChannelsLast",
    "ClassPictures",
    "DistributionEstimate",
    "DriftPictures",
    "EdgeTable",
    "FeaturePictures",
    "FederatedCallback",
    "FirstRounds",
    "FlopCounter",
    "FreeRider",
    "GaussianUpload",
    "GenerationSamples",
    "LabelFlip",
    "LastCheckpoint",
    "MatmulPrecision",
    "MembershipAudit",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "RoundLogger",
    "RoundProgress",
    "RunBanner",
    "RunBar",
    "SampleScores",
    "SignFlip",
    "SimilarityPictures",
    "TensorBoardReport",
    "WandbReport",
    "best_checkpoint",
    "is_pair",
]
