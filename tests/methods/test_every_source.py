"""Each method on Datasets of clients and on a table with gaps: two rounds under each engine."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from federations import MOMENTUM, fitting, make_trainer, noisy, points
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.data import ClientDatasets, TableData
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.tasks import Classification
from sweeps import swept


def unbiased(input_shape, num_classes):
    """Return `noisy` without the bias before its BatchNorm."""
    net = noisy(input_shape, num_classes)
    net.features[0].register_parameter("bias", None)
    return net


SERVER = {"central_test": 0.2, "server_fraction": 0.3}
"""The server holds samples, of which some methods learn."""
SETTINGS = {"FedClassAvg": {"contrastive": False}}
NETS = {"FedCAC": unbiased}
"""Nets in place of `noisy`: FedCAC ranks changes, and those of a bias before a BatchNorm are rounding alone."""
NAMES = ("Bremen", "Erfurt", "Ulm", "Jena")


def datasets():
    """Four clients with a training and a test set each."""
    sets = [(TensorDataset(*points(20, seed=k)), TensorDataset(*points(8, seed=9 + k))) for k in range(4)]
    return ClientDatasets(dict(zip(NAMES, sets, strict=True)), Classification(3), batch_size=5, **SERVER)


def table():
    """Four clients in a table with gaps and texts; the server holds some rows."""
    pd = pytest.importorskip("pandas", reason="needs the extra tables")
    x, y = points(160, seed=5)
    drawn = np.random.default_rng(0)
    columns = {f"value {k}": x[:, k].numpy().astype(float) for k in range(4)}
    columns["value 0"][drawn.choice(160, 20, replace=False)] = np.nan
    columns["smokes"] = np.where(drawn.random(160) < 0.1, None, drawn.choice(["never", "once", "daily"], 160))
    columns |= {"ill": y.numpy(), "site": np.array(NAMES)[np.arange(160) % 4]}
    settings = {"batch_size": 5, "preprocessing": "auto"} | SERVER
    return TableData(pd.DataFrame(columns), "ill", Classification(3), client="site", **settings)


SOURCES = {"Datasets": datasets, "table": table}


def after_two_rounds(method, source, engine):
    """Return each client's test metrics, by client."""
    record, data = RoundLogger(), SOURCES[source]()
    torch.manual_seed(0)
    net = NETS.get(method.name, noisy)
    make = partial(method.client, fitting(method.client, net), data.input_shape, optimizer=MOMENTUM)
    # in float64, as ranks of nearly equal numbers would change by the rounding of float32
    trainer = make_trainer(max_rounds=2, engine=engine, precision="64-true", callbacks=[record])
    trainer.fit(
        make(task=data.task, **SETTINGS.get(method.name, {})), datamodule=data, aggregator=method.new_aggregator()
    )
    return [value for row in record.clients for name, value in row.items() if name.startswith("test/")]


ONE_BY_ONE = {"FedMD", "KT-pFL"}
"""Methods that the vectorised engine refuses, whatever the data."""


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("method", swept(METHODS, ("FedPer", "APPLE", "FedMD")))
@pytest.mark.by_default("FedPer-Datasets", "FedMD-table")
def test_every_method_takes_every_source_under_every_engine(method, source):
    alone = after_two_rounds(method, source, "sequential")
    assert len(alone) == 2 * len(NAMES) and np.isfinite(alone).all()
    assert after_two_rounds(method, source, "processes") == alone
    if method.name in ONE_BY_ONE:
        with pytest.raises(MisconfigurationException, match=r"trainer\.engine='vectorised'"):
            after_two_rounds(method, source, "vectorised")
    else:
        assert after_two_rounds(method, source, "vectorised") == pytest.approx(alone, rel=1e-5)
