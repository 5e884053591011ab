"""When a client trains what, and by which gradients: the hooks that say so."""

from typing import Any, TypeVar

from lightning.pytorch import LightningModule

from pfl_lightning.client.phases import Phase
from pfl_lightning.messages import StateDict

Value = TypeVar("Value")


class Phased(LightningModule):
    """The phases that a client goes through: in each round, before it is evaluated, and where it joins late."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _architecture: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments that the object is made with, so that others like it can be made.

        Whatever an ``__init__`` of any class does to its arguments, these are the caller's own. This method stands here
        and not in `ClientModule`, as Python takes a class's signature from the first of the two methods that it finds.
        """
        made = super().__new__(cls)
        vars(made).update(_made_with=(own_containers(args), own_containers(kwargs)), _architecture=0)
        return made

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


def own_containers(value: Value) -> Value:
    """Return a value whose lists, tuples and dicts are copies, so that nobody changes the original in place.

    >>> kept = {"net": [1, {"hidden": [8]}]}
    >>> copy = own_containers(kept)
    >>> copy["net"][1].pop("hidden"), kept
    ([8], {'net': [1, {'hidden': [8]}]})
    """
    made: Any = value
    if type(made) is dict:
        made = {name: own_containers(part) for name, part in made.items()}
    elif type(made) in (list, tuple):
        made = type(made)(map(own_containers, made))
    return made  # type: ignore[no-any-return]
