"""Whether an integer model is the same everywhere: its definition, its C and its ONNX file on all test images.

    python benchmarks/integers.py spikformer_cifar100_lrf_dyn ... --data-root DIR \
        --json results/performance/integers.json

Every image goes through the three, and every logit must be the same integer: `same` counts the images of which it is.
The definition takes much longer than the C; with --every N it sees one image in N, and `defined` says how many those
were. `top1` is the accuracy in integers. The file is written after every part of the images, and a later call with the
same file goes on where it ended.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.data import data_class
from lrfdyn.deploy import NativeModel, quantize, write_c, write_integer_onnx
from lrfdyn.deploy.export.formats import OnnxRunner
from lrfdyn.errors import LrfdynError, require
from lrfdyn.sources import find_source

PART = 100  # images between two writes
RUNTIMES = ("definition", "c", "onnx")


def compare(
    source: str, data: str, root: Path | None, count: int, every: int, json_path: Path | None
) -> dict[str, Any]:
    """The record of one model."""
    model = find_source(source).load()
    integer = quantize(model)
    shown = load_images(data, root, count, PART, torch.device("cpu"))
    require(shown.preprocessing is not None, f"data: {data} has no pictures")
    assert shown.preprocessing is not None
    record = {"model": source, "data": data, "of": count, "every": every}
    record |= dict.fromkeys(("images", "defined", "same", "right"), 0)
    known = [] if json_path is None or not json_path.is_file() else json.loads(json_path.read_text())
    others = [line for line in known if line["model"] != source]
    begun = [line for line in known if all(line.get(key) == record[key] for key in ("model", "data", "of", "every"))]
    record = begun[0] if begun else record
    with tempfile.TemporaryDirectory() as place:
        first = torch.from_numpy(shown.preprocessing.levels(shown.batches[0][:1].numpy()))
        native = NativeModel(write_c(integer, Path(place) / "model.c", first).path)
        onnx = OnnxRunner(write_integer_onnx(integer, Path(place) / "model.onnx", first), threads=1)
        for number, (images, labels) in enumerate(zip(shown.batches, shown.labels, strict=True)):
            if number * PART < record["images"]:
                continue
            levels = shown.preprocessing.levels(images.numpy())
            logits, chosen = native(levels), slice(None, None, every)
            equal = (logits == onnx(levels)).all(1)
            defined = integer(torch.from_numpy(levels[chosen])).numpy()
            equal[chosen] &= (logits[chosen] == defined).all(1)
            record["images"] += len(levels)
            record["defined"] += len(defined)
            record["same"] += int(equal.sum())
            record["right"] += int((logits.argmax(1) == labels.numpy()).sum())
            record["top1"] = 100 * record["right"] / record["images"]
            if json_path is not None:
                common.write([*others, {**record, **common.about(), "runtimes": RUNTIMES}], str(json_path))
    return record


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", help="runs, files of weights, or names of the zoo")
    add("--data", default="cifar100")
    add("--data-root", type=Path)
    add("--images", type=int, help="test images, spread evenly; default: all")
    add("--every", type=int, default=1, metavar="N", help="the definition sees one image in N")
    add("--json", type=Path, help="file for the records")
    options = parser.parse_args(argv)
    count = options.images or data_class(options.data).test_images
    torch.set_num_threads(1)
    for source in options.models:
        record = compare(source, options.data, options.data_root, count, options.every, options.json)
        print(
            f"{source}: {record['same']} of {record['images']} images the same, top-1 {record['top1']:.2f} %",
            flush=True,
        )
        if record["same"] < record["images"]:
            raise LrfdynError(f"same: {source} gives other integers elsewhere")


if __name__ == "__main__":
    main()
