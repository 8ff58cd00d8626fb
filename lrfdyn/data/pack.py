"""Any data set of pictures as WebDataset shards, scaled once: `<key>.jpg` with `<key>.cls`, the class, or with
`<key>.png`, a mask of which 0 is no class and 1 the first one."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from lrfdyn.checks import checked
from lrfdyn.data.base import DataSource
from lrfdyn.data.loading import load_parts
from lrfdyn.data.manifest import MANIFEST, Manifest, Shard, read_manifest
from lrfdyn.data.preprocess import require_pillow, scaled_size
from lrfdyn.errors import LrfdynError, explain, require, require_integer
from lrfdyn.files import read_json, sole_user, write_atomic, write_json
from lrfdyn.version import __version__

FILES = {"train": "train", "test": "val"}  # how the names of a split's shards begin
TOGETHER = 32  # pictures that a process encodes at a time
PROGRESS = "packing.json"  # of a pack that is not whole yet
MIB = 2**20
Sample = dict[str, bytes]  # by ending


def encode(picture: np.ndarray, target: int | np.ndarray, short_side: int | None, quality: int) -> Sample:
    """A sample's files. A picture that is larger is scaled to the short side, bicubically with antialiasing, its mask
    by nearest neighbours. Colours keep the full resolution."""
    from PIL.Image import Resampling, fromarray

    def file(image: Any, form: str, filter: Resampling, **how: Any) -> bytes:
        if short_side is not None and min(image.size) > short_side:
            image = image.resize(scaled_size(image.size, short_side / min(image.size)), filter)
        buffer = io.BytesIO()
        image.save(buffer, form, **how)
        return buffer.getvalue()

    image = fromarray(np.ascontiguousarray(picture if picture.shape[2] == 3 else picture[..., 0])).convert("RGB")
    encoded = file(image, "JPEG", Resampling.BICUBIC, quality=quality, subsampling=0)
    if not isinstance(target, np.ndarray):
        return {"jpg": encoded, "cls": str(target).encode()}
    stored = fromarray((target + np.uint8(1)).astype(np.uint8))  # 255, no class, wraps to 0
    return {"jpg": encoded, "png": file(stored, "PNG", Resampling.NEAREST)}


def _encode_some(
    source: DataSource, split: str, first: int, short_side: int | None, quality: int, numbers: np.ndarray
) -> list[Sample]:
    return [encode(*source.picture(split, first + int(i)), short_side, quality) for i in numbers]


def tar_bytes(samples: Sequence[Sample], first: int) -> bytes:
    """A tar file of samples, whose keys are their numbers from `first` on; the same bytes whenever it is made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, sample in enumerate(samples, first):
            for ending, data in sample.items():
                entry = tarfile.TarInfo(f"{key:08d}.{ending}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def grouped(samples: Iterator[Sample], most: int) -> Iterator[list[Sample]]:
    """Samples in turn, as many together as a tar file of `most` bytes holds; one that is larger is alone."""
    block, record, end = tarfile.BLOCKSIZE, tarfile.RECORDSIZE, 2 * tarfile.BLOCKSIZE
    group, used = list[Sample](), 0
    for sample in samples:
        size = sum(block + -(-len(data) // block) * block for data in sample.values())
        if group and -(-(used + size + end) // record) * record > most:
            yield group
            group, used = [], 0
        group.append(sample)
        used += size
    if group:
        yield group


@checked
def pack_shards(
    source: DataSource,
    out: Path,
    *,
    name: str,
    root: Path | None = None,
    options: Mapping[str, Any] | None = None,
    short_side: int | None = None,
    quality: int = 95,
    shard_mib: int = 256,
    workers: int | None = None,
    restart: bool = False,
    say: Callable[[Shard], object] = lambda shard: None,
) -> Manifest:
    """Writes the pictures of both splits, in their order, to shards of at most `shard_mib` MiB in the new folder `out`,
    with a manifest. `name`, `root` and `options` are those that the source was created with. `workers` processes encode
    (None: one a core), which changes nothing but the speed. `say` hears of every shard.

    Shards are written to `.OUT.part` beside `out`, which becomes `out` in one step when all are there. What was
    interrupted goes on behind its last whole shard, or with `restart` begins anew.

    ```python
    source = create_data("oxford_pets", "data/pets", Augmentation())
    pack_shards(source, Path("data/pets_192"), name="oxford_pets", short_side=192)
    ```
    """
    require_pillow("data: encoding images")
    require_integer("short_side", 1 if short_side is None else short_side, 1, most=2**14)
    require_integer("quality", quality, 1, most=100)
    require_integer("shard_mib", shard_mib, 1, most=4096)
    require_integer("workers", 0 if workers is None else workers, 0)
    facts = _facts(source, name, short_side, quality)
    out = out.absolute()
    _require_new(out)
    part = out.with_name(f".{out.name}.part")
    with sole_user(part):
        own = sorted((key, value) for key, value in (options or {}).items() if key not in ("workers", "cache"))
        wanted = {**facts, "root": str(root and root.absolute()), "options": repr(own), "shard_mib": shard_mib}
        shards = _whole_shards(part, wanted, restart)
        for split in FILES:
            source.picture(split, 0)  # what a source makes once is made here: workers can start none of their own
            first = sum(shard.images for shard in shards if shard.split == split)
            load = partial(_encode_some, source, split, first, short_side, quality)
            parts = load_parts(load, facts["images"][split] - first, TOGETHER, workers)
            for group in grouped((sample for samples in parts for sample in samples), shard_mib * MIB):
                shards.append(_write(part, split, group, shards))
                write_json(part / PROGRESS, {"facts": wanted, "shards": [vars(shard) for shard in shards]})
                say(shards[-1])
        manifest = Manifest(**facts, shards=shards)
        write_json(part / MANIFEST, manifest.as_dict())
        _put_in_place(part, out)
    return manifest


def _facts(source: DataSource, name: str, short_side: int | None, quality: int) -> dict[str, Any]:
    import PIL

    colours = 3 // len(source.mean)  # grey pictures are stored in colour
    return {
        "source": name,
        "task": source.task,
        "classes": source.num_classes,
        "class_names": None if source.class_names is None else list(source.class_names),
        "mean": list(source.mean) * colours,
        "deviation": list(source.deviation) * colours,
        "short_side": short_side,
        "quality": quality,
        "made_by": {"lrfdyn": __version__, "pillow": PIL.__version__},
        "images": {"train": source.train_images, "test": source.test_images},
    }


def _require_new(out: Path) -> None:
    require(not out.exists() or out.is_dir(), f"out: expected a new folder, got the file {out}")
    if out.is_dir() and any(out.iterdir()):
        made = read_manifest(out)
        words = "" if made is None else f"; it holds the whole pack of {made.source}"
        raise LrfdynError(f"out: expected a new or empty folder, got {out}{words}")


def _whole_shards(part: Path, wanted: dict[str, Any], restart: bool) -> list[Shard]:
    """Those that an interrupted pack of the same kind has written; whatever else is there gives way."""
    shards, path = list[Shard](), part / PROGRESS
    if path.exists() and not restart:
        kept = read_json(path, "out")
        same = kept.get("facts") == wanted
        require(same, f"out: {part} holds an interrupted pack with other settings; --restart discards it")
        for shard in _listed(path, kept):
            file = part / shard.name
            if not file.is_file() or file.stat().st_size != shard.bytes:
                break
            shards.append(shard)
    kept_names = {shard.name for shard in shards} | ({PROGRESS} if shards else set())
    for entry in part.iterdir():
        if entry.name not in kept_names:
            rmtree(entry) if entry.is_dir() else entry.unlink()
    return shards


def _listed(path: Path, kept: dict[str, Any]) -> list[Shard]:
    try:
        return [Shard(**values) for values in kept["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise LrfdynError(f"out: cannot read {path} ({explain(error)}); --restart discards it") from None


def _write(part: Path, split: str, group: Sequence[Sample], shards: Sequence[Shard]) -> Shard:
    before = [shard for shard in shards if shard.split == split]
    data = tar_bytes(group, sum(shard.images for shard in before))
    name = f"{FILES[split]}-{len(before):05d}.tar"
    try:
        write_atomic(part / name, lambda file: file.write_bytes(data))
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {part} ({explain(error)})") from None
    return Shard(name, split, len(group), len(data), hashlib.sha256(data).hexdigest())


def _put_in_place(part: Path, out: Path) -> None:
    try:
        os.rename(part, out)
    except OSError as error:
        raise LrfdynError(f"out: cannot make {out} of {part} ({explain(error)})") from None
    with suppress(OSError):
        (out / PROGRESS).unlink()
