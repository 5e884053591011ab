"""Fed-SB: clients train a small square matrix between two fixed factors, which the server averages exactly."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import Batch
from pfl_lightning.messages import StateDict
from pfl_lightning.methods.fedit import FedIT
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.nets import Net
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.server.adapters import Pair, is_first, is_second, pairs


class FedSB(FedIT):
    r"""Trains R ``[r, r]`` between the factors of each adapter, which are fixed and the same for all clients.

    .. math:: y = W_0 x + s B R A x, \qquad W_0 = U S V^T, \qquad A = S_r V_r^T, \quad B = U_r, \quad R = 0

    With one A and one B for all, the mean of R multiplies to the mean product exactly, :math:`B \bar R A = \sum_k p_k B
    R_k A`, and a layer sends :math:`r^2` numbers, however large it is and however many clients take part. So the rank
    may be much larger than that of other methods; the paper's is 25 to 200, with alpha equal to r. Noise on R, as
    guarantees add it, is linear in the product too.

    The factors are of the frozen weights' singular value decomposition, which is the official code's initialisation
    without samples. The paper's own one decomposes the sign of a gradient at a server with samples of all clients; a
    server here has none. For large layers the decomposition takes seconds each, when the net is built.

    Source: Singhal et al., 2025 (https://arxiv.org/abs/2502.15436); CERT-Lab/fed-sb, read in its copy
    putssander/fed-sb@1d437e4.

    Takes the arguments of `FedIT`; ``rate_ratio`` has no effect, as nothing trains B.

    Raises:
        MisconfigurationException: if frozen weights are in no floating type, such as those of a quantised model.
    """

    client_level = True
    example_level = True

    cores: nn.ParameterDict

    def new_net(self) -> Net:
        """Build a net, give its adapters the fixed factors, and make R for them."""
        net = super().new_net()
        # before the constructor looks for frozen parameters, which are common and never travel
        for name, parameter in net.named_parameters():
            if is_first(name) or is_second(name):
                parameter.requires_grad_(False)
        self.pairs = pairs(net.state_dict())
        for pair in self.pairs:
            a, b, weight = net.get_parameter(pair.a), net.get_parameter(pair.b), base_weight(net, pair.layer)
            if not weight.is_floating_point():
                raise MisconfigurationException(
                    f"model.net={type(net).__name__}: FedSB decomposes the weights of {pair.layer}, which are "
                    f"{weight.dtype}; load the model without quantisation."
                )
            matrix = weight.detach().to(a.dtype)
            first, second = factored((matrix.T if pair.is_transposed(net) else matrix).flatten(1), len(a))
            with torch.no_grad():
                a.copy_(first.view_as(a))
                b.copy_(second.view_as(b))
        if not hasattr(self, "cores"):
            # here, since the constructor goes on to look for parameters to train, and language models have no others
            ranks = {core_of(pair): net.get_parameter(pair.b) for pair in self.pairs}
            self.cores = nn.ParameterDict(
                {n: nn.Parameter(b.new_zeros(b.shape[1], b.shape[1])) for n, b in ranks.items()}
            )
        return net

    def is_shared(self, name: str) -> bool:
        """Share R too."""
        return super().is_shared(name) or name.startswith("cores.")

    def products(self) -> StateDict:
        """Return B R of each adapter in the place of its B, by name in the net."""
        # by `named_parameters`: engines put plain tensors in the places of parameters, which `get_parameter` refuses
        fixed, entries = dict(self.net.named_parameters()), {}
        for pair in self.pairs:
            b = fixed[pair.b]
            entries[pair.b] = (b.flatten(1) @ self.cores[core_of(pair)]).view_as(b)
        return entries

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss with R between the factors."""
        return {"loss": loss_at(self, self.net, self.products(), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs with R between the factors."""
        outputs: Tensor = functional_call(self.net, self.products(), (x,))
        return outputs

    def adapter_state(self) -> StateDict:
        """Return A, and B R in the place of B."""
        fixed = dict(self.net.named_parameters())
        return {pair.a: fixed[pair.a] for pair in self.pairs} | self.products()

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of R, in which all clients count alike, as in the official code."""
        return WeightedAverage(weighting="uniform")


def core_of(pair: Pair) -> str:
    """Return the name of a layer's R, without dots, which names of parameters can't have.

    Args:
        pair: the layer's names in the net.
    """
    return f"{pair.layer}.{pair.adapter}".replace(".", "/")


def base_weight(net: nn.Module, layer: str) -> Tensor:
    """Return the frozen weights of a layer with adapters.

    Args:
        net: the net.
        layer: path of the layer.
    """
    weight = net.get_submodule(layer).get_submodule("base_layer").weight
    assert isinstance(weight, Tensor)
    return weight


def factored(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors A ``[r, i]`` and B ``[o, r]`` of a matrix, whose product is the nearest one of their rank.

    Rows and columns beyond the matrix's own rank are 0. The sign of each pair of vectors, which is arbitrary, makes the
    largest entry of B's column positive.

    Args:
        matrix: ``[o, i]``.
        rank: r.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    signs = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    a, b = (s * signs[0])[:, None] * v, u * signs
    missing = rank - len(s)
    return nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
