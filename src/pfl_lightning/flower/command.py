"""The command ``pfl-lightning flower``: write the app of a deployment, and export models at sites."""

import json
import shutil
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.load_config import configured
from pfl_lightning.cli.usage import Arguments
from pfl_lightning.flower.export import export
from pfl_lightning.flower.runner import Runner
from pfl_lightning.runs.checkpoint_io import federation_in
from pfl_lightning.runs.deployment_status import FILE

# Flower is imported nowhere in this file: `export` and the help work without the extra installed
DESCRIPTION = """\
A federation at sites that keep their data, over Flower.

    pfl-lightning flower new clinics --config methods/fedper --config mine.yaml
    pfl-lightning flower run clinics
    pfl-lightning flower export --state-dir states --client 3 model.ckpt

The first writes a folder, an app of Flower, with the commands for server and sites in its README. The second runs it to
the end: where the server's app or the SuperLink dies, it goes on from the last round. The third is for a site: it
writes a client's model to a checkpoint of its own.
"""

# dependencies are empty: Flower would otherwise install packages on the server and at sites while a federation runs
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "A federation of pfl-lightning on Flower"
license = "Apache-2.0"
# Flower would install them at server and sites, where they are
dependencies = []

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.site:app"

[tool.flwr.app.config]
# of this folder, or packaged ones; later ones and flags win, as of `pfl-lightning fit`
config = "{configs}"
flags = ""
# for `flwr run`: "last" goes on with the newest run of the method, "unfinished" with the last one if that has no end
ckpt-path = ""
# seconds that a phase of a round waits for sites at most, and that the start waits for the clients that it needs
timeout = 600
patience = 600
# clients with a site that the first round needs; 0 is all. Others join when their site comes
min-available = 0
# share of the clients asked whose answers are enough, or a number of a round's clients; 1.0 waits for all clients of
# sites that aren't lost
min-results = 1.0
# seconds for further answers once there are enough
grace = 30
# seconds in which a lost site may come back; until then rounds wait for it
wait-for-lost = 0
# a late answer counts in the client's next training up to so many rounds later; 0 drops late answers
late-rounds = 0
# a round's model is evaluated at a site as it comes for the next round's training: one message a round, not two
evaluate-with-training = false
# what sites tell of their tables before the first round, so that all make the same inputs of them: "classes" and
# "categories", which are texts, and "scales", means and deviations of columns; each site has to allow it
first-exchange = ""
# file for what `pfl-lightning status` shows; on another machine it is in the folder of runs there
status = {status}
# largest norm of what a client changes; 0 refuses none, and warns of one far above the median
max-norm = 0.0
# names of the clients by id, separated by commas, such as "Bremen, Ulm"; empty knows clients by their ids alone
names = ""
# largest number of clients, up to which sites with further names may join while the federation runs; 0 lets nobody join
max-clients = 0
# a file of this folder with lines such as "ecdsa-sha2-nistp384 AAAAE2...: 0 3", a site's public key and its clients;
# if empty, the first registered key to claim a client owns it; "{{clients: 0 3, max-samples: 5000}}" instead of
# the ids bounds the samples that each may claim
keys = ""
"""

MODULE = """\
\"\"\"Flower's app of {whose}.\"\"\"

from pathlib import Path

from pfl_lightning.{module} import {app}

app = {app}(Path(__file__).parents[1])
"""

README = """\
# {name}

A federation of pfl-lightning on Flower: this folder is the app, and `pyproject.toml` has its settings. Server and sites
need `pip install 'pfl-lightning[flower]'` in the same version. Four commands try it on one machine, each in a terminal
and in this folder:

    flower-superlink --insecure --disable-runtime-dependency-installation --database "{here}/link.db"
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9101 \\
        --node-config 'clients="{clients[0]}" state-dir="{here}/states-0"'
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9102 \\
        --node-config 'clients="{clients[1]}" state-dir="{here}/states-1"'
    pfl-lightning flower run . 127.0.0.1:8000

`clients` are the ids, from 0 up, of the clients that a site has; all sites together have all.
`pfl-lightning status .` shows the sites, and how far the run is. docs/deployment.md of pfl-lightning has the rest: slow
and lost sites, data of the sites' own, TLS, keys, and what each side trusts.
"""


def new(folder: Path, names: list[str]) -> None:
    """Write the folder of an app: settings, entry points of server and sites, and a README.

    Args:
        folder: the new folder; must not exist yet.
        names: the app's configurations. Files of the user are copied into the folder; packaged configurations are
            written by name, since server and sites have them.

    Raises:
        MisconfigurationException: if the folder exists, or a configuration doesn't.
    """
    # a federation may run from the folder, and its settings would change under it
    if folder.exists():
        raise MisconfigurationException(f"flower new: {folder} is there already; give a new folder.")
    # Flower imports the app by this name, so that the name has to be an identifier
    package = "".join(letter if letter.isalnum() else "_" for letter in folder.name.lower()).strip("_")
    if not package.isidentifier() or iskeyword(package):
        raise MisconfigurationException(f"flower new: {folder.name!r} can't name an app; take letters, as of clinics.")
    # all names are looked up before anything is written: a wrong one leaves no half-made folder
    configs, files = [], []
    for name in names:
        path = find(name)
        if path is None:
            raise MisconfigurationException(f"flower new: --config {name} is no configuration{nearest(name)}")
        # a file of the user's exists on this machine alone, and travels with the app
        is_own = Path(name).is_file() or Path(f"{name}.yaml").is_file()
        configs.append(f"configs/{path.name}" if is_own else name)
        files += [path] if is_own else []
    (folder / package).mkdir(parents=True)
    for path in files:
        (folder / "configs").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "configs" / path.name)
    # by custom a project's name has hyphens where the package has underscores
    settings = {"name": package.replace("_", "-"), "publisher": "pfl", "package": package, "configs": " ".join(configs)}
    # a text of JSON is one of TOML
    settings["status"] = json.dumps(str(folder.resolve() / FILE))
    (folder / "pyproject.toml").write_text(PROJECT.format(**settings), encoding="utf-8")
    (folder / package / "__init__.py").touch()
    for name, whose, app, module in (
        ("server", "the server", "server_app", "flower.apps"),
        ("site", "a site", "client_app", "resident"),
    ):
        (folder / package / f"{name}.py").write_text(
            MODULE.format(whose=whose, app=app, module=module), encoding="utf-8"
        )
    # two sites for the trial in the README: even ids at one, odd ids at the other
    count = num_clients(names)
    halves = [" ".join(map(str, range(first, count, 2))) for first in (0, 1)]
    (folder / "README.md").write_text(
        README.format(name=folder.name, here=folder.resolve(), clients=halves), encoding="utf-8"
    )


def num_clients(names: list[str]) -> int:
    """Return the number of clients in a federation.

    Args:
        names: the federation's configurations, later ones over earlier ones.
    """
    # by the parser, as a default of the data module's class may give the number
    return int(configured([word for name in names for word in ("--config", name)]).datamodule.num_clients)


def main(args: list[str]) -> int:
    """Run ``pfl-lightning flower``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code: 0, or 1 if a run has failed or was stopped.

    Raises:
        MisconfigurationException: if the extra ``flower`` isn't installed, an argument is missing or wrong, or a file
            can't be written or found.
    """
    usage = "%(prog)s new APP --config NAME | %(prog)s run APP [CONNECTION] | %(prog)s export --client ID FILE"
    parser = Arguments("flower", usage=usage, description=DESCRIPTION)
    parser.add_argument("action", choices=["new", "run", "export"])
    parser.add_argument("path", type=Path, metavar="APP | FILE", help="the app's folder, or the checkpoint to write")
    parser.add_argument(
        "connection", nargs="?", default="", metavar="CONNECTION", help="run: as of flwr run, or HOST:PORT"
    )
    parser.add_argument("-c", action="append", default=[], metavar="SETTINGS", help="run: as of flwr run")
    parser.add_argument("--anew", action="store_true", help="run: begin anew where the last run hasn't finished")
    parser.add_argument("--root-certificates", type=Path, metavar="FILE", help="run: of a SuperLink at HOST:PORT")
    parser.add_argument("--config", action="append", default=[], metavar="NAME", help="new: as of fit, several in turn")
    parser.add_argument("--client", type=int, help="export: the client's id")
    parser.add_argument("--state-dir", type=Path, default=Path("states"), help="export: where the site keeps them")
    given = parser.parse_args(args)
    if given.action == "run":
        return Runner(given.path, given.connection, given.c, given.anew, given.root_certificates).run()
    if given.connection:
        parser.error(f"{given.action} takes no {given.connection}")
    if given.action == "export":
        if given.client is None:
            raise MisconfigurationException("flower export: --client says whose model is to be written; give an id.")
        export(federation_in(given.state_dir), given.client, given.path)
        print(f"{given.path} written")
        return 0
    # before the folder is written: without Flower the app could be neither tried nor run
    if find_spec("flwr") is None:
        raise MisconfigurationException(
            "flower new: Flower isn't installed; pip install 'pfl-lightning[flower]', with Python 3.11 or newer."
        )
    if not given.config:
        raise MisconfigurationException("flower new: --config is missing; give at least one, such as quickstart.")
    new(given.path, given.config)
    print(f"{given.path} written; {given.path / 'README.md'} says how it is run")
    return 0
