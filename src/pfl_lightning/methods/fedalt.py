"""FedALT: each client trains an adapter of its own beside the mean of the other clients', mixed by the token."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import Batch
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.feddpa import key, rows_like
from pfl_lightning.methods.fedit import AdapterSettings, FedIT
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.server import Aggregator, ModelPool, Server
from pfl_lightning.server.adapters import is_first, is_second, pairs
from pfl_lightning.settings import Unpack


class FedALT(FedIT):
    r"""Trains adapters of the client's own beside the frozen mean of the other clients', mixed for each token.

    .. math:: y = W_0 x + s \left( g_1(x)\, B_k A_k x + g_2(x)\, \bar B_{-k} \bar A_{-k} x \right), \qquad
        g(x) = \operatorname{softmax}(G_k x)

    is a client's layer. A client trains its :math:`A_k`, :math:`B_k` and the router :math:`G_k` of two rows, and sends
    :math:`A_k` and :math:`B_k`; it receives the other clients' means :math:`\bar A_{-k}` and :math:`\bar B_{-k}`, which
    aren't trained. Nothing overwrites the client's own adapters. In the first round the other clients' product is 0.
    What else the net trains, such as a classifier, stays with its client.

    Factors and router are computed together, as one adapter of 2 r + 2 rows, so that no layer changes. In a convolution
    the router is a kernel of the shape of A, and mixes at each place. With dropout in the adapters the router sees
    inputs with dropout, and those of the official code don't. What the router mixes is no adapter of ``peft``:
    `AdapterFolders` and ``pfl-lightning adapters`` refuse the method.

    Source: Bian et al., 2026 (https://arxiv.org/abs/2503.11880); jmbian/FedALT@8be3dde.

    Raises:
        MisconfigurationException: if adapters aren't products of two plain layers, as those of embeddings and of DoRA.
    """

    example_level = True

    needs = frozenset({"rest"})

    def __init__(self, *args: Any, **kwargs: Unpack[AdapterSettings]) -> None:
        super().__init__(*args, **kwargs)
        names = self.state_dict()
        self.pairs = pairs(names)
        if other := [n for n in names if "lora_embedding" in n or "lora_magnitude" in n]:
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__} has {other[0]}, and FedALT's router mixes adapters of linear "
                "layers and convolutions; leave out embeddings and dora."
            )
        routers = {key(pair.a): rows_like(self.get_parameter(pair.a), 2) for pair in self.pairs}
        self.routers = nn.ParameterDict({name: nn.Parameter(router) for name, router in routers.items()})
        factors = [name for pair in self.pairs for name in (pair.a, pair.b)]
        # 0 until a payload comes, which each round brings anew
        self.rest = Frozen((name, torch.zeros_like(self.get_parameter(name))) for name in factors)

    def is_shared(self, name: str) -> bool:
        """Share the factors alone."""
        return super().is_shared(name) and (is_first(name) or is_second(name))

    def is_personal(self, name: str) -> bool:
        """Keep the client's own factors too, which also travel."""
        return name not in self.common_names

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Take the other clients' factors; the client's own stay."""
        self.rest.take(payload["rest"].items())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss by both adapters."""
        with self.routed():
            return {"loss": loss_at(self, self.net, self.both(), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by both adapters."""
        with self.routed():
            outputs: Tensor = functional_call(self.net, self.both(), (x,))
        return outputs

    def adapter_state(self) -> StateDict:
        """Refuse folders of adapters, which have no router.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            "model=FedALT mixes two adapters anew for each token, which no folder of adapters can do; take "
            "FedALT.load_from_checkpoint(path, client=...), or train another method, such as FedDPA."
        )

    def both(self) -> StateDict:
        """Return each layer's router and both adapters as one adapter, by name in the net."""
        # by `named_parameters`: engines put plain tensors in the places of parameters, which `get_parameter` refuses
        own, rest, entries = dict(self.net.named_parameters()), self.rest.tensors(), {}
        for pair in self.pairs:
            a, b = pair.a.removeprefix("net."), pair.b.removeprefix("net.")
            entries[a] = torch.cat([self.routers[key(pair.a)], own[a], rest[pair.a]])
            entries[b] = torch.cat([own[b], rest[pair.b]], 1)
        return entries

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Let each factor A, which also has the router, give its products with their shares."""
        with ExitStack() as hooks:
            for pair in self.pairs:
                # features of a linear layer come last, and channels of a convolution after the batch
                place = -1 if self.routers[key(pair.a)].dim() == 2 else 1
                layer = self.get_submodule(pair.a.removesuffix(".weight"))
                hook = layer.register_forward_hook(partial(weighted, place=place))
                hooks.callback(hook.remove)
            yield

    def configure_aggregator(self) -> Aggregator:
        """Return the other clients' mean for each client."""
        return RestOfWorld()


def weighted(layer: nn.Module, inputs: Any, products: Tensor, place: int) -> Tensor:
    """Return products with two factors A, each by its share.

    Args:
        layer: the layer that gave the products, as hooks are called.
        inputs: its inputs.
        products: two logits of the shares, and r products with either factor.
        place: dimension of the logits and products.
    """
    rows = products.shape[place] - 2
    logits, products = torch.split(products, [2, rows], place)
    shares: Tensor = logits.softmax(place).repeat_interleave(rows // 2, place)
    return products * shares


class RestOfWorld(ModelPool):
    r"""Sends each client the mean of all other clients' last adapters, in which clients count alike.

    .. math:: \bar A_{-k} = \frac{1}{n - 1} \sum_{m \ne k} A_m, \qquad
        \bar B_{-k} = \frac{1}{n - 1} \sum_{m \ne k} B_m

    over the n clients that have taken part so far; a client that sat out a round counts by its last adapters, while the
    official code needs all clients in each round. Before any other client has sent adapters they are 0. The product of
    the means isn't the mean of the products. Source: as for `FedALT`.
    """

    example_level = True

    sends = frozenset({"rest"})

    def setup(self, server: Server) -> None:
        """Start with no client's adapters."""
        super().setup(server)
        self.start = server.weights
        self.state["sum"] = {name: torch.zeros_like(tensor).double() for name, tensor in server.weights.items()}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Replace the adapters of the round's clients, and add up all."""
        super().aggregate(updates, round)
        models = self.state["models"].values()
        # in float64: a client's own adapters are subtracted again
        for name, start in self.state["sum"].items():
            self.state["sum"][name] = sum((model[name].to(start) for model in models), torch.zeros_like(start))
        return {}

    def download(self, client: int) -> Message:
        """Return the mean of all other clients' adapters."""
        models = self.state["models"]
        own, others = models.get(client), len(models) - (client in models)
        like = next(iter(models.values()), self.start)
        rest = {}
        for name, total in self.state["sum"].items():
            mean = (total if own is None else total - own[name].to(total)) / max(others, 1)
            # what is left of rounding where there is no other client
            rest[name] = (mean if others else torch.zeros_like(mean)).to(like[name].dtype)
        return {"rest": rest}
