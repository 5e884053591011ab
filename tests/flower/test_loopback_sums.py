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


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and ten processes: LOOPBACK=1 runs it")
@pytest.mark.skipif(
    not all(shutil.which(program, path=str(Path(sys.executable).parent)) for program in PROGRAMS),
    reason="Flower's programs aren't beside Python",
)
def test_three_sites_give_the_model_of_a_plain_sum():
    spec = importlib.util.spec_from_file_location("deployment", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.CONFIG.replace("ControlVariates", "FedAvg").replace("aggregator: {{class_path: SCAFFOLD}}\n", "")
    with script.deployment({"site0": "0 3", "site1": "1", "site2": "2"}) as deployed:
        deployed.superlink()
        for name in deployed.sites:
            deployed.register(name)
            deployed.supernode(name)
        folder, settings = script.app(deployed, text), f'keys="sites.yaml" flags="{FLAGS}"'
        process = deployed.start("sums", "pfl-lightning", "flower", "run", str(folder), "local", "-c", settings)
        script.in_one_process(deployed)
        root = str(deployed.folder / "summed")
        script.command("fit", "--config", str(deployed.config), "--trainer.default_root_dir", root, *FLAGS.split())
        seen: set[bytes] = set()

        def ended():
            # looked at all along, as the SuperLink deletes what has been fetched
            for path in deployed.folder.glob("link.db*"):
                data = path.read_bytes()
                seen.update(entry for entry in (b"/masked", b"/update") if entry in data)
            return process.poll() is not None

        deployed.wait(ended)
        assert process.returncode == 0, deployed.said("sums")
        ends = {where: script.checkpoints(deployed, where) for where in ("runs", "here", "summed")}
        states = {where: torch.load(path, weights_only=True)["state_dict"] for where, (path,) in ends.items()}
        plain, summed, sites = (states[where] for where in ("here", "summed", "runs"))
        assert all(torch.equal(sites[name], summed[name]) for name in plain)
        apart = max(float((sites[name] - plain[name]).abs().max()) for name in plain)
        assert 0 < apart < 1e-4
        # of what sites send the server's log and database have no update, masked ones alone
        said = deployed.said("sums") + deployed.said("superlink")
        assert "Traceback" not in said and "/update" not in said and "left out" not in said
        assert seen == {b"/masked"}
