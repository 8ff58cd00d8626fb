"""One hostile case: where it happens, what it calls, and what is wrong with how that ends."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lrfdyn import deploy
from lrfdyn.cli import main
from lrfdyn.data import Framing, Preprocessing
from lrfdyn.errors import LrfdynError
from lrfdyn.training.recipes import dump_yaml, merge
from tests.data.make import jpeg, write_folder, write_shards
from tests.data.recordings import OWN, recording
from tests.deploy.small import small
from tests.segmentation.make import tiny_model, write_shapes
from tests.training.runs import TINY, assert_same_end

LONGEST = 500  # characters of a message, the folder of the case not counted
TRAINING = {
    "model": {"options": {**TINY["model"]["options"], "depth": 1}},
    "schedule": {"epochs": 2},
    "run": {"batch_size": 512, "checkpoint_steps": 1},
}
STEPS = 4  # of that training: two epochs of two


@dataclass
class Case:
    """One case in a folder of its own, which is also the current one. `notes` say what was done."""

    ground: Path
    folder: Path
    draw: random.Random
    notes: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def canary(self) -> Path:
        """What hostile files try to make."""
        return self.folder / "canary"

    def take(self, name: str) -> Path:
        """A copy of a part of the ground."""
        source, copy = self.ground / name, self.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        return copy

    def find(self, text: str) -> None:
        self.findings.append(text)

    def check_message(self, text: str) -> None:
        text = text.replace(str(self.folder), "").replace(str(self.ground), "")
        if len(text.splitlines()) != 1 or len(text) > LONGEST:
            self.find(f"a message of {len(text.splitlines())} lines and {len(text)} characters: {text[:300]!r}")

    def call(self, function: Callable[[], Any], lean: bool = False) -> Any:
        """Calls it; `lean` functions may raise what PyTorch raises."""
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return function()
        except LrfdynError as error:
            self.check_message(str(error))
        except Exception as error:
            if not lean:
                self.find(_described(error))
        return None

    def command(self, *arguments: object, codes: Sequence[int] = (0, 2)) -> int:
        """Runs a command line in this process and judges how it ends."""
        argv, out, err = [str(a) for a in arguments], io.StringIO(), io.StringIO()
        self.notes.append(f"lrfdyn {' '.join(map(repr, argv))}"[:1000])
        code: Any = None
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = main(argv)
        except SystemExit as left:
            code = left.code
        except Exception as error:
            self.find(_described(error))
            return -1
        self.check_end(argv, code, out.getvalue(), err.getvalue(), codes)
        return code

    def check_end(self, argv: Sequence[str], code: Any, out: str, err: str, codes: Sequence[int]) -> None:
        if code not in codes:
            self.find(f"exit code {code!r}, stderr {err[-300:]!r}")
        if "Traceback" in err or "nan%" in out:
            self.find(f"output {out[-200:]!r}, stderr {err[-600:]!r}")
        lines = err.splitlines()
        if code == 2 and not (lines and lines[-1].startswith("lrfdyn") and "error: " in lines[-1]):
            self.find(f"exit code 2 without a line that says why: {err[-300:]!r}")
        for line in filter(None, lines):
            self.check_message(line)
        other = "lrfdyn recipes NAME" in out or "--help" in argv  # train without a recipe, or help
        if code == 0 and out and not other and (argv[-1:] == ["--json"] or argv[-2:] == ["--json", "-"]):
            try:
                json.loads(out, parse_constant=_no_constant)
            except ValueError as error:
                self.find(f"--json printed what is not JSON ({error}): {out[:200]!r}")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _described(error: BaseException) -> str:
    """The exception and where the package last had a part in it."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}lrfdyn{os.sep}" in frame.filename
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}: {str(error)[:300]}"


def make_ground(folder: Path) -> Path:
    recipe = dump_yaml(merge(TINY, TRAINING))
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    model = small("spikformer", "lrf_dyn", in_channels=1)
    model.preprocessing = Preprocessing(16, (0.3,), (0.4,), 1.0)
    model.class_names = ("zero", "one", "two", "three", "four")
    model.save_pretrained(folder / "saved")
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "official.pth")
    tiny_model().save_pretrained(folder / "segmenter")
    camera = small("spikformer_dvs", "lrf_dyn", in_channels=2)
    camera.framing = Framing(2, "number", (34, 34), 32)
    camera.save_pretrained(folder / "camera")
    (folder / "recordings").mkdir()
    for name in ("a.bin", "a.npz", "three.aedat"):
        (folder / "recordings" / name).write_bytes(OWN[name](recording()))
    with suppress(LrfdynError), redirect_stderr(io.StringIO()):  # where onnx is not installed
        deploy.export_model(model, folder / "model.onnx")
    (folder / "images").mkdir()
    for i in range(2):
        (folder / "images" / f"{i}.jpg").write_bytes(jpeg(i))
    write_folder(folder / "folder", classes=2, train=2, val=2)
    write_shards(folder / "shards", shards=1, train=4, val=3)
    write_shapes(folder / "shapes", train=2, validation=2)
    (folder / "sweep.yaml").write_text(
        f"recipe: {folder / 'recipe.yaml'}\nseeds: [0, 1]\nruns:\n  - {{attention: ssa}}\n  - {{attention: lrf_dyn}}\n"
    )
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Names and contents of all files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.md5(path.read_bytes()).hexdigest() if regular else ""
    return found


def check_run(case: Case, run: Path) -> None:
    """A run that came to its end is that of a process that nothing happened to."""
    try:
        assert_same_end(run, case.ground / "run", STEPS)
    except (AssertionError, LrfdynError, OSError, IndexError) as error:
        case.find(f"the run ended otherwise than an undisturbed one: {_described(error)}")


def short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
