"""What decides a training: typed, checked, and printed with the near match where a name is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lrfdyn.data import Augmentation
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.training.checks import not_negative, positive, share
from lrfdyn.training.convert import convert

Section = TypeVar("Section")
DATA_FACTS = ("num_classes", "image_size", "in_channels")
OWN_KEYS = ("attention", "dilations", "dendrites", "token", "time_steps", "drop_path")  # arguments of every host


@dataclass(frozen=True)
class ModelConfig:
    """None leaves a choice to the model. Classes, channels and image size are the data's."""

    name: str
    attention: str | None = None
    dilations: tuple[int, ...] | None = None
    dendrites: int | None = None
    token: Literal["value", "qkv"] | None = None
    time_steps: int | None = None
    drop_path: float | None = None
    weights: str | None = None  # a .safetensors file to start from
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the host
    # Of segmentation: a trained classifier of the host to start the backbone from, and options of the FPN head.
    backbone: str | None = None
    head: dict[str, Any] = field(default_factory=dict)

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
    name: str
    root: str | None = None
    image_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `create_data`


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    learning_rate: float = 5e-4
    per_images: int | None = None  # the rate is meant for this batch size and grows linearly with the real one
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9  # of SGD
    trust_clip: bool = False  # of LAMB: its scale is at most 1
    clip_norm: float | None = None
    ema_decay: float | None = None  # None: no moving average of the weights
    head_rate: float = 1.0  # what the head's learning rate is multiplied by

    def __post_init__(self) -> None:
        positive("optimizer", self, "learning_rate", "eps", "clip_norm", "per_images", "head_rate")
        share("optimizer", self, "momentum", "ema_decay")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas: expected two numbers in [0, 1), got {self.betas}",
        )
        not_negative("optimizer", self, "weight_decay")


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, half a cosine or a power, and a cool-down at the lowest rate; `epochs` counts the first two."""

    epochs: int = 300
    warmup_epochs: float = 20
    warmup_rate: float = 1e-5  # where the warm-up starts
    minimum_rate: float = 1e-5
    cooldown_epochs: int = 0
    cosine: Literal["whole", "after_warmup"] = "whole"  # what the cosine spans
    mix_epochs: int | None = None  # mixup and cutmix end after so many epochs
    decay: Literal["cosine", "poly"] = "cosine"  # poly begins where the warm-up ends
    power: float = 1.0  # of poly

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"schedule.epochs: expected an integer >= 1, got {self.epochs}")
        require(
            0 <= self.warmup_epochs <= self.epochs,
            f"schedule.warmup_epochs: expected 0 to the {self.epochs} epochs, got {self.warmup_epochs:g} "
            "(lrfdyn train --epochs N shortens every part)",
        )
        require(
            self.mix_epochs is None or self.mix_epochs >= 0,
            f"schedule.mix_epochs: expected an integer >= 0, got {self.mix_epochs}",
        )
        not_negative("schedule", self, "warmup_rate", "minimum_rate", "cooldown_epochs", "power")

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
    weight: float = 0.5
    kind: Literal["hard", "soft"] = "hard"

    def __post_init__(self) -> None:
        require(0 <= self.weight <= 1, f"distill.weight: expected a number in [0, 1], got {self.weight}")


@dataclass(frozen=True)
class RunConfig:
    batch_size: int = 128  # images per step of the optimiser, over all processes
    accumulate: int = 1  # parts that a process computes its share in
    test_batch_size: int = 256  # of each process
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sync_batchnorm: bool = True
    cuda_graph: Literal["auto", "off"] = "auto"
    test_epochs: int = 1  # test after every so many epochs, and after the last
    log_steps: int = 50
    checkpoint_steps: int = 1000  # besides the end of the epochs
    checkpoint_epochs: int = 1  # after every so many epochs, and after the last

    def __post_init__(self) -> None:
        for key in (
            "batch_size",
            "accumulate",
            "test_batch_size",
            "test_epochs",
            "log_steps",
            "checkpoint_steps",
            "checkpoint_epochs",
        ):
            require(getattr(self, key) >= 1, f"run.{key}: expected an integer >= 1, got {getattr(self, key)}")
        require(self.seed >= 0, f"run.seed: expected an integer >= 0, got {self.seed}")

    def micro_batch(self, processes: int) -> int:
        parts = processes * self.accumulate
        require(
            self.batch_size % parts == 0,
            f"run.batch_size: expected a multiple of {parts} ({processes} processes x run.accumulate "
            f"{self.accumulate}), got {self.batch_size}",
        )
        return self.batch_size // parts


# Where and how a run computes; they may change between an interruption and its resumption.
FREE_KEYS = (
    "data.root",
    "run.device",
    "run.cuda_graph",
    "run.log_steps",
    "run.checkpoint_steps",
    "run.checkpoint_epochs",
    "run.test_epochs",
    "run.test_batch_size",
    "run.accumulate",
)
# Of data.options. A run that a damaged image ended met none before it, and may go on without it.
FREE_OPTIONS = ("workers", "on_corrupt")


@dataclass(frozen=True)
class TrainConfig:
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
        size = self.run.micro_batch(processes)
        mixes = self.augmentation.mixes and self.schedule.mix_epochs != 0
        require(
            not mixes or size % 2 == 0,
            f"run.batch_size: mixup and cutmix pair the images that a process computes at once; expected a multiple of "
            f"{2 * self.run.batch_size // size}, got {self.run.batch_size}",
        )
        return size

    @property
    def base_rate(self) -> float:
        """The highest learning rate, scaled to the batch where the recipe says so."""
        scale = self.run.batch_size / self.optimizer.per_images if self.optimizer.per_images else 1.0
        return self.optimizer.learning_rate * scale


def parse_config(values: Mapping[str, Any], source: str = "recipe") -> TrainConfig:
    """The configuration of nested `values`; an error names the source and the key."""
    return _parse_section(TrainConfig, values, source, "")


def key_types() -> dict[str, Any]:
    """All keys `section.name` with their types."""
    sections = typing.get_type_hints(TrainConfig)
    return {
        f"{section}.{name}": kind
        for section, cls in sections.items()
        for name, kind in typing.get_type_hints(cls).items()
        if name in {f.name for f in dataclasses.fields(cls)}
    }


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections as `section.name`."""
    return {f"{section}.{name}": value for section, entries in values.items() for name, value in entries.items()}


def decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration decides the result, as `section.name`."""
    flat = {key: value for key, value in flatten(values).items() if key not in FREE_KEYS}
    options = flat.get("data.options") or {}
    return {**flat, "data.options": {key: value for key, value in options.items() if key not in FREE_OPTIONS}}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """The decisive keys in which two configurations differ, each with both values."""
    a, b = decisive(ours), decisive(theirs)
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield f"{key}: {b.get(key)} there, {a.get(key)} here"


def _parse_section(cls: type[Section], values: Any, source: str, prefix: str) -> Section:
    require(
        isinstance(values, Mapping),
        f"{source}: {prefix or 'the top level'}: expected keys with values, got {values!r}",
    )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    where = f"{source}: key in {prefix}" if prefix else f"{source}: section"
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_name(where, key, fields)
        name = f"{prefix}.{key}" if prefix else key
        if dataclasses.is_dataclass(hints[key]):
            section: type[Any] = hints[key]
            arguments[key] = _parse_section(section, {} if value is None else value, source, name)
        else:
            arguments[key] = convert(value, hints[key], f"{source}: {name}")
    for name, item in fields.items():
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        require(
            not needed or name in arguments,
            f"{source}: {prefix + '.' if prefix else ''}{name}: missing, and there is no default",
        )
    try:
        return cls(**arguments)
    except LrfdynError as error:
        section_name = "" if str(error).startswith(prefix) else f"{prefix}."  # the augmentation names bare keys
        raise LrfdynError(f"{source}: {section_name}{error}") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
