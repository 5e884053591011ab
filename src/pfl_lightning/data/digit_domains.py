"""Digits of several domains: images differ between clients, labels don't."""

from collections.abc import Callable

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.digits import Digits
from pfl_lightning.data.mnist import MNIST
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Classification


def blurred(x: Tensor) -> Tensor:
    """Return grey images with each pixel the mean of the 5x5 pixels around it.

    Args:
        x: images [n, 1, H, W], uint8.
    """
    return F.avg_pool2d(x.float(), 5, stride=1, padding=2).round().to(torch.uint8)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "mnist": lambda x: x,
    "digits": lambda x: x,
    "rotated": lambda x: x.rot90(1, (2, 3)),
    "inverted": lambda x: 255 - x,
    "blurred": blurred,
}
"""What each domain makes of images [n, 1, 28, 28]: scikit-learn's under ``digits``, MNIST's under all others."""


class DigitDomains(OwnedData):
    """Digits in five domains, 1x28x28, 10 classes; each client has images of one domain.

    The domains are MNIST as it is (``mnist``), scikit-learn's digits enlarged from 8x8 pixels (``digits``), and MNIST
    rotated by 90 degrees (``rotated``), with black for white (``inverted``), and with means of 5x5 pixels
    (``blurred``). Clients have the same class mix up to chance, and no image is at two clients. Clients are named by
    their domain, with a number if there are several.

    MNIST is read from ``root/MNIST/raw``. For domains in files of your own, such as Digits-Five or Office-Caltech in
    ``root/DOMAIN/CLASS/*.png``, take `FolderData`.

    Args:
        domains: domains of the clients.
        clients_per_domain: clients of each domain, at least 1.
        samples_per_client: images of a client before its split, at least 1; scikit-learn has 1,797 in all.
        **kwargs: settings of `FederatedDataModule`.

    Raises:
        MisconfigurationException: if a value is out of range, or a domain has too few images.

    Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, whose
    clients are five data sets of digits.
    """

    input_shape = (1, 28, 28)

    def __init__(
        self,
        domains: tuple[str, ...] = tuple(VIEWS),
        clients_per_domain: int = 1,
        samples_per_client: int = 600,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        counts = {"clients_per_domain": clients_per_domain, "samples_per_client": samples_per_client}
        check_integers("data.", **counts)
        for name, value in counts.items():
            if value < 1:
                raise MisconfigurationException(f"data.{name}={value} must be at least 1")
        if not domains or not set(domains) <= VIEWS.keys() or len(set(domains)) < len(domains):
            raise MisconfigurationException(
                f"data.domains={list(domains)} must be some of {', '.join(VIEWS)}, each once"
            )
        super().__init__(Classification(10), **kwargs)
        self.domains = tuple(domains)
        self.clients_per_domain = clients_per_domain
        self.samples_per_client = samples_per_client

    def prepare_data(self) -> None:
        """Check that MNIST's files exist; with ``download``, fetch missing files."""
        if set(self.domains) != {"digits"}:
            self._mnist().prepare_data()

    def load(self) -> Loaded:
        """Draw each client's images, and make them its domain's."""
        x, y, owners = [], [], []
        for of_digits in (False, True):
            domains = [domain for domain in self.domains if (domain == "digits") == of_digits]
            if not domains:
                continue
            images, labels = digits_enlarged() if of_digits else self._mnist().load()
            each, several = self.samples_per_client, self.clients_per_domain
            if (wanted := len(domains) * several * each) > len(labels):
                raise MisconfigurationException(
                    f"data.samples_per_client={each} and data.clients_per_domain={several} take {wanted} images for "
                    f"domains {', '.join(domains)}, which have {len(labels)}; take fewer"
                )
            # one permutation for all domains of MNIST: no image is at two clients, not even in another form
            drawn = np.random.default_rng(derive_seed(self.seed, "domains")).permutation(len(labels))[:wanted]
            for number, rows in enumerate(torch.split(torch.from_numpy(drawn), each)):
                domain = domains[number // several]
                name = f"{domain} {number % several + 1}" if several > 1 else domain
                x.append(VIEWS[domain](images[rows]))
                y.append(labels[rows])
                owners += [name] * each
        return Loaded(torch.cat(x), torch.cat(y), owners)

    def _mnist(self) -> MNIST:
        return MNIST(root=self.root, download=self.download)


def digits_enlarged() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as images [1797, 1, 28, 28], uint8, and their labels."""
    x, y = Digits().load()
    large = F.interpolate(x.float(), (28, 28), mode="bilinear", align_corners=False)
    return large.round().clamp(0, 255).to(torch.uint8), y
