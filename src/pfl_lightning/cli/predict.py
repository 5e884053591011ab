"""The command ``pfl-lightning predict``: predict for new rows with the clients' models of a finished run."""

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, cast

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tqdm import tqdm

import pfl_lightning.data
import pfl_lightning.methods
from pfl_lightning.cli.earlier_run import TABLES, newest
from pfl_lightning.cli.load_config import configured
from pfl_lightning.cli.usage import Arguments, UsageError
from pfl_lightning.cli.yaml_text import read_settings
from pfl_lightning.client.generation import AT_ONCE, Coded, continued, scores
from pfl_lightning.client.module import payloads_of, saved_client
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.data.files import ARRAYS, read_array, read_checkpoint
from pfl_lightning.data.sources.chat_data import LISTS, PAIRS, conversation_of, reader_of, rows_in_json
from pfl_lightning.data.sources.columns import as_text, read_table
from pfl_lightning.federation.prediction import NeedsSamples, Predictions
from pfl_lightning.runs.checkpoint_io import federation_in, models_in
from pfl_lightning.runs.report import write_rows
from pfl_lightning.trainer import FederatedTrainer, is_of_site

DESCRIPTION = """\
Predict for new rows with the clients' models of a run, and write a CSV file.

    pfl-lightning predict --ckpt_path best --client Bremen --data rows.csv --out predictions.csv

All settings come from the run's own config.yaml. The run's data are read only where a model can't be made without them.
At a site of a deployment, --state-dir predicts with the models of the site's own clients:

    pfl-lightning predict --state-dir /srv/clinic/states --data rows.csv --out predictions.csv

Of a language model, the clients' models answer prompts, one in each line of a .txt file; or conversations, one in each
line of a .jsonl file, with the right answers if they are to be compared:

    pfl-lightning predict --client all --data prompts.txt --out answers.csv
"""
QUIET = (
    "--trainer.logger false --trainer.enable_checkpointing false --trainer.enable_progress_bar false "
    "--trainer.enable_model_summary false --trainer.callbacks null --trainer.devices 1 --trainer.strategy auto"
)
"""Settings for a Trainer that only predicts."""


class Rows(NamedTuple):
    """Rows to predict for.

    Args:
        of_clients: raw rows for the data module by client; or one for all clients.
        places: by client, the numbers of its rows in the file, from 0; empty if all clients predict for all rows.
    """

    of_clients: Any
    places: dict[str, list[int]]


def main(args: list[str]) -> int:
    """Run ``pfl-lightning predict``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: if there is no such checkpoint, configuration or file of rows.
    """
    options = parser().parse_args(args)
    at_site = options.state_dir is not None
    if at_site:
        options.state_dir = federation_in(options.state_dir)
    path = options.state_dir if at_site else checkpoint_of(options.ckpt_path, options.runs)
    file = configuration_of(options, path if at_site else path.parent.parent, "predict")
    check_place(options.out)
    config = read_settings(file, f"predict: --config {file}")
    if options.data is not None and options.data.suffix in (".txt", ".jsonl"):
        return answer(options, path, file, config)
    column = options.client_column or given_column(config, options)
    rows = None
    if options.data is not None:
        checkpoint = next(iter(models_in(path, best=options.ckpt_path == "best").values())) if at_site else path
        rows = read_rows(options.data, column, config, checkpoint, options.fill_missing_columns)
    if rows is not None and rows.places and options.client:
        raise UsageError("predict: --client and --client_column exclude each other; give one of them.")
    if rows is not None and not rows.places and not options.client and not at_site:
        raise UsageError("predict: --client is missing: give names of clients, or all, or --client_column.")
    clients = None if options.client in (None, ["all"]) else options.client
    if at_site:
        results = predictions_at_site(options, file, config, rows, clients)
    else:
        results = predictions(path, file, config, rows, clients)
    write(options.out, results, {} if rows is None else rows.places)
    count = len(results)
    print(f"{sum(map(len, results.values()))} predictions of {count} client{'s' * (count != 1)}: {options.out}")
    return 0


def parser() -> Arguments:
    """Return the parser of the command's arguments."""
    made = Arguments("predict", usage="%(prog)s --client NAME --data FILE [options]", description=DESCRIPTION)
    made.add_argument(
        "--ckpt_path",
        default="best",
        metavar="CKPT",
        help="best or last of the newest run, a run's folder, or a checkpoint (default: best)",
    )
    made.add_argument(
        "--state-dir",
        type=Path,
        metavar="FOLDER",
        help="of a site of a deployment: its clients predict, by default all of them",
    )
    add_run_options(made)
    made.add_argument(
        "--client",
        nargs="+",
        metavar="NAME",
        help="names or ids of clients, all, or new for a client that the run doesn't know",
    )
    made.add_argument("--client_column", metavar="COLUMN", help="column of the table with each row's client")
    made.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="rows: a .csv or .parquet table, or inputs as .npy or .pt (default: the clients' own test rows); prompts "
        "for a language model: a .txt file with one in each line, or a .jsonl file of conversations",
    )
    made.add_argument(
        "--fill_missing_columns",
        action="store_true",
        help="take a column that the table lacks as a gap in all rows, as data.preprocessing fills gaps",
    )
    made.add_argument(
        "--max_new_tokens", type=int, default=64, metavar="N", help="longest answer to a prompt (default: 64)"
    )
    made.add_argument(
        "--batch_size", type=int, default=AT_ONCE, metavar="N", help=f"prompts answered at once (default: {AT_ONCE})"
    )
    made.add_argument(
        "--out", type=Path, default=Path("predictions.csv"), metavar="FILE", help="default: predictions.csv"
    )
    return made


def checkpoint_of(given: str, runs: Path, command: str = "predict") -> Path:
    """Return the checkpoint's file.

    Args:
        given: ``best`` or ``last``, a run's folder, or a file.
        runs: the folder of runs.
        command: the command, for messages.

    Raises:
        UsageError: if there is no such checkpoint.
    """
    if given in ("best", "last"):
        if (found := newest(runs, given, configured=False)) is None:
            raise UsageError(f"{command}: no run in {runs} has a checkpoint {given}.ckpt; give --runs, or a file.")
        return found
    path = Path(given)
    if path.is_dir():
        kept = [path / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
        if not (there := [file for file in kept if file.is_file()]):
            raise UsageError(f"{command}: {path} has no checkpoints/best.ckpt; give the folder of a run, or a file.")
        return there[0]
    if not path.is_file():
        raise UsageError(f"{command}: {given} is no file; give best, last, a run's folder or a checkpoint.")
    return path


def configuration_of(options: Any, folder: Path, command: str, run: str = "--ckpt_path ") -> Path:
    """Return the file with a run's configuration: ``--config``, or else the one in a folder.

    Args:
        options: the command's options.
        folder: the folder with ``config.yaml``.
        command: the command, which is the Trainer's method too.
        run: the beginning of the command's argument for a run.

    Raises:
        UsageError: if there is none, as after a run from Python.
    """
    file: Path = options.config or folder / "config.yaml"
    if file.is_file():
        return file
    other = newest(options.runs, options.ckpt_path) if options.ckpt_path in ("best", "last") else None
    instead = f", or take the newest run of the command line by {run}{other.parents[1]}" if other else ""
    raise UsageError(
        f"{command}: {file} is no file; a run from Python writes none: call trainer.{command}(..., ckpt_path=...) "
        f"there, or give the configuration of the checkpoint's run by --config{instead}."
    )


def add_run_options(made: Arguments) -> None:
    """Add the options that tell where runs and a run's configuration are.

    Args:
        made: the parser.
    """
    made.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    made.add_argument("--config", type=Path, help="configuration of the run, if it isn't in the run's folder")


def given_column(config: Mapping[str, Any], options: Any) -> str | None:
    """Return the run's own column of clients, if the table has it and no clients are named."""
    column = settings_of_data(config).get("client")
    if options.client or not isinstance(column, str) or options.data is None:
        return None
    if options.data.suffix not in TABLES or not options.data.is_file():
        return None
    return column if column in read_table(options.data, None, csv_of(config, options.data)) else None


def part_of(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the settings of a part of a configuration, such as ``data``, also if it is given by its class alone.

    Raises:
        UsageError: if the part is neither settings nor a text.
    """
    settings = config.get(part) or {}
    if isinstance(settings, str):
        return {"class_path": settings}
    if not isinstance(settings, dict):
        raise UsageError(f"predict: {part}={settings!r} of the configuration must be settings by name.")
    return settings


def settings_of_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration's data module."""
    return part_of(part_of(config, "data"), "init_args")


def csv_of(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the run's settings for reading CSV files; a Parquet file has none."""
    settings = settings_of_data(config) if path.suffix == ".csv" else {}
    return {"decimal": settings.get("decimal", "."), "sep": settings.get("separator", ",")}


def columns_in(checkpoint: Path) -> tuple[list[str], list[str]]:
    """Return the columns of a run's training table that held texts, and those of the inputs; none without a table."""
    for entry in read_checkpoint(checkpoint).values():
        table = entry.get("table") if isinstance(entry, dict) else None
        if isinstance(table, dict) and "texts" in table:
            return list(table["texts"]), list(entry["preprocessing"]["features"])
    return [], []


def read_rows(path: Path, column: str | None, config: Mapping[str, Any], checkpoint: Path, fills: bool = False) -> Rows:
    """Return the rows of a file.

    Args:
        path: the file.
        column: column of each row's client; None lets each client predict for all rows.
        config: the run's configuration.
        checkpoint: the run's checkpoint, which knows the columns of texts and of inputs.
        fills: whether a missing column of the inputs is a gap in all rows.

    Raises:
        UsageError: if the file is missing or of another kind, has no such column or no row.
    """
    if not path.is_file():
        folder = "is a folder: save its inputs as a tensor in a .pt file" if path.is_dir() else "is no file"
        raise UsageError(f"predict: --data {path} {folder}; give a .csv, .parquet, .npy or .pt file.")
    if path.suffix in TABLES:
        if column is None and not fills:
            return Rows(path, {})
        csv = csv_of(config, path)
        there = read_table(path, None, csv)
        if column is not None and column not in there:
            raise UsageError(f"predict: --client_column {column} is no column of {path}, which has {', '.join(there)}.")
        # as in training: 01 isn't 1
        texts, features = columns_in(checkpoint)
        table = read_table(path, there, csv, texts if column is None else [column, *texts])
        if not len(table):
            raise UsageError(f"predict: --data {path} has no row to predict for; give at least one.")
        if fills:
            table = table.assign(**{name: math.nan for name in features if name not in there})
        if column is None:
            return Rows(table, {})
        if gaps := int(table[column].isna().sum()):
            raise UsageError(f"predict: column {column!r} of {path} has no client in {gaps} of {len(table)} rows.")
        names = table[column].map(as_text).to_numpy()
        places = {name: np.flatnonzero(names == name).tolist() for name in sorted(set(names))}
        # without the old row numbers, which messages about rows would else have beside positions
        return Rows({name: table.iloc[own].reset_index(drop=True) for name, own in places.items()}, places)
    if column is not None:
        raise UsageError(f"predict: --client_column {column} needs a table, and --data {path} is none.")
    if path.suffix in ARRAYS:
        return Rows(read_array(path, f"predict: --data {path}"), {})
    raise UsageError(f"predict: --data {path} must be a .csv, .parquet, .npy or .pt file.")


def answer(options: Any, path: Path, file: Path, config: Mapping[str, Any]) -> int:
    """Write what clients' models answer to prompts, the most likely token each time, as a CSV file.

    Prompts with right answers have columns of the agreement with these.

    Args:
        options: the command's options.
        path: the checkpoint, or a site's folder.
        file: the run's configuration.
        config: its contents.

    Raises:
        UsageError: if there are no prompts or no such clients, or the run has no texts.
    """
    asked = asked_in(options.data, options.client_column)
    if options.max_new_tokens < 1 or options.batch_size < 1:
        raise UsageError(
            f"predict: --max_new_tokens is {options.max_new_tokens} and --batch_size {options.batch_size}; both must "
            "be at least 1."
        )
    data = configured(["--config", str(file), *QUIET.split()]).datamodule
    if not isinstance(data, Coded):
        raise UsageError(
            f"predict: --data {options.data} has prompts, and the run's data, {type(data).__name__}, no texts; give a "
            ".csv, .parquet, .npy or .pt file."
        )
    try:
        encoded = [data.encode(each.prompt) for each in asked]
    # data of letters take texts alone
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"predict: --data {options.data} has prompts that {type(data).__name__} can't encode "
            f"({type(error).__name__}: {error}); give texts in a .txt file."
        ) from error
    at_site = options.state_dir is not None
    models = models_in(options.state_dir, best=options.ckpt_path == "best") if at_site else {}
    clients = None if options.client in (None, ["all"]) else options.client
    if clients is None:
        # a site's files are found by names and by ids, of which the name comes first
        clients = list({place: name for name, place in reversed(models.items())}.values())[::-1]
    names: list[str] = []
    if not at_site:
        saved = read_checkpoint(path)["federation"]
        names = list(saved.get("names") or [])
        clients = clients or names or list(map(str, payloads_of(saved)))
    if strangers := [client for client in clients if at_site and client not in models]:
        raise UsageError(f"predict: client {strangers[0]} is not at this site, which has {', '.join(models)}.")
    kind = class_of(config, "model", pfl_lightning.methods)
    rows = []
    window = cast(FederatedDataModule, data).input_shape[-1]
    # one for all: reading a language model's weights takes longer than an answer
    loaded = kind.load_from_checkpoint(models.get(clients[0], path), map_location="cpu")
    nets = loaded.architectures()
    for number, client in enumerate(clients, 1):
        # names come before ids
        whose = int(client) if client.isdigit() and client not in names and not at_site else client
        # at a site each client has a file of its own; else all have one, which is read once
        if number == 1 or at_site:
            own = models.get(client, path)
            federation = read_checkpoint(own, map_location=loaded.device, mapped=False)["federation"]
        saved = saved_client(own, federation, whose, loaded.architecture_of, loaded.device)
        # a copy shares the frozen weights, and has nothing of the client before
        model = deepcopy(nets[saved.architecture])
        model.become_saved(saved)
        places = [place for place, each in enumerate(asked) if each.client in (None, client)]
        title = f"predict: client {client}, {number} of {len(clients)}"
        print(f"{title}, {len(places)} prompts", file=sys.stderr)
        made: dict[int, str] = {}
        # no bar in files, which have the line above
        with tqdm(total=len(places), desc=title, file=sys.stderr, disable=None, leave=False) as bar:
            for place, tokens in continued(
                model,
                [encoded[place] for place in places],
                options.max_new_tokens,
                window,
                data.end_tokens,
                batch_size=options.batch_size,
            ):
                made[place] = data.decode(tokens)
                bar.update()
        # in the file's order, whatever the batches' was
        rows += [
            {"client": client, "prompt": asked[place].shown, "answer": made[own], "reference": asked[place].reference}
            for own, place in enumerate(places)
        ]
    note = judged(rows)
    save_rows(options.out, rows)
    print(f"{len(rows)} answers of {len(clients)} client{'s' * (len(clients) != 1)}{note}: {options.out}")
    return 0


class Asked(NamedTuple):
    """A prompt to answer.

    Args:
        prompt: a text, or messages.
        shown: the text of its last message.
        reference: the right answer; None without one.
        client: the client that answers; None for all.
    """

    prompt: Any
    shown: str
    reference: str | None = None
    client: str | None = None


def asked_in(path: Path, column: str | None) -> list[Asked]:
    """Return the prompts of a file, at least one.

    Args:
        path: a .txt file with a prompt in each line, or a .jsonl file with a conversation in each.
        column: key of each conversation's client; None lets all clients answer all.

    Raises:
        UsageError: if there is no such file, it has another form, or it has no prompt.
    """
    if not path.is_file():
        raise UsageError(
            f"predict: --data {path} is no file; give a .txt file with a prompt in each line, or a .jsonl file."
        )
    if path.suffix == ".txt":
        if column is not None:
            raise UsageError(
                f"predict: --client_column {column} needs a .jsonl file, and --data {path} has lines only."
            )
        try:
            asked = [Asked(line, line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise UsageError(f"predict: --data {path} is no text in UTF-8; save it as such.") from error
    else:
        try:
            asked = [conversation_in(row, f"row {place}", column) for place, row in enumerate(rows_in_json(path))]
        except MisconfigurationException as error:
            raise UsageError(f"predict: --data {path}: {error}") from error
    if not asked:
        raise UsageError(f"predict: --data {path} has 0 prompts; give at least 1.")
    return asked


def conversation_in(row: Any, name: str, column: str | None) -> Asked:
    """Return the prompt of a row, and the right answer if the row ends with one.

    Args:
        row: a row as for `ChatData`, of which the last answer may be missing.
        name: the row's name, for messages.
        column: key of the row's client.

    Raises:
        MisconfigurationException: if the row has another form.
    """
    if not isinstance(row, Mapping) or (column is not None and column not in row):
        there = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise MisconfigurationException(
            f"{name} (counted from 0) has {there}; give rows with messages, or a prompt and an answer"
            + (f", and the column {column} of --client_column" if column else "")
        )
    client = None if column is None else as_text(row[column])
    if listed := next((key for key in LISTS if key in row), None):
        said = conversation_of(row[listed], name)
    else:
        keys = next((pair for pair in PAIRS if set(pair) <= row.keys()), None)
        keys = keys or next((pair for pair in PAIRS if pair[0] in row), None)
        if keys is None:
            raise MisconfigurationException(f"{name} (counted from 0) has no messages and no prompt; give one of them")
        said = reader_of([*row, keys[1]], None, *keys)({keys[1]: "", **row})
        said = conversation_of(said if keys[1] in row else said[:1], name)
    reference = None
    # the model mustn't see the answer to be compared with
    if said and said[-1]["role"] == "assistant":
        reference = said.pop()["content"]
    if not said:
        raise MisconfigurationException(f"{name} (counted from 0) has no prompt before its answer; give one")
    # data of letters take a text
    prompt = said if len(said) > 1 or said[0]["role"] != "user" else said[0]["content"]
    return Asked(prompt, said[-1]["content"], reference, client)


def judged(rows: list[dict[str, Any]]) -> str:
    """Add the agreement with right answers to rows of answers; return it as words for the last line.

    Args:
        rows: the rows; without any right answer they lose the column of these.
    """
    right = [row for row in rows if row["reference"] is not None]
    if not right:
        for row in rows:
            del row["reference"]
        return ""
    found = scores([row["answer"] for row in right], [row["reference"] for row in right])
    for row in rows:
        # the same columns in each row, empty without a right answer
        row |= dict.fromkeys(found[0])
    for row, own in zip(right, found, strict=True):
        row |= own
    means = {name: sum(own[name] for own in found) / len(found) for name in found[0]}
    return f" (ROUGE-L {means['rouge_l']:.4g}, exact match {means['exact_match']:.4g}, of {len(found)} right answers)"


def predictions_at_site(
    options: Any, file: Path, config: Mapping[str, Any], rows: Rows | None, clients: list[str] | None
) -> dict[int | str, Predictions]:
    """Return the predictions by client, of clients at a site of a deployment.

    Args:
        options: the command's options.
        file: the site's configuration.
        config: its contents.
        rows: the rows; None takes the clients' test rows.
        clients: the clients; None takes all of the site, or those of the rows.

    Raises:
        UsageError: if a client isn't at this site.
    """
    if options.ckpt_path not in ("best", "last"):
        raise UsageError(f"predict: --ckpt_path {options.ckpt_path} is no round that a site keeps; give best or last.")
    models = models_in(options.state_dir, best=options.ckpt_path == "best")
    # a file is found by the client's name and by the id, of which the name comes first
    asked = list(rows.of_clients) if rows is not None and rows.places else clients
    asked = list({path: name for name, path in reversed(models.items())}.values())[::-1] if asked is None else asked
    if strangers := [client for client in asked if client not in models]:
        raise UsageError(
            f"predict: client {strangers[0]} is not at this site; {options.state_dir} has {', '.join(models)}."
        )
    results: dict[int | str, Predictions] = {}
    for client in asked:
        own = rows
        if rows is not None and rows.places:
            own = Rows(rows.of_clients[client], {})
        results |= predictions(models[client], file, config, own, [client])
    return results


def predictions(
    path: Path, file: Path, config: Mapping[str, Any], rows: Rows | None, clients: list[str] | None
) -> dict[int | str, Predictions]:
    """Return the predictions by client.

    The checkpoint alone suffices where it can make the clients' models and inputs; else the run's data are set up.

    Args:
        path: the checkpoint.
        file: the run's configuration.
        config: its contents.
        rows: the rows; None takes the clients' test rows.
        clients: the clients; None takes all, or those of the rows.
    """
    asked: Any = rows.of_clients if rows is not None and rows.places else clients
    data = None if rows is None or rows.places else rows.of_clients
    model = class_of(config, "model", pfl_lightning.methods).load_from_checkpoint(path, map_location="cpu")
    if rows is not None:
        # imported, so that the checkpoint's entry of the data finds it
        class_of(config, "data", pfl_lightning.data)
        try:
            return quiet_trainer(config).predict(model, data, ckpt_path=path, clients=asked)
        except NeedsSamples as error:
            # told before the data are read, which may be refused for reasons of their own
            print(f"predict: {str(error).partition(';')[0]}: reading the data of {file}", file=sys.stderr)
    made = configured(["--config", str(file), *QUIET.split()])
    settings = {"datamodule": made.datamodule, "aggregator": made.aggregator}
    # a site's checkpoint has the net of one client, and the configuration perhaps several
    of_run = model if is_of_site(path) else made.model
    return made.trainer.predict(of_run, data, ckpt_path=path, clients=asked, **settings)


def quiet_trainer(config: Mapping[str, Any]) -> FederatedTrainer:
    """Return a Trainer with the run's accelerator and precision, which writes nothing."""
    kept = {name: part_of(config, "trainer").get(name) for name in ("accelerator", "precision")}
    return FederatedTrainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{name: value for name, value in kept.items() if value is not None},
    )


def class_of(config: Mapping[str, Any], part: str, room: Any) -> Any:
    """Return the class that a run's configuration names.

    Args:
        config: the configuration.
        part: ``model`` or ``data``.
        room: the module of classes that are named without their module.

    Raises:
        UsageError: if there is no such class.
    """
    path = str(part_of(config, part).get("class_path", ""))
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module) if module else room, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"predict: {part}.class_path={path} of the configuration can't be imported: {error}."
        ) from error


def write(path: Path, results: Mapping[int | str, Predictions], places: Mapping[str, list[int]]) -> None:
    """Write predictions as a CSV file: row, client, prediction, and probabilities of classes.

    Args:
        path: the file, replaced if it exists.
        results: predictions by client.
        places: by client, the numbers of its rows; empty if each client has all rows.
    """
    lines: list[tuple[int, dict[str, Any]]] = []
    # clients come back in the order of the request, and a name may have become another form of itself
    numbers: Iterable[Any] = places.values() if places else repeat(None, len(results))
    for (client, each), rows in zip(results.items(), numbers, strict=True):
        columns = each.columns()
        # of a client's rows, some alone may have a prediction, such as the last one of a series
        made = columns.pop("row", range(len(each)))
        own = made if rows is None else [rows[row] for row in made]
        for row, cells in zip(own, zip(*columns.values(), strict=True), strict=True):
            lines.append((row, {"row": row, "client": client, **dict(zip(columns, map(shown, cells), strict=True))}))
    if places:
        # in the order of the file, which a client's rows may be scattered over
        lines.sort(key=lambda line: line[0])
    save_rows(path, [cells for _, cells in lines])


def check_place(path: Path) -> None:
    """Check that predictions can be written, before the work.

    Args:
        path: the file, which may exist; missing folders are made only when it is written.

    Raises:
        UsageError: if the path is a folder, or lies where no file can be made.
    """
    if path.is_dir():
        raise UsageError(f"predict: --out {path} is a folder; give a file, such as {path / 'predictions.csv'}.")
    # a device or a pipe is written to as it is
    if path.exists() and not path.is_file():
        return
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    try:
        # tried, as folders such as those of /proc give all rights and take no file
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"predict: --out {path} can't be written ({folder}: {error.strerror}); give a file in another folder."
        ) from error


def save_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file, and the folders that it lies in.

    Args:
        path: the file, replaced if it exists.
        rows: values by column.

    Raises:
        UsageError: if the system refuses, such as for a full disk.
    """
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows)
    except OSError as error:
        raise UsageError(f"predict: --out {path} can't be written ({error.strerror}); give another file.") from error


def shown(cell: Any) -> Any:
    """Return a cell's text: nine digits tell all single-precision numbers apart.

    >>> shown(0.1), shown("flu")
    ('0.1', 'flu')
    """
    return f"{cell:.9g}" if isinstance(cell, float) else cell
