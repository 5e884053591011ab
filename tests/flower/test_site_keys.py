"""Keys by which sites of secure sums know each other."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.flower.apps import site_keys_in


def written(folder, name, key):
    """Writes a key pair as ``ssh-keygen`` does; returns the public key."""
    (folder / name).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def folder(tmp_path):
    keys = {
        name: written(tmp_path, name, ec.generate_private_key(ec.SECP384R1())) for name in ("kiel", "ulm", "bremen")
    }
    (tmp_path / "known.yaml").write_text(f"{keys['kiel']}: 0 3\n{keys['ulm']}: Ulm\n")
    return tmp_path


def node(folder, **settings):
    given = {"sum-key": str(folder / "kiel"), "sum-keys": str(folder / "known.yaml")} | settings
    return site_keys_in({name: value for name, value in given.items() if value}, ["Kiel", "Ulm", "Bremen", "Husum"])


def test_a_site_knows_the_signatures_of_the_others(folder):
    kiel, ulm = node(folder), node(folder, **{"sum-key": str(folder / "ulm")})
    session, signature = bytes(32), ulm.sign(1, bytes(32))
    assert kiel.signed(1, session, signature) and kiel.signed(3, session, kiel.sign(3, session))
    # of another client or session, by another site, of a client in nobody's list, and no signature
    assert not any(
        kiel.signed(*wrong)
        for wrong in (
            (0, session, signature),
            (1, bytes(31) + b"1", signature),
            (1, session, kiel.sign(1, session)),
            (2, session, signature),
            (1, session, ""),
            (1, session, "zz"),
        )
    )


def test_a_site_without_the_settings_has_no_keys(folder):
    assert node(folder, **{"sum-key": "", "sum-keys": ""}) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sum-keys": ""}, "go together"),
        ({"sum-key": ""}, "go together"),
        ({"sum-key": "nowhere"}, "sum-key='nowhere' can't be read"),
        ({"sum-keys": "nowhere"}, "sum-keys='nowhere' can't be read"),
        ({"sum-key": "{folder}/known.yaml"}, "known.yaml' can't be read"),
        ({"sum-key": "{folder}/bremen"}, "belongs to no public key of sum-keys"),
        ({"sum-key": "{folder}/other"}, "is no ECDSA key"),
    ],
)
def test_wrong_keys_are_refused_in_a_sentence(settings, said, folder):
    written(folder, "other", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(MisconfigurationException, match=said):
        node(folder, **{name: value.format(folder=folder) for name, value in settings.items()})
