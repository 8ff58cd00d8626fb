"""Runs many hostile cases (tests/hostile.py) in worker processes: `make fuzz`.

    python tests/fuzz.py --cases 10000 --seed 0 --together 2 --out findings.jsonl
    python tests/fuzz.py --case files:123        # one of them again

A finding is printed with the command that repeats it. A process that dies or hangs is a finding and is replaced. The
exit code is 1 where something was found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How many of a hundred cases are of a category.
SHARES = {"api": 52, "recipes": 21, "files": 19, "commands": 5, "faults": 2, "signals": 1}
MEMORY = 6 * 2**30  # bytes that a worker may claim beyond what it starts with
PATIENCE = 400  # seconds until a worker that does not answer is replaced; a case ends itself before
WARM = ("accelerate", "onnx", "onnxruntime", "sklearn.datasets", "torch._dynamo", "torch.utils.tensorboard")
FORK = multiprocessing.get_context("fork")  # workers begin with everything imported


def work(ground: Path, pipe: Connection) -> None:
    """Answers every case with its findings."""
    from tests.hostile import LATE, run_case

    claimed = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (claimed + MEMORY, resource.RLIM_INFINITY))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # libraries in C complain of damaged files here
    while True:
        try:
            category, seed = pipe.recv()
        except EOFError:  # the process that asks is gone
            os._exit(0)
        try:
            findings = run_case(category, seed, ground)
        except BaseException:
            findings = [traceback.format_exc()[-600:]]
        pipe.send(findings)
        if any(LATE in finding for finding in findings):
            os._exit(0)  # an import that was broken off would be the next finding


class Worker:
    def __init__(self, ground: Path) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(ground, theirs))  # no daemon: one may have children of its own
        self.process.start()
        theirs.close()
        self.case: tuple[str, int] | None = None
        self.since = 0.0

    def start(self, case: tuple[str, int]) -> None:
        self.case, self.since = case, time.monotonic()
        self.pipe.send(case)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def run(cases: list[tuple[str, int]], ground: Path, together: int, tell: Any) -> None:
    """Gives cases to workers and tells the findings of each."""
    workers, waiting = [Worker(ground) for _ in range(together)], iter(cases)
    for worker in workers:
        if (case := next(waiting, None)) is not None:
            worker.start(case)
    while busy := [worker for worker in workers if worker.case is not None]:
        ready = wait([worker.pipe for worker in busy], timeout=1)
        for worker in busy:
            assert worker.case is not None
            if worker.pipe in ready:
                try:
                    findings = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    findings = [f"the process died with exit code {worker.process.exitcode}"]
            elif time.monotonic() - worker.since > PATIENCE:
                findings = [f"no answer after {PATIENCE} s"]
            else:
                continue
            tell(worker.case, findings, time.monotonic() - worker.since)
            worker.case = None
            if worker.pipe not in ready or worker.process.join(0.05) or not worker.process.is_alive():
                worker.end()
                workers[workers.index(worker)] = worker = Worker(ground)
            if (case := next(waiting, None)) is not None:
                worker.start(case)
    for worker in workers:
        worker.end()


def build(folder: Path) -> None:
    from tests.hostile import make_ground

    make_ground(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--together", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", choices=SHARES, help="this category alone")
    parser.add_argument(
        "--case", metavar="CATEGORY:SEED", action="append", default=[], help="these cases and no others"
    )
    parser.add_argument("--out", type=Path, help="a file of JSON lines for the findings")
    args = parser.parse_args()
    import torch

    import tests.hostile  # noqa: F401  before the workers are made of this process

    for module in WARM:
        with suppress(ImportError):
            importlib.import_module(module)
    torch.set_num_threads(1)
    categories = random.Random(args.seed).choices(list(SHARES), list(SHARES.values()), k=args.cases)
    cases = [(args.only or category, args.seed + i) for i, category in enumerate(categories)]
    if args.case:
        cases = [(category, int(seed)) for category, _, seed in (text.partition(":") for text in args.case)]
    found: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    done: Counter[str] = Counter()

    def tell(case: tuple[str, int], findings: list[str], seconds: float) -> None:
        category, seed = case
        done[category] += 1
        taken[category] += seconds
        for finding in findings:
            found[category] += 1
            text = finding.encode("utf-8", "backslashreplace").decode()
            print(f"FOUND python tests/fuzz.py --case {category}:{seed}\n      {text}", flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": f"{category}:{seed}", "finding": finding}) + "\n")
        if done.total() % 500 == 0:
            print(f"{done.total()} of {len(cases)} cases, {found.total()} findings", flush=True)

    with tempfile.TemporaryDirectory(prefix="hostile-ground-") as folder:
        maker = FORK.Process(target=build, args=(Path(folder),))  # so that this process stays without threads
        maker.start()
        maker.join()
        if maker.exitcode:
            return 1
        run(cases, Path(folder), max(args.together, 1), tell)
    for category in done:
        print(f"{category}: {done[category]} cases, {found[category]} findings, {taken[category]:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
