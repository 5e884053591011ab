"""Import Lightning without packages that a plain run never uses: torch's compiler, and optional ones of torchmetrics.

All of it can be imported as usual afterwards.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache, package_available

if TYPE_CHECKING:
    import torch

COMPILER = "torch._dynamo"
"""The package of ``torch.compile``. Together with sympy it takes as long to import as all the rest of torch."""
LEFT_OUT = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})
"""Optional packages of torchmetrics, loaded wherever installed."""
hidden: set[str] = set()
"""The packages that torchmetrics doesn't know of in this process, as these were hidden during its import."""


def import_lightning(whole_metrics: bool = False) -> None:
    """Import Lightning in half of the time; does nothing where it is imported already.

    Args:
        whole_metrics: whether torchmetrics gets its optional packages, on which metrics of other packages may rely.
    """
    if "lightning" in sys.modules:
        return
    if whole_metrics:
        # outside of the context, as the optional packages may need any part of the compiler
        import_module("torchmetrics")
    else:
        import_torchmetrics()
    # a Lightning that needs more of the compiler than the stand-in has is left to the next import
    with suppress(ImportError), compiler_on_demand():
        import_module("lightning")


def import_torchmetrics() -> None:
    """Import torchmetrics with the packages of `LEFT_OUT` hidden, in a quarter of the time.

    Afterwards the packages can be imported as usual. An app with metrics for one of these packages imports torchmetrics
    first; an imported torchmetrics stays as it is.
    """
    if "torchmetrics" in sys.modules:
        return
    installed = RequirementCache.__bool__

    def told(requirement: RequirementCache) -> bool:
        if str(requirement.requirement).split(">")[0] in LEFT_OUT:
            requirement.available = False
        return installed(requirement)

    # packages that are loaded already stay
    hidden.update(LEFT_OUT - sys.modules.keys())
    # None in sys.modules makes an import fail at once
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with patch.object(RequirementCache, "__bool__", told):
            import torchmetrics  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
        # answers given meanwhile say that the hidden packages are missing
        package_available.cache_clear()


@contextmanager
def uncollected(freeze: bool) -> Iterator[None]:
    """Postpone Python's search for garbage cycles, which takes a sixth of an import's time and finds next to nothing.

    Args:
        freeze: whether to exclude all objects of this moment's end from later searches; only for a program that has
            just started, since no cycle among these objects is freed again.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if collected:
            gc.enable()


@contextmanager
def compiler_on_demand() -> Iterator[None]:
    """Let modules imported in this context, and torch's optimizers, work without an import of torch's compiler.

    Both need the compiler to exclude functions from compilation, and to recognise compiled modules. As long as the
    compiler isn't imported nothing is compiled, so neither has an effect. `Undo` restores both at the first import.
    """
    if COMPILER in sys.modules:
        yield
        return
    import torch

    undo = Undo()
    sys.meta_path.insert(0, undo)
    free_optimizers(undo)
    stand_in = StandIn(COMPILER, undo)
    # in both places: `import torch._dynamo` looks into the first, `torch._dynamo` into the second
    sys.modules[COMPILER] = vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class Undo(MetaPathFinder):
    """Run functions at the first import of torch's compiler, just before it."""

    def __init__(self) -> None:
        self.functions: list[Callable[[], Any]] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Return None, so that Python's own finders find the module."""
        # no removal from sys.meta_path: whoever asks is iterating over it, and would skip the next finder
        while fullname == COMPILER and self.functions:
            self.functions.pop()()


class Compiled(type):
    """Type of a class whose instances are the compiled modules of torch's compiler, before its import none."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, getattr(sys.modules.get(COMPILER), "OptimizedModule", ()))


class OptimizedModule(metaclass=Compiled):
    """The class of compiled modules, for ``isinstance``."""


class StandIn(ModuleType):
    """A module in place of torch's compiler, which imports the compiler for any other name than these two.

    Args:
        name: the module's name.
        undo: keeps the functions that make the compiler's import restore everything.
    """

    OptimizedModule = OptimizedModule

    def __init__(self, name: str, undo: Undo) -> None:
        super().__init__(name)
        self._undo = undo

    def disable(self, fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:
        """Return a function excluded from compilation; torch itself does the same to those of its optimizers."""
        from torch._compile import _disable_dynamo

        if fn is None:
            return partial(self.disable, recursive=recursive)
        excluded = _disable_dynamo(fn, recursive)
        run_plain(excluded, self._undo)
        return excluded

    def leave(self) -> None:
        """Remove this module, unless the compiler has taken its place."""
        import torch

        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], vars(torch)["_dynamo"]

    def __getattr__(self, name: str) -> Any:
        # `from torch._dynamo import ...` asks for __path__
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(import_module(COMPILER), name)


def run_plain(excluded: Any, undo: Undo) -> None:
    """Let a function of ``torch._disable_dynamo`` run without the compiler, which it imports at its first call.

    Args:
        excluded: the function.
        undo: where to restore it.
    """
    # torch keeps the compiler's version of the function here, after the first call
    kept = vars(excluded.__wrapped__)
    kept["__dynamo_disable"] = excluded.__wrapped__
    undo.functions.append(partial(kept.pop, "__dynamo_disable", None))


def free_optimizers(undo: Undo) -> None:
    """Let torch's optimizers work without the compiler, which every step imports.

    Args:
        undo: where to restore them.
    """
    import torch
    from torch._compile import _disable_dynamo
    from torch.optim import optimizer

    # each function of a wrapper has the same code, which can be exchanged where both see the same variables
    excluded = _disable_dynamo(free_optimizers).__code__
    wrapped = optimizer._use_grad_for_differentiable(free_optimizers).__code__
    step = plain_step(free_optimizers).__code__
    for kind in {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}:
        for function in vars(kind).values():
            code = getattr(function, "__code__", None)
            if code is excluded:
                run_plain(function, undo)
            elif code is wrapped and code.co_freevars == step.co_freevars:
                undo.functions.append(partial(setattr, function, "__code__", code))
                function.__code__ = step


def plain_step(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step as torch wraps it, less the two breaks of a compiled graph.

    Args:
        func: the step.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        # of the file that the code is put into, not of this one
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return func(*args, **kwargs)

    return step
