"""Random numbers of many clients in one computation, each drawn from the client's own stream."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.engines.vmap.layers import Layers

Draw: TypeAlias = Callable[[torch.Size, torch.dtype, torch.device], Tensor]
"""Draws random numbers from the shape, type and device of a client's tensor."""
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
DRAWS = {torch.rand, torch.randn, torch.randint}
"""Functions whose numbers depend on the generator alone."""
# Reading `tensor.requires_grad` reaches __torch_function__ as a call of this getter.
REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators used on a device: the CPU's, and on a GPU the device's own."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class Stream:
    """A client's states of the default generators, the CPU's first; made on first use.

    Args:
        device: the device where the client trains.
        seed: the seed of the generators.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed

    @cached_property
    def states(self) -> list[Tensor]:
        """The generators' states, replaced when they advance."""
        generators = default_generators(self.device)
        return [torch.Generator(generator.device).manual_seed(self.seed).get_state() for generator in generators]

    @property
    def is_made(self) -> bool:
        """True if the states were used."""
        return "states" in vars(self)

    def copy(self) -> "Stream":
        """Return a stream of the same states that advances for itself."""
        other = Stream(self.device, self.seed)
        if self.is_made:
            other.states = [*self.states]
        return other

    def keep(self) -> "Stream":
        """Store the generators' current states."""
        self.states = [generator.get_state() for generator in default_generators(self.device)]
        return self

    def restore(self) -> None:
        """Set the generators to the stored states."""
        for generator, state in zip(default_generators(self.device), self.states, strict=True):
            generator.set_state(state)


class DeviceStates(Sequence[Tensor]):
    """The states of clients' streams on the training device, each made on first use.

    Args:
        streams: the clients' streams.
    """

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams

    def __getitem__(self, index: Any) -> Any:
        return self.streams[index].states[-1]

    def __len__(self) -> int:
        return len(self.streams)

    def move(self, states: Sequence[Tensor]) -> None:
        """Store the states after a step, if any numbers were drawn."""
        if states is not self:
            for stream, state in zip(self.streams, states, strict=True):
                stream.states[-1] = state


class Streams(Layers):
    """Let each client of a step under ``vmap`` draw the same random numbers as alone.

    Inside this context dropout multiplies by masks drawn client by client, and so do the functions of `DRAWS` and
    ``F.gumbel_softmax``; vmap refuses other random functions. The default generator follows the first client's states.
    If the step rewinds the generator, as by ``torch.random.fork_rng``, all clients are rewound.

    The context also makes trained entries report ``requires_grad=True``, which tensors under vmap deny.

    Args:
        generator: the device's default generator.
        states: each client's state before the step, and afterwards the state at its end.
    """

    def __init__(self, generator: torch.Generator, states: Sequence[Tensor]) -> None:
        super().__init__()
        self.generator = generator
        self.states = states
        self.trained: list[Tensor] = []
        self.calls: list[Any] = []
        """The functions of torch that the step has called."""
        self.sizes: Sequence[int] | None = None
        """Each client's number of samples in a padded batch; None for batches without padding."""

    def __enter__(self) -> "Streams":
        self.generator.set_state(self.states[0])
        # All clients' states by the first client's state, to find them again after the step rewinds the generator.
        self.states_by_first = {key(self.states[0]): self.states}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # More than the first entry means that some numbers were drawn.
        if len(self.states_by_first) > 1:
            self.states = self.states_by_first[key(self.generator.get_state())]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call this class's version of random functions, ``requires_grad`` and layers."""
        self.calls.append(func)
        if func in DROPOUTS:
            return self.dropout(func, *args, **(kwargs or {}))
        # A function with its own generator uses no client's stream, and in evaluation nothing is trained.
        if func in DRAWS and self.trained and "generator" not in (kwargs or {}):
            if self.clients:
                raise RuntimeError(f"{func.__name__} draws numbers that are no dropout")
            return self.drawn(self.trained[0], lambda *_: func(*args, **(kwargs or {})))
        if func is F.scaled_dot_product_attention and self.clients:
            return self.attention(*args, **(kwargs or {}))
        if func is F.gumbel_softmax:
            return self.gumbel_softmax(*args, **(kwargs or {}))
        if func == REQUIRES_GRAD and any(args[0] is entry for entry in self.trained):
            return True
        return super().__torch_function__(func, types, args, kwargs)

    def dropout(
        self, func: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Compute dropout with a mask per client; the arguments are as in ``torch.nn.functional``."""
        if not training:
            return input

        def draw(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
            return func(torch.ones(shape, dtype=dtype, device=device), p, True)

        # Dropout of ones gives the mask with its scale, 1/(1-p).
        mask = self.drawn(input, draw)
        return input.mul_(mask) if inplace else input * mask

    def between(self, input: Tensor, p: float) -> Tensor:
        """Compute the dropout between recurrent layers with a mask per client; arguments as of `Layers.between`."""
        return self.dropout(F.dropout, input, p)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention for a batch of all clients, with dropout of each; arguments as in ``torch.nn.functional``.

        Args:
            query: ``[clients * n, heads, T, d]``.
            key: likewise.
            value: likewise.
            attn_mask: the mask, for all samples or for each.
            dropout_p: probability of dropout.
            **kwargs: further arguments.
        """
        function: Callable[..., Tensor] = F.scaled_dot_product_attention
        if not dropout_p:
            return function(query, key, value, attn_mask, **kwargs)
        parts: list[Any] = [t.tensor_split(self.clients) for t in (query, key, value)]
        if attn_mask is None or len(attn_mask) != len(query):
            parts.append([attn_mask] * self.clients)
        else:
            parts.append(attn_mask.tensor_split(self.clients))
        of_clients = iter(zip(*parts, strict=True))
        return self.draw(lambda: function(*next(of_clients), dropout_p, **kwargs)).flatten(0, 1)

    def gumbel_softmax(
        self, logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1
    ) -> Tensor:
        """Compute ``torch.nn.functional.gumbel_softmax`` by torch's formula, which ignores ``eps`` too."""

        def draw(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
            return -torch.empty(shape, dtype=dtype, device=device).exponential_().log()

        # The negative logarithm of an exponential variable has a Gumbel distribution; torch draws it in the same way.
        soft = ((logits + self.drawn(logits, draw)) / tau).softmax(dim)
        if not hard:
            return soft
        chosen = torch.zeros_like(logits).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
        return chosen - soft.detach() + soft

    def drawn(self, like: Tensor, one: Draw) -> Tensor:
        """Return each client's random numbers, as a tensor under ``vmap``.

        Args:
            like: any tensor of the step with a row per client.
            one: draws for one client, from the shape, type and device of the client's tensor.

        Raises:
            RuntimeError: for a padded batch, if the tensor isn't its samples'.
        """
        if self.clients:
            shape = torch.Size([like.shape[0] // self.clients, *like.shape[1:]])
            return self.draw(lambda: one(shape, like.dtype, like.device)).flatten(0, 1)
        if self.sizes is not None:
            one = self.padded(one, cast(Tensor, self.weights).shape, iter(self.sizes))
        numbers: Tensor = Masks.apply(like.detach(), lambda *of_one: self.draw(lambda: one(*of_one)))
        return numbers

    @staticmethod
    def padded(one: Draw, width: torch.Size, sizes: Iterator[int]) -> Draw:
        """Return what draws a client's numbers for its own samples, as alone, and adds zeros for the padding.

        Args:
            one: draws for one client.
            width: the number of samples of the padded batch, as a shape.
            sizes: each client's number of samples, in order.
        """

        def draw(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
            if shape[:1] != width:
                raise RuntimeError("random numbers that aren't drawn for samples")
            drawn = one(torch.Size([next(sizes), *shape[1:]]), dtype, device)
            return torch.cat([drawn, drawn.new_zeros(width[0] - len(drawn), *shape[1:])])

        return draw

    def draw(self, one: Callable[[], Tensor]) -> Tensor:
        """Return each client's random numbers ``[clients, ...]``.

        Args:
            one: draws for one client, called for one after another.
        """
        drawn, after = [], []
        for state in self.states_by_first[key(self.generator.get_state())]:
            self.generator.set_state(state)
            drawn.append(one())
            after.append(self.generator.get_state())
        self.generator.set_state(after[0])
        self.states_by_first[key(after[0])] = after
        return torch.stack(drawn)


class Masks(torch.autograd.Function):
    """Draw numbers for each client under ``vmap``, by a custom rule, which alone knows the number of clients."""

    generate_vmap_rule = False

    @staticmethod
    def forward(like: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        """Refuse a tensor without a row per client."""
        raise RuntimeError("random numbers shaped like a tensor that all clients share")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Mark random numbers as not differentiable."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Return no gradients."""
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], like: Tensor, draw: Callable[..., Tensor]) -> tuple[Tensor, int]:
        """Return numbers in the shape of one client's tensor, for each client."""
        return draw(like.select(in_dims[0], 0).shape, like.dtype, like.device), 0


def key(state: Tensor) -> bytes:
    """Return a generator's state as bytes, for use as a dict key."""
    return state.numpy().tobytes()
