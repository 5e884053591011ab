"""Look at clients before any training: number, sizes, distances of labels and of inputs; suggest methods by these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from pfl_lightning.data import FederatedDataModule
from pfl_lightning.data.samples import Split
from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Regression, Task

SPLITS: tuple[Split, ...] = ("train", "val", "test")

ROWS = 20_000
"""Largest number of training rows, of all clients together, whose inputs are looked at."""

UNLIKE = 0.2
"""Share of the labels' variance between clients from which class-wise averaging is suggested."""

SHIFTED = 0.05
"""Share of the inputs' variance between clients, labels held fixed, from which FedBN is suggested."""

RELATED = 0.01
"""Share of the inputs' variance within clients that labels explain, below which no relation of both is found."""

UNLIKE_RELATION = 0.2
"""Client's own share of the relation of inputs to labels from which clients are suggested to learn from peers alone."""

NEAR = 0.5
"""Distance to the nearest peer, relative to the mean distance, up to which clients count as grouped."""

FEW = 10
"""Largest number of clients for which APFL is suggested, whose second model costs as much again."""


@dataclass(frozen=True)
class Look:
    """Facts about the clients, known before training.

    Args:
        clients: names of the clients, or their ids as text.
        train: number of training rows by client.
        val: number of validation rows by client.
        test: number of test rows by client.
        labels: share of the labels' variance between clients, from 0 for equal label mixes to 1 for clients of one
            label each; about 0 by chance; None if labels are no classes and no numbers.
        nearest: distance of label mixes to the nearest peer, relative to the mean over all pairs; None without classes.
        inputs: share of the inputs' variance between clients, labels held fixed, on the same scale; None if inputs are
            no numbers.
        relation: share of the relation of inputs to labels that differs between clients, see `own_relation`.
    """

    clients: Sequence[str]
    train: Sequence[int]
    val: Sequence[int]
    test: Sequence[int]
    labels: float | None
    nearest: float | None
    inputs: float | None
    relation: float | None

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Return the facts in words, each a name and a text."""
        sizes = [("training", self.train), ("validation", self.val), ("test", self.test)]
        facts = [("clients", str(len(self.clients)))]
        facts += [
            (f"{name} rows a client", f"{min(rows)} to {max(rows)}, median {median(rows):g}") for name, rows in sizes
        ]
        facts.append(("labels", share_in_words(self.labels, "labels")))
        if self.nearest is not None:
            facts.append(("nearest peer", f"at {100 * self.nearest:.0f} % of the mean distance of two label mixes"))
        facts.append(("inputs", share_in_words(self.inputs, "inputs")))
        if self.relation is None:
            facts.append(("relation of inputs to labels", "none found within clients by a linear look"))
        else:
            facts.append(("relation of inputs to labels", f"{100 * self.relation:.0f} % of it is each client's own"))
        return facts


def share_in_words(share: float | None, what: str) -> str:
    """Return a share of variance in words.

    >>> share_in_words(0.374, "labels"), share_in_words(None, "inputs")
    ('37 % of their variance is between clients', 'not measured: inputs of this kind have no mean')

    Args:
        share: the share, 0 to 1; None if unknown.
        what: name of the values.
    """
    if share is None:
        return f"not measured: {what} of this kind have no mean"
    fixed = ", labels held fixed" if what == "inputs" else ""
    return f"{100 * share:.0f} % of their variance is between clients{fixed}"


def look_at(data: FederatedDataModule) -> Look:
    """Return facts about the clients of a data module.

    Args:
        data: the data module, set up, with samples at hand.
    """
    clients = range(data.num_clients)
    train, val, test = ([data.size(client, split) for client in clients] for split in SPLITS)
    # as many rows of each client, so that a large client can't stand for all
    most = max(2, ROWS // data.num_clients)
    x, y, owner = [], [], []
    for client in clients:
        samples = data.part(client, "train")
        if isinstance(samples.x, Tensor) and isinstance(samples.y, Tensor) and len(samples):
            x.append(samples.x[:most])
            y.append(samples.y[:most])
            owner.append(torch.full((len(x[-1]),), client))
    owners = torch.cat(owner) if owner else torch.empty(0, dtype=torch.int64)
    targets = torch.cat(y) if y else torch.empty(0)
    values = torch.cat([each.flatten(1) for each in x]) if x else torch.empty(0, 0, dtype=torch.int64)
    classes = data.task.classes(targets) if len(targets) else None
    labels = nearest = numbers = None
    if classes is not None and data.knows_classes:
        labels = between(nn.functional.one_hot(classes).double(), owners)
        nearest = nearest_peer(data.counts)
    elif targets.is_floating_point() and len(targets):
        numbers = targets.double().flatten(1) if targets.dim() > 1 else targets.double()[:, None]
        labels = between(numbers, owners)
    inputs = relation = None
    if values.is_floating_point() and len(values):
        inputs = between(scaled(values.double(), classes), owners)
        of_labels = numbers if classes is None else nn.functional.one_hot(classes).double()
        relation = None if of_labels is None else own_relation(scaled(values.double(), None), of_labels, owners)
    names = data.client_names or [str(client) for client in clients]
    return Look(names[: len(clients)], train, val, test, labels, nearest, inputs, relation)


def scaled(values: Tensor, classes: Tensor | None) -> Tensor:
    """Return inputs with deviation 1 in each column, then with the mean of their class taken out.

    Clients with other labels have other inputs too; without the classes' means, the rest is a shift of inputs alone.

    Args:
        values: inputs ``[n, d]``.
        classes: class of each row, int64 ``[n]``; None takes out nothing.
    """
    values = values / values.std(0, correction=0).clamp_min(1e-9)
    if classes is None:
        return values
    sums = torch.zeros(int(classes.max()) + 1, values.shape[1], dtype=values.dtype).index_add_(0, classes, values)
    return values - (sums / classes.bincount().clamp_min(1)[:, None])[classes]


def between(values: Tensor, owners: Tensor) -> float | None:
    """Return the share of variance between clients, without the part that chance alone gives; None without variance.

    It is omega squared of an analysis of variance, with the sums of squares of all columns added; at least 0.

    >>> same, far = torch.tensor([[0.0], [1.0], [0.0], [1.0]]), torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    >>> between(same, torch.tensor([0, 0, 1, 1])), between(far, torch.tensor([0, 0, 1, 1]))
    (0.0, 1.0)

    Args:
        values: numbers ``[n, d]``.
        owners: each row's client, int64 ``[n]``.

    Source:
        Hays, Statistics for Psychologists, 1963.
    """
    _, place, counts = torch.unique(owners, return_inverse=True, return_counts=True)
    groups, rows = len(counts), len(owners)
    total = float((values - values.mean(0)).square().sum())
    if groups < 2 or rows <= groups or total <= 1e-12 * rows:
        return None
    means = torch.zeros(groups, values.shape[1], dtype=values.dtype).index_add_(0, place, values) / counts[:, None]
    within = float((values - means[place]).square().sum())
    # the mean square within clients: that much each degree of freedom between clients has by chance
    chance = within / (rows - groups)
    return max(0.0, (total - within - (groups - 1) * chance) / (total + chance))


def own_relation(values: Tensor, labels: Tensor, owners: Tensor) -> float | None:
    r"""Return the share of the relation of inputs to labels that is each client's own, from 0 to 1.

    Within clients, inputs are explained by labels: by one linear map for all clients, and by one for each. The sums of
    squares explained, each less what chance explains, are C and E, and the share is :math:`1 - C / E`. Where the same
    label means the same inputs at all clients it is 0, where each client codes the labels in its own way near 1. Shifts
    of a client's inputs or label mix have no part in it.

    >>> x, owners = torch.tensor([[0.0], [0.1], [1.0], [1.1]] * 2), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> same, inverse = torch.tensor([0.0, 0, 1, 1] * 2)[:, None], torch.tensor([0.0, 0, 1, 1, 1, 1, 0, 0])[:, None]
    >>> own_relation(x, same, owners), own_relation(x, inverse, owners)
    (0.0, 1.0)

    Args:
        values: inputs ``[n, d]``.
        labels: labels as numbers, such as one-hot classes, ``[n, k]``.
        owners: each row's client, int64 ``[n]``.

    Returns:
        None if labels explain less than 1 % of the inputs' variance within clients, or clients have too few rows.
    """
    _, place, counts = torch.unique(owners, return_inverse=True, return_counts=True)

    def centred(numbers: Tensor) -> Tensor:
        numbers = numbers.double()
        sums = torch.zeros(len(counts), numbers.shape[1], dtype=torch.float64).index_add_(0, place, numbers)
        means: Tensor = (sums / counts[:, None])[place]
        return numbers - means

    def explained(x: Tensor, y: Tensor) -> tuple[float, int]:
        # columns of an orthonormal basis of the labels
        basis, sizes, _ = torch.linalg.svd(y, full_matrices=False)
        basis = basis[:, sizes > 1e-9 * max(1.0, float(sizes.max()))]
        return float((basis.T @ x).square().sum()), basis.shape[1]

    x, y = centred(values), centred(labels)
    total = float(x.square().sum())
    common, freedom = explained(x, y)
    alone = [explained(x[place == client], y[place == client]) for client in range(len(counts))]
    each, own_freedom = (sum(part) for part in zip(*alone, strict=True))
    rest = len(x) - len(counts) - own_freedom
    if rest < 1 or own_freedom <= freedom:
        return None
    chance = (total - each) / rest
    common, each = max(0.0, common - freedom * chance), each - own_freedom * chance
    return None if each <= RELATED * total else max(0.0, 1 - common / each)


def nearest_peer(counts: Tensor) -> float | None:
    """Return the mean distance of a client's label mix to the nearest other one, relative to the mean over all pairs.

    Args:
        counts: training rows of clients by class, ``[clients, classes]``.

    Returns:
        0 if each client has a twin, about 1 if all pairs are as far apart; None for less than three clients, or if all
        clients have the same mix.
    """
    mixes = counts[counts.sum(1) > 0].double()
    if len(mixes) < 3:
        return None
    mixes = mixes / mixes.sum(1, keepdim=True)
    distances = torch.cdist(mixes, mixes, p=1)
    mean = float(distances.sum() / (len(mixes) * (len(mixes) - 1)))
    nearest = float(distances.fill_diagonal_(math.inf).min(1).values.mean())
    return nearest / mean if mean > 0 else None


def suggested(look: Look, net: Net, task: Task) -> dict[str, str]:
    """Return the methods of the tournament, each a word of ``compare --methods``, with the reason.

    Simple methods come first: of equally good ones, the first is advised.

    Args:
        look: facts about the clients.
        net: the clients' net.
        task: the data's task.
    """
    reasons = {
        "local": "the reference: each client trains alone",
        "fedavg": "one model for all",
        "fedavg+tuned/fine_tuned": "one model for all, then trained by each client: the simplest personal one",
    }
    has_features = any(parameter.requires_grad for parameter in net.features.parameters())
    if has_features:
        reasons["fedper"] = "shared features, personal classifiers"
    reasons["ditto"] = "a personal model held near the common one"
    if task.has_classes or type(task) is Regression:
        reasons["knn_per"] = "one model for all, whose predictions are mixed with those of a client's nearest rows"
    peers = (look.relation or 0) >= UNLIKE_RELATION
    differ = "labels mean other inputs at other clients" if peers else "clients may be of two kinds"
    reasons["ifca"] = f"{differ}: two models, of which each client trains the one that fits"
    if len(look.clients) <= FEW:
        reasons["apfl"] = f"{len(look.clients)} clients are few: a personal mixture of both models"
    if (look.inputs or 0) >= SHIFTED and any(isinstance(layer, BatchNorm) for layer in net.modules()):
        reasons["fedbn"] = "clients' inputs are shifted, and the net has BatchNorm layers to keep personal"
    if look.nearest is not None and (look.labels or 0) >= UNLIKE:
        reasons["cwfedavg"] = "clients' labels are unlike: averages by class"
        if has_features and look.nearest <= NEAR:
            reasons["fedrema"] = "clients have near peers by labels: classifiers from these"
    return reasons
