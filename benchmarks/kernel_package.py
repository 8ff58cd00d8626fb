"""The kernels as a package of Hugging Face's `kernels` project, from lrfdyn/ops. Nothing is uploaded.

    python benchmarks/kernel_package.py build/kernels     # that is `make kernels`; needs Python only

It writes build/kernels/lrfdyn-kernels: build.toml and torch-ext/ for kernel-builder, and build/torch-universal/, which
`kernels.get_local_kernel` loads as it is. The package imports nothing but torch, triton and the standard library, its
own modules by relative imports only, and its operators have a namespace of their own with a digest of the sources in
it. So it can be loaded beside lrfdyn, and beside other versions of itself.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "lrfdyn-kernels"
NAME = REPOSITORY.replace("-", "_")  # of the Python package
VERSION = 0  # of its interface; 0 is one that may still change
ALLOWED = {"torch", "triton", *sys.stdlib_module_names}
IMPORT = re.compile(r"^( *from )lrfdyn\.([\w.]+)( import )", re.MULTILINE)
NAMESPACE = re.compile(r'^NAMESPACE = "lrfdyn".*$', re.MULTILINE)

INIT = '''"""Spiking neurons, dendrites, local receptive fields and spiking self-attention, with kernels in Triton."""

from .errors import LrfdynError
from .ops import (
    Dynamics,
    causal_spike_attention,
    dendrite,
    dendrite_step,
    integer_spike,
    lif,
    lrf,
    spike_attention,
)
from .ops.bn_lif import Integer, Norm, bn_lif
from .ops.dendrite import initial_dendrites, paired_modes
from .ops.dispatch import plain_operations

__all__ = [
    "Dynamics",
    "Integer",
    "LrfdynError",
    "Norm",
    "bn_lif",
    "causal_spike_attention",
    "dendrite",
    "dendrite_step",
    "initial_dendrites",
    "integer_spike",
    "lif",
    "lrf",
    "paired_modes",
    "plain_operations",
    "spike_attention",
]
'''

# What kernel-builder writes itself into what it builds.
OPS = '''"""The namespace of the operators."""

import torch

_OPS_NAME = "{id}"
ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name):
    return f"{{_OPS_NAME}}::{{op_name}}"
'''

# Older loaders look for a package of this name inside the variant.
BY_NAME = '''"""The names of the package around this one, under its own name."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "{id}" not in sys.modules:
    _spec = spec_from_file_location("{id}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{id}"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{id}"])
__all__ = sys.modules["{id}"].__all__
globals().update({{name: getattr(sys.modules["{id}"], name) for name in __all__}})
'''

BUILD = f"""[general]
name = "{REPOSITORY}"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda", "rocm"]

[torch-noarch]
"""

FLAKE = """{
  description = "Kernels of spiking vision transformers";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs {
    inherit self;
    path = ./.;
  };
}
"""

CARD = f"""---
library_name: kernels
license: apache-2.0
tags:
- kernels
- spiking-neural-networks
---

# {REPOSITORY}

Operations of spiking vision transformers: neurons, dendrites, local receptive fields and self-attention without
softmax, forward and backward. On a GPU they are fused kernels in Triton, in float32, bfloat16 and float16; everywhere
else, and in other types, the plain definitions in PyTorch. Values and gradients of both are tested against each other.
Measured on NVIDIA GPUs only.

```python
from pathlib import Path

import torch
from kernels import get_local_kernel

kernels = get_local_kernel(Path("{REPOSITORY}"))
currents = torch.randn(4, 2, 64, 14, 14, requires_grad=True)  # [T, B, C, H, W]
spikes, _ = kernels.lif(currents, kernels.Dynamics.lif(tau=2.0, threshold=1.0))
local = kernels.lrf(spikes.flatten(0, 1), torch.randn(2, 64, 3, 3), dilations=(3, 5))
local.sum().backward()
```

| function | takes | gives |
|---|---|---|
| `lif(x, dynamics)` | currents `[T, ...]` | spikes `[T, ...]`, the last membrane `[...]` or None |
| `integer_spike(x, levels)` | currents of any shape | `round(clamp(x, 0, D)) / D` |
| `bn_lif(x, norm, dynamics)` | currents `[T, B, C, H, W]`, a `Norm` of C channels | spikes of the normalised currents |
| `lrf(x, weight, dilations, residual)` | tokens `[B, C, H, W]`, stencils `[K, C, 3, 3]` | `[B, C, H, W]` |
| `dendrite(u, decay, frequency, weight)` | tokens `[B, N, C]`, modes `[C, M]`, `[C, M]`, `[C, M, 2]` | \
potentials `[B, N, C]`, the last state or None |
| `spike_attention(q, k, v, scale)` | spikes `[..., N, d]`, `v` `[..., N, e]` | `scale * q k^T v`, `[..., N, e]` |
| `causal_spike_attention(q, k, v, scale)` | the same | the same over earlier tokens, the last state or None |

The docstrings say the rest. `paired_modes(*initial_dendrites(channels, dendrites, width))` makes modes to start from.
Inside `plain_operations()` the definitions run on a GPU too; they have second derivatives, the kernels have not. Python
3.11 or newer is needed.
"""


def relative(text: str, package: Sequence[str]) -> str:
    """The source of a module in `package`, its parts below lrfdyn, with relative imports of lrfdyn's modules."""

    def line(found: re.Match[str]) -> str:
        parts = found[2].split(".")
        shared = 0
        while shared < min(len(parts), len(package)) and parts[shared] == package[shared]:
            shared += 1
        return f"{found[1]}{'.' * (1 + len(package) - shared)}{'.'.join(parts[shared:])}{found[3]}"

    return IMPORT.sub(line, text)


def sources(package: Path = ROOT / "lrfdyn") -> dict[str, str]:
    """Every module of the package by its path."""
    shared = (package / f"{name}.py" for name in ("errors", "checks", "files"))
    files = [*shared, *sorted((package / "ops").rglob("*.py"))]
    found = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in files}
    modules = {path: relative(text, path.split("/")[:-1]) for path, text in found.items()}
    text, count = NAMESPACE.subn("from .._ops import _OPS_NAME as NAMESPACE", modules["ops/operators.py"])
    if count != 1:
        sys.exit("kernel_package.py: expected NAMESPACE in lrfdyn/ops/operators.py once")
    return {"__init__.py": INIT, **modules, "ops/operators.py": text}


def imported(text: str, package: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The modules that a source imports: a name, or the path of one of the package's own, and which it is."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0], False
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1]
            yield "/".join([*above, *(node.module or "").split(".")]).rstrip("/"), True


def check(modules: Mapping[str, str]) -> None:
    """Nothing else is imported, and what is imported is there."""
    for path, text in modules.items():
        for name, own in imported(text, path.split("/")[:-1]):
            known = {f"{name}.py", f"{name}/__init__.py"} & modules.keys() if own else name in ALLOWED
            if not known:
                sys.exit(f"kernel_package.py: {path} imports {name}, which is not in the package")


def metadata(identity: str, files: Mapping[str, str]) -> str:
    """What the loader reads. Of the backends it names the one that has kernels of its own."""
    digests = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in files.items()}
    facts = {
        "name": REPOSITORY, "id": identity, "version": VERSION, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cuda"}, "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
    }  # fmt: skip
    return json.dumps(facts, indent=2) + "\n"


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


def build(out: Path) -> Path:
    """Writes the package anew; returns its folder."""
    folder = out / REPOSITORY
    if folder.exists() and not (folder / "build.toml").is_file():
        sys.exit(f"kernel_package.py: {folder} is there and is no package of kernels")
    modules = sources()
    digest = hashlib.sha256("".join(f"{path}\n{text}" for path, text in sorted(modules.items())).encode())
    identity = f"_{NAME}_{digest.hexdigest()[:12]}"
    built = {**modules, "_ops.py": OPS.format(id=identity), f"{NAME}/__init__.py": BY_NAME.format(id=identity)}
    check(built)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, {"build.toml": BUILD, "flake.nix": FLAKE, "README.md": CARD})
    shutil.copy(ROOT / "LICENSE", folder)
    write(folder / "torch-ext" / NAME, modules)
    write(folder / "build" / "torch-universal", {**built, "metadata.json": metadata(identity, built)})
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "kernels", help="default: build/kernels")
    print(build(parser.parse_args(argv).out))


if __name__ == "__main__":
    main()
