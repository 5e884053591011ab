"""Seeds and cohorts as functions of (seed, round, client), never of rank, worker or order."""

import hashlib
import random


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from a key, the same on every machine: ``derive_seed(seed, "train", round, client)``.

    >>> derive_seed(0, "train", 3, 7) == derive_seed(0, "train", 3, 7) != derive_seed(0, "train", 7, 3)
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_cohort(clients: list[int], size: int, seed: int, round: int) -> list[int]:
    """The clients that take part in a round: ``size`` of ``clients``, uniform, without replacement, sorted.

    >>> draw_cohort([0, 1, 2], 3, seed=0, round=0)
    [0, 1, 2]
    """
    return sorted(random.Random(derive_seed(seed, "cohort", round)).sample(clients, size))
