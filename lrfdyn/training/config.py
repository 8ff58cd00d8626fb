"""What decides a training: typed and checked."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from lrfdyn.data import Augmentation
from lrfdyn.errors import require

DATA_FACTS = ("num_classes", "image_size", "in_channels")
OWN_KEYS = ("attention", "dilations", "dendrites", "token", "time_steps", "drop_path")  # arguments of every host
RANGES = {
    "an integer >= 1": (1, math.inf),
    "an integer >= 0": (0, math.inf),
    "a number >= 0": (0, math.inf),
    "a positive number": (math.nextafter(0, 1), math.inf),
    "a number in [0, 1)": (0, 1),
    "a number in [0, 1]": (0, math.nextafter(1, 2)),
}


def _require_range(section: str, config: Any, words: str, *keys: str) -> None:
    """Checks that the numbers `keys` of a section are finite and in one of the `RANGES`; None is not given."""
    low, high = RANGES[words]
    for key in keys:
        value = getattr(config, key)
        require(value is None or low <= value < high, f"{section}.{key}: expected {words}, got {value}")


@dataclass(frozen=True)
class ModelConfig:
    """None leaves a choice to the model. Classes, channels and image size are the data's."""

    name: str
    """A model of `lrfdyn models`, or timm/NAME for segmentation."""
    attention: str | None = None
    """The name of an attention (ssa, causal_ssa, vsa, lrf_ssa, lrf_dyn, sdsa, or one's own); null: the model's
    own."""
    dilations: tuple[int, ...] | None = None
    """Dilations of the local receptive fields."""
    dendrites: int | None = None
    """Dendrites per channel, of LRF-Dyn."""
    token: Literal["value", "qkv"] | None = None
    """What the dendrites of LRF-Dyn read: v, or k * v gated by q."""
    time_steps: int | None = None
    """How often a static image is shown."""
    drop_path: float | None = None
    """Stochastic depth: the rate of the last block."""
    weights: str | None = None
    """A trained model to start from: folder, file or hub repository."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as {dim: 64, depth: 2}."""
    backbone: str | None = None
    """Of segmentation: a trained classifier of the model to start the backbone from."""
    head: dict[str, Any] = field(default_factory=dict)
    """Of segmentation: options of the FPN head."""

    def __post_init__(self) -> None:
        for key in self.options:
            require(key not in DATA_FACTS, f"model.options: {key} is the data's, and cannot be chosen")
            require(key not in OWN_KEYS, f"model.options: {key} has a key of its own, model.{key}")

    def arguments(self) -> dict[str, Any]:
        """What `create_model` is called with, besides the data's facts."""
        named = {key: getattr(self, key) for key in OWN_KEYS if getattr(self, key) is not None}
        return {**{key: _tuples(value) for key, value in self.options.items()}, **named}


@dataclass(frozen=True)
class DataConfig:
    """The data set, and where it lies."""

    name: str
    """The name of a data set: digits, cifar10, cifar100, imagenet, imagenette, folder (own images), webdataset,
    ade20k, or one's own."""
    root: str | None = None
    """The folder of its files."""
    image_size: int | None = None
    """Pixels a side that images are brought to; null: that of the data set."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the data set, such as {workers: 8, on_corrupt: skip}."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser, and the moving average of what it trains."""

    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    """The rule of the update."""
    learning_rate: float = 5e-4
    """The highest rate, after the warm-up."""
    per_images: int | None = None
    """The rate is meant for this batch size and grows linearly with the real one; null: as it is."""
    weight_decay: float = 0.05
    """Decay of weights; norms, biases and the dendrites' time constants have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW and LAMB."""
    eps: float = 1e-8
    """Of AdamW and LAMB."""
    momentum: float = 0.9
    """Of SGD."""
    trust_clip: bool = False
    """Of LAMB: its scale is at most 1."""
    clip_norm: float | None = None
    """Largest norm of the gradient; null: not clipped."""
    ema_decay: float | None = None
    """Decay of a moving average of the weights, which is then what is tested; null: none."""
    head_rate: float = 1.0
    """What the head's learning rate is multiplied by."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "eps", "clip_norm", "per_images", "head_rate")
        _require_range("optimizer", self, "a positive number", *positive)
        _require_range("optimizer", self, "a number in [0, 1)", "momentum", "ema_decay")
        _require_range("optimizer", self, "a number >= 0", "weight_decay")
        shares = all(0 <= beta < 1 for beta in self.betas)
        require(shares, f"optimizer.betas: expected two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, half a cosine or a power, and a cool-down at the lowest rate; `epochs` counts the first two."""

    epochs: int = 300
    """Epochs of warm-up and decay; alone, without the other parts (see --epochs)."""
    warmup_epochs: float = 20
    """Epochs of a rate that grows linearly."""
    warmup_rate: float = 1e-5
    """The rate at which the warm-up starts."""
    minimum_rate: float = 1e-5
    """The rate at which the decay ends."""
    cooldown_epochs: int = 0
    """Epochs at the lowest rate, after `epochs`."""
    cosine: Literal["whole", "after_warmup"] = "whole"
    """What the cosine spans."""
    mix_epochs: int | None = None
    """Mixup and cutmix end after so many epochs; null: never."""
    decay: Literal["cosine", "poly"] = "cosine"
    """Half a cosine, or a power that begins where the warm-up ends."""
    power: float = 1.0
    """The exponent of poly."""

    def __post_init__(self) -> None:
        _require_range("schedule", self, "an integer >= 1", "epochs")
        words = f"expected 0 to the {self.epochs} epochs, got {self.warmup_epochs:g}"
        hint = "(lrfdyn train --epochs N shortens every part)"
        require(0 <= self.warmup_epochs <= self.epochs, f"schedule.warmup_epochs: {words} {hint}")
        _require_range("schedule", self, "an integer >= 0", "mix_epochs", "cooldown_epochs")
        _require_range("schedule", self, "a number >= 0", "warmup_rate", "minimum_rate", "power")

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs

    def within(self, total: int) -> ScheduleConfig:
        """The same course in `total` epochs: warm-up, cool-down and the end of mixing in proportion."""
        require(total >= 1, f"epochs: expected an integer >= 1, got {total}")
        share = total / self.total_epochs
        cooldown = min(round(self.cooldown_epochs * share), total - 1)
        return dataclasses.replace(
            self,
            epochs=total - cooldown,
            cooldown_epochs=cooldown,
            warmup_epochs=round(self.warmup_epochs * share, 2),
            mix_epochs=None if self.mix_epochs is None else round(self.mix_epochs * share),
        )


@dataclass(frozen=True)
class DistillConfig:
    """A timm model whose answers are mixed into the targets."""

    teacher: str | None = None
    """The name of a timm model; null: none."""
    weight: float = 0.5
    """The teacher's share of the target."""
    kind: Literal["hard", "soft"] = "hard"
    """The teacher's class, or its probabilities."""

    def __post_init__(self) -> None:
        _require_range("distill", self, "a number in [0, 1]", "weight")


@dataclass(frozen=True)
class RunConfig:
    """How a run is made: batches, precision, device, seed, and how often it logs, tests and saves."""

    batch_size: int = 128
    """Images per step of the optimiser, over all processes."""
    accumulate: int = 1
    """Parts that a process computes its share in, where memory is small."""
    test_batch_size: int = 256
    """Images at a time in a test, of each process."""
    seed: int = 0
    """Seed of weights, data order and augmentation."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 by autocast."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    sync_batchnorm: bool = True
    """Statistics over all processes."""
    cuda_graph: Literal["auto", "off"] = "auto"
    """Whether a step is captured, where it can be."""
    test_epochs: int = 1
    """Test after every so many epochs, and after the last."""
    log_steps: int = 50
    """A line of log.jsonl after so many steps."""
    checkpoint_steps: int = 1000
    """A checkpoint after so many steps, besides the end of the epochs."""
    checkpoint_epochs: int = 1
    """A checkpoint after every so many epochs, and after the last."""

    def __post_init__(self) -> None:
        counts = [key for key, value in vars(self).items() if type(value) is int and key != "seed"]
        _require_range("run", self, "an integer >= 1", *counts)
        _require_range("run", self, "an integer >= 0", "seed")


# Where and how a run computes; they may change between an interruption and its resumption.
FREE_KEYS = (
    "data.root", "run.device", "run.cuda_graph", "run.log_steps", "run.checkpoint_steps", "run.checkpoint_epochs",
    "run.test_epochs", "run.test_batch_size", "run.accumulate",
)  # fmt: skip
# Of data.options. A run that a damaged image ended met none before it, and may go on without it.
FREE_OPTIONS = ("workers", "on_corrupt")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run: a recipe with its overrides, checked."""

    model: ModelConfig
    data: DataConfig
    augmentation: Augmentation = field(default_factory=Augmentation)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def fingerprint(self) -> str:
        """Equal for two configurations that train the same."""
        return hashlib.sha256(json.dumps(decisive(self.as_dict()), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """As JSON and YAML can hold it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def micro_batch(self, processes: int) -> int:
        """Images that one process takes through the model at once."""
        parts, batch = processes * self.run.accumulate, self.run.batch_size
        whole = f"{processes} processes x run.accumulate {self.run.accumulate}"
        require(batch % parts == 0, f"run.batch_size: expected a multiple of {parts} ({whole}), got {batch}")
        even = not (self.augmentation.mixes and self.schedule.mix_epochs != 0) or batch // parts % 2 == 0
        pairs = "mixup and cutmix pair the images that a process computes at once"
        require(even, f"run.batch_size: {pairs}; expected a multiple of {2 * parts}, got {batch}")
        return batch // parts

    @property
    def base_rate(self) -> float:
        """The highest learning rate, scaled to the batch where the recipe says so."""
        scale = self.run.batch_size / self.optimizer.per_images if self.optimizer.per_images else 1.0
        return self.optimizer.learning_rate * scale


def _sections() -> dict[str, type]:
    return typing.get_type_hints(TrainConfig)


@cache
def key_types() -> dict[str, Any]:
    """All keys `section.name` with their types."""
    hints = {section: typing.get_type_hints(cls) for section, cls in _sections().items()}
    return {f"{section}.{name}": kind for section, kinds in hints.items() for name, kind in kinds.items()}


@cache
def key_help() -> dict[str, str]:
    """All keys `section.name` with what the docstrings below their fields say, each in one line."""
    docs: dict[str, str] = {}
    for section, cls in _sections().items():
        body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        for item, below in itertools.pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[f"{section}.{ast.unparse(item.target)}"] = " ".join(ast.literal_eval(below.value).split())
    return docs


def decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration decides the result, as `section.name`."""
    flat = {f"{section}.{name}": value for section, entries in values.items() for name, value in entries.items()}
    options = {key: value for key, value in (flat.get("data.options") or {}).items() if key not in FREE_OPTIONS}
    return {key: value for key, value in flat.items() if key not in FREE_KEYS} | {"data.options": options}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """The decisive keys in which two configurations differ, each with both values."""
    a, b = decisive(ours), decisive(theirs)
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield f"{key}: {b.get(key)} there, {a.get(key)} here"


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
