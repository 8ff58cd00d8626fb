"""Trains SDT-V3-S with SSA, LRF-SSA and LRF-Dyn on the ADE20K subset under one recipe and draws them side by side.

The three get the same number of epochs: --epochs, or as many as fit in --minutes by the speed that is measured first
(this also compiles the kernels). Results go to --out: RUN/summary.json, log.jsonl, classes.csv, recipe.yaml, and
figure.png. The page is then made by docs/make_segmentation.py.

    python benchmarks/ade20k_subset.py --root DATA --minutes 5
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ATTENTIONS, free_memory
from lrfdyn.attention import LABELS
from lrfdyn.data.ade20k import find_pairs, find_root
from lrfdyn.errors import require
from lrfdyn.files import write_json
from lrfdyn.segmentation.figure import choose_pairs, segmentation_figure
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.recipes import find_recipe, load_recipe
from lrfdyn.training.reporter import Reporter
from lrfdyn.training.run import run_training
from lrfdyn.training.trainer import Trainer

KEPT = ("log.jsonl", "log.csv", "classes.csv", "recipe.yaml")
WARM_UP, TIMED = 12, 30  # steps of the measurement
RESERVE_S = 20  # of a run, for what is not training: decoding, tests, writing
MOST_EPOCHS = 200


class StepLimitError(Exception):
    pass


class Clock(Reporter):
    """Stops a run after a few steps, with the seconds of one of them."""

    def __init__(self, warm_up: int, timed: int) -> None:
        self.warm_up, self.last, self.seconds = warm_up, warm_up + timed, 0.0

    def step(self, trainer: Trainer) -> None:
        if trainer.done in (self.warm_up, self.last):
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if trainer.done == self.last:
                self.seconds = (now - self.started) / (self.last - self.warm_up)
                raise StepLimitError
            self.started = now


class Printer(Reporter):
    def start(self, trainer: Trainer) -> None:
        how = trainer.graph_obstacle or "captured as a CUDA graph"
        print(f"  {trainer.parameters:,} parameters, {trainer.total_steps:,} steps on {trainer.device} ({how})")

    def epoch(self, record: dict[str, Any]) -> None:
        tested = f", mIoU {record['miou']:.2f} %" if "miou" in record else ""
        print(
            f"  epoch {record['epoch']}: loss {record['train_loss']:.4f}{tested}, {record['wall_s']:.1f} s", flush=True
        )


def seconds_per_epoch(config: TrainConfig, folder: Path, warm_up: int, timed: int) -> float:
    clock = Clock(warm_up, timed)
    trainer = Trainer(config, folder, clock)
    try:
        trainer.train()
    except StepLimitError:
        return clock.seconds * trainer.steps
    finally:
        del trainer
        gc.collect()
        free_memory()
    raise RuntimeError(f"fewer than {warm_up + timed} steps in the whole run")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--root", required=True, help="folder that holds ADEChallengeData2016")
    add("--out", type=Path, default=Path("results/ade20k_subset"))
    add("--minutes", type=float, default=5.0, help="for everything, unless --epochs says how long")
    add("--epochs", type=int)
    add("--attentions", nargs="+", default=list(ATTENTIONS))
    add("--recipe", default="ade20k_subset_sdt_v3_s_{attention}")
    add("--backbone", help="folder of a trained classifier to start from; {attention} is filled in; none: from scratch")
    add("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="a key of the recipe")
    add("--timed", type=int, default=TIMED, help="steps that the speed is measured over")
    add("--scenes", type=int, default=5, help="rows of the figure")
    add("--models", type=Path, help="keep the trained models in this folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    began = time.perf_counter()
    args = arguments(argv)
    given = sys.argv[1:] if argv is None else list(argv)
    command = " ".join(["python benchmarks/ade20k_subset.py", *given]).replace(args.root, "DATA")
    command = command.replace(f" --out {args.out}", "")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        configs = {kind: configure(args, kind) for kind in args.attentions}
        epochs = args.epochs
        if epochs is None:
            speeds = {
                kind: seconds_per_epoch(config, folder / "speed" / kind, WARM_UP, args.timed)
                for kind, config in configs.items()
            }
            print("seconds per epoch:", ", ".join(f"{kind} {value:.2f}" for kind, value in speeds.items()), flush=True)
            left = 60 * args.minutes - (time.perf_counter() - began) - RESERVE_S * len(speeds)
            epochs = min(MOST_EPOCHS, int(left / sum(speeds.values())))
        require(epochs >= 1, f"minutes: {args.minutes:g} are too few for one epoch of each")
        for kind, config in configs.items():
            print(f"{kind}: {epochs} epochs", flush=True)
            whole = dataclasses.replace(config, schedule=config.schedule.within(epochs))
            train(args, kind, whole, folder / kind, command)
        figure = args.out / "figure.png"
        pairs = choose_pairs(Path(args.root), count=args.scenes)
        accuracy = segmentation_figure({LABELS[kind]: str(folder / kind) for kind in args.attentions}, pairs, figure)
        scenes = [pair.image.stem for pair in pairs]
        write_json(args.out / "figure.json", {"scenes": scenes, "pixel_accuracy": accuracy})
    print(f"{args.out}: done in {time.perf_counter() - began:.0f} s")


def configure(args: argparse.Namespace, kind: str) -> TrainConfig:
    overrides = {"data.root": args.root, **dict(args.set)}
    if args.backbone:
        overrides["model.backbone"] = args.backbone.format(attention=kind)
    return load_recipe(find_recipe(args.recipe.format(attention=kind)), overrides)


def train(args: argparse.Namespace, kind: str, config: TrainConfig, work: Path, command: str) -> None:
    recipe = args.recipe.format(attention=kind)
    summary = run_training(config, work, recipe=recipe, command=command, reporter=Printer())
    summary |= {
        "backbone": config.model.backbone,  # None: from scratch
        "train_images": len(find_pairs(find_root(Path(args.root)), "training")),
        "test_images": len(find_pairs(find_root(Path(args.root)), "validation")),
        "crop": config.data.image_size,
        "batch_size": config.run.batch_size,
        "torch": torch.__version__,
    }
    target = args.out / f"{config.model.name}_{kind}"
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        # Where the files lay is nobody's business but this machine's.
        text = (work / name).read_text(encoding="utf-8").replace(args.root, "data/ade20k_subset")
        (target / name).write_text(text, encoding="utf-8")
    write_json(target / "summary.json", summary)
    if args.models is not None:
        shutil.copytree(work / "model", args.models / kind, dirs_exist_ok=True)
    gc.collect()
    free_memory()


if __name__ == "__main__":
    main()
