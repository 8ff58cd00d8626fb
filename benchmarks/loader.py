"""Images per second of a data set alone: reading, decoding, augmenting and the copy to the device, without a network.
The first batches of an epoch are not counted, in which worker processes start and a file may be made.

    python benchmarks/loader.py tiny_imagenet --root data/tiny-imagenet-200 --batches 256 --json out.json
    python benchmarks/loader.py oxford_pets_trimaps --root data/oxford-iiit-pet --workers 0 8 --image-size 256

With --forms FOLDER the pictures are also packed as shards and kept as levels, in that folder, and each form is read
with random crops, up to the levels that go to the device. Augmentation after the crop, which a GPU does, is not in it.

    python benchmarks/loader.py oxford_pets --root data/oxford-iiit-pet --forms data/forms --image-size 224 \\
        --workers 0 1 2 --json results/performance/loader_cpu.json
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import lrfdyn  # noqa: F401  its data sets register themselves
from benchmarks import common
from lrfdyn.data import Augmentation, create_data, data_class, pack_shards
from lrfdyn.data.array_file import cached_array
from lrfdyn.data.base import DataSource
from lrfdyn.data.decode import DecodedData, Images, decoded, resized_crop_box
from lrfdyn.data.hashed_random import Keys
from lrfdyn.errors import require

WARM_UP = 4  # batches
SHORT_SIDES = (256, 192)  # of the packed pictures; the first is that of the levels too
CROPS = Augmentation(crop="resized")


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
    stream = source.train_batches(epoch=0, seed=0, batch_size=batch, device=device)
    return timed(stream, source, batch, steps, device)


def timed(stream: Iterator[Any], source: DataSource, batch: int, steps: int, device: torch.device) -> dict[str, Any]:
    steps = min(steps, source.steps_per_epoch(batch) - WARM_UP)
    require(steps > 0, f"batches: {batch} images are too many to measure, of {source.train_images} in all")
    common.free_memory()
    for _ in range(WARM_UP):
        next(stream)
    start, busy = common.now(), time.process_time()
    for _ in range(steps):
        next(stream)
    seconds, busy = common.now() - start, time.process_time() - busy
    return {
        "batch": batch, "steps": steps, "device": device.type, "image_size": source.image_size,
        "images_per_s": batch * steps / seconds, "ms": seconds * 1e3 / steps, "peak_mib": common.peak_mib(),
        "images_per_own_cpu_s": batch * steps / busy,
    }  # fmt: skip


class Rows(Images):
    """Pictures of one size that are kept as levels `[n, side, side, 3]`."""

    def __init__(self, levels: np.ndarray, labels: np.ndarray) -> None:
        self.levels, self.labels = levels, labels

    def read(self, index: int) -> bytes:
        return self.levels[index].tobytes()

    def name(self, index: int) -> str:
        return f"row {index}"


class MappedLevels(DecodedData):
    """Squares of levels in a file that is mapped into memory, with the crops of pictures that are decoded."""

    def _decode(self, encoded: bytes, numbers: np.ndarray | None) -> np.ndarray:
        from PIL import Image

        assert numbers is not None  # training images only
        side = round((len(encoded) / 3) ** 0.5)
        box = resized_crop_box(side, side, numbers, self.augment.crop_scale, self.augment.crop_ratio)
        image = Image.frombytes("RGB", (side, side), encoded)
        return np.asarray(image.resize((self.image_size,) * 2, Image.Resampling.BICUBIC, box=box))


def mapped(source: DecodedData, path: Path, side: int, **options: Any) -> MappedLevels:
    """The training pictures of `source` as squares of `side`."""
    from PIL.Image import Resampling

    images = source.splits["train"]

    def make() -> Iterator[np.ndarray]:
        for i in range(len(images.labels)):
            yield np.asarray(decoded(images.read(i)).resize((side, side), Resampling.BICUBIC))[None]

    rows = cached_array(path, {"shape": [len(images.labels), side, side, 3]}, make, "levels")
    kept = Rows(rows, images.labels)
    return MappedLevels(kept, kept, source.num_classes, CROPS, **options)


def forms(name: str, root: str, folder: Path, **options: Any) -> Iterator[tuple[str, str, Path, DecodedData]]:
    """How the pictures are stored and read, where, and the data set that reads them."""
    whole = partial(create_data, name, root, CROPS)
    source = whole(**options)
    assert isinstance(source, DecodedData)
    yield "one file a picture", "as it is", Path(root), source
    yield "one file a picture, draft", "as it is", Path(root), whole(draft=True, **options)
    for side in SHORT_SIDES:
        out = folder / f"shards_{side}"
        if not out.exists():
            pack_shards(source, out, name=name, short_side=side)
        yield "shards", str(side), out, create_data("webdataset", out, CROPS, **options)
    path = folder / f"levels_{SHORT_SIDES[0]}"
    yield "mapped levels", str(SHORT_SIDES[0]), path, mapped(source, path, SHORT_SIDES[0], **options)


def stored_bytes(source: DecodedData, chosen: int = 500) -> float:
    """Of a training picture, on the average of the first ones."""
    images = source.splits["train"]
    return float(np.mean([len(images.read(i)) for i in range(min(chosen, len(images.labels)))]))


def measure_forms(given: Any) -> list[dict[str, Any]]:
    """Batches of levels, in the order of an epoch, of every form with every number of worker processes."""
    torch.set_num_threads(1)  # rates are those of a core
    records, device = list[dict[str, Any]](), torch.device(given.device)
    given.forms.mkdir(parents=True, exist_ok=True)
    own, size = yaml.safe_load(given.options), given.image_size or 224
    for workers in given.workers or [0]:
        for form, side, _, source in forms(
            given.source, given.root, given.forms, image_size=size, workers=workers, **own
        ):
            for batch in given.batches:
                samples, steps = source.order(0, 0), given.steps + WARM_UP
                chosen = [samples[i * batch : (i + 1) * batch] for i in range(min(steps, len(samples) // batch))]
                keys = [Keys(0, 0, part, np.zeros_like(part)) for part in chosen]
                found = timed(source.load("train", keys, device), source, batch, given.steps, device)
                cores = min(max(1, workers), len(os.sched_getaffinity(0)))
                found |= {"cores": cores, "images_per_s_core": found["images_per_s"] / cores}
                if workers:  # this process only waits
                    found["images_per_own_cpu_s"] = None
                facts = {"benchmark": "loader_forms", "source": given.source, "form": form, "short_side": side}
                records.append({**facts, "workers": workers, "bytes": stored_bytes(source), **found})
                common.write(records, given.json)
    return records


def main() -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("source", help="the name of a data set")
    add("--root", help="the folder of its files")
    add("--forms", type=Path, help="a folder for shards and levels that are made of it, to compare them")
    add("--options", default="{}", help="its further arguments, as YAML")
    add("--image-size", type=int)
    add("--workers", nargs="+", type=int, help="numbers of processes that decode; by default the data set's own")
    add("--batches", nargs="+", type=int, default=[256])
    add("--steps", type=int, default=64)
    add("--augmentation", nargs="+", default=["none", "full"], choices=["none", "full"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", help="file for the records")
    given = parser.parse_args()
    columns: tuple[str, ...] = ("form", "short_side", "workers", "bytes", "images_per_s", "images_per_s_core",
                                "images_per_own_cpu_s")  # fmt: skip
    if given.forms:
        print(common.table(measure_forms(given), columns))
        return
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
