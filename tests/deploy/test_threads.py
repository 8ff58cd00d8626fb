"""Several threads of the C engine give the bits of one. These tests need a C compiler with OpenMP, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lrfdyn.cli import main
from lrfdyn.deploy.c import native
from lrfdyn.deploy.c.native import NativeModel, library_of
from lrfdyn.deploy.c.write import write_c
from lrfdyn.deploy.integer.operations import Ssa, SumTokens
from lrfdyn.deploy.integer.program import IntegerModel
from lrfdyn.deploy.integer.quantize import quantize
from lrfdyn.deploy.predict import Predictor
from lrfdyn.errors import LrfdynError
from tests import fuzz_engine
from tests.deploy.programs import Builder, any_model
from tests.deploy.small import small
from tests.deploy.test_c import COMPILER, compiled, needs_compiler, pictures, tiny_model

RACE = Path(fuzz_engine.__file__).with_name("race.c")
needs_openmp = pytest.mark.skipif(not fuzz_engine.has_openmp(), reason="there is no C compiler with OpenMP")
run = partial(subprocess.run, capture_output=True, text=True)


def same_bits(model: IntegerModel, folder: Path, kernels: Path, threads: int) -> bool:
    images = pictures(model)
    expected = model(images).numpy()
    return np.array_equal(compiled(model, folder, kernels, threads)(images.numpy()), expected)


@needs_openmp
@pytest.mark.parametrize(("seed", "steps", "threads"), [(0, 4, 2), (1, 1, 2), (2, 5, 3), (3, 2, 3), (4, 1, 64)])
def test_random_networks(seed, steps, threads, tmp_path, kernels):
    assert same_bits(any_model(seed, steps), tmp_path, kernels, threads)


@needs_openmp
@pytest.mark.parametrize(
    ("host", "kind", "threads"),
    [
        ("spikformer", "lrf_dyn", 2),
        ("qkformer", "lrf_ssa", 3),
        ("sdt_v1", "sdsa", 2),
        ("sdt_v3", "lrf_dyn_same", 3),
        ("sew_resnet", None, 2),
    ],
)
def test_hosts(host, kind, threads, tmp_path, kernels):
    assert same_bits(quantize(small(host, kind)), tmp_path, kernels, threads)


def narrow_model(height: int, width: int) -> IntegerModel:
    """With fewer pixels, heads and blocks of channels than threads."""
    b = Builder(5, 3, (1, height, width))
    x = b.fire(b.conv(0, 6, stride=2))
    q, k, v = (b.fire(b.conv(x, 6, kernel=1)) for _ in range(3))
    x = b.fire(b.add(Ssa, (q, k, v), 2, False))
    x = b.fire(b.stencils(b.dendrites(x, real=False)))
    return b.done(b.fire(b.add(SumTokens, (x,))))


@needs_openmp
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (5, 2)])
def test_fewer_rows_than_threads(height, width, tmp_path, kernels):
    assert same_bits(narrow_model(height, width), tmp_path, kernels, threads=7)


@needs_openmp
def test_threads_under_sanitizers(tmp_path):
    """All of them are started, and stay in what was planned for them."""
    model = any_model(2, 3)
    folder = write_c(model, tmp_path / "model.c", pictures(model)).path
    flags = "CFLAGS=-O0 -fsanitize=address,undefined -fno-sanitize-recover=all"
    shown = {**os.environ, "OMP_DISPLAY_AFFINITY": "TRUE", "OMP_AFFINITY_FORMAT": "thread %n of %N"}
    for threads in (3, 1):  # in one folder: what was built for others is not taken
        done = run(["make", "test", f"CC={COMPILER}", flags, f"THREADS={threads}"], cwd=folder, env=shown)
        if "cannot find -lasan" in done.stderr or "libclang_rt" in done.stderr:
            pytest.skip("the compiler has no sanitizers")
        assert "3 of 3 pictures give the same logits bit for bit" in done.stdout, done.stderr
        started = {line for line in (done.stdout + done.stderr).splitlines() if line.startswith("thread ")}
        assert started == (set() if threads == 1 else {f"thread {i} of {threads}" for i in range(threads)})


@needs_openmp
@pytest.mark.parametrize(("seed", "steps"), [(0, 2), (1, 1)])
def test_no_races(seed, steps, tmp_path):
    """Threads that wait between kernels never touch what another one writes; without waiting they do."""
    folder = write_c(any_model(seed, steps), tmp_path / "model.c").path
    source = folder / "lrfdyn_model.c"
    text, wait = source.read_text(), '_Pragma("omp barrier")'
    assert wait in text
    flags = [COMPILER, "-std=gnu99", "-g", "-fsanitize=thread", *native.openmp(3), "-I."]
    done = run([*flags, "-r", "-nostdlib", *native.KERNELS, "-o", "kernels.o"], cwd=folder)
    for waits in (True, False):
        source.write_text(text.replace(wait, "ALL_ARRIVE" if waits else ""))
        done = run([*flags, str(RACE), "kernels.o", "-o", "race", "-lpthread"], cwd=folder)
        if "tsan" in done.stderr:
            pytest.skip("the compiler has no thread sanitizer")
        assert done.returncode == 0, done.stderr
        done = run(["./race"], cwd=folder)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("the thread sanitizer cannot run here")
        assert ("data race" not in done.stderr) == (done.returncode == 0) == waits, done.stderr


@needs_compiler
def test_memory_of_threads_is_planned(tmp_path):
    made = write_c(any_model(0, 4), tmp_path / "model.c")
    assert made.thread_bytes > 0
    facts = json.loads((made.path / "lrfdyn.json").read_text())
    assert (facts["memory_bytes"], facts["thread_bytes"]) == (made.memory_bytes, made.thread_bytes)
    for threads in (1, 2, 5):
        options = [f"-DLRFDYN_THREADS={threads}"] if threads > 1 else []
        expected = made.memory_bytes + (threads - 1) * made.thread_bytes
        program = f"typedef char same[LRFDYN_MEMORY == {expected} ? 1 : -1];"
        flags = [*options, "-include", "lrfdyn_model.h", "-fsyntax-only", "-x", "c", "-"]
        assert run([COMPILER, *flags], cwd=made.path, input=program).returncode == 0
    made_with_threads = ["-c", "lrfdyn_model.c", "-DLRFDYN_THREADS=2", "-o", "model.o"]
    assert "more than one needs OpenMP" in run([COMPILER, *made_with_threads], cwd=made.path).stderr


@needs_compiler
def test_a_compiler_without_openmp_is_one_line(tmp_path, monkeypatch):
    folder, compiler = write_c(tiny_model(), tmp_path / "model.c").path, tmp_path / "plain-cc"
    refused = 'case "$*" in *-fopenmp*) echo "error: unsupported option -fopenmp" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refused}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(LrfdynError, match=r"^threads: .* cannot compile .* with OpenMP, .*unsupported option -fopenmp"):
        NativeModel(folder, ["-O0"], threads=2)
    NativeModel(folder, ["-O0"])
    done = run(["make", f"CC={compiler}", "THREADS=2"], cwd=folder)
    assert done.returncode == 2
    assert f"THREADS: {compiler} has no OpenMP, which more than one thread needs" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_openmp
def test_predict_with_threads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(native, "OPTIONS", ("-O0",))
    model = small("spikformer", "lrf_dyn")
    model.save_pretrained(tmp_path / "model")
    folder = write_c(quantize(model), tmp_path / "model.c").path
    assert not library_of(folder, threads=2).exists()
    Predictor.open(str(folder), threads=2)
    assert library_of(folder, threads=2).is_file()
    assert not library_of(folder).exists()
    image = tmp_path / "noise.png"
    images = np.random.default_rng(0).integers(256, size=(16, 16, 3), dtype=np.uint8)
    pytest.importorskip("PIL.Image").fromarray(images).save(image)
    scores = []
    for threads in ("0", "2"):
        assert main(["predict", str(image), "--model", str(folder), "--threads", threads, "--json", "-"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["images"])
    assert scores[0] == scores[1]
    for threads, model, message in (
        ("-1", folder, "threads: expected an integer >= 0"),
        ("65", folder, "threads: expected at most 64, got 65"),
        ("2", tmp_path / "model", "threads: only in onnx and native, got torch"),
    ):
        assert main(["predict", str(image), "--model", str(model), "--threads", threads]) == 2
        assert message in capsys.readouterr().err
