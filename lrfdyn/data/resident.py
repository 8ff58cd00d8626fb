"""Data sets that fit in the device's memory, where batches are gathered: scikit-learn's digits, CIFAR-10 and 100."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import DataSource, last_of_classes, register_data
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import to_device
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import plain_file

# The only functions that a file may call.
UNPICKLED = ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "_codecs.encode")


class ResidentData(DataSource):
    """`train` and `test` are images `[n, C, H, W]` with levels 0..255 of any dtype and labels `[n]`. Subclasses say
    `num_classes`, `mean` and `deviation`."""

    images_at_once = 1024

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], augment: Augmentation) -> None:
        super().__init__(None, augment)
        require(augment.crop != "resized", "crop: expected pad or none for images that are not decoded, got resized")
        self.splits = {"train": train, "test": test}
        self._resident: dict[tuple[str, torch.device], list[Tensor]] = {}
        self.train_images, self.test_images = len(train[1]), len(test[1])
        self.in_channels, self.image_size = train[0].shape[1], train[0].shape[2]

    @checked
    def hold_out(self, images: int) -> None:
        pixels, labels = self.splits["train"]
        held = torch.from_numpy(last_of_classes(labels.cpu().numpy(), self.num_classes, images))
        self.splits = {"train": (pixels[~held], labels[~held]), "test": (pixels[held], labels[held])}
        self._resident = {}
        self.train_images, self.test_images = len(labels) - images, images

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        if (split, device) not in self._resident:
            self._resident[split, device] = [tensor.to(device) for tensor in self.splits[split]]
        images, labels = self._resident[split, device]
        for where in (to_device(keys.samples, device) for keys in steps):
            yield images.index_select(0, where), labels.index_select(0, where)

    def picture(self, split: str, index: int) -> tuple[np.ndarray, int]:
        images, labels = self.splits[split]
        return images[index].permute(1, 2, 0).float().round().clamp(0, 255).byte().cpu().numpy(), int(labels[index])


@register_data("digits")
class Digits(ResidentData):
    """scikit-learn's 1,797 handwritten digits, of which 360 are held out, drawn once with a fixed seed. Grey values
    0..16 become whole levels 0..255, to be augmented like any others."""

    needs_root = False
    num_classes, image_size, in_channels, train_images, test_images = 10, 8, 1, 1437, 360
    class_names = tuple("0123456789")

    def __init__(self, root: Path | None, augment: Augmentation) -> None:
        spec = find_spec("sklearn")
        if spec is None or spec.origin is None:
            raise LrfdynError("data: digits needs scikit-learn; pip install 'lrfdyn[digits]'")
        # The file that its load_digits reads; to import it takes longer than to read the file a hundred times.
        file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        rows = torch.from_numpy(np.loadtxt(file, delimiter=","))
        levels = (rows[:, :64].reshape(-1, 1, 8, 8).float() * (255 / 16)).round()
        labels = rows[:, 64].long()
        order = torch.randperm(len(levels), generator=torch.Generator().manual_seed(0))
        test, train = ((levels[part], labels[part]) for part in (order[:360], order[360:]))
        self.mean, self.deviation = (float(train[0].mean()) / 255,), (float(train[0].std()) / 255,)
        super().__init__(train, test, augment)


class Cifar(ResidentData):
    """`root` holds the official folder, or is it, or holds `cifar10.npz` / `cifar100.npz` with `x_train`, `y_train`,
    `x_test`, `y_test` (images HWC, uint8)."""

    image_size, in_channels, train_images, test_images = 32, 3, 50_000, 10_000
    folder: ClassVar[str]
    labels: ClassVar[bytes]  # entries of the official files
    names: ClassVar[bytes]
    files: ClassVar[dict[str, dict[str, str]]]  # of train, test and meta, with their md5

    def __init__(self, root: Path, augment: Augmentation) -> None:
        archive = root / f"cifar{self.num_classes}.npz"
        folder = root if root.name == self.folder else root / self.folder
        path, most = folder if folder.is_dir() else archive, self.num_classes - 1
        require(path.exists(), f"root: {root} holds neither {self.folder}/ nor {archive.name}")
        read = self._read_official if path is folder else _read_archive
        train, test = read(path, "train"), read(path, "test")
        if path is folder:
            ((names,),) = _read_entries(folder, self.files["meta"], self.names)
            self.class_names = [name.decode() for name in names]
        for images, labels in (train, test):
            require(len(labels) > 0, f"root: a split of {path} has no images")
            require(len(images) == len(labels), f"root: {path} has {len(images)} images but {len(labels)} labels")
            low, high = int(labels.min()), int(labels.max())
            require(0 <= low <= high <= most, f"root: labels in {path} run from {low} to {high}, expected 0..{most}")
        super().__init__(train, test, augment)

    def _read_official(self, folder: Path, split: str) -> tuple[Tensor, Tensor]:
        entries = _read_entries(folder, self.files[split], b"data", self.labels)
        images, labels = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


@register_data("cifar10")
class Cifar10(Cifar):
    num_classes, mean, deviation = 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    folder, labels, names = "cifar-10-batches-py", b"labels", b"label_names"
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
    folder, labels, names = "cifar-100-python", b"fine_labels", b"fine_label_names"
    num_classes, mean, deviation = 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}".replace("numpy._core.", "numpy.core.") not in UNPICKLED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _read_entries(folder: Path, files: dict[str, str], *keys: bytes) -> Iterator[list[Any]]:
    """The entries `keys` of every file, which must be the official one."""
    for path, md5 in ((folder / name, md5) for name, md5 in files.items()):
        try:
            data = plain_file(path).read_bytes()
        except OSError as error:
            raise LrfdynError(f"root: cannot read {path} ({error.strerror})") from None
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        require(found == md5, f"root: {path} is not the official file (md5 {found}, expected {md5})")
        try:
            content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
            entries = [content[key] for key in keys]
        except Exception as error:  # a pickle can fail in any way
            raise LrfdynError(f"root: cannot read {path} ({error})") from None
        yield entries


def _read_archive(path: Path, split: str) -> tuple[Tensor, Tensor]:
    try:
        with np.load(plain_file(path), allow_pickle=False) as file:
            images, labels = file[f"x_{split}"], file[f"y_{split}"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LrfdynError(f"root: cannot read {path} ({error})") from None
    found = f"{images.dtype} {images.shape[1:]}"
    require(found == "uint8 (32, 32, 3)", f"root: expected uint8 images of 32x32x3 in {path}, got {found}")
    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return torch.from_numpy(channels_first), torch.from_numpy(labels.astype(np.int64).reshape(-1))
