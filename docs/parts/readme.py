"""Parts of README.md: the digits of `make demo`, CIFAR-100, and speed and memory in short."""

from __future__ import annotations

from statistics import mean

from docs.parts import kib, performance, read, table
from docs.parts.results import (
    Run,
    accuracies,
    check_comparable,
    comparison,
    complete,
    finished,
    groups,
    read_runs,
    several,
)
from lrfdyn.attention import attention_label


def digits() -> str:
    results = read("digits/results.json")
    body = [
        [
            row["label"],
            f"{row['accuracy_mean']:.1%} ± {row['accuracy_spread']:.1%}",
            f"{row['parameters']:,}",
            kib(row["state_bytes"]),
            kib(row["peak_inference_bytes"], 0),
            f"{row['firing_rate']:.1%}",
            f"{row['energy']['energy_pj'] / 1e6:.2f} µJ",
        ]
        for row in results["attentions"].values()
    ]
    header = ["attention", "test accuracy", "parameters", "state, derived", "peak memory, measured", "firing rate"]
    machine = results["machine"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    source = "[results/digits/results.json](results/digits/results.json)"
    return f"{table([*header, 'energy'], body)}\n\n{machine['cpu']}, {threads}, torch {machine['torch']}. {source}"


def cifar100(runs: list[Run] | None = None) -> str:
    """One table for each schedule that is shown: those that have all cells of the paper's table, and the one with the
    highest accuracy."""
    ended = [run for run, _ in finished(read_runs() if runs is None else runs)]
    tables = groups(ended)
    best = max(tables, key=lambda key: max(map(mean, accuracies(tables[key]).values())), default=None)
    parts = []
    for key, group in tables.items():
        if complete(group) or key == best:
            length, settings = key
            parts += [f"{length} epochs{settings}:", comparison(group) if complete(group) else cells(group)]
    return "\n\n".join(parts) or "No run is recorded yet."


def cells(group: list[Run]) -> str:
    """A row for every cell of runs that compare, the best first."""
    check_comparable(group)
    counts = {run.cell: (run, summary["parameters"]) for run, summary in finished(group)}
    body = []
    for cell, values in sorted(accuracies(group).items(), key=lambda item: -mean(item[1])):
        run, parameters = counts[cell]
        dilations = "" if run.title in ("SSA", "VSA") else ", ".join(map(str, run.dilations)) or "none"
        body.append([run.title, dilations, several(values), f"{parameters:,}"])
    return table(["attention", "dilations", "test accuracy %", "parameters"], body)


def speed() -> str:
    """Training of Spikformer-4-384 and low-memory inference of Spikformer-8-512, ours and SpikingJelly's."""
    training = [*performance.load("train_step_cifar"), *performance.load("train_step_cifar_ours")]
    memory = [r for r in performance.load("memory_h200") if r["batch"] == 64]

    def row(kind: str, ours: bool) -> list[str]:
        implementation = ("lrfdyn", "low-memory") if ours else ("spikingjelly-compiled", "spikingjelly")
        found = [
            next(r for r in rows if (r["attention"], r["implementation"]) == (kind, name))
            for rows, name in zip((training, memory), implementation, strict=True)
        ]
        cells = [f"{found[0]['images_per_s']:,.0f}", f"{found[0]['peak_mib']:,.0f}"]
        cells += [f"{found[1]['latency_ms']:,.0f}", f"{found[1]['peak_mib']:,.0f}"]
        return [f"{attention_label(kind)}, {'here' if ours else 'SpikingJelly'}", *cells]

    header = ["attention", "training, images/s", "training, MiB", "inference of 64, ms", "inference, MiB"]
    return table(header, [row("ssa", False), row("ssa", True), row("lrf_dyn", True)], numbers=True)


PARTS = {"readme_digits": digits, "readme_cifar100": cifar100, "readme_speed": speed}
