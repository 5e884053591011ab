"""The arguments that an object is being made with."""

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any, TypeVar

Made = TypeVar("Made")


def arguments_of_init(made: object) -> tuple[list[Any], dict[str, Any]]:
    """The arguments by position and by name of the outermost ``__init__`` that is making an object.

    They are read from the frames of the call, as Lightning does for hyper-parameters, so that a class needs neither a
    metaclass nor a line of its own to be made once more. An ``__init__`` that takes something out of its ``**kwargs``
    before it calls ``super().__init__`` hides it from here.

    Args:
        made: the object; one of its ``__init__`` must be running.

    >>> class Base:
    ...     def __init__(self, a):
    ...         self.made_with = arguments_of_init(self)
    >>> class Derived(Base):
    ...     def __init__(self, *args, b=2, **kwargs):
    ...         super().__init__(*args, **kwargs)
    >>> Derived(1).made_with, Derived(a=1, b=3).made_with
    (([1], {'b': 2}), ([], {'b': 3, 'a': 1}))
    """
    outermost: FrameType | None = None
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is made:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        raise RuntimeError(f"no __init__ of this {type(made).__name__} is running")
    names, varargs, varkw, values = inspect.getargvalues(outermost)
    count = outermost.f_code.co_argcount
    args = [values[name] for name in names[1:count]] + list(values[varargs] if varargs else ())
    return args, {name: values[name] for name in names[count:]} | (values[varkw] if varkw else {})


def made_again(made: Made, arguments: tuple[list[Any], dict[str, Any]], old: Any, new: Any) -> Made:
    """Another object of the same class, with the same arguments but for one.

    Args:
        made: the object.
        arguments: what it was made with, as `arguments_of_init` gives it.
        old: the argument that changes.
        new: what stands in its place.
    """
    args, kwargs = arguments
    return type(made)(
        *(new if value is old else value for value in args),
        **{name: new if value is old else value for name, value in kwargs.items()},
    )


def live(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that are functions or classes, or lists of some, which don't belong in a checkpoint.

    Under the command line they come as their plain configuration instead.
    """
    return [
        name
        for name, value in arguments.items()
        if callable(value) or (isinstance(value, list) and any(map(callable, value)))
    ]


def kept_arguments(made: object) -> dict[str, Any]:
    """The arguments that an object was made with, as far as it keeps them: attributes of the same names, ``hparams``.

    >>> from torch.nn import Dropout
    >>> kept_arguments(Dropout(0.25))
    {'p': 0.25, 'inplace': False}

    Args:
        made: the object.
    """
    kept = getattr(made, "__dict__", {})
    named = {name: kept[name] for name in parameters_of(made) if name in kept}
    return named | dict(getattr(made, "hparams", {}))


def parameters_of(made: object) -> dict[str, inspect.Parameter]:
    """The parameters of all ``__init__`` of an object's classes, by name; those of the class itself win."""
    inits = [vars(cls).get("__init__") for cls in reversed(type(made).__mro__)]
    signatures = [inspect.signature(init) for init in inits if inspect.isfunction(init)]
    return {name: parameter for each in signatures for name, parameter in each.parameters.items()}
