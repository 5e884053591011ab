"""The mutations of benchmarks/mutations.py, in a package of a few lines."""

import ast
import runpy
from pathlib import Path

import pytest

from federations import read_csv

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "mutations.py"))
"""What the script has, by name."""
FILES = {
    "CONTRIBUTING.md": "| Rooms | Tests |\n| --- | --- |\n| `sums`, `flag`, `idle`, `steps` | `tests/ROOM` |\n",
    "src/tiny/__init__.py": "",
    "src/tiny/sums/__init__.py": "",
    "src/tiny/sums/total.py": "def total(a, b):\n    return a + b\n",
    "src/tiny/flag.py": "def flag():\n    return True\n",
    "src/tiny/idle.py": "def idle():\n    return False\n",
    "src/tiny/steps.py": "def last(n):\n    k = 0\n    while k < n:\n        k += 1\n    return k\n",
    "tests/sums/test_total.py": "from tiny.sums.total import total\n\n\ndef test_sum():\n    assert total(2, 1) == 3\n",
    "tests/test_flags.py": "from tiny.flag import flag\n\n\ndef test_flag():\n    assert flag()\n",
    "tests/test_rest.py": "import tiny\n\n\ndef test_rest():\n    assert tiny\n",
}
SLOW = """
import time

from tiny.steps import last


class Slow(int):
    def __gt__(self, other):
        time.sleep(0.02)
        return int(self) > other


def test_the_last_step():
    assert last(Slow(3)) == 3
"""
"""A test that sleeps in each step, as a loop without an end would keep a core busy."""
NOISY = '''
def answer(rows, device, kind=7) -> "Net | None":
    """Return 1 of 2 rows."""
    if device.type == "cuda":
        return rows[2 + 3]
    rank_zero_warn(f"{len(rows) + 1} rows", 5)
    if not (rows or kind):
        raise ValueError(max(1, 2))
    return min(rows, 1.5)


class Net:
    width: Annotated[int, 3] = 4

    def __repr__(self):
        return "x" * 3
'''
"""Lines with what is changed and with what isn't."""


@pytest.fixture
def tiny(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tiny" / name).write_text(text)
    return tmp_path / "tiny"


def called(root, *words):
    """The exit status of a call."""
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"](["--root", str(root), "--out", "verdicts.csv", "--jobs", "2", *words])
    return ended.value.code


@pytest.mark.exhaustive
def test_each_mutation_has_its_verdict_and_an_interrupted_run_goes_on(tiny, capsys):
    assert called(tiny, "--rooms", "sums", "flag", "idle") == 1
    rows = {row["room"]: row for row in read_csv(Path("verdicts.csv"))}
    assert {room: (row["verdict"], row["by"], row["after"]) for room, row in rows.items()} == {
        "sums": ("own", "tests/sums/test_total.py::test_sum", "    return a - b"),
        "flag": ("others", "tests/test_flags.py::test_flag", "    return False"),
        "idle": ("survived", "", "    return True"),
    }
    said = capsys.readouterr()
    assert "all                    3          1          1          1          0\n" in said.out
    assert "killed: 2 of 3 decided, 1 by the rooms' own tests" in said.out
    assert "survived src/tiny/idle.py:2\n    - return False\n    + return True\n" in said.out
    assert "3/3 " in said.err
    # nothing was changed but the copies
    assert all((tiny / name).read_text() == text for name, text in FILES.items())

    # the last row is lost, and made again alone
    kept = Path("verdicts.csv").read_text().splitlines(keepends=True)
    Path("verdicts.csv").write_text("".join(kept[:-1]))
    assert called(tiny, "--rooms", "sums", "flag", "idle", "--least", "0.66", "--own", "0.33") == 0
    again = capsys.readouterr()
    assert again.out == said.out and again.err.startswith("1/1 ")
    assert called(tiny, "--rooms", "sums", "flag", "idle", "--least", "0.67", "--own", "0.33") == 1
    assert called(tiny, "--rooms", "sums", "flag", "idle", "--least", "0.66", "--own", "0.34") == 1
    assert not capsys.readouterr().err


@pytest.mark.exhaustive
def test_with_all_tests_one_may_notice_what_it_does_not_name(tiny):
    last = "[*vars(importlib.import_module('tiny.i' + 'dle')).values()][-1]"
    text = f"import importlib\n\n\ndef test_rest():\n    assert not {last}()\n"
    (tiny / "tests" / "test_rest.py").write_text(text)
    assert called(tiny, "--rooms", "idle", "--whole", "--own", "0") == 0
    (row,) = read_csv(Path("verdicts.csv"))
    assert row["verdict"] == "others" and row["by"] == "tests/test_rest.py::test_rest"


@pytest.mark.exhaustive
def test_a_test_that_fails_without_the_mutation_too_decides_nothing(tiny):
    broken = tiny / "tests" / "sums" / "test_total.py"
    broken.write_text(broken.read_text().replace("== 3", "== 4"))
    assert called(tiny, "--rooms", "sums") == 1
    (row,) = read_csv(Path("verdicts.csv"))
    assert row["verdict"] == "undecided" and row["by"] == "tests/sums/test_total.py::test_sum"


@pytest.mark.exhaustive
def test_a_mutation_that_hangs_is_undecided(tiny):
    (tiny / "tests" / "steps").mkdir()
    (tiny / "tests" / "steps" / "test_steps.py").write_text(SLOW)
    # half a minute, as the tests of the others shall end in it on a busy machine too
    assert called(tiny, "--rooms", "steps", "--limit", "30") == 1
    rows = read_csv(Path("verdicts.csv"))
    assert {row["after"].strip(): (row["verdict"], row["by"]) for row in rows} == {
        # the step is left out
        "pass": ("undecided", "time"),
        "k += 2": ("own", "tests/steps/test_steps.py::test_the_last_step"),
        "while k <= n:": ("own", "tests/steps/test_steps.py::test_the_last_step"),
        # three steps end at 3 from wherever they begin
        "k = 1": ("survived", ""),
    }


def test_what_is_read_and_declared_stays():
    tree = ast.parse(NOISY)
    lines = NOISY.split("\n")
    assert {(lines[node.lineno - 1].strip(), text) for node, text in SCRIPT["places"](tree)} == {
        ('def answer(rows, device, kind=7) -> "Net | None":', "8"),
        ("if not (rows or kind):", "(rows or kind)"),
        ("if not (rows or kind):", "rows and kind"),
        ("return min(rows, 1.5)", "return None"),
        ("return min(rows, 1.5)", "max(rows, 1.5)"),
        ("return min(rows, 1.5)", "2.5"),
        ("width: Annotated[int, 3] = 4", "5"),
    }


def test_each_kind_of_change():
    def made(line):
        return {text for _, text in SCRIPT["places"](ast.parse(line))}

    assert made("a < b == c") == {"a <= b == c", "a < b != c"}
    assert made("a and b or c") == {"(a and b) and c", "a or b"}
    assert made("a + b * c") == {"a - b * c", "b / c"}
    assert made("f(a, b)") == {"pass", "f(b, a)"}
    assert made("f(a, *b)") == {"pass"}
    assert made("x = a.max(b)") == {"a.min(b)"}
    assert made("x -= y") == {"pass"}
    assert made("x = not y.z") == {"y.z"}
    assert made("zip(a, b, c, strict=True)") == {"pass"}
    assert made("x = isinstance(a, b)") == set()
    assert made("x = rng.random() < a") == set()


@pytest.mark.exhaustive
def test_mutations_of_the_package_are_spread_over_rooms_change_a_line_and_parse():
    rooms = SCRIPT["modules"](ROOT)
    draw = SCRIPT["drawn"](ROOT, list(rooms), 3 * len(rooms) + 2, 5)
    count = {room: sum(mutation.room == room for mutation in draw) for room in rooms}
    # seeds and __main__ have few lines
    assert all(count[room] in (3, 4) for room in rooms if room != "__main__"), count
    for mutation in draw:
        lines = (ROOT / mutation.file).read_text().split("\n")
        assert lines[mutation.line - 1] == mutation.before != mutation.after
        lines[mutation.line - 1] = mutation.after
        ast.parse("\n".join(lines))
    few = SCRIPT["drawn"](ROOT, ["seeds", "stopping"], 4, 5)
    assert set(few) < set(draw) and few != SCRIPT["drawn"](ROOT, ["seeds", "stopping"], 4, 6)


def test_every_room_has_tests_of_its_own():
    tests = SCRIPT["tests_of_rooms"](ROOT)
    assert set(tests) == set(SCRIPT["modules"](ROOT))
    assert all(path.exists() for paths in tests.values() for path in paths)
    # a folder of tests is of the room with its name
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= set(tests)


def test_an_unknown_room_is_refused(tiny, capsys):
    assert called(tiny, "--rooms", "sums", "products") == 2
    assert "CONTRIBUTING's table: products" in capsys.readouterr().err
