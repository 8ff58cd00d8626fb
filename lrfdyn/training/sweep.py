"""Several runs of `lrfdyn train` from one list, some of them side by side, each in a process and a folder of its own.

A sweep file is YAML: `runs`, and what they have in common. A run has a recipe, seeds, epochs, and any key of the recipe
by its name (`model.options: {dim: 64}`) or short name. Its `teacher` is another run of the list, which comes first."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lrfdyn.checks import checked
from lrfdyn.errors import require, unknown_name
from lrfdyn.files import read_json, read_json_lines, read_summary, sole_user, write_json, write_table
from lrfdyn.training.config import TrainConfig, differences, key_types
from lrfdyn.training.logs import discard_run
from lrfdyn.training.processes import PARENT
from lrfdyn.training.recipes import SHORT_NAMES, load_recipe, read_yaml
from lrfdyn.training.tasks import task_of
from lrfdyn.version import __version__

OWN = ("name", "recipe", "seeds", "epochs", "teacher")  # of a run in the list; everything else is a key of its recipe
POLL_SECONDS = 0.3
LOG_END = 2**14  # bytes, which hold the last records: a long log is not read whole at every poll
# Without these glibc gives large tensors back to the system after every operation and faults them in again.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}


@dataclass(frozen=True)
class SweepRun:
    """One run of a list. `overrides` are texts by `section.key`; runs of one `group` differ in their seed only. The
    `teacher` is the name of the run that it learns from, whose folder a `Sweep` knows."""

    name: str
    group: str
    recipe: str
    epochs: int | None
    overrides: Mapping[str, str]
    config: TrainConfig
    teacher: str | None = None

    def command(self, folder: Path) -> list[str]:
        """The arguments of `lrfdyn` that make the run in `folder`, or go on with it."""
        given = [part for key, text in self.overrides.items() for part in (f"--{key}", text)]
        epochs = [] if self.epochs is None else ["--epochs", str(self.epochs)]
        return ["train", self.recipe, *epochs, *given, "--out", str(folder), "--resume", "auto"]

    @property
    def options(self) -> str:
        """What the list says of the run besides its attention and seed."""
        hidden = ("model.attention", "run.seed", "data.root")
        shown = self.overrides if self.teacher is None else {**self.overrides, "distill.teacher": self.teacher}
        return ", ".join(f"{key.split('.')[1]} {text}" for key, text in shown.items() if key not in hidden)


class SweepReporter:
    """Hears of a sweep; this one is silent. `row` is a line of its table."""

    def begin(self, run: SweepRun) -> None:
        """A process has started for the run."""

    def stopping(self) -> None:
        """Runs that are under way were asked to stop, and finish their steps."""

    def progress(self, run: SweepRun, record: Mapping[str, Any]) -> None:
        """`record` is the last one in the log of a run that is under way."""

    def end(self, run: SweepRun, row: Mapping[str, Any]) -> None:
        """The run has ended, now or in an earlier call, or it has failed."""


@checked
def load_sweep(path: Path, overrides: Mapping[str, str] | None = None) -> list[SweepRun]:
    """The runs of a sweep file; `overrides` are keys of the recipe for all of them, as on a command line."""
    return plan_runs(read_yaml(path, "sweep"), overrides, f"sweep: {path}")


def plan_runs(values: Any, overrides: Mapping[str, str] | None = None, source: str = "sweep") -> list[SweepRun]:
    """The runs that the content of a sweep file describes, every recipe read and checked; errors name `source`."""
    values = {"runs": values} if isinstance(values, list) else values
    require(isinstance(values, dict), f"{source}: expected a list of runs, or keys and `runs`, got {values!r}")
    entries, common = values.get("runs"), {key: value for key, value in values.items() if key != "runs"}
    require(isinstance(entries, list) and len(entries) > 0, f"{source}: runs: expected a list of at least one")
    entries = [{"recipe": entry} if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        require(isinstance(entry, dict), f"{source}: runs: expected keys with values, got {entry!r}")
    for keys in (common, *entries):
        twice = [short for short, key in SHORT_NAMES.items() if short in keys and key in keys]
        require(not twice, f"{source}: {', '.join(twice)}: stands there under its long name too")
    several = len({str({**common, **entry}.get("recipe")) for entry in entries}) > 1
    groups = (
        _runs_of_entry({**common, **entry}, _group_name(entry, several), overrides or {}, source) for entry in entries
    )
    # The first seed of all, then the second: where a sweep is stopped, it has something of everything.
    runs = [run for nth in zip_longest(*groups) for run in nth if run is not None]
    names = [run.name for run in runs]
    for name in names:
        require(names.count(name) == 1, f"{source}: two runs are called {name}; give one of them a `name`")
    _check_teachers(runs, source)
    return runs


def _check_teachers(runs: Sequence[SweepRun], source: str) -> None:
    """Every teacher is a run of the list, and none learns from its own pupils."""
    teachers = {run.name: run.teacher for run in runs}
    for name in teachers:
        line = [name]
        while (teacher := teachers[line[-1]]) is not None:
            if teacher not in teachers:
                raise unknown_name(f"{source}: {line[-1]}: teacher", teacher, teachers)
            require(teacher not in line, f"{source}: teacher: {' <- '.join([*line, teacher])} goes in a circle")
            line.append(teacher)


def _runs_of_entry(
    entry: Mapping[str, Any], group: str, overrides: Mapping[str, str], source: str
) -> Iterator[SweepRun]:
    recipe, epochs, seeds = entry.get("recipe"), entry.get("epochs"), entry.get("seeds", [0])
    teacher = entry.get("teacher")
    require(isinstance(recipe, str), f"{source}: {group}: expected the name of a recipe, got {recipe!r}")
    require(epochs is None or type(epochs) is int, f"{source}: epochs: expected an integer, got {epochs!r}")
    numbers = isinstance(seeds, (list, tuple)) and all(type(seed) is int and seed >= 0 for seed in seeds)
    require(numbers and len(seeds) > 0, f"{source}: seeds: expected at least one integer >= 0, got {seeds!r}")
    require(len({*seeds}) == len(seeds), f"{source}: seeds: expected different ones, got {seeds!r}")
    named = teacher is None or isinstance(teacher, str)
    require(named, f"{source}: teacher: expected the name of a run, got {teacher!r}")
    texts = {}
    for key, value in entry.items():
        full = SHORT_NAMES.get(key, key)
        if full in key_types():
            texts[full] = value if isinstance(value, str) else json.dumps(value)
        elif key not in OWN:
            raise unknown_name(f"{source}: key", key, [*OWN, *SHORT_NAMES, *key_types()])
    texts |= overrides
    require("run.seed" not in texts, f"{source}: run.seed: has a key of its own, seeds")
    both = teacher is not None and "distill.teacher" in texts
    require(not both, f"{source}: {group}: teacher: stands there beside distill.teacher")
    for seed in seeds:
        own = {**texts, "run.seed": str(seed)}
        config = load_recipe(str(recipe), own, epochs)
        yield SweepRun(f"{group}-seed{seed}", group, str(recipe), epochs, own, config, teacher)


def _group_name(entry: Mapping[str, Any], with_recipe: bool) -> str:
    """The given name, or what the entry says of the run: attention and other keys, and the recipe where it needs it."""
    if "name" in entry:
        return str(entry["name"])
    parts = [f"{key.split('.')[-1]}{value}" for key, value in entry.items() if key not in (*OWN, "attention")]
    parts = [str(entry["attention"]), *parts] if "attention" in entry else parts
    parts = [Path(str(entry.get("recipe"))).stem, *parts] if with_recipe or not parts else parts
    return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts)


class Sweep:
    """The runs of a list in `out`: `runs/NAME/` is the folder of each, sweep.json and table.csv say how they ended.
    `together` runs are under way at a time, each with `threads` (default: one where several run, else all)."""

    @checked
    def __init__(
        self, runs: Sequence[SweepRun], out: Path, *, together: int = 1, threads: int | None = None, command: str = ""
    ) -> None:
        require(together >= 1, f"together: expected an integer >= 1, got {together}")
        self.out, self.together, self.command = out, together, command
        self.runs = list(map(self._with_teacher, runs))
        self.threads = 1 if threads is None and together > 1 else threads
        self.failed: set[str] = set()

    def _with_teacher(self, run: SweepRun) -> SweepRun:
        """The run with the folder of its teacher among its settings."""
        if run.teacher is None:
            return run
        folder = str(self.out / "runs" / run.teacher)
        config = replace(run.config, distill=replace(run.config.distill, teacher=folder))
        return replace(run, overrides={**run.overrides, "distill.teacher": folder}, config=config)

    def folder(self, run: SweepRun) -> Path:
        return self.out / "runs" / run.name

    def console(self, run: SweepRun) -> Path:
        """The file that holds what the run wrote on its console."""
        return self.folder(run) / "console.txt"

    def summary(self, run: SweepRun) -> dict[str, Any]:
        """That of a run which is finished, with these settings; else it is empty."""
        summary = read_summary(self.folder(run) / "summary.json", "out")
        return summary if summary.get("fingerprint") == run.config.fingerprint() else {}

    def row(self, run: SweepRun) -> dict[str, Any]:
        """What is known of a run: its line of the table."""
        summary, measure = self.summary(run), task_of(run.config.data.name).headline
        log = read_json_lines(self.folder(run) / "log.jsonl")
        tested = [record[measure] for record in log if record.get(measure) is not None]
        return {
            "name": run.name,
            "group": run.group,
            "recipe": run.recipe,
            "attention": summary.get("attention") or run.config.model.attention,
            "options": run.options,
            "seed": run.config.run.seed,
            "state": "ended" if summary else "failed" if run.name in self.failed else "not ended",
            "measure": measure,
            "accuracy": summary.get(measure),  # percent, of the last epoch
            "best": max(tested, default=None),
            **{key: summary.get(key) for key in ("parameters", "images_per_s", "wall_s")},
            "command": shlex.join(["lrfdyn", *run.command(self.folder(run))]),
        }

    def run(
        self, reporter: SweepReporter | None = None, restart: bool = False, keep: Path | None = None
    ) -> list[dict[str, Any]]:
        """Makes all runs that have not ended yet, also after one that fails, and returns the rows of the table. Where
        there is a folder to `keep` them in, a run is copied to it as soon as it ends. The caller is the `sole_user` of
        `out`."""
        reporter = reporter or SweepReporter()
        if restart:
            folders = list(map(self.folder, self.runs))
            with sole_user(*folders):  # all of them, before the first is discarded
                for folder in folders:
                    discard_run(folder)
        for run in self.runs:
            path = self.folder(run) / "recipe.yaml"
            there = load_recipe(path) if path.is_file() else run.config
            what = "; ".join(differences(run.config.as_dict(), there.as_dict()))
            require(not what, f"out: {path.parent} has other settings ({what}); pass --restart or another folder")
        known: dict[str, dict[str, Any]] = {}  # the rows of what has ended, which change no more

        def end(run: SweepRun) -> None:
            known[run.name] = self.row(run)
            reporter.end(run, known[run.name])
            if keep is not None:
                self.keep(run, keep)

        ended = [run for run in self.runs if self.summary(run)]
        for run in ended:
            end(run)
        if ended:
            self._write_table(known)
        for run in self._each_end([run for run in self.runs if run not in ended], reporter):
            end(run)
            self._write_table(known)
        return self._rows(known)

    def _rows(self, known: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [known.get(run.name) or self.row(run) for run in self.runs]

    def _write_table(self, known: Mapping[str, dict[str, Any]]) -> None:
        rows = self._rows(known)
        write_table(self.out / "table.csv", rows)
        now = datetime.now().isoformat(timespec="seconds")
        facts = {"format": 1, "version": __version__, "created": now, "command": self.command}
        table = {"together": self.together, "runs": rows, "groups": group_rows(rows)}
        write_json(self.out / "sweep.json", {**facts, **table})

    def _each_end(self, waiting: list[SweepRun], reporter: SweepReporter) -> Iterator[SweepRun]:
        """Yields each run when it ends. Those that are under way when this is left stop with a checkpoint."""
        running: list[tuple[SweepRun, subprocess.Popen[bytes]]] = []
        try:
            while waiting or running:
                while len(running) < self.together and (run := _next_ready(waiting, [run for run, _ in running])):
                    waiting.remove(run)
                    if run.teacher in self.failed:
                        self._give_up(run)
                        yield run
                        continue
                    running.append((run, self._start(run)))
                    reporter.begin(run)
                time.sleep(POLL_SECONDS)
                for run, process in list(running):
                    code = process.poll()
                    records = read_json_lines(self.folder(run) / "log.jsonl", LOG_END)
                    if records:
                        reporter.progress(run, records[-1])
                    if code is not None:
                        running.remove((run, process))
                        if not self.summary(run):
                            self.failed.add(run.name)
                        yield run
        finally:
            for _, process in running:
                process.terminate()
            if running:
                reporter.stopping()
            try:
                for _, process in running:
                    process.wait()
            except KeyboardInterrupt:  # asked twice: at once
                for _, process in running:
                    process.kill()
                raise

    def _give_up(self, run: SweepRun) -> None:
        """A run whose teacher failed fails too, and says why."""
        self.failed.add(run.name)
        self.folder(run).mkdir(parents=True, exist_ok=True)
        with self.console(run).open("a", encoding="utf-8") as console:
            console.write(f"not started: its teacher, {run.teacher}, failed\n")

    def _start(self, run: SweepRun) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        # A run whose sweep was killed ends too.
        environment = {**MEMORY, **os.environ, "PYTHONPATH": path, PARENT: str(os.getpid())}
        if self.threads is not None:
            environment |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        self.folder(run).mkdir(parents=True, exist_ok=True)
        with self.console(run).open("ab") as console:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            command = [sys.executable, "-m", "lrfdyn", *run.command(self.folder(run))]
            # In a session of its own: Ctrl-C is for the sweep, which stops its runs.
            return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def keep(self, run: SweepRun, target: Path) -> None:
        """Copies what a results page reads of a run that has ended to `target/NAME`, without the paths of this machine;
        the summary says beside what it shared the device. Of a run that has not ended nothing is copied."""
        if not self.summary(run):
            return
        place = Path("results", target.name) if target.is_absolute() else target
        kept, root = target / run.name, run.config.data.root
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "log.jsonl", "recipe.yaml"):
            text = (self.folder(run) / name).read_text(encoding="utf-8")
            if root is not None:  # a short one, such as data, is a word of these files too
                text = re.sub(rf"(root[:= ]+['\"]?){re.escape(root)}", r"\1DATA", text)
            for each in filter(None, (run.name, run.teacher)):
                text = text.replace(str(self.out / "runs" / each), (place / each).as_posix())
            (kept / name).write_text(text, encoding="utf-8")
        others = [other.name for other in self.runs if other is not run]
        count = min(self.together - 1, len(others))
        beside = f"{count} of {', '.join(others)}" if count else None
        summary = kept / "summary.json"
        fingerprint = load_recipe(kept / "recipe.yaml").fingerprint()  # of a teacher that has another path there
        write_json(summary, {**read_json(summary, "keep"), "fingerprint": fingerprint, "beside": beside})


def _next_ready(waiting: Sequence[SweepRun], running: Sequence[SweepRun]) -> SweepRun | None:
    """The first run whose teacher, where it has one, neither waits nor is under way."""
    open_names = {run.name for run in (*waiting, *running)}
    return next((run for run in waiting if run.teacher not in open_names), None)


def group_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the accuracies over the seeds of every group; None of too few."""
    groups = []
    for group in dict.fromkeys(row["group"] for row in rows):
        values = [row["accuracy"] for row in rows if row["group"] == group and row["accuracy"] is not None]
        mean = statistics.mean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        groups.append({"group": group, "runs": len(values), "accuracy_mean": mean, "accuracy_std": deviation})
    return groups
