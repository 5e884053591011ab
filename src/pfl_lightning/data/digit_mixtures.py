"""Digits under several codes: clients' labels are mixtures of distributions."""

import math

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.digits import Digits
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Classification

CLASSES, IMAGES = 10, 1797


class DigitMixtures(OwnedData):
    r"""scikit-learn's digits, 1x8x8, with classes numbered by codes; each client mixes the codes.

    .. math:: y = (d + c) \bmod 10, \qquad P(c) = \pi_{kc}, \qquad \pi_k \sim \mathrm{Dir}(\alpha, \ldots, \alpha)

    for a digit d under code c, from 0 to C - 1, at client k. No image tells its code, so that the best prediction for
    client k is right for a share :math:`\max_c \pi_{kc}` of its images. No image is at two clients, which are named
    ``01``, ``02`` and so on. Codes and shares follow ``data.seed``.

    Args:
        codes: C, from 1 to 10.
        alpha: :math:`\alpha`, above 0; small values give most clients one code.
        clients: clients of the data, from 1 to 599; they have equally many images.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if a value is out of range.

    Source: the mixtures of Marfoq et al., 2021, section 2 (https://arxiv.org/abs/2108.10252), for digits.
    """

    input_shape = Digits.input_shape

    def __init__(self, codes: int = 3, alpha: float = 0.4, clients: int = 20, **kwargs: Unpack[DataSettings]) -> None:
        check_integers("data.", codes=codes, clients=clients)
        if not 1 <= codes <= CLASSES:
            raise MisconfigurationException(f"data.codes={codes} must be from 1 to {CLASSES}, such as 3")
        # a client needs three images, to train, validate and test on
        if not 1 <= clients <= IMAGES // 3:
            raise MisconfigurationException(f"data.clients={clients} must be from 1 to {IMAGES // 3}, such as 20")
        if not 0 < alpha < math.inf:
            raise MisconfigurationException(f"data.alpha={alpha} must be above 0 and finite, such as 0.4")
        super().__init__(Classification(CLASSES), **kwargs)
        self.codes, self.alpha, self.clients = codes, alpha, clients

    def load(self) -> Loaded:
        """Deal out the digits, and write each under a code drawn for its client."""
        x, y = Digits().load()
        rng = np.random.default_rng(derive_seed(self.seed, "mixtures"))
        each = IMAGES // self.clients
        rows = torch.from_numpy(rng.permutation(IMAGES)[: each * self.clients])
        shares = rng.dirichlet([self.alpha] * self.codes, self.clients)
        drawn = np.concatenate([rng.choice(self.codes, each, p=own) for own in shares])
        names = [f"{number:02}" for number in range(1, self.clients + 1) for _ in range(each)]
        return Loaded(x[rows], (y[rows] + torch.from_numpy(drawn)) % CLASSES, names)
