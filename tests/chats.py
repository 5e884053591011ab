"""Conversations, a tokenizer of twenty words for them, and a run on them."""

import json
from pathlib import Path

import pytest

from command import QUIET, pfl
from language_models import WANTED

WORDS = "<s> </s> <pad> <unk> user assistant system : hi there you are good bad yes no ### User: Assistant: ,".split()
# each message ends with </s>, which counts as part of an answer
BARE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
MARKED = BARE.replace(
    "{{ m['content'] }} </s> ",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} </s> {% endgeneration %}"
    "{% else %}{{ m['content'] }} </s> {% endif %}",
)


def numbers(text):
    return [WORDS.index(word) for word in text.split()]


def made_tokenizer(template=BARE):
    transformers = pytest.importorskip("transformers", reason=WANTED)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **marks)


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


ROWS = [
    {"messages": turns("hi there", "you are good", "no", "yes yes"), "client": "Bonn"},
    {"messages": turns("you", "bad"), "client": "Ulm"},
    {"messages": turns("are you", "no"), "client": "Bonn"},
]


def fitted(method, tokenizer, rounds, rows=4 * ROWS, options=""):
    """The last checkpoint of a run of the command line in the working folder, on a tiny model."""
    transformers = pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("peft", reason=WANTED)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    net = f"--model {method} --model.net CausalLM --model.net.model model --model.optimizer AdamW"
    data = "--data ChatData --data.path chats.jsonl --data.tokenizer model --data.max_length 24"
    pfl(f"fit {net} {data} --trainer.checkpoint_common false --trainer.max_rounds {rounds} {QUIET} {options}")
    (checkpoint,) = Path("runs").glob("*/*/checkpoints/last.ckpt")
    return checkpoint
