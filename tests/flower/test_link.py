"""Which node has which client; nodes that go, come back, or aren't who they say."""

import warnings
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import NODES, deploy, grid_of, rewrite

from federations import Blobs, Spy, blobs, equal, fit, make_client, noisy
from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.callbacks import ChannelsLast, MatmulPrecision
from pfl_lightning.flower.apps import part
from pfl_lightning.flower.link import MOST_SAMPLES, VERSION, Link, Quorum
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.methods import FedAvg, FedPer, LGFedAvg
from pfl_lightning.methods.fedlaw import FedLAW

make = partial(make_client, FedPer, net=noisy)


def test_one_message_goes_to_a_site_in_a_phase(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=2)
    deploy(grid, make, max_rounds=2)
    phases = ["query", "train", "evaluate", "train", "evaluate", "evaluate"]
    assert [kind for kind, node in grid.asked if node == 11] == phases
    assert [kind for kind, node in grid.asked if node == 12] == phases


def test_clients_of_all_architectures_are_asked_at_once(tmp_path):
    from federations import NETS

    own = partial(make_client, LGFedAvg, net=NETS, assign_nets="block")
    grid = grid_of(own, tmp_path, max_rounds=2)
    assert equal(deploy(grid, own, max_rounds=2).weights, fit(own(), max_rounds=2).weights)
    assert len([kind for kind, node in grid.asked if kind == "train"]) == 4


@pytest.mark.exhaustive
def test_a_site_keeps_the_versions_that_checkpoints_name_and_no_others(tmp_path):
    grid = grid_of(make, tmp_path / "sites", max_rounds=5)
    run = deploy(grid, make, tmp_path / "server", max_rounds=5)
    for client in range(4):
        node = 11 + client % 2
        files = list((tmp_path / "sites" / str(node) / str(client)).glob("*/*.pt"))
        # those of the last round, of the one before, and of best.ckpt
        assert 2 <= len(files) <= 3
        assert run.federation.clients[client].kept in {path.stem for path in files}


class Moving:
    """A node that is gone when it is first asked to train, and back under another id after some looks."""

    def __init__(self, grid, back_as, looks=3):
        self.grid, self.back_as, self.looks, self.left = grid, back_as, looks, None
        self.push, self.ids = grid.push_messages, grid.get_node_ids
        grid.push_messages, grid.get_node_ids = self.push_messages, self.get_node_ids

    def push_messages(self, messages):
        messages = list(messages)
        if self.left is None and any(m.metadata.message_type == "train" for m in messages):
            if messages[0].metadata.dst_node_id == 12:
                self.grid.away.add(12)
                self.left = self.looks
        return self.push(messages)

    def get_node_ids(self):
        if self.left:
            self.left -= 1
            if not self.left:
                self.grid.nodes = {**self.grid.nodes, self.back_as: NODES[12]}
                self.grid.keys[self.back_as] = self.grid.keys[12]
                self.grid.away.discard(self.back_as)
        return self.ids()


@pytest.mark.parametrize("back_as", [12, 13])
@pytest.mark.by_default("13")
def test_a_node_that_dies_in_mid_round_is_asked_again_when_it_is_back(tmp_path, back_as):
    grid = grid_of(make, tmp_path, max_rounds=2)
    if back_as != 12:
        # what stays with its clients came with the disk
        (tmp_path / "13").symlink_to(tmp_path / "12")
        (tmp_path / "12").mkdir()
    Moving(grid, back_as)
    with pytest.warns(UserWarning, match="node 12 with clients 1, 3: Flower's error 5: gone"):
        run = deploy(grid, make, max_rounds=2, serving={"quorum": Quorum(wait_for_lost=5)})
    assert equal(run.weights, fit(make(), max_rounds=2).weights)
    assert [row["clients"] for row in run.rows] == [4, 4]


@pytest.mark.exhaustive
def test_a_round_ends_at_its_time_out_with_those_that_answered(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=2)
    grid.spoil = lambda node, kind, content: grid.silent.add(12) if kind == "evaluate" else None
    run = deploy(grid, make, max_rounds=2, serving={"timeout": 0.5})
    assert [(row["clients"], row["clients_absent"]) for row in run.rows] == [(4, 0), (2, 2)]


def test_a_site_whose_app_fails_is_left_out(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)

    def broken(context):
        raise OSError("no such disk")

    whole, app = grid.app, grid_of(make, tmp_path, data=lambda: broken(None), max_rounds=1).app
    grid.app = lambda message, context: (app if message.metadata.message_type == "train" else whole)(message, context)
    with pytest.warns(UserWarning, match="its site failed with OSError: no such disk"):
        run = deploy(grid, make, max_rounds=1)
    assert (run.rows[0]["clients"], run.rows[0]["clients_refused"]) == (0, 4)


@pytest.mark.parametrize(("kind", "times"), [("train", 1), ("query", 1), ("train", 9)])
def test_an_app_that_ended_without_a_word_is_asked_again_some_times(tmp_path, kind, times):
    grid = grid_of(make, tmp_path, max_rounds=1)
    works, left = grid.app, [times]

    def app(message, context):
        if message.metadata.message_type == kind and context.node_id == 12 and left[0]:
            left[0] -= 1
            raise RuntimeError("the machine is busy")
        return works(message, context)

    grid.app = app
    run = deploy(grid, make, max_rounds=1)
    # once it has begun to ask, it asks three times at most
    assert (run.rows[0]["clients"], left[0]) == ((4, 0) if times == 1 else (2, 6))
    assert times > 1 or equal(run.weights, fit(make(), max_rounds=1).weights)


def test_what_stays_at_sites_ends_with_the_federation(tmp_path):
    grid = grid_of(make, tmp_path)
    grid.away.add(12)
    part(grid)
    assert grid.asked == [("query.end", 11)]


def test_clients_without_a_site_are_named(tmp_path):
    grid = grid_of(make, tmp_path)
    grid.away.add(12)
    with pytest.raises(MisconfigurationException, match=r"no site has said within 0 s that it has clients 1, 3 of"):
        deploy(grid, make, serving={"patience": 0.2})


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"key of 11": [0, 2], "key of 12": [1, 3]}, None),
        ({"key of 11": [0, 2], "key of 12": [1]}, 3),
        ({"key of 11": [0, 2], "key of 13": [1, 3]}, 1),
    ],
)
@pytest.mark.by_default(but=["keys0-None"])
def test_ids_belong_to_the_keys_of_the_server_s_list(tmp_path, keys, refused):
    grid = grid_of(make, tmp_path, max_rounds=1)
    serving = {"keys": {key: dict.fromkeys(ids, 100) for key, ids in keys.items()}, "patience": 0.2}
    if refused is None:
        assert deploy(grid, make, max_rounds=1, serving=serving).rows[0]["clients"] == 4
        return
    with (
        pytest.warns(
            UserWarning, match=f"node 12 is refused: it says that it has client {refused}, which the server's"
        ),
        pytest.raises(MisconfigurationException, match="clients 1, 3"),
    ):
        deploy(grid, make, max_rounds=1, serving=serving)


def test_the_server_s_list_bounds_the_samples_that_a_client_claims(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)
    sizes = blobs()
    sizes.setup()
    most = max(sizes.size(client, "train") for client in (0, 2))
    keys = {"key of 11": {0: most, 2: most}, "key of 12": {1: 100, 3: 3}}
    with (
        pytest.warns(
            UserWarning, match="node 12 .* samples of client 3, which may have 0 to 3, as the server's list says"
        ),
        pytest.raises(MisconfigurationException, match="clients 1, 3"),
    ):
        deploy(grid, make, max_rounds=1, serving={"keys": keys, "patience": 0.2})


def test_a_client_that_has_a_site_is_nobody_else_s(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)
    grid.nodes = {**grid.nodes, 13: NODES[12]}
    grid.keys[13] = "key of 13"
    with pytest.warns(UserWarning, match="is refused: it says that it has client 1, which another site has"):
        assert deploy(grid, make, max_rounds=1).rows[0]["clients"] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hello: hello.update(version="0.0.1"), "it has pfl-lightning .0.0.1. and the server"),
        (lambda hello: hello.update(initial="0" * 16), "its initial model is another than the server's"),
        (
            lambda hello: hello["clients"].update({9: {"train": 1, "val": 1, "test": 1}}),
            "the entry 9, which is none of",
        ),
        (
            lambda hello: hello["clients"][0].update(train=-1),
            "it claims -1 train samples of client 0, which may have 0",
        ),
        (lambda hello: hello["clients"][0].update(val=2**31 + 1), "it claims 2147483649 val samples of client 0"),
        (
            lambda hello: hello["clients"][2].update(train=10**15),
            "it claims 1000000000000000 train samples of client 2",
        ),
        (lambda hello: hello["clients"][2].update(train=10**20), "it claims .* train samples of client 2"),
        (lambda hello: hello["clients"][2].update(val=10**400), "it claims .* val samples of client 2"),
        (lambda hello: hello["clients"][2].update(test=True), "test is bool and should be int"),
        (lambda hello: hello["clients"][2].update(test=8.0), "test is float and should be int"),
    ],
)
def test_a_site_that_does_not_fit_is_refused_in_a_sentence(tmp_path, change, words):
    grid = grid_of(make, tmp_path)

    def spoil(node, kind, content):
        if kind == "query" and node == 11:
            records = {name: unpack(content, name) for name in names(content)}
            change(records["hello"])
            for name, record in pack(records).items():
                content[name] = record

    grid.spoil = spoil
    with (
        pytest.warns(UserWarning, match=f"node 11 is refused: .*{words}"),
        pytest.raises(MisconfigurationException, match="clients 0, 2"),
    ):
        deploy(grid, make, serving={"patience": 0.2})


def test_a_site_that_makes_other_inputs_than_the_first_is_refused(tmp_path):
    link = Link(grid_of(make, tmp_path), 4, "0" * 16)

    def greets(node: int, client: int, **inputs: str) -> None:
        clients = {client: {"train": 8, "val": 0, "test": 4}}
        link._heard(
            node,
            pack(
                {
                    "hello": {
                        "version": VERSION,
                        "initial": "0" * 16,
                        "settings": {f"data.{name}": text for name, text in inputs.items()},
                        "secret": "",
                        "clients": clients,
                        "new": {},
                    }
                }
            ),
        )

    greets(11, 0, categories="a", classes="c")
    with pytest.warns(UserWarning, match=r"node 12 is refused: its data\.categories, data\.scales makes other inputs"):
        greets(12, 1, categories="b", classes="c", scales="d")
    greets(12, 2, categories="a", classes="c")
    assert sorted(link.sizes) == [0, 2]


CLAIM = 2**31 - 1


def overstating(grid):
    """Have client 0 claim as many samples as a client may, in its greeting and in its updates."""

    def spoil(node, kind, content):
        if node == 11 and kind == "query":
            rewrite(content, lambda records: records["hello"]["clients"][0].update(train=CLAIM))
        if node == 11 and kind == "train":
            rewrite(content, lambda records: records["0/update"].update(num_samples=torch.tensor(CLAIM)))

    grid.spoil = spoil
    return grid


@pytest.mark.parametrize("keys", [None, {"key of 11": {0: MOST_SAMPLES, 2: 99}, "key of 12": {1: 99, 3: 99}}])
def test_a_claim_that_outweighs_all_others_is_told_by_name(tmp_path, keys):
    make, spy = partial(make_client, FedAvg), Spy()
    with pytest.warns(UserWarning, match=f"client 0 claims {CLAIM} of all .* a share of 1.000, .* max-samples") as told:
        run = deploy(overstating(grid_of(make, tmp_path)), make, callbacks=[spy], serving={"keys": keys}, max_rounds=2)
    assert len([warning for warning in told if "claims" in str(warning.message)]) == 1
    # it is true: the model is that client's
    for name, tensor in spy.updates[-1][0]["weights"].items():
        assert torch.allclose(run.weights[name], tensor, atol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "settings", "serving"),
    [
        (lambda grid: grid, {}, {}),
        (overstating, {"aggregator": WeightedAverage(weighting="uniform")}, {}),
        # the server's operator has set the bound
        (overstating, {}, {"keys": {"key of 11": {0: CLAIM, 2: 99}, "key of 12": {1: 99, 3: 99}}}),
    ],
)
def test_claims_that_decide_nothing_are_not_told(tmp_path, spoil, settings, serving):
    make = partial(make_client, FedAvg)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        deploy(spoil(grid_of(make, tmp_path)), make, serving=serving, max_rounds=1, **settings)
    assert not [warning for warning in told if "claims" in str(warning.message)]


class Lone(Blobs):
    """Without samples of the server's."""

    def server_data(self):
        return None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": partial(blobs, data=Lone), "aggregator": FedLAW()}, "data=Lone: clients are at sites that keep"),
        ({"data": partial(blobs, new_clients=1)}, "data.new_clients=1: whoever has a site takes part"),
        ({"callbacks": [ChannelsLast()]}, "trainer.callbacks=ChannelsLast acts on the server's own nets"),
        ({"callbacks": [MatmulPrecision()]}, "trainer.callbacks=MatmulPrecision acts on the server's own nets"),
        ({"aggregator": FedLAW(), "data": partial(blobs, data=Lone), "max_rounds": 1}, "data.server_fraction"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_the_first_round(tmp_path, settings, words):
    own = partial(make_client, FedAvg)
    grid = grid_of(own, tmp_path)
    with pytest.raises(MisconfigurationException, match=words):
        deploy(grid, own, **settings)
    assert {kind for kind, _ in grid.asked} <= {"query"}


def test_a_site_sends_no_more_than_it_allows(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)
    from pfl_lightning.methods import FedProto

    own = partial(make_client, FedProto)
    grid = grid_of(own, tmp_path, max_rounds=1)
    grid.nodes = {node: {"clients": config["clients"]} for node, config in NODES.items()}
    with pytest.warns(UserWarning, match=r"client 0 is left out .*FedProto sends .*prototypes, which this site keeps"):
        run = deploy(grid, own, max_rounds=1)
    assert run.rows[0]["clients_refused"] == 4
