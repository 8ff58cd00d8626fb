"""What the tests of compiled models share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lrfdyn.deploy.c.native import KERNEL_HEADERS, KERNELS, find_compiler
from lrfdyn.deploy.c.write import kernel_text


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Path:
    """The kernels, compiled once for all models of these tests."""
    folder = tmp_path_factory.mktemp("kernels")
    for name in (*KERNEL_HEADERS, *KERNELS):
        (folder / name).write_text(kernel_text(name))
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-march=native", "-fPIC"]
    command = [find_compiler(), *flags, "-r", "-nostdlib", *KERNELS, "-o", "kernels.o"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "kernels.o"
