"""Writes docs/results.md and its figure from the runs in results/cifar100, and a figure into the folder of each.

A run is a folder that `lrfdyn train --out results/cifar100/NAME` filled: summary.json, log.jsonl and recipe.yaml are
read (and are what is committed), and what `lrfdyn evaluate --json` said of it in evaluate_*.json. A run without a
summary did not end; it is listed and drawn, but not compared.

    python docs/make_results.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import table
from docs.results_claims import Accuracies, above_paper, readings, tokens
from lrfdyn.attention import attention_options
from lrfdyn.errors import require
from lrfdyn.paper import TABLE3, TABLE3_DILATIONS
from lrfdyn.training.config import differences as config_differences
from lrfdyn.training.logs import read_log
from lrfdyn.training.recipes import find_recipe, load_recipe

ROOT = Path(__file__).parent.parent
FIGURE = "images/cifar100_curves.svg"
NAMES = {"w/o LRF": "omega0", "Ω<=1": "omega1", "Ω<=3": "omega3", "Ω<=5": "omega5"}
LATE = 0.7  # where the second panel of the curves begins
END = 0.8  # where the tests begin whose mean stands beside the last
METHODS = {"LRF-SSA": "lrf_ssa", "LRF-Dyn": "lrf_dyn", "causal SSA": "causal_ssa"}

INTRODUCTION = """\
# Results

<!-- Made by docs/make_results.py from results/cifar100; `python docs/make_results.py` writes it anew. -->

CIFAR-100, Spikformer-4-384, 4 time steps: the ablation of the paper's Table 3. Accuracies are top-1 in percent on the
10,000 test images after the last epoch, never of the best one. Each run is one folder of `results/cifar100` with its
settings, log and summary, and one command repeats it:

    lrfdyn train RECIPE --data.root DIR --epochs N --run.seed S --out results/cifar100/NAME
"""

MIXED = """\
The published file says that mixing ends after 200 of 300 epochs, which these runs did in proportion. The published
program goes on mixing: `lrfdyn/recipes/cifar100_spikformer.yaml` says why, and does so since. With
`--schedule.mix_epochs 200` it trains as these runs did.
"""
NOT_YET = "No run by the published settings that mixes to its end is recorded yet.\n"
STRONG = """\
Not the paper's recipe: hold these rows against each other, and against the paper's only with the changes in mind.
"""
ELSEWHERE = """\
Runs are trained and tested in the precision that "after training" names. A spiking network is not continuous: where
rounding is another, spikes near the threshold flip, and some images change their class. On all test images, by
`lrfdyn evaluate RUN --run.device cpu --run.precision P`:
"""
EVERY_RUN = """\
Top-1 is that of the last epoch, the number that we report; "best" that of the best test on the way, for comparison with
programs that report it. Images/s is the mean over a run's training alone, "fastest epoch" the images/s of the fastest
one, where some had no test; wall time includes the tests.
"""


@dataclass(frozen=True)
class Run:
    name: str
    recipe: dict[str, Any]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any] | None  # None: it did not end
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of the same weights, later

    @property
    def schedule(self) -> int:
        """The epochs that it was to run."""
        return self.recipe["schedule"]["epochs"] + self.recipe["schedule"]["cooldown_epochs"]

    @property
    def dilations(self) -> tuple[int, ...]:
        given, kind = self.recipe["model"]["dilations"], self.recipe["model"]["attention"]
        return tuple(attention_options(kind).get("dilations", ()) if given is None else given)

    @property
    def method(self) -> str:
        """The row of the table. SSA is LRF-SSA without LRF."""
        kind = self.recipe["model"]["attention"]
        token = " (qkv token)" if self.recipe["model"]["token"] == "qkv" else ""
        rows = {"ssa": "LRF-SSA", "vsa": "VSA", **{kind: label for label, kind in METHODS.items()}}
        return rows.get(kind, kind) + token

    @property
    def strong(self) -> bool:
        """By a recipe of that name, and not by the published settings."""
        return "_strong" in self.name

    @property
    def settings(self) -> str:
        """What sets a run apart from those by the published settings of the same length, for headings and legends."""
        mixed = self.recipe["schedule"]["mix_epochs"]
        ended = "" if mixed is None or mixed >= self.schedule else f", mixed until epoch {mixed}"
        return (", strong augmentation" if self.strong else "") + ended

    @property
    def title(self) -> str:
        return "SSA" if self.recipe["model"]["attention"] == "ssa" else self.method

    @property
    def best(self) -> float:
        """Of all tests: what programs report that keep the best epoch."""
        return max(record["top1"] for record in self.epochs if "top1" in record)

    @property
    def fastest(self) -> str:
        """Images per second of the fastest epoch that had no test: for a run that had the GPU for itself some of the
        time, its speed then."""
        batch = self.recipe["run"]["batch_size"]
        speeds = [
            batch * (late["step"] - early["step"]) / (late["wall_s"] - early["wall_s"])
            for early, late in pairwise(self.epochs)
            if "top1" not in late
        ]
        return f"{max(speeds):,.0f}" if speeds else ""

    @property
    def label(self) -> str:
        """Its name among those of its length and settings."""
        stencils = "" if self.title in ("SSA", "VSA") else f" {self.dilations or 'w/o LRF'}"
        return f"{self.title}{stencils}, seed {self.recipe['run']['seed']}"


def groups(runs: list[Run]) -> dict[tuple[int, str], list[Run]]:
    """Runs that compare, by their length and settings, the longest first."""
    keys = sorted({(run.schedule, run.settings) for run in runs}, reverse=True)
    return {key: [run for run in runs if (run.schedule, run.settings) == key] for key in keys}


def read_runs(folder: Path) -> list[Run]:
    runs = []
    for recipe in sorted(folder.glob("*/recipe.yaml")):
        path = recipe.with_name("summary.json")
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        epochs = [record for record in read_log(recipe.with_name("log.jsonl")) if record["kind"] == "epoch"]
        later = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(recipe.parent.glob("evaluate_*.json"))]
        runs.append(Run(recipe.parent.name, yaml.safe_load(recipe.read_text(encoding="utf-8")), epochs, summary, later))
    return runs


def spread(values: list[float]) -> str:
    """The mean, and half of the range where there are several seeds."""
    if not values:
        return "not run"
    several = f" ± {(max(values) - min(values)) / 2:.2f} ({len(values)} seeds)" if len(values) > 1 else ""
    return f"{mean(values):.2f}{several}"


def check_comparable(runs: list[Run]) -> None:
    """Runs of one length may differ in what the table shows and in the seed: a mean over anything else would pass for
    one over seeds, and a column for the effect of its dilations."""
    shown = {"model.attention", "model.dilations", "model.token", "model.dendrites"}
    first, *others = runs
    for other in others:
        for difference in config_differences(other.recipe, first.recipe):
            key = difference.partition(":")[0]
            require(key in shown | {"run.seed"}, f"runs: {other.name} and {first.name} do not compare: {difference}")
    seen: dict[tuple[Any, ...], str] = {}
    for run in runs:
        cell = (run.method, run.dilations, run.recipe["run"]["seed"])
        require(cell not in seen, f"runs: {run.name} and {seen.get(cell)} are both {run.label}")
        seen[cell] = run.name


def accuracies(runs: list[Run]) -> Accuracies:
    """Of finished runs, by the cells of the table: one value per seed."""
    found: Accuracies = {}
    for run in runs:
        assert run.summary is not None
        found.setdefault((run.method, run.dilations), []).append(run.summary["top1"])
    return found


def late_accuracies(runs: list[Run]) -> tuple[Accuracies, list[int]]:
    """Of finished runs of one length: the mean over the tests near the end, at the epochs that all of them tested. The
    last test is one draw from what these show."""
    tested = [{r["epoch"]: r["top1"] for r in run.epochs if "top1" in r} for run in runs]
    epochs = sorted(e for e in set.intersection(*map(set, tested)) if e > END * runs[0].schedule)
    found: Accuracies = {}
    for run, top1 in zip(runs, tested, strict=True):
        found.setdefault((run.method, run.dilations), []).append(mean(top1[e] for e in epochs))
    return found, epochs


def comparison(runs: list[Run]) -> str:
    """Of runs with the same number of epochs: ours and the paper's, side by side."""
    check_comparable(runs)
    found = accuracies(runs)
    extra = sorted({dilations for _, dilations in found} - {*TABLE3_DILATIONS.values()})
    columns = {**TABLE3_DILATIONS, **{f"dilations {', '.join(map(str, d))}": d for d in extra}}
    body = []
    for method in [*TABLE3, *sorted({m for m, _ in found} - {*TABLE3})]:
        body.append([f"{method}, here", *(spread(found.get((method, d), [])) for d in columns.values())])
        if method in TABLE3:
            body.append([f"{method}, paper", *(f"{value:.2f}" for value in TABLE3[method]), *[""] * len(extra)])
    return table(["method", *columns], body)


def missing(runs: list[Run]) -> list[str]:
    """The recipes of the table that no run has finished; `ssa` is the first column of LRF-SSA."""
    done = {(run.method, run.dilations) for run in runs if run.summary is not None}
    absent = [
        f"cifar100_spikformer_4_384_{kind}_{NAMES[column]}"
        for method, kind in METHODS.items()
        for column, dilations in TABLE3_DILATIONS.items()
        if (method, dilations) not in done
    ]
    if not any("qkv" in method for method, _ in done):
        absent.append("cifar100_spikformer_4_384_lrf_dyn_qkv")
    return absent


def changes(run: Run) -> list[str]:
    """The settings of a run that are not the published ones."""
    published = load_recipe(find_recipe("cifar100_spikformer_4_384_ssa"))
    published = replace(published, schedule=published.schedule.within(run.schedule))
    sections = ("augmentation", "optimizer", "schedule")
    found = config_differences(run.recipe, published.as_dict())
    return [f"- {line.replace(' there', ' published')}" for line in found if line.startswith(sections)]


def differences(runs: list[Run]) -> list[str]:
    """What must be known before a number here is held against one of the paper."""
    official = 310
    lengths = sorted({run.schedule for run in runs})
    seeds = sorted({run.recipe["run"]["seed"] for run in runs})
    batches = sorted({run.recipe["run"]["batch_size"] for run in runs})
    lines = [
        f"Epochs: {' and '.join(map(str, lengths))} here, with every part of the schedule in proportion. The recipe "
        f"that it shortens has {official} (300 and a cool-down of 10). The paper does not state its own.",
        f"Seeds: {len(seeds)} here ({', '.join(map(str, seeds))}); the paper gives one number per cell and no spread."
        + rounding(runs),
        "Epoch: the last one here. Spikformer's own program reports the best of all epochs on the test images, and its "
        "successors' logs show the same; which one the paper took is not stated.",
        "Settings: but for what the sections above list, those of Spikformer's published CIFAR-10 file with batch"
        f" {' and '.join(map(str, batches))}, in "
        f"{' and '.join(sorted({r.recipe['run']['precision'] for r in runs}))}; the first lines of "
        "`lrfdyn/recipes/cifar100_spikformer.yaml` list every point in which ours differ. Those of the paper for this "
        "table are not published.",
        "LRF-Dyn takes the value as its token unless the row says otherwise, so it has fewer parameters than SSA; the "
        "paper's counts fit a form that keeps queries and keys.",
        "In causal SSA the sum over tokens is causal and the stencils are not: they see the rows below, as they do in "
        "the other two. The paper does not say which form its row has.",
    ]
    return [f"- {line}" for line in lines]


def rounding(runs: list[Run]) -> str:
    """How far the same weights are from themselves, where that was measured."""
    moved = [abs(e["top1"] - run.summary["top1"]) for run in runs if run.summary for e in run.evaluations]
    return f" Rounding alone moves an accuracy by up to {max(moved):.2f} (below)." if moved else ""


def highest(finished: list[Run]) -> str:
    """The highest accuracy here and that of the paper's table."""
    ours = max(finished, key=lambda run: run.summary["top1"] if run.summary else 0.0)
    assert ours.summary is not None
    top1, method, column = max(
        (top1, method, c) for method in TABLE3 for c, top1 in zip(TABLE3_DILATIONS, TABLE3[method], strict=True)
    )
    where = f"{ours.label}, after {ours.schedule} epochs{ours.settings}"
    late, epochs = late_accuracies([ours])
    [[late_top1]] = late.values()
    average = f" ({late_top1:.2f} on average over its last {len(epochs)} tests)" if len(epochs) > 1 else ""
    text = f"The highest here: {ours.summary['top1']:.2f}{average}, {where}. "
    text += f"In the paper: {top1:.2f}, {method} {column}."
    later = ", ".join(f"{e['top1']:.2f} ({e['device']}, {e['precision']})" for e in ours.evaluations)
    return fill(text + (f" The same weights elsewhere: {later}." if later else ""), 120) + "\n"


def precisions(finished: list[Run]) -> str:
    """The accuracy of the same weights on other machines and in other precisions."""
    runs = [run for run in finished if run.evaluations]
    columns = sorted({(e["device"], e["precision"]) for run in runs for e in run.evaluations})
    body = []
    for run in runs:
        assert run.summary is not None
        found = {(e["device"], e["precision"]): f"{e['top1']:.2f}" for e in run.evaluations}
        own = f"{run.summary['top1']:.2f} ({run.summary['device']}, {run.summary['precision']})"
        body.append([run.name, own, *(found.get(column, "") for column in columns)])
    return table(["run", "after training", *(f"{device}, {precision}" for device, precision in columns)], body)


def every_run(runs: list[Run]) -> str:
    body = []
    for run in runs:
        folder = f"../results/cifar100/{run.name}"
        where = [f"[{run.name}]({folder}) ([curve]({folder}/curve.svg))", run.title, str(list(run.dilations))]
        seed = str(run.recipe["run"]["seed"])
        if run.summary is None:
            last = run.epochs[-1]["epoch"] if run.epochs else 0
            reached = f"{run.epochs[-1]['top1']:.2f} then" if run.epochs and "top1" in run.epochs[-1] else ""
            body.append([*where, f"stopped at {last} of {run.schedule}", seed, reached, "", "", "", "", "", ""])
            continue
        s = run.summary
        numbers = [f"{s['top1']:.2f}", f"{run.best:.2f}", f"{s['parameters']:,}"]
        numbers += [f"{s['images_per_s']:,.0f}", run.fastest, f"{s['wall_s']:,.0f}"]
        body.append([*where, str(run.schedule), seed, *numbers, s["device"] + (", shared" if s.get("beside") else "")])
    header = ["run", "method", "dilations", "epochs", "seed", "top-1", "best", "parameters"]
    return table([*header, "images/s", "fastest epoch", "wall s", "device"], body)


def render(runs: list[Run]) -> str:
    if not runs:
        absent = "\n".join(f"- `{name}`" for name in missing(runs))
        return f"{INTRODUCTION}\nNo run is recorded yet. The recipes of the table:\n\n{absent}\n"
    finished = [run for run in runs if run.summary is not None]
    parts = [INTRODUCTION, *([highest(finished)] if finished else [])]
    for (length, settings), group in groups(finished).items():
        parts.append(f"## Accuracy after {length} epochs{settings}\n")
        found = accuracies(group)
        parts += [comparison(group), *tokens(found), *readings(found, *late_accuracies(group))]
        if group[0].strong:
            parts += [STRONG, *above_paper(found)]
        if settings:
            parts += ["What is not as published, for every row:\n", *changes(group[0]), ""]
        if "mixed until" in settings:
            parts.append(MIXED)
            if all("mixed until" in run.settings or run.strong for run in finished):
                parts.append(NOT_YET)
    parts += ["## What is different from the paper\n", *differences(runs), ""]
    absent = missing(runs)
    if absent:
        parts += ["## Not run yet\n", *(f"- `{name}`" for name in absent), ""]
    if any(run.evaluations for run in finished):
        parts += ["## The same weights elsewhere\n", ELSEWHERE, precisions(finished)]
    parts += ["## Convergence\n", f"![Test accuracy over the epochs of every run]({FIGURE})\n"]
    parts += ["## Every run\n", EVERY_RUN]
    parts.append(every_run(runs))
    shared = [f"- {run.name} beside {run.summary['beside']}" for run in finished if run.summary.get("beside")]
    if shared:
        parts += ["Runs that shared the GPU, whose speed is that of their share:\n", *shared, ""]
    return "\n".join(parts)


def draw(runs: list[Run], path: Path) -> None:
    """Test accuracy and training loss of every run over its epochs, and the accuracy near the end enlarged: one row for
    the runs that compare, which have their length and settings in common."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same runs give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "lrfdyn", "svg.fonttype": "none", "font.size": 9}):
        rows = groups(runs)
        figure, panels = pyplot.subplots(
            len(rows), 3, figsize=(12, 3.8 * len(rows)), layout="constrained", squeeze=False
        )
        for (length, settings), (accuracy, end, loss) in zip(rows, panels, strict=True):
            for run in rows[length, settings]:
                tested = [r for r in run.epochs if "top1" in r]
                late = [r for r in tested if r["epoch"] > LATE * length]
                accuracy.plot([r["epoch"] for r in tested], [r["top1"] for r in tested], label=run.label, linewidth=1.2)
                end.plot([r["epoch"] for r in late], [r["top1"] for r in late], linewidth=1.2, marker=".", markersize=3)
                loss.plot([r["epoch"] for r in run.epochs], [r["train_loss"] for r in run.epochs], linewidth=1.2)
            accuracy.set_title(f"{length} epochs{settings}", loc="left")
            accuracy.set(xlabel="epoch", ylabel="top-1 on the test images, %")
            accuracy.legend(loc="lower right", frameon=False, fontsize=8)
            end.set(xlabel="epoch", ylabel="the same near the end", xlim=(LATE * length, 1.005 * length))
            loss.set(xlabel="epoch", ylabel="training loss (smoothed and mixed targets)")
        for axes in panels.flat:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main(folder: Path = ROOT / "results" / "cifar100", docs: Path = ROOT / "docs") -> None:
    runs = read_runs(folder)
    (docs / "results.md").write_text(render(runs), encoding="utf-8")
    if runs:
        draw(runs, docs / FIGURE)
    for run in runs:
        draw([run], folder / run.name / "curve.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
