"""Conversations of clients, as token numbers for causal language models."""

import hashlib
import json
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.data.sources.columns import SPLITS, check_column, package
from pfl_lightning.data.sources.hf_data import SAVED, local_dataset
from pfl_lightning.nets.causal_lm import local_folder
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import NextToken, Task

LossOn = Literal["assistant", "all"]
"""Tokens that count: those of the assistant, or all."""
LISTS = ("messages", "conversations")
"""Known columns of conversations, the first of them that is there."""
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("inputs", "targets"),
    ("question", "answer"),
)
"""Known columns of a prompt and its response."""
CONTEXTS = ("input", "context")
"""Known columns of a text that belongs to the prompt in the column ``instruction``."""
ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}
"""Roles by other names that data sets have for them."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark in a chat template before an assistant's text."""
PLAIN = (
    "{% for message in messages %}### {{ message['role'] | capitalize }}:\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token or '' }}{% endgeneration %}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""A chat template without tokens of its own, for tokenizers of models that were trained on plain texts."""
# a newline behind a block would be lost, so that it is a text of its own
ALPACA = (
    "{% if messages[0]['role'] != 'system' %}Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
    "{% else %}### Response:\n{% generation %}{{ message['content'] }}{{ eos_token or '' }}{% endgeneration %}"
    "{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
"""The template of Stanford Alpaca, https://github.com/tatsu-lab/stanford_alpaca."""
VICUNA = (
    "{% if messages[0]['role'] != 'system' %}A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. {% endif %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% else %}ASSISTANT:{% generation %} {{ message['content'] }}{{ eos_token or '' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""The template of Vicuna 1.1, https://github.com/lm-sys/FastChat; the space before an answer belongs to its tokens."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template ChatML, for tokenizers with its two marks, ``<|im_start|>`` and ``<|im_end|>``."""
TEMPLATES = {"plain": PLAIN, "alpaca": ALPACA, "vicuna": VICUNA, "chatml": CHATML}
"""Chat templates by name."""
MARKS = ("<|im_start|>", "<|im_end|>")
"""Tokens of ChatML."""
AT_ONCE = 1000
"""Conversations that are tokenized in one call."""

Message = dict[str, str]
"""A part of a conversation: ``role`` and ``content``."""
Tokens = tuple[list[int], list[bool]]
"""Token numbers of a conversation, and whether each counts."""


class Conversations(OwnedData):
    """Base of data of conversations, from local files: tokenizer, chat template, and the owners of rows.

    Args:
        path: the file or folder; from Python also rows.
        tokenizer: a tokenizer, its folder, or its name in the local cache of the hub.
        chat_template: a template in Jinja, a file with one, or the name of one; None takes the tokenizer's.
        max_length: positions of a text, at least 1.
        client: column of each row's client.
        split_column: column of ``train``, ``val`` or ``test``.
        task: returns the task, from the number of tokens.
        **kwargs: settings of `FederatedDataModule`.

    Raises:
        MisconfigurationException: if the tokenizer or its template is missing, or ``max_length`` is below 1.
    """

    loss_on: LossOn = "assistant"
    """Tokens that count."""

    def __init__(
        self,
        path: Any,
        tokenizer: Any,
        chat_template: str | None,
        max_length: int,
        client: str | None,
        split_column: str | None,
        task: Callable[[int], Task],
        **kwargs: Unpack[DataSettings],
    ) -> None:
        check_integers("data.", max_length=max_length)
        if max_length < 1:
            raise MisconfigurationException(f"data.max_length={max_length} must be at least 1, such as 1024")
        self.tokenizer = local_tokenizer(tokenizer)
        self.chat_template = template_of(self.tokenizer, chat_template)
        # not len(tokenizer): numbers may have gaps
        super().__init__(task(max(self.tokenizer.get_vocab().values()) + 1), **kwargs)
        self.path = path
        self.client_column, self.split_column = client, split_column
        self._head_lines: list[tuple[str, str]] = []

    @property
    def owner(self) -> str:
        """Return the name of the rows' file, for messages."""
        return f"data.path={str(self.path)!r}" if isinstance(self.path, (str, Path)) else "data.path"

    def owned_rows(self) -> tuple[list[Mapping[str, Any]], list[Any] | None, list[Any] | None]:
        """Return the rows, and client and split of each where known.

        Raises:
            MisconfigurationException: if there is no row, or no such column.
        """
        rows, clients, splits = rows_of(self.path)
        if not rows:
            raise MisconfigurationException(f"{self.owner} has no rows; give at least one conversation")
        # a column is asked for only by partitioners that read it, so that IID takes rows without clients
        if clients is None and self.client_column is not None and getattr(self.partitioner, "by_owner", False):
            check_column("client", self.client_column, list(rows[0]))
            clients = [row.get(self.client_column) for row in rows]
        if self.split_column is not None:
            check_column("split_column", self.split_column, list(rows[0]))
            splits = [row.get(self.split_column) for row in rows]
        return rows, clients, splits

    @property
    def _padding(self) -> int:
        """Return a token to pad with; no target counts there, so that any will do."""
        found = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return int(next(token for token in found if token is not None))

    def _tokens(self, conversations: list[list[Message]], owner: str) -> Iterator[Tokens]:
        """Yield the tokens of each conversation, uncut.

        Args:
            conversations: the conversations.
            owner: name of their file for messages.
        """
        is_marked = GENERATION.search(self.chat_template) is not None
        for begin in range(0, len(conversations), AT_ONCE):
            some = conversations[begin : begin + AT_ONCE]
            if self.loss_on == "all":
                texts = [self._written(each, f"{owner}: row {begin + place}") for place, each in enumerate(some)]
                for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]:
                    yield ids, [True] * len(ids)
            elif is_marked:
                for place, each in enumerate(some):
                    # by itself, so that an error has the row's number
                    tokens = self._written(
                        each,
                        f"{owner}: row {begin + place}",
                        tokenize=True,
                        return_dict=True,
                        return_assistant_tokens_mask=True,
                    )
                    yield tokens["input_ids"], [bool(mark) for mark in tokens["assistant_masks"]]
            else:
                spans = [self._answers(each, f"{owner}: row {begin + place}") for place, each in enumerate(some)]
                texts = [text for text, _ in spans]
                # one call for many texts, which a fast tokenizer works through in parallel
                tokens = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
                # a token at the edge of an answer counts, as byte-level tokens may hold the space before it
                for ids, offsets, (_, places) in zip(tokens["input_ids"], tokens["offset_mapping"], spans, strict=True):
                    yield ids, [any(start < end and first < stop for start, stop in places) for first, end in offsets]

    def _written(self, conversation: list[Message], row: str, **settings: Any) -> Any:
        """Return a conversation as a text by the chat template, or the result of other settings.

        Args:
            conversation: the messages.
            row: name of the row for the message.
            **settings: further settings of ``apply_chat_template``.

        Raises:
            MisconfigurationException: if the template refuses the conversation.
        """
        settings = {"tokenize": False, "chat_template": self.chat_template, **settings}
        try:
            return self.tokenizer.apply_chat_template(conversation, **settings)
        # jinja2's errors, and any that a template meets in its own code
        except Exception as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise MisconfigurationException(
                f"{row}: the chat template can't write a conversation of {roles or 'no message'} "
                f"({' '.join(str(error).split())[:100]}); give another data.chat_template, or leave the row out"
            ) from None

    def _answers(self, conversation: list[Message], row: str) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as a text, and where each text of the assistant begins and ends, its end mark included.

        Args:
            conversation: the messages.
            row: name of the row for the message.

        Raises:
            MisconfigurationException: if the template writes a message in another way once others follow.
        """
        whole, spans = self._written(conversation, row), []
        for place, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            until = self._written(conversation[: place + 1], row)
            # the first message has no prompt before it, which templates refuse to write
            before = self._written(conversation[:place], row, add_generation_prompt=True) if place else ""
            begin = len(before)
            # without a prompt for the answer, the template's words between it and the question are no part of it
            if not place or before == self._written(conversation[:place], row):
                begin = max(until.find(message["content"].strip(), begin), begin)
            if not until.startswith(before) or not whole.startswith(until):
                raise MisconfigurationException(
                    f"{row}: the chat template writes an answer in another way once messages follow, and has no "
                    "{% generation %} that tells the assistant's tokens; add that to data.chat_template, or take "
                    "data.loss_on=all"
                )
            spans.append((begin, self._end_of(until, begin)))
        return whole, spans

    def _end_of(self, text: str, begin: int) -> int:
        """Return the end of an answer at the end of a text, without white space behind a token that ends it."""
        stripped = text.rstrip()
        marks = tuple(self.tokenizer.get_added_vocab())
        return len(stripped) if marks and len(stripped) > begin and stripped.endswith(marks) else len(text)

    @property
    def head_lines(self) -> list[tuple[str, str]]:
        """Return the numbers of samples and tokens, and of rows left out, for the head of a run."""
        return self._head_lines

    @property
    def agreed(self) -> dict[str, Any]:
        """Return digests of tokenizer and chat template, as `FederatedDataModule.agreed`."""
        # a module from a checkpoint alone has no tokenizer
        if not hasattr(self, "chat_template"):
            return super().agreed
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        parts = {"tokenizer": vocabulary, "chat_template": self.chat_template}
        return super().agreed | {n: hashlib.sha256(text.encode()).hexdigest()[:16] for n, text in parts.items()}

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Return the token numbers of a prompt, up to where the assistant's answer begins.

        Args:
            prompt: the user's text, or a list of messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._written(messages, "the prompt", add_generation_prompt=True)
        # the template has written begin marks already, and a second one would be a text never trained on
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token numbers, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token numbers that end an answer: all special tokens but that of unknown words."""
        return frozenset(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}


class ChatData(Conversations):
    """Conversations of clients, from local files; needs the extra ``lm``, and ``hf`` for Parquet and Arrow.

    A sample is a conversation, or, under ``packing``, several of one client. Inputs are token numbers ``[T]``. Targets
    are the tokens one position on, and -100 where a token doesn't count, such as the user's tokens and padding. The
    tokenizer's chat template writes a conversation as one text. The assistant's tokens lie between the template's marks
    ``{% generation %}``; in a template without them they are the text that follows the generation prompt.

    Files have one of these layouts:

    * rows, in ``.jsonl``, ``.json``, ``.parquet``, ``.arrow``, ``.csv`` or the folder of a saved ``datasets.Dataset``,
      with the client in a column;
    * ``.json`` of ``{client: [row, ...]}``, as in FedLLM-Bench;
    * a folder with ``local_training_CLIENT.json``, and perhaps ``local_testing_CLIENT.jsonl`` for the test samples, as
      in FedDPA and FedALT;
    * else a folder with a ``CLIENT.jsonl`` for each client, such as ``Bremen.jsonl``, whose name is the client's.

    A row has a list of messages, ``{"role", "content"}`` or ``{"from", "value"}``, or a prompt and a response.

    Args:
        path: the file or folder; from Python also a ``datasets.Dataset``, a list of rows, or a dict of such lists.
        tokenizer: folder of a tokenizer, or its name in the local cache of the hub; from Python also the tokenizer.
        messages: column of conversations; None takes ``messages`` or ``conversations`` if there.
        prompt: column of prompts, in place of conversations; None takes a known name, such as ``instruction``, to
            which a column ``input`` or ``context`` belongs.
        response: column of responses; None takes the known name that goes with the prompt's.
        client: column of each row's client, where the layout doesn't name clients; None under another partitioner than
            `Natural`.
        split_column: column of ``train``, ``val`` or ``test``.
        max_length: positions of a sample, at least 1; later tokens are cut off.
        loss_on: tokens that count, the ``assistant``'s or ``all``.
        packing: put several conversations of a client into a sample, as many as fit. Inputs are then a dict of
            ``input_ids`` and ``position_ids``, which begin at 0 in each conversation.
        chat_template: a template in Jinja, a file with one, or ``plain``, ``alpaca``, ``vicuna`` or ``chatml``; None
            takes the tokenizer's.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if a file, a column, the tokenizer or a chat template is missing, a conversation has
            another form, or no token counts.

    Source: Ye et al., "FedLLM-Bench", NeurIPS 2024 (layout and data by client); best-fit-decreasing packing: Ding et
    al., "Fewer Truncations Improve Language Modeling", ICML 2024.
    """

    def __init__(
        self,
        path: Any,
        tokenizer: Any,
        messages: str | None = None,
        prompt: str | None = None,
        response: str | None = None,
        client: str | None = "client",
        split_column: str | None = None,
        max_length: int = 1024,
        loss_on: LossOn = "assistant",
        packing: bool = False,
        chat_template: str | None = None,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        if loss_on not in ("assistant", "all"):
            raise MisconfigurationException(f"data.loss_on={loss_on!r} must be assistant or all")
        if (prompt is None) != (response is None):
            raise MisconfigurationException(
                f"data.prompt={prompt!r} and data.response={response!r} go together; name both columns or neither"
            )
        super().__init__(
            path,
            tokenizer,
            chat_template,
            max_length,
            client,
            split_column,
            lambda tokens: NextToken(tokens, exact_match=loss_on == "assistant", cut_padding=True),
            **kwargs,
        )
        self.messages, self.prompt, self.response = messages, prompt, response
        self.loss_on, self.packing = loss_on, packing
        self.input_shape = (max_length,)

    def load(self) -> Loaded:
        """Read the conversations, and make token numbers of them."""
        rows, clients, splits = self.owned_rows()
        owner = self.owner
        read = reader_of(list(rows[0]), self.messages, self.prompt, self.response)
        conversations = [conversation_of(read(row), f"{owner}: row {place}") for place, row in enumerate(rows)]
        [length] = self.input_shape
        texts: list[tuple[Tensor, Tensor]] = []
        groups: dict[tuple[Any, Any], list[int]] = {}
        cut = 0
        for place, (ids, counts) in enumerate(self._tokens(conversations, owner)):
            cut += len(ids) > length + 1
            y = [token if is_counted else -100 for token, is_counted in zip(ids, counts, strict=True)][1 : length + 1]
            # a batch of such rows alone would have a loss of NaN, the mean of no error
            if any(target != -100 for target in y):
                key = (None if clients is None else clients[place], None if splits is None else splits[place])
                groups.setdefault(key, []).append(len(texts))
                texts.append((torch.tensor(ids[: len(y)]), torch.tensor(y)))
        if not texts:
            raise MisconfigurationException(
                f"data.max_length={length}: no token counts in any of {len(rows)} rows of {owner}, as no answer begins "
                "before that position; take a larger one, or data.loss_on=all"
            )
        self._tell(rows, texts, cut, set(clients or ()) - {client for client, _ in groups})
        # never across clients or splits: a sample has one owner, and test texts must not be trained on
        if self.packing:
            samples = [
                (key, [group[place] for place in members])
                for key, group in groups.items()
                for members in packed([len(texts[place][0]) for place in group], length)
            ]
        else:
            samples = [(key, [place]) for key, group in groups.items() for place in group]
            # in the order of the file, as the splits are drawn by position
            samples.sort(key=lambda sample: sample[1])
        # the longest of all, as a pool is one tensor; `NextToken.length` shortens batches
        width = max(sum(len(texts[place][0]) for place in members) for _, members in samples)
        x = torch.full((len(samples), width), self._padding)
        y_all = torch.full((len(samples), width), -100)
        positions = torch.arange(width).repeat(len(samples), 1)
        for row, (_, members) in enumerate(samples):
            begin = 0
            for place in members:
                tokens, targets = texts[place]
                end = begin + len(tokens)
                x[row, begin:end], y_all[row, begin:end] = tokens, targets
                # the padding behind counts on from 0 too, as if it were one more text
                positions[row, end:] = torch.arange(width - end)
                begin = end
        inputs = {"input_ids": x, "position_ids": positions} if self.packing else x
        owners = None if clients is None else [client for (client, _), _ in samples]
        return Loaded(inputs, y_all, owners, None if splits is None else [split for (_, split), _ in samples])

    def _tell(self, rows: Sequence[Any], texts: list[tuple[Tensor, Tensor]], cut: int, lost: set[Any]) -> None:
        """Keep the lines for the head of a run.

        Args:
            rows: all rows.
            texts: inputs and targets of the kept ones.
            cut: number of rows longer than ``max_length``.
            lost: clients of which no row is kept.
        """
        counted, total = sum(int((y != -100).sum()) for _, y in texts), sum(len(x) for x, _ in texts)
        [length] = self.input_shape
        parts = [f"{len(texts):,} conversations, {counted:,} of {total:,} tokens count"]
        if cut:
            parts.append(f"{cut:,} cut to {length:,} tokens")
        if dropped := len(rows) - len(texts):
            parts.append(f"{dropped:,} without an answer there left out")
        if lost:
            parts.append(f"clients without any left out: {', '.join(sorted(map(str, lost))[:8])}")
        self._head_lines = [("texts", "; ".join(parts))]

    @property
    def agreed(self) -> dict[str, Any]:
        """Return what the loss is on, beside tokenizer and chat template, as `FederatedDataModule.agreed`."""
        cut = {"loss_on": self.loss_on, "packing": self.packing} if hasattr(self, "chat_template") else {}
        return super().agreed | cut


def local_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer, read from local files if given by a name or a folder.

    Args:
        tokenizer: a tokenizer of ``transformers``, a folder, or a name in the local cache of the hub.

    Raises:
        MisconfigurationException: if there is no such tokenizer, or it can't tell the places of tokens in a text.
    """
    transformers = package("transformers", "lm", "ChatData")
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        name = str(tokenizer)
        folder = local_folder(name, "data.tokenizer")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # OSError, ValueError and others, by what is missing
        except Exception as error:
            raise MisconfigurationException(
                f"data.tokenizer={name!r} has no tokenizer that can be read ({' '.join(str(error).split())[:100]}); "
                "give a folder with one, as by save_pretrained"
            ) from None
    if not tokenizer.is_fast:
        raise MisconfigurationException(
            f"data.tokenizer: {type(tokenizer).__name__} doesn't tell where in a text its tokens are; take the fast "
            "one, with a file tokenizer.json"
        )
    return tokenizer


def template_of(tokenizer: Any, given: str | None) -> str:
    """Return a chat template.

    Args:
        tokenizer: the tokenizer, whose own template is taken without another one.
        given: the template, a file with one, a name of `TEMPLATES`, or None.

    Raises:
        MisconfigurationException: if there is none, or the tokenizer lacks its marks.
    """
    if given in TEMPLATES:
        # a mark of several tokens would be cut like other words, and no answer would end by it
        if given == "chatml" and (lacking := set(MARKS) - tokenizer.get_vocab().keys()):
            raise MisconfigurationException(
                f"data.chat_template=chatml needs a tokenizer with the token {min(lacking)}, which data.tokenizer "
                "lacks; take alpaca, vicuna or plain."
            )
        return TEMPLATES[given]
    # a template without a brace would write the same text for all conversations
    if given is not None and "{" not in given:
        if not Path(given).is_file():
            raise MisconfigurationException(
                f"data.chat_template={given!r} is neither a template in Jinja, nor a file, nor one of "
                f"{', '.join(TEMPLATES)}"
            )
        return Path(given).read_text(encoding="utf-8")
    try:
        return str(given or tokenizer.get_chat_template())
    except ValueError:
        raise MisconfigurationException(
            "data.tokenizer has no chat template; give data.chat_template, such as plain"
        ) from None


def rows_of(path: Any) -> tuple[list[Mapping[str, Any]], list[Any] | None, list[Any] | None]:
    """Return rows, and client and split of each where the layout names them.

    Args:
        path: a file, a folder, or rows in memory.

    Raises:
        MisconfigurationException: if a file can't be read, or holds no rows.
    """
    splits: list[Any] | None = None
    raw: Any = path
    if isinstance(path, (str, Path)):
        path = Path(path)
        if path.is_dir() and (parts := sorted(path.glob("local_training_*.json"))):
            # the client's number is in the name of the file alone
            raw = {part.stem.removeprefix("local_training_"): rows_in_json(part) for part in parts}
            tests = {name: path / f"local_testing_{name}.jsonl" for name in raw}
            if any(test.exists() for test in tests.values()):
                splits = []
                for name, test in tests.items():
                    held_out = rows_in_json(test) if test.exists() else []
                    splits += ["train"] * len(raw[name]) + ["test"] * len(held_out)
                    raw[name] = [*raw[name], *held_out]
        elif path.is_dir() and (parts := sorted(path.glob("[!.]*.jsonl"))):
            raw = {part.stem: rows_in_json(part) for part in parts}
            check_clients(path, raw)
        elif path.suffix in (".json", ".jsonl"):
            raw = rows_in_json(path)
        elif path.is_dir() and not any((path / name).is_file() for name in SAVED):
            raise MisconfigurationException(
                f"data.path={str(path)!r} is a folder without conversations; give one with a CLIENT.jsonl for each "
                "client, or with local_training_CLIENT.json, or of a saved datasets.Dataset, or a file"
            )
        else:
            raw = local_dataset(str(path), "data.path", "ChatData")
    clients: list[Any] | None = None
    # not by `datasets`, which reads such a file as one row with a column a client
    if isinstance(raw, Mapping):
        wrong = next((name for name, held in raw.items() if not isinstance(held, list)), None)
        if wrong is not None:
            raise MisconfigurationException(
                f"data.path: {wrong!r} has a {type(raw[wrong]).__name__} where {{client: [row, ...]}} has a list of "
                "rows; give one, or a list of rows"
            )
        # numbers in their order, in which client 2 comes before client 10
        is_numbered = all(str(name).isdecimal() and str(int(name)) == str(name) for name in raw)
        clients = [int(name) if is_numbered else str(name) for name, held in raw.items() for _ in held]
        raw = [row for held in raw.values() for row in held]
    rows = list(raw)
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise MisconfigurationException(
                f"data.path: row {place} (counted from 0) is a {type(row).__name__}; give rows with named columns"
            )
    return rows, clients, splits


def check_clients(path: Path, files: Mapping[str, Sequence[Any]]) -> None:
    """Check the files of a folder with one for each client.

    Args:
        path: the folder.
        files: the rows of each file, by its name without the ending.

    Raises:
        MisconfigurationException: if files are named like splits and not like clients, or one has no rows.
    """
    if named := sorted(SPLITS & {name.lower() for name in files}):
        raise MisconfigurationException(
            f"data.path={str(path)!r} has {named[0]}.jsonl, and each file of such a folder is a client's; name files "
            "by clients and splits by a column, as in data.split_column=split, or rename it"
        )
    if empty := next((name for name, rows in files.items() if not rows), None):
        raise MisconfigurationException(
            f"data.path={str(path)!r}: {empty}.jsonl has no rows; give client {empty!r} at least one, or remove "
            "the file"
        )


def rows_in_json(path: Path) -> Any:
    """Return the contents of a JSON file, or the rows of a file with one on each line.

    Args:
        path: the file.

    Raises:
        MisconfigurationException: if it can't be read.
    """
    number = 0
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        rows = []
        # split at newlines alone: texts in JSON may have other separators of lines, unescaped
        for line in text.split("\n"):
            number += 1
            if line.strip():
                rows.append(json.loads(line))
        return rows
    except (OSError, ValueError) as error:
        where = f", line {number}" if number else ""
        raise MisconfigurationException(
            f"data.path={str(path)!r} cannot be read{where} ({' '.join(str(error).split())[:100]})"
        ) from None


def reader_of(
    there: list[str], messages: str | None, prompt: str | None, response: str | None
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from a row to its messages, by the columns that are there.

    Args:
        there: columns of the first row.
        messages: column of conversations; None takes a known one.
        prompt: column of prompts; None takes a known one.
        response: column of responses.

    Raises:
        MisconfigurationException: if there is no such column, or none of a known name.
    """
    if messages is not None and prompt is not None:
        raise MisconfigurationException(
            f"data.messages={messages!r} and data.prompt={prompt!r} both name a column of texts; leave one out"
        )
    for setting, column in (("messages", messages), ("prompt", prompt), ("response", response)):
        if column is not None:
            check_column(setting, column, there)
    # conversations before pairs: a data set may have the first question in a column of its own
    if prompt is None and (column := messages or next((name for name in LISTS if name in there), None)):
        return lambda row: row.get(column)
    pairs = [(prompt, response)] if prompt else [pair for pair in PAIRS if set(pair) <= set(there)]
    if not pairs:
        raise MisconfigurationException(
            f"data.messages: none of the columns {', '.join(there[:10])} has a known name of conversations; name it, "
            "or data.prompt and data.response"
        )
    asked, answered = map(str, pairs[0])
    contexts = CONTEXTS if asked == "instruction" else ()

    def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        question = row.get(asked)
        # in rows without one it is empty or missing
        if isinstance(question, str):
            question = "\n\n".join([question, *(row[name] for name in contexts if row.get(name))])
        return [{"role": "user", "content": question}, {"role": "assistant", "content": row.get(answered)}]

    return messages_of


def conversation_of(messages: Any, row: str) -> list[Message]:
    """Return a conversation in one form, whatever the names of its keys and roles.

    >>> conversation_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "row 0")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]

    Args:
        messages: the messages of a row.
        row: name of the row for the message.

    Raises:
        MisconfigurationException: if they have another form.
    """
    conversation = []
    for message in messages if isinstance(messages, (list, tuple)) else [messages]:
        role, content = None, None
        if isinstance(message, Mapping):
            role = message.get("role") or message.get("from")
            content = message.get("content") if "content" in message else message.get("value")
        if not isinstance(role, str) or not isinstance(content, str):
            shown = f"a message with {', '.join(map(str, message))}" if isinstance(message, Mapping) else repr(message)
            raise MisconfigurationException(
                f"{row} (counted from 0) has {shown[:80]} where a text is missing; give messages {{role, content}} or "
                "{from, value}, or a prompt and a response, all of them texts"
            )
        conversation.append({"role": ROLES.get(role.lower(), role.lower()), "content": content})
    return conversation


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the positions of texts that go into the same sample, by best fit decreasing.

    >>> packed([3, 6, 4, 2, 5], 8)
    [[1, 3], [4, 0], [2]]

    Args:
        lengths: lengths of the texts, each at most ``size``.
        size: positions of a sample.
    """
    bins: list[list[int]] = []
    # free positions and number of each sample, ascending
    free: list[tuple[int, int]] = []
    # sorting is stable: texts of equal length keep their order, so that samples are the same on every machine
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        place = bisect_left(free, (lengths[text], -1))
        if place == len(free):
            bins.append([])
            rest, number = size, len(bins) - 1
        else:
            rest, number = free.pop(place)
        bins[number].append(text)
        insort(free, (rest - lengths[text], number))
    return bins
