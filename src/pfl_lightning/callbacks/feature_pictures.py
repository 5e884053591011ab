"""Pictures of clients' features: embeddings of common samples, and the units behind predictions."""

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

from pfl_lightning.callbacks.pictures import Pictures, needs_classes
from pfl_lightning.data import FederatedDataModule, Samples
from pfl_lightning.engines import Engine
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.prediction import Recipe, become
from pfl_lightning.nets import Net
from pfl_lightning.plots.features import TSNE_COLUMNS, plot_conductance, plot_tsne
from pfl_lightning.runs.report import write_rows
from pfl_lightning.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from typing import Any

from pfl_lightning.nets.modes import kept_modes

FEWEST_POINTS = 5


class FeaturePictures(Pictures):
    r"""Draw the features of clients' models for common test samples, under any method.

    A client's model here is the one for evaluation: loaded with the server's last payload, and adapted if the method
    adapts before evaluation. Its features are the inputs of the net's classifier. In ``RUN_FOLDER/pictures/``:

    * ``tsne``: the features of all clients for correctly classified samples, embedded in the plane by t-SNE, coloured
      by label and by client. The points are in ``tsne.csv`` beside the picture; `plot_tsne` can draw those of several
      runs together.
    * ``conductance``: `layer_conductance` of the features for the true class of one sample, the one that most clients
      classify correctly: ranks of the units by client, and the rank correlation between these clients.

    The samples come from the central test set, or else evenly from each client's test split; two runs on the same data
    take the same ones. t-SNE of 20 clients and 1,000 samples takes minutes. Without a logger nothing is drawn; without
    test samples, or if clients' features differ in width, a warning says so. A picture that fails gives a warning, and
    the run goes on. Source of the pictures: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226), its
    analyses of features.

    Args:
        samples: number of test samples, at least 1; all samples if there are fewer.
        clients: ids of the clients to draw; None takes all. The first client's conductance sorts the units.
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.
        conductance: draw the conductance.
        steps: see `layer_conductance`.

    Raises:
        MisconfigurationException: if a number is out of range; at the start of ``fit``, if a client doesn't exist.
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
        """Find the run's folder, and check the clients' ids."""
        needs_classes(self, pl_module)
        super().on_fit_start(trainer, pl_module)
        ids = range(cast(Federation, pl_module).data.num_clients)
        self._clients = list(ids if self.clients is None else dict.fromkeys(self.clients))
        # refused at the start, as the first picture may be hours away
        if strangers := sorted(set(self._clients) - set(ids)):
            raise MisconfigurationException(
                f"FeaturePictures.clients has {strangers[0]}, but data.num_clients={len(ids)}; give ids from 0 to "
                f"{len(ids) - 1}."
            )

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Compute each client's features, and draw."""
        if self.folder is None:
            return
        folder = self.folder / "pictures" / where
        # conductance needs gradients, which inference mode forbids; a picture must not move the run's random state
        with torch.inference_mode(False), isolate_rng():
            try:
                seen = look_at_all(federation, self._clients, self.samples)
            # any exception, as for a picture: the run goes on
            except Exception as error:
                rank_zero_warn(f"FeaturePictures: nothing is drawn: {error}")
                self.folder = None
                return
            self.show(trainer, "tsne", lambda: draw_tsne(federation.method, seen, folder), where)
            if self.conductance:
                self.show(trainer, "conductance", lambda: draw_conductance(federation, seen, self.steps), where)


@dataclass(frozen=True)
class Seen:
    """Features and predictions of several clients for common samples.

    Args:
        clients: ids of the M clients.
        part: the n samples.
        features: features of each client ``[n, d]``.
        correct: correct predictions by client and sample ``[M, n]``, boolean.
    """

    clients: list[int]
    part: Samples
    features: list[Tensor]
    correct: Tensor


def look_at_all(federation: Federation, clients: list[int], count: int) -> Seen:
    """Return the features and predictions of clients for common samples.

    Args:
        federation: the federation.
        clients: ids of the clients.
        count: number of samples.

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
    """Return the samples to compare clients on: of the central test set, or else evenly of each client's test split.

    Args:
        data: the data module, whose seed draws the samples.
        count: number of samples; fewer if there are not as many.
    """
    if (central := data.central_data()) is not None:
        return _draw(central, count, derive_seed(data.seed, "feature pictures"))
    each, rest = divmod(count, data.num_clients)
    parts = [
        # the first `rest` clients give one more, so that the sum is exactly the count
        _draw(data.part(k, "test"), each + (k < rest), derive_seed(data.seed, "feature pictures", k))
        for k in range(data.num_clients)
    ]
    return Samples.joined(parts)


def _draw(part: Samples, count: int, seed: int) -> Samples:
    rows = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count]
    return part.take(rows)


def as_used(federation: Federation, client: int) -> Engine:
    """Load a client into the engine of its architecture, adapted as for evaluation, and return the engine.

    Args:
        federation: the federation.
        client: id of the client.
    """
    engine = federation.engines[federation.architecture_of(client)]
    become(Recipe(engine, federation.job(client)))
    return engine


@torch.no_grad()
def look(engine: Engine, part: Samples) -> tuple[Tensor, Tensor]:
    """Return features ``[n, d]`` of samples, and correct predictions ``[n]``, both on the CPU.

    Args:
        engine: the engine, loaded with the client.
        part: the samples.
    """
    part = part.to(engine.device, cast(torch.dtype, engine.module.dtype))
    features, correct = [], []
    for x, y in part.chunks():
        with watch_features(engine.module) as seen, engine.forward_context():
            logits = engine.module(x)
        # the features of the net that ran last, as a module may have several
        features.append(seen[-1][1].flatten(1).float().cpu())
        correct.append((logits.argmax(1) == y).cpu())
    return torch.cat(features), torch.cat(correct)


@contextmanager
def watch_features(module: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Yield a list that collects each feature extractor as it runs, with its output.

    A module may have several nets, of which only some run.
    """
    seen: list[tuple[nn.Module, Tensor]] = []
    nets = [net for net in module.modules() if isinstance(net, Net)]
    handles = [net.features.register_forward_hook(lambda layer, _, h: seen.append((layer, h))) for net in nets]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def draw_tsne(name: str, seen: Seen, folder: Path) -> "Figure":
    """Embed the features of correctly classified samples, write ``tsne.csv``, and return the picture.

    Args:
        name: name of the run.
        seen: features and predictions.
        folder: folder of the table; created if missing.
    """
    points = embed(torch.cat([h[right] for h, right in zip(seen.features, seen.correct, strict=True)]))
    places, samples = seen.correct.nonzero(as_tuple=True)
    columns = torch.tensor(seen.clients)[places], seen.part.y[samples], *points.T
    rows = [dict(zip(TSNE_COLUMNS, row, strict=True)) for row in zip(*map(Tensor.tolist, columns), strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "tsne.csv", rows)
    return plot_tsne({name: rows})


def embed(features: Tensor) -> Tensor:
    """Return a t-SNE embedding in the plane, deterministic for given points.

    Args:
        features: ``[n, d]``, n at least 5 and d at least 2; below 91 points the perplexity is lower than the usual 30.

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
    # scikit-learn refuses a perplexity above the number of points; a third of it is the usual rule
    perplexity = min(30.0, (len(features) - 1) / 3)
    # started from principal components: a random start would give another picture for each seed
    tsne = TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=0)
    return torch.from_numpy(tsne.fit_transform(features.numpy()))


def draw_conductance(federation: Federation, seen: Seen, steps: int) -> "Figure":
    """Return the picture of the features' conductance for one sample, over all clients that classify it correctly.

    Args:
        federation: the federation.
        seen: features and predictions; the sample that most clients classify correctly is drawn, the first of equals.
        steps: see `layer_conductance`.

    Raises:
        ValueError: if no two clients classify the same sample correctly.
    """
    sample = int(seen.correct.sum(0).argmax())
    clients = [client for client, right in zip(seen.clients, seen.correct[:, sample], strict=True) if right]
    if len(clients) < 2:
        raise ValueError("no two clients classify the same sample correctly")
    # a batch of one: conductance is about a single prediction
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


def layer_conductance(
    model: nn.Module,
    layer: nn.Module,
    x: Tensor,
    target: Tensor,
    steps: int = 50,
    baseline: Tensor | None = None,
) -> Tensor:
    r"""Return the conductance of a layer's units for a class's logit, on the straight path from baseline to input.

    .. math::

        \mathrm{cond}_j = \int_0^1 \frac{\partial F}{\partial h_j} \frac{\partial h_j}{\partial \alpha}\, d\alpha
        \approx \sum_{s=1}^{S} \frac12 \Big(\frac{\partial F}{\partial h_j}(x_{s-1})
        + \frac{\partial F}{\partial h_j}(x_s)\Big)\, \big(h_j(x_s) - h_j(x_{s-1})\big),
        \qquad x_s = x_0 + \frac sS (x - x_0)

    F is the logit and h the layer's output. If F depends on x through h alone, the sum over units is :math:`F(x) -
    F(x_0)`: exactly for F linear or quadratic in h, otherwise up to an error that shrinks with the number of steps. The
    model runs in evaluation mode, with the S + 1 points of one sample as a batch. Source: Dhamdhere et al., 2019
    (https://arxiv.org/abs/1805.12233).

    >>> net = nn.Sequential(nn.Identity(), nn.Linear(2, 1, bias=False))
    >>> _ = net[1].weight.data.copy_(torch.tensor([[3.0, -1.0]]))
    >>> layer_conductance(net, net[0], torch.tensor([[2.0, 5.0]]), torch.tensor([0]))
    tensor([[ 6., -5.]])

    Args:
        model: maps inputs ``[n, *input_shape]`` to logits ``[n, num_classes]``, such as a net or a client module.
        layer: the module within the model whose outputs are the units, such as ``net.features``; used once per pass.
        x: inputs ``[n, *input_shape]``.
        target: class of the logit to explain, for each input ``[n]``.
        steps: S, at least 1.
        baseline: :math:`x_0`, shaped like ``x`` or like one input; None takes zeros.

    Returns:
        ``[n, d]``, the layer's output flattened; in float32 or wider.

    Raises:
        MisconfigurationException: if inputs are integers, such as word ids, or ``steps`` is less than 1.
    """
    if steps < 1:
        raise MisconfigurationException(f"steps={steps} must be 1 or more, such as 50.")
    if not x.is_floating_point():
        raise MisconfigurationException(f"inputs of type {x.dtype} have no path between; give floating-point inputs.")
    start = torch.zeros_like(x) if baseline is None else baseline.to(x).expand_as(x)
    shares = torch.linspace(0, 1, steps + 1, dtype=x.dtype, device=x.device).view(-1, *[1] * (x.dim() - 1))
    with kept_modes(model):
        model.eval()
        rows = [
            _along_path(model, layer, torch.lerp(first, last, shares), int(label))
            for first, last, label in zip(start, x, target, strict=True)
        ]
    return torch.stack(rows)


def _along_path(model: nn.Module, layer: nn.Module, path: Tensor, label: int) -> Tensor:
    """Return the conductance ``[d]`` along the points of a path ``[S + 1, *input_shape]``."""
    outputs: list[Tensor] = []

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # the graph begins at h: layers before need none, which saves their memory; leaving no_grad ends it
        torch.set_grad_enabled(True)
        outputs.append(output.requires_grad_())
        return output

    handle = layer.register_forward_hook(begin)
    try:
        with torch.no_grad():
            score = model(path)[:, label].sum()
    finally:
        handle.remove()
    h = outputs[-1]
    (slopes,) = torch.autograd.grad(score, h)
    # in bf16 the sum of S small differences would be lost in rounding
    wide = torch.promote_types(h.dtype, torch.float32)
    h, slopes = h.detach().flatten(1).to(wide), slopes.flatten(1).to(wide)
    return ((slopes[1:] + slopes[:-1]) / 2 * h.diff(dim=0)).sum(0)
