"""Write a model as an ONNX or ExecuTorch file that runs without this package.

The file is run against PyTorch before it is kept. It describes itself: preprocessing, class names, model, attention.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from lrfdyn.deploy.export.write import export_model, settle_norms
from lrfdyn.deploy.predict import expand_images
from lrfdyn.errors import require
from lrfdyn.sources import find_source

MEGA = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or of a saved model, .safetensors file, hub repository, or NAME[:ATTENTION]")
    add("--format", metavar="onnx|executorch", help="what to write; default: by the ending of --out")
    add("--out", required=True, metavar="FILE", help="ends in .onnx or .pte")
    add("--attention", metavar="KIND", help="with the name of a model")
    add("--token", metavar="value|qkv", help="of lrf_dyn, with the name of a model")
    add("--images", nargs="+", default=[], metavar="IMAGE", help="check on these files, folders or patterns")
    add("--check", type=int, default=8, metavar="N", help="random images in the check, and the most of --images")
    add("--tolerance", type=float, default=1e-3, help="difference of logits without a flipped spike, of the largest")
    add("--max-batch", type=int, default=8, metavar="N", help="executorch: most images at once")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    require(arguments.check >= 1, f"check: expected an integer >= 1, got {arguments.check}")
    require(arguments.max_batch >= 1, f"max-batch: expected an integer >= 1, got {arguments.max_batch}")
    require(arguments.tolerance > 0, f"tolerance: expected a positive number, got {arguments.tolerance}")
    images = expand_images(arguments.images)[: arguments.check] if arguments.images else []
    options = {key: getattr(arguments, key) for key in ("attention", "token") if getattr(arguments, key) is not None}
    source = find_source(arguments.model, **options)
    model, weights = source.load().float(), source.origin if source.trained else "random weights"
    if not source.trained:
        settle_norms(model)
    made = export_model(
        model,
        arguments.out,
        format=arguments.format,
        weights=weights,
        images=images,
        random_images=arguments.check,
        most_images=arguments.max_batch,
        tolerance=arguments.tolerance,
    )
    facts: dict[str, Any] = {
        "file": str(made.path),
        "format": made.format,
        "weights": weights,
        "file_mib": made.bytes / MEGA,
        "preprocessing_assumed": model.preprocessing is None,
        **asdict(made.check),
    }
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    print(f"{made.path}: {made.format}, {made.bytes / MEGA:.1f} MiB")
    print(f"verified on {made.check}")
    if not source.trained:
        print("the weights are random: this file shows size and speed, it does not recognise anything")
    if model.preprocessing is None:
        print("the model does not say how images are preprocessed; the file states the usual: ImageNet's or -1 to 1")
