"""Conversations of three clients, a common language model, and adapters of which a half stays with each client.

    pip install 'pfl-lightning[lm]'
    python examples/chat_clients.py

A folder ``chat`` is written: a tokenizer, a tiny Llama of random weights, and a file of conversations in which each
client greets in its own words. With the folders of a trained model and of your own conversations in their place, the
rest stays as it is. Afterwards each client's model answers, and its adapters are in a folder that `peft` reads.
"""

import json
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import AdapterFolders, GenerationSamples
from pfl_lightning.data import ChatData
from pfl_lightning.methods import FedSALoRA
from pfl_lightning.nets import CausalLM

GREETINGS = {"Kiel": "moin", "Wien": "servus", "Bern": "salut"}
NAMES = "anna ben carla david emma felix greta hans ida jan klara leo".split()
CLOSINGS = {"please": "gladly", "now": "already", "today": "today"}
MARKS = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>"]
# the marks of generation tell which tokens are the assistant's; other tokens don't count in the loss
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<assistant> {% generation %}{{ message['content'] }} <end> {% endgeneration %}"
    "{% else %}<user> {{ message['content'] }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_conversations(path: Path) -> None:
    """A row a conversation, with its client; all ask the same and answer in their own words."""
    rows = [
        {
            "client": client,
            "messages": [
                {"role": "user", "content": f"greet {name} {when}"},
                {"role": "assistant", "content": f"{greeting} {name} {answer}"},
            ],
        }
        for client, greeting in GREETINGS.items()
        for name in NAMES
        for when, answer in CLOSINGS.items()
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_model(folder: Path) -> None:
    """A tokenizer of whole words and a Llama of random weights, as ``save_pretrained`` of a trained one writes them."""
    words = dict.fromkeys([*MARKS, "greet", *GREETINGS.values(), *NAMES, *CLOSINGS, *CLOSINGS.values()])
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **marks)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def fit(folder: Path, rounds: int = 6, engine: str = "auto") -> FederatedTrainer:
    """A run of three clients that average the factor A of each adapter, and keep B and the output layer.

    Args:
        folder: where the model, the conversations and the run's files are.
        rounds: number of rounds.
        engine: what runs clients.
    """
    data = ChatData(folder / "conversations.jsonl", folder / "model", max_length=32, batch_size=8)
    # a random model needs more than its attention adapted; for a trained one {"r": 8} will do
    lora = {"r": 8, "alpha": 16, "targets": "all-linear", "modules_to_save": ["lm_head"]}
    net = partial(CausalLM, model=str(folder / "model"), lora=lora)
    client = FedSALoRA(net, data.input_shape, task=data.task, optimizer=partial(AdamW, lr=3e-3))
    samples = GenerationSamples(["greet emma today"], every=max(1, rounds // 2), max_new_tokens=8)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=8,
        engine=engine,
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        callbacks=[samples, AdapterFolders()],
    )
    trainer.fit(client, datamodule=data)
    return trainer


def main() -> None:
    """Writes the folder, trains, and shows what clients' models answer."""
    folder = Path("chat")
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_conversations(folder / "conversations.jsonl")
    trainer = fit(folder)
    for name in ("perplexity", "token_acc", "exact_match"):
        print(f"validation, {name}: {float(trainer.callback_metrics[f'val/{name}']):.2f}")
    for row in next(c for c in trainer.callbacks if isinstance(c, GenerationSamples)).rows:
        print(f"round {row['round']}, {row['client']}: {row['prompt']} -> {row['text']}")


if __name__ == "__main__":
    main()
