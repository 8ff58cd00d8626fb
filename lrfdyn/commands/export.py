"""Write a model as an ONNX, ExecuTorch or NIR file that runs without this package.

The file is run against PyTorch before it is kept. It describes itself: preprocessing, class names, model, attention.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lrfdyn.commands.shared import MIB, integer_list, print_json
from lrfdyn.deploy.export.write import export_model, settle_norms
from lrfdyn.deploy.predict import expand_images
from lrfdyn.errors import require, require_integer
from lrfdyn.sources import find_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or of a saved model, .safetensors file, hub repository, or NAME[:ATTENTION]")
    add("--format", metavar="onnx|executorch|nir", help="what to write; default: by the ending of --out")
    add("--out", required=True, metavar="FILE", help="ends in .onnx, .pte or .nir")
    add("--attention", metavar="KIND", help="with the name of a model")
    add("--token", metavar="value|qkv", help="of lrf_dyn, with the name of a model")
    add("--directions", type=int, metavar="1|2", help="of lrf_dyn, with the name of a model")
    add("--dilations", type=integer_list, metavar="D,...", help="of local receptive fields, with the name of a model")
    add("--num-classes", type=int, metavar="N", help="with the name of a model")
    add("--image-size", type=int, metavar="N", help="with the name of a model")
    add("--images", nargs="+", default=[], metavar="IMAGE", help="check on these files, folders or patterns")
    add("--check", type=int, default=8, metavar="N", help="random images in the check, and the most of --images")
    add("--tolerance", type=float, default=1e-3, help="difference of logits without a flipped spike, of the largest")
    add("--max-batch", type=int, default=8, metavar="N", help="executorch: most images at once")
    add("--frames", action="store_true", help="onnx, executorch: take event frames, one for every time step")
    add("--dense", action="store_true", help="nir: convolutions without groups, for readers that know none")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    require_integer("check", args.check, 1)
    require_integer("max-batch", args.max_batch, 1)
    require(args.tolerance > 0, f"tolerance: expected a positive number, got {args.tolerance}")
    images = expand_images(args.images)[: args.check] if args.images else []
    chosen = ("attention", "token", "directions", "dilations", "num_classes", "image_size")
    source = find_source(args.model, **{key: getattr(args, key) for key in chosen})
    model, weights = source.load().float(), source.origin if source.trained else "random weights"
    if not source.trained:
        settle_norms(model)
    how = {"images": images, "random_images": args.check, "most_images": args.max_batch, "tolerance": args.tolerance}
    kind = {"format": args.format, "frames": args.frames, "dense": args.dense}
    made = export_model(model, args.out, weights=weights, **kind, **how)
    size, assumed = made.bytes / MIB, model.preprocessing is None and not args.frames
    if args.json:
        facts = {"file": str(made.path), "format": made.format, "weights": weights, "file_mib": size}
        print_json({**facts, "preprocessing_assumed": assumed, **asdict(made.check)})
        return
    print(f"{made.path}: {made.format}, {size:.1f} MiB")
    print(f"verified on {made.check}")
    if not source.trained:
        print("the weights are random: this file shows size and speed, it does not recognise anything")
    if assumed:
        print("the model does not say how images are preprocessed; the file states the usual: ImageNet's or -1 to 1")
