"""Low-rank adapters of a language model in a federation: clients train and send the adapters, and share the rest.

    pip install 'pfl-lightning[lora]'
    python examples/lora.py

A small GPT-2 made from a configuration, nothing is downloaded; with ``from_pretrained(...).train()`` in its place it is
a trained one. Clients hold chapters of Python's manual, and learn the next character. What `peft` freezes is the same
tensor for all clients: it isn't sent, kept, or stacked by the vectorised engine.
"""

import string
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from numpy.random import RandomState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from pfl_lightning import FederatedTrainer
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.data.partitioners.base import Rows
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.nets import Net
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

    def load(self) -> tuple[dict[str, Tensor], Tensor]:
        """Letters and which of them count, and the letters one position on."""
        chapters = sorted(topics.values(), key=len, reverse=True)[:CLIENTS]
        pieces = [text[i * LENGTH : (i + 1) * LENGTH + 1] for text in chapters for i in range(TEXTS)]
        # some are cut shorter, as sentences are
        lengths = [LENGTH + 1 - i % 7 for i in range(len(pieces))]
        tokens = torch.full((len(pieces), LENGTH + 1), PADDING)
        for row, piece, length in zip(tokens, pieces, lengths, strict=True):
            row[:length] = torch.tensor([max(LETTERS.find(letter), 0) for letter in piece[:length]])
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = (inputs != PADDING).long()
        return {"input_ids": inputs, "attention_mask": mask}, targets.masked_fill(targets == PADDING, -100)

    def strata(self, y: Tensor) -> Tensor:
        """The chapter of each piece."""
        return torch.arange(len(y)) // TEXTS


class Chapters(Partitioner):
    """Every client has a chapter."""

    def split(self, classes: list[Rows], num_clients: int, rng: RandomState) -> list[Rows]:
        """The pieces of the first chapters."""
        return classes[:num_clients]


class Body(nn.Module):
    """A transformer whose inputs are a dict."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        """Hidden states ``[n, T, d]`` of token numbers and their mask ``[n, T]``."""
        hidden: Tensor = self.transformer(**x, use_cache=False).last_hidden_state
        return hidden


class AdaptedGPT2(Net):
    """A GPT-2 with adapters of its attention; its head, which is trained whole, is the net's classifier."""

    def __init__(self, input_shape: tuple[int, ...], vocabulary: int) -> None:
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=input_shape[0],
            n_embd=64,
            n_layer=2,
            n_head=4,
            # others look at the mask's values, which can't be done for many clients at once
            attn_implementation="eager",
            # else the head would be the embeddings, which FedPer couldn't keep apart
            tie_word_embeddings=False,
            # no such token: texts don't end
            bos_token_id=None,
            eos_token_id=None,
        )
        lora = LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True)
        adapted = get_peft_model(GPT2LMHeadModel(config), lora)
        gpt2 = adapted.get_base_model()
        super().__init__(Body(gpt2.transformer), gpt2.lm_head)
        # in a tuple it is no submodule: the net has its parts already
        self._adapted = (adapted,)

    @property
    def adapted(self) -> PeftModel:
        """The same model as `peft` knows it, to save its adapters."""
        return self._adapted[0]


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
    client = method(net=AdaptedGPT2, input_shape=data.input_shape, task=data.task, optimizer=optimizer)
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
        trainer.lightning_module.client.net.adapted.save_pretrained(folder)
        print(f"    {folder / 'adapter_model.safetensors'}")


if __name__ == "__main__":
    main()
