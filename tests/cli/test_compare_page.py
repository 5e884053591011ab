"""``report.html``: what is on it, that it needs nothing else, and that its table sorts in a browser."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from federations import read_csv
from pfl_lightning.cli.compare.by_client import ByClient
from pfl_lightning.cli.compare.page import html_table, leading_number, page
from pfl_lightning.cli.compare.report import write
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.compare.significance import Difference
from pfl_lightning.tasks import Monitor

CELLS = [
    ["method", "last", "over Local"],
    ["FedAvg", "78.20 ± 0.11", "+2.20 (75 %)"],
    ["Local", "9.50 ± 1.00", "-"],
    ["<b>Mine & yours</b>", "81.00 ± 0.30", "-10.00 (0 %)"],
]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Reader(HTMLParser):
    """Texts by their tag, and all addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def result(folder: Path, method: str, mu: float, accuracies: list[float]) -> Result:
    """A run that has finished, by the files that the page reads."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        json.dumps(
            {
                "model": {"class_path": method, "init_args": {"mu": mu, "num_classes": 10}},
                "data": {"class_path": "Digits", "init_args": {"num_clients": 3}},
                "trainer": {"max_rounds": 2, "logger": True},
            }
        )
    )
    (folder / "rounds.csv").write_text("round,test/acc\n1,0.5\n2,0.75\n")
    rows = [f"{client},{10 * client + 10},2,{value}" for client, value in enumerate(accuracies)]
    (folder / "clients.csv").write_text("\n".join(["client,samples,classes,test/acc", *rows, ""]))
    (folder / "summary.json").write_text('{"monitor": {"metric": "acc", "mode": "max"}}')
    return Result(Run(method, 0, folder, ()), folder)


@pytest.fixture
def methods(tmp_path):
    made = {"FedAvg": (0.1, [0.5, 0.6, 0.7]), "Local": (0.2, [0.9, 0.8, 0.7])}
    return {name: [result(tmp_path / name, name, *settings)] for name, settings in made.items()}


@pytest.fixture
def html(methods):
    return page("runs & all", CELLS, {(3, 1)}, "Test accuracy.", ["A note."], methods, "test/acc", Monitor())


SITES = ByClient(
    Monitor(),
    "Local",
    {"Local": {"Bremen": [0.5, 0.5], "A&O": [0.75, 0.5]}, "FedPer": {"Bremen": [0.75, 1.0], "A&O": [0.5, 0.5]}},
    {"FedPer": {"Bremen": Difference(0.375, 0.25, 0.1, 1.0), "A&O": Difference(-0.125, math.nan, math.nan, 0.0)}},
)


def test_clients_have_tables_and_a_picture_by_name(methods):
    html = page("runs", CELLS, set(), "", [], methods, None, Monitor(), SITES)
    texts = read(html).texts
    assert texts["h2"] == ["By client", "Clients", "Partition", "Settings"]
    assert texts["h3"] == ["test accuracy, %, by client", "gain over Local, points, by client"]
    assert {"A&O", "50.00 ± 0.00", "+37.50 [+12.50, +62.50]", "-12.50"} <= set(texts["td"])
    assert {"Bremen", "A&O", "FedPer", "gain over Local, points"} <= set(texts["text"])
    assert sum("stands alone" in text for text in texts["p"]) == 1


def test_many_clients_have_a_distribution_and_a_file(methods, tmp_path):
    many = {str(client): [client / 100] for client in range(51)}
    gains = {client: Difference(0.01, math.nan, math.nan, 1.0) for client in many}
    sites = ByClient(Monitor(), "Local", {"Local": many, "FedPer": many}, {"FedPer": gains})
    (tmp_path / "by_client.md").write_text("of fewer clients")
    sites.write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("by_client*")) == ["by_client.csv", "by_client.png"]
    assert len((tmp_path / "by_client.csv").read_text().splitlines()) == 1 + 2 * 51
    texts = read(page("runs", CELLS, set(), "", [], methods, None, Monitor(), sites)).texts
    assert "h3" not in texts and "gain over Local, points, a dot a client" in texts["text"]
    assert texts["p"][-1] == "The tables of 51 clients are in by_client.csv." and "50" not in texts["td"]


def test_the_shorter_of_clients_and_methods_is_across():
    (_, wide), _ = ByClient(Monitor("mae", "min"), "b", {m: {"A": [1.0]} for m in "ab"}, SITES.gains).tables
    assert wide == [["method", "A"], ["a", "1"], ["b", "1"]]
    assert SITES.tables[0][1][0] == ["client", "Local", "FedPer"]


def test_a_figure_of_metrics_stands_in_where_there_are_no_gains():
    (axes,) = ByClient(Monitor(), None, {"FedPer": {"A": [0.25, 0.75], "B": [1.0]}}, {}).figure().axes
    (dots,) = (line for line in axes.lines if line.get_marker() == "o")
    assert dots.get_xdata().tolist() == [50, 100] and axes.get_xlabel() == "test accuracy, %"


def test_clients_without_a_value_keep_their_rows_with_the_reason(tmp_path):
    names = ["Aachen", "Celle", "Essen", "Fulda"]
    methods = {}
    for method, shift in (("Local", 0), ("FedAvg", 0.1)):
        methods[method] = []
        for seed in (0, 1):
            # Celle has a value at one seed, Essen no test rows, and Fulda rows of one class
            values = [f"{0.5 + shift},0.9", f"{0.4 + shift if seed else math.nan},0.9", ",", "nan,0.3"]
            folder = tmp_path / method / str(seed)
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text("")
            rows = [f"{k},{name},20,{value}" for k, (name, value) in enumerate(zip(names, values, strict=True))]
            (folder / "clients.csv").write_text("\n".join(["client,name,samples,test/auroc,test/loss", *rows, ""]))
            (folder / "rounds.csv").write_text("round,cohort,bytes/up,bytes/down,test/auroc\n2,0,0,0,0.5\n")
            part = {"round": 2, "test/auroc": 0.5}
            ends = {"final": part, "selected": part, "best_on_test": part, "partition": "p", "initial": "i"}
            ends |= {"seconds": 1.0, "monitor": {"metric": "auroc", "mode": "max"}}
            (folder / "summary.json").write_text(json.dumps(ends))
            methods[method].append(Result(Run(method, seed, folder, ()), folder))
    write(tmp_path, methods, {}, (0, 1), (), {}, reference="Local")
    pages = [
        (tmp_path / f"{name}.{kind}").read_text() for name in ("by_client", "comparison") for kind in ("md", "tex")
    ]
    for text in [*pages, (tmp_path / "report.html").read_text()]:
        count = re.search(
            r"1 of 4 clients .* auroc .*Celle .*2 of 4 runs.*Essen \(it has no rows.*Fulda", text, re.DOTALL
        )
        assert count and "one class" in text
    for client, why in (("Essen", "no rows"), ("Fulda", "one class")):
        line = rf"\| {client} \| no value: [^|]*{why} \|"
        assert len(re.findall(line, pages[0])) == 2
        own = [row for row in read_csv(tmp_path / "by_client.csv") if row["client"] == client]
        assert [(row["method"], row["seeds"], row["mean"]) for row in own] == [("Local", "0", ""), ("FedAvg", "0", "")]
        assert all(why in row["why"] for row in own)
    assert re.search(r"Celle \| 0.4 \(1 of 2 seeds\)", pages[0])
    texts = read((tmp_path / "report.html").read_text()).texts["text"]
    assert {"Fulda", "no value: its rows are of one class", "Essen", "no value: it has no rows"} <= set(texts)


def test_a_distribution_says_how_many_clients_it_is_of(tmp_path):
    many = {str(client): [client / 100] for client in range(51)}
    sites = ByClient(Monitor("auroc"), None, {"Local": many}, {}, count="51 of 60 clients")
    (axes,) = sites.figure().axes
    assert axes.get_title("left") == "51 of 60 clients"


def read(html):
    reader = Reader()
    reader.feed(html)
    return reader


def test_it_needs_nothing_else(html):
    assert all(address.startswith("#") for address in read(html).addresses)
    assert not re.search(r"@import|url\((?!#)", html)


def test_it_shows_the_table_the_curves_the_clients_the_partition_and_the_settings(html):
    texts = read(html).texts
    assert texts["title"] == ["runs & all"] and texts["h2"] == ["Rounds", "Clients", "Partition", "Settings"]
    assert texts["button"] == CELLS[0]
    assert {cell for row in CELLS[1:] for cell in row} <= set(texts["td"])
    assert "A note." in texts["li"] and html.count("<svg") == 3
    drawn = set(texts["text"])
    assert {"test accuracy, %", "training samples", "client", "round"} <= drawn
    assert html.count('class="best"') == 1


def test_settings_that_differ_are_told_by_method_and_others_once(html):
    cells = read(html).texts["td"]
    assert "model=FedAvg, model.mu=0.1" in cells and "model=Local, model.mu=0.2" in cells
    assert cells.count("data.num_clients") == 1 and not any("logger" in cell for cell in cells)
    # the data say
    assert not any("num_classes" in cell for cell in cells)


@pytest.mark.exhaustive
def test_the_same_runs_give_the_same_page(html, methods):
    assert html == page("runs & all", CELLS, {(3, 1)}, "Test accuracy.", ["A note."], methods, "test/acc", Monitor())


def test_without_a_finished_run_there_is_a_table_still():
    html = page("runs", CELLS, set(), "", [], {"FedAvg": []}, None, Monitor())
    assert "<svg" not in html and "78.20" in html


def test_cells_are_text_and_not_markup():
    table = html_table(CELLS, set())
    assert "<b>" not in table and "&lt;b&gt;Mine &amp; yours&lt;/b&gt;" in table


@pytest.mark.parametrize(
    ("cell", "number"), [("78.20 ± 0.11", "78.20"), ("-", ""), ("-10.00 (0 %)", "-10.00"), ("", "")]
)
def test_cells_are_sorted_by_the_number_that_they_begin_with(cell, number):
    assert leading_number(cell) == number


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize(
    ("clicks", "order"),
    [
        ([1], ["Local", "FedAvg", "<b>Mine & yours</b>"]),
        ([1, 1], ["<b>Mine & yours</b>", "FedAvg", "Local"]),
        # who has no value comes last either way
        ([2], ["<b>Mine & yours</b>", "FedAvg", "Local"]),
        ([2, 2], ["FedAvg", "<b>Mine & yours</b>", "Local"]),
        ([1, 0], ["<b>Mine & yours</b>", "FedAvg", "Local"]),
    ],
    ids=str,
)
def test_the_table_sorts_in_a_browser(html, clicks, order, tmp_path):
    press = "".join(f"document.querySelectorAll('#comparison th button')[{column}].click();" for column in clicks)
    path = tmp_path / "report.html"
    path.write_text(html.replace("</html>", f"<script>{press}</script></html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [BROWSER, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    body = shown[shown.index("<tbody>") : shown.index("</tbody>")]
    first = [text for row in body.split("<tr>")[1:] for text in read(row).texts["td"][:1]]
    assert first == order
