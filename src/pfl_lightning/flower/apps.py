"""Flower's server app and client app for a folder from ``pfl-lightning flower new``."""

import logging
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.cli.configs import find
from pfl_lightning.cli.errors import mistake
from pfl_lightning.cli.load_config import Configured, complaint, configured
from pfl_lightning.cli.usage import silence
from pfl_lightning.cli.yaml_text import load
from pfl_lightning.data.client_names import is_integer
from pfl_lightning.flower.class_paths import check_arguments, check_class_paths, texts
from pfl_lightning.flower.client_app import END, Worker, app_of
from pfl_lightning.flower.first_exchange import kept, take_over
from pfl_lightning.flower.link import MOST_SAMPLES, Keys, Quorum
from pfl_lightning.flower.server_app import serve
from pfl_lightning.flower.site import Site, ids_of
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.flower.template import Refused
from pfl_lightning.runs.deployment_status import ENDED, FILE, UNFINISHED, DeploymentStatus, project_of

AT_SITES = """
    --trainer.logger false --trainer.enable_checkpointing false --trainer.enable_progress_bar false
    --trainer.enable_model_summary false --trainer.callbacks null --trainer.plugins null --trainer.strategy auto
    --trainer.devices 1 --trainer.num_nodes 1
"""
"""Options of every site, stronger than the server's configuration: one device, no logs, checkpoints or callbacks."""
COUNTS = {"min-available": "min_available", "min-results": "min_results", "late-rounds": "late_rounds"}
SECONDS = {"grace": "grace", "wait-for-lost": "wait_for_lost"}
"""Settings of `Quorum` by their names in an app."""
PARTING, POLL = 20.0, 0.2
"""Seconds for sites to end what stays for a federation, and between two looks."""
AT_SERVER = "--trainer.enable_progress_bar false --trainer.accelerator cpu"


class Mistake(Exception):
    """A user's mistake, described in one sentence; ends the server's app."""


def without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback of a `Mistake` from a log record; return True, to keep the record."""
    # Flower logs every error of an app with a traceback, and a mistake in settings is not found in code
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Mistake):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


def arguments(folder: Path, run: Mapping[str, Any]) -> list[str]:
    """Return the command line for an app's configuration.

    Args:
        folder: the folder of the app.
        run: Flower's ``run_config``: ``config`` has names of files in the folder or of packaged configurations, apart
            by spaces; ``flags`` has further options.
    """
    args = []
    for name in str(run["config"]).split():
        # a file of the folder comes before a packaged configuration of the same name
        args += ["--config", str(folder / name if (folder / name).is_file() else find(name) or name)]
    return args + shlex.split(str(run.get("flags", "")))


def plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning's line without the place in the code, where no operator has anything to mend.

    Args:
        message: the warning.
        category: its class, unused, as are the further ones of `warnings.formatwarning`.
        filename: the file of the place.
        lineno: the number of its line.
        line: the line.
    """
    return f"pfl-lightning: warning: {' '.join(str(message).split())}\n"


def client_app(folder: Path) -> ClientApp:
    """Return the client app, for sites, which makes all anew for each message; `pfl_lightning.resident` has another.

    Args:
        folder: the folder of the app.
    """
    return app_of(lambda context: worker_of(folder, context))


def worker_of(folder: Path, context: Context) -> Worker:
    """Return the worker of a site, with the site's data.

    Args:
        folder: the folder of the app.
        context: Flower's settings of the run and of the node.
    """
    silence()
    warnings.formatwarning = plain_warning
    node = context.node_config
    own = str(node.get("classes", "")).split()
    args = arguments(folder, context.run_config)
    data = str(node.get("data", ""))
    # before the site adds options: what comes from the server is read with suspicion, the site's own is not
    check_arguments(args, [*own, *(classes_of(data) if data else ())])
    if data:
        args += ["--config", data]
    # last, as later options win over the server's
    args += [*shlex.split(AT_SITES), *shlex.split(str(node.get("flags", "")))]

    def check(settings: Mapping[str, Any]) -> None:
        # again after parsing, as the parser may read a name out of a text in its own way
        check_class_paths({"model": settings["model"]}, own)

    try:
        cli = configured(args, check)
    # the parser has told its own terminal, and the server has to hear of it too
    except SystemExit:
        raise Refused(wrong(args)) from None
    states = StateVersions(Path(state_folder(node, context.node_id), federation_name(folder)))
    run = context.run_config
    agrees = bool(exchange_in(run))
    cli.datamodule.prepare_data()
    cli.datamodule.setup()
    if agrees and (agreed := kept(states.folder)):
        take_over(cli.datamodule, agreed)
    return Worker(
        cli.trainer,
        cli.model,
        Site.of(node, cli.datamodule, names_in(run), joins_in(run), agrees),
        states,
        cli.aggregator,
        context.state,
        cli.text(),
        context.run_id,
        site_keys_in(node, names_in(run)),
    )


def site_keys_in(node: Mapping[str, Any], names: Sequence[str]) -> SiteKeys | None:
    """Return the keys by which sites of secure sums know each other; None for a site without.

    Args:
        node: Flower's ``node_config``: ``sum-key`` has the file of the site's private key, and ``sum-keys`` a list of
            all sites' public keys as `keys_in` reads it, which the operator has from the other sites and not from the
            server.
        names: names of all clients by id; empty for clients known by ids alone.

    Raises:
        MisconfigurationException: if one of the two is missing, or can't be read.
    """
    key, keys = (str(node.get(name, "")) for name in ("sum-key", "sum-keys"))
    if not key and not keys:
        return None
    if not key or not keys:
        raise MisconfigurationException(
            f"sum-key={key!r} and sum-keys={keys!r} go together: the site's private key, and all sites' public keys."
        )
    return SiteKeys(Path(key), keys_in(Path(keys), names, setting="sum-keys"))


def wrong(args: list[str]) -> str:
    """Return what is wrong with the settings of a command line that the parser has refused."""
    found = complaint(args)
    return "its settings are refused; its own log says why." if found is None else str(found)


def state_folder(node: Mapping[str, Any], node_id: int) -> str:
    """Return the folder of what stays with a site's clients.

    Args:
        node: Flower's ``node_config``.
        node_id: Flower's id of the node, for a node that doesn't name its clients.
    """
    # a site without a key gets another id at each start, and would find nothing that it has kept
    own = re.sub(r"\W+", "_", str(node.get("clients", ""))).strip("_")
    return str(node.get("state-dir") or f"states-{own or node_id}")


def federation_name(folder: Path) -> str:
    """Return the name of an app as that of a folder, in which a site keeps what is of this federation.

    Resumed runs have it too, and another federation at the same sites has another one.

    Args:
        folder: the folder of the app.
    """
    try:
        name = str(project_of(folder)["project"]["name"])
    except (OSError, ValueError, LookupError, TypeError):
        name = ""
    # what comes from the server must not lead out of the site's folder
    return re.sub(r"\W+", "-", name)


def classes_of(name: str) -> Iterator[str]:
    """Yield the class names in a site's own configuration; the app's configuration may name these classes too.

    Args:
        name: path of the configuration, or the name of a packaged one.
    """
    for setting, text in texts(load(Path(find(name) or name).read_text(encoding="utf-8")), ""):
        if setting.endswith("class_path"):
            yield text


def server_app(folder: Path) -> ServerApp:
    """Return the server app.

    Args:
        folder: the folder of the app.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        silence()
        warnings.formatwarning = plain_warning
        logging.getLogger("flwr").addFilter(without_traceback)
        try:
            fitted(grid, folder, context.run_config)
        except Exception as error:
            if reason := mistake(error):
                raise Mistake(reason) from None
            raise
        # Flower would wait for the end of an app that only exits. A SuperLink that dies may end its apps by a signal,
        # and the run is then not at fault.
        except SystemExit as ended:
            raise Mistake(f"{ENDED} (exit code {ended.code}).") from None

    return app


def fitted(grid: Grid, folder: Path, run: Mapping[str, Any]) -> None:
    """Train the federation of an app's configuration.

    Args:
        grid: Flower's connection to the sites.
        folder: the folder of the app.
        run: Flower's ``run_config``.
    """
    # before the app's options, so that a folder may choose another device for the server
    try:
        cli: Configured = configured([*shlex.split(AT_SERVER), *arguments(folder, run)])
    except SystemExit:
        raise Mistake("the app's settings are refused; the line above says why.") from None
    status = status_in(run, Path(cli.trainer.default_root_dir))
    # Flower's settings have no None: an empty text and 0 stand for it
    ckpt_path = str(run.get("ckpt-path", "")) or None
    if ckpt_path == UNFINISHED:
        last = DeploymentStatus(status).unfinished
        ckpt_path = None if last is None else str(last)
    try:
        serve_app(grid, cli, run, folder, status, ckpt_path)
    # not where a signal ends the app: it goes on later, with the same processes
    except Exception:
        part(grid)
        raise
    part(grid)


def serve_app(
    grid: Grid, cli: Configured, run: Mapping[str, Any], folder: Path, status: Path, ckpt_path: str | None
) -> None:
    """Train the federation of an app.

    Args:
        grid: Flower's connection to the sites.
        cli: the built classes of its configuration.
        run: Flower's ``run_config``.
        folder: the folder of the app.
        status: the file for the state of the deployment.
        ckpt_path: the checkpoint to go on from; None begins a run.
    """
    serve(
        grid,
        cli.trainer,
        cli.model,
        cli.datamodule,
        cli.aggregator,
        ckpt_path=ckpt_path,
        keys=keys_of(folder / str(run["keys"]), names_in(run), joins_in(run)) if run.get("keys") else None,
        timeout=float(run["timeout"]),
        patience=float(run["patience"]),
        max_norm=float(run["max-norm"]) or None,
        names=names_in(run),
        quorum=quorum_in(run),
        status=status,
        max_clients=int(run.get("max-clients", 0)),
        together=bool(run.get("evaluate-with-training", False)),
        first_exchange=exchange_in(run),
    )


def part(grid: Grid) -> None:
    """Have sites end the processes that stay for the federation, and wait a while for their word.

    Args:
        grid: Flower's connection to the sites.
    """
    # a federation that has ended is none that fails
    with suppress(Exception):
        last = [Message(RecordDict(), dst_node_id=node, message_type=END, ttl=PARTING) for node in grid.get_node_ids()]
        waiting, until = {name for name in grid.push_messages(last) if name}, time.monotonic() + PARTING
        while waiting and time.monotonic() < until:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(waiting)}
            time.sleep(POLL)


def quorum_in(run: Mapping[str, Any]) -> Quorum:
    """Return the clients that a start and a phase wait for; settings that the app lacks have their defaults.

    >>> quorum_in({"min-results": 8, "grace": 5})
    Quorum(min_available=0, min_results=8, grace=5.0, wait_for_lost=0.0, late_rounds=0)

    Args:
        run: Flower's ``run_config``.
    """
    given: dict[str, Any] = {name: run[key] for key, name in COUNTS.items() if key in run}
    given |= {name: float(run[key]) for key, name in SECONDS.items() if key in run}
    return Quorum(**given)


def status_in(run: Mapping[str, Any], root: Path) -> Path:
    """Return the file for the state of the deployment: as the app says, or in the folder of runs.

    Args:
        run: Flower's ``run_config``: ``status`` has a file, usually in the folder from which the app is run.
        root: the folder of runs, which is made; the file is there if ``status`` is empty or of another machine.
    """
    path = Path(str(run.get("status", "")))
    if path.is_absolute() and path.parent.is_dir():
        return path
    root.mkdir(parents=True, exist_ok=True)
    return root / FILE


def names_in(run: Mapping[str, Any]) -> list[str]:
    """Return the names of all clients by id; empty for clients known by ids alone.

    >>> names_in({"names": "Bremen, St. Josef"}), names_in({})
    (['Bremen', 'St. Josef'], [])

    Args:
        run: Flower's ``run_config``: ``names`` has the names, separated by commas.
    """
    return [name.strip() for name in str(run.get("names", "")).split(",") if name.strip()]


def exchange_in(run: Mapping[str, Any]) -> list[str]:
    """Return what sites tell of their tables before the first round.

    Args:
        run: Flower's ``run_config``.
    """
    return str(run.get("first-exchange", "")).split()


def joins_in(run: Mapping[str, Any]) -> bool:
    """Return whether clients with other names than the app's may join.

    Args:
        run: Flower's ``run_config``.
    """
    return int(run.get("max-clients", 0)) > len(names_in(run)) > 0


def keys_of(path: Path, names: Sequence[str], joins: bool) -> Callable[[], Keys]:
    """Return a function that reads the list of keys anew where the file has changed.

    Args:
        path: as for `keys_in`.
        names: as for `keys_in`.
        joins: as for `keys_in`.

    Raises:
        MisconfigurationException: if the file can't be read now.
    """
    last = keys_in(path, names, joins)

    def read() -> Keys:
        nonlocal last
        # a mistake in a running federation's file must not end it
        try:
            last = keys_in(path, names, joins)
        except MisconfigurationException as error:
            rank_zero_warn(f"{error} The list of before holds.")
        return last

    return read


def keys_in(
    path: Path, names: Sequence[str] = (), joins: bool = False, setting: str = "keys"
) -> dict[str, dict[int | str, int]]:
    """Return the allowed clients of each public key, with the largest number of samples per client and split.

    Args:
        path: a YAML file with lines such as ``ecdsa-sha2-nistp384 AAAAE2...: 0 3``: a key from a ``.pub`` file of
            ``ssh-keygen``, and client ids or names; ``{clients: 0 3, max-samples: 5000}`` in their place sets a limit.
        names: names of all clients by id; empty for clients known by ids alone.
        joins: whether other names are of clients that may join.
        setting: the setting with the file, for the error.

    Raises:
        MisconfigurationException: if the file can't be read so.
    """
    try:
        lines = load(path.read_text(encoding="utf-8"), yaml.BaseLoader).items()
        return {public_key(key): clients_in(value, names, joins) for key, value in lines}
    except (OSError, ValueError, AttributeError, yaml.YAMLError, MisconfigurationException) as error:
        raise MisconfigurationException(
            f"{setting}={path.name!r} can't be read ({' '.join(str(error).split())[:200]}); give lines such as "
            "'ecdsa-sha2-nistp384 AAAAE2...: 0 3', with a site's public key and the ids of its clients, or "
            "'{clients: 0 3, max-samples: 5000}' in place of the ids."
        ) from error


def clients_in(value: Any, names: Sequence[str] = (), joins: bool = False) -> dict[int | str, int]:
    """Return the clients of a key, each with the largest number of samples in a split.

    >>> clients_in({"clients": "0 3", "max-samples": 5000})
    {0: 5000, 3: 5000}

    Args:
        value: the part of a line after the key: ids or names, or a mapping with ``clients``.
        names: names of all clients by id; empty for clients known by ids alone.
        joins: whether other names are of clients that may join.

    Raises:
        ValueError: if the value is of another form, or the limit out of its range.
    """
    settings = value if isinstance(value, Mapping) else {"clients": value}
    given = str(settings.get("max-samples", MOST_SAMPLES))
    if "clients" not in settings or not settings.keys() <= {"clients", "max-samples"}:
        raise ValueError(f"{' and '.join(map(str, settings)) or 'nothing'} in place of clients and max-samples")
    if not is_integer(given) or not 0 < int(given) <= MOST_SAMPLES:
        raise ValueError(f"max-samples={given} is no number from 1 to {MOST_SAMPLES}")
    return dict.fromkeys(ids_of(str(settings["clients"]), names, joins), int(given))


def public_key(text: str) -> str:
    """Return a public key in PEM, the form of Flower's server.

    Args:
        text: one line in the form of ``ssh-keygen``.
    """
    return load_ssh_public_key(text.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
