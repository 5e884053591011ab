"""FedLAW: aggregation weights and a shrinking factor, learned on the server's samples.

Source: Li et al., 2023 (https://arxiv.org/abs/2302.10911). Symbols: K clients of the round, p_k = n_k / sum n, lambda_k
the weight of client k, gamma the shrinking factor, z the K + 1 numbers that both are functions of.
"""

from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.func import functional_call
from torch.optim.lr_scheduler import StepLR

from pfl_lightning.data import Samples, epoch_order
from pfl_lightning.data.sample_proxy import sample_proxy
from pfl_lightning.messages import Updates
from pfl_lightning.methods.server_optimizer import server_optimizer
from pfl_lightning.nets.batch_norm import on_batch_statistics, smallest_batch
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Server, WeightedAverage, client_weights
from pfl_lightning.settings import check_least


class FedLAW(WeightedAverage):
    r"""Averages models by client weights and a shrinking factor, both learned on proxy samples.

    .. math::

        w \leftarrow \gamma \sum_k \lambda_k w_k, \qquad
        \lambda = \mathrm{softmax}(z_1, \ldots, z_K), \qquad
        \gamma = \exp(z_{K+1})

    Each round starts from :math:`\lambda_k = p_k` and :math:`\gamma = 1`, which is `WeightedAverage`, and minimises the
    cross-entropy of :math:`w` on the server's proxy samples over :math:`z`. Meanwhile BatchNorm normalises by the proxy
    batch, dropout is off, and personal entries are the common initial ones. Floating buffers are averaged by
    :math:`\lambda`, without :math:`\gamma`.
    Source: Li et al., 2023 (https://arxiv.org/abs/2302.10911).

    Args:
        server_epochs: passes over the proxy samples, at least 0; 0 is `WeightedAverage` bit for bit.
        batch_size: samples a proxy batch, at least 1; at least 2 for nets with BatchNorm.
        optimizer: builds the optimizer of z; None takes ``Adam(lr=0.01, betas=(0.5, 0.999))``, the official code's for
            CIFAR-10; for other data sets it takes lr 0.005.
        halving: number of server epochs after which the learning rate halves, at least 1.
        proxy_fraction: if the data module has no ``server_data``, clients lend the server copies of this share of all
            training samples, balanced over classes; in [0, 1], and 0 is `WeightedAverage`. The official code takes them
            from the test samples instead.

    Raises:
        MisconfigurationException: if a value is out of range, or the optimizer refuses its settings.
    """

    def __init__(
        self,
        server_epochs: int = 20,
        batch_size: int = 128,
        optimizer: OptimizerCallable | None = None,
        halving: int = 20,
        proxy_fraction: float = 0.02,
    ) -> None:
        super().__init__()
        check_least("aggregator", server_epochs=(server_epochs, 0), batch_size=(batch_size, 1), halving=(halving, 1))
        if not 0 <= proxy_fraction <= 1:
            raise MisconfigurationException(
                f"aggregator.proxy_fraction={proxy_fraction} must be a share of the training samples from 0 to 1, such "
                "as 0.02."
            )
        self.server_epochs = server_epochs
        self.batch_size = batch_size
        self.optimizer = server_optimizer(optimizer, lr=0.01)
        self.halving = halving
        self.proxy_fraction = proxy_fraction

    def setup(self, server: Server) -> None:
        """Starts from the common initial model, and takes the proxy samples."""
        super().setup(server)
        self.server = server
        self.names = server.parameter_names(remove_duplicate=False)
        self.smallest_batch = smallest_batch(server.module)
        if self.batch_size < self.smallest_batch:
            raise MisconfigurationException("aggregator.batch_size=1 gives BatchNorm no statistics; take 2 or more.")
        self.state["personal"] = server.kept_entries()
        self.proxy = server.data.server_data()
        task = server.module.task
        if self.proxy is not None and task.has_classes and (self.proxy.y >= task.outputs).any():
            raise MisconfigurationException(
                f"data.public has labels up to {int(self.proxy.y.max())}, which aggregator FedLAW can't learn with "
                f"{task.outputs} classes; leave data.public out, or take data.server_fraction=0.02."
            )
        if self.proxy is None and self.proxy_fraction > 0 and self.server_epochs > 0:
            generator = torch.Generator().manual_seed(derive_seed(server.seed, "fedlaw"))
            self.proxy = sample_proxy(server.data, self.proxy_fraction, generator)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Learn the weights, and average the models; log gamma, the proxy loss and the largest weight."""
        # the plain average first, as the starting point and where nothing can be learned
        super().aggregate(updates, round)
        proxy = self.proxy
        if not updates or not self.server_epochs or proxy is None or len(proxy) < self.smallest_batch:
            return {}
        z, loss = self._learn(updates, proxy, round)
        shares, gamma = z[:-1].softmax(0), float(z[-1].exp())
        logs = {"gamma": gamma, "proxy_loss": loss, "max_share": float(shares.max())}
        if not z.isfinite().all():
            rank_zero_warn(
                f"round {round + 1}: FedLAW's proxy loss became NaN or infinite, so that clients are averaged by "
                "samples; try a smaller learning rate of aggregator.optimizer."
            )
            return logs
        self.average(updates, dict(zip(updates, shares.tolist(), strict=True)))
        weights = self.state["weights"]
        weights |= {name: gamma * weights[name] for name in self.names}
        return logs

    def _learn(self, updates: Updates, proxy: Samples, round: int) -> tuple[Tensor, float]:
        """Return z and the last epoch's mean loss; leave the module unchanged.

        Args:
            updates: updates by client id.
            proxy: the proxy samples.
            round: the round's number, which seeds the order of batches.
        """
        module = self.server.module
        # uploads may be in half precision, in which small changes of z would be lost
        device, dtype = module.device, torch.promote_types(cast(torch.dtype, module.dtype), torch.float32)
        proxy = proxy.to(device, dtype)
        stacks = {
            name: torch.stack([update["weights"][name] for update in updates.values()]).to(device, dtype)
            for name in self.names
        }
        # copies, since BatchNorm updates its running statistics in place
        rest = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
            for name, tensor in (self.state["personal"] | self.state["weights"]).items()
            if name not in stacks
        }
        # in float64: few numbers, and a softmax of their logarithms gives p back
        p = torch.tensor(list(client_weights(updates, "samples").values()), dtype=torch.float64)
        z = torch.cat([p.log(), torch.zeros(1, dtype=torch.float64)]).requires_grad_()
        optimizer = self.optimizer([z])
        # counted in passes over the proxy samples, not in steps
        scheduler = StepLR(optimizer, step_size=self.halving, gamma=0.5)
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "fedlaw", round))
        for _ in range(self.server_epochs):
            order = epoch_order(len(proxy), self.batch_size, "keep", generator).to(device)
            batches = [rows for rows in torch.split(order, self.batch_size) if len(rows) >= self.smallest_batch]
            total = torch.zeros((), dtype=dtype, device=device)
            for rows in batches:
                batch = proxy.take(rows)
                shares = (z[-1].exp() * z[:-1].softmax(0)).to(dtype).to(device)
                # gradients reach z through the mixed model w = gamma sum_k lambda_k w_k
                w = {name: torch.tensordot(shares, stack, 1) for name, stack in stacks.items()}
                with on_batch_statistics(module):
                    logits = functional_call(module, rest | w, (batch.x,), tie_weights=False)
                loss = module.task.loss(logits, batch.y)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.detach() * len(rows)
            scheduler.step()
        return z.detach(), float(total) / sum(map(len, batches))
