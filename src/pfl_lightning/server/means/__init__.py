"""Robust rules in place of the mean: few bad uploads move the result little."""

from pfl_lightning.server.means.base import Averaging, Combined, Mean
from pfl_lightning.server.means.bulyan import Bulyan
from pfl_lightning.server.means.clipping import CentredClipping, NormBound
from pfl_lightning.server.means.coordinates import CoordinateMedian, TrimmedMean
from pfl_lightning.server.means.fltrust import FLTrust
from pfl_lightning.server.means.geometric_median import GeometricMedian
from pfl_lightning.server.means.krum import Krum, MultiKrum
from pfl_lightning.server.means.premixing import Bucketing, NearestNeighbourMixing

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
