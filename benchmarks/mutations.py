r"""Whether the tests notice a line that is wrong.

    python benchmarks/mutations.py --mutations 20 --rooms seeds stopping settings --out mutations.csv
    python benchmarks/mutations.py --mutations 500 --seed 1 --whole --out mutations.csv

A mutation changes one line of src: a comparison, `and` or `or`, a sign, a number or a truth value, a `not`, `min` or
`max`, the order of two arguments, a statement left out, or a result that becomes None. They are drawn evenly from the
package's rooms. In a copy of the checkout with one of them, the room's own tests run, as CONTRIBUTING's table has them;
if they pass, all other files of tests that name the module or anything of it, and with `--whole` the rest. A failing
test kills the mutation if it passes without it. If it doesn't, or after `--limit` seconds, the mutation is undecided.

The script prints a table by room, and the mutations that no test has noticed. The exit status is 1 if fewer of the
decided ones are killed than `--least` and `--own` ask for. `--out` keeps the verdicts, so that the same command goes on
after an interruption. A longer draw with the same seed has the mutations of a shorter one.
"""

import argparse
import ast
import copy
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

OTHER = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
"""The operator in place of another."""
FOR_READERS = re.compile(
    r"(logging|warnings)\.\w+$|(.*\.)?(rank_zero_(info|warn|debug)|warn|cast|TypeVar)$|.*(Error|Exception)$"
)
"""Calls whose arguments are texts and types."""
EITHER_WAY = {"isinstance", "issubclass", "getattr", "hasattr", "equal", "allclose", "maximum", "minimum"}
"""Calls with two arguments whose order either changes nothing or ends any run."""
ELSEWHERE = re.compile(r"cuda|gpu|\bmps\b|TYPE_CHECKING", re.IGNORECASE)
"""In lines and conditions that a machine without a GPU doesn't reach."""
DRAW = re.compile(r".*\brandom\(\)$")
"""A call that gives a random number from 0 to 1, which practically never equals its bound."""
DECLARED = {"annotation", "returns", "decorator_list", "type_params"}
"""Parts of the tree that aren't run, or once at an import."""
LEFT_OUT = {".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
LEFT_OUT_AT_TOP = {"runs", "data", "role_model", "headlines", "wandb", "lightning_logs", "build", "dist"}
"""What a copy of the checkout doesn't need."""


class Mutation(NamedTuple):
    """A line before and after."""

    room: str
    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip()}"


class Verdict(NamedTuple):
    """What has killed a mutation (``own`` tests or ``others``), or ``survived``, or ``undecided``; by which test."""

    verdict: str
    by: str
    seconds: int


def tests_of_rooms(root: Path) -> dict[str, list[Path]]:
    """Files and folders of each room's own tests, from CONTRIBUTING's table."""
    rows = re.findall(r"^\| (`.*`) \| (`tests/.*`) \|$", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {
        room: [root / path.replace("ROOM", room) for path in re.findall(r"`([^`]+)`", paths)]
        for rooms, paths in rows
        for room in re.findall(r"`([^`]+)`", rooms)
    }


def modules(root: Path) -> dict[str, list[Path]]:
    """The package's files by room: a folder, or a file beside the folders."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted((root / "src").glob("*/**/*.py")):
        room = path.relative_to(root / "src").parts[1].removesuffix(".py")
        # the root's own __init__ and the exports of servers have nothing but names
        if room not in ("__init__", "aggregators"):
            rooms.setdefault(room, []).append(path)
    return rooms


def passed_over(node: ast.AST) -> bool:
    """Whether nothing in a node is to be changed."""
    match node:
        case ast.If() | ast.IfExp():
            return bool(ELSEWHERE.search(ast.unparse(node.test)))
        case ast.FunctionDef():
            return node.name == "__repr__"
        case ast.Assign():
            return ast.unparse(node.targets[0]) == "__all__"
        case ast.Expr():
            return passed_over(node.value)
        case ast.Call():
            return bool(FOR_READERS.match(ast.unparse(node.func)))
        case ast.keyword():
            # the lengths that a strict zip compares are equal unless a caller errs
            return node.arg == "strict"
    # an f-string's parts have no columns of their own before Python 3.12
    return isinstance(node, (ast.Raise, ast.JoinedStr))


def altered(node: ast.AST, part: str, value: object) -> str:
    """The text of a node with another part."""
    node = copy.copy(node)
    setattr(node, part, value)
    return ast.unparse(node)


def changes(node: ast.AST, optional: bool) -> Iterator[str]:
    """Texts in place of a node; an ``optional`` function may return None."""
    match node:
        case ast.Compare(ops=ops) if not any(DRAW.match(ast.unparse(part)) for part in ast.iter_child_nodes(node)):
            for k, op in enumerate(ops):
                yield altered(node, "ops", [*ops[:k], OTHER[type(op)](), *ops[k + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OTHER:
            yield altered(node, "op", OTHER[type(op)]())
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield ast.unparse(node).removeprefix("not ")
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Return(value=ast.AST() as value) if optional and ast.unparse(value) != "None":
            yield "return None"
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield altered(node, "func", ast.Name("max" if name == "min" else "min"))
        case ast.Call(func=ast.Attribute(attr="min" | "max" as name, value=value)):
            yield altered(node, "func", ast.Attribute(value, "max" if name == "min" else "min"))
        case ast.Call(args=[first, second], func=func) if ast.unparse(func).split(".")[-1] not in EITHER_WAY:
            if ast.Starred not in (type(first), type(second)):
                yield altered(node, "args", [second, first])


def places(node: ast.AST, optional: bool = False) -> Iterator[tuple[ast.AST, str]]:
    """Each node of a single line, with each text in its place."""
    if passed_over(node):
        return
    if isinstance(node, ast.FunctionDef):
        optional = bool(node.returns and re.search(r"Optional|None \||\| None", ast.unparse(node.returns)))
    if hasattr(node, "lineno") and node.lineno == node.end_lineno:
        yield from ((node, text) for text in changes(node, optional))
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in DECLARED:
                yield from places(child, optional)


def mutations(root: Path, room: str, path: Path) -> Iterator[Mutation]:
    """All mutations of a file."""
    source = path.read_bytes()
    lines = source.split(b"\n")
    for node, text in places(ast.parse(source)):
        line = lines[node.lineno - 1]
        # the tree counts columns in bytes
        new = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
        if new != line and not ELSEWHERE.search(line.decode()):
            yield Mutation(room, str(path.relative_to(root)), node.lineno, line.decode(), new.decode())


def drawn(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """A number of mutations in sum, of each room the same or one more."""
    rooms, files = sorted(rooms), modules(root)
    random.Random(seed).shuffle(rooms)
    chosen: list[Mutation] = []
    for number, room in enumerate(rooms):
        found = sorted({mutation for path in files[room] for mutation in mutations(root, room, path)})
        # by room, so that other rooms beside it change nothing
        random.Random(f"{seed} {room}").shuffle(found)
        chosen += found[: count // len(rooms) + (number < count % len(rooms))]
    return sorted(chosen)


def by_names(root: Path, module: Path, tests: Sequence[Path]) -> dict[Path, int]:
    """Files of tests with the number of names of a module in them, most first."""
    text, dotted = module.read_text(), ".".join(module.relative_to(root / "src").with_suffix("").parts)
    found = re.findall(r"^(?:class |def |(?=\w+(?:: .+)? = ))([A-Za-z]\w*)", text, re.MULTILINE)
    names = re.compile(rf"\b({'|'.join({dotted.removesuffix('.__init__'), *found})})\b")
    # the file called as the module goes before all others
    same, texts = f"test_{module.stem}", {path: path.read_text() for path in tests}
    most = {path: 1000 * (path.stem == same) + len({*names.findall(text)}) for path, text in texts.items()}
    return dict(sorted(most.items(), key=lambda pair: -pair[1]))


def ran(tree: Path, limit: float, tests: Sequence[Path], *options: str) -> int | None:
    """The exit status of pytest in a tree, or None after the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", f"--basetemp={tree.parent / 'made'}", *options, *tests]
    # the root of a tree without settings of pytest would be the next folder above with a setup.py
    command.append(f"--rootdir={tree}")
    # options of a run that calls this one are none of this run's
    own = {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    settings = {"OMP_NUM_THREADS": "1"} | os.environ | own
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # a group of its own, so that processes started by tests end with it
    process = subprocess.Popen(command, cwd=tree, env=settings, start_new_session=True, **quiet)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def judged(mutation: Mutation, root: Path, own: Sequence[Path], whole: bool, limit: float) -> Verdict:
    """Make a mutation in a copy of the checkout, and run tests there until one fails."""
    began, needless = time.monotonic(), {str(root): LEFT_OUT | LEFT_OUT_AT_TOP}
    module, files = root / mutation.file, sorted((root / "tests").rglob("test_*.py"))
    mine = by_names(root, module, [path for path in files if not set(own).isdisjoint({path, *path.parents})])
    others = by_names(root, module, [path for path in files if path not in mine])
    # the module itself for the examples in its docstrings
    stages = [("own", [module, *mine]), ("others", [path for path, count in others.items() if count])]
    stages += [("others", [path for path, count in others.items() if not count])] * whole

    def verdict(name: str, by: str = "") -> Verdict:
        return Verdict(name, by, round(time.monotonic() - began))

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(root, tree, symlinks=True, ignore=lambda at, _: needless.get(at, LEFT_OUT))
        lines = module.read_bytes().split(b"\n")
        lines[mutation.line - 1] = mutation.after.encode()
        (tree / mutation.file).write_bytes(b"\n".join(lines))
        for name, paths in stages:
            tests = [path.relative_to(root) for path in paths]
            # 5 is pytest's status where there is no test
            if not tests or (status := ran(tree, limit, tests)) in (0, 5):
                continue
            if status is None:
                return verdict("undecided", "time")
            noted = tree / ".pytest_cache" / "v" / "cache" / "lastfailed"
            by = next(iter(json.loads(noted.read_text())), "") if noted.exists() else "the start of pytest"
            shutil.copy2(module, tree / mutation.file)
            again = ran(tree, limit, tests, "--last-failed", "--last-failed-no-failures=none")
            return verdict(name if again in (0, 5) else "undecided", by)
    return verdict("survived")


def known(path: Path) -> dict[Mutation, Verdict]:
    """The verdicts in a file, which is begun where there is none."""
    if not path.exists():
        path.write_text(",".join(Mutation._fields + Verdict._fields) + "\n")
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {Mutation(*row[:2], int(row[2]), *row[3:5]): Verdict(*row[5:7], int(row[7])) for row in rows}


def report(verdicts: dict[Mutation, Verdict]) -> tuple[float, float]:
    """Print the table; return which part of the decided is killed, and which by own tests."""
    names = ("own", "others", "survived", "undecided")
    counts = Counter(
        (room, verdict.verdict) for mutation, verdict in verdicts.items() for room in (mutation.room, "all")
    )
    print(f"{'room':<14} mutations" + "".join(f"{name:>11}" for name in names))
    for room in [*sorted({mutation.room for mutation in verdicts}), "all"]:
        row = [counts[room, name] for name in names]
        print(f"{room:<14} {sum(row):>9}" + "".join(f"{number:>11}" for number in row))
    own, killed, decided = row[0], sum(row[:2]), sum(row[:3])
    print(f"\nkilled: {killed} of {decided} decided, {own} by the rooms' own tests")
    for mutation, verdict in verdicts.items():
        if verdict.verdict in names[2:]:
            print(f"{verdict.verdict} {mutation}" + f"\n    {verdict.by}" * bool(verdict.by))
    return killed / max(1, decided), own / max(1, decided)


def main(words: Sequence[str] | None = None) -> None:
    """Draw, judge and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", help="folders and files of the package; all by default")
    parser.add_argument("--whole", action="store_true", help="run all tests before a mutation has survived")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a room's tests, and for the others")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutations at a time")
    parser.add_argument("--least", type=float, default=0.95, help="the part to be killed")
    parser.add_argument("--own", type=float, default=0.85, help="the part to be killed by the rooms' own tests")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the verdicts; those in it aren't made again")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="another checkout")
    args = parser.parse_args(words)
    tests, rooms = tests_of_rooms(args.root), modules(args.root)
    if unknown := set(args.rooms or rooms).difference(set(tests) & set(rooms)):
        parser.error(f"no room of src with a row in CONTRIBUTING's table: {', '.join(sorted(unknown))}")
    found = known(args.out) if args.out else {}
    draw = drawn(args.root, args.rooms or list(rooms), args.mutations, args.seed)
    left = [mutation for mutation in draw if mutation not in found]
    pool = ThreadPoolExecutor(args.jobs)
    try:
        jobs = {pool.submit(judged, m, args.root, tests[m.room], args.whole, args.limit): m for m in left}
        for number, job in enumerate(as_completed(jobs), 1):
            mutation, verdict = jobs[job], job.result()
            found[mutation] = verdict
            print(
                f"{number}/{len(left)} {verdict.seconds} s {verdict.verdict} {verdict.by}\n{mutation}", file=sys.stderr
            )
            if args.out:
                with args.out.open("a", newline="") as file:
                    csv.writer(file).writerow(mutation + verdict)
    finally:
        # after an interruption no further mutation begins
        pool.shutdown(cancel_futures=True)
    killed, own = report({mutation: found[mutation] for mutation in draw})
    sys.exit(int(killed < args.least or own < args.own))


if __name__ == "__main__":
    main()
