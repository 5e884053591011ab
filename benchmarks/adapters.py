"""Seconds of training language models with adapters by the vectorised engine, as ratios to the sequential one.

    python benchmarks/adapters.py [--hidden 64 256 512] [--clients 8] [--rounds 7]

Models are Llamas of random weights with four layers, and adapters of rank 4 beside queries and values. All engines run
the same jobs in one process and take turns, round by round: reception, training and hand-over of every client, without
evaluation and without the server. Each client trains on 16 texts of random tokens. Seconds are the process's on a CPU,
so that what else the machine does counts less, and the clock's elsewhere; ratios are of the least seconds of each
engine. The largest difference is that of two engines' uploads, relative to their largest change in training.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import Precision
from torch.optim import SGD

from pfl_lightning.data import TensorData
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CausalLM
from pfl_lightning.tasks import NextToken

VOCABULARY, TEXTS = 512, 16
ENGINES: dict[str, Callable[..., Engine]] = {"sequential": Sequential, "vectorised": Vectorised}


def base(hidden: int, folder: Path) -> str:
    """Return the folder of a saved Llama with random weights."""
    import transformers

    transformers.utils.logging.disable_progress_bar()

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=4,
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


def compare(model: str, args: argparse.Namespace, batch: int) -> tuple[dict[str, float], float]:
    """Return the least seconds of each engine, and the largest difference of two engines' uploads."""
    seed_everything(0, verbose=False)
    data = texts(args.clients, args.length, batch)
    data.setup()
    net = partial(CausalLM, model=model, lora={"r": args.rank, "alpha": 8, "targets": args.targets})
    client = FedAvg(net, data.input_shape, task=data.task, optimizer=partial(SGD, lr=0.1))
    client.settle_common()
    work = LocalWork(1, batch_size=batch)
    payload = {"weights": {n: t for n, t in detached(client.state_dict()).items() if "lora_" in n}}
    clients = [data.client(k) for k in range(args.clients)]
    made = {name: ENGINES[name](client, work, Precision()) for name in args.engines}
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
    # the first round compares ways of computing
    return {name: min(times[1:]) for name, times in seconds.items()}, max(differences, default=0.0) / change


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8], help="texts of a client in a step")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each engine")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="the first counts 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {args.clients} clients, {args.length} tokens, least of {args.rounds}")
    print(f"{'hidden':>6} {'batch':>5} " + "".join(f"{name:>12} " for name in args.engines) + f"{'difference':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for hidden in args.hidden:
            model = base(hidden, Path(folder))
            for batch in args.batch:
                seconds, difference = compare(model, args, batch)
                first = seconds[args.engines[0]]
                ratios = "".join(f"{first / taken:>6.2f} {taken:>4.2f}s " for taken in seconds.values())
                print(f"{hidden:>6} {batch:>5} {ratios}{difference:>10.1e}", flush=True)


if __name__ == "__main__":
    main()
