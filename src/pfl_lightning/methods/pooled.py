"""Pooled: one model, trained on the samples of all clients in one place."""

from pfl_lightning.methods.fedavg import FedAvg


class Pooled(FedAvg):
    """Trains one model on all clients' training samples, shuffled together; each client evaluates it on its own.

    It is no federated learning, but the reference above it: the model that clients would have if they gave their
    samples away. A round is ``trainer.local_epochs`` passes over all samples, or ``trainer.local_steps`` batches, by
    the first client for all, whatever ``trainer.clients_per_round`` says. With as many ``local_epochs`` it takes about
    as many steps as FedAvg in all; with as many ``local_steps``, FedAvg with M clients takes M times as many. For an
    optimizer whose moments live on, set ``optimizer_lifetime=run``. Deployments, secure sums and privacy guarantees
    refuse it. Takes the arguments of `FedAvg`.
    """

    pools = True
