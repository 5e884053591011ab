"""A small language model of Shakespeare's letters, trained on half of the roles, and a data folder with the other half.

    python benchmarks/role_model.py DATA [--out role_model] [--steps 2000] [--hidden 64] [--layers 2]

``DATA/shakespeare/shakespeare.txt`` is read as by the data source `Shakespeare`. Roles are sorted by name, and each
second one of those with eight windows of 80 letters or more becomes a client to be: its speeches are in
``OUT/shakespeare/shakespeare.txt``, and the model never sees them. All other roles are the model's training text.
``OUT/model`` is a Llama as by ``save_pretrained``, whose tokens are the data source's letters. So a run of clients has
``--data.root OUT --model.net.model OUT/model``, or the table ``roles_adapters`` from the folder that has OUT.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pfl_lightning.data.shakespeare import LETTERS
from pfl_lightning.data.words import letter_numbers

WINDOW = 80
BATCH = 32
LEAST = 8
"""Windows of a role that may be a client."""


def speeches(path: Path) -> dict[str, list[str]]:
    """Return the speeches of each role.

    Args:
        path: the file of all plays.
    """
    spoken: dict[str, list[str]] = {}
    for speech in path.read_text(encoding="utf-8").split("\n\n"):
        head, _, text = speech.strip().partition("\n")
        if head.endswith(":") and text:
            spoken.setdefault(head[:-1], []).append(text)
    return spoken


def divide(spoken: dict[str, list[str]]) -> tuple[dict[str, list[str]], str]:
    """Return the roles that may be clients, and the text of all others.

    Args:
        spoken: the speeches of each role.
    """
    large = sorted(role for role, texts in spoken.items() if len("\n".join(texts)) > (LEAST - 1) * WINDOW + 1)
    clients = {role: spoken[role] for role in large[::2]}
    return clients, "\n".join("\n".join(texts) for role, texts in spoken.items() if role not in clients)


def train(text: str, steps: int, hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a model that was trained on random windows of a text; prints its perplexity on the way.

    Args:
        text: the training text.
        steps: steps of AdamW, each of 32 windows; the rate falls from 0.003 to 0 by a cosine.
        hidden: width of the model.
        layers: number of its layers.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(LETTERS),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=WINDOW,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    numbers = letter_numbers([text], LETTERS)[0]
    for step in range(1, steps + 1):
        starts = torch.randint(len(numbers) - WINDOW, (BATCH, 1))
        windows = numbers[starts + torch.arange(WINDOW + 1)]
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps:
            print(f"step {step}: training perplexity {loss.exp().item():.2f}", flush=True)
    return model


def main() -> None:
    """Writes the model and the clients' speeches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with shakespeare/shakespeare.txt")
    parser.add_argument("--out", type=Path, default=Path("role_model"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    clients, text = divide(speeches(given.data / "shakespeare" / "shakespeare.txt"))
    print(f"{len(clients)} roles may be clients; {len(text)} letters of the others train the model")
    folder = given.out / "shakespeare"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{role}:\n{text}" for role, texts in clients.items() for text in texts]
    (folder / "shakespeare.txt").write_text("\n\n".join(rows), encoding="utf-8")
    train(text, given.steps, given.hidden, given.layers).save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
