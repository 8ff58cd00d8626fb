"""Changes one place of the package at a time and sees whether a test notices: `make mutants`.

    python tests/mutants.py --minutes 60 --together 2 --out mutants.jsonl

Every mutant is one small change in a copy of the package: a comparison that takes its border or leaves it, a sign, a
factor, a number, a condition, a statement that is left out. The tests of its room run until one fails; a mutant that
none of them notices has survived, and is printed. The order is drawn with a seed, so a run goes on where the last one
stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# The tests of a room, those that notice most first.
TESTS = {
    "ops": ["tests/ops", "tests/test_neurons.py", "tests/attention"],
    "attention": ["tests/attention", "tests/analysis/test_energy.py", "tests/deploy/test_streaming.py"],
    "training": ["tests/training", "tests/test_reproduce.py"],
    "deploy": ["tests/deploy", "tests/test_predict.py"],
    "analysis": ["tests/analysis", "tests/test_reproduce.py"],
}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
SLOWEST = 900  # seconds for the tests of one mutant; one that does not end is noticed


class Mutant(NamedTuple):
    path: str
    line: int
    start: int  # of the text that is replaced, in characters of the file
    end: int
    after: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a file, but for those of messages, types and defaults of the command line."""
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

    def visit(node: ast.AST) -> Iterator[Mutant]:
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
            case ast.FunctionDef():
                for statement in node.body:
                    yield from visit(statement)
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr(value=ast.Call(func=func)) if not (isinstance(func, ast.Name) and func.id == "require"):
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


def try_mutant(room: str, mutant: Mutant, folder: Path) -> dict[str, object]:
    """Whether a test in `folder`, a copy of the repository, notices."""
    path = folder / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(original[: mutant.start] + mutant.after + original[mutant.end :], encoding="utf-8")
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *TESTS[room]]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SLOWEST, check=False
        )
        failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        noticed = (failed[0].split(" - ")[0] if failed else "ended") if result.returncode else None
    except subprocess.TimeoutExpired:
        noticed = "did not end"
    finally:
        path.write_text(original, encoding="utf-8")
    before = original[mutant.start : mutant.end]
    seconds = round(time.perf_counter() - began, 1)
    return {"room": room, **mutant._asdict(), "before": before, "noticed": noticed, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rooms", nargs="+", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--together", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    tried = {(r["path"], r["start"], r["end"], r["after"]) for r in done}
    todo = [(room, m) for room, m in drawn(given.rooms, given.seed) if (m.path, *m[2:]) not in tried]
    print(f"{len(todo)} mutants, {len(done)} tried before", flush=True)
    deadline = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as scratch, given.out.open("a", encoding="utf-8") as file:
        folders: Queue[Path] = Queue()
        for i in range(given.together):
            copy = Path(scratch) / str(i)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "demo", "site", "__pycache__"))
            folders.put(copy)

        def work(job: tuple[str, Mutant]) -> None:
            if time.monotonic() > deadline:
                return
            folder = folders.get()
            try:
                record = try_mutant(*job, folder)
            finally:
                folders.put(folder)
            file.write(json.dumps(record) + "\n")
            file.flush()
            done.append(record)
            if record["noticed"] is None:
                print(
                    f"survived: {record['path']}:{record['line']}: {record['before']!r} -> {record['after']!r}",
                    flush=True,
                )

        with ThreadPoolExecutor(given.together) as pool:
            list(pool.map(work, todo))
    survived = sum(record["noticed"] is None for record in done)
    print(f"{len(done)} mutants, {survived} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
