"""Keys by which sites of secure sums know each other, so that a server can invent no clients and replace no keys."""

from collections.abc import Collection, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException


class SiteKeys:
    """A site's private key, and the public keys of all sites by client, which its operator has got from the others.

    Args:
        path: the private key, as of ``ssh-keygen -t ecdsa``, such as the SuperNode's.
        sites: clients of each site, by its public key in PEM.

    Raises:
        MisconfigurationException: if the file has no such key, or its public key is none of ``sites``.
    """

    def __init__(self, path: Path, sites: Mapping[str, Collection[int | str]]) -> None:
        try:
            private = load_ssh_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise MisconfigurationException(
                f"sum-key={str(path)!r} can't be read ({' '.join(str(error).split())[:200]}); give the private key "
                "without a passphrase of the SuperNode, as `ssh-keygen -t ecdsa -b 384` makes it."
            ) from error
        if not isinstance(private, EllipticCurvePrivateKey):
            raise MisconfigurationException(
                f"sum-key={str(path)!r} is no ECDSA key, as `ssh-keygen -t ecdsa -b 384` makes it."
            )
        if private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode() not in sites:
            raise MisconfigurationException(
                f"sum-key={str(path)!r} belongs to no public key of sum-keys; give a list with all sites' keys."
            )
        self._own = private
        self._keys = {client: load_pem_public_key(key.encode()) for key, clients in sites.items() for client in clients}

    def sign(self, client: int, session: bytes) -> str:
        """Return a client's signature of a session's keys, hexadecimal.

        Args:
            client: the client's id.
            session: hash of a round and the keys of all its clients.
        """
        return self._own.sign(statement(client, session), ECDSA(SHA256())).hex()

    def signed(self, client: int, session: bytes, signature: str) -> bool:
        """Return whether a signature of a session's keys is by the site of a client.

        Args:
            client: the client's id.
            session: hash of a round and the keys of all its clients.
            signature: hexadecimal, as from anybody.
        """
        key = self._keys.get(client)
        if not isinstance(key, EllipticCurvePublicKey):
            return False
        try:
            key.verify(bytes.fromhex(signature), statement(client, session), ECDSA(SHA256()))
        except (InvalidSignature, ValueError):
            return False
        return True


def statement(client: int, session: bytes) -> bytes:
    """Return the bytes that a site signs for a client."""
    # the key is the SuperNode's, which signs other things for Flower
    return f"pfl_lightning secure sum of client {client}: ".encode() + session
