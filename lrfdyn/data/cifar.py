"""CIFAR-10 and CIFAR-100 from their official python files, or from an `.npz` file of the same images."""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.resident import ResidentData
from lrfdyn.errors import LrfdynError, require

SIZE = 32


class Cifar(ResidentData):
    """`root` holds the official folder, or is it, or holds `cifar10.npz` / `cifar100.npz` with `x_train`, `y_train`,
    `x_test`, `y_test` (images HWC, uint8)."""

    image_size, in_channels, train_images = SIZE, 3, 50_000
    folder: ClassVar[str]
    archive: ClassVar[str]
    labels: ClassVar[bytes]  # entries of the official files
    names: ClassVar[bytes]
    files: ClassVar[dict[str, dict[str, str]]]  # of train, test and meta, with their md5

    def __init__(self, root: Path, augment: Augmentation) -> None:
        archive = root / self.archive
        folder = root if root.name == self.folder else root / self.folder
        if folder.is_dir():
            train, test = (self._read_batches(folder, split) for split in ("train", "test"))
            ((names,),) = _read_entries(folder, self.files["meta"], self.names)
            self.class_names = [name.decode() for name in names]
        elif archive.is_file():
            train, test = _read_archive(archive)
        else:
            raise LrfdynError(f"root: {root} holds neither {self.folder}/ nor {archive.name}")
        for images, labels in (train, test):
            _check(images, labels, self.num_classes, folder if folder.is_dir() else archive)
        super().__init__(train, test, augment)

    def _read_batches(self, folder: Path, split: str) -> tuple[Tensor, Tensor]:
        entries = _read_entries(folder, self.files[split], b"data", self.labels)
        images, labels = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        require(images.ndim == 2 and images.shape[1] == 3 * SIZE * SIZE, f"root: images in {folder} have another size")
        return torch.from_numpy(images.reshape(-1, 3, SIZE, SIZE)), torch.from_numpy(labels.astype(np.int64))


@register_data("cifar10")
class Cifar10(Cifar):
    num_classes, mean, deviation = 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    folder, archive, labels, names = "cifar-10-batches-py", "cifar10.npz", b"labels", b"label_names"
    files: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
        "meta": {"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
    }


@register_data("cifar100")
class Cifar100(Cifar):
    files: ClassVar[dict[str, dict[str, str]]] = {
        "train": {"train": "16019d7e3df5f24257cddd939b257f8d"},
        "test": {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        "meta": {"meta": "7973b15100ade9c7d40fb424638fde48"},
    }
    folder, archive, labels, names = "cifar-100-python", "cifar100.npz", b"fine_labels", b"fine_label_names"
    num_classes, mean, deviation = 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


class _Unpickler(pickle.Unpickler):
    """Arrays and plain values only: no other function is ever called."""

    allowed: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # `_reconstruct`, which lies in different modules in different versions of numpy
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self.allowed[module, name]


def _read_entries(folder: Path, files: dict[str, str], *keys: bytes) -> Iterator[list[Any]]:
    """The entries `keys` of every file, which must be the official one."""
    for path, md5 in ((folder / name, md5) for name, md5 in files.items()):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LrfdynError(f"root: cannot read {path} ({error.strerror})") from None
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        require(found == md5, f"root: {path} is not the official file (md5 {found}, expected {md5})")
        try:
            content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        except Exception as error:  # a pickle can fail in any way
            raise LrfdynError(f"root: cannot read {path} ({error})") from None
        require(isinstance(content, dict), f"root: {path} does not hold a dictionary")
        for key in keys:
            require(key in content, f"root: {path} has no entry {key.decode()!r}")
        yield [content[key] for key in keys]


def _read_archive(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            x_train, y_train, x_test, y_test = (file[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LrfdynError(f"root: cannot read {path} ({error})") from None
    for images in (x_train, x_test):
        require(
            images.dtype == np.uint8 and images.shape[1:] == (SIZE, SIZE, 3),
            f"root: expected uint8 images of {SIZE}x{SIZE}x3 in {path}, got {images.dtype} {images.shape[1:]}",
        )

    def split(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return torch.from_numpy(channels_first), torch.from_numpy(labels.astype(np.int64).reshape(-1))

    return split(x_train, y_train), split(x_test, y_test)


def _check(images: Tensor, labels: Tensor, classes: int, path: Path) -> None:
    require(len(labels) > 0, f"root: a split of {path} has no images")
    require(len(images) == len(labels), f"root: {path} has {len(images)} images but {len(labels)} labels")
    low, high = int(labels.min()), int(labels.max())
    require(low >= 0 and high < classes, f"root: labels in {path} run from {low} to {high}, expected 0..{classes - 1}")
