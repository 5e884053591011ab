"""When a client trains what, and by which gradients: the hooks that say so."""

from lightning.pytorch import LightningModule

from pfl_lightning.client.phases import Phase
from pfl_lightning.messages import StateDict


class Phased(LightningModule):
    """The phases that a client goes through: in each round, before it is evaluated, and where it joins late."""

    def local_phases(self) -> list[Phase]:
        """The phases of local training, in order; by default one that trains everything."""
        return [Phase()]

    def evaluation_phases(self) -> list[Phase]:
        """Phases of training that a client goes through before its model is used, by default none.

        They run on a copy whenever a client is evaluated: ``val`` and ``test`` are then of the adapted model,
        ``val_received`` and ``test_received`` of the same model without them.
        """
        return []

    def joining_phases(self) -> list[Phase]:
        """What a new client trains when the federation is over, in the place of `local_phases`; by default these.

        A method overrides it where its paper says so, such as the classifier alone on features that are found. What
        they end with is evaluated without `evaluation_phases`.
        """
        return self.local_phases()

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        """Makes of a step's gradients those that its optimizer takes, by default the same; they are clipped later.

        It may read parameters and buffers, and changes none, so that engines can call it for many clients at once.

        Args:
            gradients: by the names of the parameters that the step's loss depends on, such as ``net.classifier.bias``.

        Returns:
            Gradients of the same names and shapes.
        """
        return gradients
