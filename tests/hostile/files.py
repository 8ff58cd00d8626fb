"""Damaged and hostile files: weights, configurations, checkpoints, pickles, images, data sets, exports, logs."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import lrfdyn
from lrfdyn.data import Augmentation, create_data
from lrfdyn.io.weights import load_tensors, save_tensors
from lrfdyn.sources import find_sources
from tests.data.make import jpeg
from tests.hostile.api import small_again
from tests.hostile.case import Case, short, tree


class Canary:
    """Runs when it is unpickled."""

    def __init__(self, path: Path, how: int) -> None:
        self.path, self.how = str(path), how

    def __reduce__(self) -> Any:
        code = f"import os; os.mkdir({self.path!r})"
        return [(os.mkdir, (self.path,)), (exec, (code,)), (eval, (f"__import__('os').mkdir({self.path!r})",))][
            self.how
        ]


def damage_bytes(case: Case, path: Path) -> None:
    """Cuts, changes or replaces a file."""
    draw, data = case.draw, path.read_bytes()
    at, how = draw.randrange(max(len(data), 1)), draw.randrange(10)
    case.notes.append(f"{path.relative_to(case.folder)}: damage {how} at {at}")
    match how:
        case 0:
            data = b""
        case 1:
            data = data[:at]
        case 2 | 3 | 4:
            changed = bytearray(data or b" ")
            for _ in range(draw.choice([1, 8, 200])):
                changed[draw.randrange(min(len(changed), draw.choice([64, 1000, len(changed)])))] = draw.randrange(256)
            data = bytes(changed)
        case 5:
            data = draw.randbytes(draw.choice([1, 8, 100, 5000]))
        case 6:
            data = data[:at] + draw.randbytes(16) + data[at:]
        case 7:
            data = pickle.dumps(Canary(case.canary, draw.randrange(3)))
    path.unlink()
    if how == 8:
        path.mkdir()
    elif how == 9:
        draw.choice([lambda: path.symlink_to(path), lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")])()
    else:
        path.write_bytes(data)


def hostile_json(case: Case, value: Any) -> Any:
    """One place of a JSON value replaced, left out or added."""
    draw = case.draw
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            visit(node[key])

    visit(value)
    news = [
        None, True, -1, 0, 1, 2.5, 10**30, 1e308, float("nan"), float("inf"), "", "x" * 5000, "a\nb", "\0", "[red]",
        [], {}, [1],
        [[]], ["a"], {"a": 1}, {"file": "/etc/passwd"}, str(case.canary), "http://x/y", "../..", "</script><script>",
        10**6, "3",
    ]  # fmt: skip
    new = draw.choice(news)
    if not places or draw.random() < 0.03:
        case.notes.append(f"the whole is {short(new)}")
        return new
    node, key = draw.choice(places)
    case.notes.append(f"{key} is {short(new)}")
    match draw.randrange(8):
        case 0 if isinstance(node, dict):
            del node[key]
        case 1 if isinstance(node, dict):
            node[draw.choice(["checkpoint_path", "pretrained_cfg_overlay", "name", "x", "", "a\nb", "x" * 500])] = new
        case _:
            node[key] = new
    return value


def damage_json(case: Case, path: Path) -> None:
    text = path.read_text()
    case.notes.append(str(path.relative_to(case.folder)))
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = case.draw.randrange(len(lines))
        lines[at] = json.dumps(hostile_json(case, json.loads(lines[at])))
        path.write_text("\n".join(lines) + "\n")
    elif case.draw.random() < 0.05:
        path.write_text(
            case.draw.choice(["[" * 100000, "9" * 5000, '{"a":' * 5000, "nul", '"\\ud800"', "{}", "[]", "null"])
        )
    else:
        path.write_text(json.dumps(hostile_json(case, json.loads(text))))


def damage_tensors(case: Case, path: Path) -> None:
    """The header, its metadata or the numbers of a safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, how = json.loads(data[8 : 8 + size]), case.draw.randrange(5)
    case.notes.append(f"{path.relative_to(case.folder)}: header {how}")
    if how == 0:
        header = hostile_json(case, header)
    elif how == 1:
        meta = json.loads(header["__metadata__"]["lrfdyn"])
        header["__metadata__"]["lrfdyn"] = json.dumps(hostile_json(case, meta))
    elif how == 2:
        text = case.draw.choice(["", "[]", "3", "null", "[" * 50000, "x", '"' + "x" * 1000 + '"'])
        header["__metadata__"]["lrfdyn"] = text
    elif how == 3:
        tensors, meta = load_tensors(path)
        name = case.draw.choice(sorted(tensors))
        tensors = {key: value.clone() for key, value in tensors.items()}
        if tensors[name].is_floating_point():
            tensors[name].fill_(case.draw.choice([float("nan"), float("inf"), -float("inf"), 1e38]))
        save_tensors(path, tensors, meta)
        return
    else:
        path.write_bytes(struct.pack("<Q", case.draw.choice([0, 1, size - 1, size + 1, 2**40, 2**63])) + data[8:])
        return
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def damage(case: Case, path: Path) -> None:
    """In a way that fits the file, or in any."""
    own = {".json": damage_json, ".jsonl": damage_json, ".safetensors": damage_tensors}.get(path.suffix)
    (own if own and case.draw.random() < 0.7 else damage_bytes)(case, path)


def _images(case: Case) -> list[str]:
    return [str(case.ground / "images")]


def saved_model(case: Case) -> None:
    folder = case.take("saved")
    damage(case, folder / case.draw.choice(["config.json", "model.safetensors", "README.md"]))
    match case.draw.randrange(4):
        case 0:
            case.call(lambda: lrfdyn.from_pretrained(folder))
        case 1:
            case.command("profile", folder, "--batch", 1, "--repeats", 1, "--device", "cpu", "--json")
        case 2:
            _analyze(case, folder)
        case 3:
            case.command("predict", *_images(case), "--model", folder, "--json", "-")


def segmentation_model(case: Case) -> None:
    folder = case.take("segmenter")
    damage(case, folder / case.draw.choice(["config.json", "config.json", "model.safetensors"]))
    case.call(lambda: lrfdyn.from_pretrained(folder))
    if case.draw.random() < 0.3:
        case.command(
            "predict", *_images(case), "--model", folder, "--task", "segmentation", "--out", "maps", codes=(0, 1, 2)
        )


def trained_run(case: Case) -> None:
    run = case.take("run")
    files = sorted(path for path in run.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    damage(case, case.draw.choice(files))
    before = tree(run)
    match case.draw.randrange(5):
        case 0:
            case.command("evaluate", run, "--json")
        case 1:
            case.command("evaluate", run, "--raw")
        case 2:
            _analyze(case, run)
        case 3:
            case.call(lambda: [source.load() for source in find_sources(run)])
        case 4:
            case.command("train", case.ground / "recipe.yaml", "--out", run, "--resume", "auto")
            return
    if tree(run) != before:
        case.find(f"the run was changed: {sorted(set(tree(run)) ^ set(before))[:5]}")


def _analyze(case: Case, model: object) -> None:
    case.command(
        "analyze", model, "--images", 2, "--batch-size", 2, "--figures", "none", "--out", "a", "--device", "cpu"
    )


def pickles(case: Case) -> None:
    """Official checkpoints, some of which run code where they are unpickled."""
    path, draw = case.take("official.pth"), case.draw
    canary, state = Canary(case.canary, draw.randrange(3)), torch.load(path, weights_only=True)
    names = list(state["model"])
    how = draw.randrange(7)
    case.notes.append(f"pickle {how}")
    match how:
        case 0:
            path.write_bytes(pickle.dumps(canary, protocol=draw.randrange(6)))
        case 1:
            torch.save(canary, path, _use_new_zipfile_serialization=draw.random() < 0.5)
        case 2:
            torch.save({**state, draw.choice(["args", "x"]): canary}, path)
        case 3:
            state["model"][draw.choice(names)] = draw.choice([canary, None, 3, "x", torch.zeros(3), {"a": canary}])
            torch.save(state, path)
        case 4:
            torch.save(
                draw.choice([[], {}, 3, None, {"model": 3}, {1: torch.zeros(1)}, {"model": {}}, "x" * 1000]), path
            )
        case 5:
            torch.save({"model": {draw.choice(["x" * 5000, "a\nb", "\0"]): torch.zeros(2), **state["model"]}}, path)
        case 6:
            damage_bytes(case, path)
    case.call(lambda: lrfdyn.load_official(small_again(case), path, strict=draw.random() < 0.8))


def pictures(case: Case) -> None:
    """Images that are no images, in files with all kinds of names."""
    folder, draw = case.take("images"), case.draw
    path = folder / "0.jpg"
    how = draw.randrange(6)
    if how == 0:
        mode = draw.choice(["1", "L", "P", "RGBA", "CMYK", "I;16", "F", "LA", "I"])
        path = folder / f"other.{'tif' if mode in ('F', 'CMYK', 'I') else 'png'}"
        Image.new(mode, draw.choice([(1, 1), (1, 3000), (7, 3), (300, 300)])).save(path)
    elif how == 1:
        path = path.rename(
            folder / draw.choice(["[red]x.jpg", "a b.jpg", "é.jpg", "a\nb.jpg", "-x.jpg", "*.jpg", "x" * 200 + ".jpg"])
        )
    else:
        damage_bytes(case, path)
    json_to = draw.choice([(), ("--json", "-")])
    given = draw.choice([path, folder])
    case.command("predict", given, "--model", case.ground / "saved", *json_to, codes=(0, 1, 2))


def recordings(case: Case) -> None:
    """Recordings that are none, and a model that says something else of its frames."""
    folder, camera, draw = case.take("recordings"), case.ground / "camera", case.draw
    path = draw.choice(sorted(folder.iterdir()))
    if draw.random() < 0.3:
        camera = case.take("camera")
        config = json.loads((camera / "config.json").read_text())
        config["framing"] = hostile_json(case, config["framing"])
        (camera / "config.json").write_text(json.dumps(config))
        tensors = {name: value.clone() for name, value in load_tensors(camera / "model.safetensors")[0].items()}
        save_tensors(camera / "model.safetensors", tensors, config)
    elif draw.random() < 0.2:
        path = path.rename(folder / draw.choice(["[red]x.bin", "a\nb.npz", "-x.aedat", "x.dat", "x.csv", "x.raw", "x"]))
    else:
        damage_bytes(case, path)
    how = draw.choice([(), ("--json", "-"), ("--steps",), ("--exit", 0.3)])
    case.command("predict", draw.choice([path, folder]), "--model", camera, *how, codes=(0, 1, 2))


def data_files(case: Case) -> None:
    """Files of data sets."""
    draw, kind = case.draw, case.draw.choice(["folder", "shards", "shapes"])
    root = case.take(kind)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = draw.choice(files)
    if kind == "shards" and draw.random() < 0.5:
        label = draw.choice(
            [b"", b"x", b"-1", b"99999999999999999999", b"\xff", b"1.5", b"9" * 5000, b" 1\n", b"1000000"]
        )
        name = draw.choice(["v0", "../../x", "/etc/x", "v" * 99, "a\nb"])
        with tarfile.open(root / "val-0.tar", "w") as tar:
            for ending, content in (("jpg", jpeg(0)), ("cls", label))[: draw.choice([1, 2, 2])]:
                entry = tarfile.TarInfo(f"{name}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        case.notes.append(f"label {label[:20]!r}, name {name[:20]!r}")
    elif kind == "shapes" and draw.random() < 0.5:
        mask = draw.choice(sorted(root.glob("annotations/*/*.png")))
        Image.fromarray(np.full(draw.choice([(36, 40), (1, 1), (36, 41)]), draw.choice([0, 4, 255]), np.uint8)).save(
            mask
        )
    else:
        damage_bytes(case, path)
    name = {"folder": "folder", "shards": "webdataset", "shapes": "ade20k"}[kind]
    options = {"num_classes": 3} if kind == "shapes" else {"num_classes": 4} if kind == "shards" else {}

    def read() -> None:
        source = create_data(name, root, Augmentation(), image_size=32, **options)
        for batches in (source.test_batches(batch_size=2), source.train_batches(epoch=0, seed=0, batch_size=2)):
            list(batches)

    case.call(read)


def exported(case: Case) -> None:
    """What an .onnx file says of itself, and the file."""
    import onnx

    path = case.take("model.onnx")
    if case.draw.random() < 0.7:
        model = onnx.load(path)
        for entry in model.metadata_props:
            if entry.value.startswith("{"):
                described = json.loads(entry.value)
                del described["sha256"]  # which would refuse all of it
                hurt = json.dumps(hostile_json(case, described))
                entry.value = case.draw.choice([hurt] * 9 + ["", "[" * 5000, "x", "3"])
        onnx.save(model, path)
    else:
        damage_bytes(case, path)
    case.command("predict", *_images(case), "--model", path, "--json", "-")


def files(case: Case) -> None:
    kinds = [saved_model, segmentation_model, trained_run, trained_run, pickles, pictures, recordings, data_files]
    if (case.ground / "model.onnx").exists():
        kinds.append(exported)
    kind = case.draw.choice(kinds)
    case.notes.append(kind.__name__)
    kind(case)
