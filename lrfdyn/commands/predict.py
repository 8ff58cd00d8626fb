"""Say what is in images: class names and scores, from a trained model or an exported file.

IMAGE is a file, a folder or a pattern. Images that cannot be read are named, the others go on; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrfdyn.commands.shared import bar, print_json
from lrfdyn.deploy.predict import Predictor, expand_images
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import writable_folder, write_json
from lrfdyn.segmentation.predict import predict_segmentation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders and patterns such as 'photos/*.jpg'")
    add(
        "--model",
        required=True,
        help="folder of a model or of C, .safetensors, .onnx, .pte or .nir file, or hub repository",
    )
    add("--runtime", metavar="torch|onnx|executorch|nir|native", help="default: by the ending of --model")
    add("--top", type=int, default=5, help="how many classes to name")
    add("--batch", type=int, default=16, help="images at once")
    add("--exit", type=float, metavar="0..1", help="torch: stop at the time step at which this confidence is passed")
    add("--threads", type=int, default=0, help="onnx: 0 takes all that there are; native: 0 takes one")
    add("--device", help="of PyTorch; default: the GPU where there is one")
    add("--json", metavar="FILE|-", help="write JSON to a file, or to the output instead of text")
    add("--task", default="classification", metavar="classification|segmentation", help="what the model does")
    add("--out", type=Path, metavar="FOLDER", help="segmentation: where the maps go")
    add("--flip", action="store_true", help="segmentation: average with the mirrored image")
    add("--window", type=int, metavar="PIXELS", help="segmentation: side of a sliding window")


def run(args: argparse.Namespace) -> int:
    if args.task not in TASKS:
        raise unknown_name("task", args.task, TASKS)
    if args.json not in (None, "-"):
        writable_folder(Path(args.json).parent, "json")  # told before the work is done
    paths = expand_images(args.images)
    found = TASKS[args.task](args, paths)
    records, bad = [], 0
    with bar(len(paths) > 1) as shown:
        for record in shown.track(found, total=len(paths), description="images"):
            records.append(record)
            if "error" in record:
                bad += 1
                print(f"lrfdyn predict: cannot read {record['image']} ({record['error']})", file=sys.stderr)
            elif args.json != "-":
                best = (f"{p['name']} {p['score']:.1%}" for p in record.get("predictions", ()))
                steps = f" (time step {record['steps']})" if "steps" in record else ""
                print(f"{record['image']}: {record.get('overlay') or ', '.join(best)}{steps}")
    result = {"model": args.model, "task": args.task, "unreadable": bad, "images": records}
    if args.json == "-":
        print_json(result)
    elif args.json:
        try:
            write_json(Path(args.json), result)
        except OSError as error:
            raise LrfdynError(f"json: cannot write {args.json} ({error.strerror})") from None
    if bad:
        print(f"lrfdyn predict: {bad} of {len(records)} images could not be read", file=sys.stderr)
    return 1 if bad else 0


def classify(args: argparse.Namespace, paths: list[Path]) -> Iterator[dict[str, Any]]:
    for option in ("out", "flip", "window"):
        require(not getattr(args, option), f"{option}: only with --task segmentation")
    sure = args.exit is None or 0 <= args.exit <= 1
    require(sure, f"exit: expected a number from 0 to 1, got {args.exit}")
    predictor = Predictor.open(args.model, args.runtime, args.device, args.threads, args.exit)
    if predictor.facts.get("preprocessing_assumed"):
        taken = predictor.preprocessing.as_dict()
        print(f"lrfdyn predict: the model does not say how images are preprocessed; taken is {taken}", file=sys.stderr)
    return predictor.predict(paths, args.top, args.batch)


def segment(args: argparse.Namespace, paths: list[Path]) -> Iterator[dict[str, Any]]:
    require(args.out is not None, "out: --task segmentation needs the folder that the maps go to")
    require(args.runtime in (None, "torch"), f"runtime: segmentation runs in torch, got {args.runtime!r}")
    require(args.exit is None, "exit: only with --task classification")
    require(not args.threads, "threads: only with --task classification")
    how = {"device": args.device, "flip": args.flip, "window": args.window}
    return predict_segmentation(args.model, paths, args.out, **how)


TASKS = {"classification": classify, "segmentation": segment}
