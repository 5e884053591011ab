"""Pictures of clients' features: where the same samples lie among them, and which units clients decide by."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.callbacks.layer_conductance import layer_conductance
from pfl_lightning.callbacks.pictures import Pictures, needs_classes
from pfl_lightning.data import FederatedDataModule, Samples
from pfl_lightning.engines import Engine
from pfl_lightning.federation.federation import Federation
from pfl_lightning.nets import Net
from pfl_lightning.plots.features import TSNE_COLUMNS, plot_conductance, plot_tsne
from pfl_lightning.runs.report import write_rows
from pfl_lightning.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_POINTS = 5


class FeaturePictures(Pictures):
    r"""Draws the features that clients' models have for the same test samples, under any method.

    A client's model is what it makes of the server's last payload, adapted where the method does so before evaluation;
    its features are what its net's classifier then takes. In ``RUN_FOLDER/pictures/``:

    * ``tsne``: the features of all clients, embedded in the plane by t-SNE, coloured by label and by client; only those
      of samples that the client classifies correctly. Its points are in ``tsne.csv`` beside it, so that `plot_tsne` can
      draw several runs together.
    * ``conductance``: `layer_conductance` of the features for the true class of one sample: the one that the most
      clients classify correctly. Ranks of units by client, and the rank correlation of these clients.

    The samples are of the central test set, or as many of each client's test split; those of two runs on the same data
    are the same. t-SNE of 20 clients and 1,000 samples takes minutes. Nothing is drawn without a logger, and, after a
    warning, where there are no test samples or the features of clients have different widths. A picture that fails is a
    warning; the run goes on. Source of the pictures: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226),
    as its analyses of features.

    Args:
        samples: how many test samples, at least 1; all if there are fewer.
        clients: ids of the clients that are looked at; None takes all. Units are sorted by the first one's conductance.
        every: rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` alone.
        conductance: whether there is a picture of it.
        steps: see `layer_conductance`.

    Raises:
        MisconfigurationException: if a number is out of its range; at the start of ``fit``, if there is no such client.
    """

    def __init__(
        self,
        samples: int = 1000,
        clients: tuple[int, ...] | None = None,
        every: int | None = None,
        conductance: bool = True,
        steps: int = 50,
    ) -> None:
        super().__init__(every)
        if samples < 1 or steps < 1:
            raise MisconfigurationException(
                f"FeaturePictures.samples={samples} and FeaturePictures.steps={steps} must be at least 1, such as 1000 "
                "and 50."
            )
        if clients is not None and not clients:
            raise MisconfigurationException("FeaturePictures.clients=[] has no client; name some, or null for all.")
        self.samples = samples
        self.clients = clients
        self.conductance = conductance
        self.steps = steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the run's folder, and the clients."""
        needs_classes(self, pl_module)
        super().on_fit_start(trainer, pl_module)
        known = range(cast(Federation, pl_module).data.num_clients)
        self._clients = list(known if self.clients is None else dict.fromkeys(self.clients))
        if strangers := sorted(set(self._clients) - set(known)):
            raise MisconfigurationException(
                f"FeaturePictures.clients has {strangers[0]}, and data.num_clients={len(known)} gives clients 0 to "
                f"{len(known) - 1}."
            )

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Looks at each client's model, and draws."""
        if self.folder is None:
            return
        folder = self.folder / "pictures" / where
        with torch.inference_mode(False), isolate_rng():
            try:
                seen = look_at_all(federation, self._clients, self.samples)
            # as for a picture: whatever it is, the run goes on
            except Exception as error:
                rank_zero_warn(f"FeaturePictures: nothing is drawn: {error}")
                self.folder = None
                return
            self.show(trainer, "tsne", lambda: draw_tsne(federation.method, seen, folder), where)
            if self.conductance:
                self.show(trainer, "conductance", lambda: draw_conductance(federation, seen, self.steps), where)


@dataclass(frozen=True)
class Seen:
    """What clients make of the same samples.

    Args:
        clients: their ids, M of them.
        part: the samples, n of them.
        features: of each client ``[n, d]``.
        correct: which samples a client classifies correctly ``[M, n]``.
    """

    clients: list[int]
    part: Samples
    features: list[Tensor]
    correct: Tensor


def look_at_all(federation: Federation, clients: list[int], count: int) -> Seen:
    """What the clients' models make of the same samples.

    Args:
        federation: the federation.
        clients: ids of those that are looked at.
        count: how many samples.

    Raises:
        ValueError: if there are no test samples, or features have different widths.
    """
    part = common_samples(federation.data, count)
    if not len(part):
        raise ValueError("there are no test samples")
    features, correct = zip(*(look(as_used(federation, client), part) for client in clients), strict=True)
    if len(widths := sorted({h.shape[1] for h in features})) > 1:
        raise ValueError(f"features of widths {', '.join(map(str, widths))} can't be compared")
    return Seen(clients, part, list(features), torch.stack(correct))


def common_samples(data: FederatedDataModule, count: int) -> Samples:
    """Samples that all clients are compared on: of the central test set, else as many of each client's test split.

    Args:
        data: the data module, whose seed draws them.
        count: how many; fewer where there aren't as many.
    """
    if (central := data.central_data()) is not None:
        return _draw(central, count, derive_seed(data.seed, "feature pictures"))
    each, rest = divmod(count, data.num_clients)
    parts = [
        _draw(data.part(k, "test"), each + (k < rest), derive_seed(data.seed, "feature pictures", k))
        for k in range(data.num_clients)
    ]
    return Samples.joined(parts)


def _draw(part: Samples, count: int, seed: int) -> Samples:
    rows = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count]
    return part.take(rows)


def as_used(federation: Federation, client: int) -> Engine:
    """The engine of a client's kind, with its module made the client as it is evaluated now.

    Args:
        federation: the federation.
        client: id of the client.
    """
    engine, job = federation.engines[federation.architecture_of(client)], federation.job(client)
    data = engine.become(job)
    if phases := engine.module.evaluation_phases():
        with torch.enable_grad():
            engine.adapt(phases, job, data)
    return engine


@torch.no_grad()
def look(engine: Engine, part: Samples) -> tuple[Tensor, Tensor]:
    """Features ``[n, d]`` of samples, and which of them are classified correctly ``[n]``, both on the CPU.

    Args:
        engine: the engine whose module is the client.
        part: the samples.
    """
    part = part.to(engine.device, cast(torch.dtype, engine.module.dtype))
    features, correct = [], []
    for x, y in part.chunks():
        with watch_features(engine.module) as seen, engine.forward_context():
            logits = engine.module(x)
        features.append(seen[-1][1].flatten(1).float().cpu())
        correct.append((logits.argmax(1) == y).cpu())
    return torch.cat(features), torch.cat(correct)


@contextmanager
def watch_features(module: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Lists the feature extractors that run, with their outputs: of several nets in a module, not all need be used."""
    seen: list[tuple[nn.Module, Tensor]] = []
    nets = [net for net in module.modules() if isinstance(net, Net)]
    handles = [net.features.register_forward_hook(lambda layer, _, h: seen.append((layer, h))) for net in nets]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def draw_tsne(name: str, seen: Seen, folder: Path) -> "Figure":
    """Embeds features of correctly classified samples, writes ``tsne.csv`` and draws it.

    Args:
        name: the run's name.
        seen: what clients make of the samples.
        folder: of the table; made if need be.
    """
    points = embed(torch.cat([h[right] for h, right in zip(seen.features, seen.correct, strict=True)]))
    places, samples = seen.correct.nonzero(as_tuple=True)
    columns = torch.tensor(seen.clients)[places], seen.part.y[samples], *points.T
    rows = [dict(zip(TSNE_COLUMNS, row, strict=True)) for row in zip(*map(Tensor.tolist, columns), strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "tsne.csv", rows)
    return plot_tsne({name: rows})


def embed(features: Tensor) -> Tensor:
    """The same points in the plane, by t-SNE that starts from the principal components; the same for the same points.

    Args:
        features: ``[n, d]``, n at least 5 and d at least 2; of fewer than 91, the perplexity is below its usual 30.

    Returns:
        ``[n, 2]``.

    Raises:
        ValueError: if there are too few points, or all are equal.
    """
    from sklearn.manifold import TSNE

    if len(features) < FEWEST_POINTS:
        raise ValueError(f"{len(features)} features of correctly classified samples are too few")
    if (features == features[0]).all():
        raise ValueError("the features of all samples are equal")
    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=0)
    return torch.from_numpy(tsne.fit_transform(features.numpy()))


def draw_conductance(federation: Federation, seen: Seen, steps: int) -> "Figure":
    """Conductance of the features for one sample, of all clients that classify it correctly.

    Args:
        federation: the federation.
        seen: what clients make of the samples; the one that most classify correctly is taken, of equals the first.
        steps: see `layer_conductance`.

    Raises:
        ValueError: if no two clients classify the same sample correctly.
    """
    sample = int(seen.correct.sum(0).argmax())
    clients = [client for client, right in zip(seen.clients, seen.correct[:, sample], strict=True) if right]
    if len(clients) < 2:
        raise ValueError("no two clients classify the same sample correctly")
    part = seen.part.take(slice(sample, sample + 1))
    rows = []
    for client in clients:
        module = as_used(federation, client).module
        x = part.to(module.device, cast(torch.dtype, module.dtype)).x
        with torch.no_grad(), watch_features(module) as ran:
            module(x)
        rows.append(layer_conductance(module, ran[-1][0], x, part.y, steps)[0].cpu())
    title = f"Layer conductance for a sample of class {int(part.y)}"
    if len(clients) < len(seen.clients):
        title += f", which {len(clients)} of {len(seen.clients)} clients classify correctly"
    return plot_conductance(torch.stack(rows), clients, title)
