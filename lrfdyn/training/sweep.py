"""Several runs of `lrfdyn train` from one list, some of them side by side, each in a process and a folder of its own.

A sweep file is YAML: the runs, and what they have in common. A run has a recipe, seeds, epochs, and any key of the
recipe by its name (`model.options: {dim: 64}`) or short name:

    recipe: cifar100_spikformer
    seeds: [0, 1]
    epochs: 100
    runs:
      - attention: ssa
      - {attention: lrf_dyn, dilations: [5], name: wide}
"""

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
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from lrfdyn.errors import require, unknown_name
from lrfdyn.files import read_json, read_json_lines, sole_user, write_json, write_table
from lrfdyn.training.build import build_config
from lrfdyn.training.config import TrainConfig, differences, key_types
from lrfdyn.training.logs import discard_run
from lrfdyn.training.recipes import SHORT_NAMES, load_recipe, read_yaml
from lrfdyn.training.stopping import PARENT
from lrfdyn.training.tasks import task_of
from lrfdyn.version import __version__

FORMAT = 1
OWN = ("name", "recipe", "seeds", "epochs")  # of a run in the list; everything else is a key of its recipe
KEPT_FILES = ("summary.json", "log.jsonl", "recipe.yaml")
POLL_SECONDS = 0.3
# Without these glibc gives large tensors back to the system after every operation and faults them in again.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}


@dataclass(frozen=True)
class SweepRun:
    """One run of a list. `overrides` are texts by `section.key`; runs of one `group` differ in nothing but their
    seed."""

    name: str
    group: str
    recipe: str
    epochs: int | None
    overrides: Mapping[str, str]
    config: TrainConfig

    def command(self, folder: Path) -> list[str]:
        """The arguments of `lrfdyn` that make the run in `folder`, or go on with it."""
        given = [part for key, text in self.overrides.items() for part in (f"--{key}", text)]
        epochs = [] if self.epochs is None else ["--epochs", str(self.epochs)]
        return ["train", self.recipe, *epochs, *given, "--out", str(folder), "--resume", "auto"]

    @property
    def options(self) -> str:
        """What the list says of the run besides its attention and seed."""
        hidden = ("model.attention", "run.seed", "data.root")
        return ", ".join(f"{key.split('.')[1]} {text}" for key, text in self.overrides.items() if key not in hidden)


class SweepReporter:
    """Hears of a sweep; this one is silent. `row` is a line of its table."""

    def progress(self, run: SweepRun, record: Mapping[str, Any]) -> None:
        """`record` is the last one in the log of a run that is under way."""

    def end(self, run: SweepRun, row: Mapping[str, Any]) -> None:
        """The run has ended, now or in an earlier call, or it has failed."""


def load_sweep(path: Path, overrides: Mapping[str, str] | None = None) -> list[SweepRun]:
    """The runs of a sweep file; `overrides` are keys of the recipe for all of them, as on a command line."""
    values = read_yaml(path, "sweep")
    if isinstance(values, list):
        values = {"runs": values}
    require(isinstance(values, dict), f"sweep: {path}: expected a list of runs, or keys and `runs`, got {values!r}")
    return plan_runs(values, overrides, str(path))


def plan_runs(
    values: Mapping[str, Any], overrides: Mapping[str, str] | None = None, source: str = "sweep"
) -> list[SweepRun]:
    """The runs that the content of a sweep file describes, every recipe read and checked; errors name `source`."""
    common = {key: value for key, value in values.items() if key != "runs"}
    entries = values.get("runs")
    require(isinstance(entries, list) and len(entries) > 0, f"{source}: runs: expected a list of at least one")
    assert isinstance(entries, list)
    entries = [{"recipe": entry} if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        require(isinstance(entry, dict), f"{source}: runs: expected keys with values, got {entry!r}")
    several = len({str({**common, **entry}.get("recipe")) for entry in entries}) > 1
    runs = [
        run
        for entry in entries
        for run in _runs_of_entry({**common, **entry}, _group_name(entry, several), overrides or {}, source)
    ]
    names = [run.name for run in runs]
    for name in names:
        require(names.count(name) == 1, f"{source}: two runs are called {name}; give one of them a `name`")
    return runs


def _runs_of_entry(
    entry: Mapping[str, Any], group: str, overrides: Mapping[str, str], source: str
) -> Iterator[SweepRun]:
    recipe, epochs, seeds = entry.get("recipe"), entry.get("epochs"), entry.get("seeds", [0])
    require(isinstance(recipe, str), f"{source}: {group}: expected the name of a recipe, got {recipe!r}")
    require(epochs is None or type(epochs) is int, f"{source}: epochs: expected an integer, got {epochs!r}")
    require(
        isinstance(seeds, (list, tuple)) and len(seeds) > 0 and all(type(seed) is int and seed >= 0 for seed in seeds),
        f"{source}: seeds: expected at least one integer >= 0, got {seeds!r}",
    )
    require(len({*seeds}) == len(seeds), f"{source}: seeds: expected different ones, got {seeds!r}")
    given = {_full_key(key, source): _text(value) for key, value in entry.items() if key not in OWN}
    require("run.seed" not in {**given, **overrides}, f"{source}: run.seed: has a key of its own, seeds")
    for seed in seeds:
        texts = {**given, **overrides, "run.seed": str(seed)}
        _, config = build_config(str(recipe), texts, epochs)
        yield SweepRun(f"{group}-seed{seed}", group, str(recipe), epochs, texts, config)


def _group_name(entry: Mapping[str, Any], with_recipe: bool) -> str:
    """The given name, or what the entry says of the run: attention and other keys, and the recipe where it needs it."""
    if "name" in entry:
        return str(entry["name"])
    parts = [f"{key.split('.')[-1]}{value}" for key, value in entry.items() if key not in (*OWN, "attention")]
    parts = [str(entry["attention"]), *parts] if "attention" in entry else parts
    parts = [Path(str(entry.get("recipe"))).stem, *parts] if with_recipe or not parts else parts
    return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts)


def _full_key(key: str, source: str) -> str:
    full = SHORT_NAMES.get(key, key)
    if full not in key_types():
        raise unknown_name(f"{source}: key", key, [*OWN, *SHORT_NAMES, *key_types()])
    return full


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Sweep:
    """The runs of a list in `out`: `runs/NAME/` is the folder of each, sweep.json and table.csv say how they ended.

    `together` runs are under way at a time. With `threads`, each has so many of the processor's; the default is one
    where several run, and all of them otherwise."""

    def __init__(
        self, runs: Sequence[SweepRun], out: Path, *, together: int = 1, threads: int | None = None, command: str = ""
    ) -> None:
        require(together >= 1, f"together: expected an integer >= 1, got {together}")
        self.runs, self.out, self.together, self.command = list(runs), out, together, command
        self.threads = 1 if threads is None and together > 1 else threads
        self.failed: set[str] = set()

    def folder(self, run: SweepRun) -> Path:
        return self.out / "runs" / run.name

    def console(self, run: SweepRun) -> Path:
        """The file that holds what the run wrote on its console."""
        return self.folder(run) / "console.txt"

    def check(self, run: SweepRun) -> None:
        """An error for a folder that holds a run of the same name with other settings."""
        path = self.folder(run) / "recipe.yaml"
        what = "; ".join(differences(run.config.as_dict(), load_recipe(path).as_dict())) if path.is_file() else ""
        require(not what, f"out: {path.parent} has other settings ({what}); pass --restart or another folder")

    def ended(self, run: SweepRun) -> bool:
        """Whether the run is finished, with these settings."""
        path = self.folder(run) / "summary.json"
        return path.is_file() and read_json(path, "out").get("fingerprint") == run.config.fingerprint()

    def row(self, run: SweepRun) -> dict[str, Any]:
        """What is known of a run: its line of the table."""
        summary = read_json(self.folder(run) / "summary.json", "out") if self.ended(run) else {}
        measure = task_of(run.config.data.name).headline
        tested = [record[measure] for record in read_json_lines(self.folder(run) / "log.jsonl") if measure in record]
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
            "parameters": summary.get("parameters"),
            "images_per_s": summary.get("images_per_s"),
            "wall_s": summary.get("wall_s"),
            "command": shlex.join(["lrfdyn", *run.command(self.folder(run))]),
        }

    def run(self, reporter: SweepReporter | None = None, restart: bool = False) -> list[dict[str, Any]]:
        """Makes all runs that have not ended yet and returns the rows of the table. Only one process at a time may do
        this in a folder. A run that fails does not keep the others from going on."""
        reporter = reporter or SweepReporter()
        with sole_user(self.out):
            for run in self.runs:
                if restart:
                    discard_run(self.folder(run))
                self.check(run)
            waiting = [run for run in self.runs if not self.ended(run)]
            before = [run for run in self.runs if run not in waiting]
            for run in chain(before, self._each_end(waiting, reporter)):
                reporter.end(run, self.row(run))
                self._write()
            return [self.row(run) for run in self.runs]

    def _each_end(self, waiting: list[SweepRun], reporter: SweepReporter) -> Iterator[SweepRun]:
        """Starts the runs and yields each when it ends. Those that are under way when this is left stop with a
        checkpoint."""
        running: list[tuple[SweepRun, subprocess.Popen[bytes]]] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.together:
                    run = waiting.pop(0)
                    running.append((run, self._start(run)))
                time.sleep(POLL_SECONDS)
                for run, process in list(running):
                    code = process.poll()
                    records = read_json_lines(self.folder(run) / "log.jsonl")
                    if records:
                        reporter.progress(run, records[-1])
                    if code is not None:
                        running.remove((run, process))
                        if not self.ended(run):
                            self.failed.add(run.name)
                        yield run
        finally:
            for _, process in running:
                process.terminate()
            for _, process in running:
                process.wait()

    def _start(self, run: SweepRun) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        # A run whose sweep was killed ends too.
        environment = {**MEMORY, **os.environ, "PYTHONPATH": path, PARENT: str(os.getpid())}
        if self.threads is not None:
            environment |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        self.folder(run).mkdir(parents=True, exist_ok=True)
        with self.console(run).open("ab") as console:
            return subprocess.Popen(
                [sys.executable, "-m", "lrfdyn", *run.command(self.folder(run))],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the sweep, which stops them
            )

    def _write(self) -> None:
        rows = [self.row(run) for run in self.runs]
        write_table(self.out / "table.csv", rows)
        facts = {"format": FORMAT, "version": __version__, "created": datetime.now().isoformat(timespec="seconds")}
        write_json(
            self.out / "sweep.json",
            {**facts, "command": self.command, "together": self.together, "runs": rows, "groups": group_rows(rows)},
        )

    def keep(self, target: Path) -> None:
        """Copies what a results page reads of the runs that have ended to `target/NAME`. Where data and runs lay on
        this machine is left out; the summary says beside what a run shared the device."""
        for run in filter(self.ended, self.runs):
            root = run.config.data.root
            for name in KEPT_FILES:
                text = (self.folder(run) / name).read_text(encoding="utf-8")
                text = text if root is None else text.replace(root, "DATA")
                (target / run.name).mkdir(parents=True, exist_ok=True)
                (target / run.name / name).write_text(
                    text.replace(str(self.folder(run)), f"results/{target.name}/{run.name}"), encoding="utf-8"
                )
            others = [other.name for other in self.runs if other is not run] if self.together > 1 else []
            beside = f"{min(self.together - 1, len(others))} of {', '.join(others)}" if others else None
            path = target / run.name / "summary.json"
            write_json(path, {**read_json(path, "keep"), "beside": beside})


def group_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the accuracies over the seeds of every group; None of too few."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).extend([] if row["accuracy"] is None else [row["accuracy"]])
    return [
        {
            "group": group,
            "runs": len(values),
            "accuracy_mean": statistics.mean(values) if values else None,
            "accuracy_std": statistics.stdev(values) if len(values) > 1 else None,
        }
        for group, values in groups.items()
    ]
