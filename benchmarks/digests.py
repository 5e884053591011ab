r"""Fingerprints of what every method file gives: a change that shall leave the numbers alone leaves these alone.

    python benchmarks/digests.py > before.txt
    python benchmarks/digests.py --engine processes > after.txt; diff before.txt after.txt

Three rounds on the digits with three of five clients. A line has the method, and the digest of the global model and of
every client's payload and personal entries in the last checkpoint. Bits depend on the machine and on torch's version.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from pfl_lightning.cli.main import main as command
from pfl_lightning.data.record_columns import in_rows
from pfl_lightning.messages import digest

CONFIGS = Path(__file__).parent.parent / "configs"
SETTINGS = "--data.num_clients 5 --trainer.clients_per_round 3 --trainer.max_rounds 3 --data.batch_size 32"
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.accelerator cpu"


def fingerprint(method: Path, data: Path, engine: str) -> str:
    """The digest of a method's last checkpoint, or why there is none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
        own = ["--config", str(method), "--config", str(data), "--trainer.default_root_dir", folder]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                command(["fit", *own, *SETTINGS.split(), *QUIET.split(), "--trainer.engine", engine])
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
        (path,) = Path(folder).rglob("last.ckpt")
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    federation = in_rows(checkpoint["federation"])
    personal = {client: state.get("personal", {}) for client, state in federation["clients"].items()}
    return digest([by_name(part) for part in (checkpoint["state_dict"], federation["payloads"], personal)])


def by_name(record: Any) -> Any:
    """A record whose entries are in the order of their names, so that only tensors count."""
    if isinstance(record, dict):
        return {name: by_name(record[name]) for name in sorted(record, key=str)}
    return [by_name(value) for value in record] if isinstance(record, (list, tuple)) else record


def main() -> None:
    """Prints a line a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", help="names of files in configs/methods; all by default")
    parser.add_argument("--data", type=Path, default=CONFIGS / "protocols" / "digits_dir0.1.yaml")
    parser.add_argument("--engine", default="sequential")
    args = parser.parse_args()
    names = args.methods or sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
    torch.set_num_threads(1)
    for name in names:
        print(name, fingerprint(CONFIGS / "methods" / f"{name}.yaml", args.data, args.engine), flush=True)


if __name__ == "__main__":
    main()
