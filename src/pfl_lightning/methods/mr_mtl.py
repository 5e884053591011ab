"""MR-MTL: mean-regularised multi-task learning, in which every client's own model stays near the mean of all models."""

from pfl_lightning.methods.fedamp import CloudProx
from pfl_lightning.server import Aggregator, WeightedAverage


class MRMTL(CloudProx):
    r"""Keeps every client's model, and trains near the mean :math:`\bar w` of the clients' models.

    .. math:: \min_{w_k} \; F_k(w_k) + \frac\lambda2 \lVert w_k - \bar w \rVert^2, \qquad \bar w = \sum_k p_k w_k

    Training continues from the client's own :math:`w_k`, by which the client is evaluated; :math:`\bar w` is the centre
    of the penalty alone, and the global model in the record. All start from the common initial model. Only parameters
    travel and are penalised: buffers, such as BatchNorm's running statistics, stay with each client.

    The official code adds the clients' weighted changes to :math:`\bar w`, and has all clients in each round: the same
    sums. Where clients stay away, the mean here is over the round's clients alone, as in FL4Health. FL4Health starts
    each client from random weights of its own. `Ditto` differs by a global model with a training of its own. A step of
    length :math:`\eta` is stable for :math:`\eta\lambda < 2`.

    Source: Liu et al., 2022 (https://arxiv.org/abs/2206.07902); kenziyuliu/private-cross-silo-fl@f16ff76.

    Args:
        mu: :math:`\lambda`, at least 0; 0 is `Local` bit for bit, and a large one `FedAvg`-like. The official code's
            scripts have 0.001, which is `Local` to a tenth of a point, and its README sweeps 0.1 to 3. The default was
            chosen on two data sets (docs/results.md, "Defaults").
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative.
    """

    client_level = True
    example_level = True

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of the clients' models, weighted by their numbers of training samples."""
        return WeightedAverage()
