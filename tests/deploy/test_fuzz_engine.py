"""A short run of tests/fuzz_engine.py: the C engine returns error codes and stays inside its buffers."""

from __future__ import annotations

import subprocess

import pytest

from lrfdyn.deploy.c.write import write_c
from tests import fuzz_engine
from tests.deploy.programs import any_model
from tests.deploy.test_c import needs_compiler


@needs_compiler
def test_hostile_calls_under_sanitizers(tmp_path, monkeypatch):
    try:
        kernels = fuzz_engine.compile_kernels(tmp_path, ["-O0"])
        found, compared = fuzz_engine.fuzz(any_model(1, 2), kernels, tmp_path, cases=100, seed=0)
    except subprocess.CalledProcessError as error:
        if b"asan" in error.stderr or b"libclang_rt" in error.stderr:
            pytest.skip("the compiler has no sanitizers")
        raise
    assert found is None
    assert compared > 10

    def write_with_a_column_too_many(model, out):
        made = write_c(model, out)
        source = made.path / "lrfdyn_model.c"
        text = source.read_text()
        assert "map_0 = {0, 8, 11," in text
        source.write_text(text.replace("map_0 = {0, 8, 11,", "map_0 = {0, 8, 12,"))
        return made

    monkeypatch.setattr(fuzz_engine, "write_c", write_with_a_column_too_many)
    found, _ = fuzz_engine.fuzz(any_model(1, 2), kernels, tmp_path, cases=100, seed=1)
    assert found is not None
    assert "AddressSanitizer: heap-buffer-overflow" in found
