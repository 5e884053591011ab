"""Seconds a round of methods, as ratios to a plain PyTorch loop over their own forward and backward passes.

    python benchmarks/passes.py [--methods FedAvg FedProx MOON FedSAM Ditto FedPAC APPLE FedClassAvg]
    python benchmarks/passes.py --net MLP --engine auto --cpu    # the small net, in CPU seconds of the process

As `rounds.py`: both run in one process with one intra-op thread and take turns, round by round, and neither evaluates.
The loop of a method is what one would write by hand for it alone: its loss, its phases, its frozen models, with plain
SGD over resident tensors; of the server it has the mean of what is sent. Beside the whole round stands its training,
without what the server does, which for FedPAC is a quadratic programme for each client.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rounds import BATCH, LR, Noise, Turns
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.engines import ENGINES
from pfl_lightning.methods.apple import APPLE
from pfl_lightning.methods.ditto import Ditto
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.fedpac import PACClient
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedsam import FedSAM
from pfl_lightning.methods.losses import supervised_contrastive
from pfl_lightning.methods.moon import MOON
from pfl_lightning.methods.random_views import random_views
from pfl_lightning.nets import CNN, MLP

CLIENTS, SAMPLES, CLASSES = 10, 60, 10
NETS = {"CNN": (CNN, (3, 32, 32)), "MLP": (partial(MLP, hidden=(64,)), (1, 8, 8))}
"""Nets by name, with the shape of their inputs."""


class Plain:
    """A client's local work by hand.

    Args:
        net: the net, which becomes one client after another.
        parts: samples ``(x, y)`` of each client.
    """

    def __init__(self, net: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.net = net
        self.parts = parts
        self.kept: list[dict[str, Any]] = [{} for _ in parts]
        self.sent = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch."""
        x, y = self.parts[client]
        order = torch.randperm(len(x))
        return zip(x[order].split(BATCH), y[order].split(BATCH), strict=True)

    def steps(self, client: int, loss: Callable[[Tensor, Tensor], Tensor], parameters: Any = None) -> None:
        """An epoch of SGD."""
        optimizer = SGD(self.net.parameters() if parameters is None else parameters, lr=LR)
        for x, y in self.batches(client):
            value = loss(x, y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    def cross_entropy(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the net."""
        return F.cross_entropy(self.net(x), y)

    def local(self, client: int) -> None:
        """Trains the net, which is what the client received."""
        self.steps(client, self.cross_entropy)

    def run(self) -> None:
        """A round."""
        uploads = []
        for client in range(len(self.parts)):
            self.net.load_state_dict(self.sent)
            self.local(client)
            uploads.append({name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()})
        self.sent = {name: torch.stack([upload[name] for upload in uploads]).mean(0) for name in self.sent}


class PlainFedProx(Plain):
    """With the distance to what was received."""

    def local(self, client: int) -> None:
        """As above."""
        anchors = [p.detach().clone() for p in self.net.parameters()]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            near = sum((p - a).square().sum() for p, a in zip(self.net.parameters(), anchors, strict=True))
            return self.cross_entropy(x, y) + 0.0005 * near

        self.steps(client, loss)


class PlainFedSAM(Plain):
    """The gradient at weights that the batch's own gradient has moved by 0.05."""

    def local(self, client: int) -> None:
        """As above."""
        parameters = list(self.net.parameters())

        def loss(x: Tensor, y: Tensor) -> Tensor:
            up = torch.autograd.grad(self.cross_entropy(x, y), parameters)
            scale = 0.05 / (torch.linalg.vector_norm(torch.stack([g.norm() for g in up])) + 1e-12)
            moved = {name: p + scale * g for (name, p), g in zip(self.net.named_parameters(), up, strict=True)}
            return F.cross_entropy(functional_call(self.net, moved, (x,)), y)

        self.steps(client, loss)


class PlainMOON(Plain):
    """With the features of two frozen nets."""

    def local(self, client: int) -> None:
        """As above."""
        received = deepcopy(self.net.features)
        previous = self.kept[client].get("previous", received)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(x)
            with torch.no_grad():
                others = received(x), previous(x)
            near, far = (F.cosine_similarity(z, other) / 0.5 for other in others)
            return F.cross_entropy(self.net.classifier(z), y) + F.softplus(far - near).mean()

        self.steps(client, loss)
        self.kept[client]["previous"] = deepcopy(self.net.features)


class PlainDitto(Plain):
    """With a personal net, held to the received one."""

    def local(self, client: int) -> None:
        """As above."""
        own = self.kept[client].setdefault("net", deepcopy(self.net))
        anchors = [p.detach() for p in self.net.parameters()]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            near = sum((p - a).square().sum() for p, a in zip(own.parameters(), anchors, strict=True))
            return F.cross_entropy(own(x), y) + 0.5 * near

        self.steps(client, loss, own.parameters())
        super().local(client)


class PlainFedPAC(Plain):
    """The classifier first, then features that are drawn to prototypes; class means before and after."""

    def local(self, client: int) -> None:
        """As above."""
        x, y = self.parts[client]
        features, classifier = self.net.features, self.net.classifier
        shares = F.one_hot(y, CLASSES).float().T
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1)
        with torch.no_grad():
            prototypes = shares @ features(x)

        def head(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                z = features(x)
            return F.cross_entropy(classifier(z), y)

        def body(x: Tensor, y: Tensor) -> Tensor:
            z = features(x)
            return F.cross_entropy(classifier(z), y) + F.mse_loss(z, prototypes[y])

        self.steps(client, head, classifier.parameters())
        for p in classifier.parameters():
            p.requires_grad_(False)
        self.steps(client, body, features.parameters())
        for p in classifier.parameters():
            p.requires_grad_(True)
        with torch.no_grad():
            self.kept[client]["prototypes"] = shares @ features(x)


class PlainAPPLE(Plain):
    """A mix of all clients' cores; the own core and the weights learn."""

    def run(self) -> None:
        """A round: cores are handed out, and none is averaged."""
        cores = [kept.get("core", self.sent) for kept in self.kept]
        for client, kept in enumerate(self.kept):
            self.net.load_state_dict(cores[client])
            stack = {name: torch.stack([core[name] for core in cores]) for name in self.sent}
            for rows in stack.values():
                rows[client] = 0
            rho = kept.setdefault("rho", torch.full((len(cores),), 1 / len(cores))).requires_grad_()
            own = dict(self.net.named_parameters())

            def loss(
                x: Tensor, y: Tensor, client: int = client, stack: Any = stack, rho: Any = rho, own: Any = own
            ) -> Tensor:
                mix = {name: rho[client] * p + torch.tensordot(rho, stack[name], 1) for name, p in own.items()}
                return F.cross_entropy(functional_call(self.net, mix, (x,)), y) + 0.05 * (rho - 0.1).square().sum()

            self.steps(client, loss, [*own.values(), rho])
            kept["core"] = {name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()}


class PlainFedClassAvg(Plain):
    """Two random views of each image, contrast between them, and a shared classifier."""

    def local(self, client: int) -> None:
        """As above."""
        features, classifier = self.net.features, self.net.classifier
        features.load_state_dict(self.kept[client].get("features", features.state_dict()))
        anchors = [p.detach().clone() for p in classifier.parameters()]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = features(random_views(torch.cat([x, x])))
            way = torch.cat([(p - a).flatten() for p, a in zip(classifier.parameters(), anchors, strict=True)])
            contrast = supervised_contrastive(z, y.repeat(2))
            return contrast + F.cross_entropy(classifier(z[: len(y)]), y) + 0.1 * torch.linalg.vector_norm(way)

        self.steps(client, loss)
        self.kept[client]["features"] = deepcopy(features.state_dict())


METHODS: dict[str, tuple[type[FedAvg], type[Plain]]] = {
    "FedAvg": (FedAvg, Plain),
    "FedProx": (FedProx, PlainFedProx),
    "MOON": (MOON, PlainMOON),
    "FedSAM": (FedSAM, PlainFedSAM),
    "Ditto": (Ditto, PlainDitto),
    "FedPAC": (PACClient, PlainFedPAC),
    "APPLE": (APPLE, PlainAPPLE),
    "FedClassAvg": (FedClassAvg, PlainFedClassAvg),
}


class Both(Turns):
    """Keeps the federation's seconds of training too."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the plain loop's turn as well."""
        super().on_train_epoch_end(trainer, pl_module)
        self.seconds.setdefault("training", []).append(pl_module.metrics["time/train"])


def compare(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a round of each side, without the first two rounds."""
    client, plain = METHODS[name]
    net, shape = NETS[args.net]
    seed_everything(0, verbose=False)
    data = Noise(CLIENTS, SAMPLES, shape)
    data.setup()
    parts = [data.part(client, "train") for client in range(CLIENTS)]
    by_hand = plain(net(data.input_shape, CLASSES), [(part.x, part.y) for part in parts])
    turns = Both(by_hand.run, clock=time.process_time if args.cpu else time.perf_counter)
    trainer = FederatedTrainer(
        max_rounds=args.rounds + 2,
        engine=args.engine,
        callbacks=[turns],
        accelerator="cpu",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = client(net=net, input_shape=data.input_shape, num_classes=CLASSES, optimizer=partial(SGD, lr=LR))
    trainer.fit(module, datamodule=data)
    return {side: statistics.median(seconds[2:]) for side, seconds in turns.seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each side")
    parser.add_argument("--net", default="CNN", choices=list(NETS))
    parser.add_argument("--engine", default="sequential", choices=list(ENGINES))
    parser.add_argument("--cpu", action="store_true", help="seconds of the process in place of the clock's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(f"torch {torch.__version__}, {CLIENTS} clients x {SAMPLES} samples, {args.net}, {args.engine}, one thread")
    print(f"{'method':<12} {'plain loop':>11} {'round':>9} {'ratio':>6} {'ratio of its training':>22}")
    for name in args.methods:
        seconds = compare(name, args)
        plain, whole, training = (seconds[side] for side in ("plain", "federation", "training"))
        # A round's own record of its training is by the clock.
        own = "" if args.cpu else f"{training / plain:.2f}"
        print(f"{name:<12} {plain:>9.3f} s {whole:>7.3f} s {whole / plain:>6.2f} {own:>22}", flush=True)


if __name__ == "__main__":
    main()
