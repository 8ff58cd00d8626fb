"""Write a model as an ONNX, ExecuTorch or NIR file, or as a folder of C, that runs without this package.

The file is run against PyTorch before it is kept. It describes itself: preprocessing, class names, model, attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lrfdyn.commands.shared import MIB, add_attention_options, given_attention_options, print_json
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.c.write import write_c
from lrfdyn.deploy.export.write import export_model, real_images, settle_norms
from lrfdyn.deploy.integer.onnx_graph import write_integer_onnx
from lrfdyn.deploy.integer.program import random_pictures
from lrfdyn.deploy.integer.quantize import quantize
from lrfdyn.deploy.predict import expand_images
from lrfdyn.errors import require, require_integer
from lrfdyn.models import SpikingModel
from lrfdyn.sources import EXPORTED, Source, find_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="folder of a run or of a saved model, .safetensors file, zoo's name, hub repository, NAME[:ATTENTION]",
    )
    add("--format", metavar="onnx|executorch|nir|native", help="what to write; default: by the ending of --out")
    add("--out", required=True, metavar="FILE", help="ends in .onnx, .pte or .nir, or a folder of C, in .c")
    add("--attention", metavar="KIND", help="with the name of a model")
    add("--num-classes", type=int, metavar="N", help="with the name of a model")
    add("--image-size", type=int, metavar="N", help="with the name of a model")
    add("--images", nargs="+", default=[], metavar="IMAGE", help="check on these files, folders or patterns")
    add("--check", type=int, default=8, metavar="N", help="random images in the check, and the most of --images")
    add("--tolerance", type=float, default=1e-3, help="difference of logits without a flipped spike, of the largest")
    add("--max-batch", type=int, default=8, metavar="N", help="executorch: most images at once")
    add("--frames", action="store_true", help="onnx, executorch: take event frames, one for every time step")
    add(
        "--integer",
        action="store_true",
        help="onnx: in integers, as C always is: uint8 images to int32 logits of the same bits everywhere",
    )
    add("--dense", action="store_true", help="nir: convolutions without groups, for readers that know none")
    add("--json", action="store_true", help="print JSON")
    add_attention_options(parser)


def run(args: argparse.Namespace) -> None:
    require_integer("check", args.check, 1)
    require_integer("max-batch", args.max_batch, 1)
    require(args.tolerance > 0, f"tolerance: expected a positive number, got {args.tolerance}")
    images = expand_images(args.images)[: args.check] if args.images else []
    chosen = {key: getattr(args, key) for key in ("attention", "num_classes", "image_size")}
    source = find_source(args.model, **chosen, **given_attention_options(args))
    model, weights = source.load().float(), source.origin if source.trained else "random weights"
    if not source.trained:
        settle_norms(model)
    ends = Path(args.out).suffix
    if args.integer or args.format == "native" or (args.format is None and ends == EXPORTED["native"]):
        export_integer(args, model, weights, images)
        if not args.json:
            print_remarks(source, model.preprocessing is None)
        return
    how = {"images": images, "random_images": args.check, "most_images": args.max_batch, "tolerance": args.tolerance}
    kind = {"format": args.format, "frames": args.frames, "dense": args.dense}
    made = export_model(model, args.out, weights=weights, **kind, **how)
    films = args.frames or (made.format == "nir" and model.framing is not None)
    size, assumed = made.bytes / MIB, model.preprocessing is None and not films
    if args.json:
        facts = {"file": str(made.path), "format": made.format, "weights": weights, "file_mib": size}
        print_json({**facts, "preprocessing_assumed": assumed, **asdict(made.check)})
        return
    print(f"{made.path}: {made.format}, {size:.1f} MiB")
    print(f"verified on {made.check}")
    if model.framing is not None and not films:
        print("the model was trained on recordings: a file that takes them is written with --frames")
    print_remarks(source, assumed)


def print_remarks(source: Source, assumed: bool) -> None:
    """What a reader of the file should know: random weights, preprocessing that nobody stated."""
    if not source.trained:
        print("the weights are random: this file shows size and speed, it does not recognise anything")
    if assumed:
        print("the model does not say how images are preprocessed; the file states the usual: ImageNet's or -1 to 1")


def export_integer(args: argparse.Namespace, model: SpikingModel, weights: str, images: Sequence[Path]) -> None:
    """Writes the model in integers; what was checked are the same bits, so that there is nothing to weigh."""
    kinds = ("onnx", "native")
    require(args.format in (None, *kinds), f"integer: only for ONNX files and C, got --format {args.format}")
    native = Path(args.out).suffix == EXPORTED["native"] if args.format is None else args.format == "native"
    require(not args.frames, "frames: a model in integers takes images, not event frames")
    require(not args.dense, f"dense: only for NIR files, got {args.out}")
    films = "model: it was trained on recordings, which a model in integers does not take"
    require(model.framing is None, films)
    integer = quantize(model, weights=weights)
    preprocessing = Preprocessing.from_dict(integer.facts["preprocessing"], "model")
    real = [torch.from_numpy(preprocessing.levels(image)) for image in real_images(preprocessing, images)]
    shown = torch.stack([*real, *random_pictures(integer, args.check)])
    facts: dict[str, Any] = {"format": kinds[native], "integer": True, "weights": weights, "bit_exact": True}
    if native:
        made = write_c(integer, args.out, shown, verify=True)
        path, size = made.path, made.weight_bytes / MIB
        facts |= {"bit_exact": made.verified or None, "ram_kib": made.memory_bytes / 1024}
        text = f"C, {size:.1f} MiB of weights, {made.memory_bytes / 1024:.0f} KiB of memory"
    else:
        path = write_integer_onnx(integer, args.out, shown)
        size = path.stat().st_size / MIB
        text = f"onnx in integers, {size:.1f} MiB"
    if args.json:
        print_json({"file": str(path), **facts, "file_mib": size, "images": len(shown), "real": len(real)})
        return
    print(f"{path}: {text}")
    if facts["bit_exact"]:
        counts = f"{len(real)} real and {args.check} random images"
        print(f"verified on {counts}: the same bits as the definition in all logits")
    else:
        print("not verified, since there is no C compiler here; `make test` in the folder does it")
