"""When to use a method, and its lines of Python: both follow from configurations, registry and tables of pages."""

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import catalogue
import gallery

from pfl_lightning.methods.registry import Method

HERE = Path(__file__).parent
DATA = {"data at the server": {"central_test": 0.2, "server_fraction": 0.3}}
"""Settings of data by the table's word for a method's need; all others are met by any clients of classes."""


@cache
def tasks() -> tuple[list[str], dict[str, list[str]]]:
    """Return the tasks of the table in tasks.md, and what each method does on them."""
    page = (HERE / "tasks.md").read_text().partition("## Which method")[2]
    head, _, *rows = (gallery.cells(line) for line in re.findall(r"^\|.*$", page, re.MULTILINE))
    return head[1:], {name: cells for name, *cells in rows}


def on_tasks(name: str) -> str:
    """Return the tasks that a method does, and why it lacks others, in a sentence.

    >>> on_tasks("HeteroFL")
    'Classification; for all other tasks it needs classes'

    Args:
        name: the method's name.
    """
    head, rows = tasks()
    said: dict[str, list[str]] = {}
    for task, cell in zip(head, rows[name], strict=True):
        said.setdefault("" if cell in ("yes", "one by one") else cell, []).append(task)
    able = said.pop("", [])
    if not said:
        return f"all, such as {', '.join(able[:3])}"
    if len(said) == 1:
        return f"{', '.join(able)}; for all other tasks it {next(iter(said))}"
    return "; ".join([", ".join(able), *(f"for {', '.join(some)} it {word}" for word, some in said.items())])


def when(method: Method, row: dict[str, str]) -> str:
    """Return when a method is of use, in a list: its family and where this pays, its figures, tasks, needs and nets.

    Args:
        method: the method.
        row: its row of methods/table.csv.
    """
    of = catalogue.declared()[method.name]["family"]
    family = next(each for each in catalogue.families() if each["family"] == of)
    lines = [f"* **{of}**: {family['idea']}"]
    if family["pays"]:
        lines.append(f"* **When this family pays**: {family['pays'].rstrip()} [The tables](../{family['section']}).")
    if pays := gallery.by_the_tables(method.name):
        lines.append(f"* **By our tables**, with gains over training alone where a figure has a sign: {pays}.")
    lines.append(f"* **Tasks**: {on_tasks(method.name)} ([tasks](../tasks.md)).")
    if row["needs"]:
        lines.append(f"* **Needs**: {row['needs']}.")
    lines.append(f"* **Nets**: {'each client may have its own' if row['different nets'] == 'yes' else 'one for all'}.")
    return "\n".join(lines) + "\n"


def expression(value: Any, names: set[str]) -> str:
    r"""Return a configuration's value as Python.

    >>> expression({"class_path": "Mean", "init_args": {"q": [0.5, None]}}, set())
    'Mean(q=[0.5, None])'
    >>> expression({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, set())
    'lambda\xa0parameters:\xa0torch.optim.SGD(parameters,\xa0lr=0.1)'

    Args:
        value: the value, a class among them as ``class_path`` and ``init_args``.
        names: takes the names of classes.
    """
    if isinstance(value, list):
        return f"[{', '.join(expression(each, names) for each in value)}]"
    if not isinstance(value, dict) or "class_path" not in value:
        return repr(value).replace("'", '"')
    names.add(value["class_path"])
    given = [f"{name}={expression(each, names)}" for name, each in value.get("init_args", {}).items()]
    if value["class_path"].startswith("torch.optim."):
        call = f"lambda parameters: {value['class_path']}({', '.join(['parameters', *given])})"
        # one word, which `broken` doesn't break
        return call.replace(" ", "\xa0")
    return f"{value['class_path']}({', '.join(given)})"


def command(method: Method, row: dict[str, str]) -> str:
    """Return the command that runs a method's configuration on scikit-learn's digits.

    Args:
        method: the method.
        row: its row of methods/table.csv.
    """
    words = [f"pfl-lightning fit --config methods/{method.file} --config protocols/digits_dir0.1"]
    words += [f"--data.{name} {value}" for name, value in DATA.get(row["needs"], {}).items()]
    if "adapters" in method.client.requires:
        words.append("--model.net Adapted --model.net.net MLP --model.net.rank 4")
    return " ".join(words)


def snippet(method: Method, row: dict[str, str]) -> str:
    """Return the lines of Python that run a method's configuration on scikit-learn's digits.

    Args:
        method: the method.
        row: its row of methods/table.csv.
    """
    config = catalogue.declared()[method.name]
    client, settings = method.client.__name__, config["model"].get("init_args", {})
    names: set[str] = set()
    own = [f"{name}={expression(value, names)}" for name, value in settings.items()]
    adapters = "adapters" in method.client.requires
    net = "partial(Adapted, net=MLP, rank=4)" if adapters else "MLP"
    server = [f"aggregator = {expression(config['aggregator'], names)}"] if "aggregator" in config else []
    more = [f"{name}={value}" for name, value in DATA.get(row["needs"], {}).items()]
    data = ", ".join(["num_clients=10", "partitioner=Dirichlet(alpha=0.1)", *more])
    made = f"{client}({', '.join([net, 'data.input_shape', 'task=data.task', *own])})"
    fit = f"fit(client, datamodule=data{', aggregator=aggregator' if server else ''})"
    servers = sorted(name for name in names if "." not in name)
    lines = [
        *(["from functools import partial", ""] if adapters else []),
        "import lightning as L",
        *(["import torch"] if any(name.startswith("torch.") for name in names) else []),
        "",
        "from pfl_lightning import FederatedTrainer",
        *([f"from pfl_lightning.aggregators import {', '.join(servers)}"] if servers else []),
        "from pfl_lightning.data import Digits, Dirichlet",
        f"from pfl_lightning.methods import {client}",
        f"from pfl_lightning.nets import {'MLP, Adapted' if adapters else 'MLP'}",
        "",
        "L.seed_everything(0)",
        f"data = Digits({data})",
        f"client = {made}",
        *server,
        f"FederatedTrainer(max_rounds=20).{fit}",
    ]
    return "\n".join(broken(line) for line in lines)


def broken(line: str) -> str:
    """Return a call longer than a line of the site with its arguments in lines of their own.

    >>> print(broken(f"client = FedAvg({'MLP, ' * 20}mu=0.1)"))
    client = FedAvg(
        MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP, MLP,
        MLP, mu=0.1
    )

    Args:
        line: the line.
    """
    if len(line) <= 98:
        return line.replace("\xa0", " ")
    head, _, inner = line.partition("(")
    body = textwrap.fill(inner.removesuffix(")"), 94, break_long_words=False, break_on_hyphens=False)
    return f"{head}(\n{textwrap.indent(body, '    ')}\n)".replace("\xa0", " ")
