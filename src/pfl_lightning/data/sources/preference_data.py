"""Pairs of a preferred and a rejected answer, as token numbers for causal language models."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded, Samples
from pfl_lightning.data.sources.chat_data import Conversations, Message, Tokens, conversation_of
from pfl_lightning.data.sources.columns import check_column
from pfl_lightning.data.trees import Tree, shortened
from pfl_lightning.nets.causal_lm import CausalLM, DType, local_folder
from pfl_lightning.nets.chunked_logits import ChunkedLogits
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Preference

PROMPTS = ("prompt", "instruction", "question")
"""Known columns of prompts, the first of them that is there."""
TURN = re.compile(r"\n\n(Human|Assistant):")
"""What begins a message in texts of the data set HH-RLHF."""
PAIRS_AT_ONCE = 4
"""Pairs whose probabilities under the reference are computed at once."""
CHUNK_TOKENS = 1024
"""Positions whose logits under the reference exist at once."""


class PreferenceData(Conversations):
    """Prompts of clients with a preferred and a rejected answer each, from local files; needs the extra ``lm``.

    Inputs are token numbers ``[2, T]`` of prompt and answer, the chosen one first. Targets are those of the task
    `Preference`: the tokens one position on, -100 outside of the answers, and the answers' log-probabilities under the
    reference, the model without adapters. They are computed once, when data are read, and are therefore right for
    methods that change the weights below the adapters, too.

    Files have the layouts of `ChatData`. A row has a prompt, a chosen and a rejected answer, each a text or a list of
    messages. Lists that begin with the user's message hold the prompt too: the messages that both have in common.
    Without a prompt, texts in the form of HH-RLHF are cut at ``Human:`` and ``Assistant:``. Of a conversation of
    several turns only the answers behind the prompt count.

    Args:
        path: the file or folder; from Python also a ``datasets.Dataset``, a list of rows, or a dict of such lists.
        tokenizer: folder of a tokenizer, or its name in the local cache of the hub; from Python also the tokenizer.
        reference: the model before training, as for ``model.net.model`` of `CausalLM`; None takes the tokenizer's
            folder.
        beta: how strongly the net is kept near the reference, above 0.
        prompt: column of prompts; None takes ``prompt``, ``instruction`` or ``question`` if there.
        chosen: column of preferred answers.
        rejected: column of rejected answers.
        client: column of each row's client, where the layout doesn't name clients.
        split_column: column of ``train``, ``val`` or ``test``.
        max_length: positions of a text, at least 1; later tokens are cut off.
        chat_template: as for `ChatData`.
        reference_dtype: type of the reference's weights, as ``model.net.dtype``.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if a file, a column, a model or a chat template is missing, a row has another form,
            or no pair has two different answers.

    Source: Rafailov et al., "Direct Preference Optimization", NeurIPS 2023; layout by client: Ye et al.,
    "FedLLM-Bench", NeurIPS 2024 (Fed-ChatbotPA).
    """

    def __init__(
        self,
        path: Any,
        tokenizer: Any,
        reference: str | None = None,
        beta: float = 0.1,
        prompt: str | None = None,
        chosen: str = "chosen",
        rejected: str = "rejected",
        client: str | None = "client",
        split_column: str | None = None,
        max_length: int = 1024,
        chat_template: str | None = None,
        reference_dtype: DType = "float32",
        **kwargs: Unpack[DataSettings],
    ) -> None:
        if reference is None:
            if not isinstance(tokenizer, str):
                raise MisconfigurationException(
                    f"data.reference=null takes the folder of data.tokenizer, which is a {type(tokenizer).__name__}; "
                    "give the folder of the model before training, as model.net.model."
                )
            reference = tokenizer
        # before the rows are read, which may take minutes
        local_folder(reference, "data.reference")
        super().__init__(
            path,
            tokenizer,
            chat_template,
            max_length,
            client,
            split_column,
            lambda tokens: Preference(tokens, beta, cut_padding=True),
            **kwargs,
        )
        self.reference, self.reference_dtype = reference, reference_dtype
        self.prompt, self.chosen, self.rejected = prompt, chosen, rejected
        self.input_shape = (2, max_length)

    def load(self) -> Loaded:
        """Read the pairs, make token numbers of them, and compute the reference's log-probabilities."""
        rows, clients, splits = self.owned_rows()
        read = pair_reader(list(rows[0]), self.prompt, self.chosen, self.rejected)
        pairs = [read(row, f"{self.owner}: row {place}") for place, row in enumerate(rows)]
        both = zip(*(self._tokens([pair[side] for pair in pairs], self.owner) for side in (0, 1)), strict=True)
        length = self.input_shape[1]
        kept, samples = list[int](), list[list[tuple[Tensor, Tensor]]]()
        cut = 0
        for place, (pair, texts) in enumerate(zip(pairs, both, strict=True)):
            cut += any(len(ids) > length + 1 for ids, _ in texts)
            begin = self._begin(*pair, [ids for ids, _ in texts], f"{self.owner}: row {place}")
            sides = [shifted(text, begin, length) for text in texts]
            # without an answer on both sides, or with the same one twice, a pair prefers nothing
            if all(bool((y != -100).any()) for _, y in sides) and sides[0][1].tolist() != sides[1][1].tolist():
                kept.append(place)
                samples.append(sides)
        if not kept:
            raise MisconfigurationException(
                f"data.max_length={length}: none of {len(rows)} rows of {self.owner} has two different answers before "
                "that position; take a larger one, or give other rows."
            )
        width = max(len(x) for sides in samples for x, _ in sides)
        x = torch.full((len(samples), 2, width), self._padding)
        tokens = torch.full((len(samples), 2, width), -100)
        for row, sides in enumerate(samples):
            for side, (ids, targets) in enumerate(sides):
                x[row, side, : len(ids)], tokens[row, side, : len(ids)] = ids, targets
        self._head_lines = [("texts", told(len(kept), len(rows), cut, length)), ("reference", str(self.reference))]
        y = {"tokens": tokens, "reference": self._log_probabilities(x, tokens)}
        owners, parts = (None if of is None else [of[place] for place in kept] for of in (clients, splits))
        return Loaded(x, y, owners, parts)

    def row_contents(self, loaded: Loaded) -> Tree:
        """Return the token numbers, which are the same on each machine.

        Args:
            loaded: the pool, as loaded.
        """
        # the reference's numbers aren't: a GPU and another CPU round otherwise, and a run may resume there
        return loaded.x, loaded.y["tokens"]

    def _begin(self, one: list[Message], other: list[Message], ids: list[list[int]], row: str) -> int:
        """Return the position at which the answers of a pair may begin.

        Args:
            one: a conversation.
            other: the one with the other answer.
            ids: token numbers of both.
            row: name of the row for the message.

        Raises:
            MisconfigurationException: if the conversations have no message in common.
        """
        prompt = common(one, other)
        if not prompt:
            raise MisconfigurationException(
                f"{row} (counted from 0) has no prompt: its two conversations begin with different messages; give one "
                "in the column prompt, or name the column by data.prompt."
            )
        # a whole conversation twice, which is left out
        if len(prompt) == len(one) == len(other):
            return len(ids[0])
        return len(common(self.encode(prompt), *ids))

    @torch.no_grad()
    def _log_probabilities(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the answers' log-probabilities under the reference ``[n, 2]``.

        Args:
            x: inputs ``[n, 2, T]``.
            tokens: targets ``[n, 2, T]``.
        """
        task = cast(Preference, self.task)
        # without a Trainer, as in a notebook, there is no other device
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        try:
            net = CausalLM((2, x.shape[-1]), task.outputs, self.reference, lora=None, dtype=self.reference_dtype)
        except MisconfigurationException as error:
            raise MisconfigurationException(f"data.reference={self.reference!r} can't be computed: {error}") from error
        net = net.to(device).eval()
        found = []
        for piece in Samples(x, {"tokens": tokens}).to(device).chunks(PAIRS_AT_ONCE):
            inputs, target = shortened(*piece, task.length(piece[1]))
            # never all at once: those of long texts are larger than the model
            logits = ChunkedLogits(net.classifier, net.features(inputs), CHUNK_TOKENS)
            found.append(task.log_probabilities(logits, target["tokens"]).cpu())
        return torch.cat(found)


def common(*lists: Sequence[Any]) -> list[Any]:
    """Return what all lists begin with.

    >>> common([1, 2, 3], [1, 2, 4, 5])
    [1, 2]

    Args:
        *lists: the lists.
    """
    found = []
    # of different lengths: the shortest ends the comparison
    for parts in zip(*lists, strict=False):
        if any(part != parts[0] for part in parts):
            break
        found.append(parts[0])
    return found


def shifted(text: Tokens, begin: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a text.

    >>> shifted(([5, 6, 7], [True, True, True]), 2, 9)
    (tensor([5, 6]), tensor([-100,    7]))

    Args:
        text: token numbers, and whether each counts.
        begin: position before which none does.
        length: largest number of positions.
    """
    ids, counts = text
    counted = [is_counted and place >= begin for place, is_counted in enumerate(counts)]
    y = [token if is_counted else -100 for token, is_counted in zip(ids, counted, strict=True)]
    return torch.tensor(ids[:-1][:length]), torch.tensor(y[1:][:length])


def told(kept: int, rows: int, cut: int, length: int) -> str:
    """Return the line for the head of a run.

    >>> told(3, 4, 0, 1024)
    '3 pairs; 1 without two different answers left out'

    Args:
        kept: number of pairs.
        rows: number of rows.
        cut: number of rows longer than ``length``.
        length: largest number of positions.
    """
    parts = [f"{kept:,} pairs"]
    if cut:
        parts.append(f"{cut:,} cut to {length:,} tokens")
    if rows > kept:
        parts.append(f"{rows - kept:,} without two different answers left out")
    return "; ".join(parts)


def pair_reader(
    there: list[str], prompt: str | None, chosen: str, rejected: str
) -> Callable[[Mapping[str, Any], str], tuple[list[Message], list[Message]]]:
    """Return a function from a row and its name to both conversations.

    Args:
        there: columns of the first row.
        prompt: column of prompts; None takes a known one.
        chosen: column of preferred answers.
        rejected: column of rejected answers.

    Raises:
        MisconfigurationException: if there is no such column.
    """
    for setting, column in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if column is not None:
            check_column(setting, column, there)
    asked = prompt or next((name for name in PROMPTS if name in there), None)

    def pair_of(row: Mapping[str, Any], name: str) -> tuple[list[Message], list[Message]]:
        question = None if asked is None else row.get(asked)
        one, other = (whole(question, row.get(column), f"{name}, column {column},") for column in (chosen, rejected))
        return one, other

    return pair_of


def whole(prompt: Any, answer: Any, row: str) -> list[Message]:
    r"""Return a conversation of a prompt and an answer.

    >>> whole(None, "\n\nHuman: Hi\n\nAssistant: Hello", "row 0")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]

    Args:
        prompt: a text, messages, or None.
        answer: a text or messages, which may hold the prompt.
        row: name of the row for the message.

    Raises:
        MisconfigurationException: if they have another form.
    """
    if prompt is None and isinstance(answer, str):
        _, *turns = TURN.split(answer)
        if not turns:
            raise MisconfigurationException(
                f"{row} (counted from 0) has a text without a prompt; give a column of prompts by data.prompt, or a "
                "list of messages."
            )
        pairs = zip(turns[::2], turns[1::2], strict=True)
        answer = [{"role": role, "content": content.strip()} for role, content in pairs]
    said = conversation_of([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer, row)
    if said and said[0]["role"] == "assistant" and prompt is not None:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = conversation_of(asked, row) + said
    return said
