"""Texts that clients' language models generate during a run."""

from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.feature_pictures import as_used
from pfl_lightning.client.generation import Coded, continued
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.federation.federation import Federation
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.report import write_rows
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import NextToken, Preference

DRAWN = 3
"""Number of clients whose texts are generated where none is named."""


class GenerationSamples(FederatedCallback):
    """Let clients' models go on from prompts, and write the texts into ``RUN_FOLDER/generations.csv``.

    A client's model is the one for evaluation, as in `FeaturePictures`: the method's own forward pass, so that models
    mixed of several count as a whole. `CausalLM` goes on from all prompts as batches, and remembers keys and values of
    earlier tokens; of other nets the last ``input_shape[0]`` tokens go through the net for each new one. The file has a
    row for each round, client and prompt; rows are part of the checkpoint, and ``rows`` holds them without a logger,
    too. A run is the same with the callback and without. No guarantee of privacy covers the texts.

    It works with data that have methods ``encode`` and ``decode`` and a property ``end_tokens``, such as `ChatData` and
    `Shakespeare`.

    Args:
        prompts: the beginnings of texts, at least one; for `ChatData` the user's messages.
        every: number of rounds between texts; None generates at the end of ``fit`` only.
        max_new_tokens: largest number of tokens of a text, at least 1.
        clients: names or ids of the clients; None takes the first three.
        temperature: divides the logits before a token is drawn; 0 takes the most likely token.

    Raises:
        MisconfigurationException: if a setting is out of range; at the start of ``fit``, if a client doesn't exist, or
            the data can't turn prompts into tokens.
    """

    reads_updates = False

    def __init__(
        self,
        prompts: list[str],
        every: int | None = None,
        max_new_tokens: int = 64,
        clients: list[int | str] | None = None,
        temperature: float = 0.0,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise MisconfigurationException(
                f"GenerationSamples.prompts={prompts!r} must be a list of at least one text."
            )
        if max_new_tokens < 1 or (every is not None and every < 1) or not temperature >= 0:
            raise MisconfigurationException(
                f"GenerationSamples: max_new_tokens={max_new_tokens} and every={every} must be at least 1, and "
                f"temperature={temperature} at least 0."
            )
        self.prompts = list(prompts)
        self.every = every
        self.max_new_tokens = max_new_tokens
        self.clients = clients
        self.temperature = temperature
        self.rows: list[dict[str, Any]] = []
        """The texts so far, each with ``round``, ``client``, ``prompt`` and ``text``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows of a resumed run."""
        self.rows = list(state_dict["rows"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check task, data, prompts and clients."""
        federation = cast(Federation, pl_module)
        data = federation.data
        if federation.options.client_states == "rank" and trainer.world_size > 1:
            raise MisconfigurationException(
                "callback GenerationSamples looks at clients' models on the first rank, which doesn't have all "
                "with trainer.client_states=rank; take memory or disk."
            )
        if not isinstance(data.task, (NextToken, Preference)) or not isinstance(data, Coded):
            raise MisconfigurationException(
                f"callback GenerationSamples: data={type(data).__name__} with task {data.task} has no texts to go on "
                "from; it needs the task NextToken or Preference, methods encode and decode, and end_tokens."
            )
        # all checks at the start, as the first text may be hours away
        for prompt in self.prompts:
            if not data.encode(prompt):
                raise MisconfigurationException(
                    f"GenerationSamples.prompts has {prompt!r}, which is no token; give a longer one."
                )
        named = range(min(DRAWN, data.num_clients)) if self.clients is None else self.clients
        self._clients = [data.client_id(client) for client in named]

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Generate after every ``every`` rounds."""
        # this round isn't counted in `federation.round` yet
        done = federation.round + 1
        if self.every and done % self.every == 0:
            self._generate(trainer, federation, done)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate at the end, if the last round didn't."""
        federation = cast(Federation, pl_module)
        if not any(row["round"] == federation.round for row in self.rows):
            self._generate(trainer, federation, federation.round)

    def _generate(self, trainer: Trainer, federation: Federation, done: int) -> None:
        """Generate all texts of a round, and write the file anew.

        Args:
            trainer: the trainer.
            federation: the federation.
            done: number of the rounds so far.
        """
        # texts are numbers and no part of training: one rank is enough
        if not trainer.is_global_zero:
            return
        data = cast(Any, federation.data)
        window = data.input_shape[-1]
        with undisturbed():
            for client in self._clients:
                engine = as_used(federation, client)
                # a function of the round and the client, so that resumed runs draw the same texts
                generators = [
                    torch.Generator().manual_seed(
                        derive_seed(cast(int, federation.seed), "generation", done, client, place)
                    )
                    for place in range(len(self.prompts))
                ]
                made = dict(
                    continued(
                        engine.module,
                        [data.encode(prompt) for prompt in self.prompts],
                        self.max_new_tokens,
                        window,
                        data.end_tokens,
                        self.temperature,
                        generators,
                        engine.forward_context,
                    )
                )
                for place, prompt in enumerate(self.prompts):
                    row = {"round": done, "client": data.client_name(client), "prompt": prompt}
                    self.rows.append(row | {"text": data.decode(made[place])})
        if (folder := run_folder(trainer)) is not None:
            write_rows(folder / "generations.csv", self.rows)
