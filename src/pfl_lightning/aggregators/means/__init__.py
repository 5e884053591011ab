"""Robust rules in place of the mean: few bad uploads move the result little."""

from pfl_lightning.aggregators.means.base import Averaging, Combined, Mean
from pfl_lightning.aggregators.means.bulyan import Bulyan
from pfl_lightning.aggregators.means.clipping import CentredClipping, NormBound
from pfl_lightning.aggregators.means.coordinates import CoordinateMedian, TrimmedMean
from pfl_lightning.aggregators.means.fltrust import FLTrust
from pfl_lightning.aggregators.means.geometric_median import GeometricMedian
from pfl_lightning.aggregators.means.krum import Krum, MultiKrum
from pfl_lightning.aggregators.means.premixing import Bucketing, NearestNeighbourMixing

__all__ = [
    "Averaging",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "Combined",
    "CoordinateMedian",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "Mean",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormBound",
    "TrimmedMean",
]
