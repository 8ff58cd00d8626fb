"""Folders and shards: worker processes, damaged images, crops."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn import LrfdynError
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.decode import decoded_crop, resized_crop_box
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import load_in_order
from tests.data.make import EVERYTHING, assert_equal, jpeg, write_folder, write_shards, write_tar

pytest.importorskip("PIL")
RESIZED = replace(EVERYTHING, crop="resized")
TRAIN = {"epoch": 0, "seed": 0, "batch_size": 4}


def folder_data(root: Path, augment: Augmentation = RESIZED, **options):
    return create_data("imagenette", root, augment, **{"image_size": 24, **options})


@pytest.mark.parametrize("name", ["imagenette", "webdataset"])
def test_workers_change_nothing(name: str, tmp_path: Path) -> None:
    (write_folder if name == "imagenette" else write_shards)(tmp_path)
    none, two = (create_data(name, tmp_path, RESIZED, image_size=24, workers=w) for w in (0, 2))
    assert_equal(list(none.train_batches(**TRAIN)), list(two.train_batches(**TRAIN)))
    assert_equal(list(none.train_batches(**TRAIN, start_step=3)), list(two.train_batches(**TRAIN, start_step=3)))
    assert_equal(list(none.test_batches(batch_size=4)), list(two.test_batches(batch_size=4)))


def test_an_error_of_the_program_ends_its_workers(tmp_path: Path) -> None:
    """Between two batches, so that workers wait for more. They leave the first request to end to the program."""
    write_folder(tmp_path)
    code = (
        "from lrfdyn.data import Augmentation, create_data\n"
        f"data = create_data('imagenette', {str(tmp_path)!r}, Augmentation(), image_size=24, workers=2)\n"
        "batches = data.train_batches(epoch=0, seed=0, batch_size=4)\n"
        "next(batches)\n"
        "raise RuntimeError('between two batches')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("RuntimeError: between two batches")


def test_workers_end_with_a_program_that_was_killed() -> None:
    """Though nobody takes their results any more, which are larger than a pipe; the program's locks end with them."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()

    def program() -> None:
        batches = load_in_order(lambda number: np.zeros(2**20, np.uint8), range(9), 1, torch.device("cpu"))
        next(batches)
        there.send([child.pid for child in multiprocessing.active_children()])
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork.Process(target=program)
    process.start()
    process.join()
    (worker,), stop = here.recv(), time.monotonic() + 30
    status = Path(f"/proc/{worker}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < stop, "the worker lives on"
        time.sleep(0.05)


def test_workers_that_a_server_forks(tmp_path: Path) -> None:
    """Their parent is not the program, as with the usual start of processes from Python 3.14 on."""
    write_folder(tmp_path)
    code = (
        "import multiprocessing\n"
        "from lrfdyn.data import Augmentation, create_data\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('forkserver')\n"
        f"    data = create_data('imagenette', {str(tmp_path)!r}, Augmentation(), image_size=24, workers=1)\n"
        "    print(len(list(data.train_batches(epoch=0, seed=0, batch_size=4))))\n"
    )
    (tmp_path / "program.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "program.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.strip() == "6", result.stderr


def test_no_more_workers_than_cores(tmp_path: Path, recwarn) -> None:
    """PyTorch would warn of them in the middle of a run."""
    write_folder(tmp_path)
    assert len(list(folder_data(tmp_path, workers=100).train_batches(**TRAIN))) == 6
    assert not [w for w in recwarn if "worker" in str(w.message)]


def test_skipped_steps_are_not_decoded(tmp_path: Path, monkeypatch) -> None:
    data = folder_data(write_folder(tmp_path))
    read = []
    images = data.splits["train"]
    original = images.read
    monkeypatch.setattr(images, "read", lambda index: read.append(index) or original(index))
    list(data.train_batches(**TRAIN, start_step=4))
    assert sorted(read) == sorted(data.order(0, 0)[16:24].tolist())


def test_class_index_is_the_sorted_place(tmp_path: Path) -> None:
    data = folder_data(write_folder(tmp_path))
    assert data.class_names == ["n00000000", "n00000001", "n00000002"]
    (batch,) = data.test_batches(batch_size=9)
    assert batch.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_evaluation_takes_the_scaled_centre(tmp_path: Path) -> None:
    import io

    from PIL import Image

    data = folder_data(write_folder(tmp_path), crop_share=0.75)
    batch = next(data.test_batches(batch_size=1))
    with Image.open(io.BytesIO(data.splits["test"].read(0))) as image:
        width, height = image.size
        scale = 32 / min(width, height)
        scaled = image.convert("RGB").resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    left, top = (scaled.width - 24) // 2, (scaled.height - 24) // 2
    pixels = torch.from_numpy(np.array(scaled.crop((left, top, left + 24, top + 24)))).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.deviation).view(3, 1, 1)
    assert torch.allclose(batch.images[0], expected, atol=1e-5)


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_levels_of_16_bits_are_scaled(crop: str, tmp_path: Path) -> None:
    """As `lrfdyn predict` does; Pillow's own conversion makes nearly all of them white."""
    from PIL import Image

    levels = np.repeat(np.arange(256, dtype=np.uint16)[:, None] * 257, 256, 1)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(levels).save(tmp_path / split / "a" / "x.png")
    source = folder_data(tmp_path, Augmentation(crop=crop, crop_scale=(1.0, 1.0)), image_size=64, crop_share=1.0)
    keys = Keys(0, 0, np.arange(1), np.zeros(1, np.int64))
    for images, _, failures in (source._decode_batch(split, keys) for split in ("train", "test")):
        rows = images[0, 0, :, 32].double()
        assert not failures
        assert (rows - torch.arange(64) * 4 - 1.5).abs().max() <= 1


def test_large_pictures_are_decoded_reduced(monkeypatch) -> None:
    """Where the crop needs no more, in the same place; never enlarged, and not of other formats or for tests."""
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    asked, draft = [], JpegImageFile.draft
    monkeypatch.setattr(JpegImageFile, "draft", lambda self, *given: asked.append(self.size) or draft(self, *given))
    across, down = np.meshgrid(np.linspace(0, 255, 203), np.linspace(0, 255, 161))
    picture = Image.fromarray(np.stack([across, down, across], 2).astype(np.uint8))
    for form, boxes in {"JPEG": 3, "PNG": 0}.items():
        file = io.BytesIO()
        picture.save(file, form)
        for box, size in (((3, 5, 199, 155), 64), ((3, 5, 199, 155), 16), ((0, 0, 203, 161), 80), ((9, 9, 60, 60), 32)):
            whole, reduced = (
                np.asarray(decoded_crop(file.getvalue(), size, lambda *_, box=box: box, way), np.int16)
                for way in (False, True)
            )
            assert whole.shape == reduced.shape == (size, size, 3)
            assert abs(whole - reduced).max() <= 4
        assert len(asked) == boxes
        asked.clear()


def test_resized_crop_box() -> None:
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(2000):
        left, top, right, bottom = resized_crop_box(50, 40, generator.random(40), (0.08, 1.0), (3 / 4, 4 / 3))
        assert 0 <= left < right <= 50
        assert 0 <= top < bottom <= 40
        shares.append((right - left) * (bottom - top) / 2000)
        assert 0.65 < (right - left) / (bottom - top) < 1.5
    assert 0.06 < min(shares) < 0.12
    assert max(shares) > 0.9
    assert resized_crop_box(100, 10, generator.random(40), (1, 1), (3 / 4, 4 / 3)) == (43, 0, 56, 10)
    assert resized_crop_box(10, 100, generator.random(40), (1, 1), (3 / 4, 4 / 3)) == (0, 43, 10, 56)


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images(workers: int, tmp_path: Path, caplog) -> None:
    write_folder(tmp_path)
    bad = tmp_path / "train" / "n00000001" / "n00000001_2.JPEG"
    bad_test = tmp_path / "val" / "n00000000" / "n00000000_1.JPEG"
    bad.write_bytes(bad.read_bytes()[:200])
    bad_test.write_bytes(b"not an image")
    strict = folder_data(tmp_path, workers=workers)
    with pytest.raises(LrfdynError, match=rf"data: cannot read the image .*{bad.name}"):
        list(strict.train_batches(**TRAIN))
    unknown = rf"data: cannot read the image .*{bad_test.name} \(UnidentifiedImageError: cannot identify image file\);"
    with pytest.raises(LrfdynError, match=unknown):
        list(strict.test_batches(batch_size=4))

    lenient = folder_data(tmp_path, workers=workers, on_corrupt="skip")
    with caplog.at_level(logging.WARNING, "lrfdyn"):
        first = list(lenient.train_batches(**TRAIN))
        assert_equal(first, list(lenient.train_batches(**TRAIN)))
        tests = list(lenient.test_batches(batch_size=4))
    assert [b.count for b in first] == [4] * 6
    assert [b.count for b in tests] == [3, 4, 1]
    assert torch.cat([b.labels[: b.count] for b in tests]).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert set(lenient.corrupt) == {str(bad), str(bad_test)}
    assert sum(bad.name in r.getMessage() for r in caplog.records) == 1  # said once, not in every epoch


def test_the_next_good_image_stands_in(tmp_path: Path) -> None:
    write_folder(tmp_path)
    files = sorted((tmp_path / "train" / "n00000000").iterdir())
    good = folder_data(tmp_path, Augmentation())
    order = good.order(0, 0)
    clean = next(good.train_batches(epoch=0, seed=0, batch_size=24)).images
    for path in files[2:4]:
        path.write_bytes(b"")
    batch = next(folder_data(tmp_path, Augmentation(), on_corrupt="skip").train_batches(epoch=0, seed=0, batch_size=24))
    place = {int(sample): i for i, sample in enumerate(order)}
    assert torch.equal(batch.images[place[2]], clean[place[4]])
    assert torch.equal(batch.images[place[3]], clean[place[4]])
    assert torch.equal(batch.images[place[5]], clean[place[5]])


def test_nothing_but_corrupt_images(tmp_path: Path) -> None:
    write_folder(tmp_path, classes=2, train=2, val=1)
    for path in tmp_path.rglob("*.JPEG"):
        path.write_bytes(b"")
    data = folder_data(tmp_path, on_corrupt="skip")
    with pytest.raises(LrfdynError, match="images in a row cannot be read"):
        next(data.train_batches(**TRAIN))
    (batch,) = data.test_batches(batch_size=4)
    assert (batch.count, len(batch.images)) == (0, 4)


def test_bad_folders(tmp_path: Path) -> None:
    write_folder(tmp_path)
    extra = tmp_path / "train" / "n00000009"
    extra.mkdir()
    with pytest.raises(LrfdynError, match=r"root: the class folder .*n00000009 has no images"):
        folder_data(tmp_path)
    (extra / "a.JPEG").write_bytes(b"")
    with pytest.raises(LrfdynError, match=r"root: the class folder n00000009 is in only one of"):
        folder_data(tmp_path)
    with pytest.raises(LrfdynError, match=r"root: no such folder .*train"):
        folder_data(tmp_path / "val")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(LrfdynError, match="has no class folders"):
        folder_data(tmp_path / "empty")


@pytest.mark.parametrize(
    ("option", "value"),
    [("workers", -1), ("image_size", 0), ("on_corrupt", "ignore"), ("crop_share", 1.5), ("draft", 2)],
)
def test_bad_options(option: str, value: object, tmp_path: Path) -> None:
    write_folder(tmp_path, classes=1, train=1, val=1)
    with pytest.raises(LrfdynError, match=f"^{option}: "):
        folder_data(tmp_path, **{option: value})


def test_shards_are_shuffled_in_windows(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=4)
    data = create_data("webdataset", tmp_path, RESIZED, image_size=24, shuffle_shards=2)
    assert (data.train_images, data.test_images, data.num_classes) == (32, 5, 4)
    order = data.order(0, 0)
    first = {sample // 8 for sample in order[:16]}
    assert len(first) == 2
    assert any(list(data.order(0, e)[:16] // 8) != sorted(data.order(0, e)[:16] // 8) for e in range(3))
    assert len({frozenset((data.order(0, e)[:16] // 8).tolist()) for e in range(10)}) > 1


def test_shards_on_several_disks(tmp_path: Path) -> None:
    write_shards(tmp_path / "a")
    write_shards(tmp_path / "b")
    patterns = [str(tmp_path / "a" / "train-*.tar"), str(tmp_path / "b" / "train-0.tar")]
    data = create_data("webdataset", tmp_path, RESIZED, train=patterns, test="*/val-0.tar", num_classes=10)
    assert (data.train_images, data.test_images, data.num_classes) == (32, 10, 10)


def test_shard_images_and_labels(tmp_path: Path) -> None:
    write_shards(tmp_path)
    images = create_data("webdataset", tmp_path, RESIZED).splits["train"]
    assert [images.read(i) for i in range(24)] == [jpeg(i) for i in range(24)]
    assert images.labels.tolist() == [(i + j) % 4 for i in range(3) for j in range(8)]


def test_the_index_of_a_shard_is_kept_and_made_again(tmp_path: Path, monkeypatch) -> None:
    from lrfdyn.data import shards

    write_shards(tmp_path)
    scanned = []
    scan = shards._scan
    monkeypatch.setattr(shards, "_scan", lambda path, masks: scanned.append(path.name) or scan(path, masks))
    first = create_data("webdataset", tmp_path, RESIZED).splits["train"]
    assert sorted(scanned) == ["train-0.tar", "train-1.tar", "train-2.tar", "val-0.tar"]
    scanned.clear()
    again = create_data("webdataset", tmp_path, RESIZED).splits["train"]
    assert not scanned
    assert [again.read(i) for i in range(24)] == [first.read(i) for i in range(24)]
    write_tar(tmp_path / "train-1.tar", [("new", jpeg(77), 1)])  # another shard
    (tmp_path / ".train-2.tar.index.npy").write_bytes(b"\x93NUMPY")  # a damaged index
    changed = create_data("webdataset", tmp_path, RESIZED)
    assert scanned == ["train-1.tar", "train-2.tar"]
    assert changed.train_images == 17
    assert changed.splits["train"].read(8) == jpeg(77)


def test_bad_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)

    def fails(message: str, **options) -> None:
        with pytest.raises(LrfdynError, match=message):
            create_data("webdataset", tmp_path, RESIZED, **options)

    fails("train: no shards match other", train="other*.tar")
    fails("num_classes: ", num_classes=3)
    fails("shuffle_shards: ", shuffle_shards=0)
    fails("shuffle_shards: expected an integer >= 1, got 'all'", shuffle_shards="all")
    fails("train: expected a file pattern or a list of them, got 3", train=3)
    fails("workers: expected an integer >= 0, got 1.5", workers=1.5)
    fails("crop_share: expected 0 < x <= 1, got 'all'", crop_share="all")
    write_tar(tmp_path / "train-9.tar", [])
    fails(r"root: the shard .*train-9.tar has no images")
    write_tar(tmp_path / "train-9.tar", [("a", b"x", 0), ("a", b"x", 0)])
    fails(r"train-9.tar has two images for the key a")
    write_tar(tmp_path / "train-9.tar", [("a", b"x", -1)])
    fails(r"a.cls in .*train-9.tar is not a class index")
    (tmp_path / "train-9.tar").write_bytes(b"no tar" * 200)
    fails(r"cannot read the shard .*train-9.tar")


def test_corrupt_image_in_a_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_tar(tmp_path / "train-1.tar", [("bad", b"not an image", 0)])
    with pytest.raises(LrfdynError, match=r"cannot read the image .*train-1.tar \(bad.jpg at byte 512\)"):
        list(
            create_data("webdataset", tmp_path, replace(RESIZED, mixup=0, cutmix=0)).train_batches(
                epoch=0, seed=0, batch_size=17
            )
        )


def test_import_is_lean() -> None:
    code = "import sys, lrfdyn, lrfdyn.data; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
