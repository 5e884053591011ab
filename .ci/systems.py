"""Try the package on any system: its wheel in an environment of its own, README's first command, a comparison, tests.

``python .ci/systems.py`` needs no shell and no link, as Windows has neither; the tests are those of the marker
``portable``.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def first_command() -> list[str]:
    """Return README's first command after the installation, without the comment."""
    line = next(
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "pip install ." in line
    )
    return line.partition("&&")[2].partition("#")[0].split()


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder; end this program if it fails."""
    print("+", " ".join(command), flush=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if code := subprocess.run(command, cwd=folder, env=variables | {"OMP_NUM_THREADS": "1"}, check=False).returncode:
        raise SystemExit(f"exit code {code}: {' '.join(command)}")


def main() -> None:
    """Build and install the wheel, and run all that it shall do here."""
    # a file that is still open somewhere can't be removed on Windows, which would hide how the run has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        folder, empty = Path(work, "environment"), Path(work, "empty")
        venv.create(folder, with_pip=True)
        empty.mkdir()
        programs = folder / ("Scripts" if os.name == "nt" else "bin")
        python = str(programs / "python")
        run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work, "."], ROOT)
        (wheel,) = Path(work).glob("*.whl")
        run([python, "-m", "pip", "install", "--quiet", f"{wheel}[test]"], empty)
        program, *arguments = first_command()
        own = str(programs / program)
        run([own, *arguments], empty)
        run([own, *arguments, "--trainer.max_rounds", "22", "--ckpt_path", "last"], empty)
        small = ["--config", "protocols/digits_dir0.1", "--trainer.max_rounds", "2"]
        for engine in ("sequential", "vectorised"):
            line = ["fit", "--config", "methods/fedper", *small, "--trainer.engine", engine]
            run([own, *line, "--trainer.default_root_dir", engine], empty)
        run([own, "compare", "--methods", "FedAvg", "FedPer", *small], empty)
        run([own, "status", "runs"], empty)
        run([python, "-m", "pytest", "-m", "portable and not exhaustive", "-rs"], ROOT)


if __name__ == "__main__":
    sys.exit(main())
