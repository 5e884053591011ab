"""The table of methods: pairs of client module and aggregator, and their papers."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning import aggregators as a
from pfl_lightning import methods as m
from pfl_lightning.aggregators import Aggregator, AggregatorList, ClassMeans
from pfl_lightning.client import ClientModule


@dataclass(frozen=True)
class Method:
    """A method: a client module and an aggregator, under the literature's name of the pair.

    Args:
        name: the name.
        client: the client module.
        aggregator: makes the aggregator; None takes the client module's own.
        source: the class or module whose docstring names the paper, as ``Source: AUTHORS, YEAR … (URL)``; None takes
            the aggregator, or the client module where that has its own.
    """

    name: str
    client: type[ClientModule]
    aggregator: Callable[[], Aggregator] | None = None
    source: type | None = None

    @property
    def file(self) -> str:
        """The file name of a method's configuration, ``FILE.yaml`` in ``configs/methods``.

        >>> Method("KT-pFL+weight", m.GrowingEpochs, a.KTpFLWeight).file
        'kt_pfl_weight'
        """
        # lower case with underscores, like the module's own file
        return FILES.get(self.name, re.sub(r"[^a-z0-9]+", "_", self.name.lower()))

    def is_of(self, client: ClientModule, aggregator: Aggregator) -> bool:
        """Return True if a client module and an aggregator are this method's pair, with this method's settings.

        Args:
            client: the client module.
            aggregator: the aggregator.
        """
        # the very class: a subclass is another method, whatever it inherits
        if type(client) is not self.client:
            return False
        if self.aggregator is None:
            own: str = client.configure_aggregator().name
            return own == aggregator.name
        # a `partial` in the table names the settings that tell a variant from its method, such as `distribution`
        settings = self.aggregator.keywords if isinstance(self.aggregator, partial) else {}
        return self.aggregator().name == aggregator.name and all(
            getattr(aggregator, name) == value for name, value in settings.items()
        )

    @property
    def pair(self) -> tuple[str, str]:
        """Names of the client module and the aggregator."""
        return self.client.__name__, self.new_aggregator().name

    def new_aggregator(self) -> Aggregator:
        """Return a new aggregator, before `Aggregator.setup`."""
        if self.aggregator is not None:
            return self.aggregator()
        # a client module draws initial weights, and a look at the table must not move the caller's random state
        with isolate_rng():
            aggregator: Aggregator = self.client().configure_aggregator()
        return aggregator

    @property
    def paper(self) -> tuple[str, str]:
        """Authors, year and address of the paper; empty without one.

        >>> Method("FedPer", m.FedPer).paper
        ('Arivazhagan et al., 2019', 'https://arxiv.org/abs/1912.00818')
        """
        # a server-side method, such as FedAdam, has its paper in the aggregator's docstring
        bearer = self.source or (self.aggregator if isinstance(self.aggregator, type) else self.client)
        # the class first: a module may hold several methods of several papers
        for text in (bearer.__doc__, inspect.getmodule(bearer).__doc__):
            if found := PAPER.search(text or ""):
                return " ".join(found["paper"].split()), found["url"]
        return "", ""


FILES = {
    "AdaptiveFedProx": "adaptive_fedprox",
    "L-DAWA": "ldawa",
    "cwFedAvg-noWDR": "cwfedavg_no_wdr",
    "pFedMe": "pfedme",
}
"""File names of methods that aren't their name in lower case with underscores."""

PAPER = re.compile(r"Source:\s+(?P<paper>[^(]*?\d{4})[^(]*\((?P<url>https?://[^)\s]+)\)")


def aligned_fedrema() -> Aggregator:
    """Return FedReMa's server beside a mean of prototypes, for clients with feature alignment."""
    return AggregatorList([a.FedReMa(), ClassMeans(weighted=False)])


METHODS = (
    Method("Local", m.Local),
    Method("FedAvg", m.FedAvg),
    Method("Pooled", m.Pooled),
    Method("Ensemble", m.Ensemble),
    Method("Cyclic", m.FedAvg, a.CyclicTransfer),
    Method("FedProx", m.FedProx),
    Method("AdaptiveFedProx", m.AdaptiveFedProx),
    Method("FedAvgM", m.FedAvg, a.FedAvgM),
    Method("FedAdagrad", m.FedAvg, a.FedAdagrad),
    Method("FedAdam", m.FedAvg, a.FedAdam),
    Method("FedYogi", m.FedAvg, a.FedYogi),
    Method("FedExP", m.FedAvg, a.FedExP),
    Method("FedBuff", m.FedAvg, a.FedBuff),
    Method("FedAsync", m.FedProx, a.FedAsync),
    Method("FedCross", m.FedAvg, a.FedCross),
    Method("FedNova", m.FedNova),
    Method("q-FedAvg", m.QFedAvg),
    Method("FedDG-GA", m.FedDGGA),
    Method("SCAFFOLD", m.ControlVariates, a.SCAFFOLD),
    Method("DP-SCAFFOLD", m.DPScaffold),
    Method("FedDyn", m.FedDyn),
    Method("FedSAM", m.FedSAM),
    Method("FedLESAM", m.FedLESAM),
    Method("FedLC", m.FedLC),
    Method("FedNTD", m.FedNTD),
    Method("MOON", m.MOON),
    Method("FedUV", m.FedUV),
    Method("FedDecorr", m.FedDecorr),
    Method("FedETF", m.FedETF),
    Method("FedSR", m.FedSR),
    Method("FedPM", m.FedPM),
    Method("FedNH", m.NormalizedHead, a.FedNH),
    Method("FedGen", m.FedGen),
    Method("CCVR", m.CCVR),
    Method("FedLAW", m.FedAvg, a.FedLAW),
    Method("FedDF", m.FedAvg, a.FedDF),
    Method("L-DAWA", m.FedAvg, a.LDAWA),
    Method("FedDisco", m.FedAvg, a.FedDisco),
    Method("FedAWA", m.FedAvg, a.FedAWA),
    Method("FedAWA-L", m.FedAvg, a.FedAWAL),
    Method("Per-FedAvg", m.PerFedAvg),
    Method("pFedMe", m.PFedMe),
    Method("Ditto", m.Ditto),
    Method("MR-MTL", m.MRMTL),
    Method("APFL", m.APFL),
    Method("FML", m.FML),
    Method("FedKD", m.FedKD),
    Method("FedPHP", m.FedPHP),
    Method("FedBN", m.FedBN),
    Method("FedPer", m.FedPer),
    Method("FENDA-FL", m.FENDA),
    Method("PerFCL", m.PerFCL),
    Method("LG-FedAvg", m.LGFedAvg),
    Method("FedRep", m.FedRep),
    Method("FedBABU", m.FedBABU),
    Method("FedDBE", m.FedDBE),
    Method("GPFL", m.GPFL),
    Method("FedCP", m.FedCP),
    Method("FedAS", m.FedAS),
    Method("kNN-Per", m.KNNPer),
    Method("FedRoD", m.FedRoD),
    Method("FedGELA", m.FedGELA),
    Method("pFedFDA", m.PFedFDA),
    Method("FLOCO", m.FLOCO),
    Method("FedALA", m.FedALA),
    Method("FedAMP", m.CloudProx, a.FedAMP),
    Method("pFedSim", m.FedAvg, a.PFedSim),
    Method("FedFomo", m.FedFomo),
    Method("APPLE", m.APPLE),
    Method("pFedGraph", m.PFedGraph),
    Method("FedCAC", m.FedCAC),
    Method("FedSelect", m.FedSelect),
    Method("pFedHN", m.PFedHN),
    Method("CFL", m.FedAvg, a.CFL),
    Method("IFCA", m.IFCA),
    Method("FedDistill", m.FedDistill),
    Method("FedProto", m.FedProto),
    Method("FedPCL", m.FedPCL),
    Method("FedTGP", m.FedTGP),
    Method("FedGH", m.FedGH),
    Method("FedPAC", m.PACClient),
    Method("FedMD", m.FedMD),
    Method("KT-pFL", m.KnowledgeTransfer),
    Method("KT-pFL+weight", m.GrowingEpochs, a.KTpFLWeight),
    Method("FedClassAvg", m.FedClassAvg),
    Method("cwFedAvg", m.WDR),
    Method("cwFedAvg-noWDR", m.FedAvg, a.CwFedAvg),
    Method("cwFedAvg-Dist", m.FedAvg, partial(a.CwFedAvg, distribution="counts"), source=a.CwFedAvg),
    Method("FedReMa", m.FedAvg, a.FedReMa),
    Method("FedReMa+A", m.AlternateTraining, a.FedReMa),
    Method("FedReMa+F", m.FeatureAlignment, aligned_fedrema, source=a.FedReMa),
    Method("FedReMa+AF", m.AlternateAlignment, aligned_fedrema, source=a.FedReMa),
    Method("FedIT", m.FedIT),
    Method("FFA-LoRA", m.FFALoRA),
    Method("FedSA-LoRA", m.FedSALoRA),
    Method("RoLoRA", m.RoLoRA),
    Method("FlexLoRA", m.FlexLoRA),
    Method("HetLoRA", m.HetLoRA),
    Method("FedEx-LoRA", m.FedExLoRA),
    Method("FLoRA", m.FLoRA),
    Method("FedDPA", m.FedDPA),
    Method("FedALT", m.FedALT),
)
"""All methods, in the table's order. A new method needs one entry; the table's columns are found from the classes."""


def method_of(client: ClientModule, aggregator: Aggregator) -> str:
    """Return the literature's name for a client module and an aggregator, or else the classes' names.

    >>> method_of(m.WDR(), a.CwFedAvg()), method_of(m.FedProx(), a.FedAWA())
    ('cwFedAvg', 'FedProx+FedAWA')

    Args:
        client: the client module.
        aggregator: the aggregator.
    """
    # a variant with settings wins over the plain method, whose pair it has too
    found = [method for method in METHODS if method.is_of(client, aggregator)]
    if found:
        return max(found, key=lambda method: isinstance(method.aggregator, partial)).name
    own = client.configure_aggregator().name == aggregator.name
    return type(client).__name__ if own else f"{type(client).__name__}+{aggregator.name}"
