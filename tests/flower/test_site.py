import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, make_client
from pfl_lightning import methods
from pfl_lightning.cli.load_config import configured
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Preprocessing, TableData, TargetScale, TensorData
from pfl_lightning.flower.remote_data import remote_data
from pfl_lightning.flower.site import ALWAYS, Site, ids_of
from pfl_lightning.flower.template import Refused
from pfl_lightning.methods import FedAvg, FedProto, Local
from pfl_lightning.methods.fedpac import PACClient
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.tasks import Classification, Regression


def data(*sizes: int) -> FederatedDataModule:
    module = blobs(*sizes)
    module.prepare_data()
    module.setup("fit")
    return module


@pytest.fixture(scope="module")
def whole() -> FederatedDataModule:
    return data(24, 16, 30, 20)


def test_some_clients_of_data_that_have_all(whole):
    site = Site.of({"clients": "3 1"}, whole)
    assert site.clients == [3, 1]
    for client in (1, 3):
        ours, theirs = site.client(client), whole.client(client)
        assert ours.client == client and torch.equal(ours.train.x, theirs.train.x)
        assert torch.equal(ours.class_counts, theirs.class_counts)
        assert site.sizes()[client] == {split: whole.size(client, split) for split in ("train", "val", "test")}


def test_data_of_the_site_alone_have_other_numbers():
    own = data(24, 16)
    site = Site.of({"clients": "7 5"}, own)
    for client, local in ((7, 0), (5, 1)):
        assert torch.equal(site.client(client).train.x, own.client(local).train.x)
        assert site.client(client).to("cpu").client == client


def test_no_other_client_is_here(whole):
    site = Site(whole, [1, 3])
    for client in (0, 2, 4, -1, None):
        with pytest.raises(Refused, match=f"client {client} isn't at this site"):
            site.client(client)
        with pytest.raises(Refused, match="isn't at this site"):
            site.parts([1, client], "train")


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ("", "are no ids of clients; give the site's"),
        ("0,3", "are no ids of clients"),
        ("-1", "are no ids of clients"),
        ("0 x", "are no ids of clients"),
        ("1 1", "don't fit the site's data, which have 4 clients"),
        ("1 4", "don't fit the site's data"),
        ("0 1 2 3 4", "don't fit the site's data"),
        ("5 5 5 5", "don't fit the site's data"),
    ],
)
def test_ids_that_cannot_be(whole, clients, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        Site.of({"clients": clients}, whole)


@pytest.mark.parametrize(
    ("method", "requested", "allow", "kept"),
    [
        (FedAvg, "", "", ""),
        (Local, "", "", ""),
        (FedAvg, "class_counts", "", "FedAvg sends class_counts, which this site keeps to itself"),
        (FedAvg, "class_counts", "class_counts", ""),
        (FedAvg, "statistics", "statistics", "the server asks for statistics, which FedAvg doesn't offer"),
        (ControlVariates, "", "class_counts", "ControlVariates sends control, "),
        (ControlVariates, "", "control", ""),
        (FedProto, "class_counts", "class_counts", "FedProto sends prototypes, "),
        (FedProto, "class_counts", "", "FedProto sends class_counts and prototypes, .* can allow them by"),
        (PACClient, "statistics class_counts", "prototypes class_counts", "PACClient sends statistics"),
        (PACClient, "statistics class_counts", "prototypes class_counts statistics", ""),
    ],
)
def test_what_may_be_revealed(whole, method, requested, allow, kept):
    site = Site.of({"clients": "0", "allow": allow}, whole)
    client = make_client(method)
    client.requested = frozenset(requested.split())
    if kept:
        with pytest.raises(Refused, match=kept):
            site.check_method(client)
    else:
        site.check_method(client)


def test_an_update_has_no_more_than_may_be_revealed(whole):
    site = Site(whole, [0], allow=["class_counts"])
    site.check_update({"weights": {}, "class_counts": torch.ones(3)}, "FedAvg")
    with pytest.raises(Refused, match=r"Mine sends samples, .* by --node-config 'allow=\"samples\"'"):
        site.check_update({"weights": {}, "samples": torch.ones(3)}, "Mine")


def test_the_page_names_all_that_methods_send():
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page.partition("| entry | of |")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    classes = [made for made in vars(methods).values() if isinstance(made, type) and issubclass(made, ClientModule)]
    assert named == frozenset().union(*(made.sends | made.offers | made.tells for made in classes)) - ALWAYS


# Tables of the sites' own

WORDS = {"classes": ["cold", "covid", "flu"], "categories": {"sex": ["m", "f"]}}


def table_of(ills: list[str], sexes: list[str]) -> Any:
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    rows = np.arange(24)
    return pandas.DataFrame(
        {
            "age": 40.0 + rows,
            "sex": np.array(sexes)[rows % len(sexes)],
            "ill": np.array(ills)[rows % len(ills)],
            "who": 0,
        }
    )


SITES = [(["cold", "covid", "flu"], ["f", "m"]), (["covid", "flu"], ["f", "m"]), (["flu", "cold"], ["m"])]


def joined(tables: list[Any]) -> Any:
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    return pandas.concat(tables, ignore_index=True)


def clinic(table: Any, **settings: Any) -> FederatedDataModule:
    task = Classification(3)
    module = TableData(
        table, "ill", task, ["age", "sex"], "who", **{"test_fraction": 0.0, "val_fraction": 0.0, **settings}
    )
    module.setup()
    return module


@pytest.mark.parametrize("standardize", [None, "client"])
def test_texts_have_the_same_numbers_at_every_site(standardize):
    tables = [table_of(*held).assign(who=client) for client, held in enumerate(SITES)]
    whole = clinic(joined(tables), **WORDS, standardize=standardize)
    for client, table in enumerate(tables):
        site = Site.of({"clients": str(client)}, clinic(table, **WORDS, standardize=standardize))
        ours, theirs = site.client(client).train, whole.part(client, "train")
        order, other = (torch.argsort(part.x[:, 0]) for part in (ours, theirs))
        assert torch.equal(ours.x[order], theirs.x[other]) and torch.equal(ours.y[order], theirs.y[other])


REFUSED = [
    ({"categories": WORDS["categories"]}, r"column 'ill' .*data\.classes"),
    ({"classes": WORDS["classes"]}, r"column 'sex' .*data\.categories\.sex"),
    ({**WORDS, "standardize": "table"}, r"data\.standardize=table .* take client"),
]


FITTED = [
    ({"classes": WORDS["classes"], "preprocessing": "auto"}, r"data\.preprocessing\.by=table .* take client"),
    ({"classes": WORDS["classes"], "preprocessing": Preprocessing(by="client")}, r"preprocessing\.vocabulary\.sex"),
]


@pytest.mark.parametrize(("settings", "says"), [*REFUSED, *FITTED])
def test_a_site_alone_refuses_what_rows_of_all_clients_decide(settings, says):
    own = clinic(table_of(*SITES[1]), **settings)
    with pytest.raises(MisconfigurationException, match=says):
        Site(own, [2])
    # whoever has the tables of all clients gets what a simulation gets
    both = joined([table_of(*held).assign(who=client) for client, held in enumerate(SITES)])
    assert Site(clinic(both, **settings), [2]).size(2, "train") == 24


def test_a_site_alone_refuses_a_scale_of_all_clients_targets():
    def ages(way: Any) -> Site:
        rows = table_of(*SITES[1]).assign(dose=1.0)
        own = TableData(rows, "age", Regression(), ["dose"], "who", standardize_target=way)
        own.setup()
        return Site(own, [2])

    with pytest.raises(MisconfigurationException, match=r"data\.standardize_target=table .* take client, or give"):
        ages("table")
    given = ages({"age": [50, 10]})
    assert given.target_scale(2) == TargetScale((50.0,), (10.0,)) and given.client(2).target_scale is not None
    # what sites must have in common, and what is each one's own
    assert given.inputs != ages({"age": [40, 10]}).inputs and ages("client").inputs == ages("client").inputs


def test_sites_tell_by_a_fingerprint_whether_they_make_the_same_inputs():
    sexes = WORDS["categories"]["sex"]

    def told(client: int, **settings: Any) -> dict[str, str]:
        return Site(clinic(table_of(*SITES[client]), **settings), [client]).inputs

    by_client = {"classes": WORDS["classes"], "preprocessing": Preprocessing(by="client", vocabulary={"sex": sexes})}
    for settings in (WORDS, {**WORDS, "standardize": "client"}, by_client):
        # fitted on each client's own rows, and so no matter of others
        assert told(0, **settings) == told(1, **settings)
    turned = {**WORDS, "categories": {"sex": sexes[::-1]}}
    assert {name for name, each in told(0, **turned).items() if each != told(1, **WORDS)[name]} == {"data.categories"}
    assert told(0, **WORDS)["data.standardize"] != told(0, **WORDS, standardize={"age": [50, 10]})["data.standardize"]


@pytest.mark.exhaustive
def test_a_site_takes_the_vocabulary_of_the_app_and_a_path_of_its_own(tmp_path):
    table_of(*SITES[1]).to_csv(tmp_path / "own.csv", index=False)
    (tmp_path / "names.csv").write_text("age,sex,ill,who\n")
    app = {"path": str(tmp_path / "names.csv"), "target": "ill", "client": "who", "num_clients": 3, **WORDS}
    app["task"] = {"class_path": "Classification", "init_args": {"num_classes": 3}}
    own = {"path": str(tmp_path / "own.csv"), "num_clients": 1}
    model = {"model": {"class_path": "FedAvg", "init_args": {"net": {"class_path": "MLP"}}}}
    args = []
    for name, init_args in (("app", app), ("site", own)):
        settings = {"data": {"class_path": "TableData", "init_args": init_args}} | (model if name == "app" else {})
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        args += ["--config", str(tmp_path / f"{name}.yaml")]
        data = configured(args).datamodule
        assert data.input_shape == (2,) and data.num_clients == init_args["num_clients"]
    data.setup()
    site = Site(data, [2])
    assert (
        site.client(2).train.y.unique().tolist() == [1, 2] and data.preprocessing["classes"]["ill"] == WORDS["classes"]
    )


@pytest.mark.parametrize(("settings", "says"), [*REFUSED, (WORDS, "")])
def test_a_server_with_samples_of_its_own_refuses_it_too(settings, says):
    own = {"num_clients": 1, "central_test": 0.25, **settings}
    module = TableData(table_of(*SITES[0]), "ill", Classification(3), ["age", "sex"], "who", **own)
    server = remote_data(module, {0: {"train": 24, "val": 0, "test": 0}})
    if not says:
        server.setup()
        assert len(server.central_data()) == 6
        return
    with pytest.raises(MisconfigurationException, match=says):
        server.setup()


TOWNS = ["Bremen", "Ulm", "St. Josef"]


@pytest.mark.parametrize(
    ("clients", "ids"),
    [("Ulm", [1]), ("St. Josef", [2]), ("St. Josef, Bremen", [2, 0]), ("Ulm, 0", [1, 0]), ("2", [2])],
)
def test_a_site_names_its_clients(clients, ids):
    assert Site.of({"clients": clients}, data(24, 16, 30), TOWNS).clients == ids


@pytest.mark.parametrize(("clients", "says"), [("Brehmen", "did you mean Bremen"), ("3", "clients=3"), ("", "no ids")])
def test_a_wrong_name_is_refused(clients, says):
    with pytest.raises(MisconfigurationException, match=says):
        Site.of({"clients": clients}, data(24, 16, 30), TOWNS)


def test_a_site_s_own_data_are_paired_by_name_and_not_by_position():
    settings = {"client": ["Ulm"] * 8 + ["Bremen"] * 12, "val_fraction": 0.0, "test_fraction": 0.0}
    own = TensorData(torch.zeros(20, 2), torch.arange(20) % 2, Classification(2), **settings)
    own.setup()
    site = Site.of({"clients": "Ulm, Bremen"}, own, TOWNS)
    assert site.size(1, "train") == 8 and site.size(0, "train") == 12
    with pytest.raises(MisconfigurationException, match=r"clients='St\. Josef'"):
        Site.of({"clients": "St. Josef"}, own, TOWNS)


@pytest.mark.parametrize("names", [["Bremen"], ["Ulm", "Ulm"], ["Ulm", "ulm"], ["Bremen", "Ulm", "Jena"]])
def test_names_of_a_server_fit_the_number_of_clients(names):
    with pytest.raises(MisconfigurationException, match=r"data\.num_clients|'Ulm'"):
        remote_data(blobs(24, 16), {}, names)
    assert remote_data(blobs(24, 16), {}, ["Bremen", "Ulm"]).client_label(1) == "1 (Ulm)"


def test_codes_of_clients_at_sites_are_texts():
    assert ids_of("01", ["1", "01"]) == ids_of("01", ["2", "01"]) == [1]
    for names, words in (([], "ids of clients"), (["1", "2"], "'01' is no client")):
        with pytest.raises(MisconfigurationException, match=words):
            ids_of("01", names)


def test_another_spelling_does_not_join():
    assert ids_of("Bremen, Kiel", TOWNS, joins=True)[1] == "Kiel"
    with pytest.raises(MisconfigurationException, match="'bremen' is no client; did you mean Bremen"):
        ids_of("bremen", TOWNS, joins=True)
