"""Test the models of the last and of the best validation round at the end of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pfl_lightning.client.module import payloads_of
from pfl_lightning.data import Split
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.engines import ClientMetrics, ClientState, Evaluated, Job
from pfl_lightning.engines.client_metrics import by_split
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.checkpoint import saved_job, saved_state
from pfl_lightning.federation.evaluation import split_of
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.joining import Joined, join
from pfl_lightning.messages import Message, pooled


@dataclass(frozen=True)
class FinalTest:
    """The results of the test at the end of a run.

    Args:
        metrics: the last round's summaries over clients, and the server's model's ``test/global_METRIC``.
        clients: each client's metrics of the last round, as ``test/METRIC``, by id.
        selected: the best checkpoint's round as ``round``, and the test metrics of its models; empty if that is the
            last round, was tested when it was made, or isn't kept.
        new: the results of new clients; empty if the data have none.
    """

    metrics: dict[str, float]
    clients: dict[int, dict[str, float]]
    selected: dict[str, float]
    new: Joined = Joined()  # noqa: RUF009 - immutable


def final_test(federation: Federation, best: str | None) -> FinalTest:
    """Test all clients and the server's model, then let new clients join for one round.

    Args:
        federation: the federation after its last round.
        best: the path of the best round's checkpoint, if there is one.
    """
    evaluations, clients = federation.evaluations, range(federation.data.num_clients)
    tested = evaluations.results.get("test", ClientMetrics())
    # With test_every_round, the last round's evaluation has covered the test splits already, unless of a sample.
    if any(client not in tested for client, size in federation.sizes(clients, "test").items() if size):
        evaluations.evaluate(clients, ("test",))
    results = {name: values for name, values in evaluations.results.items() if split_of(name) == "test"}
    central = {name: value for name, value in federation.metrics.items() if name.startswith("test/global_")}
    return FinalTest(
        metrics=evaluations.summary_of("test", results.get("test", ClientMetrics()))
        | (central or federation.test_global()),
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
    """Return the best checkpoint's round and test metrics; empty if already known or if no checkpoint is kept."""
    if best is None:
        return {}
    # Memory-mapped, or all clients' states would be in memory twice.
    checkpoint = read_checkpoint(best)
    saved = checkpoint["federation"]
    clients = federation.data.num_clients
    # In the record are the metrics of the round's own evaluation, which may be of a sample of the clients.
    recorded = saved["settings"].get("trainer.test_every_round")
    if saved["round"] == federation.round or (recorded and federation.options.evaluation_size(clients) == clients):
        return {}
    return {"round": saved["round"], **metrics_at(federation, checkpoint)}


def metrics_at(federation: Federation, checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """Return the summarised test metrics of a checkpoint's models, without using or changing the federation's state.

    Args:
        federation: the federation that runs the clients.
        checkpoint: the loaded checkpoint.
    """
    saved, evaluations = checkpoint["federation"], federation.evaluations
    payloads = pooled(payloads_of(saved))

    def job_of(client: int, splits: tuple[Split, ...], received: Any = None) -> Job:
        return saved_job(
            saved,
            client,
            federation.architecture_of(client),
            payloads[client],
            federation.data.client(client),
            splits,
        )

    def received_of(client: int) -> tuple[ClientState, Message]:
        return saved_state(saved, client, federation.architecture_of(client)), payloads[client]

    # Samples may drift between clients, so test on those that the clients held in the checkpoint's round.
    with federation.data.at_round(max(1, saved["round"])):
        metrics = (
            [Evaluated.of(client, own) for client, own in saved["after"].items()]
            if federation.options.evaluate == "after"
            # at sites, others may have joined since
            else evaluations.measure(range(len(saved["sizes"])), ("test",), job_of, received_of)
        )
        tested = by_split(metrics).get("test", ClientMetrics())
        return evaluations.summary_of("test", tested) | federation.test_global(checkpoint["state_dict"])
