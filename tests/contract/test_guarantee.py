"""Which client modules get a guarantee of privacy, and which are refused, for every packaged method."""

from pathlib import Path

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import CONFIGS
from federations import blobs, fit, make_client
from pfl_lightning import AggregatorList, ClassMeans, methods
from pfl_lightning.contract.guarantee import unfit
from pfl_lightning.methods import FedAvg, FedPer, FedUV
from pfl_lightning.privacy import DPAverage
from pfl_lightning.selection import Availability, Oort, Poisson, PowerOfChoice, Uniform

FILES = sorted((CONFIGS / "methods").glob("*.yaml"))
REASONS = {
    "AdaptiveFedProx": "sends received_loss beside weights",
    "APPLE": "needs models and shares beside weights",
    "CloudProx": "doesn't set client_level",
    "FedDyn": "needs mean_samples beside weights",
    "FedNova": "sends normalizer and steps beside weights",
    "FedProto": "sends prototypes beside weights",
    "Local": "sends nothing",
    "Pooled": "doesn't set client_level",
    "RoLoRA": "doesn't set client_level",
}
"""Why some client modules are refused; docs/privacy.md has them all."""


def client_of(path: Path):
    model = yaml.safe_load(path.read_text())["model"]
    settings = model.get("init_args", {})
    # points have no views, and the guarantee takes no BatchNorm whose statistics travel
    off = {name: False for name in ("contrastive", "batch_norm") if name in settings}
    return getattr(methods, model["class_path"]), settings | off


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.by_default("fedavg", "fedper", "scaffold", "fedproto", "fedamp", "fedit", "ditto", "local")
def test_each_method_runs_with_its_guarantee_or_is_refused_with_the_reason(path):
    kind, settings = client_of(path)
    client = make_client(kind, **settings)
    if reason := unfit(client):
        assert kind.__name__ not in REASONS or reason.startswith(REASONS[kind.__name__])
        with pytest.raises(MisconfigurationException, match=f"^model={kind.__name__} {reason}"):
            fit(client, aggregator=DPAverage(noise_multiplier=1.0))
    else:
        assert kind.__name__ not in REASONS
        run = fit(client, blobs(12, 12, 12), aggregator=DPAverage(noise_multiplier=1.0), max_rounds=1, local_steps=1)
        assert run.rows[0]["privacy/epsilon"] > 0 and run.federation.client.withheld == {"num_samples"}


def test_a_subclass_does_not_inherit_the_yes():
    class Telling(FedUV):
        """One that could hide anything in its weights."""

    class Sure(FedPer):
        client_level = True

    assert unfit(make_client(Telling)).startswith("doesn't set client_level")
    assert unfit(make_client(Sure)) == unfit(make_client(FedUV)) == ""


def test_a_changed_aggregator_does_not_inherit_its_guarantee():
    class Quiet(DPAverage):
        """Half the noise, perhaps."""

    class Same(DPAverage):
        guarantee = "client"

    with pytest.raises(MisconfigurationException, match="aggregator=Quiet changes DPAverage"):
        fit(make_client(), aggregator=Quiet(noise_multiplier=1.0))
    assert fit(make_client(), aggregator=Same(noise_multiplier=1.0), max_rounds=1).rows


def test_nothing_unprotected_stands_beside_it():
    both = AggregatorList([DPAverage(noise_multiplier=1.0), ClassMeans()])
    with pytest.raises(MisconfigurationException, match=r"ClassMeans .* beside DPAverage"):
        fit(make_client(methods.FeatureAlignment), aggregator=both)


def test_a_least_number_of_clients_is_refused():
    with pytest.raises(MisconfigurationException, match="min_clients=2 "):
        fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0), min_clients=2)


class Own(Uniform):
    """Draws in a way of its own."""


@pytest.mark.parametrize("cohort", [PowerOfChoice(3), Oort(), Own()], ids=lambda cohort: type(cohort).__name__)
def test_a_choice_by_what_clients_are_like_is_refused(cohort):
    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort chooses clients"):
        fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0), clients_per_round=2, cohort=cohort)


def test_what_sums_are_divided_by_is_known_before(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("client,day\n" + "".join(f"{client},0.5\n" for client in range(4)))
    cohorts = {Uniform(): (2, 1.0), Availability(str(table)): (2, 1.0), Poisson(0.25): (1.0, 0.25)}
    for cohort, expected in cohorts.items():
        share = {} if isinstance(cohort, Poisson) else {"clients_per_round": 2}
        run = fit(make_client(FedAvg), aggregator=DPAverage(noise_multiplier=1.0), max_rounds=1, cohort=cohort, **share)
        assert run.federation.aggregator.sampling == expected
