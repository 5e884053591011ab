"""Compressed updates of clients at sites."""

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite

from federations import Pause, equal, fit, make_client
from pfl_lightning.compression import EightBits, HalfPrecision, Sign, TopK
from pfl_lightning.flower import remote as engine
from pfl_lightning.flower import wire
from pfl_lightning.methods import FedPer
from sweeps import swept
from test_compression import of_the_page


def make():
    return make_client(FedPer, optimizer_lifetime="run")


KINDS = {"top-k": TopK(0.25), "sign": Sign(), "8 bits": EightBits(), "half": HalfPrecision()}


@pytest.mark.parametrize("name", swept(KINDS, ("top-k", "8 bits"), str))
@pytest.mark.by_default("8 bits")
def test_a_deployment_has_the_bits_and_bytes_of_a_simulation(name, tmp_path):
    kind = KINDS[name]
    remote = deploy(grid_of(make, tmp_path, compression=kind), make, compression=kind)
    here = fit(make(), compression=kind)
    assert equal(remote.weights, here.weights)
    assert [row["bytes/up"] for row in remote.rows] == [row["bytes/up"] for row in here.rows]
    assert here.rows[0]["bytes/up"] < fit(make(), max_rounds=1).rows[0]["bytes/up"]


def test_a_class_of_ones_own_has_the_bits_and_bytes_of_a_simulation_at_sites(tmp_path):
    kind = of_the_page()
    remote = deploy(grid_of(make, tmp_path, compression=kind), make, compression=kind)
    here = fit(make(), compression=kind)
    assert equal(remote.weights, here.weights)
    assert [row["bytes/up"] for row in remote.rows] == [row["bytes/up"] for row in here.rows]


def test_residuals_stay_at_sites_and_a_resumed_deployment_goes_on_with_them(tmp_path):
    kind = TopK(0.25)
    grid = grid_of(make_client, tmp_path / "sites", compression=kind)
    deploy(grid, make_client, tmp_path / "runs", compression=kind, callbacks=[Pause(1)])
    run = deploy(grid, make_client, tmp_path / "runs", compression=kind, ckpt_path="last")
    assert equal(run.weights, fit(make_client(), compression=kind).weights)
    assert all(state.kept and not state.residual for state in run.federation.clients.values())


@pytest.mark.parametrize("kind", [None, EightBits()])
def test_large_updates_wait_in_files_and_change_no_bit(kind, tmp_path, monkeypatch):
    for owner, name in ((engine, "LARGE"), (wire, "LARGE"), (wire, "SMALL")):
        monkeypatch.setattr(owner, name, 1)
    # smaller than most tensors, and no multiple of the size of a number
    monkeypatch.setattr(wire, "PIECE", 101)
    stored = []
    whole = wire.made_on_disk

    def made_on_disk(record, data, folder):
        stored.append(folder)
        return whole(record, data, folder)

    monkeypatch.setattr(wire, "made_on_disk", made_on_disk)
    grid = grid_of(make_client, tmp_path / "sites", compression=kind)
    remote = deploy(grid, make_client, tmp_path / "runs", compression=kind, max_rounds=2)
    here = fit(make_client(), compression=kind, max_rounds=2)
    assert equal(remote.weights, here.weights) and stored == [tmp_path / "runs"] * 8
    assert [row["bytes/up"] for row in remote.rows] == [row["bytes/up"] for row in here.rows]


@pytest.mark.parametrize("wrong", ["place", "length", "scale"])
def test_what_cannot_be_restored_is_refused(wrong, tmp_path):
    kind = EightBits() if wrong == "scale" else TopK(0.25)
    grid = grid_of(make_client, tmp_path, compression=kind)

    def spoil(node, asked, content):
        def change(records):
            for name in [name for name in records if name == "2/update"]:
                part = next(iter(records[name]["weights"].values()))
                if wrong == "place":
                    part["indices"] = part["indices"] + 10_000
                elif wrong == "length":
                    part["values"] = part["values"][:-1].clone()
                else:
                    part["scale"] = torch.tensor(3e38)

        rewrite(content, change)

    grid.spoil = spoil
    rows = deploy(grid, make_client, compression=kind, max_rounds=1).rows
    assert rows[0]["clients_refused"] == 1 and rows[0]["clients"] == 3
