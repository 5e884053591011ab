"""The loss of a net with other weights than its own, and its gradient."""

from torch import Tensor, nn
from torch.func import functional_call, grad

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.messages import StateDict
from pfl_lightning.nets import Net


def loss_at(client: ClientModule, net: Net, entries: StateDict, batch: Batch) -> Tensor:
    """A client's loss on a batch by a net some of whose entries are others.

    Args:
        client: the client module, whose `ClientModule.loss` it is.
        net: the net, its own or another one.
        entries: parameters and buffers in the place of the net's; running statistics among them move, else the net's.
        batch: inputs and targets.
    """
    x, target = batch
    features = functional_call(net.features, within("features.", entries), (x,))
    return client.loss(features, functional_call(net.classifier, within("classifier.", entries), (features,)), target)


def gradient_at(client: ClientModule, weights: StateDict, batch: Batch) -> StateDict:
    """The gradient of a client's loss in the weights of its net, as constants; running statistics stand still.

    Args:
        client: the client module.
        weights: by name, those that the gradient is in.
        batch: inputs and targets.
    """

    def objective(constants: StateDict, buffers: StateDict) -> Tensor:
        return loss_at(client, client.net, constants | buffers, batch)

    constants = {name: weight.detach() for name, weight in weights.items()}
    slope: StateDict = grad(objective)(constants, {name: b.clone() for name, b in client.net.named_buffers()})
    return slope


def trainable(net: nn.Module) -> StateDict:
    """The parameters of a net that the phase trains, by name."""
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def within(part: str, entries: StateDict) -> StateDict:
    """Entries of a part of a net, under their names in it."""
    return {name.removeprefix(part): entry for name, entry in entries.items() if name.startswith(part)}
