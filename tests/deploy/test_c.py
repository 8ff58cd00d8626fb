"""The C engine gives the bits of the definition. These tests need a C compiler, and nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.cli import main
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.c import native
from lrfdyn.deploy.c.native import NativeModel, build_library, library_of
from lrfdyn.deploy.c.plan import Planner
from lrfdyn.deploy.c.write import write_c
from lrfdyn.deploy.export.formats import OnnxRunner
from lrfdyn.deploy.integer.onnx_graph import write_graph
from lrfdyn.deploy.integer.operations import Add
from lrfdyn.deploy.integer.program import IntegerModel
from lrfdyn.deploy.integer.quantize import quantize
from lrfdyn.errors import LrfdynError
from tests.deploy.programs import Builder, any_model
from tests.deploy.small import HOSTS, KINDS, small

COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=f"no C compiler ({', '.join(native.COMPILERS)}) is here")
# Options of attentions beside those that KINDS has.
MORE = [
    ("lrf_dyn", {"directions": 2, "dilations": (1, 3, 5)}),
    ("lrf_dyn", {"directions": 2, "token": "qkv", "coupling": "same"}),
    ("lrf_dyn", {"dilations": ()}),
    ("lrf_ssa", {"norm": True, "dilations": (1, 3, 5)}),
    ("lrf_ssa", {"scale_lrf": True}),
    ("causal_ssa", {"dilations": (1, 3)}),
]
CASES = [(seed, steps) for seed, steps in enumerate((4, 4, 1, 1, 5, 8, 2, 3))]


def compiled(model: IntegerModel, folder: Path, kernels: Path, threads: int = 1) -> NativeModel:
    """With the kernels that there are already, so that it takes no time."""
    made = write_c(model, folder / "model.c").path
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", *native.all_options(["-O0"], threads), "-fPIC", "-shared"]
    command = [COMPILER, *flags, "lrfdyn_model.c", str(kernels), "-o", str(library_of(made, threads=threads))]
    subprocess.run(command, cwd=made, check=True)
    return NativeModel(made, threads=threads)


def pictures(model: IntegerModel, count: int = 3) -> torch.Tensor:
    return torch.randint(256, (count, *model.shape), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@needs_compiler
@pytest.mark.parametrize(("seed", "steps"), CASES)
def test_random_networks_bit_for_bit(seed, steps, tmp_path, kernels):
    model = any_model(seed, steps)
    images = pictures(model)
    expected = model(images)
    assert expected.float().std(0).max() > 0  # images matter
    assert np.array_equal(compiled(model, tmp_path, kernels)(images.numpy()), expected.numpy())


@needs_compiler
@pytest.mark.parametrize("host", HOSTS)
def test_every_attention_in_every_host_is_the_same_everywhere(host, tmp_path, kernels):
    """The definition, C and ONNX Runtime, bit for bit."""
    refused = ("vsa", "sdsa") if host == "sdt_v1_dvs" else ("vsa",)  # softmax, and maxima over windows
    kinds = [(kind, {}) for kind in KINDS if kind not in refused]
    cases, live = [(None, {})] if host.endswith("resnet") else [*kinds, *MORE], 0
    for kind, options in cases:
        given = {"attention_options": options} if options else {}
        integer = quantize(small(host, kind, **given))
        images = pictures(integer)
        expected = integer(images)
        live += bool((expected != expected[0]).any())
        write_graph(integer, tmp_path / "model.onnx")
        for runner in (compiled(integer, tmp_path, kernels), OnnxRunner(tmp_path / "model.onnx", threads=1)):
            assert np.array_equal(runner(images.numpy()), expected.numpy()), (kind, options, runner)
    assert live >= len(cases) - 1  # networks whose images matter


@needs_compiler
@pytest.mark.parametrize(
    "flags", [["-O1", "-DLRFDYN_PLAIN"], ["-O1"], ["-O1", "-mavx2"], ["-O1", "-march=native"]], ids=" ".join
)
def test_every_vector_unit_gives_the_same(flags, tmp_path):
    """The plain form, that of processors that are older than this one, and its own."""
    if flags[-1] == "-mavx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no avx2")
    for n, model in enumerate((wide_model(), *map(counts_model, (1, 4, 6)))):
        images = pictures(model)
        made = write_c(model, tmp_path / f"{n}.c")
        assert np.array_equal(NativeModel(made.path, flags)(images.numpy()), model(images).numpy()), n


def wide_model() -> IntegerModel:
    """With rows of weights of every width, and more spikes than sums of 16 bits can take."""
    b = Builder(3, 4, (3, 6, 5))
    x = b.fire(b.conv(0, 272))
    x = b.fire(b.conv(x, 304))
    x = b.fire(b.conv(x, 40, kernel=1))
    return b.done(x)


def counts_model(steps: int) -> IntegerModel:
    """With counts of spikes whose higher planes have many events, few and none, in front of both kinds of kernels."""
    b = Builder(4, steps, (3, 6, 5))
    x = b.fire(b.conv(0, 272))
    for _ in range(4):
        x = b.add(Add, (x, b.fire(b.conv(x, 272, kernel=1))))
    return b.done(b.add(Add, (b.fire(b.conv(x, 48)), b.fire(b.conv(x, 48, kernel=1)))))


@needs_compiler
def test_folder_builds_and_tests_itself_under_sanitizers(tmp_path):
    model = any_model(0, 4)
    folder = write_c(model, tmp_path / "model.c", pictures(model)).path
    flags = "CFLAGS=-O0 -fsanitize=address,undefined -fno-sanitize-recover=all"
    done = subprocess.run(["make", "test", f"CC={COMPILER}", flags], cwd=folder, capture_output=True, text=True)
    if "cannot find -lasan" in done.stderr or "libclang_rt" in done.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 pictures give the same logits bit for bit" in done.stdout
    text = (folder / "lrfdyn_vectors.h").read_text()
    (folder / "lrfdyn_vectors.h").write_text(text.replace("lrfdyn_logits[] = {\n", "lrfdyn_logits[] = {\n1+"))
    done = subprocess.run(["make", "test", f"CC={COMPILER}", flags], cwd=folder, capture_output=True, text=True)
    assert done.returncode != 0
    assert "2 of 3 pictures" in done.stdout


def test_values_that_live_together_lie_apart():
    for seed in range(4):
        plan = Planner(any_model(seed, 4)).plan()
        stored = [call.gives for call in plan.calls[:-1]]
        for n, call in enumerate(plan.calls):
            later = {i for other in plan.calls[n:] for i in other.reads}
            alive = {i for i in stored[:n] if i in later} | ({call.gives} & set(stored))
            spans = sorted((plan.offsets[i], plan.offsets[i] + plan.maps[i].bytes) for i in alive)
            spans = sorted([*spans, (plan.offsets[-1 - n], plan.offsets[-1 - n] + call.scratch)])
            assert all(end <= start for (_, end), (start, _) in pairwise(spans) if end > 0)
            assert spans[-1][1] <= plan.arena
        assert plan.arena < sum(plan.maps[i].bytes for i in stored) + sum(call.scratch for call in plan.calls)


@needs_compiler
def test_bad_input(tmp_path, kernels, monkeypatch):
    model = any_model(2, 2)
    made = compiled(model, tmp_path, kernels)
    images = pictures(model).numpy()
    with pytest.raises(LrfdynError, match="images: expected an array"):
        made(images.tolist())
    for wrong in (images[:, :, 1:], images.astype(np.int32), images[0]):
        with pytest.raises(LrfdynError, match=r"images: expected levels in uint8 of \[B, 3, 9, 7\]"):
            made(wrong)
    logits = (ctypes.c_int32 * 7)()
    run, checked = made._library.lrfdyn_run, made._library.lrfdyn_run_checked
    assert run(None, logits) == run(images[0].ctypes, None) == 1
    count = images[0].size
    assert checked(images[0].ctypes, count, logits, 7) == 0
    assert checked(images[0].ctypes, count - 1, logits, 7) == checked(images[0].ctypes, count, logits, 8) == 2
    with pytest.raises(LrfdynError, match=r"lrfdyn\.json"):
        NativeModel(tmp_path / "missing")
    folder = tmp_path / "model.c"
    (folder / "lrfdyn_kernels.c").write_text("int;;")
    with pytest.raises(LrfdynError, match="cannot compile"):
        NativeModel(folder, ["-O0"])
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LrfdynError, match="native needs a C compiler, and there is no no-such-compiler"):
        build_library(folder)
    with pytest.raises(LrfdynError, match="is not a folder of C"):
        build_library(tmp_path / "missing")
    assert not write_c(model, tmp_path / "other.c", verify=True).verified  # no compiler, no check


def tiny_model(seed: int = 0) -> IntegerModel:
    b = Builder(seed, 1, (1, 4, 4))
    return b.done(b.conv(0, 4))


@needs_compiler
def test_a_folder_that_is_written_anew_is_another_model(tmp_path, kernels):
    """In one process, which still holds the first library, and with sources that seem to be old."""
    for seed in (0, 1, 0):
        model = tiny_model(seed)
        images = pictures(model)
        made = write_c(model, tmp_path / "model.c").path
        for source in made.iterdir():
            os.utime(source, (0, 0))
        assert not list(made.glob(native.LIBRARIES))
        assert np.array_equal(compiled(model, tmp_path, kernels)(images.numpy()), model(images).numpy())


@needs_compiler
def test_an_edited_description_is_refused(tmp_path, kernels):
    compiled(tiny_model(), tmp_path, kernels)
    description = tmp_path / "model.c" / "lrfdyn.json"
    text = json.loads(description.read_text())
    wrong = {"classes": [8, -1, 2**32 + 7, 1e400], "shape": [[1, 4, 5], [-1, -4, 4], [], [16]], "scale": [0, None]}
    for change in ({key: value} for key, values in wrong.items() for value in values):
        description.write_text(json.dumps(text | change))
        with pytest.raises(LrfdynError, match=r"model: .*lrfdyn.json (says another shape|does not say shape)"):
            NativeModel(tmp_path / "model.c")


@pytest.mark.parametrize("name", native.MODEL_FILES)
def test_an_edited_model_is_refused(tmp_path, name):
    """Before it is compiled: other weights would compile as well."""
    folder = write_c(tiny_model(), tmp_path / "model.c").path
    whole = (folder / name).read_text()
    for text in (whole[: len(whole) // 2], whole.replace("1", "2", 1)):
        (folder / name).write_text(text)
        with pytest.raises(LrfdynError, match=rf"model: .*{name} is damaged or was changed"):
            NativeModel(folder)


def test_a_damaged_library_is_named(tmp_path):
    folder = write_c(tiny_model(), tmp_path / "model.c").path
    library_of(folder).write_bytes(b"cut off")
    with pytest.raises(LrfdynError, match=r"model: .*liblrfdyn.* cannot be used .*; without it, it is compiled anew"):
        NativeModel(folder)


@needs_compiler
def test_options_behind_the_name_of_a_compiler(tmp_path, monkeypatch):
    """As make takes them; `ccache gcc` is a compiler too."""
    monkeypatch.setenv("CC", f"{COMPILER} -no-such-option")
    with pytest.raises(LrfdynError, match=r"cannot compile .*no-such-option"):
        write_c(tiny_model(), tmp_path / "model.c", verify=True)


def test_names_of_operations_and_classes_are_no_code(tmp_path):
    model = tiny_model()
    named = [replace(operation, name="*/ int x; /*\n\ud800") for operation in model.operations]
    facts = {"class_names": ["\ud800 */\n??/\\"] * 7}
    folder = write_c(IntegerModel(model.shape, 1, 1, named, facts), tmp_path / "model.c").path
    source, header = (folder / f"lrfdyn_model.{ending}" for ending in "ch")
    assert "int x" not in source.read_text()
    (names,) = (line for line in header.read_text().splitlines() if "LRFDYN_NAMES" in line)
    assert names == "#define LRFDYN_NAMES " + ", ".join([r'"\077 \052\057\012\077\077\057\134"'] * 7)
    assert "#define LRFDYN_SCALE 1.0\n" in header.read_text()
    with pytest.raises(LrfdynError, match="class_names: expected a list of names"):
        write_c(IntegerModel(model.shape, 1, 1.0, model.operations, {"class_names": [1]}), tmp_path / "model.c")


@needs_compiler
def test_a_folder_of_other_bits_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "OPTIONS", ("-O0",))
    monkeypatch.setattr(IntegerModel, "__call__", lambda model, images: torch.zeros(len(images), 7, dtype=torch.int32))
    with pytest.raises(LrfdynError, match="export: the compiled C gives other integers; the folder was not kept"):
        write_c(any_model(3, 1), tmp_path / "model.c", verify=True)
    assert not list(tmp_path.iterdir())


def test_too_many_steps(tmp_path):
    b = Builder(0, 9, (1, 4, 4))
    with pytest.raises(LrfdynError, match="at most 8 time steps, got 9"):
        write_c(b.done(b.conv(0, 4)), tmp_path / "model.c")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "out: expected the name of a folder that ends in .c"),
        ("file.c", "out: expected a folder, got the file"),
        ("file.c/model.c", "out: cannot write in the folder"),
    ],
)
def test_where_no_folder_can_be(name, message, tmp_path):
    (tmp_path / "file.c").write_text("")
    with pytest.raises(LrfdynError, match=message):
        write_c(any_model(1, 1), tmp_path / name)


@needs_compiler
def test_export_and_predict(tmp_path, capsys, monkeypatch):
    """The commands, from a saved model to class names."""
    monkeypatch.setattr(native, "OPTIONS", ("-O0",))
    model = small("spikformer", "lrf_dyn", in_channels=1)
    model.preprocessing = Preprocessing(16, (0.3,), (0.4,), 1.0)
    model.save_pretrained(tmp_path / "model")
    folder, image = tmp_path / "model.c", tmp_path / "digit.png"
    levels = pictures(quantize(model), 1)[0, 0].numpy()
    Image.fromarray(levels).save(image)
    assert main(["export", str(tmp_path / "model"), "--out", str(folder), "--images", str(image), "--check", "2"]) == 0
    assert "1 real and 2 random images: the same bits" in capsys.readouterr().out
    monkeypatch.setenv("CC", "no-such-compiler")  # the library of the check is taken
    assert main(["predict", str(image), "--model", str(folder), "--top", "5", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["images"][0]["predictions"]
    integer = quantize(model)
    expected = (integer(torch.from_numpy(levels)[None, None])[0] * integer.scale).softmax(0)
    assert {p["class"]: p["score"] for p in found} == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-6)
    assert main(["predict", str(image), "--model", str(tmp_path / "model"), "--runtime", "native"]) == 2
    assert "runtime: native runs .c files" in capsys.readouterr().err


@needs_compiler
def test_the_example_says_what_is_on_a_picture(tmp_path, kernels):
    model = any_model(0, 1)
    model.facts["class_names"] = [f'café\\ "{i}"??/' for i in range(7)]
    images = pictures(model, 1)
    folder = write_c(model, tmp_path / "model.c").path
    sources = ["lrfdyn_classify.c", "lrfdyn_model.c", str(kernels)]
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O0"]
    subprocess.run([COMPILER, *flags, *sources, "-o", "classify"], cwd=folder, check=True)
    levels = images[0].permute(1, 2, 0).numpy().tobytes()
    files = {
        "right.ppm": b"P6 # a comment\n7 9\n255\n" + levels,
        "cut.ppm": b"P6 7 9 255\n" + levels[:-1],
        "size.ppm": b"P6 9 7 255\n" + levels,
        "wide.ppm": b"P6 7 9 65535\n" + levels * 2,
        "grey.pgm": b"P5 7 9 255\n" + levels,
        "empty.ppm": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    done = subprocess.run(["./classify", *files, "missing"], cwd=folder, capture_output=True, text=True)
    best = model(images)[0].max(0)
    assert done.stdout == f'right.ppm: café\\ "{best.indices}"??/ (logit {best.values * model.scale:.2f})\n'
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cut.ppm: the file is cut off",
        "size.ppm: expected 7 x 9 pixels, got 9 x 7",
        "wide.ppm: expected 255 as the largest level",
        "grey.pgm: expected a file that begins with P6",
        "empty.ppm: expected a file that begins with P6",
        "missing: cannot be opened",
    ]
    assert subprocess.run(["./classify"], cwd=folder, capture_output=True).returncode == 2
