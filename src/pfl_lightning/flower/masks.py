"""Mask vectors of integers so that masks cancel in the sum, and share secrets for removing the other masks.

Each pair of clients agrees on a pairwise mask: one client adds the mask, the other subtracts it. Each client also adds
an own mask, made from a seed. Once vectors have arrived, the remaining clients reveal shares of two kinds of secrets:
the seed of each client with a vector, and the masking key of each client without, whose pairwise masks would otherwise
stay in the sum. Nobody reveals both for one client, so that a late vector stays hidden. Masks are derived from all that
decides a client's vector too, so that they cancel among clients that were told the same alone. Source: Bonawitz et al.,
2017 (https://doi.org/10.1145/3133956.3133982), with masks between all pairs of clients.

Keys are X25519 keys, expanded by HKDF with SHA-256; masks are streams of AES-256 in counter mode; shares are made by
Shamir's scheme in GF(2^128) and sealed by AES-256-GCM. Flower's own helpers aren't used: ``pseudo_rand_gen`` seeds
NumPy's Mersenne Twister with 32 bits, few enough to try all, and never draws the ring's last number.
"""

import hashlib
import hmac
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import ConfigRecord
from torch import Tensor

from pfl_lightning.flower.journal import Journal
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.template import Refused
from pfl_lightning.privacy.secure_sum import SecureSum

if TYPE_CHECKING:
    from flwr.app import RecordDict

SECRET, BLOCK, NONCE = 32, 16, 12
"""Bytes of a key, a seed or a hash; of a block in Shamir's scheme; and of a nonce."""
MOST_CLIENTS = 1024
"""Largest number of clients of a sum: each pair has a mask, and the journal has all their ids."""
UNSIGNED: dict[torch.dtype, Any] = {torch.int32: np.dtype("<u4"), torch.int64: np.dtype("<u8")}
"""Unsigned types for computing in rings, with defined overflow, by the type of vector."""

Numbers: TypeAlias = Any
"""NumPy array of unsigned integers, numbers of a ring."""
Keys: TypeAlias = Mapping[int, bytes]
"""Public keys of clients by id: the key for sealing, then the key for masks."""
ALIKE = ("run", "round", "lr_factor", "requested", "withheld", "once", "sum", "most", "agreement")
"""What a server tells every client of a sum alike, beside the payload: all of a message that decides a client's vector
but the names of its own states."""


def new_secret() -> bytes:
    """Return a new secret from the operating system's random source."""
    return os.urandom(SECRET)


def public(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def commitment(seed: bytes) -> bytes:
    """Return a hash of a seed, for checking a recovered seed against."""
    return hashlib.sha256(b"pfl_lightning seed" + seed).digest()


def session(round: int, keys: Keys) -> bytes:
    """Return a hash of a round and all keys of the round.

    Masks depend on this hash: if a server shows different keys to different clients, masks don't cancel and the sum
    is random.

    Args:
        round: number of the round, from 0.
        keys: public keys of all clients of the round.
    """
    hashed = hashlib.sha256(f"pfl_lightning round {round}".encode())
    for client in sorted(keys):
        hashed.update(f" {client} ".encode() + keys[client])
    return hashed.digest()


def bound(context: bytes, row: Mapping[str, Any], payload: Any) -> bytes:
    """Return a hash of a session and of what a client is told about its work, from which masks are derived.

    A server that has told clients different things gets a sum in which their masks stay: random numbers. Otherwise it
    could have, say, all clients but one learn at the rate 0, and know their updates.

    Args:
        context: hash from `session`.
        row: the server's settings of the client's work, by name.
        payload: the received payload.
    """
    alike = {name: row[name] for name in ALIKE}
    return hashlib.sha256(context + fingerprint(alike) + fingerprint(payload)).digest()


def fingerprint(record: Any) -> bytes:
    """Return a hash of a record with its names, types and shapes, 32 bytes.

    >>> fingerprint({"a": 1}) == fingerprint({"a": 1}) != fingerprint({"a": 1.0})
    True

    Args:
        record: tensors, numbers and texts in dicts, lists and tuples.
    """
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        # each piece says its length first, so that no two records give the same bytes
        if isinstance(part, Tensor):
            data = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            hashed.update(f"tensor {part.dtype} {tuple(part.shape)} {data.nbytes} ".encode())
            hashed.update(data.data)
        elif isinstance(part, Mapping):
            hashed.update(f"dict {len(part)} ".encode())
            for key in sorted(part, key=str):
                add(key)
                add(part[key])
        elif isinstance(part, list | tuple):
            hashed.update(f"list {len(part)} ".encode())
            for each in part:
                add(each)
        else:
            text = f"{type(part).__name__} {part!r}"
            hashed.update(f"{len(text)} {text} ".encode())

    add(record)
    return hashed.digest()


def expanded(secret: bytes, purpose: str, context: bytes) -> bytes:
    """Return a key for one purpose and one session."""
    return HKDF(SHA256(), SECRET, salt=None, info=f"pfl_lightning {purpose} ".encode() + context).derive(secret)


def agreed(secret: bytes, other: bytes, purpose: str, context: bytes) -> bytes:
    """Return the key of a pair of clients, from one client's secret key and the other client's public key.

    Raises:
        Refused: if the other client's public key is invalid.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise Refused("a client's public key is none.") from error
    return expanded(shared, purpose, context)


def stream(key: bytes, length: int, dtype: torch.dtype) -> Numbers:
    """Return pseudorandom numbers of the ring from a key ``[length]``."""
    # a key is for one purpose and one session, so that a fixed counter never repeats under a key
    kind = UNSIGNED[dtype]
    # the encryption of zeros is the bare stream
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(BLOCK))).encryptor()
    return np.frombuffer(encryptor.update(bytes(length * kind.itemsize)), dtype=kind)


def pairwise(secret: bytes, own: int, others: Iterable[int], keys: Keys, context: bytes, like: Tensor) -> Numbers:
    """Return the sum of a client's pairwise masks; the other client of each pair has the negative mask.

    Args:
        secret: the client's secret key for masks.
        own: the client's id.
        others: ids of the other clients.
        keys: public keys of all clients.
        context: hash from `bound`.
        like: a vector ``[length]`` with the length and type for masks.
    """
    total = np.zeros(len(like), dtype=UNSIGNED[like.dtype])
    for other in others:
        mask = stream(agreed(secret, keys[other][SECRET:], "mask", context), len(like), like.dtype)
        # the order of ids decides the sign, as both clients of a pair have to choose different ones without asking
        total = total + mask if own < other else total - mask
    return total


def ring(vector: Tensor) -> Numbers:
    """Return a vector as numbers of the ring."""
    return vector.numpy().astype(UNSIGNED[vector.dtype].str.replace("u", "i")).view(UNSIGNED[vector.dtype])


def signed(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """Return numbers of the ring as a vector."""
    # torch knows the machine's own order of bytes alone
    native = numbers.astype(numbers.dtype.newbyteorder("="))
    return torch.from_numpy(native.view(f"i{native.itemsize}").copy()).to(dtype)


def shares_of(secret: bytes, threshold: int, clients: int) -> list[bytes]:
    """Return shares of a secret, one a client; as many as the threshold recover the secret, and fewer tell nothing.

    Args:
        secret: bytes; the length is a multiple of 16.
        threshold: number of shares for recovering the secret, at least 2.
        clients: number of shares.
    """
    blocks = [secret[start : start + BLOCK] for start in range(0, len(secret), BLOCK)]
    splits = [Shamir.split(threshold, clients, block, ssss=False) for block in blocks]
    return [b"".join(split[index][1] for split in splits) for index in range(clients)]


def recovered(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of some shares.

    Args:
        shares: shares by the holder's position, from 1; at least as many as the threshold.
        threshold: number of shares for recovering the secret.
    """
    # interpolation wants exactly as many points as the polynomial has coefficients
    chosen = sorted(shares.items())[:threshold]
    starts = range(0, len(chosen[0][1]), BLOCK)
    return b"".join(
        Shamir.combine([(index, share[start : start + BLOCK]) for index, share in chosen], ssss=False)
        for start in starts
    )


class Party:
    """Takes a client's part in the sum of a round, with secrets in the memory of the client's site alone.

    A round has five steps, each of which a client makes once: `offer` keys, `share` secrets, `begin` a training, `hide`
    a vector, and `reveal` shares, after which nothing of the round is left but a line in the journal.

    Args:
        client: the client's id.
        memory: the node's memory, kept by Flower while the SuperNode runs.
        settings: settings of the sum in the site's own configuration.
        journal: the sums that the client has helped with.
        sites: the keys by which sites know each other; None believes the server's word for all keys.
    """

    def __init__(
        self,
        client: int,
        memory: "RecordDict",
        settings: SecureSum,
        journal: Journal,
        sites: SiteKeys | None = None,
    ) -> None:
        self.client, self.memory, self.settings, self.journal, self.sites = client, memory, settings, journal, sites
        self.name = f"secure_sum/{client}"

    def offer(self, round: int) -> tuple[bytes, bytes]:
        """Begin a round with new secrets; return the public keys and the commitment to the own mask's seed."""
        secrets = {name: new_secret() for name in ("sealing", "masking", "seed")}
        self.memory[self.name] = ConfigRecord({"round": round, "step": "offered", **secrets})
        return public(secrets["sealing"]) + public(secrets["masking"]), commitment(secrets["seed"])

    def share(self, round: int, keys: Keys) -> dict[int, bytes]:
        """Return sealed shares of the masking key and the seed, one for each other client.

        Args:
            round: the round's number.
            keys: public keys of all clients of the round, by id.

        Raises:
            Refused: if the round is at another step, keys are fewer than two, too many or not all different, or this
                client's key is missing.
        """
        state = self._at(round, "offered")
        own = public(state["sealing"]) + public(state["masking"])
        # the same key twice would be one client under two names
        if keys.get(self.client) != own or len(set(keys.values())) < len(keys) or not 2 <= len(keys) <= MOST_CLIENTS:
            raise Refused(
                f"client {self.client} is shown {len(keys)} keys, not all different, not with its own, or above "
                f"{MOST_CLIENTS}."
            )
        context, order = session(round, keys), sorted(keys)
        threshold = self.settings.least(len(keys))
        shares = shares_of(state["masking"] + state["seed"], threshold, len(keys))
        sealed, owned = {}, b""
        for other, share in zip(order, shares, strict=True):
            if other == self.client:
                owned = share
                continue
            key = agreed(state["sealing"], keys[other][:SECRET], "seal", context)
            # both clients of a pair seal under one key, so that a counter could repeat
            nonce = os.urandom(NONCE)
            sealed[other] = nonce + AESGCM(key).encrypt(nonce, share, f"{self.client} to {other}".encode() + context)
        self._go_on(state, step="shared", share=owned, clients=order, keys=[keys[client] for client in order])
        return sealed

    def signature(self, round: int) -> str:
        """Return the client's signature of all keys of the round, hexadecimal; empty without keys of sites.

        Args:
            round: the round's number.

        Raises:
            Refused: if the round is at another step.
        """
        # of the keys that all others show too, this client's new ones among them: none is of an earlier session
        return "" if self.sites is None else self.sites.sign(self.client, self._session(self._at(round, "shared")))

    def _session(self, state: Mapping[str, Any]) -> bytes:
        """Return the session's hash."""
        return session(state["round"], dict(zip(state["clients"], state["keys"], strict=True)))

    def _check_signatures(self, context: bytes, clients: Collection[int], summed: str, signed: str) -> None:
        """Refuse keys that the sites of the clients haven't signed.

        Args:
            context: hash from `session`.
            clients: ids of the clients with keys.
            summed: ids of the clients with shared secrets, apart by spaces.
            signed: signatures by client, as the server tells them: ``3:HEX`` apart by spaces.

        Raises:
            Refused: if a client with shared secrets has no signature, or too many others have none.
        """
        if self.sites is None:
            return
        signatures = dict(pair.split(":", 1) for pair in signed.split() if ":" in pair)
        without = {
            client
            for client in set(clients) - {self.client}
            if not self.sites.signed(client, context, signatures.get(str(client), ""))
        }
        # A client may be gone after its offer. Its keys may as well be the server's, which then has its shares of all
        # secrets. Each other client reveals a share of one of a client's two secrets: to recover both, a server needs
        # as many shares of its own.
        spare = 2 * self.settings.least(len(clients)) - len(clients)
        if set(map(str, without)) & set(summed.split()) or len(without) >= spare:
            raise Refused(
                f"client {self.client} has no signature of clients {ids(without)} by a key of sum-keys; give all sites "
                "a sum-key, and the same list of all sites' public keys."
            )

    def begin(self, round: int, row: Mapping[str, Any], payload: Any) -> None:
        """Bind the masks to what the client is told about its training; refuse a sum that the journal forbids.

        Args:
            round: the round's number.
            row: the server's settings of the client's work, by name.
            payload: the received payload.

        Raises:
            Refused: if the round is at another step, or keys aren't the sites' own.
            Again: if the client has helped with another sum of the model or the round.
        """
        # A question that comes twice in a session, as an answer was lost, ends here: a second training would give
        # another vector under the same masks, and so the difference of the two. The first vector isn't kept to be sent
        # again: a sum needs no one client, and nobody takes off the own mask of a client whose vector seems lost. A
        # server that has restarted asks in a new session, with new keys and masks.
        state = self._at(round, "shared")
        context = self._session(state)
        self._check_signatures(context, state["clients"], row["sum"], row["signatures"])
        # the server chooses the name
        run, model = fingerprint(row["run"]).hex()[:32], fingerprint(payload).hex()[:32]
        self.journal.check(self.client, run, round, model, ids(state["clients"]))
        digest = bound(context, row, payload)
        self._go_on(state, step="begun", told=digest, run=run, model=model)

    def hide(self, round: int, vector: Tensor, clients: Collection[int]) -> Tensor:
        """Return a vector with the client's masks, which looks random without the secrets.

        Args:
            round: the round's number.
            vector: int32 or int64 ``[length]``.
            clients: ids of the clients with shared secrets; masks are agreed with each.

        Raises:
            Refused: if the round is at another step, or these clients are too few.
        """
        state = self._at(round, "begun")
        keys = dict(zip(state["clients"], state["keys"], strict=True))
        self._check(clients, keys, len(keys), "have shared their secrets")
        context = state["told"]
        mask = stream(expanded(state["seed"], "own mask", context), len(vector), vector.dtype)
        others = [client for client in clients if client != self.client]
        hidden = ring(vector) + mask + pairwise(state["masking"], self.client, others, keys, context, vector)
        self._go_on(state, step="hidden", hidden=sorted(clients))
        return signed(hidden, vector.dtype)

    def reveal(self, round: int, sealed: Mapping[int, bytes], sent: Collection[int]) -> dict[int, bytes]:
        """Return a share of each sender's seed and of each dropped client's masking key.

        Both secrets of one client would remove all masks from the client's vector, so that no client reveals both.

        Args:
            round: the round's number.
            sealed: shares sealed for this client, by the id of the sender.
            sent: ids of the clients with a vector at the server.

        Raises:
            Refused: if the round is at another step, vectors are too few, or a share can't be opened.
            Again: if the client has helped with another sum of the model or the round.
        """
        state = self._at(round, "hidden")
        hidden = set(state["hidden"])
        self._check(sent, hidden, len(state["clients"]), "have sent a vector")
        keys = dict(zip(state["clients"], state["keys"], strict=True))
        context, shares = session(round, keys), {self.client: state["share"]}
        # before anything is told, as nothing is told twice
        del self.memory[self.name]
        for other in hidden - {self.client}:
            box = sealed.get(other, b"")
            key = agreed(state["sealing"], keys[other][:SECRET], "seal", context)
            try:
                text = f"{other} to {self.client}".encode() + context
                shares[other] = AESGCM(key).decrypt(box[:NONCE], box[NONCE:], text)
            except (InvalidTag, ValueError) as error:
                raise Refused(f"client {self.client} can't open the share of client {other}.") from error
        # on the disk before anything is told: a site that is killed now must know of the sum afterwards
        cohort, model = ids(state["clients"]), state["model"]
        self.journal.note(self.client, state["run"], round, model, cohort, ids(sent))
        return {k: share[SECRET:] if k in sent else share[:SECRET] for k, share in sorted(shares.items())}

    def _check(self, clients: Collection[int], among: Collection[int], parties: int, what: str) -> None:
        """Check the clients in a server's message: enough, all known, and this client among the ids."""
        # by the site's own threshold: a server that could choose it would ask for the sum of one
        least = self.settings.least(parties)
        if not {self.client} <= set(clients) <= set(among) or len(set(clients)) < least:
            raise Refused(
                f"client {self.client} is told that clients {' '.join(map(str, sorted(clients)))} {what}, which has to "
                f"be {least} of {parties} at least, with itself; nothing of the sum is told."
            )

    def _at(self, round: int, step: str) -> MutableMapping[str, Any]:
        """Return the client's secrets in a round, if the round is at a step."""
        state: MutableMapping[str, Any] | None = self.memory.config_records.get(self.name)
        if state is None or state["round"] != round or state["step"] != step:
            raise Refused(
                f"client {self.client} is asked for what follows {step!r} in round {round + 1}, where its site "
                f"{'has forgotten the round' if state is None else f'''is at {state['step']!r}'''}."
            )
        return state

    def _go_on(self, state: Mapping[str, Any], **further: Any) -> None:
        self.memory[self.name] = ConfigRecord({**state, **further})


def unmasked(
    hidden: Mapping[int, Tensor],
    shares: Mapping[int, Mapping[int, bytes]],
    keys: Keys,
    commitments: Mapping[int, bytes],
    clients: Collection[int],
    threshold: int,
    context: bytes,
) -> Tensor:
    """Return the sum of vectors, from masked vectors and shares of secrets ``[length]``.

    Args:
        hidden: masked vectors ``[length]`` by client.
        shares: revealed shares, by the revealing client and by the client of the secret.
        keys: public keys of all clients of the round.
        commitments: hashes of the clients' seeds.
        clients: ids of the clients with shared secrets; masks are between these.
        threshold: number of shares for recovering a secret.
        context: hash from `bound`, of what all clients were told.

    Raises:
        Refused: if shares are too few, or don't recover a secret.
    """
    position = {client: index + 1 for index, client in enumerate(sorted(keys))}
    first = next(iter(hidden.values()))
    if len(shares) < threshold:
        raise Refused(f"{len(shares)} clients have revealed shares, of {threshold} that are needed.")
    total = sum((ring(vector) for vector in hidden.values()), np.zeros(len(first), dtype=UNSIGNED[first.dtype]))
    for client in sorted(clients):
        # checked, as a wrong share would else give a sum that only looks random
        secret = recovered({position[holder]: own[client] for holder, own in shares.items()}, threshold)
        if client in hidden:
            right = hmac.compare_digest(commitment(secret), commitments[client])
            mask = stream(expanded(secret, "own mask", context), len(first), first.dtype)
        else:
            right = hmac.compare_digest(public(secret), keys[client][SECRET:])
            # the dropped client's own masks never arrived: the sum has the negative masks of the other clients in pairs
            mask = -pairwise(secret, client, sorted(hidden), keys, context, first)
        if not right:
            raise Refused(f"the shares of client {client} don't give its secret back: a client has sent a wrong one.")
        total = total - mask
    return signed(total, first.dtype)


def ids(clients: Iterable[int]) -> str:
    """Return clients' ids as a text with spaces, ascending."""
    # one order everywhere, so that server and sites name the same clients by the same text
    return " ".join(map(str, sorted(clients)))
