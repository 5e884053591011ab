"""Peak memory of a language model's training beside what `pfl-lightning memory` computes, on a CPU under Linux.

    python benchmarks/lm_memory.py [--model FOLDER] [--length 1024] [--batch 1 2] [--chunk 0 256]
        [--checkpointing] [--exact]

Each line is a run in a process of its own: two clients, one step of AdamW each on texts of ``--length`` tokens, with
adapters of rank 8 beside queries and values. Without a folder the model has the sizes of SmolLM2-135M, 30 layers and
49,152 words, and random weights. The peak is that of resident memory above what the process has after a run of a tiny
model, which brings the libraries' own pages. ``--exact`` lets the C library give each block of memory back at once; its
own habit keeps holes between tensors, which no sum of tensors knows.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.optim import AdamW

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import TensorData
from pfl_lightning.engines.memory_plan import planned
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import CausalLM
from pfl_lightning.tasks import NextToken

MIB = 2**20
SMOLLM2 = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def resident(field: str) -> int:
    """Bytes of a field of the process's status, ``VmRSS`` or ``VmHWM``."""
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))


def fit(model: str, words: int, length: int, batch: int, chunk: int | None, checkpointing: bool) -> None:
    """Train two clients for a step each."""
    tokens = torch.randint(0, words, (2 * batch, length + 1))
    settings = {"client": torch.arange(2 * batch) % 2, "val_fraction": 0.0, "test_fraction": 0.0}
    data = TensorData(tokens[:, :-1], tokens[:, 1:].clone(), task=NextToken(words), batch_size=batch, **settings)
    net = partial(CausalLM, model=model, chunk_tokens=chunk, gradient_checkpointing=checkpointing)
    client = FedAvg(net, (length,), task=data.task, optimizer=partial(AdamW, lr=1e-3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer(max_rounds=1, engine="sequential", enable_model_summary=False, **quiet)
    trainer.fit(client, datamodule=data)


def written(folder: Path, sizes: dict[str, object]) -> str:
    """Write a Llama of random weights, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return str(folder)


def measured(model: str, length: int, batch: int, chunk: int | None, checkpointing: bool) -> int:
    """Return the peak of a run in this process, above what a tiny run leaves."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        fit(written(Path(folder), TINY), 64, 8, 1, None, checkpointing)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    fit(model, AutoConfig.from_pretrained(model).vocab_size, length, batch, chunk, checkpointing)
    return resident("VmHWM") - before


def computed(model: str, length: int, batch: int, chunk: int | None, checkpointing: bool) -> int:
    """Return the peak by shapes alone."""
    from transformers import AutoConfig

    words = AutoConfig.from_pretrained(model).vocab_size
    with torch.device("meta"):
        net = partial(CausalLM, model=model, chunk_tokens=chunk, gradient_checkpointing=checkpointing)
        client = FedAvg(net, (length,), task=NextToken(words), optimizer=partial(AdamW, lr=1e-3))
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    plan = planned(client, (tokens, tokens.clone()), nullcontext)
    return plan.peak + 3 * plan.shared


def main() -> None:
    """Print a line for each batch and chunk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunk", type=int, nargs="+", default=[0, 256])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            measured(options.model, options.length, options.batch[0], options.chunk[0] or None, options.checkpointing)
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or written(Path(folder), SMOLLM2)
        environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if options.exact else {})}
        for batch in options.batch:
            for chunk in options.chunk:
                given = ["--one", "--model", model, "--length", str(options.length)]
                given += ["--checkpointing"] if options.checkpointing else []
                line = [sys.executable, __file__, *given, "--batch", str(batch), "--chunk", str(chunk)]
                found = subprocess.run(line, env=environment, check=True, capture_output=True, text=True)
                peak = int(found.stdout.split()[-1])
                plan = computed(model, options.length, batch, chunk or None, options.checkpointing)
                sizes = f"measured {peak / MIB:,.0f} MiB, computed {plan / MIB:,.0f} MiB, ratio {plan / peak:.2f}"
                print(f"batch {batch} x {options.length:,} tokens, chunk {chunk or 'none'}: {sizes}", flush=True)


if __name__ == "__main__":
    main()
