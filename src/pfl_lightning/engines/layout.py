"""List the trained and the personal entries of a client module."""

from dataclasses import dataclass

from torch import nn

from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.nets.batch_norm import smallest_batch


@dataclass(frozen=True)
class Layout:
    """A client module's parameters, personal entries and smallest batch, as engines need them.

    Finding these takes as long as a training step of a small net, so it is done once per round and not per client.

    Args:
        parameters: the trainable parameters, by name.
        personal: names of the entries that stay with a client between rounds.
        smallest_batch: the smallest number of samples in a batch.
    """

    parameters: dict[str, nn.Parameter]
    personal: list[str]
    smallest_batch: int

    @classmethod
    def of(cls, module: ClientModule) -> "Layout":
        """Return the current layout of a client module."""
        return cls(
            # Parameters frozen by the method itself are left out, so that they stay frozen when a phase ends.
            parameters={name: p for name, p in module.named_parameters() if p.requires_grad},
            personal=list(personal_entries(module, module.state_dict())),
            # BatchNorm refuses a batch of one sample, whose variance is no statistic.
            smallest_batch=smallest_batch(module),
        )

    def trained(self, phase: Phase) -> dict[str, nn.Parameter]:
        """Return the parameters trained by a phase, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if phase.trains(name)}
