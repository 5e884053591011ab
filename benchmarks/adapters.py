"""How many times as fast the vectorised engine trains adapters as the sequential one, and the memory that each takes.

    python benchmarks/adapters.py [--hidden 64 256 512] [--batch 1 2 8] [--clients 8] [--rounds 3]
    python benchmarks/adapters.py --memory sequential    # or vectorised

Models are Llamas of random weights with four layers, and adapters of rank 4 beside queries and values. Both engines run
the same jobs in one process and take turns, round by round: reception, training and hand-over of every client, without
evaluation and without the server. Each client trains on eight texts of random tokens. Seconds are the process's, so
that what else the machine does counts less; ratios are of the least seconds of each engine. The difference is the
largest of two engines' uploads, relative to the largest change in training. The last columns have the clients in a
batch, and the engine that `auto` takes on one core.

With ``--memory`` 50 clients train adapters of one model of 97 million parameters for a round, with an evaluation and a
checkpoint. Each has a text of 16 tokens to train on, and one for validation. The peak is that of resident memory
(``ru_maxrss``) above what the process takes before the model is loaded, after a round of a tiny model, which loads all
libraries. The model's weights, mapped from their file, are in it.
"""

import argparse
import logging
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import Process
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import Precision
from memory import peak
from torch.optim import SGD, AdamW

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import TensorData
from pfl_lightning.engines import Auto, ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CausalLM
from pfl_lightning.tasks import NextToken

VOCABULARY, TEXTS = 512, 8
ENGINES: dict[str, Callable[..., Engine]] = {"sequential": Sequential, "vectorised": Vectorised}


def base(folder: Path, hidden: int, layers: int = 4, vocabulary: int = VOCABULARY) -> str:
    """Return the folder of a saved Llama with random weights."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1) * 2,
        max_position_embeddings=512,
    )
    path = folder / f"llama-{hidden}"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def texts(clients: int, length: int, batch: int) -> TensorData:
    """Return random texts of each client, all for training."""
    tokens = torch.randint(0, VOCABULARY, (clients * TEXTS, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorData(
        tokens[:, :-1],
        tokens[:, 1:],
        client=torch.arange(len(tokens)) // TEXTS,
        split=["train"] * len(tokens),
        task=NextToken(VOCABULARY),
        batch_size=batch,
        val_fraction=0.0,
    )


def compare(model: str, args: argparse.Namespace, batch: int) -> tuple[dict[str, float], float, str]:
    """Return the least seconds of each engine, the largest difference of their uploads, and the last columns."""
    seed_everything(0, verbose=False)
    data = texts(args.clients, args.length, batch)
    data.setup()
    net = partial(CausalLM, model=model, lora={"r": args.rank, "alpha": 8, "targets": args.targets})
    client = FedAvg(net, data.input_shape, task=data.task, optimizer=partial(SGD, lr=0.1))
    client.settle_common()
    work = LocalWork(1, batch_size=batch)
    payload = {"weights": {n: t for n, t in detached(client.state_dict()).items() if "lora_" in n}}
    clients = [data.client(k) for k in range(args.clients)]
    made = {name: ENGINES[name](client, work, Precision()) for name in ENGINES}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for round in range(args.rounds + 1):
        jobs = [Job(k, round, ClientState(), payload, samples, seed=k) for k, samples in enumerate(clients)]
        sent = []
        for name, engine in made.items():
            start = time.process_time()
            outcomes = list(engine.run(jobs))
            seconds[name].append(time.process_time() - start)
            sent.append([dict(outcome.update["weights"]) for outcome in outcomes])
    first = sent[0]
    change = max(float((t - payload["weights"][n]).abs().max()) for own in first for n, t in own.items())
    differences = [
        float((t - other[n]).abs().max())
        for e in sent[1:]
        for own, other in zip(first, e, strict=True)
        for n, t in own.items()
    ]
    choice = type(Auto(client, work, Precision(), workers=1)._chosen(jobs[0])).__name__.lower()
    last = f"{made['vectorised'].block_size:>5} {choice}"
    # the first round compares ways of computing
    return {name: min(times[1:]) for name, times in seconds.items()}, max(differences, default=0.0) / change, last


def resident() -> int:
    """Return the bytes of resident memory of this process on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def print_memory(engine: str) -> None:
    """Print the peak of a round of 50 clients, in bytes and as a multiple of the model."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for hidden, layers, vocabulary in ((64, 1, 512), (768, 12, 8192)):
            # in a process of its own, whose memory ends with it
            made = Process(target=base, args=(Path(folder), hidden, layers, vocabulary))
            made.start()
            made.join()
            before = resident()
            tokens = torch.randint(0, vocabulary, (100, 17), generator=torch.Generator().manual_seed(0))
            data = TensorData(
                tokens[:, :-1],
                tokens[:, 1:],
                client=torch.arange(100) // 2,
                split=["train", "val"] * 50,
                task=NextToken(vocabulary),
                batch_size=1,
            )
            lora = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
            net = partial(CausalLM, model=f"{folder}/llama-{hidden}", lora=lora)
            client = FedAvg(net, data.input_shape, task=data.task, optimizer=partial(AdamW, lr=1e-3))
            weights = sum(p.numel() * p.element_size() for p in client.parameters() if not p.requires_grad)
            trainer = FederatedTrainer(
                max_rounds=1,
                engine=engine,
                checkpoint_common=False,
                default_root_dir=folder,
                enable_progress_bar=False,
                enable_model_summary=False,
                accelerator="cpu",
            )
            trainer.fit(client, datamodule=data)
    taken = peak() - before
    print(f"{engine}: {taken / 2**20:,.0f} MiB, {taken / weights:.2f} of the model's {weights / 2**20:,.0f} MiB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8], help="texts of a client in a step")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each engine")
    parser.add_argument("--memory", choices=list(ENGINES), help="measure the peak of this engine instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        print_memory(args.memory)
        return
    print(f"torch {torch.__version__}, 1 thread, {args.clients} clients, {args.length} tokens, least of {args.rounds}")
    print(
        f"{'hidden':>6} {'batch':>5} "
        + "".join(f"{name:>12} " for name in ENGINES)
        + f"{'difference':>10} {'batch':>5} auto"
    )
    with tempfile.TemporaryDirectory() as folder:
        for hidden in args.hidden:
            model = base(Path(folder), hidden)
            for batch in args.batch:
                seconds, difference, last = compare(model, args, batch)
                first = seconds["sequential"]
                ratios = "".join(f"{first / taken:>6.2f} {taken:>4.2f}s " for taken in seconds.values())
                print(f"{hidden:>6} {batch:>5} {ratios}{difference:>10.1e} {last}", flush=True)


if __name__ == "__main__":
    main()
