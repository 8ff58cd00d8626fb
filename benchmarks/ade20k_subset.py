"""Trains SDT-V3-S with SSA, LRF-SSA and LRF-Dyn on the ADE20K subset under one recipe and draws them side by side.

The three get the same number of epochs: --epochs, or as many as fit in --minutes by the speed of training and testing
that is measured first (this also compiles the kernels). Results go to --out as soon as a run ends: RUN/summary.json,
log.jsonl, log.csv, classes.csv, recipe.yaml; the figure comes last. A run that fails is told and the others go on. The
page is then filled by `python docs/fill.py`.

    python benchmarks/ade20k_subset.py --root DATA --minutes 5
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.attention import attention_label
from lrfdyn.errors import require
from lrfdyn.files import write_json
from lrfdyn.segmentation.data import MaskedData, find_pairs
from lrfdyn.segmentation.predict import choose_scenes, segmentation_figure
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.logs import Reporter
from lrfdyn.training.recipes import load_recipe, run_name
from lrfdyn.training.run import run_training
from lrfdyn.training.tasks import TestRun, build_data
from lrfdyn.training.trainer import Trainer

KEPT = ("log.jsonl", "log.csv", "classes.csv", "recipe.yaml")
WARM_UP, TIMED = 12, 30  # steps of the measurement
RESERVE_S = 10  # of a run, for decoding, capturing and writing
FIGURE_S = 15
MOST_EPOCHS = 200


class StepLimitError(Exception):
    pass


class Clock(Reporter):
    """Stops a run after a few steps, with the seconds of one of them."""

    def __init__(self, warm_up: int, timed: int) -> None:
        self.warm_up, self.last, self.seconds = warm_up, warm_up + timed, 0.0

    def step(self, trainer: Trainer) -> None:
        if trainer.done in (self.warm_up, self.last):
            now = common.now()
            if trainer.done == self.last:
                self.seconds = (now - self.started) / (self.last - self.warm_up)
                raise StepLimitError
            self.started = now


class Printer(Reporter):
    def start(self, trainer: Trainer) -> None:
        how = trainer.graph_obstacle or "captured as a CUDA graph"
        tell(f"  {trainer.parameters:,} parameters, {trainer.total_steps:,} steps on {trainer.device} ({how})")

    def epoch(self, record: dict[str, Any]) -> None:
        tested = f", mIoU {record['miou']:.2f} %" if "miou" in record else ""
        tell(f"  epoch {record['epoch']}: loss {record['train_loss']:.4f}{tested}")


BEGAN = time.perf_counter()


def tell(message: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {message}", flush=True)


def measure(config: TrainConfig, folder: Path, warm_up: int, timed: int) -> tuple[float, float]:
    """Seconds of an epoch of training, and of a test."""
    clock = Clock(warm_up, timed)
    trainer = Trainer(config, folder, clock)
    try:
        trainer.train()
    except StepLimitError:
        began = time.perf_counter()
        run = config.run
        trainer.task.test(
            trainer.model, TestRun(trainer.source, run.test_batch_size, trainer.accelerator, trainer.dtype)
        )
        return clock.seconds * trainer.stage.steps, time.perf_counter() - began
    finally:
        del trainer
        common.free_memory()
    raise RuntimeError(f"fewer than {warm_up + timed} steps in the whole run")


def epochs_within(seconds: float, epoch: Sequence[float], test: float, test_epochs: int) -> int:
    """As many as all runs (`epoch` seconds for one of each) and the figure can have in that time; 0 where it is too
    short."""

    def needed(epochs: int) -> float:
        return FIGURE_S + epochs * sum(epoch) + len(epoch) * (RESERVE_S + -(-epochs // test_epochs) * test)

    return max((n for n in range(1, MOST_EPOCHS + 1) if needed(n) <= seconds), default=0)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--root", required=True, help="folder that holds ADEChallengeData2016")
    add("--out", type=Path, default=Path("results/ade20k_subset"))
    add("--minutes", type=float, default=5.0, help="for everything, unless --epochs says how long")
    add("--epochs", type=int)
    add("--attentions", nargs="+", default=list(common.ATTENTIONS))
    add("--recipe", default="ade20k_subset")
    add("--backbone", help="folder of a trained classifier to start from; {attention} is filled in; none: from scratch")
    add("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="a key of the recipe")
    add("--timed", type=int, default=TIMED, help="steps that the speed is measured over")
    add("--beside", help="what else used the GPU, for the record")
    add("--scenes", type=int, default=5, help="rows of the figure")
    add("--models", type=Path, help="keep the trained models in this folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a run failed."""
    global BEGAN
    BEGAN = time.perf_counter()
    args = arguments(argv)
    command = shown_command(args, sys.argv[1:] if argv is None else list(argv))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        configs = {kind: configure(args, kind) for kind in args.attentions}
        epochs = args.epochs if args.epochs is not None else choose_epochs(args, configs, folder / "speed")
        ended: dict[str, Path] = {}
        for kind, config in configs.items():
            tell(f"{kind}: {epochs} epochs")
            whole = dataclasses.replace(config, schedule=config.schedule.within(epochs))
            with common.attempt(kind):
                ended[kind] = train(args, kind, whole, folder / kind, command)
            common.free_memory()
        if ended:
            draw(args, ended)
    tell(f"{args.out}: {len(ended)} of {len(args.attentions)} runs")
    return int(len(ended) < len(args.attentions))


def choose_epochs(args: argparse.Namespace, configs: dict[str, TrainConfig], folder: Path) -> int:
    """Of `configs` it leaves those that can be trained at all."""
    speeds = {}
    for kind, config in list(configs.items()):
        tell(f"{kind}: measuring the speed")
        with common.attempt(kind):
            speeds[kind] = measure(config, folder / kind, WARM_UP, args.timed)
            tell(f"  {speeds[kind][0]:.2f} s per epoch, {speeds[kind][1]:.1f} s per test")
        if kind not in speeds:
            del configs[kind]
    require(bool(speeds), "attentions: none of them could be trained")
    left = 60 * args.minutes - (time.perf_counter() - BEGAN)
    test_epochs = min(config.run.test_epochs for config in configs.values())
    # The first test of a process prepares every size of image; the shortest is like those to come.
    test = min(test for _, test in speeds.values())
    epochs = epochs_within(left, [epoch for epoch, _ in speeds.values()], test, test_epochs)
    require(epochs >= 1, f"minutes: {args.minutes:g} are too few for one epoch of each")
    return epochs


def draw(args: argparse.Namespace, ended: Mapping[str, Path]) -> None:
    tell("figure")
    source = build_data(configure(args, next(iter(ended))))
    assert isinstance(source, MaskedData)
    scenes = choose_scenes(source, count=args.scenes)
    models = {attention_label(kind): str(run) for kind, run in ended.items()}
    accuracy = segmentation_figure(models, source, scenes, args.out / "figure.jpg")
    names = [source.test_pairs[scene].image.stem for scene in scenes]
    write_json(args.out / "figure.json", {"scenes": names, "pixel_accuracy": accuracy})


def shown_command(args: argparse.Namespace, given: Sequence[str]) -> str:
    """As it is kept: without the folders of this machine."""
    words, rest = ["python benchmarks/ade20k_subset.py"], iter(given)
    for word in rest:
        if word in ("--out", "--models"):
            next(rest)
        else:
            words.append({args.root: "DATA", args.backbone: shown_backbone(args.backbone)}.get(word, word))
    return " ".join(words)


def shown_backbone(folder: str | None) -> str | None:
    """The last two names of its path; None: from scratch."""
    return None if folder is None else Path(*Path(folder).parts[-2:]).as_posix()


def configure(args: argparse.Namespace, kind: str) -> TrainConfig:
    overrides = {"attention": kind, "data.root": args.root, **dict(args.set)}
    if args.backbone:
        overrides["model.backbone"] = args.backbone.format(attention=kind)
    return load_recipe(args.recipe, overrides)


def train(args: argparse.Namespace, kind: str, config: TrainConfig, work: Path, command: str) -> Path:
    """The folder of the run, whose results are in --out then."""
    recipe = run_name(args.recipe, {"attention": kind})
    summary = run_training(config, work, recipe=recipe, command=command, reporter=Printer())
    root = Path(args.root)
    summary |= {
        "backbone": shown_backbone(config.model.backbone),
        "train_images": len(find_pairs(root, "training")),
        "test_images": len(find_pairs(root, "validation")),
        "crop": config.data.image_size,
        "batch_size": config.run.batch_size,
        "torch": torch.__version__,
        "beside": args.beside,
    }
    target = args.out / f"{config.model.name}_{kind}"
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        # Where the files lay is nobody's business but this machine's.
        text = (work / name).read_text(encoding="utf-8").replace(args.root, "data/ade20k_subset")
        if config.model.backbone is not None:
            text = text.replace(config.model.backbone, str(shown_backbone(config.model.backbone)))
        (target / name).write_text(text, encoding="utf-8")
    write_json(target / "summary.json", summary)
    if args.models is not None:
        shutil.copytree(work / "model", args.models / kind, dirs_exist_ok=True)
    tell(f"{kind}: mIoU {summary['miou']:.2f} %, pixel accuracy {summary['pixel_accuracy']:.2f} %, in {target}")
    return work


if __name__ == "__main__":
    sys.exit(main())
