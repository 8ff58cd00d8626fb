"""Images per second of a data set alone: reading, decoding, augmenting and the copy to the device, without a network.
The first batches of an epoch are not counted, in which worker processes start and a file may be made.

    python benchmarks/loader.py tiny_imagenet --root data/tiny-imagenet-200 --batches 256 --json out.json
    python benchmarks/loader.py oxford_pets_trimaps --root data/oxford-iiit-pet --workers 0 8 --image-size 256
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import lrfdyn  # noqa: F401  its data sets register themselves
from benchmarks import common
from lrfdyn.data import Augmentation, create_data, data_class
from lrfdyn.data.base import DataSource
from lrfdyn.errors import require

WARM_UP = 4  # batches


def augmentation(name: str, full: bool) -> Augmentation:
    """Nothing, or what a strong recipe does to the images of this data set."""
    source = data_class(name)
    if not full:
        return Augmentation()
    if source.task == "segmentation":
        return Augmentation(scale=(0.5, 2.0), flip=0.5, photometric=True)
    if source.framed:
        return Augmentation(flip=0.5, event_operations=("identity", "shear_x", "rotate", "cut_out"), mixup=0.5)
    crop: Any = "resized" if "crop_share" in source.options() else "pad"  # of decoded images, or of resident ones
    return Augmentation(
        crop=crop, flip=0.5, rand_augment_layers=1, erase=0.25, mixup=0.5, cutmix=0.5, label_smoothing=0.1
    )


def measure(source: DataSource, batch: int, steps: int, device: torch.device) -> dict[str, Any]:
    """`steps` batches of one epoch, or as many as it has."""
    steps = min(steps, source.steps_per_epoch(batch) - WARM_UP)
    require(steps > 0, f"batches: {batch} images are too many to measure, of {source.train_images} in all")
    stream = source.train_batches(epoch=0, seed=0, batch_size=batch, device=device)
    common.free_memory()
    for _ in range(WARM_UP):
        next(stream)
    start = common.now()
    for _ in range(steps):
        next(stream)
    seconds = common.now() - start
    return {
        "batch": batch, "steps": steps, "device": device.type, "image_size": source.image_size,
        "images_per_s": batch * steps / seconds, "ms": seconds * 1e3 / steps, "peak_mib": common.peak_mib(),
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("source", help="the name of a data set")
    add("--root", help="the folder of its files")
    add("--options", default="{}", help="its further arguments, as YAML")
    add("--image-size", type=int)
    add("--workers", nargs="+", type=int, help="numbers of processes that decode; by default the data set's own")
    add("--batches", nargs="+", type=int, default=[256])
    add("--steps", type=int, default=64)
    add("--augmentation", nargs="+", default=["none", "full"], choices=["none", "full"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", help="file for the records")
    given = parser.parse_args()
    records = []
    for workers in given.workers or [None]:
        for kind in given.augmentation:
            chosen = {"image_size": given.image_size, "workers": workers}
            options = {**yaml.safe_load(given.options), **{k: v for k, v in chosen.items() if v is not None}}
            augment = augmentation(given.source, kind == "full")
            source = create_data(given.source, given.root, augment, **options)
            for batch in given.batches:
                found = measure(source, batch, given.steps, torch.device(given.device))
                facts = {"benchmark": "loader", "source": given.source, "workers": workers, "augmentation": kind}
                records.append({**facts, "options": options, **found})
                common.write(records, given.json)
    columns = ("source", "workers", "augmentation", "device", "image_size", "batch", "images_per_s", "ms", "peak_mib")
    print(common.table(records, columns))


if __name__ == "__main__":
    main()
