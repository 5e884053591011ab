"""The examples do what they say."""

import sys
from pathlib import Path

import pytest
import torch

from pfl_lightning.engines.slots import Slots
from pfl_lightning.messages import digest, tensors
from pfl_lightning.methods import FedAvg, FedPer

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def test_a_plain_loop_gives_the_same_weights(tmp_path, monkeypatch, capsys):
    import fedavg_by_hand

    monkeypatch.chdir(tmp_path)
    fedavg_by_hand.main()
    shown = capsys.readouterr().out
    assert shown.count("largest difference 0.0e+00") == len(shown.splitlines()) == 4


WANTED = "pip install 'pfl-lightning[lora]' for transformers and peft, which this test is about"


@pytest.fixture
def lora():
    pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("peft", reason=WANTED)
    import lora

    return lora


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_adapters_travel_alone_under_both_engines(lora, method):
    runs = [lora.fit(method, engine) for engine in ("sequential", "vectorised")]
    ends = [(t.lightning_module.state_dict(), [s.personal for s in t.lightning_module.clients.values()]) for t in runs]
    for one, other in zip(*map(tensors, ends), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    client = runs[1].lightning_module.client
    adapters = 2 * 4 * (64 + 3 * 64)
    head = 64 * client.task.outputs
    size = sum(parameter.numel() for parameter in client.net.parameters())
    sent, kept = lora.shares(runs[1])
    expected = (adapters + head, 0) if method is FedAvg else (adapters, head)
    assert (sent * size, kept * size) == pytest.approx(expected)
    stacked = {slot.name for slot in Slots(client) if isinstance(slot.tensor, torch.nn.Parameter)}
    assert stacked == {name for name, p in client.named_parameters() if "lora_" in name or "modules_to_save" in name}
    torch.manual_seed(0)
    untrained = lora.AdaptedGPT2(client.hparams.input_shape, client.task.outputs).state_dict()
    before = {name: untrained[name.removeprefix("net.")] for name in sorted(client.common_names)}
    after = {name: ends[1][0][name] for name in before}
    assert before and digest(before) == digest(after)


def test_adapters_of_a_client_can_be_saved_for_peft(lora, tmp_path):
    from peft import PeftModel

    trainer = lora.fit(FedPer, "vectorised", root=tmp_path)
    path = Path(trainer.log_dir) / "checkpoints" / "last.ckpt"
    settings = {"net": lora.AdaptedGPT2, "optimizer": torch.optim.AdamW, "weights_only": True}
    net = FedPer.load_from_checkpoint(path, client=3, **settings).net.eval()
    net.adapted.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 40_000
    torch.manual_seed(9)
    other = lora.AdaptedGPT2(trainer.lightning_module.client.hparams.input_shape, net.classifier.weight.shape[0])
    base = other.adapted.unload()
    frozen = {name.replace(".base_layer", ""): t for name, t in net.adapted.get_base_model().state_dict().items()}
    base.load_state_dict({name: frozen.get(name, t) for name, t in base.state_dict().items()})
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    x = trainer.datamodule.part(3, "test").x
    with torch.no_grad():
        torch.testing.assert_close(loaded(**x).logits, net(x))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_are_documented(path):
    assert path.read_text().startswith('"""')
