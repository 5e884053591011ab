"""Texts that clients' language models generate, and their agreement with reference answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client.module import ClientModule
from pfl_lightning.nets.causal_lm import Body, Memory, remembering
from pfl_lightning.nets.modes import kept_modes

AT_ONCE = 8
"""Prompts that a net with a memory goes on from at once."""
CHECKED = 2
"""Steps of a first batch that are compared with passes of single texts: the prompts' own, and one from memory."""
ROUNDING = 100
"""Difference from a pass of a single text that is taken for rounding, in units of the weights' precision."""


@runtime_checkable
class Coded(Protocol):
    """A data module that turns prompts into token numbers, and token numbers into texts."""

    def encode(self, prompt: Any) -> list[int]:
        """Return the token numbers of a prompt, at least one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token numbers."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token numbers that end a text."""


def answers(
    module: ClientModule, data: Any, prompts: Sequence[Any], max_new_tokens: int = 64, batch_size: int = AT_ONCE
) -> list[str]:
    """Return a client's answers to prompts, by the most likely token each time.

    Args:
        module: the client's model, as `ClientModule.load_from_checkpoint` returns it.
        data: a data module with ``encode``, ``decode`` and ``end_tokens``, such as `ChatData`; it isn't read.
        prompts: texts, or for `ChatData` also lists of messages, of several turns if need be.
        max_new_tokens: largest number of tokens of an answer, at least 1.
        batch_size: prompts that are answered at once, at least 1; nets other than `CausalLM` take one after another.

    Raises:
        MisconfigurationException: if the data have no texts, a prompt no token, or a number is below 1.
    """
    if not isinstance(data, Coded):
        raise MisconfigurationException(
            f"answers: data={type(data).__name__} has no texts; give data with encode, decode and end_tokens, such as "
            "ChatData."
        )
    # all at first, so that a prompt of a wrong form is refused before the first answer
    tokens = [data.encode(prompt) for prompt in prompts]
    window = module.input_shape[-1]
    made = dict(continued(module, tokens, max_new_tokens, window, data.end_tokens, batch_size=batch_size))
    return [data.decode(made[place]) for place in range(len(tokens))]


def continued(
    module: ClientModule,
    prompts: Sequence[list[int]],
    count: int,
    window: int,
    ends: frozenset[int],
    temperature: float = 0.0,
    generators: Sequence[torch.Generator] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    batch_size: int = AT_ONCE,
) -> Iterator[tuple[int, list[int]]]:
    """Yield the place of each prompt with the tokens that a client's model generates behind it, batch by batch.

    The layers of `CausalLM` remember keys and values, so that each further token costs a pass of one token. The first
    batch is compared with passes of whole single texts: a method whose outputs depend on all tokens of a pass in
    another way, and any other net, is computed by such passes.

    Args:
        module: the client's model.
        prompts: the tokens before, at least one each.
        count: largest number of new tokens.
        window: largest number of tokens that the net sees.
        ends: tokens that end the text, which are left out.
        temperature: divides the logits; 0 takes the most likely token.
        generators: draw each prompt's tokens, on the CPU; None takes the global one.
        context: what a forward pass runs in, such as autocast.
        batch_size: prompts at once.

    Raises:
        MisconfigurationException: if a prompt has no token, or a number is below 1.
    """
    # no token would be an empty answer without a word
    if count < 1 or batch_size < 1:
        raise MisconfigurationException(
            f"max_new_tokens={count} and batch_size={batch_size} must be at least 1, such as 64 and {AT_ONCE}."
        )
    if not all(prompts):
        raise MisconfigurationException("a prompt has no token; give longer ones, or leave it out.")
    reader = Reader(module, window, context)
    # other nets may look at padding, which has no mask there
    size = batch_size if reader.remembers else 1
    # of like length, as shorter prompts are padded
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    with kept_modes(module):
        module.eval()
        while order:
            places, order = order[:size], order[size:]
            texts = [prompts[place] for place in places]
            own = None if generators is None else [generators[place] for place in places]
            # draws of an attempt that fails are taken back
            states = None if own is None else [generator.get_state() for generator in own]
            made = generated(reader, texts, count, ends, temperature, own)
            if made is None:
                # the same batch again, text by text, with the same draws
                order, size = [*places, *order], 1
                for generator, state in zip(own or (), states or (), strict=True):
                    generator.set_state(state)
                continue
            yield from zip(places, made, strict=True)


class Reader:
    """Passes of a client's model that give the logits behind texts.

    Args:
        module: the client's model, in evaluation mode.
        window: largest number of tokens that the net sees.
        context: what a forward pass runs in.
    """

    def __init__(self, module: ClientModule, window: int, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module, self.window, self.context = module, window, context
        self.remembers = any(isinstance(layer, Body) for layer in module.modules())
        """Whether passes go on from earlier ones, until a comparison fails."""
        self.checked = False
        # of the coarsest type, as one layer in bfloat16 rounds all that follows
        types = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
        self.tolerance = ROUNDING * max((torch.finfo(dtype).eps for dtype in types), default=0.0)

    def alone(self, text: list[int]) -> Tensor:
        """Return the logits behind a single text, of its last ``window`` tokens ``[vocabulary]``, on the CPU."""
        with self.context():
            x = torch.tensor([text[-self.window :]], device=self.module.device)
            # on the CPU, whose generator draws the same numbers beside any device
            logits: Tensor = self.module(x)[0, -1].float().cpu()
        return logits

    def together(self, texts: list[list[int]], memory: Memory) -> Tensor | None:
        """Return the logits behind texts that went on by a token each, on the CPU; None if they can't be computed so.

        Args:
            texts: the texts so far.
            memory: the memory of the passes before.
        """
        try:
            with self.context():
                logits: Tensor = self.module(memory.inputs(texts, self.module.device))[:, -1].float().cpu()
        # models without keys and values, and methods with passes of another kind, have errors of their own
        except Exception:
            if self.checked:
                raise
            return None
        if not self.checked:
            for row in {0, len(texts) - 1}:
                # a pass of a whole text would go on from the batch's keys and values
                with memory.put_aside():
                    expected = self.alone(texts[row])
                bound = self.tolerance * max(1.0, float(expected.abs().max()))
                # NaN fails this comparison, too
                if not float((logits[row] - expected).abs().max()) <= bound:
                    return None
            self.checked = memory.passes >= CHECKED
        return logits


def generated(
    reader: Reader,
    texts: list[list[int]],
    count: int,
    ends: frozenset[int],
    temperature: float,
    generators: Sequence[torch.Generator] | None,
) -> list[list[int]] | None:
    """Return the tokens behind a batch of texts; None if they have to be computed text by text.

    Args:
        reader: the passes.
        texts: the tokens before.
        count: largest number of new tokens.
        ends: tokens that end a text.
        temperature: divides the logits.
        generators: draw each text's tokens.
    """
    made = [list[int]() for _ in texts]
    # finished texts stay in the batch, whose keys and values have a row for each
    live = set(range(len(texts)))
    with remembering(reader.module) as memory:
        for _ in range(count):
            whole = [[*text, *own] for text, own in zip(texts, made, strict=True)]
            # behind the window the first tokens fall out, and all positions move
            fits = max(map(len, whole)) <= reader.window
            if reader.remembers and fits:
                logits = reader.together(whole, memory)
                if logits is None:
                    reader.remembers = False
                    return None
                rows = dict(enumerate(logits))
            else:
                with memory.put_aside():
                    rows = {row: reader.alone(whole[row]) for row in live}
            for row in sorted(live):
                if temperature:
                    generator = None if generators is None else generators[row]
                    token = int(torch.multinomial((rows[row] / temperature).softmax(0), 1, generator=generator))
                else:
                    token = int(rows[row].argmax())
                if token in ends:
                    live.discard(row)
                else:
                    made[row].append(token)
            if not live:
                break
    return made


def scores(answered: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """Return ``rouge_l`` and ``exact_match`` of each answer, from 0 to 1; needs the extra ``lm``.

    ``rouge_l`` is the F-measure of the longest common subsequence of words, by the package rouge-score without stems.
    Its words are of Latin letters and digits in lower case, so that texts in other scripts have 0. ``exact_match`` is 1
    for an answer that is the reference up to white space at both ends.

    Args:
        answered: the answers.
        references: the right answers, as many.

    Raises:
        MisconfigurationException: if the numbers differ, or the package is missing.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    if len(answered) != len(references):
        raise MisconfigurationException(
            f"scores: {len(answered)} answers and {len(references)} references; give a reference for each answer."
        )
    try:
        # late, as the package takes a second to import
        scorer = import_module("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    except ImportError as error:
        raise MisconfigurationException(
            "scores of answers need the package rouge-score; pip install 'pfl-lightning[lm]'."
        ) from error
    return [
        {
            "rouge_l": float(scorer.score(reference, answer)["rougeL"].fmeasure),
            "exact_match": float(answer.strip() == reference.strip()),
        }
        for answer, reference in zip(answered, references, strict=True)
    ]
