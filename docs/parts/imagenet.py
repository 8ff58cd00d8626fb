"""Parts of imagenet.md, by the model of imagenet_costs.py."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from docs.parts import RESULTS, read, table
from docs.parts.data import core_rate
from docs.parts.imagenet_costs import (
    ASSUMED,
    GPUS,
    RELATIVES,
    Record,
    count_of,
    counted,
    measured,
    own_record,
    parts_needed,
    peak_bytes,
    scaled,
    side_by_side,
    speeds,
    stand_ins,
    together,
)
from lrfdyn.attention.registry import attention_label
from lrfdyn.training.recipes import load_recipe

ALONE, PLAIN = "memory_h200", "train_step_cifar_reference"
WHOLE = "cifar100/ssa_strong_300"


def span(low: float, high: float) -> str:
    """Two numbers, or one where they do not differ as shown."""
    form = "{:,.0f}" if high >= 10 else "{:,.1f}"
    first, last = form.format(low), form.format(high)
    return first if first == last else f"{first} to {last}"


def cost_cells(runs: Iterable[Record]) -> list[str]:
    runs, cells = list(runs), []
    for gpus in GPUS:
        low, high = together(runs, gpus)
        cells += [span(low, high), span(*(gpus * ASSUMED.dollars * hour for hour in (low, high)))]
    return cells


def plan() -> str:
    """Hours and dollars of every size of a host, all its attentions together."""
    models = list(dict.fromkeys(run["model"] for run in counted()))
    body = []
    for model in models:
        runs = [run for run in counted() if run["model"] == model]
        how = "measured" if all(map(own_record, runs)) else "estimated"
        body.append([f"`{model}`", str(len(runs)), how, *cost_cells(runs)])
    body.append(["all, one after the other", str(len(counted())), "", *cost_cells(counted())])
    header = [
        "model",
        "trainings",
        "speed",
        *(f"{n} GPU{'s' * (n > 1)}, {what}" for n in GPUS for what in ("h", "USD")),
    ]
    low, high = side_by_side(GPUS[-1] // ASSUMED.node)
    dollars = span(*(GPUS[-1] * ASSUMED.dollars * hour for hour in (low, high)))
    nodes = f"All, {GPUS[-1] // ASSUMED.node} rows at a time on {ASSUMED.node} GPUs each: {span(low, high)} h"
    nodes += f", {dollars} USD for all {GPUS[-1]} GPUs until the last one ends."
    return f"{table(header, body, numbers=True)}\n\n{nodes}"


def speed_table() -> str:
    body = []
    for run in counted():
        record, (low, high) = own_record(run), speeds(run)
        others = " or ".join(f"`{n['model']}`" for _, n in stand_ins(run))
        source = f"measured, batch {record['batch']}" if record else f"estimated from {others}"
        kind = "–" if run["attention"] is None else attention_label(run["attention"])
        sizes = [f"{run['forward_flop'] / 1e9:,.1f}", f"{run['kept_bytes'] / 2**20:,.0f}"]
        what = [str(run["epochs"]), str(run["batch_size"]), str(run["norms"])]
        cells = [kind, str(run["time_steps"]), span(low, high), source, *sizes, f"{run['parameters'] / 1e6:.1f}", *what]
        body.append([f"`{run['model']}`", *cells])
    header = ["model", "attention", "T", "images/s", "how", "GFLOP", "MiB kept", "million parameters", "epochs"]
    return table([*header, "batch", "norms"], body)


def trial() -> str:
    """The estimate of each measured model from the others, next to what it is."""
    body = []
    known = sorted({model for model, _ in measured()} - set(RELATIVES))
    for model in known:
        speed, run = measured()[model, "ssa"]["images_per_s"], count_of(model, "ssa")
        for other in known:
            if other != model:
                body.append([f"`{model}`", f"{speed:,.0f}", f"`{other}`", span(*scaled(run, [other]))])
    return table(["model", "measured images/s", "estimated from", "images/s"], body)


def memory() -> str:
    """Images and memory of one GPU, for the attention of a model that takes most."""
    body, largest = [], {(run["model"], run["time_steps"]): run for run in sorted(counted(), key=peak_bytes)}
    for model, time_steps in dict.fromkeys((run["model"], run["time_steps"]) for run in counted()):
        run, cells = largest[model, time_steps], []
        for gpus in GPUS:
            images, needed = run["batch_size"] // gpus, parts_needed(run, gpus)
            cells.append(f"{images}: {images / needed * peak_bytes(run) / 1e9:.1f} GB")
            cells[-1] += f" with `run.accumulate` {needed}" if needed > 1 else ""
        body.append([f"`{model}`", str(time_steps), *cells])
    return table(["model", "T", *(f"{n} GPU{'s' * (n > 1)}" for n in GPUS)], body)


def packed_bytes() -> float:
    """Of one image of short side 256, with its place in the tar file."""
    found = read("performance/pack_ade20k_256.json")
    return sum(s["bytes"] for s in found["shards"]) / sum(s["images"] for s in found["shards"])


def storage() -> str:
    first, each = counted()[0], packed_bytes()
    images = first["train_images"] + first["test_images"]
    largest = max(counted(), key=lambda run: 4 * run["parameters"] + run["optimizer_bytes"])
    checkpoint = 4 * largest["parameters"] + largest["optimizer_bytes"]
    rows = [
        ("ImageNet-1k as it comes, JPEG", f"{sum(ASSUMED.jpeg_bytes) / 1e9:,.0f} GB", "public fact, not counted here"),
        (
            "packed with `--short-side 256`",
            f"{images * each / 1e9:,.0f} GB",
            f"estimate: {images:,} images x {each / 1e3:.1f} kB, the mean of 400 photographs of ADE20K",
        ),
        (
            "two checkpoints of a run, at most",
            f"{2 * checkpoint / 1e9:.1f} GB",
            f"`{largest['model']}`: weights and moments in float32",
        ),
        (
            f"the same of all {len(counted())} trainings",
            f"{sum(2 * (4 * run['parameters'] + run['optimizer_bytes']) for run in counted()) / 1e9:.0f} GB",
            "counted; delete them when a run has its `summary.json`",
        ),
    ]
    return table(["what", "size", "from"], rows)


def decoding() -> str:
    """Images that must be decoded in a second so that no GPU waits, and the cores that do it."""
    body, rate = [], core_rate()
    for model in dict.fromkeys(run["model"] for run in counted()):
        fastest = max((run for run in counted() if run["model"] == model), key=lambda run: speeds(run)[1])
        speed = speeds(fastest)[1]
        node = ASSUMED.node * speed
        cells = [speed, speed / ASSUMED.workers, node]
        cores = ["–"] * 2 if rate is None else [str(ceil(wanted / rate)) for wanted in (speed, node)]
        body.append([f"`{model}`", *(f"{n:,.0f}" for n in cells), f"{node * packed_bytes() / 1e9:.2f}", *cores])
    header = ["model", "images/s of one GPU", f"of each of {ASSUMED.workers} processes", f"of {ASSUMED.node} GPUs"]
    header += ["GB/s of packed files", "decode cores of one GPU", f"of {ASSUMED.node} GPUs"]
    return table(header, body, numbers=True)


def launches() -> str:
    """What is known of steps that are not captured, of plain operations and of whole runs."""
    found = [r for r in read(f"performance/{ALONE}.json") if (r["implementation"], r["batch"]) == ("eager", 1)]
    alone = next(r for r in found if r["attention"] == "ssa")
    ours = measured()[alone["model"], "ssa"]
    cifar = [r for r in read(f"performance/{PLAIN}.json") if r["attention"] == "ssa"]
    plain = {r["implementation"]: r["images_per_s"] for r in cifar}
    whole, batch = read(f"{WHOLE}/summary.json"), load_recipe(RESULTS / WHOLE / "recipe.yaml").run.batch_size
    files = {name: f"[{name}.json](../results/performance/{name}.json)" for name in (ALONE, PLAIN)}
    return (
        f"- A forward pass of `{alone['model']}` for one image, by plain operations that are launched one by one,\n"
        f"  took {alone['latency_ms']:.1f} ms on an H200 ({files[ALONE]}). The whole\n"
        f"  captured training step of {ours['batch']} images takes {ours['ms']:.1f} ms.\n"
        f"- With plain operations only, not captured, `{cifar[0]['model']}` trains\n"
        f"  {plain['lrfdyn'] / plain['reference']:.1f} times slower than with the kernels and captured\n"
        f"  ({files[PLAIN]}).\n"
        f"- A whole run of it on one GPU, with augmentation, did {whole['images_per_s']:,.0f} images/s\n"
        f"  with batch {batch} ([summary.json](../results/{WHOLE}/summary.json)); its step alone does\n"
        f"  {plain['lrfdyn']:,.0f} with batch {cifar[0]['batch']}."
    )


def command(run: Record) -> str:
    """The arguments of the function `run` of the page."""
    words = [run["recipe"], "--model", run["model"]]
    name = run["model"]
    if (run["model"], "lrf_dyn") in {(r["model"], r["attention"]) for r in counted()}:
        words += ["--attention", run["attention"]]
        name += f"-{run['attention']}"
    folder = f"/shared/runs/{name}"
    if run is not count_of(run["model"], run["attention"]):  # fine-tuning, with more time steps
        words += ["--epochs", str(run["epochs"]), "--model.time_steps", str(run["time_steps"])]
        words += ["--model.weights", f"{folder}/model/model.safetensors", "--optimizer.learning_rate", "2e-5"]
        folder += f"-T{run['time_steps']}"
    needed = parts_needed(run, ASSUMED.node)
    words += ["--run.accumulate", str(needed)] if needed > 1 else []
    return " ".join(["run", *words, "--out", folder])


def commands() -> str:
    return "\n".join(["```bash", *map(command, counted()), "```"])


def assumptions() -> str:
    rows = [
        ("price", "`dollars`", f"{ASSUMED.dollars:.2f} USD for one GPU and hour: an example, not an offer"),
        ("inside a node", "`node`, `nvlink`", f"{ASSUMED.node} GPUs, {ASSUMED.nvlink / 1e9:.0f} GB/s each way"),
        ("between nodes", "`network`", f"{ASSUMED.network / 1e9:.0f} GB/s ({8 * ASSUMED.network / 1e9:.0f} Gbit/s)"),
        (
            "a small message to all",
            "`latency_node`, `latency_nodes`",
            f"{1e6 * ASSUMED.latency_node:.0f} µs in a node, {1e6 * ASSUMED.latency_nodes:.0f} µs over nodes",
        ),
        ("backward pass", "`backward`", f"{ASSUMED.backward:.0f} times the forward pass"),
        ("memory of a GPU", "`gpu_bytes`, `usable`", f"{ASSUMED.gpu_bytes / 1e9:.0f} GB, {ASSUMED.usable:.0%} of it"),
    ]
    return table(["assumption", "name", "value"], rows)


PARTS = {
    "imagenet_plan": plan,
    "imagenet_speed": speed_table,
    "imagenet_trial": trial,
    "imagenet_memory": memory,
    "imagenet_storage": storage,
    "imagenet_decoding": decoding,
    "imagenet_launches": launches,
    "imagenet_commands": commands,
    "imagenet_assumptions": assumptions,
}
