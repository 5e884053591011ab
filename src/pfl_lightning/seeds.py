"""Seeds as functions of (seed, round, client), never of rank, worker or order."""

import hashlib


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed for a key, the same on every machine: ``derive_seed(seed, "train", round, client)``.

    >>> derive_seed(0, "train", 3, 7) == derive_seed(0, "train", 3, 7) != derive_seed(0, "train", 7, 3)
    True

    Args:
        *key: integers and texts; the order counts.
    """
    # Python's own hash of texts differs from process to process
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    # 63 bits, since torch's generators take signed integers of 64
    return int.from_bytes(digest, "big") >> 1
