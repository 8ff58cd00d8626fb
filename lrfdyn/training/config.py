"""What decides a training: typed and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, get_type_hints

from lrfdyn.checks import check_types, checked, hints_of
from lrfdyn.data import Augmentation
from lrfdyn.errors import require
from lrfdyn.io.hub import as_tuples

DATA_FACTS = ("num_classes", "image_size", "in_channels")
# Arguments of every host, those of its attention first.
ATTENTION_KEYS = (
    "attention", "dilations", "dendrites", "token", "directions", "coupling", "norm", "scale_lrf", "train_qk",
)  # fmt: skip
OWN_KEYS = (*ATTENTION_KEYS, "time_steps", "drop_path")
# Ranges of numbers: in words, the least, and what is too much.
POSITIVE = ("a positive number", math.nextafter(0, 1), math.inf)
NOT_NEGATIVE = ("a number >= 0", 0, math.inf)
SHARE = ("a number in [0, 1)", 0, 1)
SHARE_OR_ONE = ("a number in [0, 1]", 0, math.nextafter(1, 2))
COUNT = ("an integer >= 1", 1, math.inf)
COUNT_OR_ZERO = ("an integer >= 0", 0, math.inf)
SEED = ("an integer from 0 to 2^40 - 1", 0, 2**40)  # processes and steps make seeds of 64 bits from it


class Section:
    """A part of a configuration. Its keys are annotated with what they mean and, if they are numbers, their range."""

    def __post_init__(self) -> None:
        own: Any = type(self)
        section = own.__name__.removesuffix("Config").lower()
        hints = {f"{section}.{key}": kind for key, kind in hints_of(own).items()}
        check_types({f"{section}.{key}": value for key, value in vars(self).items()}, hints)
        for key, kind in get_type_hints(own, include_extras=True).items():
            for words, low, high in kind.__metadata__[1:]:
                value = getattr(self, key)
                require(value is None or low <= value < high, f"{section}.{key}: expected {words}, got {value}")


@dataclass(frozen=True)
class ModelConfig(Section):
    """None leaves a choice to the model. Classes, channels and image size are the data's."""

    name: Annotated[str, "A model of `lrfdyn models`, or timm/NAME for segmentation."]
    attention: Annotated[str | None, "ssa, causal_ssa, vsa, lrf_ssa, lrf_dyn, sdsa or yours; null: the model's."] = None
    dilations: Annotated[tuple[int, ...] | None, "Dilations of the local receptive fields."] = None
    dendrites: Annotated[int | None, "Dendrites per channel, of LRF-Dyn."] = None
    token: Annotated[Literal["value", "qkv"] | None, "LRF-Dyn's dendrites read v, or k * v gated by q."] = None
    directions: Annotated[int | None, "2: LRF-Dyn runs from the last token too.", ("1 or 2", 1, 3)] = None
    coupling: Annotated[Literal["opposite", "same"] | None, "Sign of LRF-Dyn's coupling: oscillators or decays."] = None
    norm: Annotated[bool | None, "LRF-SSA has a batch norm on the sum of its stencils."] = None
    scale_lrf: Annotated[bool | None, "LRF-SSA's scale is on both terms, the stencils too."] = None
    train_qk: Annotated[bool | None, "false: the weights of q and k stay as they were drawn."] = None
    time_steps: Annotated[int | None, "How often a static image is shown; of recordings, their frames."] = None
    drop_path: Annotated[float | None, "Stochastic depth: the rate of the last block."] = None
    weights: Annotated[str | None, "A trained model to start from: folder, file or hub repository."] = None
    options: Annotated[dict[str, Any], "Further arguments, such as {dim: 64, depth: 2}."] = field(default_factory=dict)
    backbone: Annotated[str | None, "Of segmentation: a trained classifier to start the backbone from."] = None
    head: Annotated[dict[str, Any], "Of segmentation: options of the FPN head."] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.options:
            require(key not in DATA_FACTS, f"model.options: {key} is the data's, and cannot be chosen")
            own = {"head_options": "head"}.get(key, key)
            chosen = own in ("name", "backbone", "head", *OWN_KEYS)
            require(not chosen, f"model.options: {key} has a key of its own, model.{own}")

    def arguments(self) -> dict[str, Any]:
        """What `create_model` is called with, besides the data's facts."""
        named = {key: getattr(self, key) for key in OWN_KEYS if getattr(self, key) is not None}
        return {**as_tuples(self.options), **named}


@dataclass(frozen=True)
class DataConfig(Section):
    """The data set, and where it lies."""

    name: Annotated[
        str,
        "digits, cifar10, cifar100, tiny_imagenet, imagenet, imagenette, oxford_pets, folder, webdataset, ade20k, "
        "oxford_pets_trimaps, mask_shards, nmnist, cifar10dvs, dvs128_gesture, ncaltech101, event_folder or one's own.",
    ]
    root: Annotated[str | None, "The folder of its files."] = None
    image_size: Annotated[int | None, "Pixels a side that images are brought to; null: that of the data set."] = None
    held_out: Annotated[int | None, "Test on so many training images, the last of every class, instead.", COUNT] = None
    options: Annotated[dict[str, Any], "Further arguments, such as {workers: 8}."] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The optimiser, and the moving average of what it trains."""

    name: Annotated[Literal["adamw", "lamb", "muon", "sgd"], "The rule of the update."] = "adamw"
    learning_rate: Annotated[float, "The highest rate, after the warm-up.", POSITIVE] = 5e-4
    per_images: Annotated[int | None, "The rate is for this batch size and grows with the real one.", POSITIVE] = None
    weight_decay: Annotated[float, "Not of norms, biases and the dendrites' time constants.", NOT_NEGATIVE] = 0.05
    betas: Annotated[tuple[float, float], "Of AdamW and LAMB."] = (0.9, 0.999)
    eps: Annotated[float, "Of AdamW and LAMB.", POSITIVE] = 1e-8
    momentum: Annotated[float, "Of SGD and Muon.", SHARE] = 0.9
    muon_rate: Annotated[float | None, "Of Muon: the rate of its matrices; null: learning_rate.", POSITIVE] = None
    trust_clip: Annotated[bool, "Of LAMB: its scale is at most 1."] = False
    clip_norm: Annotated[float | None, "Largest norm of the gradient; null: not clipped.", POSITIVE] = None
    ema_decay: Annotated[float | None, "Decay of a moving average of the weights, which is then tested.", SHARE] = None
    head_rate: Annotated[float, "What the head's learning rate is multiplied by.", POSITIVE] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = all(0 <= beta < 1 for beta in self.betas)
        require(shares, f"optimizer.betas: expected two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class StageConfig(Section):
    """What some of the first epochs do otherwise than the last ones; None leaves a choice as those have it."""

    epochs: Annotated[int, "How many they are.", COUNT]
    time_steps: Annotated[int | None, "How often a static image is shown.", COUNT] = None
    tau: Annotated[float | None, "Of all LIF neurons.", ("a number >= 1", 1, math.inf)] = None
    batch_size: Annotated[int | None, "Images per step of the optimiser, over all processes.", COUNT] = None
    image_size: Annotated[int | None, "Pixels a side that training images are brought to.", COUNT] = None
    mix_probability: Annotated[float | None, "Probability that a step is mixed.", SHARE_OR_ONE] = None


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Linear warm-up, half a cosine or a power, and a cool-down at the lowest rate; `epochs` counts the first two."""

    epochs: Annotated[int, "Epochs of warm-up and decay; alone, without the other parts (see --epochs).", COUNT] = 300
    warmup_epochs: Annotated[float, "Epochs of a rate that grows linearly."] = 20
    warmup_rate: Annotated[float, "The rate at which the warm-up starts.", NOT_NEGATIVE] = 1e-5
    minimum_rate: Annotated[float, "The rate at which the decay ends.", NOT_NEGATIVE] = 1e-5
    cooldown_epochs: Annotated[int, "Epochs at the lowest rate, after `epochs`.", COUNT_OR_ZERO] = 0
    cosine: Annotated[Literal["whole", "after_warmup"], "What the cosine spans."] = "whole"
    mix_epochs: Annotated[int | None, "Mixup and cutmix end after so many; null: never.", COUNT_OR_ZERO] = None
    decay: Annotated[Literal["cosine", "poly"], "Half a cosine, or a power that begins after the warm-up."] = "cosine"
    power: Annotated[float, "The exponent of poly.", NOT_NEGATIVE] = 1.0
    rates: Annotated[
        tuple[tuple[float, float], ...] | None,
        "Instead of warm-up and decay: [epoch, share of the highest rate], from 0 to the last epoch, linear between.",
    ] = None
    stages: Annotated[
        tuple[StageConfig, ...] | None,
        "What the first epochs do otherwise, in turn: {epochs, time_steps, tau, batch_size, image_size, "
        "mix_probability}.",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        words, total = f"expected 0 to the {self.epochs} epochs, got {self.warmup_epochs:g}", self.total_epochs
        hint = "(lrfdyn train --epochs N shortens every part)"
        require(0 <= self.warmup_epochs <= self.epochs, f"schedule.warmup_epochs: {words} {hint}")
        if self.rates is not None:
            epochs, shares = [knot[0] for knot in self.rates], [knot[1] for knot in self.rates]
            whole = epochs[:1] == [0] and epochs[-1] == total and all(a <= b for a, b in pairwise(epochs))
            require(whole, f"schedule.rates: expected epochs that grow from 0 to {total}, got {epochs} {hint}")
            require(min(shares) >= 0, f"schedule.rates: expected shares >= 0, got {shares}")
        first = sum(stage.epochs for stage in self.stages or ())
        words = f"expected fewer than the {total} epochs of the run, got {first}"
        require(first < total, f"schedule.stages: {words} {hint}")

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs

    def within(self, total: int) -> ScheduleConfig:
        """The same course in `total` epochs: warm-up, cool-down, the end of mixing, knots and stages in proportion."""
        require(total >= 1, f"epochs: expected an integer >= 1, got {total}")
        share = total / self.total_epochs
        cooldown = min(round(self.cooldown_epochs * share), total - 1)
        warmup, mixed = round(self.warmup_epochs * share, 2), self.mix_epochs and round(self.mix_epochs * share)
        rates = self.rates and tuple((round(epoch * share, 2), height) for epoch, height in self.rates)
        # Where so few epochs are left that a stage has none, the last ones stay.
        ends = [min(round(end * share), total - 1) for end in accumulate(stage.epochs for stage in self.stages or ())]
        lengths = [end - start for start, end in pairwise([0, *ends])]
        parts = zip(self.stages or (), lengths, strict=True)
        stages = self.stages and tuple(dataclasses.replace(stage, epochs=n) for stage, n in parts if n)
        return dataclasses.replace(
            self, epochs=total - cooldown, cooldown_epochs=cooldown, warmup_epochs=warmup, mix_epochs=mixed,
            rates=rates, stages=stages,
        )  # fmt: skip


@dataclass(frozen=True)
class LossConfig(Section):
    """What is compared with the targets, besides label smoothing and a teacher."""

    tet: Annotated[
        float | None,
        "TET loss: every time step by itself, and with this weight the squares of logits - 1; null: the mean logits.",
        SHARE_OR_ONE,
    ] = None


@dataclass(frozen=True)
class DistillConfig(Section):
    """A trained model whose answers are mixed into the targets."""

    teacher: Annotated[
        str | None, "The folder of a run, another trained model, or the name of a timm model; null: none."
    ] = None
    weight: Annotated[float, "The teacher's share of the target.", SHARE_OR_ONE] = 0.5
    kind: Annotated[Literal["hard", "soft"], "The teacher's class, or its probabilities."] = "hard"


@dataclass(frozen=True)
class RunConfig(Section):
    """How a run is made: batches, precision, device, seed, and how often it logs, tests and saves."""

    batch_size: Annotated[int, "Images per step of the optimiser, over all processes.", COUNT] = 128
    accumulate: Annotated[int, "Parts that a process computes its share in, where memory is small.", COUNT] = 1
    test_batch_size: Annotated[int, "Images at a time in a test, of each process.", COUNT] = 256
    seed: Annotated[int, "Seed of weights, data order and augmentation.", SEED] = 0
    precision: Annotated[Literal["fp32", "bf16", "fp16", "fp64"], "bf16 and fp16 by autocast."] = "fp32"
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: a GPU where there is one."] = "auto"
    sync_batchnorm: Annotated[bool, "Statistics over all processes."] = True
    cuda_graph: Annotated[Literal["auto", "off"], "Whether a step is captured, where it can be."] = "auto"
    test_epochs: Annotated[int, "Test after every so many epochs, and after the last.", COUNT] = 1
    log_steps: Annotated[int, "A line of log.jsonl after so many steps.", COUNT] = 50
    checkpoint_steps: Annotated[int, "A checkpoint after so many steps, besides the end of the epochs.", COUNT] = 1000
    checkpoint_epochs: Annotated[int, "A checkpoint after every so many epochs, and after the last.", COUNT] = 1


# Where and how a run computes; they may change between an interruption and its resumption.
FREE_KEYS = (
    "data.root", "run.device", "run.cuda_graph", "run.log_steps", "run.checkpoint_steps", "run.checkpoint_epochs",
    "run.test_epochs", "run.test_batch_size", "run.accumulate",
)  # fmt: skip
# Keys that came after the first recorded runs: where they say nothing, a run is the one that it was without them.
LATER_KEYS = (
    "model.directions", "model.coupling", "model.norm", "model.scale_lrf", "model.train_qk", "data.held_out",
    "optimizer.muon_rate", "schedule.rates", "schedule.stages", "loss.tet", "augmentation.event_operations",
)  # fmt: skip
# Of data.options. A run that a damaged image ended met none before it, and may go on without it.
FREE_OPTIONS = ("workers", "on_corrupt", "cache")


@checked
@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run: a recipe with its overrides, checked."""

    model: ModelConfig
    data: DataConfig
    augmentation: Augmentation = field(default_factory=Augmentation)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def fingerprint(self) -> str:
        """Equal for two configurations that train the same."""
        values = {k: v for k, v in decisive(self.as_dict()).items() if v is not None or k not in LATER_KEYS}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

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

    def in_stages(self) -> Sequence[tuple[StageConfig, TrainConfig]]:
        """The stages of a run, each with the settings that hold in it. The last one has nothing but its epochs."""
        first = self.schedule.stages or ()
        last = StageConfig(self.schedule.total_epochs - sum(stage.epochs for stage in first))
        return [(stage, self._during(stage)) for stage in (*first, last)]

    def _during(self, stage: StageConfig) -> TrainConfig:
        sections: dict[str, Any] = {"run": "batch_size", "augmentation": "mix_probability"}
        given = {section: key for section, key in sections.items() if getattr(stage, key) is not None}
        changed = {s: dataclasses.replace(getattr(self, s), **{k: getattr(stage, k)}) for s, k in given.items()}
        return dataclasses.replace(self, **changed)

    @property
    def base_rate(self) -> float:
        """The highest learning rate, scaled to the batch where the recipe says so."""
        scale = self.run.batch_size / self.optimizer.per_images if self.optimizer.per_images else 1.0
        return self.optimizer.learning_rate * scale


@cache
def key_types(annotated: bool = False) -> dict[str, Any]:
    """All keys `section.name` with their types; `annotated` types say what the keys mean."""
    sections = get_type_hints(TrainConfig).items()
    hints = {section: get_type_hints(cls, include_extras=annotated) for section, cls in sections}
    return {f"{section}.{name}": kind for section, kinds in hints.items() for name, kind in kinds.items()}


def key_help() -> dict[str, str]:
    """All keys `section.name` with what they mean."""
    return {key: kind.__metadata__[0] for key, kind in key_types(annotated=True).items()}


def decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration decides the result, as `section.name`."""
    flat = {f"{section}.{name}": value for section, entries in values.items() for name, value in entries.items()}
    options = {key: value for key, value in (flat.get("data.options") or {}).items() if key not in FREE_OPTIONS}
    flat = {key: value for key, value in flat.items() if value is not None or key not in LATER_KEYS}
    return {key: value for key, value in flat.items() if key not in FREE_KEYS} | {"data.options": options}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """The decisive keys in which two configurations differ, each with both values."""
    a, b = decisive(ours), decisive(theirs)
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield f"{key}: {b.get(key)} there, {a.get(key)} here"
