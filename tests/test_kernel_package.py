"""The kernels as a package of their own: loaded without lrfdyn and beside it, with the same values and gradients."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import kernel_package
from benchmarks.kernel_package import NAME, REPOSITORY
from lrfdyn import ops

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kernels")
    kernel_package.main([str(out)])
    kernel_package.main([str(out)])  # over an earlier one
    return out / REPOSITORY


def results(ops) -> dict:
    """Values and gradients of four operations, of a module that has them."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    def spikes(*shape):
        return (torch.rand(shape, generator=generator) < 0.3).float().requires_grad_()

    u, x = spikes(2, 9, 6), spikes(2, 6, 5, 5)
    decay, frequency, weight = random(6, 2), random(6, 2), random(6, 2, 2)
    calls = {
        "lif": (lambda c: ops.lif(c, ops.Dynamics.lif(threshold=0.5))[0], [random(4, 3, 5)]),
        "dendrite": (lambda u, d, f, w: ops.dendrite(u, d.abs(), f, w)[0], [u, decay, frequency, weight]),
        "lrf": (lambda x, w: ops.lrf(x, w, (1, 2), x), [x, random(2, 6, 3, 3)]),
        "spike_attention": (lambda *qkv: ops.spike_attention(*qkv, 0.25), [spikes(2, 2, 9, 4) for _ in range(3)]),
    }
    found = {}
    for name, (call, inputs) in calls.items():
        value = call(*inputs)
        found[name] = [value.detach(), *torch.autograd.grad((value * value + value).sum(), inputs)]
    return found


LOADERS = {
    "path": f"sys.path.insert(0, sys.argv[1] + '/build/torch-universal')\nimport {NAME} as module",
    "kernels": "from pathlib import Path\nfrom kernels import get_local_kernel\n"
    "module = get_local_kernel(Path(sys.argv[1]), backend='cpu')",
}

# A fresh process: first without lrfdyn, then with it.
PROGRAM = """
import json, sys
sys.modules["lrfdyn"] = None
{load}
import torch
identity = json.load(open(sys.argv[1] + "/build/torch-universal/metadata.json"))["id"]
assert sys.modules[identity].lif is module.lif
assert getattr(torch.ops, identity).lif and not hasattr(torch.ops.lrfdyn, "lif")
assert all(hasattr(module, name) for name in module.__all__)
found = results(module)

inner = sys.modules[identity].ops
inner.dispatch._on_kernel_device = lambda tensor: True
if inner.dispatch.triton_present():  # in its interpreter
    kernel = results(module)
    for name in found:
        for a, b in zip(found[name], kernel[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert identity + ".ops.lif.triton" in sys.modules

del sys.modules["lrfdyn"]
sys.path.insert(0, sys.argv[2])
import lrfdyn.ops
assert torch.ops.lrfdyn.lif is not getattr(torch.ops, identity).lif
expected = results(lrfdyn.ops)
for name in expected:
    assert all(map(torch.equal, found[name], expected[name])), name
print("same", *expected)
"""


@pytest.mark.parametrize("loader", LOADERS)
def test_it_needs_no_lrfdyn_and_gives_the_same(package, loader):
    if loader == "kernels" and not any(importlib.metadata.distributions(name="kernels")):  # a benchmark has that name
        pytest.skip("the package kernels is not installed")
    program = inspect.getsource(results) + PROGRAM.format(load=LOADERS[loader])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(package), str(ROOT)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same lif dendrite lrf spike_attention\n"


def test_the_folder_has_what_builder_and_loader_read(package):
    assert {path.name for path in package.iterdir()} == {
        "LICENSE", "README.md", "build", "build.toml", "flake.nix", "torch-ext",
    }  # fmt: skip
    general = tomllib.loads((package / "build.toml").read_text("utf-8"))["general"]
    variant = package / "build" / "torch-universal"
    facts = json.loads((variant / "metadata.json").read_text("utf-8"))
    assert (general["name"], general["version"]) == (facts["name"], facts["version"]) == (REPOSITORY, 0)
    assert facts["id"].isidentifier()
    files = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*.py")}
    digests = {name: hashlib.sha256(path.read_bytes()).digest() for name, path in files.items()}
    assert facts["digest"]["algorithm"] == "sha256"
    assert {name: base64.b64decode(text) for name, text in facts["digest"]["files"].items()} == digests
    sources = package / "torch-ext" / NAME
    built = {path.relative_to(sources).as_posix() for path in sources.rglob("*.py")}
    assert files.keys() - built == {"_ops.py", f"{NAME}/__init__.py"}
    text = "\n".join(path.read_text("utf-8") for path in files.values())
    assert not re.search(r"^ *(from|import) lrfdyn", text, re.MULTILINE)


def test_example_of_the_card_runs_and_names_what_is_there(package):
    card = (package / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict = {"kernels": ops}
    exec(re.sub(r"^(from kernels|kernels = ).*", "", code, flags=re.MULTILINE), names)
    assert names["currents"].grad.shape == (4, 2, 64, 14, 14)
    exported = re.findall(r'^    "(\w+)",$', kernel_package.INIT, re.MULTILINE)
    assert set(ops.__all__) < set(exported)
    for function in re.findall(r"^\| `(\w+)\(", card, re.MULTILINE):
        assert function in exported


def test_imports_become_relative():
    for package, given, expected in (
        (["ops", "lif"], "from lrfdyn.ops.lif.reference import a", "from .reference import a"),
        (["ops", "lif"], "    from lrfdyn.ops.bits import (", "    from ..bits import ("),
        (["ops", "bn_lif"], "from lrfdyn.ops.bn_lif import b", "from . import b"),
        (["ops"], "from lrfdyn.errors import require", "from ..errors import require"),
        ([], "from lrfdyn.errors import require", "from .errors import require"),
    ):
        assert kernel_package.relative(given, package) == expected


@pytest.mark.parametrize("line", ["import numpy", "from lrfdyn import ops", "from .nothing import a"])
def test_what_is_not_in_the_package_is_refused(line):
    with pytest.raises(SystemExit, match=r"kernel_package.py: ops/a.py imports \w+"):
        kernel_package.check({"ops/a.py": line, "ops/__init__.py": "", "errors.py": ""})
    kernel_package.check({"ops/a.py": "from ..errors import c\nimport torch.nn, os", "errors.py": ""})


def test_another_folder_is_left_alone(tmp_path):
    (tmp_path / REPOSITORY).mkdir()
    (tmp_path / REPOSITORY / "mine.txt").write_text("kept")
    with pytest.raises(SystemExit, match="no package of kernels"):
        kernel_package.build(tmp_path)
    assert (tmp_path / REPOSITORY / "mine.txt").read_text() == "kept"
