"""Tiny language models of random weights, and random texts for them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pfl_lightning.data import TensorData
from pfl_lightning.tasks import NextToken

WANTED = "pip install 'pfl-lightning[lm]' for transformers and peft, which this test is about"
TOKENS, LENGTH, TEXTS, CLIENTS = 48, 12, 30, 3
FAMILIES = ("llama", "qwen2", "gpt2")
# its attention has dropout, which sdpa can't draw for each client under vmap
ATTENTION = {"gpt2": "eager"}


def write_models(folder: Path) -> None:
    """Write a folder for each family, and ``other``, a Llama of other weights."""
    transformers = pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("peft", reason=WANTED)
    transformers.utils.logging.disable_progress_bar()
    sizes = {
        **{"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    }
    gpt2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    configs = {
        "llama": transformers.LlamaConfig(**sizes),
        "qwen2": transformers.Qwen2Config(**sizes, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(**gpt2, bos_token_id=None, eos_token_id=None),
    }
    torch.manual_seed(0)
    for family, config in configs.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(configs["llama"]).save_pretrained(folder / "other")


def write_llama(folder: Path, **settings: Any) -> None:
    """Write a tiny Llama."""
    transformers = pytest.importorskip("transformers", reason=WANTED)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings)).save_pretrained(folder)


def texts(names: Any = None) -> TensorData:
    """Random texts, of which every third is short and padded on the right; names are those of the texts in turn."""
    tokens = torch.randint(0, TOKENS, (TEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[::3, 7:] = -100
    clients = torch.arange(TEXTS) % CLIENTS if names is None else [names[i % len(names)] for i in range(TEXTS)]
    return TensorData(tokens[:, :-1], targets, client=clients, task=NextToken(TOKENS), batch_size=4)
