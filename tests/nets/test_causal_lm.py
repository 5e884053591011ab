"""Language models with adapters: networks, engines, checkpoints without the base, and adapters for peft."""

import json
import shutil
from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, AdamW

from federations import blobs, equal, load, make_client, same_end
from federations import fit as fit_blobs
from language_models import ATTENTION, CLIENTS, FAMILIES, LENGTH, TEXTS, TOKENS, texts, write_models
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import AdapterFolders
from pfl_lightning.client import export_adapters
from pfl_lightning.client.adapter_folders import folder_name
from pfl_lightning.data import TensorData
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedALT, FedAvg, FedDPA, FedExLoRA, FedPer, LGFedAvg, Local, PFedMe
from pfl_lightning.nets import CausalLM, Net
from pfl_lightning.tasks import NextToken

ADAPTERS = {"r": 2, "alpha": 4, "dropout": 0.1}
ENGINES = ("sequential", "vectorised")


class FewShared(FedAvg):
    """Clients share one of the two factors, and each keeps the other one."""

    def is_shared(self, name):
        return super().is_shared(name) and "lora_B" not in name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by family."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def build(models, family="llama", **settings):
    settings = {"lora": ADAPTERS, "attention": ATTENTION.get(family, "sdpa"), **settings}
    return partial(CausalLM, model=str(models / family), **settings)


def client_of(net, method=FedAvg, **settings):
    torch.manual_seed(1)
    settings = {"optimizer": partial(AdamW, lr=0.01), **settings}
    return method(net, (LENGTH,), task=NextToken(TOKENS), **settings)


def fit(client, root=None, ckpt_path=None, data=None, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    keeps = {"enable_checkpointing": False} if root is None else {"default_root_dir": str(root)}
    trainer = FederatedTrainer(**{"max_rounds": 1, **quiet, **keeps, **settings})
    trainer.fit(client, datamodule=data or texts(), ckpt_path=ckpt_path)
    return trainer.lightning_module


def adapters_of(federation):
    """All that a federation has learned."""
    return [federation.global_model(common=False), {k: state.personal for k, state in federation.clients.items()}]


def values(record):
    return [value for part in record for value in part.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_agree_and_the_base_stays(models, family):
    before = dict(build(models, family)((LENGTH,), TOKENS).named_parameters())
    # not AdamW, which makes whole steps of gradients that are rounding alone
    settings = {"method": FewShared, "optimizer": partial(SGD, lr=0.5)}
    federations = [fit(client_of(build(models, family), **settings), engine=engine) for engine in ENGINES]
    one, other = map(adapters_of, federations)
    assert one[0].keys() == other[0].keys() and all("lora_" in name for name in one[0])
    assert all(torch.allclose(one[0][name], other[0][name], atol=1e-5) for name in one[0])
    for client in range(CLIENTS):
        kept = one[1][client]
        assert kept and all("lora_B" in name and kept[name].abs().max() > 0 for name in kept)
        assert all(torch.allclose(kept[name], other[1][client][name], atol=1e-5) for name in kept)
    for federation in federations:
        after = dict(federation.client.net.named_parameters())
        assert all(torch.equal(after[name], before[name]) for name in after if "lora_" not in name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_resume_bit_for_bit_from_a_checkpoint_without_the_base(models, family, engine, tmp_path):
    def client():
        return client_of(build(models, family), FewShared, optimizer_lifetime="run")

    settings = {"engine": engine, "checkpoint_common": False}
    whole = fit(client(), max_rounds=2, **settings)
    fit(client(), tmp_path / "one", **settings)
    path = tmp_path / "one/checkpoints/last.ckpt"
    resumed = fit(client(), ckpt_path=path, max_rounds=2, **settings)
    assert equal(adapters_of(resumed), adapters_of(whole))
    assert equal(dict(resumed.client.net.named_parameters()), dict(whole.client.net.named_parameters()))
    saved = load(path)
    frozen = resumed.client.common_names
    assert frozen and not frozen & saved["state_dict"].keys() and saved["federation"]["common"] == {}
    entries = FewShared.load_from_checkpoint(path, client=1, net=build(models, family)).state_dict()
    personal = saved["federation"]["clients"][1]["personal"]
    assert personal and equal({name: entries[name] for name in personal}, personal)


def test_a_checkpoint_is_no_larger_than_what_clients_learned(models, tmp_path):
    lora = {"r": 32, "targets": "all-linear"}
    federation = fit(client_of(build(models, lora=lora), Local), tmp_path, checkpoint_common=False)
    learned = num_bytes([state.personal for state in federation.clients.values()])
    base = num_bytes([p for p in federation.client.net.parameters() if not p.requires_grad])
    saved = load(tmp_path / "checkpoints/last.ckpt")
    size = sum(t.untyped_storage().nbytes() for t in stored(saved))
    # the initial adapters are one more client's; digests of clients' rows are small
    assert learned + learned // CLIENTS + saved["federation"]["rows"].nbytes == size and base > 0


def stored(record):
    """One tensor of each storage in a checkpoint."""
    found = {}

    def look(value):
        if isinstance(value, torch.Tensor) and value.numel() > 8:
            found[value.untyped_storage().data_ptr()] = value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            look(part)

    look(record)
    return found.values()


def test_another_base_is_refused(models, tmp_path):
    fit(client_of(build(models)), tmp_path, checkpoint_common=False)
    path = tmp_path / "checkpoints/last.ckpt"
    with pytest.raises(MisconfigurationException, match="checkpoint_common"):
        fit(client_of(build(models, "other")), ckpt_path=path, max_rounds=2, checkpoint_common=False)
    with pytest.raises(MisconfigurationException, match="checkpoint_common"):
        FedAvg.load_from_checkpoint(path, client=0, net=build(models, "other"))
    weight = FedAvg.load_from_checkpoint(path, net=build(models)).net.classifier.output.weight
    assert torch.equal(weight, build(models)((LENGTH,), TOKENS).classifier.output.weight)
    predicted = FederatedTrainer(logger=False, accelerator="cpu", enable_progress_bar=False).predict(
        client_of(build(models)), ckpt_path=path, clients=[0], data=torch.zeros(1, LENGTH, dtype=torch.int64)
    )
    assert predicted[0].outputs.shape == (1, LENGTH, TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_each_client_s_folder_with_the_same_logits(models, family, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    names = ["Anna", "b/c", "global"]
    net = build(models, family)
    callback = AdapterFolders(str(tmp_path / "ended"))
    settings = {"checkpoint_common": False, "callbacks": [callback], "data": texts(names)}
    federation = fit(client_of(net, Local), tmp_path, **settings)
    path = tmp_path / "checkpoints/last.ckpt"
    written = export_adapters(path, tmp_path / "exported", Local, net=net)
    assert [folder.name for folder in written] == ["global", "Anna", "b%2Fc", "global_"]
    x = torch.randint(0, TOKENS, (2, LENGTH))
    for client, folder in enumerate(written[1:]):
        own = federation.model_of(client).eval()(x)
        for parent in ("ended", "exported"):
            attention = ATTENTION.get(family, "sdpa")
            base = AutoModelForCausalLM.from_pretrained(models / family, attn_implementation=attention)
            loaded = PeftModel.from_pretrained(base, tmp_path / parent / folder.name).eval()
            assert torch.equal(loaded(input_ids=x).logits, own)
    assert not torch.equal(federation.model_of(0).eval()(x), federation.model_of(1).eval()(x))


def test_folders_have_names_that_stay_inside():
    assert len({folder_name(client) for client in ("..", ".", "global", "a/b", "a", 3)}) == 6


def test_copies_share_the_base_alone(models):
    net = build(models)((LENGTH,), TOKENS)
    copy = deepcopy(net)
    for (name, one), other in zip(net.named_parameters(), copy.parameters(), strict=True):
        assert (one is other) == ("lora_" not in name)
    client = client_of(net)
    assert client.net.classifier.output.weight is net.classifier.output.weight
    inside = {id(parameter) for parameter in copy.adapted.parameters()}
    assert inside == {id(parameter) for parameter in copy.parameters()}


def test_a_client_s_model_stays_what_it_is_while_another_is_looked_at(models):
    # whose personal net is frozen, and written by the method itself
    federation, x = fit(client_of(build(models), PFedMe), max_rounds=2), torch.zeros(1, LENGTH, dtype=torch.int64)
    model = federation.model_of(0).eval()
    before = model(x)
    assert not torch.equal(federation.model_of(1).eval()(x), before)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_the_model_s_with_and_without_a_mask(models, attention):
    net = build(models, attention=attention)((LENGTH,), TOKENS).eval()
    tokens, mask = torch.randint(0, TOKENS, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 7:] = 0
    found = net(tokens)
    expected = net.adapted(input_ids=tokens, attention_mask=mask).logits
    assert torch.allclose(found[mask > 0], expected[mask > 0], atol=1e-5)
    assert torch.allclose(net({"input_ids": tokens, "attention_mask": mask})[mask > 0], expected[mask > 0], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_keep_packed_texts_apart(models, family):
    net = build(models, family)((LENGTH,), TOKENS).eval()
    first, second = torch.randint(0, TOKENS, (1, 5)), torch.randint(0, TOKENS, (1, 7))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = net({"input_ids": torch.cat([first, second], 1), "position_ids": positions})
    assert torch.allclose(packed, torch.cat([net(first), net(second)], 1), atol=1e-5)


def packed_texts():
    """Rows of two texts each, whose positions begin again at 0, and the same texts one in a row, padded."""
    tokens = torch.randint(0, TOKENS, (TEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    clients, task = torch.arange(TEXTS) % CLIENTS, NextToken(TOKENS)
    cuts = torch.randint(3, LENGTH - 3, (TEXTS,), generator=torch.Generator().manual_seed(1))
    targets, positions = tokens[:, 1:].clone(), torch.arange(LENGTH).repeat(TEXTS, 1)
    apart, wanted = torch.zeros(2 * TEXTS, LENGTH, dtype=torch.int64), torch.full((2 * TEXTS, LENGTH), -100)
    for row, cut in enumerate(cuts.tolist()):
        targets[row, cut - 1] = -100
        positions[row, cut:] -= cut
        for half, (begin, end) in enumerate(((0, cut), (cut, LENGTH))):
            apart[2 * row + half, : end - begin] = tokens[row, begin:end]
            wanted[2 * row + half, : end - begin] = targets[row, begin:end]
    rows = {"input_ids": tokens[:, :-1], "position_ids": positions}
    settings = {"task": task, "val_fraction": 0.0, "test_fraction": 0.0, "input_shape": (LENGTH,)}
    # whole batches: a step of packed rows counts the same tokens as one of twice as many texts
    return (
        TensorData(rows, targets, client=clients, batch_size=TEXTS, **settings),
        TensorData(apart, wanted, client=clients.repeat_interleave(2), batch_size=2 * TEXTS, **settings),
    )


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        # adapters with more than linear layers, which run under vmap
        ("llama", {"lora": {"r": 2, "dora": True}}),
        ("qwen2", {"attention": "eager"}),
        ("gpt2", {"attention": "sdpa"}),
    ],
)
def test_packed_texts_train_as_those_apart_under_each_engine(models, family, settings):
    def trained(data, engine):
        client = client_of(build(models, family, **{"lora": {"r": 2}, **settings}), optimizer=partial(SGD, lr=0.5))
        for layer in client.net.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
            if hasattr(layer, "attn_dropout"):
                layer.attn_dropout.p = 0.0
        return adapters_of(fit(client, data=data, engine=engine))[0]

    packed, apart = packed_texts()
    expected = trained(apart, "sequential")
    assert max(float(t.abs().max()) for name, t in expected.items() if "lora_B" in name) > 1e-3
    for engine in ENGINES:
        found = trained(packed, engine)
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_clients_that_learn_nothing_have_the_base_model_s_own_perplexity(models):
    # as behind `local+tuned/untrained`
    untrained = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.0, total_iters=1000000)
    federation = fit(client_of(build(models), Local, lr_scheduler=untrained))
    data, total, count = texts(), 0.0, 0
    data.setup("fit")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(models / "llama").eval()
    for client in range(CLIENTS):
        part = data.part(client, "test")
        model = federation.model_of(client).eval()
        with torch.no_grad():
            assert torch.equal(model(part.x), base(input_ids=part.x).logits)
            total += float(data.task.loss(base(input_ids=part.x).logits, part.y, "sum"))
        count += int((part.y != -100).sum())
    settings = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = FederatedTrainer(max_rounds=1, enable_model_summary=False, **settings)
    client = client_of(build(models), Local, lr_scheduler=untrained)
    trainer.fit(client, datamodule=texts())
    [found] = trainer.test(client, datamodule=texts(), verbose=False)
    assert found["test/perplexity"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-5)


def test_a_window_of_attention_is_left_to_the_model(models):
    body = build(models)((LENGTH,), TOKENS).eval().features
    inputs = {"input_ids": torch.randint(0, TOKENS, (1, LENGTH)), "position_ids": torch.arange(LENGTH)[None]}
    seen = []
    body.layers.register_forward_pre_hook(lambda module, args, given: seen.append(given), with_kwargs=True)
    for window in (None, LENGTH, LENGTH - 1):
        body.window = window
        body(inputs)
    assert ["attention_mask" in given for given in seen] == [True, True, False]


def test_the_base_takes_all_clients_texts_at_once_with_dropout_in_the_attention(models):
    batches, ends = [], []
    for engine in ENGINES:
        client = client_of(build(models, "gpt2", attention="sdpa"), optimizer=partial(SGD, lr=0.5))
        layer = next(layer for name, layer in client.net.named_modules() if name.endswith("c_attn.base_layer"))
        layer.register_forward_pre_hook(lambda layer, args: batches.append(len(args[0])))
        ends.append(adapters_of(fit(client, engine=engine))[0])
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-5) for name in ends[0])
    assert 4 * CLIENTS in batches


def test_a_smaller_vocabulary_has_fewer_logits(models):
    tokens = torch.randint(0, 40, (2, LENGTH))
    few, all_of_them = (build(models)((LENGTH,), count).eval()(tokens) for count in (40, TOKENS))
    assert few.shape[-1] == 40 and torch.equal(few, all_of_them[..., :40])


def test_weights_of_half_precision_have_logits_and_adapters_of_single_precision(models):
    net = build(models, dtype="bfloat16")((LENGTH,), TOKENS)
    assert {p.dtype for n, p in net.named_parameters() if "lora_" in n} == {torch.float32}
    assert net.classifier.output.weight.dtype == torch.bfloat16
    assert net(torch.zeros(1, LENGTH, dtype=torch.int64)).dtype == torch.float32
    one, other = (adapters_of(fit(client_of(build(models, dtype="bfloat16")), engine=each))[0] for each in ENGINES)
    assert all(torch.allclose(one[name], other[name], atol=0.01) for name in one)


def test_layers_computed_again_give_the_same_gradients_and_are_not_vectorised(models):
    again, plain = (build(models, gradient_checkpointing=given) for given in (True, False))
    one, other = (adapters_of(fit(client_of(net), local_steps=2))[0] for net in (again, plain))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    with pytest.raises(MisconfigurationException, match="gradient_checkpointing"):
        fit(client_of(again), engine="vectorised")


@pytest.mark.parametrize("method", [FedALT, FedDPA, FedExLoRA])
def test_layers_are_not_computed_again_with_weights_that_are_gone(models, method):
    client = client_of(build(models, gradient_checkpointing=True, lora={"r": 2}), method)
    with pytest.raises(MisconfigurationException, match=r"gradient_checkpointing=true .*FedIT"):
        fit(client, max_rounds=2)


def test_a_frozen_head_leaves_no_part_to_keep_or_to_share(models):
    with pytest.raises(MisconfigurationException, match="FedPer keeps"):
        fit(client_of(build(models), FedPer))
    with pytest.warns(UserWarning, match="LGFedAvg would share"):
        fit(client_of(build(models), LGFedAvg))
    trained = build(models, lora={"r": 2, "modules_to_save": ["lm_head"]})
    federation = fit(client_of(trained, FedPer))
    kept = federation.clients[0].personal
    assert kept and all(name.startswith("net.classifier.output.modules_to_save") for name in kept)


def test_buffers_of_no_state_dict_are_not_sent(models):
    federation = fit(client_of(build(models), PFedMe))
    assert all("lora_" in name for name in federation.aggregator.global_model())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "nowhere/at-all"}, "nowhere/at-all"),
        ({"dtype": "float16"}, "dtype"),
        ({"attention": "flash"}, "attention"),
        ({"quantize": "2bit"}, "quantize"),
        ({"quantize": "4bit", "lora": None}, "quantize"),
        ({"lora": {"r": 2, "alpa": 3}}, "alpa"),
        ({"lora": {"r": 2, "targets": ["nothing"]}}, "nothing"),
        ({"num_classes": TOKENS + 1}, f"{TOKENS + 1}"),
        ({"input_shape": (33,)}, "33"),
    ],
)
def test_settings_that_do_not_fit_are_refused(models, settings, named):
    given = {"input_shape": (LENGTH,), "num_classes": TOKENS, "model": str(models / "llama"), "lora": ADAPTERS}
    with pytest.raises(MisconfigurationException, match=named):
        CausalLM(**given | settings)


def test_a_folder_without_a_model_is_refused(models, tmp_path):
    with pytest.raises(MisconfigurationException, match="config"):
        CausalLM((LENGTH,), TOKENS, model=str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_a_folder_with_code_of_its_own_is_refused_and_not_asked_about(models, kind, tmp_path, monkeypatch):
    def asked(*_: object) -> str:
        raise AssertionError("transformers asked whether to run the code")

    monkeypatch.setattr("builtins.input", asked)
    shutil.copytree(models / "llama", tmp_path / "own")
    settings = json.loads((tmp_path / "own/config.json").read_text())
    settings |= {"model_type": kind, "auto_map": {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.Own"}}
    (tmp_path / "own/config.json").write_text(json.dumps(settings))
    (tmp_path / "own/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(MisconfigurationException, match=r"model\.net\.model=.*auto_map in config\.json"):
        CausalLM((LENGTH,), TOKENS, model=str(tmp_path / "own"))
    assert not (tmp_path / "ran").exists()


class Packed(nn.Linear):
    """A layer whose weights come with scales in the state_dict, as those of quantised layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(3)


def packed(input_shape, num_classes):
    first = Packed(input_shape[0], 8).requires_grad_(False)
    return Net(nn.Sequential(first, nn.Tanh()), nn.Linear(8, num_classes))


@pytest.mark.parametrize("engine", ENGINES)
def test_scales_of_quantised_weights_belong_to_the_base(engine, tmp_path):
    run = fit_blobs(make_client(net=packed), blobs(), tmp_path, engine=engine)
    assert not any("absmax" in name or "features" in name for name in run.federation.aggregator.global_model())
    assert not any("features" in name for name in load(run.last)["state_dict"])
    again = fit_blobs(make_client(net=packed), blobs(), ckpt_path=run.last, engine=engine)
    assert same_end(run, again)
