"""FedRep: a shared feature extractor, trained under each client's already trained classifier."""

from typing import Any

from pfl_lightning.client import ClientSettings, Phase
from pfl_lightning.methods.alternate_training import AlternateTraining
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.settings import Unpack


class FedRep(AlternateTraining, FedPer):
    r"""Trains the client's own classifier on the received features, then the feature extractor, in each round.

    .. math::

        h_i \leftarrow h_i - \alpha \nabla_h f_i(h_i, \phi) \quad (\tau_h \text{ epochs}), \qquad
        \phi_i \leftarrow \phi_i - \alpha \nabla_\phi f_i(h_i, \phi_i), \qquad
        \phi \leftarrow \sum_i \tfrac{n_i}{n} \phi_i

    The classifier :math:`h_i` stays with its client, which continues from its last one; the feature extractor
    :math:`\phi` travels, as in `FedPer`. It is trained for the trainer's ``local_epochs``: 1 or 5 in the paper's
    experiments, after 10 epochs of the classifier. The paper's server weights clients equally; the official code
    weights clients with unequal data by their samples, as here.
    Source: Collins et al., 2021, Algorithm 1 (https://arxiv.org/abs/2102.07078).

    Args:
        head_epochs: passes over the training data in the classifier's phase, at least 1; None takes as many as the
            feature extractor gets.
        **kwargs: the arguments of `FedAvg`.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, head_epochs: int | None = 10, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, head_epochs=head_epochs, **kwargs)

    def joining_phases(self) -> list[Phase]:
        """Train the classifier alone, by the first phase of an ordinary round."""
        return self.local_phases()[:1]
