"""The phases of a client's training, and the gradients of their steps."""

from typing import Any, TypeVar

from lightning.pytorch import LightningModule

from pfl_lightning.client.phases import Phase
from pfl_lightning.messages import StateDict

Value = TypeVar("Value")


class Phased(LightningModule):
    """Phases of training: in each round, before evaluation, and for a newcomer after the run."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _architecture: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keep copies of the constructor's arguments, so that `ClientModule.architectures` can build further modules.

        Copies are taken before any ``__init__`` can change the arguments. This method is defined here and not in
        `ClientModule`, because ``inspect.signature`` of a class prefers ``__new__`` to ``__init__`` where one class has
        both, and would show ``*args, **kwargs`` only.
        """
        made = super().__new__(cls)
        vars(made).update(_made_with=(own_containers(args), own_containers(kwargs)), _architecture=0)
        return made

    def local_phases(self) -> list[Phase]:
        """Return the phases of local training in a round, in order; by default one phase with all parameters."""
        return [Phase()]

    def evaluation_phases(self) -> list[Phase]:
        """Return the phases of training before each evaluation; by default none.

        They run on a copy of the client's model, as MAML-like methods need it. The record's columns ``val`` and
        ``test`` are then of the adapted model, ``val_received`` and ``test_received`` of the same model before these
        phases.
        """
        return []

    def joining_phases(self) -> list[Phase]:
        """Return the phases of a newcomer's training when the run is over; by default `local_phases`.

        Override it where the paper trains newcomers otherwise, such as the classifier alone on finished features. The
        resulting model is evaluated without `evaluation_phases`.
        """
        return self.local_phases()

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        """Return the gradients for the optimizer's step; by default the loss's own.

        Clipping comes later. An override may read parameters and buffers but changes none, so that engines can call it
        for many clients at once.

        Args:
            gradients: gradients by parameter name, such as ``net.classifier.bias``; of parameters in the loss alone.

        Returns:
            Gradients with the same names and shapes.
        """
        return gradients


def own_containers(value: Value) -> Value:
    """Return a copy of nested lists, tuples and dicts; all other objects in them stay the same objects.

    >>> kept = {"net": [1, {"hidden": [8]}]}
    >>> copy = own_containers(kept)
    >>> copy["net"][1].pop("hidden"), kept
    ([8], {'net': [1, {'hidden': [8]}]})

    Args:
        value: the value to copy.
    """
    made: Any = value
    # exact types: a subclass, such as a named tuple or a config object, may not take its parts in this way
    if type(made) is dict:
        made = {name: own_containers(part) for name, part in made.items()}
    elif type(made) in (list, tuple):
        made = type(made)(map(own_containers, made))
    return made  # type: ignore[no-any-return]
