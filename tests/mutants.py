"""Changes one place of the package at a time and sees whether a test notices: `make mutants`.

    python tests/mutants.py --minutes 60 --together 2 --out mutants.jsonl
    python tests/mutants.py --again --out mutants.jsonl

Every mutant is one small change in a copy of the package: a comparison that takes its border or leaves it, a sign, a
factor, a number, a condition, a statement that is left out. The quick tests of its room run until one fails, those that
import the changed module first; a mutant that none of them notices has survived, and is printed. A test that fails
without a mutant too (of a package that is not installed, say) counts for nothing and is left out from then on. The
order is drawn with a seed, so a run goes on where the last one stopped. `--again` tries the survivors of a file once
more, with the slow tests too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# The tests of a room: folders and files, in which the quick and those that notice most come first.
TESTS = {
    "ops": ["tests/ops", "tests/test_neurons.py", "tests/deploy/test_kernels.py", "tests/models/test_fused.py"],
    "attention": ["tests/attention", "tests/analysis/test_energy.py", "tests/deploy/test_streaming.py"],
    "training": ["tests/training"],
    "deploy": ["tests/deploy", "tests/test_predict.py"],
    "analysis": ["tests/analysis", "tests/deploy/test_profile.py"],
}
# Tests that start processes, export, or take long for another reason.
SLOW = {
    "tests/analysis/test_analyze.py", "tests/analysis/test_report_browser.py", "tests/attention/test_own_network.py",
    "tests/deploy/test_export.py", "tests/deploy/test_exportable.py", "tests/deploy/test_profile.py",
    "tests/training/test_captured.py", "tests/training/test_processes.py", "tests/training/test_sharding.py",
    "tests/training/test_stopping.py", "tests/training/test_sweep.py", "tests/ops/test_compiled_kernels.py",
}  # fmt: skip
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
# What changes speed or wording and no result.
LAUNCH = {"num_warps", "num_stages"}
WORDS = {"print", "warn", "info", "warning", "debug", "add_argument", "add_column", "add_row"}
# Sizes, colours and positions, as arguments, variables and calls of what draws figures. What these show is not.
LOOK = {
    "alpha", "below", "break_long_words", "break_on_hyphens", "cmap", "color", "columns", "dpi", "edgecolor",
    "facecolor", "few", "figsize", "fontsize", "height", "lines", "linestyle", "linewidth", "loc", "look",
    "markeredgecolor", "markeredgewidth", "markerscale", "markersize", "ncols", "padding", "rasterized", "rim", "room",
    "rows", "s", "sharex", "sharey", "shrink", "size", "squeeze", "subs", "vmax", "vmin", "widest", "width",
    "width_ratios", "xlim", "ylim", "zorder",
}  # fmt: skip
LOOK_CALLS = {"autoscale_view", "grid", "margins", "set_axis_off", "set_figheight", "set_markersize"}
# Seconds of computing, and on the clock, for the tests of one mutant; one that does not end is noticed.
LONGEST, LONGEST_WAIT = 240, 1800


class Mutant(NamedTuple):
    path: str
    line: int
    start: int  # of the text that is replaced, in characters of the file
    end: int
    after: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a file, but for those of messages, the look of figures, types and defaults of the command line."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [sum(len(line) for line in lines[:i]) for i in range(len(lines))]
    tree = ast.parse(source)

    def place(line: int, column: int) -> int:
        """ast counts columns in bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)

    def change(node: ast.expr | ast.stmt, after: str, start: int | None = None, end: int | None = None) -> Mutant:
        first, last = span(node)
        return Mutant(str(path.relative_to(ROOT)), node.lineno, start or first, end or last, after)

    def between(left: ast.expr, right: ast.expr, after: str) -> Mutant:
        """In place of the sign between two operands."""
        gap = source[span(left)[1] : span(right)[0]]
        sign = gap.strip(" ()\n\\").split("#")[0].strip()
        at = span(left)[1] + gap.index(sign)
        return change(left, after, at, at + len(sign))

    def called(function: ast.expr) -> str:
        return getattr(function, "attr", None) or getattr(function, "id", "")

    def tuning(node: ast.Assign) -> bool:
        """Whether these are sizes of blocks of a kernel. Most of what a kernel can do is a limit, and stays."""
        names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        return path.stem.endswith("triton") and all(n.isupper() and not n.startswith("MOST") for n in names)

    def look(node: ast.AST) -> bool:
        """Whether this is about how a figure looks: a value of the module, or one that is named so."""
        if path.parent.name != "report" or path.stem not in ("drawings", "look", "plots"):
            return False
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name in LOOK or node in tree.body
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                return all(isinstance(name, ast.Name) and name.id in LOOK for name in names)
            case ast.AnnAssign():
                return node in tree.body
            case ast.keyword(arg=name):
                return name in LOOK
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
                return name in LOOK_CALLS
        return False

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if look(node):
            return
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert():
                return
            case ast.Call(func=ast.Name(id="require")):
                yield change(node.args[0], "True")
                return
            case ast.AnnAssign():
                if node.value is not None:
                    yield from visit(node.value)
                return
            case ast.FunctionDef(name="__repr__" | "extra_repr"):
                return
            case ast.FunctionDef():
                for statement in node.body:
                    yield from visit(statement)
                return
            case ast.keyword(arg=name) if name in LAUNCH:
                return
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in WORDS:
                return
            case ast.Assign() if tuning(node):
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr(value=ast.Call(func=func)) if called(func) not in WORDS | {"require"}:
                yield change(node, "pass")
            case ast.AugAssign():
                yield change(node, "pass")
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
                yield change(test, f"(not ({ast.get_source_segment(source, test)}))")
            case ast.Compare(ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
                yield between(node.left, right, COMPARISONS[type(sign)])
            case ast.BinOp(op=sign) if type(sign) in OPERATORS and not isinstance(
                node.left, ast.Constant | ast.JoinedStr
            ):
                yield between(node.left, node.right, OPERATORS[type(sign)])
            case ast.BoolOp(values=[left, right, *_]):
                yield between(left, right, "or" if isinstance(node.op, ast.And) else "and")
            case ast.Constant(value=bool() as value):
                yield change(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield change(node, repr(value + 1))
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    for mutant in visit(tree):
        with_change = source[: mutant.start] + mutant.after + source[mutant.end :]
        try:
            compile(with_change, str(path), "exec")
        except SyntaxError:
            continue
        yield mutant


def drawn(rooms: list[str], seed: int) -> list[tuple[str, Mutant]]:
    """All mutants of the rooms in a random order, the rooms in turn."""
    queues = []
    for room in rooms:
        found = [m for path in sorted((ROOT / "lrfdyn" / room).rglob("*.py")) for m in mutants_of(path)]
        random.Random(seed).shuffle(found)
        queues.append([(room, mutant) for mutant in found])
    most = max(map(len, queues))
    return [queue[i] for i in range(most) for queue in queues if i < len(queue)]


def test_files(folder: Path, room: str, module: str) -> list[list[str]]:
    """The tests of a room in the copy `folder`, in five steps: the quick ones that name the module, quick ones that
    name its package, slow ones that name the module, other quick ones, other slow ones."""
    files: list[str] = []
    for place in TESTS[room]:
        found = sorted((folder / place).glob("test_*.py")) if (folder / place).is_dir() else [folder / place]
        files += [str(file.relative_to(folder)) for file in found if file.stem != "test_gpu"]
    dotted = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = dotted.rpartition(".")[0]
    steps: list[list[str]] = [[], [], [], [], []]
    for file in files:
        text = (folder / file).read_text(encoding="utf-8")
        exact, near = dotted in text, package in text and package != f"lrfdyn.{room}"
        slow, quick = (2 if exact else 4), (0 if exact else 1 if near else 3)
        steps[slow if file in SLOW else quick].append(file)
    return steps


class First:
    """Remembers the first test that fails, for the process that started the tests."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


def run_tests(folder: Path, files: Sequence[str], without: Sequence[str] = ()) -> str | None:
    """The first of the tests `files` that fails in `folder`, a copy of the repository, but for the tests and files
    `without`. They run in a fork of this process, which has imported all that takes long and nothing of the package."""
    files = [file for file in files if file not in without]
    if not files:
        return None
    outcome = folder / "failed.txt"
    outcome.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            sink = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(sink, stream)
            os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
            sys.path[0], sys.dont_write_bytecode = str(folder), True
            resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
            import pytest

            given = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
            given += [f"--deselect={test}" for test in without if "::" in test]
            code = int(pytest.main(given, plugins=[First(outcome)]))
            code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
        finally:
            os._exit(code)
    deadline = time.monotonic() + LONGEST_WAIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0]:
        code = os.waitstatus_to_exitcode(ended[1])
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        code = -signal.SIGKILL
    if code < 0:
        return "did not end"
    return (outcome.read_text(encoding="utf-8") if outcome.exists() else "ended") if code else None


class Copy:
    """A copy of the repository, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound: set[str] = set()  # tests that pass without a mutant
        self.unsound: list[str] = []

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.path
        original, dated = path.read_text(encoding="utf-8"), path.stat().st_mtime
        try:
            path.write_text(original[: mutant.start] + mutant.after + original[mutant.end :], encoding="utf-8")
            os.utime(path, (dated + 1e6, dated + 1e6))  # so that the compiled file of the original is not taken
            yield
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, (dated, dated))

    def notice(self, mutant: Mutant, files: Sequence[str]) -> str | None:
        """The first of the tests that fails with the mutant and passes without it."""
        while True:
            with self.changed(mutant):
                noticed = run_tests(self.folder, files, self.unsound)
            if noticed is None or noticed in ("did not end", "ended") or noticed in self.sound:
                return noticed
            if run_tests(self.folder, [noticed]) is None:
                self.sound.add(noticed)
                return noticed
            self.unsound.append(noticed)
            print(f"fails without a mutant: {noticed}", flush=True)

    def attempt(self, room: str, mutant: Mutant, slow: bool) -> dict[str, object]:
        """Whether a test notices."""
        before = (self.folder / mutant.path).read_text(encoding="utf-8")[mutant.start : mutant.end]
        began, noticed = time.perf_counter(), None
        for files in test_files(self.folder, room, mutant.path)[: 5 if slow else 4]:
            noticed = noticed or self.notice(mutant, files)
        seconds = round(time.perf_counter() - began, 1)
        return {"room": room, **mutant._asdict(), "before": before, "noticed": noticed, "seconds": seconds}


def work(jobs: Sequence[tuple[str, Mutant]], given: argparse.Namespace, deadline: float) -> None:
    """Tries mutants in a copy of the repository until the time is over; adds a line to the file for each."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / ROOT.name
        ignored = shutil.ignore_patterns(".git", ".venv", "demo", "site", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests"]
        subprocess.run(collect, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True)
        copy = Copy(folder)
        for room, mutant in jobs:
            if time.monotonic() > deadline:
                return
            record = {"seed": given.seed, **copy.attempt(room, mutant, given.again)}
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if record["noticed"] is None:
                print(f"survived: {mutant.path}:{mutant.line}: {record['before']!r} -> {mutant.after!r}", flush=True)


def read(out: Path) -> dict[Mutant, dict[str, Any]]:
    """The newest line of every mutant that was tried."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    records = [json.loads(line) for line in lines]
    return {Mutant(*(record[name] for name in Mutant._fields)): record for record in records}


def is_there(mutant: Mutant, record: dict[str, Any]) -> bool:
    """Whether the code is still what it was when the mutant was tried."""
    return (ROOT / mutant.path).read_text(encoding="utf-8")[mutant.start : mutant.end] == record["before"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rooms", nargs="+", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--together", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", action="store_true", help="the survivors of the file, with the slow tests too")
    given = parser.parse_args()
    done = read(given.out)
    if given.again:
        todo = [(r["room"], mutant) for mutant, r in done.items() if r["noticed"] is None and is_there(mutant, r)]
    else:
        todo = [job for job in drawn(given.rooms, given.seed) if job[1] not in done]
    print(f"{len(todo)} mutants, {len(done)} tried before", flush=True)
    # Known to every fork: what takes long to import, and what tests/conftest.py sets before.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    deadline = time.monotonic() + 60 * given.minutes
    workers = []
    for i in range(given.together):
        if (worker := os.fork()) == 0:
            try:
                work(todo[i :: given.together], given, deadline)
            finally:
                os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)
    done = read(given.out)
    print(f"{len(done)} mutants, {sum(r['noticed'] is None for r in done.values())} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
