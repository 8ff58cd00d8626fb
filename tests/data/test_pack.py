"""Packed shards: the pictures of their source, the same bytes always, and whole or an error."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn.cli import main
from lrfdyn.data import Augmentation, check_shards, create_data, pack, pack_shards, tiny_imagenet
from lrfdyn.data.pack import grouped, tar_bytes
from lrfdyn.data.resident import ResidentData
from lrfdyn.errors import LrfdynError
from tests.data.make import (
    EVERYTHING,
    assert_equal,
    jpeg,
    levels,
    write_cifar,
    write_folder,
    write_pets,
    write_tiny_imagenet,
)
from tests.data.recordings import write_nmnist

Image = pytest.importorskip("PIL.Image")
NONE = Augmentation()


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pets(tmp_path_factory.mktemp("pets"))


def packed(root: Path, out: Path, name: str = "oxford_pets", **how) -> Path:
    pack_shards(create_data(name, root, NONE), out, name=name, root=root, **{"workers": 0, **how})
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


@pytest.mark.parametrize("name", ["oxford_pets", "imagenette", "tiny_imagenet", "cifar10"])
def test_packed_pictures_are_those_of_the_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resized in memory, up to JPEG, in the same order with the same labels."""
    root = tmp_path / "data"
    root.mkdir()
    if name == "cifar10":
        write_cifar(root, name, monkeypatch, train=6, test=4)
    else:
        {"oxford_pets": write_pets, "imagenette": write_folder, "tiny_imagenet": write_tiny_imagenet}[name](root)
    source, out = create_data(name, root, NONE), packed(root, tmp_path / "out", name, short_side=24, quality=100)
    shards = create_data("webdataset", out, NONE)
    assert (shards.num_classes, shards.class_names) == (source.num_classes, list(source.class_names))
    assert shards.mean == tuple(source.mean)
    assert shards.deviation == tuple(source.deviation)
    for split, count in (("train", source.train_images), ("test", source.test_images)):
        assert len(shards.splits[split].labels) == count
        for i in range(min(count, 8)):
            (pixels, label), (found, same) = source.picture(split, i), shards.picture(split, i)
            assert label == same
            image = Image.fromarray(pixels)
            scale = 24 / min(image.size)
            wide, high = (round(side * scale) for side in image.size)
            expected = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC), int)
            assert found.shape == expected.shape
            assert np.abs(found - expected).mean() < 1


def test_small_pictures_stay_as_they_are(pets: Path, tmp_path: Path) -> None:
    shards = create_data("webdataset", packed(pets, tmp_path / "out", short_side=500, quality=100), NONE)
    pixels, found = (create_data("oxford_pets", pets, NONE).picture("train", 0)[0], shards.picture("train", 0)[0])
    assert np.abs(pixels.astype(int) - found).max() <= 4


def test_the_same_bytes_whoever_packs(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MIB", 20_480)
    first = files(packed(pets, tmp_path / "one", short_side=24, shard_mib=1))
    assert len(first) > 5
    assert files(packed(pets, tmp_path / "two", short_side=24, shard_mib=1, workers=2)) == first
    assert max(len(data) for name, data in first.items() if name.endswith(".tar")) <= 20_480
    manifest = json.loads(first["manifest.json"])
    assert [shard["name"] for shard in manifest["shards"]] == [name for name in first if name.endswith(".tar")]
    counts = {split: sum(s["images"] for s in manifest["shards"] if s["split"] == split) for split in ("train", "test")}
    assert counts == manifest["images"] == {"train": 74, "test": 37}
    lower = files(packed(pets, tmp_path / "three", short_side=24, shard_mib=1, quality=50))
    assert sum(map(len, lower.values())) < sum(map(len, first.values()))


def test_grouping_by_size() -> None:
    """Tar files as large as allowed and no larger; a sample that is too large is alone."""
    samples = [{"jpg": bytes(size), "cls": b"0"} for size in (100, 3000, 9000, 30_000, 10, 5000)]
    groups = list(grouped(iter(samples), 20_480))
    assert [len(group) for group in groups] == [3, 1, 2]
    assert [len(tar_bytes(group, 0)) <= 20_480 for group in groups] == [True, False, True]
    assert len(tar_bytes(samples[:4], 0)) > 20_480
    with tarfile.open(fileobj=io.BytesIO(tar_bytes(samples[4:], 7))) as tar:
        assert tar.getnames() == ["00000007.jpg", "00000007.cls", "00000008.jpg", "00000008.cls"]
        assert {(entry.mtime, entry.uid, entry.uname) for entry in tar} == {(0, 0, "")}


def test_an_interrupted_pack_goes_on(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MIB", 20_480)
    whole, out, seen = files(packed(pets, tmp_path / "whole", shard_mib=2)), tmp_path / "out", []
    part = tmp_path / ".out.part"
    encode = pack.encode

    def stop_at(count: int):
        def encode_some(*arguments):
            seen.append(1)
            if len(seen) == count:
                raise KeyboardInterrupt
            return encode(*arguments)

        return encode_some

    monkeypatch.setattr(pack, "TOGETHER", 8)
    for count in (50, 30, 1):
        monkeypatch.setattr(pack, "encode", stop_at(count))
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            packed(pets, out, shard_mib=2)
        assert not out.exists()
        assert len(list(part.glob("*.tar"))) >= 1
    with pytest.raises(LrfdynError, match=r"holds an interrupted pack with other settings; --restart discards it"):
        packed(pets, out, shard_mib=2, quality=90)
    (part / "train-00001.tar").write_bytes(b"cut off")
    monkeypatch.setattr(pack, "encode", stop_at(0))
    seen.clear()
    assert files(packed(pets, out, shard_mib=2)) == whole
    assert len(seen) < 111, "the first shard was there"
    assert not part.exists()
    with pytest.raises(LrfdynError, match=r"out: expected a new or empty folder, got \S+; it holds the whole"):
        packed(pets, out, shard_mib=2)


def test_restart_begins_anew(pets: Path, tmp_path: Path) -> None:
    part = tmp_path / ".out.part"
    part.mkdir()
    (part / "packing.json").write_text('{"facts": {}, "shards": []}')
    (part / "train-00000.tar").write_bytes(b"of another pack")
    assert set(files(packed(pets, tmp_path / "out", restart=True))) == {
        "manifest.json", "train-00000.tar", "val-00000.tar",
    }  # fmt: skip


def test_a_picture_that_cannot_be_read(tmp_path: Path) -> None:
    root = write_pets(tmp_path / "data", breeds=3)
    (root / "images" / "Cat_breed_1_0.jpg").write_bytes(jpeg(0)[:100])
    with pytest.raises(LrfdynError, match=r"data: cannot read the image \S+Cat_breed_1_0.jpg \("):
        packed(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_resume_in_the_middle_of_an_epoch(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MIB", 20_480)
    out = packed(pets, tmp_path / "out", shard_mib=1)
    data = create_data("webdataset", out, EVERYTHING, image_size=24, shuffle_shards=2)
    whole = list(data.train_batches(epoch=1, seed=3, batch_size=8))
    again = create_data("webdataset", out, EVERYTHING, image_size=24, shuffle_shards=2, workers=2)
    assert_equal(list(again.train_batches(epoch=1, seed=3, batch_size=8, start_step=4)), whole[4:])


@pytest.fixture(scope="module")
def whole(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(pets, tmp_path_factory.mktemp("whole") / "out")


def edit(folder: Path, **values) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (
            lambda out: (out / "train-00000.tar").write_bytes((out / "train-00000.tar").read_bytes()[:-512]),
            r"root: the shard \S+train-00000.tar has \d+ bytes, manifest.json says \d+",
        ),
        (
            lambda out: (out / "val-00000.tar").rename(out / "val-1.tar"),
            r"root: the shard \S+val-1.tar is not in",
        ),
        (lambda out: shutil.copy(out / "val-00000.tar", out / "train-1.tar"), r"the shard \S+train-1.tar is not in"),
        (lambda out: (out / "manifest.json").write_text("{"), r"root: cannot read \S+manifest.json"),
        (lambda out: edit(out, lrfdyn_shards=2), r"root: cannot read \S+ \(another version of lrfdyn made it\)"),
        (lambda out: edit(out, class_names=["one"]), r"class_names: expected 37, got 1"),
        (lambda out: edit(out, shards=[{"name": "../a"}]), r"root: cannot read \S+manifest.json"),
        (
            lambda out: edit(out, task="segmentation"),
            r"holds shards for segmentation, which mask_shards reads",
        ),
    ],
)
def test_changed_shards(whole: Path, tmp_path: Path, break_it, problem: str) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    break_it(out)
    with pytest.raises(LrfdynError, match=problem):
        create_data("webdataset", out, NONE)


def test_a_missing_shard(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "val-00000.tar").unlink()
    with pytest.raises(LrfdynError, match=r"root: the shard \S+val-00000.tar is missing, which manifest.json lists"):
        create_data("webdataset", out, NONE, test="train*.tar")


def test_shards_without_a_manifest_are_what_they_are(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "manifest.json").write_text('{"name": "of another program"}')
    data = create_data("webdataset", out, NONE)
    assert (data.train_images, data.class_names) == (74, None)


def test_commands(pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    pack_it = ["data", "pack", "oxford_pets", "--data.root", str(pets), "--out", str(out), "--workers", "0"]
    assert main([*pack_it, "--short-side", "24", "--data.options", "{image_size: 64}"]) == 0
    assert "74 + 37 images of oxford_pets in 2 shards" in capsys.readouterr().out
    assert main(["data", "check", str(out)]) == 0
    assert "2 shards with 74 + 37 images of oxford_pets are whole" in capsys.readouterr().out
    data = bytearray((out / "train-00000.tar").read_bytes())
    data[5000] ^= 1
    (out / "train-00000.tar").write_bytes(data)
    create_data("webdataset", out, NONE)  # of the same size
    assert main(["data", "check", str(out)]) == 2
    assert "shards: " in (error := capsys.readouterr().err)
    assert "train-00000.tar has changed (sha256 " in error
    for arguments, problem in (
        (["data"], "ACTION"),
        (pack_it, "out: expected a new or empty folder"),
        (["data", "check", str(pets)], "has no manifest.json of lrfdyn data pack"),
        ([*pack_it, "--short-size", "3"], "option: unknown name '--short-size'; did you mean --short-side"),
        ([*pack_it[:6], str(tmp_path / "new"), "--data.options", "[1]"], "--data.options: expected {name: value}"),
        ([*pack_it[:6], str(tmp_path / "new"), "--quality", "101"], "quality: expected"),
        (["data", "pack", "oxford_cats", "--out", "x"], "did you mean oxford_pets"),
    ):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        assert problem in capsys.readouterr().err


def test_recordings_have_no_pictures(tmp_path: Path) -> None:
    write_nmnist(tmp_path / "data")
    with pytest.raises(LrfdynError, match="source: NMNIST has no pictures that could be packed"):
        packed(tmp_path / "data", tmp_path / "out", "nmnist")


def test_grey_pictures_are_stored_in_colour(tmp_path: Path) -> None:
    class Grey(ResidentData):
        num_classes, mean, deviation = 2, (0.4,), (0.3,)

    split = levels(6, 1, 16, 16), torch.arange(6) % 2
    manifest = pack_shards(Grey(split, split, NONE), tmp_path / "out", name="grey", quality=100, workers=0)
    assert check_shards(tmp_path / "out") == manifest
    assert (manifest.mean, manifest.class_names) == ([0.4] * 3, None)
    found, label = create_data("webdataset", tmp_path / "out", NONE).picture("test", 3)
    assert label == 1
    assert np.abs(found.astype(int) - split[0][3].permute(1, 2, 0).numpy()).max() <= 2


def test_what_a_source_decodes_once_is_decoded_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_imagenet, "TOGETHER", 2)
    monkeypatch.setattr(pack, "TOGETHER", 2)
    (tmp_path / "data").mkdir()
    write_tiny_imagenet(tmp_path / "data")
    apart = packed(tmp_path / "data", tmp_path / "apart", "tiny_imagenet", workers=2)
    assert files(apart) == files(packed(tmp_path / "data", tmp_path / "whole", "tiny_imagenet"))


def test_an_interrupted_pack_of_other_options_is_refused(pets: Path, tmp_path: Path) -> None:
    def stop(shard: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(pets, tmp_path / "out", say=stop, options={"crop_share": 0.5})
    with pytest.raises(LrfdynError, match="other settings"):
        packed(pets, tmp_path / "out", options={"crop_share": 0.75})
    packed(pets, tmp_path / "out", options={"crop_share": 0.5, "workers": 3})


def test_a_shard_too_many(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "more")
    (folder / "train-99999.tar").write_bytes(b"")
    with pytest.raises(LrfdynError, match="is not in"):
        check_shards(folder)


@pytest.mark.parametrize(("options", "words"), [("[1", "cannot read"), ("{cache: 5}", "cache: expected the path")])
def test_options_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str) -> None:
    write_tiny_imagenet(tmp_path)
    command = ["data", "pack", "tiny_imagenet", "--data.root", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*command, "--data.options", options]) == 2
    assert words in capsys.readouterr().err
