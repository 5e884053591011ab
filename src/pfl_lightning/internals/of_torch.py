"""Private names of torch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch._functorch import vmap as functorch_vmap
from torch.autograd import graph
from torch.nn.modules import batchnorm
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch as python_dispatch

BatchNorm = batchnorm._BatchNorm
"""The base class of all BatchNorm layers. Layers of other packages derive from this class alone, so the public classes
would miss such layers."""

# `torch.func.vmap` checks all arguments at each call, which takes as long as a small net's layer. These functions are
# what remains. They are other names of torch's own functions, because a wrapper would cost a call per tensor.
load_decompositions = functorch_vmap.lazy_load_decompositions  # type: ignore[attr-defined]
"""Make all of torch's operations known to ``vmap``; does nothing when repeated."""
enter_vmap = _functorch._vmap_increment_nesting
"""Begin a level of ``vmap``, from the number of rows and the treatment of random functions; returns the level."""
leave_vmap = _functorch._vmap_decrement_nesting
"""End the innermost level of ``vmap``."""
row_of = _functorch._add_batch_dim
"""Return one row of a stack under ``vmap``, from the stack, the dimension of the rows, and the level."""
stack_of = _functorch._remove_batch_dim
"""Return the stack behind a row, from the row, the level, the number of rows, and the dimension of the rows."""

# A layer reads the stack behind its row, computes all rows by a kernel of its own, and returns a row.
unwrapped = _functorch.get_unwrapped
"""Return the tensor behind a row, without copying."""
is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Return True for a row under ``vmap``, and for a tensor under ``grad``."""
row_dimension = _functorch.maybe_get_bdim
"""Return the dimension of the rows in the stack behind a row; -1 for other tensors."""
level_of = _functorch.maybe_get_level
"""Return the level of a row."""
outside_vmap = pyfunctorch.temporarily_clear_interpreter_stack
"""Leave all levels of ``vmap`` and ``grad`` inside this context, so that autograd sees the stacks."""

update_flat_weights: Callable[[nn.RNNBase], None] | None = getattr(nn.RNNBase, "_update_flat_weights", None)
"""Have a recurrent layer list exchanged weights anew, as each of its calls does; None for a torch without this."""

copy_each = torch._foreach_copy_
"""Copy each tensor of the second list into that of the first, also of another type; on a GPU in one launch for many."""

# `torch.autograd.grad` with factors of its outputs compares their shapes by torch's symbolic mathematics, which takes a
# third of a second to import, and at each call as long as a small net's layer.
run_backward = graph._engine_run_backward
"""Run a backward pass: the outputs, their factors, whether to keep the graph, whether to make one of the gradients, and
the leaves; by keyword ``allow_unreachable`` and ``accumulate_grad``. Returns the leaves' gradients, or None for each
that the outputs don't depend on."""

DispatchMode = python_dispatch.TorchDispatchMode
"""A context whose ``__torch_dispatch__`` sees each operation on tensors, those of the backward pass too."""

GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
"""Tables of the hooks on all modules, as registered by ``register_module_forward_hook``."""

GROWTH_TRACKER = "_growth_tracker"
"""Name of the number of good steps in the ``state_dict`` of ``torch.amp.GradScaler``."""
LAST_RATES = "_last_lr"
"""Name of the current learning rates in the ``state_dict`` of a schedule."""


def entry_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own dicts of parameters and of buffers; a changed value changes the module.

    torch's public functions skip entries that are None, and write only by slow checked assignments.

    Args:
        module: any module; submodules have dicts of their own.
    """
    return module._parameters, module._buffers


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs more than its ``forward``: hooks of the module, or of all modules.

    Args:
        module: any module; hooks of submodules don't count.
    """
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or any(GLOBAL_HOOKS)


def take_step(optimizer: Optimizer) -> None:
    """Take an optimizer's step without a mark for the profiler, which takes as long as the step of a small net.

    A step with hooks, of the optimizer or of all optimizers, is taken as it is.

    Args:
        optimizer: any optimizer.
    """
    step = type(optimizer).step
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    # torch wraps the step of a class, by a function marked as hooked, when the first optimizer of the class is made.
    if any(hooks) or "step" in vars(optimizer) or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """Return PyTorch's count of in-place changes of a tensor; -1 for tensors without a count.

    Args:
        tensor: the tensor.
    """
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode, or of a vmap that has ended
        return -1


def compiler_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` as a function of a graph and example inputs.

    A backend that calls this function learns of each compiled version, which ``torch.compile`` doesn't report.

    Args:
        backend: the name, or the function itself.
    """
    # importing the compiler takes seconds
    from torch._dynamo import lookup_backend

    return lookup_backend(backend)


def inductor_settings(settings: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context with other settings of the default compiler, for graphs given to `compiler_backend`.

    Args:
        settings: values by dotted names, such as ``triton.cudagraphs``.
    """
    from torch._inductor import config

    context: AbstractContextManager[Any] = config.patch(dict(settings))
    return context


def shapes_alone() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have a shape, a type and a device, and no memory.

    Operations on such tensors give others of their kind, outside of the context too, also beside ordinary tensors.
    """
    # imported here, as torch's symbolic mathematics below takes a third of a second
    fake_tensor = import_module("torch._subclasses.fake_tensor")
    mode: AbstractContextManager[Any] = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    return mode
