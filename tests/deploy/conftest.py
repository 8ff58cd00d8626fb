"""What the tests of compiled models share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lrfdyn.deploy.c.native import find_compiler
from lrfdyn.deploy.c.write import kernel_text


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Path:
    """The kernels, compiled once for all models of these tests."""
    folder = tmp_path_factory.mktemp("kernels")
    for name in ("lrfdyn_kernels.h", "lrfdyn_kernels.c"):
        (folder / name).write_text(kernel_text(name))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-march=native", "-fPIC"]
    subprocess.run([find_compiler(), *flags, "-c", "lrfdyn_kernels.c", "-o", "kernels.o"], cwd=folder, check=True)
    return folder / "kernels.o"
