"""What a network is trained for: its data, model, loss and targets, and how it is tested. The data set says which task
it has, by the name of its attribute `task`; another package adds a task of its own with `register_task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention import attention_options
from lrfdyn.checks import checked
from lrfdyn.convert import fold_batch_norm
from lrfdyn.data import Batch, DataSource, create_data, data_class
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.errors import require
from lrfdyn.files import expanded, read_summary
from lrfdyn.io.zoo import zoo_entry
from lrfdyn.models import SpikingModel, create_model
from lrfdyn.models.registry import model_class, model_defaults
from lrfdyn.models.timm_networks import create_timm
from lrfdyn.registry import Registry
from lrfdyn.sources import find_source
from lrfdyn.training.config import DATA_FACTS, DistillConfig, TrainConfig

Distill = Callable[[Tensor, Tensor], Tensor]
TWO_HEADS = "model.options: distillation: two classifiers need a loop of your own; distill.teacher is for one"


@dataclass(frozen=True)
class TestRun:
    """The test images, of this process. `seen` is called behind every batch with the number of its images."""

    __test__: ClassVar[bool] = False  # not one of pytest's classes

    source: DataSource
    batch_size: int
    accelerator: Any
    dtype: torch.dtype
    seen: Callable[[int], None] = lambda images: None

    def batches(self, **options: Any) -> Iterator[Batch]:
        """The batches; `options` are further ones of the source's `test_batches`."""
        ranks = {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}
        how = {"batch_size": self.batch_size, "device": self.accelerator.device, **ranks, **options}
        for batch in self.source.test_batches(**how):
            yield batch
            self.seen(batch.count)


class Task(ABC):
    """What a run needs to know of its task. `results` names the numbers of a test that a summary keeps, in percent but
    for the loss, `headline` the one that a progress bar shows, and `pipeline` is the hub's word for the task."""

    results: ClassVar[tuple[str, ...]]
    headline: ClassVar[str]
    pipeline: ClassVar[str]

    @abstractmethod
    def build_model(self, config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
        """The untrained model of a configuration; an error for settings that are not for this task."""

    def prepare(self, model: SpikingModel, config: TrainConfig, source: DataSource) -> None:  # noqa: B027
        """Fills `model` with what a run of this task starts from, `model.weights` apart, and raises what a test would,
        before the training that comes first."""

    def preprocessing(self, source: DataSource) -> Preprocessing | None:
        """What a trained model does to image files; None where it takes them as they are, or takes none."""
        return None if source.framed else Preprocessing.of_data(source)

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """What `loss` compares the logits of a training batch with."""

    @abstractmethod
    def blank_targets(self, logits: Tensor) -> Tensor:
        """Targets of the right shape and kind, to count with."""

    @abstractmethod
    def test(self, model: nn.Module, run: TestRun) -> dict[str, Any]:
        """`results` over all test images and processes, and whatever else is worth keeping."""


TASKS: Registry[type[Task]] = Registry("task")


@checked
def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Makes a subclass of `Task` the one of all data sets whose `task` is `name`."""
    return lambda task: TASKS.add(name, task)


def task_of(data: str) -> Task:
    """The task of a data set, by its name."""
    return TASKS[data_class(data).task]()


@register_task("classification")
class Classification(Task):
    """One class per image: logits and targets are `[B, classes]`."""

    results = ("top1", "top5", "test_loss")
    headline = "top1"
    pipeline = "image-classification"

    def build_model(self, config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
        name, arguments = config.model.name, config.model.arguments()
        for key in ("backbone", "head"):
            given = getattr(config.model, key)
            require(not given, f"model.{key}: is for segmentation, and {config.data.name} is not, got {given!r}")
        if "image_size" in model_class(name).options():  # another host takes any size
            arguments["image_size"] = image_size
        return create_model(name, num_classes=num_classes, in_channels=in_channels, **arguments)

    def prepare(self, model: SpikingModel, config: TrainConfig, source: DataSource) -> None:
        require(not model.config.get("distillation"), TWO_HEADS)
        steps = "each_step" in signature(model.head_input).parameters
        message = f"loss.tet: head_input of {config.model.name} has no each_step: no logits of every time step"
        require(steps or config.loss.tet is None, message)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch.targets.to(dtype)

    def blank_targets(self, logits: Tensor) -> Tensor:
        require(isinstance(logits, Tensor), TWO_HEADS)
        return torch.zeros(logits.shape)

    @torch.no_grad()
    def test(self, model: nn.Module, run: TestRun) -> dict[str, Any]:
        """Accuracies in percent and loss over all test images."""
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=run.accelerator.device)  # loss, top 1, top 5, images
        for batch in run.batches():
            with run.accelerator.autocast():
                logits = model(batch.images.to(run.dtype))
            logits, labels = logits[: batch.count].double(), batch.labels[: batch.count]
            best = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            images = torch.tensor(batch.count, device=loss.device)
            sums += torch.stack((loss, best[:, 0].sum(), best.sum(), images)).double()
        loss_sum, top1, top5, count = run.accelerator.reduce(sums, "sum").tolist()
        require(count > 0, "data: expected at least one test image that can be read")
        return {"test_loss": loss_sum / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


def data_options(config: TrainConfig) -> dict[str, Any]:
    """What `create_data` is called with, besides the folder and the augmentation."""
    data = config.data
    for key in ("held_out", "image_size", "name", "root"):
        require(key not in data.options, f"data.options: {key} has a key of its own, data.{key}")
    options = {**data.options, **({} if data.image_size is None else {"image_size": data.image_size})}
    if data_class(data.name).framed:
        steps = config.model.time_steps or model_defaults(config.model.name)["time_steps"]
        frames = options.setdefault("frames", steps)
        require(frames == steps, f"data.options: frames: expected {steps}, the model's time steps, got {frames}")
    return options


def build_data(config: TrainConfig) -> DataSource:
    """The data set of a configuration."""
    root = None if config.data.root is None else expanded(config.data.root, "data.root")
    source = create_data(config.data.name, root, config.augmentation, **data_options(config))
    if config.data.held_out is not None:
        source.hold_out(config.data.held_out)
    return source


def held_out(config: TrainConfig) -> dict[str, int]:
    """What a record of a test says, where the images of it are not the test images."""
    return {} if config.data.held_out is None else {"held_out": config.data.held_out}


def data_model(config: TrainConfig, source: DataSource) -> SpikingModel:
    """The untrained model for these data, which knows their class names and the preprocessing of their images."""
    task = task_of(config.data.name)
    model = task.build_model(config, **{fact: getattr(source, fact) for fact in DATA_FACTS})
    model.class_names = None if source.class_names is None else tuple(source.class_names)
    model.preprocessing, model.framing = task.preprocessing(source), source.framing
    return model


def attention_facts(model: SpikingModel) -> dict[str, Any]:
    """Kind and options of a model's attention, None where it has no such thing; other options if not the default."""
    kind = model.config.get("attention")
    defaults = {} if kind is None else attention_options(kind)
    options = {**defaults, **(model.config.get("attention_options") or {})}
    dilations = None if options.get("dilations") is None else list(options["dilations"])
    facts = {"attention": kind, "token": options.get("token"), "directions": options.get("directions")}
    others = {name: value for name, value in options.items() if value != defaults.get(name)}
    return {**others, **facts, "dilations": dilations}


def build_loss(task: Task, tet: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a run: that of its task, or with `tet` its mean over the time steps of `[T, B, classes]` (temporal
    efficient training, Deng et al., 2022), whose second term keeps all logits near 1."""
    if tet is None:
        return task.loss

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        steps = torch.stack([task.loss(step, targets) for step in logits]).mean()
        return (1 - tet) * steps + tet * (logits.to(steps.dtype) - 1).square().mean()

    return loss


def find_teacher(name: str, source: DataSource) -> tuple[nn.Module, Any, Any]:
    """A trained model by path or by a name of the zoo, its norms folded, else one of timm; with the mean and deviation
    that it expects images to be normalised by, those of the data where it does not say."""
    teacher: Any
    repository = "/" in name and ":" not in name  # or a path that does not exist, which is said
    if repository or expanded(name, "distill.teacher").exists() or zoo_entry(name) is not None:
        teacher = fold_batch_norm(find_source(name, "distill.teacher").load())
        facts, classes = teacher.preprocessing, teacher.config.get("num_classes")
        mean, deviation = (None, None) if facts is None else (facts.mean, facts.std)
    else:
        teacher = create_timm("distill.teacher", name, {}, pretrained=True)
        timm_facts, classes = getattr(teacher, "pretrained_cfg", None) or {}, getattr(teacher, "num_classes", None)
        mean, deviation = timm_facts.get("mean"), timm_facts.get("std")
    mean, deviation = tuple(mean or source.mean), tuple(deviation or source.deviation)
    for what, ours, theirs in (
        ("classes", source.num_classes, classes),
        ("channels", source.in_channels, len(mean)),
    ):
        require(ours == theirs, f"distill.teacher: expected {ours} {what}, {name} has {theirs}")
    return teacher, mean, deviation


def build_distill(config: DistillConfig, source: DataSource, device: torch.device) -> Distill | None:
    """A function of images and targets that mixes the teacher's answers into the targets; None without a teacher.

    Cross-entropy is linear in its target, so this equals the weighted sum of the two losses, and it happens outside of
    the training step: a captured step needs no change."""
    if config.teacher is None:
        return None
    teacher, mean, deviation = find_teacher(config.teacher, source)
    teacher = teacher.to(device).eval().requires_grad_(False)
    if device.type == "cuda":
        teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # From the statistics that the data are normalised by to those that the teacher was trained with.
    numbers = (source.mean, source.deviation, mean, deviation)
    from_mean, scale, to_mean, by = (torch.tensor(x, device=device).view(-1, 1, 1) for x in numbers)

    @torch.no_grad()
    def distill(images: Tensor, targets: Tensor) -> Tensor:
        logits = teacher(images * (scale / by) + (from_mean - to_mean) / by).to(targets.dtype)
        hard = config.kind == "hard"
        answer = F.one_hot(logits.argmax(1), targets.shape[1]).to(targets.dtype) if hard else logits.softmax(1)
        return targets.lerp(answer, config.weight)

    return distill


def teacher_facts(config: DistillConfig) -> dict[str, Any]:
    """What a summary says of the teacher: its name, and where it is a run its accuracy and how long it trained."""
    if config.teacher is None:
        return {}
    trained = read_summary(expanded(config.teacher, "distill.teacher") / "summary.json", "distill.teacher")
    known = {key: trained[key] for key in ("top1", "train_s", "beside") if key in trained}
    return {"teacher": {"name": config.teacher, **known}}


NAMES = {"top1": "top-1", "top5": "top-5", "miou": "mIoU", "mean_accuracy": "mean accuracy",
         "pixel_accuracy": "pixel accuracy"}  # fmt: skip


def shown_results(record: dict[str, Any], num_classes: int) -> dict[str, str]:
    """The numbers of a test as a user reads them. Five classes or fewer have no top-5, which would be 100 %."""
    hidden = {"top5"} if num_classes <= 5 else set()
    return {name: f"{record[key]:.2f} %" for key, name in NAMES.items() if key in record and key not in hidden}


def describe_results(record: dict[str, Any], num_classes: int) -> str:
    """The same in one line."""
    return ", ".join(f"{name} {text}" for name, text in shown_results(record, num_classes).items())
