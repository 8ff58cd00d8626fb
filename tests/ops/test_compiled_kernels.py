"""The kernels go through the whole compiler for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks import compiled_kernels, kernel_cases

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results" / "performance" / "compiled_kernels.json"
# Triton's own package for Linux brings ptxas with it; builds for other systems need not.
compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton.backends.nvidia") is None, reason="this triton does not compile for NVIDIA's GPUs"
)


@compiles
def test_every_kernel_compiles_and_fits(tmp_path):
    """For the two kinds of GPU that most people train on; `benchmarks/compiled_kernels.py` does it for all."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out, targets = tmp_path / "out.json", ["sm_80", "sm_90"]
    command = ["benchmarks/compiled_kernels.py", "--quick", "--targets", *targets, "--json", str(out)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text("utf-8"))["records"]
    made = {target: {r["kernel"] for r in records if r["target"] == target} for target in targets}
    assert made["sm_80"] == made["sm_90"]
    assert all(0 < r["registers"] <= 255 and r["warps"] >= 1 for r in records)


def test_what_is_wrong_is_told(monkeypatch):
    right = {"kernel": "a.b", "case": "c", "target": "sm_86", "spilled": 0, "shared": 99 * 1024}
    monkeypatch.setattr(compiled_kernels, "KNOWN", {("a.b", "known", "sm_86")})
    monkeypatch.setattr(compiled_kernels, "kernels", lambda: {"a.b", "a.d"})
    wrong = [{**right, "spilled": compiled_kernels.SPILLED + 1}, {**right, "shared": 99 * 1024 + 1}]
    missing, spills, shared = compiled_kernels.problems([right, *wrong, {**wrong[0], "case": "known"}])
    assert missing == "a.d: no case launches it"
    assert spills == "a.b of 'c' on sm_86: spills 257 bytes, more than 256"
    assert shared == "a.b of 'c' on sm_86: 101377 bytes of shared memory, of 101376"


def test_records_of_other_kernels_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in ("TRITON_CACHE_DIR", "TRITON_DUMP_PTXAS_LOG"):
        monkeypatch.setenv(name, "")  # so that they are put back
    monkeypatch.setattr(compiled_kernels, "kernels", lambda: {"a.b", "c.d"})
    monkeypatch.setattr(kernel_cases, "networks", dict)
    path, runs = tmp_path / "out.json", ([], ["--kernels", "a"], ["--kernels", "c.d", "--targets", "sm_90"])

    def compiled(target, cases, names):
        kernels = [name for name in ("a.b", "c.d") if not names or compiled_kernels.is_one_of(name, names)]
        return [{"kernel": k, "case": "", "target": target, "spilled": 0, "shared": number} for k in kernels]

    monkeypatch.setattr(compiled_kernels, "compiled", compiled)
    for number in range(3):
        compiled_kernels.main(["--json", str(path), *runs[number]])
    found = json.loads(path.read_text("utf-8"))
    numbers = {(r["kernel"], r["target"]): r["shared"] for r in found["records"]}
    of_all = {(name, target): int(name == "a.b") for name in ("a.b", "c.d") for target in found["targets"]}
    assert numbers == {**of_all, ("c.d", "sm_90"): 2}
    assert [r["target"] for r in found["records"]] == [t for t in found["targets"] for _ in range(2)]
    assert len(found["earlier"]) == 2
    for wrong in (["--kernels", "a"], ["--kernels", "e", "--json", str(path)]):
        with pytest.raises(SystemExit):
            compiled_kernels.main(wrong)


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="the interpreter compiles nothing"):
        compiled_kernels.main(["--quick"])


def test_the_record_has_every_target_and_is_right():
    """Of the kernels as they were when it was written."""
    found = json.loads(RECORDED.read_text("utf-8"))
    records = found["records"]
    assert {r["target"] for r in records} == found["targets"].keys() == compiled_kernels.TARGETS.keys()
    cases = {r["case"] for r in records}
    assert cases <= kernel_cases.OPERATIONS.keys() | kernel_cases.networks().keys()
    assert cases & kernel_cases.networks().keys()
    assert all(r["shared"] <= found["targets"][r["target"]]["shared"] for r in records)
    heavy = {(r["kernel"], r["case"], r["target"]) for r in records if r["spilled"] > compiled_kernels.SPILLED}
    assert heavy == compiled_kernels.KNOWN
