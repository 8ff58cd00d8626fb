"""Images per second of the CIFAR pipeline: random 32x32 images resident on the device, gathered and augmented there.
Training must never wait for it: 15,000 images/s is what the fastest network asks for.

    python benchmarks/augment.py --json out.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.data import Augmentation
from lrfdyn.data.resident import Cifar100, ResidentData

SETTINGS = {
    "none": Augmentation(),
    "crop, flip": Augmentation(crop="pad", flip=0.5),
    "+ RandAugment": Augmentation(crop="pad", flip=0.5, rand_augment_layers=1),
    "+ erasing": Augmentation(crop="pad", flip=0.5, rand_augment_layers=1, erase=0.25),
    "+ mixup, cutmix": Augmentation(
        crop="pad", flip=0.5, rand_augment_layers=1, erase=0.25, mixup=0.8, cutmix=1.0, label_smoothing=0.1
    ),
    "+ 2 layers, always": Augmentation(
        crop="pad", flip=0.5, rand_augment_layers=2, rand_augment_probability=1.0, erase=0.25, mixup=0.8, cutmix=1.0,
        label_smoothing=0.1, repeats=3,
    ),
}  # fmt: skip


class RandomImages(ResidentData):
    """Noise of CIFAR-100's shape."""

    num_classes, mean, deviation = Cifar100.num_classes, Cifar100.mean, Cifar100.deviation


def source(augment: Augmentation, images: int) -> ResidentData:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(100, (images,), generator=generator)
    return RandomImages((levels, labels), (levels, labels), augment)


def measure(name: str, batch: int, steps: int, device: torch.device, images: int) -> dict[str, Any]:
    data = source(SETTINGS[name], images)

    def batches(epoch: int) -> Any:
        while True:
            yield from data.train_batches(epoch=epoch, seed=0, batch_size=batch, device=device)
            epoch += 1

    stream = batches(0)
    common.free_memory()
    for _ in range(8):  # whole groups of steps that are augmented together
        next(stream)
    start = common.now()
    for _ in range(steps):
        next(stream)
    host = time.perf_counter() - start  # the host is free for the training step after this
    seconds = common.now() - start
    return {
        "benchmark": "augment", "augmentation": name, "device": device.type, "batch": batch, "images": images,
        "images_per_s": batch * steps / seconds, "ms": seconds * 1e3 / steps, "host_ms": host * 1e3 / steps,
        "peak_mib": common.peak_mib(),
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 256, 1024])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--json")
    options = parser.parse_args()
    records = []
    for batch in options.batches:
        for name in options.settings:
            records.append(measure(name, batch, options.steps, torch.device(options.device), options.images))
            common.write(records, options.json)
    print(common.table(records, ("augmentation", "device", "batch", "images_per_s", "ms", "host_ms", "peak_mib")))


if __name__ == "__main__":
    main()
