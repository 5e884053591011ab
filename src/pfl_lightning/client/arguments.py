"""The arguments that an object is being made with."""

import inspect
from types import FrameType
from typing import Any


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
