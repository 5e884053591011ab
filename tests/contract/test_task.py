"""Whether a client module fits the data of a run, looked at before the first round."""

import torch

from federations import blobs, make_client
from pfl_lightning.contract.task import check_task


def test_a_module_is_looked_at_where_it_is_and_not_where_it_will_be():
    # Lightning's Trainer sets `_device` before the hook `setup`, and moves the module after it
    data, client = blobs(), make_client()
    data.setup()
    client._device = torch.device("meta")
    check_task(client, data)
