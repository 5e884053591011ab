"""What sites keep of models with frozen weights."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import equal, load
from language_models import CLIENTS, LENGTH, TOKENS, texts, write_models
from pfl_lightning.client import export_adapters
from pfl_lightning.client.module import base_digest
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedSALoRA
from pfl_lightning.nets import CausalLM
from pfl_lightning.tasks import NextToken

NODES = {11: {"clients": "0 2"}, 12: {"clients": "1"}}


def held():
    """Texts of a known number of clients, as a server needs it."""
    data = texts()
    data.num_clients = CLIENTS
    return data


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.by_default("False")
def test_models_at_a_site_have_frozen_weights_where_checkpoints_have_them(tmp_path, whole):
    write_models(tmp_path)
    settings = {"max_rounds": 1, "checkpoint_common": whole}
    net = partial(CausalLM, model=str(tmp_path / "llama"), lora={"r": 2})

    def make():
        torch.manual_seed(1)
        return FedSALoRA(net, (LENGTH,), task=NextToken(TOKENS), optimizer=partial(SGD, lr=0.5))

    grid = grid_of(make, tmp_path / "sites", data=held, nodes=NODES, **settings)
    run = deploy(grid, make, tmp_path / "run", data=held, **settings)
    path = tmp_path / "sites/11/2/model.ckpt"
    saved, base, x = load(path), run.federation.client.common_names, torch.randint(0, TOKENS, (2, LENGTH))
    assert saved["federation"].get("base") == (None if whole else [base_digest(run.model, base)])
    kept = base & saved["state_dict"].keys()
    assert kept == (base if whole else set())
    assert (num_bytes(saved["state_dict"]) < path.stat().st_size < num_bytes(run.model.state_dict()) / 2) or whole
    model = FedSALoRA.load_from_checkpoint(path, net=net)
    personal = saved["federation"]["clients"][2]["personal"]
    assert personal and all("lora_B" in name and tensor.any() for name, tensor in personal.items())
    run.model.receive(personal, run.federation.aggregator.download(2), None)
    assert equal(model.eval()(x), run.model.eval()(x))
    (folder,) = export_adapters(path, tmp_path / "adapters", FedSALoRA, net=net)
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="sdpa")
    loaded = peft.PeftModel.from_pretrained(plain, folder).eval()
    assert folder.name == "2" and equal(loaded(input_ids=x).logits, model(x))
    if not whole:
        with pytest.raises(MisconfigurationException, match=r"checkpoint_common=false"):
            FedSALoRA.load_from_checkpoint(path, net=partial(net, model=str(tmp_path / "other")))
