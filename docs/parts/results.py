"""Parts of results.md, and its figures, from the runs in results/cifar100.

A run is a folder that `lrfdyn train --out results/cifar100/NAME` filled: `recipe.yaml`, `log.jsonl`, `summary.json`,
and what `lrfdyn evaluate --json` said of it later in `evaluate_*.json`. A run without a summary did not end; it is
listed and drawn, but not compared. Runs that differ in nothing but the seed are one cell: mean, deviation and number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import yaml

from docs.parts import RESULTS, ROOT, read, table
from lrfdyn.attention import attention_label, attention_options
from lrfdyn.errors import require
from lrfdyn.files import read_json_lines
from lrfdyn.paper import TABLE3, TABLE3_DILATIONS
from lrfdyn.training.config import ATTENTION_KEYS
from lrfdyn.training.recipes import load_recipe

FOLDER = RESULTS / "cifar100"
PUBLISHED = "cifar100_spikformer"  # the recipe with the settings of Spikformer's authors
LATE, END = 0.7, 0.8  # where the enlarged curves begin, and the tests whose mean stands beside the last
TELLS = 0.5  # percent: below it, one seed shows no difference
STUDENT = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}  # 97.5 % by degrees of freedom
SEEN, NOT_SEEN, CONTRARY = "as in the paper", "too small to tell", "**not as in the paper**"
# What the paper reads from its table: the first cell minus the second.
CLAIMS = {
    "LRF helps SSA": (("LRF-SSA", "Ω<=5"), ("LRF-SSA", "w/o LRF")),
    "LRF helps LRF-Dyn": (("LRF-Dyn", "Ω<=5"), ("LRF-Dyn", "w/o LRF")),
    "LRF-Dyn with LRF is better than SSA": (("LRF-Dyn", "Ω<=5"), ("LRF-SSA", "w/o LRF")),
    "LRF-Dyn does as well as LRF-SSA": (("LRF-Dyn", "Ω<=5"), ("LRF-SSA", "Ω<=5")),
    "LRF-Dyn without LRF does as well as SSA": (("LRF-Dyn", "w/o LRF"), ("LRF-SSA", "w/o LRF")),
    "SSA loses by being causal": (("causal SSA", "w/o LRF"), ("LRF-SSA", "w/o LRF")),
    "LRF-Dyn is better than causal SSA": (("LRF-Dyn", "w/o LRF"), ("causal SSA", "w/o LRF")),
}
# Options of an attention that make another method of it, and how the method is then called.
MARKS: dict[tuple[str, Any], str] = {
    ("token", "qkv"): "qkv token",
    ("directions", 2): "two directions",
    ("coupling", "same"): "real modes",
    ("norm", True): "norm",
    ("scale_lrf", True): "scale on both terms",
    ("train_qk", False): "q, k frozen",
}
Cell = tuple[str, tuple[int, ...]]  # method and dilations
Accuracies = dict[Cell, list[float]]  # top-1 in percent, one value per seed


@dataclass(frozen=True)
class Run:
    name: str
    recipe: dict[str, Any]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any] | None  # None: it did not end
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of the same weights, later

    @property
    def length(self) -> int:
        """The epochs that it was to run."""
        return self.recipe["schedule"]["epochs"] + self.recipe["schedule"]["cooldown_epochs"]

    @property
    def dilations(self) -> tuple[int, ...]:
        given, kind = self.recipe["model"]["dilations"], self.recipe["model"]["attention"]
        return tuple(attention_options(kind).get("dilations", ()) if given is None else given)

    @property
    def title(self) -> str:
        model = self.recipe["model"]
        marks = [f" ({mark})" for (key, value), mark in MARKS.items() if model.get(key) == value]
        return "".join([attention_label(model["attention"]), *marks])

    @property
    def cell(self) -> Cell:
        """Its place in the table. SSA is LRF-SSA without LRF."""
        return "LRF-SSA" if self.title == "SSA" else self.title, self.dilations

    @property
    def seed(self) -> int:
        return self.recipe["run"]["seed"]

    @property
    def settings(self) -> str:
        """What sets a run apart from those by the published settings of the same length, for headings and legends."""
        keys = {key for key, _, _ in changes(self)}
        mixed = self.recipe["schedule"]["mix_epochs"]
        until = f", mixed until epoch {mixed}" if "schedule.mix_epochs" in keys else ""
        stages = self.recipe["schedule"].get("stages") or ()
        until += "".join(f", {s['epochs']} with T = {s['time_steps']}" for s in stages if s["time_steps"] is not None)
        if not keys - {"schedule.mix_epochs"}:
            return until
        return (", strong augmentation" if "augmentation.cutmix" in keys else ", other settings") + until

    @property
    def label(self) -> str:
        """Its cell in words, for legends."""
        return self.title if self.title in ("SSA", "VSA") else f"{self.title} {self.dilations or 'w/o LRF'}"

    @property
    def tests(self) -> dict[int, float]:
        """Top-1 by epoch, of the epochs that had a test."""
        return {record["epoch"]: record["top1"] for record in self.epochs if "top1" in record}


@cache
def read_runs(folder: Path = FOLDER) -> list[Run]:
    """But for those that were tested on held-out training images."""
    runs = []
    for recipe in sorted(folder.glob("**/recipe.yaml")):
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        if values["data"].get("held_out") is not None:
            continue
        path = recipe.with_name("summary.json")
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        epochs = [record for record in read_json_lines(recipe.with_name("log.jsonl")) if record["kind"] == "epoch"]
        later = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(recipe.parent.glob("evaluate_*.json"))]
        name = recipe.parent.relative_to(folder).as_posix()
        runs.append(Run(name, values, epochs, summary, later))
    return runs


def finished(runs: list[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """The runs that ended, each with its summary."""
    return [(run, run.summary) for run in runs if run.summary is not None]


def groups(runs: list[Run]) -> dict[tuple[int, str], list[Run]]:
    """Runs that compare, by their length and settings, the longest first."""
    keys = sorted({(run.length, run.settings) for run in runs}, reverse=True)
    return {key: [run for run in runs if (run.length, run.settings) == key] for key in keys}


def flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """`section.key` of every setting that can decide a result."""
    decide = ("model", "augmentation", "optimizer", "schedule", "distill")
    found = {f"{section}.{key}": value for section in decide for key, value in recipe.get(section, {}).items()}
    kept = ("batch_size", "accumulate", "precision", "seed")
    return found | {f"run.{key}": recipe["run"][key] for key in kept if key in recipe["run"]}


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings that two recipes both have with other values."""
    one, other = (json.loads(json.dumps(flat(recipe))) for recipe in (first, second))
    return [(key, one[key], other[key]) for key in one if key in other and one[key] != other[key]]


@cache
def published(length: int) -> dict[str, Any]:
    recipe = load_recipe(PUBLISHED)
    return replace(recipe, schedule=recipe.schedule.within(length)).as_dict()


def changes(run: Run) -> list[tuple[str, Any, Any]]:
    """The settings of a run that are not the published ones: key, published value, value here."""
    sections = ("augmentation", "optimizer", "schedule")
    return [change for change in differences(published(run.length), run.recipe) if change[0].startswith(sections)]


def check_comparable(runs: list[Run]) -> None:
    """Runs of one table may differ in what it shows and in the seed: a mean over anything else would pass for one over
    seeds, and a column for the effect of its dilations."""
    shown = {f"model.{key}" for key in ATTENTION_KEYS} | {"run.seed"}
    first, *others = runs
    for other in others:
        for key, there, here in differences(first.recipe, other.recipe):
            line = f"runs: {other.name} and {first.name} do not compare: {key}: {there} there, {here} here"
            require(key in shown, line)
    seen: dict[tuple[Cell, int], str] = {}
    for run in runs:
        require((run.cell, run.seed) not in seen, f"runs: {run.name} and {seen.get((run.cell, run.seed))} are the same")
        seen[run.cell, run.seed] = run.name


def accuracies(runs: list[Run]) -> Accuracies:
    """After the last epoch, of runs that ended."""
    found: Accuracies = {}
    for run, summary in finished(runs):
        found.setdefault(run.cell, []).append(summary["top1"])
    return found


def late_accuracies(runs: list[Run]) -> tuple[Accuracies, list[int]]:
    """Of runs of one length: the mean over the tests near the end, at the epochs that all of them tested. The last test
    is one draw from what these show."""
    epochs = sorted(e for e in set.intersection(*(set(run.tests) for run in runs)) if e > END * runs[0].length)
    found: Accuracies = {}
    for run in runs:
        found.setdefault(run.cell, []).append(mean(run.tests[e] for e in epochs))
    return found, epochs


def several(values: list[float]) -> str:
    """The mean; where there are several seeds, the standard deviation and their number too."""
    if not values:
        return "not run"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f} (n = {len(values)})" if len(values) > 1 else "")


def seed_deviation(found: Accuracies) -> tuple[float, int]:
    """Standard deviation over seeds, pooled over all cells with several, and its degrees of freedom."""
    repeated = [values for values in found.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in repeated)
    squares = sum((len(values) - 1) * variance(values) for values in repeated)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def least_difference(found: Accuracies, first: Cell, second: Cell) -> float:
    """What a difference of two cells must reach to be told: its 95 % interval by Student's t, or `TELLS` where there
    are too few seeds to know their spread."""
    deviation, freedom = seed_deviation(found)
    if freedom < min(STUDENT):
        return TELLS
    quantile = STUDENT[min(freedom, max(STUDENT))]
    return quantile * deviation * (1 / len(found[first]) + 1 / len(found[second])) ** 0.5


def reading(here: float, near: float, paper: float, least: float) -> str:
    """What a difference says of the paper's: the smaller of that of the last epoch and that near the end counts."""
    shown = min(here, near, key=abs) if here * near > 0 else 0.0
    if abs(shown) < least:
        return f"{SEEN}: no difference to speak of" if abs(paper) < TELLS else NOT_SEEN
    return SEEN if abs(paper) >= TELLS and shown * paper > 0 else CONTRARY


def comparison(runs: list[Run]) -> str:
    """Ours and the paper's accuracies, side by side, of runs that compare."""
    check_comparable(runs)
    found = accuracies(runs)
    extra = sorted({dilations for _, dilations in found} - {*TABLE3_DILATIONS.values()})
    columns = {**TABLE3_DILATIONS, **{f"dilations {', '.join(map(str, d))}": d for d in extra}}
    body = []
    for method in [*TABLE3, *sorted({m for m, _ in found} - {*TABLE3})]:
        if any((method, d) in found for d in columns.values()):
            body.append([f"{method}, here", *(several(found.get((method, d), [])) for d in columns.values())])
            if method in TABLE3:
                body.append([f"{method}, paper", *(f"{value:.2f}" for value in TABLE3[method]), *[""] * len(extra)])
    return table(["method", *columns], body)


def readings(runs: list[Run]) -> str:
    """The paper's conclusions held against runs that compare; empty where none can be."""
    found, (late, epochs) = accuracies(runs), late_accuracies(runs)
    body = []
    for claim, cells in CLAIMS.items():
        keys = [(method, TABLE3_DILATIONS[column]) for method, column in cells]
        if not all(key in found for key in keys):
            continue
        here, near = (mean(values[keys[0]]) - mean(values[keys[1]]) for values in (found, late))
        first, second = (TABLE3[method][list(TABLE3_DILATIONS).index(column)] for method, column in cells)
        least = least_difference(found, *keys)
        numbers = [f"{here:+.2f}", f"{near:+.2f}", f"{least:.2f}", f"{first - second:+.2f}"]
        names = ["SSA" if cell == ("LRF-SSA", "w/o LRF") else " ".join(cell) for cell in cells]
        body.append([claim, " minus ".join(names), *numbers, reading(here, near, first - second, least)])
    if not body:
        return ""
    near = f"epochs {epochs[0]} to {epochs[-1]}"
    return table(["conclusion", "difference", "here", near, "least that tells", "paper", "reading"], body)


def accuracy(runs: list[Run] | None = None) -> str:
    """For runs of each length and settings: the table, the paper's conclusions, and what is not as published."""
    parts = []
    runs = read_runs() if runs is None else runs
    for (length, settings), group in groups([run for run, _ in finished(runs)]).items():
        parts += [f"### {length} epochs{settings}", comparison(group), readings(group)]
        changed = [[f"`{key}`", f"`{there}`", f"`{here}`"] for key, there, here in changes(group[0])]
        if changed:
            parts += ["Not as published, in every row:", table(["setting", "published", "here"], changed)]
    return "\n\n".join(filter(None, parts)) or "No run is recorded yet."


def highest(runs: list[Run] | None = None) -> str:
    """The highest accuracy of a run here, and that of the paper's table."""
    ended = finished(read_runs() if runs is None else runs)
    if not ended:
        return "No run is recorded yet."
    run, summary = max(ended, key=lambda pair: pair[1]["top1"])
    top1, method, column = max(
        (top1, method, column)
        for method, row in TABLE3.items()
        for column, top1 in zip(TABLE3_DILATIONS, row, strict=True)
    )
    late, epochs = late_accuracies([run])
    where = f"{run.length} epochs{run.settings}, seed {run.seed}"
    body = [
        ["here", f"{summary['top1']:.2f}", f"{late[run.cell][0]:.2f} over {len(epochs)}", run.label, where],
        ["paper", f"{top1:.2f}", "", f"{method} {column}", "not stated"],
    ]
    return table(["", "top-1 %", "mean of the last tests", "attention", "schedule"], body)


def elsewhere() -> str:
    """The accuracy of the same weights on other machines and in other precisions."""
    ended = [(run, summary) for run, summary in finished(read_runs()) if run.evaluations]
    columns = sorted({(e["device"], e["precision"]) for run, _ in ended for e in run.evaluations})
    body = []
    for run, summary in ended:
        found = {(e["device"], e["precision"]): f"{e['top1']:.2f}" for e in run.evaluations}
        own = f"{summary['top1']:.2f} ({summary['device']}, {summary['precision']})"
        body.append([run.name, own, *(found.get(column, "") for column in columns)])
    return table(["run", "after training", *(f"{device}, {precision}" for device, precision in columns)], body)


def every_run(runs: list[Run] | None = None) -> str:
    body = []
    for run in read_runs() if runs is None else runs:
        files = [f"[{file}](../results/cifar100/{run.name}/{file}.{ending})" for file, ending in FILES.items()]
        cells = [run.name, run.title, ", ".join(map(str, run.dilations)), f"{run.length}{run.settings}", str(run.seed)]
        if run.summary is None:
            last = run.epochs[-1]["epoch"] if run.epochs else 0
            body.append([*cells, f"stopped at {last}", "", "", "", "", "", ", ".join(files[1:])])
            continue
        s = run.summary
        numbers = [f"{s['top1']:.2f}", f"{max(run.tests.values()):.2f}", f"{s['parameters']:,}"]
        numbers += [f"{s['images_per_s']:,.0f}", f"{s['wall_s']:,.0f}", s["device"] + (" *" if s.get("beside") else "")]
        body.append([*cells, *numbers, ", ".join(files)])
    header = [
        "run",
        "method",
        "dilations",
        "epochs",
        "seed",
        "top-1 %",
        "best test",
        "parameters",
        "images/s",
        "wall s",
    ]
    return table([*header, "device", "files"], body)


def time_to_accuracy(records: list[dict[str, Any]] | None = None) -> str:
    """Of each recipe, over its seeds: the accuracy after the last epoch, and how long it trained."""
    records = read("cifar100/time_to_accuracy.json") if records is None else records
    body = []
    same = itemgetter("recipe", "epochs", "device")
    for (recipe, epochs, device), lines in groupby(sorted(records, key=same), same):
        runs = list(lines)
        seeds, top1 = ", ".join(str(line["seed"]) for line in runs), several([line["top1"] for line in runs])
        seconds = mean(line["seconds"] for line in runs)
        body.append([f"`{recipe}`", seeds, top1, f"{seconds:,.1f}", str(epochs), device])
    header = ["recipe", "seeds", "top-1 %", "training s", "epochs", "device"]
    return table(header, body) if body else "Not measured yet."


FILES = {"summary": "json", "recipe": "yaml", "log": "jsonl", "curve": "svg"}


def draw_curves(runs: list[Run], path: Path) -> None:
    """Test accuracy and training loss of every run over its epochs, and the accuracy near the end enlarged: one row for
    the runs that compare, one colour for the seeds of a cell. The same runs give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "lrfdyn", "svg.fonttype": "none", "font.size": 9}):
        rows = groups(runs)
        size = (12, 3.8 * len(rows))
        figure, panels = pyplot.subplots(len(rows), 3, figsize=size, layout="constrained", squeeze=False)
        for (length, settings), (top1, end, loss) in zip(rows, panels, strict=True):
            ordered = sorted(rows[length, settings], key=lambda run: (run.label, run.seed))
            for number, (label, seeds) in enumerate(groupby(ordered, key=lambda run: run.label)):
                for i, run in enumerate(seeds):
                    style = {"color": f"C{number % 10}", "linewidth": 1.2}
                    late = {epoch: value for epoch, value in run.tests.items() if epoch > LATE * length}
                    top1.plot([*run.tests], [*run.tests.values()], label=None if i else label, **style)
                    end.plot([*late], [*late.values()], marker=".", markersize=3, **style)
                    loss.plot([r["epoch"] for r in run.epochs], [r["train_loss"] for r in run.epochs], **style)
            top1.set_title(f"{length} epochs{settings}", loc="left")
            top1.set(xlabel="epoch", ylabel="top-1 on the test images, %")
            top1.legend(loc="lower right", frameon=False, fontsize=8)
            end.set(xlabel="epoch", ylabel="the same near the end", xlim=(LATE * length, 1.005 * length))
            loss.set(xlabel="epoch", ylabel="training loss (smoothed and mixed targets)")
        for axes in panels.flat:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw() -> None:
    """The curves of all runs for the page, and those of each for its folder."""
    runs = read_runs()
    draw_curves(runs, ROOT / "docs" / "images" / "cifar100_curves.svg")
    for run in runs:
        draw_curves([run], FOLDER / run.name / "curve.svg")


PARTS = {
    "cifar100_accuracy": accuracy,
    "cifar100_highest": highest,
    "cifar100_elsewhere": elsewhere,
    "cifar100_runs": every_run,
    "cifar100_time": time_to_accuracy,
}
