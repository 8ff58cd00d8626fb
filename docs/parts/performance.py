"""Parts of performance.md, from results/performance."""

from __future__ import annotations

from typing import Any

from docs.parts import ROOT, listing, read, table

Records = list[dict[str, Any]]
# What the page reads, but for the comparison of two versions, which names both.
FILES = (
    "train_step_cifar", "train_step_cifar_ours", "train_step_cifar_peers", "train_step_cifar_reference",
    "train_step_224", "train_step_224_ours", "train_step_compiled", "tricks", "inference_cifar", "kernels",
    "tokens_h200",
)  # fmt: skip


def load(name: str) -> Records:
    return read(f"performance/{name}.json")


def speed(*names: str) -> str:
    """Images per second and peak memory of the records of one or several files."""
    columns = {key: f"{{{key}}}" for key in ("model", "attention", "implementation", "batch")}
    columns |= {"images/s": "{images_per_s:,.0f}", "peak MiB": "{peak_mib:,.0f}"}
    return listing([record for name in names for record in load(name)], columns)


TRAINING = ("train_step_cifar", "train_step_cifar_ours")  # of the first table


def machine() -> str:
    first = load("train_step_cifar")[0]
    versions = first["versions"]
    names = {"torch": "torch", "triton": "triton", "spikingjelly": "SpikingJelly"}
    return table(["GPU", *names.values()], [[first["machine"]["gpu"], *(versions[name] for name in names)]])


def revisions(loaded: dict[str, Records] | None = None) -> dict[str, set[str | None]]:
    """The revisions of the records of each file that is there; None where a record has none."""
    loaded = {name: load(name) for name in FILES} if loaded is None else loaded
    return {name: {record.get("revision") for record in records} for name, records in loaded.items() if records}


def revision(loaded: dict[str, Records] | None = None) -> str:
    """The revision of all tables, or that they have several and which."""
    found = revisions(loaded)
    known = set().union(*found.values())
    if known == {None}:
        return "The revisions of these tables were not recorded. There were several: compare within a table only."
    if len(known) == 1:
        return f"All tables but those of two versions are of one revision, `{known.pop()}`."
    body = [
        [f"`{name}.json`", ", ".join(sorted(f"`{each[:12]}`" if each else "not recorded" for each in several))]
        for name, several in found.items()
    ]
    line = "The tables are of several revisions: compare within a table only."
    return f"{line}\n\n{table(['records', 'revision'], body)}"


def earlier(loaded: dict[str, Records] | None = None) -> str:
    """What holds for tables whose revision was not recorded."""
    old = [name for name, several in revisions(loaded).items() if None in several and name not in TRAINING]
    if not old:
        return ""
    return (
        f"Of earlier revisions are {', '.join(f'`{name}.json`' for name in old)}.\n"
        "The peaks of their training steps include the first ones, in which the library tries its convolution "
        "algorithms,\nand their models did not yet let early feature maps go."
    )


def not_measured(name: str) -> str:
    return f"Not measured yet (`results/performance/{name}.json`)."


def tricks() -> str:
    """A training step without each trick (benchmarks/tricks.py)."""
    columns = {key: f"{{{key}}}" for key in ("model", "attention", "without", "batch")}
    columns |= {"ms": "{ms:.2f}", "slower by": "{slower_percent:.1f} %", "peak MiB": "{peak_mib:,.0f}"}
    columns |= {"ms without a graph": "{eager_ms:.1f}"}
    records = load("tricks")
    return listing(records, columns) if records else not_measured("tricks")


def tricks_memory() -> str:
    """Memory of a step without each trick, counted on a CPU (benchmarks/tricks.py --memory)."""
    columns = {key: f"{{{key}}}" for key in ("model", "attention", "without", "batch")}
    return listing(load("tricks_memory"), columns | {"peak MiB": "{peak_mib:,.0f}"})


def kernels() -> str:
    """Every kernel: bandwidth, its share of a copy, and how much faster than the plain definition it is."""
    found = {(r["op"], r["shape"], r["direction"], r["implementation"]): r for r in load("kernels")}
    body = []
    for (*what, implementation), r in found.items():
        if implementation != "kernel":
            continue
        others = [found.get((*what, name)) for name in ("reference", "reference-compiled")]  # type: ignore[call-overload]
        factors = [f"{other['ms'] / r['ms']:.1f}" if other else "" for other in others]
        body.append([*what, f"{1e3 * r['ms']:.0f}", f"{r['gb_per_s']:,.0f}", f"{r['share_of_copy']:.0%}", *factors])
    copy = f"The copy of the same run: {load('kernels')[0]['copy_gb_per_s']:,.0f} GB/s."
    header = ["operation", "shape", "direction", "us", "GB/s", "share of copy", "x plain eager", "x plain compiled"]
    return f"{table(header, body)}\n\n{copy}"


def targets() -> str:
    """The training step against the fastest peer; numbers of the peer's own run where the attention is in it."""
    cifar = load("train_step_cifar")
    peer = max((r for r in cifar if r["implementation"].startswith("spikingjelly")), key=lambda r: r["images_per_s"])
    ours = {r["attention"]: r for r in [*load("train_step_cifar_ours"), *cifar] if r["implementation"] == "lrfdyn"}
    body = [
        [r["attention"], f"{r['images_per_s']:,.0f}", f"{r['images_per_s'] / peer['images_per_s']:.2f}",
         f"{r['peak_mib'] / peer['peak_mib']:.0%}"]
        for r in ours.values()
    ]  # fmt: skip
    goal = [f"the aim, with {peer['implementation']} at {peer['images_per_s']:,.0f} images/s"]
    body.append([*goal, f"{2.5 * peer['images_per_s']:,.0f}", "2.50", "50%"])
    return table(["attention", "images/s", "times the fastest peer", "of its memory"], body)


TOKENS = {"tokens_h200": "images/tokens_h200.png", "tokens_cpu": "images/tokens_cpu.png"}  # records and their figures


def per_token(record: dict[str, Any], what: str = "ms") -> float:
    """Nanoseconds."""
    return 1e6 * record[what] / (record["batch"] * record["tokens"])


def tokens(name: str) -> str:
    """Time per token against the number of tokens, as a figure where it was drawn, and as a table."""
    records = load(name)
    if not records:
        return not_measured(name)
    sizes = sorted({r["tokens"] for r in records})
    found = {(r["attention"], r["tokens"]): f"{per_token(r):,.0f}" for r in records}
    body = [
        [attention, *(found.get((attention, size), "") for size in sizes)]
        for attention in dict.fromkeys(r["attention"] for r in records)
    ]
    where = records[0]["machine"]["gpu"] or f"{records[0]['machine']['cpu']}, one core"
    said = f"{where}, {records[0]['dtype']}, {records[0]['channels']} channels, forward, nanoseconds per token:"
    figure = f"![Nanoseconds per token against the number of tokens]({TOKENS[name]})\n\n"
    drawn = (ROOT / "docs" / TOKENS[name]).is_file()
    return f"{figure if drawn else ''}{said}\n\n{table(['tokens', *map(str, sizes)], body, numbers=True)}"


def draw() -> None:
    """The figures of time against tokens: forward, and forward with backward."""
    from lrfdyn.analysis.report.look import STYLE, pyplot

    plt = pyplot("plot")
    for name, path in TOKENS.items():
        records = load(name)
        if not records:
            continue
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
            for axis, what, title in zip(axes, ("ms", "training_ms"), ("forward", "forward and backward"), strict=True):
                for attention in dict.fromkeys(r["attention"] for r in records):
                    own = sorted((r["tokens"], per_token(r, what)) for r in records if r["attention"] == attention)
                    axis.plot(*zip(*own, strict=True), marker="o", markersize=3, label=attention)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set(title=title, xlabel="tokens", ylabel="ns per token" if axis is axes[0] else "")
            axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
            figure.savefig(ROOT / "docs" / path, dpi=150, bbox_inches="tight")
            plt.close(figure)


def before_after(name: str) -> str:
    """Two versions of the package in one run (benchmarks/before_after.py)."""
    found = read(f"performance/{name}.json")
    if not found:
        return "Not measured yet."
    body = []
    for r in found["records"]:
        speeds = [r[side]["median"] for side in ("before", "after")]
        shown = (f"{speed:,.3g}" if speed < 100 else f"{speed:,.0f}" for speed in speeds)
        counts = [f"{r[side]['operations']:,}" for side in ("before", "after") if "operations" in r[side]]
        body.append([r["what"], r["attention"], str(r["batch"]), *shown, f"{r['ratio']:.3f}", *counts])
    versions = [found[side]["version"] for side in ("before", "after")]
    header = ["what", "attention", "batch", *(f"{version}, images/s" for version in versions), "ratio"]
    header += [f"operations, {version}" for version in versions][: len(body[0]) - len(header)]
    where = found["machine"]["gpu"] or f"a CPU with {found['machine']['threads']} threads"
    return f"{found['model']} on {where}, medians of {found['rounds']} rounds:\n\n{table(header, body, numbers=True)}"


def compiled() -> str:
    """What the kernels became on every target (benchmarks/compiled_kernels.py): the most of all forms of each."""
    found: dict[str, Any] = read("performance/compiled_kernels.json")
    targets, forms = found["targets"], {(r["kernel"], r["target"]): [] for r in found["records"]}
    for r in found["records"]:
        forms[r["kernel"], r["target"]].append(r)

    def most(kernel: str, target: str) -> str:
        registers, spilled = (max(r[what] for r in forms[kernel, target]) for what in ("registers", "spilled"))
        return f"{registers} + {spilled} B" if spilled else str(registers)

    def shared(target: str) -> str:
        used = max(r["shared"] for r in found["records"] if r["target"] == target)
        return f"{used / 1024:.0f} of {targets[target]['shared'] / 1024:.0f}"

    body = [[f"`{kernel}`", *(most(kernel, target) for target in targets)] for kernel in sorted({k for k, _ in forms})]
    body.append(["shared memory, KiB", *map(shared, targets)])
    count = max(sum(r["target"] == target for r in found["records"]) for target in targets)
    about = (
        f"{len(body) - 1} kernels in up to {count} forms, compiled by Triton {found['versions']['triton']}. Sizes and "
        f"programs are those of {', '.join(t['name'] for t in targets.values())}."
    )
    return f"{about}\n\n{table(['kernel', *targets], body, numbers=True)}"


PARTS = {
    "performance_machine": machine,
    "performance_revision": revision,
    "performance_earlier": earlier,
    "training_speed": lambda: speed(*TRAINING),
    "training_peers": lambda: speed("train_step_cifar_peers"),
    "training_plain": lambda: speed("train_step_cifar_reference"),
    "training_224": lambda: speed("train_step_224"),
    "training_224_ours": lambda: speed("train_step_224_ours"),
    "training_compiled": lambda: speed("train_step_compiled"),
    "training_tricks": tricks,
    "tricks_memory": tricks_memory,
    "inference_speed": lambda: speed("inference_cifar"),
    "kernels": kernels,
    "targets": targets,
    "tokens_h200": lambda: tokens("tokens_h200"),
    "tokens_cpu": lambda: tokens("tokens_cpu"),
    "compiled_kernels": compiled,
    "before_after": lambda: before_after("before_after"),
    "before_after_cpu": lambda: before_after("before_after_cpu"),
}
