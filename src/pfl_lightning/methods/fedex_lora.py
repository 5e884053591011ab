"""FedEx-LoRA: the error of averaged factors is added to the frozen weights, so that the mean is exact."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import functional_call

from pfl_lightning.client import Batch
from pfl_lightning.messages import CPU, StateDict, Updates
from pfl_lightning.methods.fedit import AdapterAverage, AdapterSettings, FedIT
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.server import Aggregator, Server, Weighting
from pfl_lightning.server.adapters import Pair, deviations, factors, pairs, summed
from pfl_lightning.settings import Unpack

RESIDUAL = "residual."
"""Prefix of the names of residuals, which the server sends and no client."""


class FedExLoRA(FedIT):
    r"""Trains adapters of layers whose frozen weights the server corrects by a residual R.

    .. math:: y = (W_0 + R) x + s B A x

    R begins at 0 and is the running sum of what the means of A and B missed (`ResidualAverage`), so that each layer is
    the mean of the clients' layers exactly. It comes with each payload as a matrix of the layer's size and never goes
    up; the paper's server sends a round's residual as factors of rank K r, which a client that missed a round couldn't
    use. The frozen weights themselves stay one copy for all clients. Engine ``vectorised`` holds an R for each client
    of a block.

    The net's adapters alone are not the model. A client's folder of adapters has factors of :math:`R + s B A`, whose
    rank grows with rounds and clients up to the layer's, and then takes as much room as the layer or more. Beside
    weights of half precision its outputs differ from the client's by the rounding of :math:`W_0 + R`. The official code
    adds the residual's transpose, which is right for GPT-2's Conv1D alone; here a layer has its own orientation. Takes
    the arguments of `FedIT`.
    Source: Singhal et al., 2024 (https://arxiv.org/abs/2410.09432), with its official code.

    Raises:
        MisconfigurationException: if frozen weights are in no floating type, such as those of a quantised model.
    """

    def __init__(self, *args: Any, **kwargs: Unpack[AdapterSettings]) -> None:
        super().__init__(*args, **kwargs)
        layers = dict.fromkeys(pair.layer.removeprefix("net.") for pair in pairs(self.state_dict()))
        self.bases = {layer: f"{layer}.base_layer.weight" for layer in layers}
        weights = {layer: self.net.get_parameter(name) for layer, name in self.bases.items()}
        for layer, weight in weights.items():
            if not weight.is_floating_point():
                raise MisconfigurationException(
                    f"model.net={type(self.net).__name__}: {type(self).__name__} adds to the weights of {layer}, which "
                    f"are {weight.dtype}; load the model without quantisation."
                )
        # in float32 beside weights of half precision: small residuals add up over rounds
        zeros = {n: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for n, w in weights.items()}
        self.residual = Frozen(zeros.items(), persistent=True)

    def is_shared(self, name: str) -> bool:
        """Share adapters and residuals."""
        return super().is_shared(name) or name.startswith(RESIDUAL)

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the shared entries without residuals, which the server alone moves."""
        return {name: tensor for name, tensor in super().shared_state().items() if not name.startswith(RESIDUAL)}

    def corrected(self) -> StateDict:
        """Return the frozen weights plus residuals, by name in the net."""
        # by `named_parameters`: engines put plain tensors in the places of parameters, which `get_parameter` refuses
        weights, residuals = dict(self.net.named_parameters()), self.residual.tensors()
        return {n: (weights[n] + residuals[layer]).to(weights[n].dtype) for layer, n in self.bases.items()}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss by the corrected weights."""
        return {"loss": loss_at(self, self.net, self.corrected(), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by the corrected weights."""
        outputs: Tensor = functional_call(self.net, self.corrected(), (x,))
        return outputs

    def adapter_state(self) -> StateDict:
        r"""Return factors of all that is added to a layer, :math:`R + s B A`, whose rank may be that of the layer.

        They are of a singular value decomposition in float64, without values that are rounding in the residual's type.
        """
        parameters, residuals, state = dict(self.net.named_parameters()), self.residual.tensors(), {}
        for pair in pairs(self.state_dict()):
            # of several adapters of a layer, the first has the residual
            added = residuals.pop(pair.layer.removeprefix("net."), None)
            if added is None or not added.any():
                continue
            a, b = (name.removeprefix("net.") for name in (pair.a, pair.b))
            first, second = (parameters[name].detach().to(CPU).double().flatten(1) for name in (a, b))
            matrix = (added.T if pair.is_transposed(self) else added).to(CPU).double().flatten(1)
            u, s, v = torch.linalg.svd(matrix / pair.scale(self) + second @ first, full_matrices=False)
            # each entry of the residual was rounded, by this share of it at most
            rank = max(1, int((s > torch.finfo(added.dtype).eps * torch.linalg.vector_norm(s)).sum()))
            # kernels of convolutions have further dimensions
            state[a] = v[:rank].reshape(rank, *parameters[a].shape[1:]).to(parameters[a])
            state[b] = (u * s)[:, :rank].reshape(-1, rank, *parameters[b].shape[2:]).to(parameters[b])
        return state

    def configure_aggregator(self) -> Aggregator:
        """Return the mean with residuals."""
        return ResidualAverage()


class ResidualAverage(AdapterAverage):
    r"""Averages both factors, and adds what their product misses to the residuals.

    .. math:: R \leftarrow R + s \Bigl(\sum_k p_k B_k A_k - \bar B \bar A\Bigr)
        = R + s \sum_k p_k (B_k - \bar B)(A_k - \bar A)

    Its ``product_error`` is the relative size of the round's residual, without which the mean would be wrong by as
    much. Source: as for `FedExLoRA`.

    Args:
        weighting: client weights :math:`p_k`: ``uniform``, as in the paper, or ``samples``.
    """

    def __init__(self, weighting: Weighting = "uniform") -> None:
        super().__init__(weighting=weighting)

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with residuals of 0."""
        super().setup(server)
        self.transposed = {pair: pair.is_transposed(server.module) for pair in self.scales}
        if lacking := [pair.layer for pair in self.scales if residual_of(pair) not in self.state["weights"]]:
            raise MisconfigurationException(
                f"aggregator={self.name} corrects frozen weights, and model={type(server.module).__name__} has no "
                f"residual of {lacking[0]}; take model=FedExLoRA, or aggregator=AdapterAverage."
            )

    def aggregate(self, updates: Updates, round: int) -> dict[str, Any]:
        """Average the factors and add to the residuals; log the error that these correct."""
        if not updates:
            return {}
        weights = self.client_weights(updates)
        shares = [weights[client] for client in updates]
        moved: StateDict = {}
        for pair, scale in self.sent(updates).items():
            left, right = self.missed(*factors(updates, pair), shares)
            added = scale * (left @ right).to(CPU)
            name = residual_of(pair)
            # a layer may have several adapters
            old = moved.get(name, self.state["weights"][name])
            # by the uploads too: with precision=64-true the first residuals are float32
            wide = torch.promote_types(old.dtype, added.dtype)
            moved[name] = old.to(wide) + (added.T if self.transposed[pair] else added).reshape(old.shape).to(wide)
        logs = super().aggregate(updates, round)
        self.state["weights"] = self.state["weights"] | moved
        return logs

    def missed(self, a: Sequence[Tensor], b: Sequence[Tensor], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the product that goes into a layer's residual, as two stacks ``[o, m]`` and ``[m, i]``.

        Args:
            a: A of each client.
            b: B of each client.
            shares: the clients' weights.
        """
        return summed(deviations(a, b, shares), shares)


def residual_of(pair: Pair) -> str:
    """Return the name of a layer's residual.

    Args:
        pair: the layer's names.
    """
    return RESIDUAL + pair.layer.removeprefix("net.").replace(".", "/")
