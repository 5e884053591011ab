"""Sums of three sites on this machine, for real: processes of Flower's, sockets, TLS and keys."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

SCRIPT = Path(__file__).parents[2] / "examples" / "deployment.py"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode")
FLAGS = "--trainer.secure_sum.bits 20"
VICTIM = 2
CHEAT = f"""
from pfl_lightning.flower.link import Link

ask = Link.ask


def told(self, kind, group, jobs, payloads):
    for client, row in jobs.items():
        if kind == "train" and client != {VICTIM}:
            # so large a number rounds a client's update to nothing
            row["agreement"] = row["agreement"].replace(f" {{row['most']}} ", f" {{2**40}} ")
            row["most"] = 2**40
    yield from ask(self, kind, group, jobs, payloads)


Link.ask = told
"""
"""What a cheating server's app has beside an honest one's."""


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and ten processes: LOOPBACK=1 runs it")
@pytest.mark.skipif(
    not all(shutil.which(program, path=str(Path(sys.executable).parent)) for program in PROGRAMS),
    reason="Flower's programs aren't beside Python",
)
def test_three_sites_sum_and_tell_no_single_update():
    spec = importlib.util.spec_from_file_location("deployment", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.CONFIG.replace("ControlVariates", "FedAvg").replace("aggregator: {{class_path: SCAFFOLD}}\n", "")
    with script.deployment({"site0": "0 3", "site1": "1", f"site{VICTIM}": str(VICTIM)}) as deployed:
        deployed.superlink()
        for name in deployed.sites:
            deployed.register(name)
        # as operators give it to each other, and not the server's
        known = deployed.folder / "known.yaml"
        public = {(deployed.folder / f"{name}.pub").read_text().strip(): own for name, own in deployed.sites.items()}
        known.write_text("".join(f"{key}: {clients}\n" for key, clients in public.items()))
        for name in deployed.sites:
            deployed.supernode(name, f'sum-key="{deployed.folder / name}" sum-keys="{known}"')
        folder = script.app(deployed, text)
        seen: set[bytes] = set()

        def run(name, more=""):
            settings = f'keys="sites.yaml" flags="{FLAGS} --trainer.default_root_dir {deployed.folder}/{name}" {more}'
            process = deployed.start(name, "pfl-lightning", "flower", "run", str(folder), "local", "-c", settings)

            def ended():
                # looked at all along, as the SuperLink deletes what has been fetched
                for path in deployed.folder.glob("link.db*"):
                    data = path.read_bytes()
                    seen.update(entry for entry in (b"/masked", b"/update") if entry in data)
                return process.poll() is not None

            deployed.wait(ended)
            return process.returncode, deployed.said(name)

        # an honest server
        code, said = run("sums")
        assert code == 0, said
        script.in_one_process(deployed)
        ends = {where: script.checkpoints(deployed, where) for where in ("sums", "here")}
        paths = {where: path for where, (path,) in ends.items()}
        states = {where: torch.load(path, weights_only=True)["state_dict"] for where, path in paths.items()}
        apart = max(float((states["sums"][name] - own).abs().max()) for name, own in states["here"].items())
        # sites draw batches anew, so that no bits are those of a simulation, and the federation learns as it does
        assert 0 < apart < 0.5
        losses = {where: [float(row["train/loss"]) for row in script.rows_of(path)] for where, path in paths.items()}
        assert losses["sums"] == pytest.approx(losses["here"], rel=0.3) and losses["sums"][-1] < losses["sums"][0]
        # of what sites send the server's log and database have no update, masked ones alone
        said += deployed.said("superlink")
        assert "Traceback" not in said and "/update" not in said and "left out" not in said
        assert seen == {b"/masked"}
        # a server that tells the victim another number than all others
        server = folder / "clinics" / "server.py"
        honest = server.read_text()
        server.write_text(honest + CHEAT)
        code, said = run("cheat")
        assert code == 0 and said.count("has no sum") >= 3, said
        (path,) = script.checkpoints(deployed, "cheat")
        assert [row["clients"] for row in script.rows_of(path)] == ["0", "0", "0"]
        server.write_text(honest)
        # the first round again, without the victim
        deployed.kill(f"site{VICTIM}")
        code, said = run("again", "min-available=3")
        assert code == 1 and "has answered this model in a sum with keys of clients 0 1 2 3" in said, said
        assert not any(
            row["clients"] != "0" for path in script.checkpoints(deployed, "again") for row in script.rows_of(path)
        )
