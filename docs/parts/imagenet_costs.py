"""The model behind imagenet.md: hours and memory of the trainings of the paper's Table 1, from speeds and counts in
results/performance and the assumptions below. Nothing in it was measured on more than one GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.parts import read

Record = dict[str, Any]


@dataclass(frozen=True)
class Assumptions:
    """What was not measured here. Change a value and run `python docs/fill.py`."""

    dollars: float = 3.0  # for one hour of one GPU; an example, ask your provider
    node: int = 8  # GPUs
    nvlink: float = 450e9  # bytes/s and direction, of one GPU to the others of its node
    network: float = 50e9  # bytes/s between two nodes, 400 Gbit/s
    latency_node: float = 20e-6  # seconds of a small message to all GPUs of a node
    latency_nodes: float = 60e-6  # and to those of all nodes
    backward: float = 2.0  # times the forward pass; a test is a forward pass alone
    gpu_bytes: float = 141e9  # of an H200
    usable: float = 0.9  # of them
    jpeg_bytes: tuple[float, float] = (138e9, 6e9)  # ImageNet-1k as it comes, training and validation
    workers: int = 8  # processes that decode for each GPU, as the recipes have it


ASSUMED = Assumptions()
GPUS = (1, 8, 64)
# Whose speed stands in for that of a model without a measurement. The ResNets resemble none of the measured ones.
RELATIVES = {
    "spikformer_8_768": ("spikformer_8_512",),
    "qkformer_10_384": ("qkformer_10_512",),
    "sdt_v3_l": ("sdt_v3_s",),
    "sdt_v1_8_512": ("spikformer_8_512",),
    "sdt_v2_15m": ("sdt_v3_s",),
    "sdt_v2_55m": ("sdt_v3_s",),
}
SIZES = ("forward_flop", "kept_bytes")  # counts that a step's time is taken to grow with: one bound by each
SPEEDS = ("train_step_224", "train_step_imagenet", "train_step_224_ours")  # a later file stands for the earlier


@cache
def measured() -> dict[tuple[str, str], Record]:
    records = [record for name in SPEEDS for record in read(f"performance/{name}.json")]
    return {(r["model"], r["attention"]): r for r in records if r["implementation"] == "lrfdyn"}


@cache
def counted() -> tuple[Record, ...]:
    return tuple(read("performance/imagenet_counts.json"))


def count_of(model: str, attention: str | None) -> Record:
    return next(r for r in counted() if (r["model"], r["attention"]) == (model, attention))


def stand_ins(run: Record, models: Iterable[str] = ()) -> list[tuple[Record, Record]]:
    """Measurement and counts of the models whose speed stands in, with the same attention where they have it."""
    known = sorted({model for model, _ in measured()})
    names = models or RELATIVES.get(run["model"], known)
    kinds = [(name, run["attention"] if (name, run["attention"]) in measured() else "ssa") for name in names]
    return [(measured()[kind], count_of(*kind)) for kind in kinds]


def scaled(run: Record, models: Iterable[str] = ()) -> tuple[float, float]:
    """Images per second if a step took time in proportion to one of `SIZES`: the lowest and the highest."""
    speeds = [r["images_per_s"] * n[size] / run[size] for r, n in stand_ins(run, models) for size in SIZES]
    return min(speeds), max(speeds)


def own_record(run: Record) -> Record | None:
    """Of a run that is trained with the time steps of the measurement."""
    record = measured().get((run["model"], run["attention"]))
    return record if record and run is count_of(run["model"], run["attention"]) else None


def speeds(run: Record) -> tuple[float, float]:
    """Images per second of one GPU, the lowest and the highest; the same number twice where it was measured."""
    record = own_record(run)
    return (record["images_per_s"],) * 2 if record else scaled(run)


def peak_bytes(run: Record) -> float:
    """Of one image in training: measured, or in proportion to what the plain operations keep."""
    record = own_record(run)
    pairs = [(record, run)] if record else stand_ins(run)
    return max(r["peak_mib"] * 2**20 / r["batch"] * run["kept_bytes"] / n["kept_bytes"] for r, n in pairs)


@dataclass(frozen=True)
class Step:
    """Seconds of one step on one of `gpus`, by their parts."""

    compute: float
    norms: float
    gradients: float

    def seconds(self, hidden: bool) -> float:
        """Gradients are sent while the rest of the backward pass runs: all of them, or none."""
        return self.norms + (max(self.compute, self.gradients) if hidden else self.compute + self.gradients)


def step(run: Record, gpus: int, speed: float, assumed: Assumptions = ASSUMED) -> Step:
    far = gpus > assumed.node
    link, latency = (assumed.network, assumed.latency_nodes) if far else (assumed.nvlink, assumed.latency_node)
    ring = 2 * (gpus - 1) / gpus * 4 * run["parameters"] / link
    return Step(run["batch_size"] / gpus / speed, 2 * run["norms"] * latency if gpus > 1 else 0.0, ring)


def hours(run: Record, gpus: int, assumed: Assumptions = ASSUMED) -> tuple[float, float]:
    """The shortest and the longest: the highest speed with everything hidden, the lowest with nothing hidden."""
    found = []
    for speed, hidden in zip(reversed(speeds(run)), (True, False), strict=True):
        tests = run["epochs"] // run["test_epochs"] * run["test_images"] / ((1 + assumed.backward) * speed * gpus)
        found.append((run["steps"] * step(run, gpus, speed, assumed).seconds(hidden) + tests) / 3600)
    return found[0], found[1]


def together(runs: Iterable[Record], gpus: int) -> tuple[float, float]:
    """One after the other."""
    both = [hours(run, gpus) for run in runs]
    return sum(low for low, _ in both), sum(high for _, high in both)


def side_by_side(nodes: int) -> tuple[float, float]:
    """Rows at a time on one node each, the longest first; a fine-tuning follows its training."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for run in counted():
        rows.setdefault((run["model"], run["attention"]), []).append(run)
    queues = [(0.0, 0.0)] * nodes  # by their longest hours; the next row goes to the one that is free first
    for low, high in sorted((together(row, ASSUMED.node) for row in rows.values()), key=lambda both: -both[1]):
        first = min(range(nodes), key=lambda i: queues[i][1])
        queues[first] = queues[first][0] + low, queues[first][1] + high
    return max(low for low, _ in queues), max(high for _, high in queues)


def parts_needed(run: Record, gpus: int) -> int:
    """The smallest `run.accumulate` with which a batch fits."""
    images, room = run["batch_size"] // gpus, ASSUMED.usable * ASSUMED.gpu_bytes
    return next(n for n in range(1, images + 1) if images % n == 0 and images / n * peak_bytes(run) <= room)
