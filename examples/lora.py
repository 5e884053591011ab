"""Low-rank adapters of a language model in a federation: clients train and send the adapters, and share the rest.

    pip install 'pfl-lightning[lm]'
    python examples/lora.py

A small GPT-2 made from a configuration, nothing is downloaded; the folder or the name of a trained model in its place
trains adapters of that one. Clients hold chapters of Python's manual, and learn the next character. What `peft` freezes
is the same tensor for all clients: it isn't sent, kept, or stacked by the vectorised engine.
"""

import string
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp

import torch
from numpy.random import RandomState
from torch import Tensor
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from pfl_lightning import FederatedTrainer
from pfl_lightning.client import ClientModule, save_adapters
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.data.partitioners.base import Rows
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.nets import CausalLM
from pfl_lightning.tasks import NextToken

LENGTH, TEXTS, CLIENTS, ROUNDS = 32, 40, 8, 2
LETTERS = string.printable
PADDING = len(LETTERS)


class Manual(FederatedDataModule):
    """Pieces of the longest chapters of Python's manual, a letter a token, a chapter a client."""

    input_shape = (LENGTH,)

    @property
    def task(self) -> NextToken:
        """The next letter, or the padding."""
        return NextToken(len(LETTERS) + 1)

    def load(self) -> tuple[Tensor, Tensor]:
        """Letters, and the letters one position on."""
        chapters = sorted(topics.values(), key=len, reverse=True)[:CLIENTS]
        pieces = [text[i * LENGTH : (i + 1) * LENGTH + 1] for text in chapters for i in range(TEXTS)]
        # some are cut shorter, as sentences are
        lengths = [LENGTH + 1 - i % 7 for i in range(len(pieces))]
        tokens = torch.full((len(pieces), LENGTH + 1), PADDING)
        for row, piece, length in zip(tokens, pieces, lengths, strict=True):
            row[:length] = torch.tensor([max(LETTERS.find(letter), 0) for letter in piece[:length]])
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        # padded on the right, where no target counts: a causal model needs no mask
        return inputs, targets.masked_fill(targets == PADDING, -100)

    def strata(self, y: Tensor) -> Tensor:
        """The chapter of each piece."""
        return torch.arange(len(y)) // TEXTS


class Chapters(Partitioner):
    """Every client has a chapter."""

    def split(self, classes: list[Rows], num_clients: int, rng: RandomState) -> list[Rows]:
        """The pieces of the first chapters."""
        return classes[:num_clients]


@cache
def base() -> str:
    """Save a GPT-2 with random weights; return its folder."""
    config = GPT2Config(
        vocab_size=PADDING + 1,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        # else the head would be the embeddings, which FedPer couldn't keep apart
        tie_word_embeddings=False,
        # no such token: texts don't end
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = mkdtemp()
    # the random numbers of a run don't depend on whether it is the first one
    with torch.random.fork_rng():
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def adapted_gpt2() -> partial[CausalLM]:
    """Return a builder of nets with adapters of the attention, and a head that is trained whole."""
    lora = {"r": 4, "targets": ["c_attn"], "modules_to_save": ["lm_head"]}
    # GPT-2 has dropout within its attention, which sdpa can't draw for many clients at once
    return partial(CausalLM, model=base(), lora=lora, attention="eager")


def make_data() -> Manual:
    """Eight clients."""
    return Manual(num_clients=CLIENTS, partitioner=Chapters(), batch_size=8)


def fit(method: type[ClientModule], engine: str, root: Path | None = None) -> FederatedTrainer:
    """A short run.

    Args:
        method: the client side.
        engine: what runs clients.
        root: where checkpoints go; None writes none.
    """
    torch.manual_seed(0)
    data = make_data()
    optimizer = partial(AdamW, lr=3e-3)
    client = method(net=adapted_gpt2(), input_shape=data.input_shape, task=data.task, optimizer=optimizer)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    keeps = {"default_root_dir": root} if root else {"logger": False, "enable_checkpointing": False}
    trainer = FederatedTrainer(max_rounds=ROUNDS, engine=engine, **quiet, **keeps)
    trainer.fit(client, datamodule=data)
    return trainer


def shares(trainer: FederatedTrainer) -> tuple[float, float]:
    """What a client sends, and what it keeps, as shares of the bytes of the net."""
    federation = trainer.lightning_module
    whole = num_bytes(list(federation.client.net.parameters()))
    sent = num_bytes(federation.aggregator.download(0))
    kept = num_bytes(federation.clients[0].personal)
    return sent / whole, kept / whole


def main() -> None:
    """Trains, tells what travels, and saves the adapters."""
    for method in (FedAvg, FedPer):
        trainer = fit(method, "vectorised")
        sent, kept = shares(trainer)
        print(f"{method.__name__}: a client sends {sent:.1%} of the net's bytes and keeps {kept:.1%}")
        print(f"    perplexity {float(trainer.callback_metrics['val/perplexity']):.1f}")
        folder = Path("adapters") / method.__name__
        # of the global model, where each client has a head of its own
        save_adapters(trainer.lightning_module.client, folder)
        print(f"    {folder / 'adapter_model.safetensors'}")


if __name__ == "__main__":
    main()
