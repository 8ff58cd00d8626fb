"""Parts of results.md, and its figures, from the runs in results/cifar100.

A run is a folder that `lrfdyn train --out results/cifar100/NAME` filled: `recipe.yaml`, `log.jsonl`, `summary.json`,
and what `lrfdyn evaluate --json` said of it later in `evaluate_*.json`. A run without a summary did not end; it is
listed and drawn, but not compared. Runs that differ in nothing but the seed are one cell: mean, deviation and number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import yaml

from docs.parts import RESULTS, ROOT, table
from lrfdyn.attention import attention_label, attention_options
from lrfdyn.errors import require
from lrfdyn.files import read_json_lines
from lrfdyn.paper import TABLE3, TABLE3_DILATIONS
from lrfdyn.training.config import ATTENTION_KEYS, LATER_KEYS
from lrfdyn.training.recipes import load_recipe

FOLDER = RESULTS / "cifar100"
# The models of the page, the paper's first, and of each the recipe with the settings that its runs are told apart by:
# those of its authors, for the teacher its own, and for the ViT those of Spikformer.
PUBLISHED = {
    "spikformer_4_384": "cifar100_spikformer", "qkformer_4_384": "cifar100_qkformer",
    "resnet18_cifar": "cifar100_resnet", "vit_4_384": "cifar100_vit",
}  # fmt: skip
MODEL, *OTHERS = PUBLISHED
LATE, END = 0.7, 0.8  # where the enlarged curves begin, and the tests whose mean stands beside the last
TELLS = 0.5  # percent: below it, one seed shows no difference
# 97.5 % quantiles by degrees of freedom; between two of them the larger quantile counts.
STUDENT = {
    3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 12: 2.18, 15: 2.13, 20: 2.09, 25: 2.06,
    30: 2.04,
}  # fmt: skip
SEEN, NOT_SEEN, CONTRARY = "as in the paper", "too small to tell", "**not as in the paper**"
SSA, QKV, BOTH = ("LRF-SSA", "w/o LRF"), "LRF-Dyn (qkv token)", "LRF-Dyn (two directions)"
# What is read from the table: the first cell minus the second, and its sign in the paper; 0: they do equally well,
# None: the paper does not ask.
CLAIMS: dict[str, tuple[tuple[str, str], tuple[str, str], int | None]] = {
    "LRF helps SSA": (("LRF-SSA", "Ω<=5"), SSA, 1),
    "LRF helps LRF-Dyn": (("LRF-Dyn", "Ω<=5"), ("LRF-Dyn", "w/o LRF"), 1),
    "LRF helps causal SSA": (("causal SSA", "Ω<=5"), ("causal SSA", "w/o LRF"), 1),
    "More kernels help LRF-SSA": (("LRF-SSA", "Ω<=5"), ("LRF-SSA", "Ω<=1"), 1),
    "More kernels help LRF-Dyn": (("LRF-Dyn", "Ω<=5"), ("LRF-Dyn", "Ω<=1"), 1),
    "More kernels help causal SSA": (("causal SSA", "Ω<=5"), ("causal SSA", "Ω<=1"), 1),
    "LRF-Dyn with LRF is better than SSA": (("LRF-Dyn", "Ω<=5"), SSA, 1),
    "LRF-Dyn does as well as LRF-SSA": (("LRF-Dyn", "Ω<=5"), ("LRF-SSA", "Ω<=5"), 0),
    "LRF-Dyn without LRF does as well as SSA": (("LRF-Dyn", "w/o LRF"), SSA, 0),
    "SSA loses by being causal": (("causal SSA", "w/o LRF"), SSA, -1),
    "LRF-Dyn is better than causal SSA": (("LRF-Dyn", "w/o LRF"), ("causal SSA", "w/o LRF"), 1),
    "Two directions against one": ((BOTH, "Ω<=5"), ("LRF-Dyn", "Ω<=5"), None),
    "The qkv token against the value": ((QKV, "Ω<=5"), ("LRF-Dyn", "Ω<=5"), None),
    "LRF with the qkv token": ((QKV, "Ω<=5"), (QKV, "w/o LRF"), None),
    "The qkv token without LRF against SSA": ((QKV, "w/o LRF"), SSA, None),
    "A norm on the stencils of LRF-SSA": (("LRF-SSA (norm)", "Ω<=5"), ("LRF-SSA", "Ω<=5"), None),
    "q and k as they were drawn": (("SSA (q, k frozen)", "w/o LRF"), SSA, None),
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
# What other networks of about this size are said to reach: which, top-1 in percent, and where that stands.
PUBLISHED_ELSEWHERE = (
    ("SGLFormer-4-384", "80.6", "rerun in the [STEP benchmark](https://arxiv.org/abs/2505.11151)"),
    ("SGLFormer-4-384", "82.26", "by [its authors](https://doi.org/10.3389/fnins.2024.1371290)"),
    ("QKFormer-4-384", "81.15", "by [its authors](https://arxiv.org/abs/2403.16552)"),
)
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
        own = {} if kind is None else attention_options(kind)
        return tuple(own.get("dilations", ()) if given is None else given)

    @property
    def title(self) -> str:
        model = self.recipe["model"]
        if model["attention"] is None:
            return "no attention"
        marks = [f" ({mark})" for (key, value), mark in MARKS.items() if model.get(key) == value]
        return "".join([attention_label(model["attention"]), *marks])

    @property
    def cell(self) -> Cell:
        """Its place in the table. SSA is LRF-SSA without LRF."""
        return "LRF-SSA" if self.title == "SSA" else self.title, self.dilations

    @property
    def seed(self) -> int:
        return self.recipe["run"]["seed"]

    @cached_property
    def settings(self) -> str:
        """What sets a run apart from those by the published settings of the same length, for headings and legends."""
        keys = {key for key, _, _ in changes(self)}
        mixed = self.recipe["schedule"]["mix_epochs"]
        until = f", mixed until epoch {mixed}" if "schedule.mix_epochs" in keys else ""
        stages = self.recipe["schedule"].get("stages") or ()
        until += ", with a teacher" if self.recipe.get("distill", {}).get("teacher") else ""
        until += "".join(f", {s['epochs']} with T = {s['time_steps']}" for s in stages if s["time_steps"] is not None)
        if not keys - {"schedule.mix_epochs"}:
            return until
        return (", strong augmentation" if "augmentation.cutmix" in keys else ", other settings") + until

    @property
    def sweep(self) -> str:
        """The folder of the sweep that it was kept of, in words; a sweep has tables of its own."""
        first, *rest = self.name.split("/")
        return f", sweep {first}" if rest else ""

    @property
    def label(self) -> str:
        """Its cell in words, for legends."""
        dilations = f"({', '.join(map(str, self.dilations))})" if self.dilations else "w/o LRF"
        return self.title if self.title in ("SSA", "VSA") else f"{self.title} {dilations}"

    @property
    def tests(self) -> dict[int, float]:
        """Top-1 by epoch, of the epochs that had a test."""
        return {record["epoch"]: record["top1"] for record in self.epochs if "top1" in record}


@cache
def read_runs(folder: Path = FOLDER, model: str = MODEL) -> list[Run]:
    """Those of a model, but for those that were tested on held-out training images."""
    runs = []
    for recipe in sorted(folder.glob("**/recipe.yaml")):
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        if values["data"].get("held_out") is not None or values["model"]["name"] != model:
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
    """Runs that compare, by their length, settings and sweep: those with all cells of the paper's table first, then the
    longest."""
    found: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.length, run.settings + run.sweep), []).append(run)
    return {key: found[key] for key in sorted(found, key=lambda key: (complete(found[key]), key), reverse=True)}


def complete(runs: list[Run]) -> bool:
    """Whether runs that compare have all cells of the paper's table."""
    return {(method, d) for method in TABLE3 for d in TABLE3_DILATIONS.values()} <= accuracies(runs).keys()


def flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """`section.key` of every setting that can decide a result. Those of later versions say nothing in older recipes."""
    decide = ("model", "augmentation", "optimizer", "schedule", "loss", "distill")
    found = {f"{section}.{key}": value for section in decide for key, value in recipe.get(section, {}).items()}
    kept = ("batch_size", "accumulate", "precision", "seed")
    found |= {f"run.{key}": recipe["run"][key] for key in kept if key in recipe["run"]}
    return dict.fromkeys(LATER_KEYS) | found


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings that two recipes both have with other values."""
    one, other = (json.loads(json.dumps(flat(recipe))) for recipe in (first, second))
    return [(key, one[key], other[key]) for key in one if key in other and one[key] != other[key]]


@cache
def published(length: int, model: str = MODEL) -> dict[str, Any]:
    recipe = load_recipe(PUBLISHED[model])
    return replace(recipe, schedule=recipe.schedule.within(length)).as_dict()


def changes(run: Run) -> list[tuple[str, Any, Any]]:
    """The settings of a run that are not the published ones: key, published value, value here."""
    sections = ("augmentation", "optimizer", "schedule", "loss", "distill", "run.batch_size")
    # A rate by knots has no warm-up and cool-down of its own; the heading says how long the run is.
    course = ("epochs", "warmup_epochs", "cooldown_epochs") if run.recipe["schedule"].get("rates") else ()
    unused = {f"schedule.{key}" for key in course}
    found = differences(published(run.length, run.recipe["model"]["name"]), run.recipe)
    return [change for change in found if change[0].startswith(sections) and change[0] not in unused]


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
    quantile = STUDENT[max(known for known in STUDENT if known <= freedom)]
    return quantile * deviation * (1 / len(found[first]) + 1 / len(found[second])) ** 0.5


def reading(here: float, near: float, least: float, expected: int | None) -> str:
    """What a difference says of the paper's, whose sign is `expected`: the smaller of that of the last epoch and that
    near the end counts."""
    shown = min(here, near, key=abs) if here * near > 0 else 0.0
    if abs(shown) < least:
        return f"{SEEN}: no difference to speak of" if expected == 0 and least <= TELLS else NOT_SEEN
    if expected is None:
        return "**better**" if shown > 0 else "**worse**"
    return SEEN if shown * expected > 0 else CONTRARY


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


def difference(claim: str) -> tuple[str, str]:
    """Of a conclusion: which cell minus which, and how much that is in the paper."""
    first, second, _ = CLAIMS[claim]
    names = ["SSA" if cell == SSA else " ".join(cell) for cell in (first, second)]
    values = [TABLE3[m][list(TABLE3_DILATIONS).index(c)] for m, c in (first, second) if m in TABLE3]
    return " minus ".join(names), f"{values[0] - values[1]:+.2f}" if len(values) == 2 else ""


def conclusions() -> str:
    """What is read from a table, and how often chance would be taken for an effect."""
    words = {1: "more", 0: "none", -1: "less", None: "not asked"}
    body = [[claim, *difference(claim), words[expected]] for claim, (_, _, expected) in CLAIMS.items()]
    count = len(CLAIMS)
    line = (
        f"These are {count} conclusions, and each is judged by itself. If no difference were real, up to one in "
        f"twenty would be told nevertheless: {count / 20:.2f} of {count} on average."
    )
    return f"{table(['conclusion', 'difference', 'paper', 'the paper expects'], body)}\n\n{line}"


def readings(runs: list[Run]) -> str:
    """The conclusions held against runs that compare; empty where none can be."""
    found, (late, epochs) = accuracies(runs), late_accuracies(runs)
    body = []
    for claim, (*cells, expected) in CLAIMS.items():
        keys = [(method, TABLE3_DILATIONS[column]) for method, column in cells]
        if not all(key in found for key in keys):
            continue
        here, near = (mean(values[keys[0]]) - mean(values[keys[1]]) for values in (found, late))
        least = least_difference(found, *keys)
        numbers = [f"{here:+.2f}", f"{near:+.2f}", f"{least:.2f}", difference(claim)[1]]
        body.append([claim, *numbers, reading(here, near, least, expected)])
    if not body:
        return ""
    near = f"epochs {epochs[0]} to {epochs[-1]}"
    return table(["conclusion", "here", near, "least that tells", "paper", "reading"], body)


def accuracy(runs: list[Run] | None = None) -> str:
    """For runs of each length and settings: the table, the paper's conclusions, and what is not as published."""
    parts = []
    runs = read_runs() if runs is None else runs
    for (length, settings), group in groups([run for run, _ in finished(runs)]).items():
        parts += [f"### {length} epochs{settings}", comparison(group), readings(group)]
        changed = [[f"`{key}`", f"`{there}`", f"`{brief(here)}`"] for key, there, here in changes(group[0])]
        if changed:
            parts += ["Not as published, in every row:", table(["setting", "published", "here"], changed)]
    return "\n\n".join(filter(None, parts)) or "No run is recorded yet."


def brief(value: Any) -> Any:
    """A setting without what it leaves open."""
    if isinstance(value, dict):
        return {key: brief(each) for key, each in value.items() if each is not None}
    return [brief(each) for each in value] if isinstance(value, list) else value


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
        *(["other networks", other, "", network, source] for network, other, source in PUBLISHED_ELSEWHERE),
    ]
    return table(["", "top-1 %", "mean of the last tests", "attention or network", "schedule or source"], body)


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
    """A row for the runs of a cell, in the order of the tables."""
    body = []
    for (length, settings), group in groups(read_runs() if runs is None else runs).items():
        ordered = sorted(group, key=lambda run: (run.title, run.dilations, run.seed))
        for (title, dilations), cell in groupby(ordered, key=lambda run: (run.title, run.dilations)):
            seeds = list(cell)
            summaries = [summary for _, summary in finished(seeds)]
            cells = [title, ", ".join(map(str, dilations)), f"{length}{settings}", "<br>".join(map(run_links, seeds))]
            for key in ("parameters", "images_per_s", "wall_s"):
                cells.append(f"{mean(s[key] for s in summaries):,.0f}" if summaries else "")
            devices = sorted({s["device"] + (" *" if s.get("beside") else "") for s in summaries})
            body.append([*cells, ", ".join(devices)])
    header = ["method", "dilations", "epochs", "runs", "parameters", "images/s", "wall s", "device"]
    return table(header, body)


def curves_of(model: str) -> str:
    """The file of a model's curves, among the images of the pages."""
    return "cifar100_curves.svg" if model == MODEL else f"cifar100_{model}_curves.svg"


def other_models(runs: dict[str, list[Run]] | None = None) -> str:
    """The runs of the other models, and their curves."""
    parts = []
    for model in OTHERS:
        own = read_runs(model=model) if runs is None else runs.get(model, [])
        shown = [every_run(own), f"![Curves of {model}](images/{curves_of(model)})"] if own else ["Not measured yet."]
        parts += [f"### `{model}`", *shown]
    return "\n\n".join(parts)


def run_links(run: Run) -> str:
    """The name and results of a run, with links to its files."""
    folder = f"../results/cifar100/{run.name}"
    name, log = f"[{run.name}]({folder}/recipe.yaml), seed {run.seed}", f"{folder}/log.jsonl"
    if run.summary is None:
        return f"{name}: [stopped at {run.epochs[-1]['epoch'] if run.epochs else 0}]({log})"
    best = max(run.tests.values())
    return f"{name}: [{run.summary['top1']:.2f}]({folder}/summary.json), best [{best:.2f}]({log})"


def mean_by_epoch(curves: list[dict[int, float]]) -> dict[int, float]:
    """At the epochs that all curves have."""
    return {epoch: mean(curve[epoch] for curve in curves) for epoch in sorted(set.intersection(*map(set, curves)))}


def draw_curves(runs: list[Run], path: Path) -> None:
    """Test accuracy and training loss over the epochs, and the accuracy near the end enlarged: one row for the runs
    that compare, one line for the mean over the seeds of a cell. The same runs give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "lrfdyn", "svg.fonttype": "none", "font.size": 9}):
        rows = groups(runs)
        pairs = matplotlib.colormaps["tab20"].colors  # ten colours, each full and pale
        colours = [*pairs[::2], *pairs[1::2]]
        size = (12, 3.8 * len(rows))
        figure, panels = pyplot.subplots(len(rows), 3, figsize=size, layout="constrained", squeeze=False)
        for (length, settings), (top1, end, loss) in zip(rows, panels, strict=True):
            ordered = sorted(rows[length, settings], key=lambda run: run.label)
            for number, (label, cell) in enumerate(groupby(ordered, key=lambda run: run.label)):
                seeds = list(cell)
                style = {"color": colours[number % len(colours)], "linewidth": 1.2}
                tests = mean_by_epoch([run.tests for run in seeds])
                late = {epoch: value for epoch, value in tests.items() if epoch > LATE * length}
                losses = mean_by_epoch([{r["epoch"]: r["train_loss"] for r in run.epochs} for run in seeds])
                top1.plot([*tests], [*tests.values()], label=label, **style)
                end.plot([*late], [*late.values()], marker=".", markersize=3, **style)
                loss.plot([*losses], [*losses.values()], **style)
            top1.set_title(f"{length} epochs{settings}", loc="left")
            top1.set(xlabel="epoch", ylabel="top-1 on the test images, %")
            labels = len({run.label for run in ordered})
            top1.legend(loc="lower right", frameon=False, fontsize=8 if labels <= 10 else 6, ncols=1 + labels // 11)
            end.set(xlabel="epoch", ylabel="the same near the end", xlim=(LATE * length, 1.005 * length))
            loss.set(xlabel="epoch", ylabel="training loss (smoothed and mixed targets)")
        for axes in panels.flat:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw() -> None:
    """The curves of all runs, for the page: a file for every model that has any."""
    for model in PUBLISHED:
        if runs := read_runs(model=model):
            draw_curves(runs, ROOT / "docs" / "images" / curves_of(model))


PARTS = {
    "cifar100_accuracy": accuracy,
    "cifar100_conclusions": conclusions,
    "cifar100_highest": highest,
    "cifar100_elsewhere": elsewhere,
    "cifar100_runs": every_run,
    "cifar100_other_models": other_models,
}
