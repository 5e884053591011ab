from federations import Spy, blobs, check_evaluated_by, equal, fit, make_client, noisy
from pfl_lightning.methods import FedPer, Local


def test_of_one_client_it_is_local_training_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    per, local = (fit(make_client(method, **settings), blobs(40)) for method in (FedPer, Local))
    own = {**per.federation.aggregator.download(0)["weights"], **per.federation.clients[0].personal}
    assert equal(dict(sorted(own.items())), dict(sorted(local.federation.clients[0].personal.items())))
    assert [row["val/loss"] for row in per.rows] == [row["val/loss"] for row in local.rows]


def test_classifiers_stay_and_bodies_travel():
    spy = Spy()
    run = fit(make_client(FedPer), callbacks=[spy])
    classifier = {"net.classifier.weight", "net.classifier.bias"}
    assert all(set(state.personal) == classifier for state in run.federation.clients.values())
    assert not classifier & set(spy.updates[0][0]["weights"])
    assert not equal(run.federation.clients[0].personal, run.federation.clients[1].personal)


def test_clients_are_evaluated_with_their_own_classifiers():
    check_evaluated_by(fit(make_client(FedPer)), "")
