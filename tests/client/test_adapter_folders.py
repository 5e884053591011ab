"""What peft loads from a client's folder is the client's model, or the method is refused by its name."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import AdamW

from federations import make_trainer
from language_models import ATTENTION, LENGTH, TOKENS, texts, write_models
from pfl_lightning.callbacks import AdapterFolders
from pfl_lightning.client import adapter_folders, export_adapters, save_adapters
from pfl_lightning.methods import (
    APFL,
    Ditto,
    FedALT,
    FedDPA,
    FedExLoRA,
    FedIT,
    FFALoRA,
    FLoRA,
    PFedMe,
)
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.nets import CausalLM, Net
from pfl_lightning.tasks import NextToken

peft = pytest.importorskip("peft", reason="needs the extra lm")
transformers = pytest.importorskip("transformers", reason="needs the extra lm")

NAMES = ["Anna", "Anna", "Anna", "b/c", "b/c", "global"]
FOLDERS = ["global", "Anna", "b%2Fc", "global_"]
OF_ADAPTERS = {method.name: method.client for method in METHODS if "adapters" in method.client.requires}
SERVERS = {method.name: method.new_aggregator for method in METHODS}
PLAIN, SCALED = {"r": 2, "alpha": 3}, {"r": 3, "alpha": 5, "rslora": True, "targets": ["q_proj", "v_proj", "down_proj"]}
FOURS = {"r": 4, "alpha": 6, "rslora": True}
CASES = {
    **{f"{name}-llama": (kind, "llama", PLAIN, {}) for name, kind in OF_ADAPTERS.items()},
    **{f"{name}-llama-rslora": (kind, "llama", SCALED, {}) for name, kind in OF_ADAPTERS.items()},
    **{f"{name}-gpt2": (kind, "gpt2", PLAIN, {}) for name, kind in OF_ADAPTERS.items()},
    **{
        f"{name}-{model}-ranks": (OF_ADAPTERS[name], model, FOURS, {"ranks": [1, 4, 2]})
        for name in ("HetLoRA", "FlexLoRA", "LoRA-SVD", "FLoRA")
        for model in ("llama", "gpt2")
    },
    **{
        f"{kind.__name__}-llama-dora": (kind, "llama", {**PLAIN, "dora": True}, {})
        for kind in (FedDPA, FedExLoRA, FedIT)
    },
    "FedIT-llama-pissa": (FedIT, "llama", {**PLAIN, "init_lora_weights": "pissa"}, {}),
    "FedDPA-llama-patterns": (
        *(FedDPA, "llama", {**PLAIN, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}}),
        {"local_weight": 0.3},
    ),
    "FedDPA-llama-head": (FedDPA, "llama", {**PLAIN, "modules_to_save": ["lm_head"]}, {"local_weight": 1.0}),
    "Ditto-llama": (Ditto, "llama", {**PLAIN, "modules_to_save": ["lm_head"]}, {}),
    "PFedMe-gpt2": (PFedMe, "gpt2", PLAIN, {}),
}
BY_DEFAULT = [
    *("FedDPA-llama", "FFA-LoRA-llama", "FedSA-LoRA-llama", "FedEx-LoRA-gpt2", "FLoRA-gpt2", "FedEx-LoRA-llama-rslora"),
    *("HetLoRA-llama-ranks", "FlexLoRA-gpt2-ranks", "FLoRA-llama-ranks", "FedDPA-llama-dora", "FedExLoRA-llama-dora"),
    *("FedIT-llama-pissa", "FedDPA-llama-patterns", "FedDPA-llama-head", "Ditto-llama"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by family."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def net_of(models, family, lora):
    return partial(CausalLM, model=str(models / family), lora=lora, attention=ATTENTION.get(family, "sdpa"))


def client_of(method, net, **settings):
    torch.manual_seed(1)
    settings = {"optimizer": partial(AdamW, lr=0.03), **settings}
    return method(net, (LENGTH,), task=NextToken(TOKENS), **settings)


def loaded(models, family, folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(
        models / family, attn_implementation=ATTENTION.get(family, "sdpa")
    )
    return base if folder is None else peft.PeftModel.from_pretrained(base, folder).eval()


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("FedALT")])
@pytest.mark.by_default(*BY_DEFAULT)
def test_what_peft_loads_from_a_folder_is_the_client_s_model(models, tmp_path, case):
    method, family, lora, settings = CASES[case]
    net = net_of(models, family, lora)
    callbacks = [AdapterFolders(str(tmp_path / "ended"))]
    # the frozen A of FFA-LoRA is drawn with the net, and in no checkpoint without frozen weights
    trainer = make_trainer(tmp_path, logger=False, checkpoint_common=method is FFALoRA, callbacks=callbacks)
    server = SERVERS.get(case.partition(f"-{family}")[0], lambda: None)()
    with torch.enable_grad():
        trainer.fit(client_of(method, net, **settings), datamodule=texts(NAMES), aggregator=server)
    path, federation = tmp_path / "checkpoints/last.ckpt", trainer.lightning_module
    written = export_adapters(path, tmp_path / "exported", method, net=net, **settings)
    assert [folder.name for folder in written] == FOLDERS
    x = torch.randint(0, TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    untrained, outputs = loaded(models, family, None).eval()(input_ids=x).logits, []
    for client, name in enumerate(FOLDERS, -1):
        who = {} if client < 0 else {"client": client}
        expected = method.load_from_checkpoint(path, net=net, **settings, **who).eval()(x)
        if client >= 0:
            torch.testing.assert_close(federation.model_of(client).eval()(x), expected, atol=1e-6, rtol=0)
        logits = loaded(models, family, tmp_path / "exported" / name)(input_ids=x).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        ended, exported = (
            {f.name: f.read_bytes() for f in (tmp_path / p / name).iterdir()} for p in ("ended", "exported")
        )
        assert ended == exported
        outputs.append(expected)
    # else the base alone, or one model for all, would do
    assert all((logits - untrained).abs().max() > 1e-3 for logits in outputs[1:])
    differ = "ranks" in settings or bool(federation.clients[0].personal.keys() - {"rank"})
    assert (differ and method is not FLoRA) == ((outputs[1] - outputs[2]).abs().max() > 1e-3)


def test_every_method_of_adapters_is_tried():
    assert {case.split("-llama")[0] for case in CASES} >= {*OF_ADAPTERS} >= {"FedIT", "FedEx-LoRA", "FLoRA", "FedDPA"}


def test_factors_of_a_residual_have_its_rank(models, tmp_path):
    client = client_of(FedExLoRA, net_of(models, "llama", PLAIN))
    layers = client.residual.tensors()
    u, v = torch.randn(len(next(iter(layers.values()))), 3), torch.randn(3, 32)
    with torch.no_grad():
        next(iter(layers.values())).copy_(u @ v)
    save_adapters(client, tmp_path)
    saved = peft.load_peft_weights(tmp_path)
    ranks = sorted(len(tensor) for name, tensor in saved.items() if "lora_A" in name)
    # that of B A is 0 so far, and layers without a residual have the net's rank
    assert ranks == [2] * (len(layers) - 1) + [3]
    # for a further run, the net's own configuration stays
    assert client.net.adapted.peft_config["default"].r == 2


def test_before_a_client_has_trained_its_own_adapters_the_folder_has_the_common_ones(models, tmp_path):
    client = client_of(FedDPA, net_of(models, "llama", PLAIN))
    save_adapters(client, tmp_path)
    assert peft.PeftConfig.from_pretrained(tmp_path).r == 2


def test_equal_models_are_computed_once(models, tmp_path, monkeypatch):
    client = client_of(FedIT, net_of(models, "llama", PLAIN))
    other = deepcopy(client)
    with torch.no_grad():
        next(p for p in other.parameters() if p.requires_grad).add_(1)
    saved = []
    monkeypatch.setattr(
        adapter_folders, "save_adapters", lambda *each: saved.append(each[1].name) or save_adapters(*each)
    )
    models = [("a", client, 0), ("b", deepcopy(client), 0), ("c", other, 0), ("d", client, 1)]
    folders = adapter_folders.save_all((tmp_path / name, *each) for name, *each in models)
    a, b, c, d = ((folder / "adapter_model.safetensors").read_bytes() for folder in folders)
    # a net at another place of the list may have other frozen weights
    assert saved == ["a", "c", "d"] and a == b == d != c


def body():
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 4 * 4, 6))


def of_images(input_shape, num_classes):
    """Adapters beside a convolution and a linear layer, below a classifier that isn't peft's."""
    adapted = peft.get_peft_model(body(), peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"]))
    net = Net(adapted.base_model.model, nn.Linear(6, num_classes))
    vars(net)["adapted"] = adapted
    return net


@torch.no_grad()
@pytest.mark.parametrize("method", [FedDPA, FedExLoRA, FedIT])
def test_convolutions_are_written_and_a_classifier_beside_them_is_told(tmp_path, method):
    client = method(of_images, (2, 4, 4), 3).eval()
    for name, tensor in client.state_dict().items():
        if name not in client.common_names:
            tensor.fill_(True) if tensor.dtype == torch.bool else tensor.normal_()
    with pytest.warns(UserWarning, match=r"model\.net=Net trains classifier\.bias"):
        save_adapters(client, tmp_path)
    x = torch.randn(3, 2, 4, 4)
    features = peft.PeftModel.from_pretrained(body(), tmp_path).eval()(x)
    torch.testing.assert_close(client.net.classifier(features), client(x), atol=1e-4, rtol=1e-5)
    assert (client.net(x) - client(x)).abs().max() > 0.1 or method is FedIT


class Shifted(FedIT):
    """Adds a constant to the logits, which no adapter does."""

    def forward(self, x):
        return super().forward(x) + 1


class ShiftedDPA(FedDPA):
    """The hook of the parent doesn't know of the constant."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("method", "lora", "named"),
    [
        (FedALT, PLAIN, r"model=FedALT"),
        (APFL, PLAIN, r"model=APFL .*adapter_state"),
        (Shifted, PLAIN, r"model=Shifted .*adapter_state"),
        (ShiftedDPA, PLAIN, r"model=ShiftedDPA .*adapter_state"),
        (FedIT, {**PLAIN, "init_lora_weights": "pissa_niter_4"}, r"init_lora_weights='pissa_niter_4'.*model=FedIT"),
        (FedDPA, {**PLAIN, "init_lora_weights": "pissa"}, r"init_lora_weights='pissa'.*model=FedDPA"),
    ],
    ids=["FedALT", "APFL", "Shifted", "ShiftedDPA", "drawn", "by rank"],
)
def test_models_that_no_folder_gives_are_refused_before_training_and_at_the_export(
    models, tmp_path, method, lora, named
):
    net = net_of(models, "llama", lora)
    trainer = make_trainer(callbacks=[AdapterFolders(str(tmp_path / "ended"))])
    client = client_of(method, net)
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    with pytest.raises(MisconfigurationException, match=named):
        trainer.fit(client, datamodule=texts(NAMES))
    assert all(torch.equal(before[name], tensor) for name, tensor in client.state_dict().items())
    make_trainer(tmp_path, logger=False, max_rounds=1).fit(client_of(method, net), datamodule=texts(NAMES))
    with pytest.raises(MisconfigurationException, match=named):
        export_adapters(tmp_path / "checkpoints/last.ckpt", tmp_path / "exported", method, net=net)
    assert not (tmp_path / "ended").exists() and not (tmp_path / "exported").exists()


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"gone\.ckpt' is no file"):
        export_adapters(tmp_path / "gone.ckpt", tmp_path)
