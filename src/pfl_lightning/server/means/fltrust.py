r"""FLTrust: uploads count by their direction's agreement with a model trained by the server.

Source: Cao et al., 2021 (https://arxiv.org/abs/2012.13995). Symbols: :math:`x` the last model, :math:`\Delta_k` the
change of client k, :math:`\Delta_0` the server's change, on samples of its own.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD

from pfl_lightning.client.optimizers import checked_optimizer
from pfl_lightning.data import epoch_order
from pfl_lightning.messages import StateDict
from pfl_lightning.nets.batch_norm import on_batch_statistics, smallest_batch
from pfl_lightning.server.base import Server
from pfl_lightning.server.means.base import Mean
from pfl_lightning.server.means.vectors import Sum, Vectors
from pfl_lightning.settings import check_least

NET = "net."
"""Prefix of the names of a client module's net."""


class FLTrust(Mean):
    r"""Move the last model by the clients' changes in the server's direction, each as long as the server's own.

    .. math::

        x + \frac{1}{\sum_k T_k} \sum_k T_k \frac{\lVert \Delta_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k, \qquad
        T_k = \max\bigl(0, \cos(\Delta_k, \Delta_0)\bigr)

    In each round the server trains :math:`x` on its samples (``data.server_fraction``, or ``data.public`` with the
    same classes), dropout off; the epochs, batches and rate of its training decide the length of :math:`\Delta_0`, so
    give the clients' own. Of buffers the result is the median over the trusted clients. If no client is trusted, the
    model stays, with a warning. The rule bears any number of bad clients, as far as the server's samples are like
    those of honest clients. Source: Cao et al., 2021 (https://arxiv.org/abs/2012.13995), whose server
    has 100 samples.

    Args:
        epochs: passes over the server's samples in a round, at least 1.
        batch_size: samples a batch, at least 1; at least 2 for nets with BatchNorm, which skip a last batch of one.
        optimizer: builds the server's optimizer, anew in each round; None takes ``SGD(lr=0.1)``.

    Raises:
        MisconfigurationException: if a value is out of its range; before the first round, if the server has no samples,
            or clients share other parameters than those of their whole net.
    """

    own_model = True

    def __init__(self, epochs: int = 1, batch_size: int = 32, optimizer: OptimizerCallable | None = None) -> None:
        check_least("aggregator.mean", epochs=(epochs, 1), batch_size=(batch_size, 1))
        self.epochs, self.batch_size = epochs, batch_size
        self.optimizer = optimizer or (lambda params: SGD(params, lr=0.1))
        checked_optimizer(self.optimizer, [nn.Parameter(torch.zeros(1))], "aggregator.mean.optimizer")

    def begin(self, server: Server) -> None:
        """Take the server's samples."""
        samples = server.data.server_data()
        if samples is None or not len(samples):
            raise MisconfigurationException(
                f"aggregator.mean=FLTrust trains by samples that the server holds, and {type(server.data).__name__} "
                "gives it none; set data.central_test and data.server_fraction."
            )
        module, task = server.module, server.module.task
        if task.has_classes and (samples.y >= task.outputs).any():
            raise MisconfigurationException(
                f"data.public has labels up to {int(samples.y.max())}, which aggregator.mean=FLTrust can't learn with "
                f"{task.outputs} classes; leave data.public out, or take data.server_fraction."
            )
        trained = {name for name, parameter in module.net.named_parameters(NET[:-1]) if parameter.requires_grad}
        if different := sorted(trained.symmetric_difference(server.parameter_names())):
            raise MisconfigurationException(
                f"aggregator.mean=FLTrust compares uploads with a net that the server trains whole, and "
                f"{type(module).__name__} doesn't share exactly its net, as {different[0]} shows; take a client module "
                "that does, such as FedAvg."
            )
        self.smallest_batch = smallest_batch(module)
        if min(self.batch_size, len(samples)) < self.smallest_batch:
            raise MisconfigurationException(
                f"aggregator.mean=FLTrust: batch_size={self.batch_size} of {len(samples)} samples gives BatchNorm no "
                "statistics; take 2 or more of both."
            )
        self.module, self.samples = module, samples

    def of(self, vectors: Vectors) -> Sum:
        """Return the last model, moved by the trusted changes."""
        n = len(vectors)
        own = self.trained(vectors.origin, vectors.names, vectors.seed)
        sent = [{name: each[name] for name in vectors.names} for each in vectors.sent]
        products = Vectors([*sent, own], vectors.origin, vectors.names, torch.ones(n + 1), vectors.seed).products
        lengths = products.diagonal().clamp_min(0).sqrt()
        scale = lengths[:n] * lengths[n]
        # an upload equal to the last model has no direction, and 0 / 0 would make all shares NaN
        cosines = torch.where(scale > 0, products[:n, n] / scale, 0.0)
        trust = cosines.clamp_min(0)
        if not trust.sum() > 0:
            rank_zero_warn("aggregator.mean=FLTrust trusts no upload of this round, so that the model stays as it was.")
            return Sum(dict(vectors.origin), torch.zeros(n, dtype=torch.float64))
        factors = torch.where(lengths[:n] > 0, lengths[n] / lengths[:n], 0.0)
        # short changes have shares far above 1, by which a weighted sum of buffers left the range of all uploads
        return vectors.combined(trust / trust.sum() * factors, trust.nonzero().flatten().tolist())

    def trained(self, origin: Mapping[str, Tensor], names: Sequence[str], seed: int) -> StateDict:
        """Return the parameters of the last model after training on the server's samples.

        Args:
            origin: the last model.
            names: names of the parameters.
            seed: seed of the order of samples.
        """
        net = self.module.net
        device, dtype = self.module.device, torch.promote_types(cast(torch.dtype, self.module.dtype), torch.float32)
        samples = self.samples.to(device, dtype)
        # copies, since BatchNorm moves running statistics in place, and the module is trained by clients too; entries
        # kept by clients are such statistics or frozen parameters
        known = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        known |= {name.removeprefix(NET): tensor.detach().to(device, copy=True) for name, tensor in origin.items()}
        entries = {name: t.to(dtype) if t.is_floating_point() else t for name, t in known.items()}
        first = {id(p): name for name, p in net.named_parameters()}
        tied = {name: first[id(p)] for name, p in net.named_parameters(remove_duplicate=False)}
        # leaves of the graph by their first names, so that tied weights are trained once
        parameters = {name: entries[name.removeprefix(NET)].requires_grad_() for name in names}
        entries |= {name: entries[one] for name, one in tied.items()}
        optimizer = self.optimizer(list(parameters.values()))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            order = epoch_order(len(samples), self.batch_size, "keep", generator)
            for rows in torch.split(order, self.batch_size):
                if len(rows) < self.smallest_batch:
                    continue
                batch = samples.take(rows.to(device))
                with torch.enable_grad(), on_batch_statistics(self.module):
                    loss = self.module.task.loss(functional_call(net, entries, (batch.x,)), batch.y)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
        return {name: tensor.detach().cpu() for name, tensor in parameters.items()}
