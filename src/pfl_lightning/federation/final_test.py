"""The test at the end of a run, of the last round's models and of those of the round that validation selects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pfl_lightning.data import Split
from pfl_lightning.engines import Job
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.checkpoint import saved_job
from pfl_lightning.federation.evaluation import split_of
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.joining import Joined, join


@dataclass(frozen=True)
class FinalTest:
    """What the test at the end of a run gave.

    Args:
        metrics: of the last round's models: summaries over clients, and the server's model's ``test/global_METRIC``.
        clients: each client's metrics with these models, as ``test/METRIC``, by id.
        selected: the round of the best checkpoint as ``round``, and its models' metrics; empty where that is the last
            round, or has been tested when it was made, or isn't kept.
        new: what became of new clients; empty where the data have none.
    """

    metrics: dict[str, float]
    clients: dict[int, dict[str, float]]
    selected: dict[str, float]
    new: Joined = Joined()  # noqa: RUF009 - immutable


def final_test(federation: Federation, best: str | None) -> FinalTest:
    """Tests all clients, and the server's model; then new clients join for a round.

    Args:
        federation: after its last round.
        best: the checkpoint of the best round, if there is one.
    """
    evaluations, clients = federation.evaluations, range(federation.data.num_clients)
    # where rounds are tested, the last one has been
    if len(evaluations.results.get("test", {})) < len(clients):
        evaluations.evaluate(clients, ("test",))
    results = {name: values for name, values in evaluations.results.items() if split_of(name) == "test"}
    central = {name: value for name, value in federation.metrics.items() if name.startswith("test/global_")}
    return FinalTest(
        metrics=evaluations.summary_of("test", results.get("test", {})) | (central or federation.test_global()),
        clients={
            client: {
                f"{name}/{metric}": value
                for name, of_clients in results.items()
                for metric, value in own_values(of_clients.get(client, {})).items()
            }
            for client in clients
        },
        selected=selected_test(federation, best),
        new=join(federation) if federation.data.newcomers else Joined(),
    )


def selected_test(federation: Federation, best: str | None) -> dict[str, float]:
    """The round of the best checkpoint and its test metrics; empty where they are known or can't be."""
    if best is None:
        return {}
    # mapped: else all clients' states would be in memory twice
    checkpoint = torch.load(best, map_location="cpu", weights_only=True, mmap=True)
    saved = checkpoint["federation"]
    if saved["round"] == federation.round or saved.get("settings", {}).get("trainer.test_every_round"):
        return {}
    return {"round": saved["round"], **metrics_at(federation, checkpoint)}


def metrics_at(federation: Federation, checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """Test metrics of the models in a checkpoint, summarised; nothing of the federation's own is used or changed.

    Args:
        federation: runs its clients.
        checkpoint: as it was saved.
    """
    saved, evaluations = checkpoint["federation"], federation.evaluations

    def job_of(client: int, splits: tuple[Split, ...]) -> Job:
        return saved_job(saved, client, federation.architecture_of(client), federation.data.client(client), splits)

    # on the samples that clients held in its round
    with federation.data.at_round(max(1, saved["round"])):
        metrics = (
            saved["after"]
            if federation.options.evaluate == "after"
            else evaluations.measure(range(federation.data.num_clients), ("test",), job_of)
        )
        tested = {client: own["test"] for client, own in metrics.items() if "test" in own}
        return evaluations.summary_of("test", tested) | federation.test_global(checkpoint["state_dict"])
