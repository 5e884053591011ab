"""The commands and settings that docs/deployment.md prints are those of the programs that are installed."""

import importlib
import re
import shlex
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

import tomllib

from command import pfl
from pfl_lightning import resident
from pfl_lightning.cli.configs import find
from pfl_lightning.flower import apps, command, site

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
PROGRAMS = ("flower-superlink", "flower-supernode", "flwr", "pfl-lightning")


def printed():
    """The lines of the page's blocks that call one of the programs, as words."""
    pieces = [textwrap.dedent(piece) for piece in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)]
    pieces += re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = re.sub(r"\\\n *", "", "".join(pieces))
    # what a shell's variables stand for is another program's business
    found = re.findall(rf"^ *((?:{'|'.join(PROGRAMS)}) (?:'[^']*'|[^\n'#&])*)", lines, re.MULTILINE)
    return sorted({line.strip().replace("$PWD", "/here").replace("$1", "Kiel").replace("$2", "9103") for line in found})


LINES = printed()


def settings(head):
    """The first column of one of the page's tables."""
    table = PAGE[PAGE.index(f"| {head}") :]
    rows = table[: table.index("\n\n")].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]


def test_the_page_has_lines_of_each_program():
    assert {line.split()[0] for line in LINES} == set(PROGRAMS) and len(LINES) > 12


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("flower-")])
def test_a_program_of_flowers_takes_its_line(line):
    name, *words = shlex.split(line)
    kind = name.removeprefix("flower-")
    # the packages have functions of the modules' names
    module = importlib.import_module(f"flwr.{kind}.cli.flower_{kind}")
    parser = getattr(module, f"_parse_args_run_{kind}")()
    parser.parse_args(words)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("flwr ")])
def test_flwr_takes_its_line(line):
    from flwr.cli.app import typer_click_object as group

    _, *words = shlex.split(line)
    context = group.make_context("flwr", [], resilient_parsing=True)
    while hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, words)
        has_more = hasattr(group, "resolve_command")
        # all of a command's words, of which nothing is run
        context = group.make_context(name, [] if has_more else words, resilient_parsing=has_more)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("pfl-lightning ")])
def test_pfl_lightning_takes_its_line(line, capsys):
    _, name, *words = shlex.split(line)
    configs = [words[place + 1] for place, word in enumerate(words) if word == "--config"]
    assert all(find(config) for config in configs if config != "table.yaml")
    if name == "fit":
        return
    with pytest.raises(SystemExit) as ended:
        pfl(f"{name} --help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in words if word.startswith("--")), words
    assert name != "flower" or words[0] in ("new", "run", "export")


def test_settings_of_an_app_are_those_that_a_new_app_has():
    project = command.PROJECT.format(name="a", publisher="b", package="c", configs="d", status='"e"')
    assert set(settings("setting of the app")) == set(tomllib.loads(project)["tool"]["flwr"]["app"]["config"])


def test_settings_of_a_site_are_read_somewhere():
    code = "".join(Path(module.__file__).read_text() for module in (apps, resident, site))
    assert all(f'"{name}"' in code for name in settings("setting of a site"))


def test_what_a_line_sets_is_a_setting():
    of_app, of_site = settings("setting of the app"), settings("setting of a site")
    for line in LINES:
        words = shlex.split(line)
        for option, known in (("-c", of_app), ("--node-config", of_site)):
            for place, word in enumerate(words):
                if word == option:
                    given = re.findall(r'([\w-]+)=(?:"[^"]*"|\S+)', words[place + 1])
                    assert given and set(given) <= set(known), line
