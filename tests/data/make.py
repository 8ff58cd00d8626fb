"""Small data sets in the official forms, made of random pixels."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn.data import Augmentation, Batch, data_class

EVERYTHING = Augmentation(
    crop="pad", flip=0.5, rand_augment_layers=2, erase=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1
)  # fmt: skip


def keys(count: int, seed: int = 0, epoch: int = 0):
    from lrfdyn.data.hashed_random import Keys

    return Keys(seed, epoch, np.arange(count), np.zeros(count, np.int64))


def levels(*shape: int, seed: int = 0) -> torch.Tensor:
    """Blobs rather than noise, so that neighbouring pixels are alike."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(shape[0], shape[1], shape[2] // 4, shape[3] // 4, generator=generator)
    return (torch.nn.functional.interpolate(small, size=shape[2:], mode="bicubic") * 255).clamp(0, 255).byte()


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch, train: int = 40, test: int = 13) -> Path:
    """The official files with other images; the checksums are replaced by theirs."""
    variant = data_class(name)
    folder = root / variant.folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)

    def write(files: dict[str, str], count: int) -> dict[str, str]:
        sums = {}
        for file in files:
            part = count // len(files)
            labels = generator.integers(0, variant.num_classes, part).tolist()
            images = generator.integers(0, 256, (part, 3072), dtype=np.uint8)
            sums[file] = dump(folder / file, {b"data": images, variant.labels: labels})
        return sums

    names = [f"class {i}".encode() for i in range(variant.num_classes)]
    meta = {file: dump(folder / file, {variant.names: names}) for file in variant.files["meta"]}
    made = {"train": write(variant.files["train"], train), "test": write(variant.files["test"], test), "meta": meta}
    monkeypatch.setattr(variant, "files", made)
    return folder


def dump(path: Path, content: object) -> str:
    data = pickle.dumps(content, protocol=2)
    path.write_bytes(data)
    return hashlib.md5(data).hexdigest()


def jpeg(seed: int, size: tuple[int, int] = (40, 32)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = levels(1, 3, size[1], size[0], seed=seed)[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_folder(root: Path, classes: int = 3, train: int = 8, val: int = 3) -> Path:
    for split, count, first in (("train", train, 0), ("val", val, 1000)):
        for c in range(classes):
            folder = root / split / f"n{c:08d}"
            folder.mkdir(parents=True)
            for i in range(count):
                seed = first + c * count + i
                (folder / f"{folder.name}_{i}.JPEG").write_bytes(jpeg(seed, (30 + seed % 5, 28 + seed % 7)))
    return root


def write_shards(root: Path, shards: int = 3, train: int = 8, val: int = 5) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for i in range(shards):
        write_tar(root / f"train-{i}.tar", [(f"{i}_{j}", jpeg(i * train + j), (i + j) % 4) for j in range(train)])
    write_tar(root / "val-0.tar", [(f"v{j}", jpeg(500 + j), j % 4) for j in range(val)])
    return root


def write_tar(path: Path, samples: list[tuple[str, bytes, int]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, image, label in samples:
            for ending, data in (("jpg", image), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{key}.{ending}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.count == b.count
        for x, y in ((a.images, b.images), (a.labels, b.labels), (a.targets, b.targets)):
            assert torch.equal(x, y)


def joined(parts: list[list[Batch]]) -> list[Batch]:
    """The batches of several ranks put together, step by step."""
    return [
        Batch(
            torch.cat([b.images for b in step], -4),  # of frames [T, B, C, H, W] too
            torch.cat([b.labels for b in step]),
            torch.cat([b.targets for b in step]),
            sum(b.count for b in step),
        )
        for step in zip(*parts, strict=True)
    ]


def write_tiny_imagenet(root: Path, classes: int = 3, train: int = 4, val: int = 6, side: int = 64) -> Path:
    """The official layout; the classes are listed in another order than their folders have."""
    wnids = [f"n{c:08d}" for c in range(classes)]
    for c, wnid in enumerate(wnids):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for i in range(train):
            (folder / f"{wnid}_{i}.JPEG").write_bytes(jpeg(c * train + i, (side, side)))
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(val):
        (root / "val" / "images" / f"val_{i}.JPEG").write_bytes(jpeg(500 + i, (side, side)))
        lines.append(f"val_{i}.JPEG\t{wnids[(2 * i + 1) % classes]}\t0\t0\t63\t63\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("\n".join(reversed(wnids)) + "\n")
    words = [f"{wnid}\tname {c}, other name {c}\n" for c, wnid in enumerate(wnids)]
    (root / "words.txt").write_text("n99999999\tentity\n" + "".join(words))
    return root


def write_pets(root: Path, breeds: int = 37, train: int = 2, test: int = 1, size: tuple[int, int] = (40, 32)) -> Path:
    """The official layout, with a trimap of every image: a pet in the middle, a border of two pixels."""
    from PIL import Image

    for folder in ("images", "annotations/trimaps"):
        (root / folder).mkdir(parents=True)
    lines: dict[str, list[str]] = {"trainval": ["# name, class, species, breed"], "test": []}
    for label in range(breeds):
        for i in range(train + test):
            name = f"{'Cat' if label < 12 else 'dog'}_breed_{label}_{i}"
            (root / "images" / f"{name}.jpg").write_bytes(jpeg(label * 10 + i, size))
            trimap = np.full((size[1], size[0]), 2, np.uint8)
            trimap[6:-6, 6:-6], trimap[8:-8, 8 + i : -8] = 3, 1
            Image.fromarray(trimap).save(root / "annotations" / "trimaps" / f"{name}.png")
            lines["trainval" if i < train else "test"].append(f"{name} {label + 1} {1 + (label > 11)} 1")
    for split, listed in lines.items():
        (root / "annotations" / f"{split}.txt").write_text("\n".join(listed) + "\n")
    return root
