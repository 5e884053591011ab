"""Random streams of many clients in one computation: dropout and random numbers, drawn from each client's own."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.engines.vmap.layers import Layers

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
DRAWS = {torch.rand, torch.randn, torch.randint}
"""Functions whose numbers depend on nothing but the stream."""
REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """What is drawn from on a device: the CPU's generator, and the last one for what is drawn on the device itself."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class Stream:
    """A client's states of the default generators, the CPU's first; made when first asked for.

    Args:
        device: where the client trains.
        seed: what the generators are seeded with.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed

    @cached_property
    def states(self) -> list[Tensor]:
        """The states, to be replaced when they move."""
        generators = default_generators(self.device)
        return [torch.Generator(generator.device).manual_seed(self.seed).get_state() for generator in generators]

    def keep(self) -> "Stream":
        """Takes the states that the generators are in."""
        self.states = [generator.get_state() for generator in default_generators(self.device)]
        return self

    def restore(self) -> None:
        """Puts the generators into the states."""
        for generator, state in zip(default_generators(self.device), self.states, strict=True):
            generator.set_state(state)


class DeviceStates(Sequence[Tensor]):
    """The states of clients' streams on the device where they train, each made when first asked for.

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
        """Takes the states after a step, if somebody has drawn."""
        if states is not self:
            for stream, state in zip(self.streams, states, strict=True):
                stream.states[-1] = state


class Streams(Layers):
    """While it is entered, a step under vmap draws random numbers as each of its clients would alone.

    Dropout multiplies by masks that are drawn client by client, and so are numbers of `DRAWS` and of
    ``F.gumbel_softmax``; other functions that draw are refused by vmap. The default generator goes through the first
    client's states meanwhile: where the step winds it back, as with ``torch.random.fork_rng``, all clients are wound
    back.

    It also lets the trained entries tell that they require gradients, which tensors under vmap deny.

    Args:
        generator: the default generator of the device.
        states: its state for each client when the step begins; afterwards they are those at its end.
    """

    def __init__(self, generator: torch.Generator, states: Sequence[Tensor]) -> None:
        super().__init__()
        self.generator = generator
        self.states = states
        self.trained: list[Tensor] = []

    def __enter__(self) -> "Streams":
        self.generator.set_state(self.states[0])
        self.known = {key(self.states[0]): self.states}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if len(self.known) > 1:
            self.states = self.known[key(self.generator.get_state())]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take the place of what draws and of ``requires_grad``, and of layers."""
        if func in DROPOUTS:
            return self.dropout(func, *args, **(kwargs or {}))
        # a generator of its own is no client's stream, and in evaluation nothing is trained
        if func in DRAWS and self.trained and "generator" not in (kwargs or {}):
            return self.drawn(self.trained[0], lambda *_: func(*args, **(kwargs or {})))
        if func is F.gumbel_softmax:
            return self.gumbel_softmax(*args, **(kwargs or {}))
        if func == REQUIRES_GRAD and any(args[0] is entry for entry in self.trained):
            return True
        return super().__torch_function__(func, types, args, kwargs)

    def dropout(
        self, func: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """As the functions of ``torch.nn.functional``."""
        if not training:
            return input

        def draw(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
            return func(torch.ones(shape, dtype=dtype, device=device), p, True)

        mask = self.drawn(input, draw)
        return input.mul_(mask) if inplace else input * mask

    def gumbel_softmax(
        self, logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1
    ) -> Tensor:
        """Return what the function of ``torch.nn.functional`` does, by its formula, which leaves out ``eps`` too."""

        def draw(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
            return -torch.empty(shape, dtype=dtype, device=device).exponential_().log()

        soft = ((logits + self.drawn(logits, draw)) / tau).softmax(dim)
        if not hard:
            return soft
        chosen = torch.zeros_like(logits).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
        return chosen - soft.detach() + soft

    def drawn(self, like: Tensor, one: Callable[[torch.Size, torch.dtype, torch.device], Tensor]) -> Tensor:
        """Return what each client draws, as a tensor under vmap.

        Args:
            like: any tensor of the step that is another for each client.
            one: draws for one client, by the shape, the type and the device of its tensor.
        """
        numbers: Tensor = Masks.apply(like.detach(), lambda *of_one: self.draw(lambda: one(*of_one)))
        return numbers

    def draw(self, one: Callable[[], Tensor]) -> Tensor:
        """What each client draws ``[clients, ...]``."""
        drawn, after = [], []
        for state in self.known[key(self.generator.get_state())]:
            self.generator.set_state(state)
            drawn.append(one())
            after.append(self.generator.get_state())
        self.generator.set_state(after[0])
        self.known[key(after[0])] = after
        return torch.stack(drawn)


class Masks(torch.autograd.Function):
    """Draws for each client of a computation under vmap; the only way to see there how many they are."""

    generate_vmap_rule = False

    @staticmethod
    def forward(like: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        """Without clients there is nothing to draw for."""
        raise RuntimeError("random numbers by a tensor that is the same for all clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Masks have no gradient."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """None."""
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], like: Tensor, draw: Callable[..., Tensor]) -> tuple[Tensor, int]:
        """Masks of the shape of one client's tensor, one for each client."""
        return draw(like.select(in_dims[0], 0).shape, like.dtype, like.device), 0


def key(state: Tensor) -> bytes:
    """A generator's state, to find it again."""
    return state.numpy().tobytes()
