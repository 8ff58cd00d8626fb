"""Say what is in images: class names and scores, from a trained model or an exported file.

IMAGE is a file, a folder or a pattern. Images that cannot be read are named, the others go on; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrfdyn.commands.bar import bar
from lrfdyn.deploy.predict import Predictor, expand_images
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import writable_folder, write_json
from lrfdyn.segmentation.predict import predict_segmentation

TASKS = ("classification", "segmentation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders and patterns such as 'photos/*.jpg'")
    add(
        "--model",
        required=True,
        help="trained model: folder, .safetensors, .onnx or .pte file, or hub repository",
    )
    add("--runtime", metavar="torch|onnx|executorch", help="default: by the ending of --model")
    add("--top", type=int, default=5, help="how many classes to name")
    add("--batch", type=int, default=16, help="images at once")
    add("--device", help="of PyTorch; default: the GPU where there is one")
    add("--json", metavar="FILE|-", help="write JSON to a file, or to the output instead of text")
    add("--task", default="classification", metavar="classification|segmentation", help="what the model does")
    add("--out", type=Path, metavar="FOLDER", help="segmentation: where the maps go")
    add("--flip", action="store_true", help="segmentation: average with the mirrored image")
    add("--window", type=int, metavar="PIXELS", help="segmentation: side of a sliding window")


def run(arguments: argparse.Namespace) -> int:
    if arguments.task not in TASKS:
        raise unknown_name("task", arguments.task, TASKS)
    if arguments.json not in (None, "-"):
        writable_folder(Path(arguments.json).parent, "json")  # told before the work is done
    paths = expand_images(arguments.images)
    found = segment(arguments, paths) if arguments.task == "segmentation" else classify(arguments, paths)
    records, bad = [], 0
    with bar(len(paths) > 1) as shown:
        for record in shown.track(found, total=len(paths), description="images"):
            records.append(record)
            if "error" in record:
                bad += 1
                print(f"lrfdyn predict: cannot read {record['image']} ({record['error']})", file=sys.stderr)
            elif arguments.json != "-":
                best = (f"{p['name']} {p['score']:.1%}" for p in record.get("predictions", ()))
                print(f"{record['image']}: {record.get('overlay') or ', '.join(best)}")
    if arguments.json:
        write_records(arguments, records, bad)
    if bad:
        print(f"lrfdyn predict: {bad} of {len(records)} images could not be read", file=sys.stderr)
    return 1 if bad else 0


def classify(arguments: argparse.Namespace, paths: list[Path]) -> Iterator[dict[str, Any]]:
    for option in ("out", "flip", "window"):
        require(not getattr(arguments, option), f"{option}: only with --task segmentation")
    predictor = Predictor.open(arguments.model, arguments.runtime, arguments.device)
    if predictor.facts.get("preprocessing_assumed"):
        taken = predictor.preprocessing.as_dict()
        print(f"lrfdyn predict: the model does not say how images are preprocessed; taken is {taken}", file=sys.stderr)
    return predictor.predict(paths, arguments.top, arguments.batch)


def segment(arguments: argparse.Namespace, paths: list[Path]) -> Iterator[dict[str, Any]]:
    require(arguments.out is not None, "out: --task segmentation needs the folder that the maps go to")
    require(arguments.runtime in (None, "torch"), f"runtime: segmentation runs in torch, got {arguments.runtime!r}")
    how = {"device": arguments.device, "flip": arguments.flip, "window": arguments.window}
    return predict_segmentation(arguments.model, paths, arguments.out, **how)


def write_records(arguments: argparse.Namespace, records: list[dict[str, Any]], bad: int) -> None:
    result = {"model": arguments.model, "task": arguments.task, "unreadable": bad, "images": records}
    if arguments.json == "-":
        print(json.dumps(result, indent=1))
        return
    try:
        write_json(Path(arguments.json), result)
    except OSError as error:
        raise LrfdynError(f"json: cannot write {arguments.json} ({error.strerror})") from None
