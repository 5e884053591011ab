"""Servers that try to learn one update out of secure sums: by telling clients different things, and by repetition."""

import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from deployments import ALL, deploy, grid_of, rewrite
from flwr.app import RecordDict
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Pause, blobs, equal, make_client
from pfl_lightning.flower import masks, sums
from pfl_lightning.flower.journal import Journal
from pfl_lightning.flower.link import Quorum
from pfl_lightning.flower.masks import Party, agreed, bound, pairwise, recovered, ring, session, signed, stream
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.wire import names, unpack
from pfl_lightning.privacy import SecureSum

FOUR = {11 + client: {"clients": str(client), "allow": ALL} for client in range(4)}
VICTIM, SETTINGS = 3, {"secure_sum": SecureSum()}


def blobs_in_one_batch():
    """Training that repeats whatever its seed is: each step sees all samples."""
    return blobs(batch_size=64)


@pytest.fixture
def encoded(monkeypatch):
    """Each client's vectors before they are masked, in the order of time; no server sees them."""
    vectors, hide = {}, Party.hide

    def kept(self, round, vector, clients):
        vectors.setdefault(self.client, []).append(vector.clone())
        return hide(self, round, vector, clients)

    monkeypatch.setattr(Party, "hide", kept)
    return vectors


@pytest.fixture
def learnt(monkeypatch):
    """What a server gets out of each sum: all own masks are off, each by what its client was told."""
    found, contexts, expanded, honest = [], {}, masks.expanded, sums.unmasked

    def watched(secret, purpose, context):
        if purpose == "own mask":
            # the server has told the client all that this is made of
            contexts.setdefault(secret, context)
        return expanded(secret, purpose, context)

    def unmasked(hidden, shares, keys, commitments, clients, threshold, *rest):
        position, total = {client: index + 1 for index, client in enumerate(sorted(keys))}, 0
        # with fewer shares there is nothing to take off
        for client, vector in hidden.items() if len(shares) >= threshold else ():
            seed = recovered({position[holder]: own[client] for holder, own in shares.items()}, threshold)
            own_mask = stream(expanded(seed, "own mask", contexts[seed]), len(vector), vector.dtype)
            total = total + ring(vector) - own_mask
        if len(shares) >= threshold:
            found.append((sorted(hidden), signed(total, next(iter(hidden.values())).dtype)))
        return honest(hidden, shares, keys, commitments, clients, threshold, *rest)

    monkeypatch.setattr(masks, "expanded", watched)
    monkeypatch.setattr(sums, "unmasked", unmasked)
    return found


def telling(grid, client, change):
    """Has the server tell one client something else than it would."""
    reply = grid._reply

    def told(message):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 11 + client:
            rewrite(message.content, lambda records: change(records, client))
        return reply(message)

    grid._reply = told


def more_samples(records, client):
    row = records["jobs"][client]
    row["agreement"] = row["agreement"].replace(f" {row['most']} ", f" {2**40} ")
    row["most"] = 2**40


def no_step(records, client):
    records["jobs"][client]["lr_factor"] = 0.0


def other_model(records, client):
    for weight in records[f"{client}/payload"]["weights"].values():
        weight.zero_()


def fewer_clients(records, client):
    records["jobs"][client]["sum"] = "0 1 2"


LIES = {"most": more_samples, "lr_factor": no_step, "payload": other_model, "sum": fewer_clients}


def like_noise(vector):
    """Whether a vector has numbers of the ring's whole width; updates' are below 8 times 2^16."""
    return float((vector.abs() > 2**24).float().mean()) > 0.9


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_tells_clients_different_things_gets_noise(lie, tmp_path, encoded, learnt):
    grid = grid_of(make_client, tmp_path, nodes=FOUR, **SETTINGS)
    for client in range(3):
        telling(grid, client, LIES[lie])
    run = deploy(grid, make_client, max_rounds=1, **SETTINGS)
    (victims,) = encoded[VICTIM]
    assert int(victims.abs().max()) > 1000
    # refused, or noise, out of which nothing takes the victim's that the server knows
    for _, sum_ in learnt:
        others = torch.stack([encoded[client][0] for client in range(3)]).long().sum(0)
        for part in (sum_, (sum_ - others).int()):
            assert not torch.equal(part, victims) and like_noise(part) and like_noise(part - victims)
    assert [row["clients"] for row in run.rows] == [0]


class Interrupted:
    """A federation of four sites that has made two rounds, and its checkpoint after the first."""

    def __init__(self, folder, data=blobs_in_one_batch, watch=lambda node, kind, content: None):
        self.folder, self.settings = folder, {"data": data, "max_rounds": 2, **SETTINGS}
        self.grid = grid_of(make_client, folder / "sites", nodes=FOUR, **SETTINGS, data=data)
        first = deploy(self.grid, make_client, folder, callbacks=[Pause(1)], **self.settings)
        self.early = shutil.copy(first.last, folder / "early.ckpt")
        self.grid.spoil = watch
        self.whole = deploy(self.grid, make_client, folder, ckpt_path=str(first.last), **self.settings)

    def resume(self, watch=lambda node, kind, content: None):
        self.grid.spoil = watch
        quorum = {"quorum": Quorum(min_available=3), "patience": 30.0}
        return deploy(self.grid, make_client, self.folder, ckpt_path=self.early, serving=quorum, **self.settings)


def lost(node_, kind_):
    """Loses a site's answers of a kind."""

    def watch(node, kind, content):
        if (node, kind) == (node_, kind_):
            for name in list(content):
                del content[name]

    return watch


def difference(learnt):
    """What the last two sums tell together, zeros where there is one."""
    return learnt[-2][1] - learnt[-1][1] if len(learnt) > 2 else torch.zeros_like(learnt[0][1])


def test_a_resumed_round_without_a_client_tells_nothing_of_it(tmp_path, encoded, learnt):
    run, said = Interrupted(tmp_path), ""
    victims = encoded[VICTIM][1]
    run.grid.away.add(11 + VICTIM)
    try:
        run.resume()
    except MisconfigurationException as error:
        said = str(error)
    assert not torch.equal(difference(learnt), victims)
    assert len(learnt) == 2 and "clients 0 1 2 3" in said


@pytest.mark.parametrize("kind", ["train", "query.share"])
@pytest.mark.by_default("train")
def test_a_client_that_drops_out_of_a_resumed_round_takes_the_sum_with_it(kind, tmp_path, encoded, learnt):
    run, victims = Interrupted(tmp_path), encoded[VICTIM][1]
    with pytest.warns(UserWarning, match="client 3"):
        row = run.resume(lost(11 + VICTIM, kind)).rows[-1]
    assert not torch.equal(difference(learnt), victims)
    assert len(learnt) == 2 and row["clients"] == 0


def test_a_resumed_round_of_the_same_clients_has_other_updates(tmp_path, encoded, learnt):
    run = Interrupted(tmp_path, blobs)
    again = run.resume()
    assert [clients for clients, _ in learnt[1:]] == [[0, 1, 2, 3]] * 2
    assert not any(torch.equal(*encoded[client][1:]) for client in range(4))
    # both sums are sums of all, and so is their difference
    assert torch.equal(difference(learnt), sum(encoded[client][1] - encoded[client][2] for client in range(4)))
    assert [row["clients"] for row in again.rows] == [4, 4]


@pytest.mark.exhaustive
def test_a_resumed_round_goes_on_with_the_clients_that_have_told_it(tmp_path, learnt):
    run = Interrupted(tmp_path, watch=lost(11 + VICTIM, "query.offer"))
    assert learnt[-1][0] == [0, 1, 2]
    # now the victim is there, and would stand alone in the difference
    with pytest.warns(UserWarning, match="client 3 is left out .* was begun with clients 0 1 2 before"):
        again = run.resume()
    assert [row["clients"] for row in again.rows] == [4, 3] and learnt[-1][0] == [0, 1, 2]


def test_a_server_that_goes_further_back_is_told_so(tmp_path):
    run = Interrupted(tmp_path, blobs)
    run.settings["max_rounds"] = 3
    deploy(run.grid, make_client, tmp_path, ckpt_path=str(run.whole.last), **run.settings)
    # the second round again, by which the third has another model
    with pytest.raises(MisconfigurationException, match="round 3: client 0 has answered round 3"):
        run.resume()


@pytest.mark.exhaustive
def test_a_new_run_may_begin_with_other_clients_where_its_model_is_another(tmp_path):
    run = Interrupted(tmp_path)
    run.grid.away.add(11 + VICTIM)
    serving = {"quorum": Quorum(min_available=3), "patience": 30.0}
    # the same initial model: the first round's sum would tell of the client that is away
    with pytest.raises(MisconfigurationException, match="round 1: client 0 has answered this model"):
        deploy(run.grid, make_client, serving=serving, **run.settings)
    other = partial(make_client, seed=4)
    grid = grid_of(other, tmp_path / "sites", nodes=FOUR, data=run.settings["data"], **SETTINGS)
    grid.away.add(11 + VICTIM)
    assert [row["clients"] for row in deploy(grid, other, serving=serving, **run.settings).rows] == [3, 3]


class Middle:
    """A server that shows the victim its own keys in place of all others', and reads what is sealed for these."""

    def __init__(self, grid, folder):
        self.folder, self.parties, self.read = folder, {}, None
        self.reply, grid._reply = grid._reply, self.answered

    def answered(self, message):
        kind, victims = message.metadata.message_type, message.metadata.dst_node_id == 11 + VICTIM
        if victims and kind == "query.share":
            rewrite(message.content, self.invent)
        if victims and kind == "train":
            row, payload = (unpack(message.content, name) for name in ("jobs", f"{VICTIM}/payload"))
            self.context = bound(self.session, row[VICTIM], payload)
        reply = self.reply(message)
        if victims and kind == "query.share":
            self.boxes = unpack(reply.content, f"{VICTIM}/sealed")
        if victims and kind == "train" and f"{VICTIM}/masked" in names(reply.content):
            self.read = self.unmasked(unpack(reply.content, f"{VICTIM}/masked")["vector"])
        return reply

    def invent(self, records):
        shown = records[f"{VICTIM}/payload"]["keys"]
        for client in range(3):
            party = self.parties[client] = Party(client, RecordDict(), SecureSum(), Journal(self.folder / str(client)))
            shown[client] = sums.tensor(party.offer(0)[0])
        self.keys = {client: sums.data(key) for client, key in shown.items()}
        self.session = session(0, self.keys)

    def unmasked(self, hidden):
        secrets = {client: party.memory[party.name] for client, party in self.parties.items()}
        shares = {}
        for client, own in secrets.items():
            key, box = (
                agreed(own["sealing"], self.keys[VICTIM][:32], "seal", self.session),
                sums.data(self.boxes[client]),
            )
            share = AESGCM(key).decrypt(box[:12], box[12:], f"{VICTIM} to {client}".encode() + self.session)
            shares[client + 1] = share[32:]
        seed = recovered(shares, SecureSum().least(4))
        total = ring(hidden) - stream(masks.expanded(seed, "own mask", self.context), len(hidden), hidden.dtype)
        for client, own in secrets.items():
            total = total + pairwise(own["masking"], client, [VICTIM], self.keys, self.context, hidden)
        return signed(total, hidden.dtype)


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_server_with_keys_of_its_own_reads_an_update_where_sites_have_none(with_keys, tmp_path, encoded):
    own = site_keys(tmp_path) if with_keys else {}
    grid = grid_of(make_client, tmp_path / "sites", nodes=FOUR, keys=own.get, **SETTINGS)
    middle = Middle(grid, tmp_path / "server")
    deploy(grid, make_client, max_rounds=1, **SETTINGS)
    if with_keys:
        assert middle.read is None and VICTIM not in encoded
    else:
        assert torch.equal(middle.read, encoded[VICTIM][0])


def site_keys(folder):
    """Keys of the sites of four clients, by node."""
    keys = {client: ec.generate_private_key(ec.SECP384R1()) for client in range(4)}
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    known = {key.public_key().public_bytes(*form).decode(): [client] for client, key in keys.items()}
    for client, key in keys.items():
        data = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        (folder / f"key{client}").write_bytes(data)
    return {11 + client: SiteKeys(folder / f"key{client}", known) for client in keys}


@pytest.mark.exhaustive
def test_sites_that_know_each_other_sum_as_others_do(tmp_path):
    keys = site_keys(tmp_path)
    make = {"nodes": FOUR, "as_simulated": True, **SETTINGS}
    run, plain = (
        deploy(grid_of(make_client, tmp_path / name, keys=own, **make), make_client, **SETTINGS)
        for name, own in (("known", keys.get), ("plain", lambda node: None))
    )
    assert [row["clients"] for row in run.rows] == [4, 4, 4] and equal(run.weights, plain.weights)
    # one has no key: the others have no word of its keys, and it has theirs
    without = {node: own for node, own in keys.items() if node != 11 + VICTIM}
    with pytest.warns(UserWarning, match="no signature of clients 3"):
        run = deploy(grid_of(make_client, tmp_path / "one", keys=without.get, **make), make_client, **SETTINGS)
    assert [row["clients"] for row in run.rows] == [0, 0, 0]
