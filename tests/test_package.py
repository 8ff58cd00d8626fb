"""What a user meets first: the import, the README, the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lrfdyn
from lrfdyn.cli import build_parser, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_quick_and_lean():
    code = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import lrfdyn
print(time.perf_counter() - start)
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    seconds, modules = python(code).splitlines()
    assert float(seconds) < 2
    for heavy in ("matplotlib", "sklearn", "triton", "timm", "torchvision", "spikingjelly", "rich", "scipy"):
        assert f"'{heavy}'" not in modules


def test_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    output = python(code)
    assert "dendrites k d" in output
    assert "sdt_v3_s" in output


def test_help_of_every_command(capsys):
    for command in ("reproduce", "models"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert "--help" in capsys.readouterr().out
    assert build_parser().prog == "lrfdyn"


def test_package_is_typed():
    assert (Path(lrfdyn.__file__).parent / "py.typed").is_file()


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"lrfdyn {lrfdyn.__version__}\n"
    assert f"\nversion: {lrfdyn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {lrfdyn.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "lrfdyn", "modles"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "modles" in done.stderr
