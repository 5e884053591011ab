"""Masks and shares, without a network."""

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flwr.app import RecordDict

from pfl_lightning.flower import journal
from pfl_lightning.flower.journal import Again, Journal
from pfl_lightning.flower.masks import (
    ALIKE,
    Party,
    bound,
    expanded,
    fingerprint,
    recovered,
    ring,
    session,
    shares_of,
    signed,
    stream,
    unmasked,
)
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.template import Refused
from pfl_lightning.privacy.secure_sum import KEYS_BYTES, SEALED_BYTES, SecureSum

ROUND, CLIENTS = 4, (1, 3, 4, 9, 12)
ROW, PAYLOAD = dict.fromkeys(ALIKE, "") | {"signatures": ""}, {"weights": {"w": torch.ones(3)}}
NARROW, WIDE = torch.int32, torch.int64


def vector(client, dtype=NARROW, size=50):
    drawn = torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(client))
    return drawn.to(dtype)


@pytest.fixture(autouse=True)
def _folders(tmp_path_factory):
    Round.folder = tmp_path_factory.mktemp


class Round:
    """A round of all clients, step by step; clients have the folders of an earlier round, or new ones."""

    def __init__(self, clients=CLIENTS, dtype=NARROW, folders=None, sites=None):
        self.clients, self.settings = clients, SecureSum()
        self.folders = folders or self.folder("sites")
        self.parties = {
            client: Party(
                client, RecordDict(), self.settings, Journal(self.folders / str(client)), (sites or {}).get(client)
            )
            for client in clients
        }
        offers = {client: party.offer(ROUND) for client, party in self.parties.items()}
        self.keys = {client: offer[0] for client, offer in offers.items()}
        self.commitments = {client: offer[1] for client, offer in offers.items()}
        self.dtype = dtype

    def share(self):
        self.sealed = {client: party.share(ROUND, self.keys) for client, party in self.parties.items()}
        return self

    def begin(self, clients, payload=PAYLOAD, row=ROW):
        for client in clients:
            self.parties[client].begin(ROUND, row, payload)
        return self

    def hide(self, clients):
        self.begin([client for client in clients if step_of(self.parties[client]) == "shared"])
        self.hidden = {
            client: self.parties[client].hide(ROUND, vector(client, self.dtype), self.clients) for client in clients
        }
        return self

    def sealed_for(self, client):
        return {other: boxes[client] for other, boxes in self.sealed.items() if other != client}

    def reveal(self, clients):
        self.shares = {
            client: self.parties[client].reveal(ROUND, self.sealed_for(client), list(self.hidden)) for client in clients
        }
        return self

    def sum(self):
        threshold = self.settings.least(len(self.clients))
        told = bound(session(ROUND, self.keys), ROW, PAYLOAD)
        return unmasked(self.hidden, self.shares, self.keys, self.commitments, self.clients, threshold, told)


def step_of(party):
    return party.memory[party.name]["step"]


def expected(clients, dtype=NARROW):
    return torch.stack([vector(client, dtype) for client in clients]).sum(0).to(dtype)


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
@pytest.mark.parametrize("sent", [CLIENTS, CLIENTS[1:], (1, 4, 9, 12)], ids=len)
@pytest.mark.parametrize("revealing", [slice(None), slice(4)], ids=["all", "enough"])
def test_the_sum_is_that_of_the_vectors_whoever_drops_out(dtype, sent, revealing):
    done = Round(dtype=dtype).share().hide(sent).reveal(sent[revealing])
    assert torch.equal(done.sum(), expected(sent, dtype)) and done.sum().dtype == dtype


def test_a_masked_vector_tells_nothing_and_is_never_the_same():
    one, other = Round().share().hide(CLIENTS), Round().share().hide(CLIENTS)
    for client in CLIENTS:
        hidden = one.hidden[client]
        assert not torch.equal(hidden, other.hidden[client])
        # of the ring's whole width: 50 numbers below 1000 in a row would else be seen at once
        assert int((hidden.abs() > 2**24).sum()) > 40
    assert torch.equal(one.reveal(CLIENTS).sum(), other.reveal(CLIENTS).sum())


def test_masks_cancel_in_no_smaller_sum():
    done = Round().share().hide(CLIENTS).reveal(CLIENTS)
    wrong = dict(done.hidden)
    del wrong[9]
    done.hidden = wrong
    with pytest.raises(Refused, match="client 9 don't give its secret back"):
        done.sum()


def test_too_few_shares_or_a_wrong_one_give_no_sum():
    done = Round().share().hide(CLIENTS).reveal(CLIENTS[:3])
    with pytest.raises(Refused, match="3 clients have revealed shares, of 4"):
        done.sum()
    done = Round().share().hide(CLIENTS).reveal(CLIENTS)
    done.shares[3] = {client: bytes(32) for client in CLIENTS}
    with pytest.raises(Refused, match="don't give its secret back"):
        done.sum()


def test_fewer_shares_than_needed_are_nothing():
    secret = bytes(range(32))
    shares = dict(enumerate(shares_of(secret, 3, 5), 1))
    assert recovered(shares, 3) == secret == recovered({index: shares[index] for index in (2, 4, 5)}, 3)
    assert recovered({index: shares[index] for index in (2, 4)}, 2) != secret


def test_a_client_makes_each_step_once_and_in_order():
    done = Round()
    party = done.parties[1]
    with pytest.raises(Refused, match="what follows 'shared' in round 5, where its site is at 'offered'"):
        party.begin(ROUND, ROW, PAYLOAD)
    done.share()
    with pytest.raises(Refused, match="follows 'begun' in round 5"):
        party.hide(ROUND, vector(1), CLIENTS)
    with pytest.raises(Refused, match="follows 'shared' in round 6"):
        party.begin(ROUND + 1, ROW, PAYLOAD)
    done.begin(CLIENTS)
    # the same question again: training anew would give another vector for the same masks
    with pytest.raises(Refused, match="where its site is at 'begun'"):
        party.begin(ROUND, ROW, PAYLOAD)
    done.hide(CLIENTS)
    # a second vector under the same masks would tell the difference of the two
    with pytest.raises(Refused, match="where its site is at 'hidden'"):
        party.hide(ROUND, vector(2), CLIENTS)
    done.reveal(CLIENTS)
    with pytest.raises(Refused, match="has forgotten the round"):
        party.reveal(ROUND, done.sealed_for(1), CLIENTS)
    assert not party.memory


def test_a_client_tells_nothing_of_a_sum_of_too_few():
    done = Round().share().begin(CLIENTS)
    with pytest.raises(Refused, match="4 of 5 at least"):
        done.parties[1].hide(ROUND, vector(1), (1, 3, 4))
    with pytest.raises(Refused, match="with itself"):
        done.parties[1].hide(ROUND, vector(1), (3, 4, 9, 12))
    done.hide(CLIENTS)
    for sent in ((1, 3, 4), (3, 4, 9, 12), (1, 3, 4, 99)):
        with pytest.raises(Refused, match="nothing of the sum is told"):
            done.parties[1].reveal(ROUND, done.sealed_for(1), sent)


def test_a_seed_and_a_key_of_one_client_are_never_told_together():
    done = Round().share().hide(CLIENTS[1:]).reveal(CLIENTS[1:])
    assert {len(share) for own in done.shares.values() for share in own.values()} == {32}
    threshold = done.settings.least(len(CLIENTS))
    position = {client: index + 1 for index, client in enumerate(CLIENTS)}
    key = recovered({position[holder]: own[1] for holder, own in done.shares.items()}, threshold)
    # of the client that sent no vector its masking key is known, and its seed, which hides a late vector, isn't
    assert key == done.parties[1].memory["secure_sum/1"]["masking"]


def test_shares_are_for_one_client_alone():
    done = Round().share().hide(CLIENTS)
    assert {len(box) for boxes in done.sealed.values() for box in boxes.values()} == {SEALED_BYTES}
    assert {len(key) for key in done.keys.values()} == {KEYS_BYTES}
    swapped = {other: boxes[4] for other, boxes in done.sealed.items() if other not in (3, 4)}
    with pytest.raises(Refused, match="can't open the share of client"):
        done.parties[3].reveal(ROUND, swapped, CLIENTS)


def test_keys_that_are_not_the_clients_own_are_refused():
    done = Round()
    for keys in ({**done.keys, 1: done.keys[3]}, {1: done.keys[1]}, {3: done.keys[3], 4: done.keys[4]}):
        with pytest.raises(Refused, match="keys, not all different, not with its own"):
            done.parties[1].share(ROUND, keys)


def test_who_was_shown_other_keys_spoils_the_sum():
    done = Round()
    stranger = Party(77, RecordDict(), done.settings, Journal(done.folders / "77"))
    shown = {**done.keys, 12: stranger.offer(ROUND)[0]}
    done.sealed = {
        client: party.share(ROUND, shown if client == 1 else done.keys) for client, party in done.parties.items()
    }
    done.hide(CLIENTS)
    with pytest.raises(Refused, match="can't open"):
        done.reveal(CLIENTS)


OTHERWISE = {name: {**ROW, name: "other"} for name in ALIKE}


@pytest.mark.parametrize("name", [*ALIKE, "payload"])
def test_masks_of_clients_that_are_told_different_things_stay_in_the_sum(name):
    done, others = Round().share(), CLIENTS[1:]
    payload = {"weights": {"w": torch.ones(3).double()}} if name == "payload" else PAYLOAD
    done.begin([1]).begin(others, payload, OTHERWISE.get(name, ROW)).hide(CLIENTS).reveal(CLIENTS)
    # as a server would that knows all that it has told: it takes all own masks off
    keys = done.keys
    total = sum(ring(vector) for vector in done.hidden.values())
    for client in CLIENTS:
        shares = {index + 1: done.shares[holder][client] for index, holder in enumerate(CLIENTS)}
        row, own = (ROW, PAYLOAD) if client == 1 else (OTHERWISE.get(name, ROW), payload)
        context = bound(session(ROUND, keys), row, own)
        seed = recovered(shares, done.settings.least(len(CLIENTS)))
        total = total - stream(expanded(seed, "own mask", context), 50, NARROW)
    assert int((signed(total, NARROW).abs() > 2**24).sum()) > 40
    assert int(((signed(total, NARROW) - expected(CLIENTS)).abs() > 2**24).sum()) > 40


def test_fingerprints_tell_names_shapes_types_and_nesting_apart():
    weights = torch.arange(6.0)
    records = [
        {"a": weights},
        {"b": weights},
        {"a": weights.reshape(2, 3)},
        {"a": weights.double()},
        {"a": {"a": weights}},
        {"a": [weights]},
        {"a": weights[:3], "b": weights[3:]},
        {"a": weights + 0.0 - torch.finfo(torch.float32).tiny},
        {"a": 1},
        {"a": "1"},
        {"a": True},
        {},
    ]
    assert len({fingerprint(record) for record in records}) == len(records)
    assert fingerprint({"b": 1, "a": weights}) == fingerprint({"a": weights.clone(), "b": 1})


def test_a_client_helps_with_one_sum_of_a_model_alone():
    first = Round().share().hide(CLIENTS).reveal(CLIENTS)
    # the same clients once more, with new masks: both sums are of all
    assert torch.equal(Round(folders=first.folders).share().hide(CLIENTS).reveal(CLIENTS).sum(), expected(CLIENTS))
    fewer = Round(CLIENTS[:4], folders=first.folders).share()
    with pytest.raises(Again, match="with keys of clients 1 3 4 9 12") as told:
        fewer.begin([1])
    assert told.value.cohort == "1 3 4 9 12"
    # another model in the same round of the same run
    with pytest.raises(Again, match="has answered round 5 of this run for another model"):
        Round(folders=first.folders).share().begin([1], {"weights": {"w": torch.zeros(3)}})
    # of another run, as the server says, and so as if the round was never answered
    Round(folders=first.folders).share().begin([1], {"weights": {"w": torch.zeros(3)}}, {**ROW, "run": "b"})
    # the same clients have keys, and one of them has sent no vector
    again = Round(folders=first.folders).share().hide(CLIENTS[1:])
    with pytest.raises(Again, match="over clients 1 3 4 9 12, and tells none over clients 3 4 9 12"):
        again.reveal([3])


def test_a_sum_that_nobody_has_helped_with_binds_nobody():
    first = Round().share().hide(CLIENTS)
    Round(CLIENTS[:4], folders=first.folders).share().hide(CLIENTS[:4]).reveal(CLIENTS[:4])


def test_a_journal_is_bounded_and_refuses_what_it_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST", 3)
    kept = Journal(tmp_path)
    for round in range(5):
        kept.note(1, "run", round, f"model {round}", "1 2 3", "1 2 3")
    size = (tmp_path / "sums.json").stat().st_size
    kept.note(1, "run", 5, "model 5", "1 2 3", "1 2 3")
    assert (tmp_path / "sums.json").stat().st_size == size
    with pytest.raises(Again, match="further back"):
        kept.check(1, "run", 2, "another", "1 2 3")
    kept.check(1, "run", 6, "another", "1 2")
    (tmp_path / "sums.json").write_text('{"sums": [')
    with pytest.raises(Refused, match="damaged"):
        kept.check(1, "run", 6, "another", "1 2")


@pytest.fixture
def sites(tmp_path):
    """Each client's site, with a key of its own and a list of all."""
    keys = {client: ec.generate_private_key(ec.SECP384R1()) for client in CLIENTS}
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    known = {key.public_key().public_bytes(*form).decode(): [client] for client, key in keys.items()}
    for client, key in keys.items():
        data = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        (tmp_path / str(client)).write_bytes(data)
    return {client: SiteKeys(tmp_path / str(client), known) for client in CLIENTS}


def signatures(done, clients):
    return " ".join(f"{client}:{done.parties[client].signature(ROUND)}" for client in clients)


def row_of(done, clients):
    return {**ROW, "sum": " ".join(map(str, clients)), "signatures": signatures(done, clients)}


def test_a_server_that_invents_all_other_clients_reads_the_update_unless_sites_have_keys(sites):
    # the server plays all clients but one, under their ids
    done = Round(sites={1: None}).share().hide(CLIENTS).reveal(CLIENTS)
    assert torch.equal(done.sum() - expected(CLIENTS[1:]), vector(1))
    done = Round(sites={1: sites[1]}).share()
    with pytest.raises(Refused, match="client 1 has no signature of clients 3 4 9 12"):
        done.parties[1].begin(ROUND, row_of(done, CLIENTS), PAYLOAD)


def test_signatures_are_of_one_session_and_one_client(sites):
    earlier, done = Round(sites=sites).share(), Round(sites=sites).share()
    for told in (
        signatures(earlier, CLIENTS),
        signatures(done, CLIENTS[:4]) + " 12:" + done.parties[9].signature(ROUND),
        signatures(done, CLIENTS[:4]) + " 12:zz 12 :",
    ):
        with pytest.raises(Refused, match="no signature of clients"):
            done.parties[1].begin(ROUND, {**row_of(done, CLIENTS), "signatures": told}, PAYLOAD)
    row = row_of(done, CLIENTS)
    done.begin(CLIENTS, row=row).hide(CLIENTS).reveal(CLIENTS)
    total = unmasked(
        done.hidden,
        done.shares,
        done.keys,
        done.commitments,
        CLIENTS,
        4,
        bound(session(ROUND, done.keys), row, PAYLOAD),
    )
    assert torch.equal(total, expected(CLIENTS))


def test_clients_that_are_gone_before_they_have_signed_cost_as_many_as_leave_no_way_to_both_secrets(sites):
    # of five clients four have to stay: both secrets of one need eight shares, of which each client tells one
    done = Round(sites=sites).share()
    rows = {left: row_of(done, CLIENTS[:left]) for left in (4, 3, 2)}
    # three that aren't there may be the server's, with six shares, and the two others tell two
    with pytest.raises(Refused, match="no signature of clients 4 9 12"):
        done.parties[1].begin(ROUND, rows[2], PAYLOAD)
    done.parties[1].begin(ROUND, rows[4], PAYLOAD)
    done.parties[3].begin(ROUND, rows[3], PAYLOAD)
