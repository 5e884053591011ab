"""ROUGE-L of the answers of clients' language models during a run."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.client.generation import Coded, continued, scores
from pfl_lightning.data import Samples, Split
from pfl_lightning.data.trees import Tree
from pfl_lightning.engines import Engine
from pfl_lightning.federation.evaluation import JobOf, Metrics
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.prediction import Recipe, become
from pfl_lightning.tasks import NextToken


class AnswerScores(FederatedCallback):
    """Measure ROUGE-L of clients' answers to their own prompts, as ``rouge_l``.

    Where a round is evaluated, each client's model answers the prompts of the first conversations in the client's own
    split, by the most likely token each time; a client's ``rouge_l`` is the mean over them, of `scores`. The prompt of
    a conversation is the text before its last answer, as in training, and the right answer what the net sees of it. The
    metric goes wherever others go: ``val/rouge_l`` in the round's record, trackers and tables of clients, and
    ``test/rouge_l`` in tests and in columns of ``pfl-lightning compare``, each a mean weighted by clients' samples.

    Generation costs a pass for each new token, and so it is done in some rounds only; tests of finished runs always
    have it. A run is the same with the callback and without. For `ChatData`, and other data with methods ``encode`` and
    ``decode``, a property ``end_tokens`` and the task ``NextToken(exact_match=True)``; needs the extra ``lm``.

    Args:
        every: rounds between measurements, at least 1; the round of ``trainer.max_rounds`` has one in any case, and
            with None no other.
        prompts: largest number of prompts of a client and split, at least 1.
        max_new_tokens: largest number of tokens of an answer, at least 1.

    Raises:
        MisconfigurationException: if a number is below 1; before the first round, if data aren't conversations with
            answers or are at sites, clients' states are on several ranks, models are evaluated after training
            (``trainer.evaluate``), or the package rouge-score is missing.
    """

    reads_updates = False

    def __init__(self, every: int | None = None, prompts: int = 8, max_new_tokens: int = 64) -> None:
        if prompts < 1 or max_new_tokens < 1 or (every is not None and every < 1):
            raise MisconfigurationException(
                f"AnswerScores: every={every}, prompts={prompts} and max_new_tokens={max_new_tokens} must be at least "
                "1, such as 5, 8 and 64."
            )
        self.every, self.prompts, self.max_new_tokens = every, prompts, max_new_tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check data and settings, and take part in evaluations."""
        federation = cast(Federation, pl_module)
        data, options = federation.data, federation.options
        if data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks=AnswerScores lets models answer in this process, and the clients of these data are "
                "at sites; leave it out."
            )
        if not (isinstance(data.task, NextToken) and data.task.exact_match and isinstance(data, Coded)):
            raise MisconfigurationException(
                f"trainer.callbacks=AnswerScores: data={type(data).__name__} with task {data.task} has no answers to "
                "prompts; give conversations, such as ChatData with loss_on=assistant."
            )
        if options.evaluate != "before":
            raise MisconfigurationException(
                f"trainer.callbacks=AnswerScores looks at models before clients' training, and trainer.evaluate="
                f"{options.evaluate} at others; take evaluate=before."
            )
        if options.client_states == "rank" and trainer.world_size > 1:
            raise MisconfigurationException(
                "trainer.callbacks=AnswerScores looks at clients' models on each rank, which doesn't have all with "
                "trainer.client_states=rank; take memory or disk."
            )
        # refused here and not hours later, if the package is missing
        scores([], [])
        self._trainer, self._data = trainer, data
        # a second stage of the same run, such as a test, has the same evaluations
        if self.measured not in federation.evaluations.further:
            federation.evaluations.further.append(self.measured)

    @property
    def due(self) -> bool:
        """Whether the evaluation that is under way has answers: some rounds' own, and all others."""
        trainer = self._trainer
        # the test at the end of a fit is no validation
        if trainer.state.fn != "fit" or not trainer.validating:
            return True
        # the round under way isn't counted yet
        done = trainer.current_epoch + 1
        return done == trainer.max_epochs or bool(self.every and done % self.every == 0)

    def measured(
        self, engine: Engine, clients: Sequence[int], splits: tuple[Split, ...], job_of: JobOf
    ) -> Mapping[int, Metrics]:
        """Return ``rouge_l`` of clients with samples, by client and split; see `Evaluations.further`.

        Args:
            engine: the engine, whose module becomes each client's.
            clients: the clients' ids.
            splits: the splits of the evaluation.
            job_of: returns a client's job.
        """
        # losses of training samples, which a selection of clients asks for, are no evaluation
        asked = [split for split in splits if split != "train"]
        found: dict[int, Metrics] = {}
        for client in clients if asked and self.due else ():
            job = job_of(client, splits)
            if held := [split for split in asked if job.data.size(split)]:
                data = become(Recipe(engine, job))
                found[client] = {split: {"rouge_l": self.of(engine, getattr(data, split))} for split in held}
        return found

    def of(self, engine: Engine, samples: Samples) -> float:
        """Return mean ROUGE-L of the answers of an engine's module to the prompts of some conversations.

        Args:
            engine: the engine, whose module is a client's model.
            samples: the conversations.
        """
        data, module = cast(Any, self._data), engine.module
        x, y = next(iter(samples.chunks(self.prompts)))
        pairs = last_answers(x, cast(Tensor, y), cast(NextToken, data.task).ignore_index)
        ends = data.end_tokens
        made = dict(
            continued(
                module,
                [prompt for prompt, _ in pairs],
                self.max_new_tokens,
                module.input_shape[-1],
                ends,
                context=engine.forward_context,
            )
        )
        # generation ends at an end token too, which is no word of an answer
        right = [data.decode([token for token in answer if token not in ends]) for _, answer in pairs]
        answered = [data.decode(made[place]) for place in range(len(pairs))]
        return fmean(each["rouge_l"] for each in scores(answered, right))


def last_answers(x: Tree, target: Tensor, ignore_index: int = -100) -> list[tuple[list[int], list[int]]]:
    """Return the tokens before the last answer of each text, and the answer's tokens.

    >>> from torch import tensor
    >>> last_answers(tensor([[5, 6, 7, 8, 0]]), tensor([[6, -100, 8, 9, -100]]))
    [([5, 6, 7], [8, 9])]

    Args:
        x: token numbers ``[n, T]``, or a dict of ``input_ids`` and ``position_ids``, which are 0 where a text begins.
        target: the next tokens ``[n, T]``; an answer is a run of counted ones, of which each row has at least one.
        ignore_index: target of positions that don't count.
    """
    tokens, positions = (x["input_ids"], x["position_ids"]) if isinstance(x, Mapping) else (x, None)
    pairs = []
    for row, counted in enumerate(target != ignore_index):
        last = int(counted.nonzero()[-1])
        others = (~counted[:last]).nonzero().flatten().tolist()
        first = others[-1] + 1 if others else 0
        # of packed texts the last one begins where positions begin anew
        begin = 0 if positions is None else int((positions[row, : first + 1] == 0).nonzero()[-1])
        pairs.append((tokens[row, begin : first + 1].tolist(), target[row, first : last + 1].tolist()))
    return pairs
