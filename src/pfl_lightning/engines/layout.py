"""The layout of a client module: which of its entries are trained, and which stay with a client."""

from dataclasses import dataclass

from torch import nn

from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.nets.batch_norm import smallest_batch


@dataclass(frozen=True)
class Layout:
    """What engines know of a client module before they train it.

    To find it takes as long as a step of a small net: once per round, not several times per client.

    Args:
        parameters: those that can be trained, by name.
        personal: names of the entries that stay with a client between rounds.
        smallest_batch: samples that a batch must have.
    """

    parameters: dict[str, nn.Parameter]
    personal: list[str]
    smallest_batch: int

    @classmethod
    def of(cls, module: ClientModule) -> "Layout":
        """The layout of a client module as it stands."""
        return cls(
            # without what the method itself has frozen, which stays so when a phase ends
            parameters={name: p for name, p in module.named_parameters() if p.requires_grad},
            personal=list(personal_entries(module, module.state_dict())),
            # the mean and the variance of one sample are no statistics, and BatchNorm refuses them
            smallest_batch=smallest_batch(module),
        )

    def trained(self, phase: Phase) -> dict[str, nn.Parameter]:
        """The parameters that a phase trains, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if phase.trains(name)}
