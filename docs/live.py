"""Builds the live page: its models as ONNX files that show what happens inside, its samples, and the runtime.

    python docs/live.py site/demo    # then: python -m http.server -d site, and open /demo/

The page itself is `docs/demo/`. A data set is on it by an entry in `PAIRS`, and has its samples in
`docs/demo/samples/KEY/CLASS.png`, in the size that the models take. The runtime, onnxruntime-web, is downloaded once;
without a network the page is built too, and says that it is missing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any

from lrfdyn.analysis import attention_state
from lrfdyn.attention import Attention, attention_label
from lrfdyn.deploy import IntegerModel, quantize
from lrfdyn.deploy.integer.onnx_graph import Graph, write_graph
from lrfdyn.deploy.integer.operations import Fire, Ssa
from lrfdyn.errors import LrfdynError
from lrfdyn.files import temporary_folder
from lrfdyn.io.hub import from_pretrained
from lrfdyn.io.zoo import INDEX, Pretrained, read_index
from lrfdyn.models import SpikingModel
from lrfdyn.version import __version__

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "demo"
REPORT = ROOT / "lrfdyn" / "analysis" / "report"
SHARED = ("report.css", "report_base.js", "report_charts.js", "report_frame.js")  # what the page has of the reports
CACHE = ROOT / "build" / "live"
RUNTIME = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # sha512
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
REGISTRY = "https://registry.npmjs.org"
BLOCK = 2**20  # numbers of attention weights that are computed at a time
LABELS = {"rpe": "position", "fire": "attention", "proj": "projection", "fc1": "MLP, first", "fc2": "MLP, second"}


@dataclass(frozen=True)
class Pair:
    """Two models of the zoo that differ in their attention alone, and what the page says of their data."""

    key: str
    title: str
    about: str
    models: tuple[str, str]


PAIRS = (
    Pair(
        "cifar100",
        "Photos of a hundred things",
        "32 x 32 pixels, 8 x 8 tokens, the classes of CIFAR-100. The samples are no part of it: three photos that "
        "anybody may use.",
        ("spikformer_cifar100_ssa", "spikformer_cifar100_lrf_dyn"),
    ),
    Pair(
        "digits",
        "Handwritten digits",
        "8 x 8 pixels, a token for each: scikit-learn's digits.",
        ("spikformer_digits_ssa", "spikformer_digits_lrf_dyn"),
    ),
)


def fetch_runtime(cache: Path = CACHE) -> Path:
    """The folder with the files of onnxruntime-web, downloaded if need be; an OSError where that is not possible."""
    folder = cache / f"{RUNTIME}-{VERSION}"
    if folder.is_dir():
        return folder
    registry = os.environ.get("NPM_CONFIG_REGISTRY", REGISTRY).rstrip("/")
    with urllib.request.urlopen(f"{registry}/{RUNTIME}/-/{RUNTIME}-{VERSION}.tgz", timeout=10) as answer:
        packed = answer.read()
    if hashlib.sha512(packed).digest() != base64.b64decode(INTEGRITY):
        raise OSError(f"{RUNTIME} {VERSION} from {registry} has another checksum")
    with new_folder(folder) as made, tarfile.open(fileobj=BytesIO(packed)) as archive:
        for name in FILES:
            content = archive.extractfile(f"package/dist/{name}")
            assert content is not None
            (made / name).write_bytes(content.read())
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A place to write a folder of the cache in, which is there as a whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as place:
        made = place / folder.name
        made.mkdir()
        yield made
        with suppress(OSError):  # another process was faster
            made.rename(folder)


def observe(model: SpikingModel, integer: IntegerModel, g: Graph, values: Sequence[str]) -> dict[str, str]:
    """What the page shows, as nodes of a graph: the spikes of every layer, added up over the channels `[T, B, H, W]`,
    and the weights that tokens give tokens in every attention layer `[B, N, N]`, not normalised."""
    seen: dict[str, str] = {}

    def tokens(value: int) -> str:
        """Spikes as `[B, N, T * C]`."""
        shape = integer.values[value]
        turned = g("Transpose", g.cast(values[value], "float32"), perm=[1, 2, 3, 0, 4])
        return g.reshape(turned, -1, shape.tokens, integer.time_steps * shape.channels)

    for number, operation in enumerate(integer.operations, 1):
        if isinstance(operation, Fire):
            spikes = g.cast(values[number], "float32")
            seen[f"spikes/{operation.name}"] = g("ReduceSum", spikes, g.constant([4], "int64"), keepdims=0)
        elif isinstance(operation, Ssa):  # q k^T, whose heads and time steps are added up
            q, k = (tokens(value) for value in operation.inputs[:2])
            weights = g("MatMul", q, g("Transpose", k, perm=[0, 2, 1]))
            seen[f"attention/{operation.name.removesuffix('.mix')}"] = weights
    for name, layer in model.named_modules():
        if isinstance(layer, Attention) and layer.fixed_mixing:
            ((_, weights),) = layer.mixing_weights({}, layer.grid, BLOCK) or ()
            seen[f"attention/{name}"] = g.constant(weights, "float32")
    return seen


def write_model(entry: Pretrained, path: Path) -> dict[str, Any]:
    """Writes the integer model of the zoo and returns what the page says of it."""
    model = from_pretrained(entry.name, local_files_only=True)
    assert isinstance(model, SpikingModel)
    assert model.preprocessing is not None
    integer = quantize(model)
    write_graph(integer, path, lambda g, values: observe(model, integer, g, values))
    fires = [(op, integer.values[n]) for n, op in enumerate(integer.operations, 1) if isinstance(op, Fire)]
    return {
        "name": entry.name,
        "kind": entry.attention,
        "label": attention_label(str(entry.attention)),
        "file": path.name,
        "bytes": path.stat().st_size,
        "parameters": entry.parameters,
        "top1": entry.integer,
        "test_images": entry.test_images,
        "scale": integer.scale,
        "state": attention_state(model),
        "attention": [name for name, layer in model.named_modules() if isinstance(layer, Attention)],
        "layers": [layer_facts(op.name, value.channels * value.tokens) for op, value in fires],
        "data": {
            "channels": integer.shape[0],
            "size": integer.shape[1],
            "crop_share": model.preprocessing.crop_share,
            "time_steps": integer.time_steps,
            "grid": list(next(layer.grid for layer in model.modules() if isinstance(layer, Attention))),
            "classes": list(integer.facts["class_names"]),
        },
    }


def layer_facts(name: str, neurons: int) -> dict[str, Any]:
    """`blocks.0.attn.q.neuron` is "q" of the part "Block 1"."""
    first, *inner = name.removesuffix(".neuron").split(".")
    last = inner[-1]
    label = f"stage {int(last) + 1}" if last.isdecimal() else LABELS.get(last, last)
    part = "Stem" if first == "stem" else f"Block {int(inner[0]) + 1}"
    return {"name": name, "part": part, "label": label, "neurons": neurons}


def stored_model(entry: Pretrained, folder: Path) -> dict[str, Any]:
    """As `write_model`, from the cache where neither the weights nor the code have changed."""
    content = hashlib.sha256(json.dumps(entry.files, sort_keys=True).encode())
    for source in sorted([Path(__file__), *(ROOT / "lrfdyn").rglob("*.py")]):
        content.update(source.read_bytes())
    stored = CACHE / f"{entry.name}-{content.hexdigest()[:16]}"
    path = stored / f"{entry.name}.onnx"
    if not stored.is_dir():
        for old in {*CACHE.glob(f"{entry.name}-*")} - {stored}:  # another process may be faster
            shutil.rmtree(old, ignore_errors=True)
        with new_folder(stored) as made:
            (made / "facts.json").write_text(json.dumps(write_model(entry, made / path.name)))
    shutil.copy(path, folder)
    return json.loads((stored / "facts.json").read_text())


def data_set(pair: Pair, zoo: Mapping[str, Pretrained], folder: Path) -> dict[str, Any]:
    """What the page holds of a pair."""
    models = [stored_model(zoo[name], folder) for name in pair.models]
    data, other = (model.pop("data") for model in models)
    assert data == other, pair.models
    samples = [
        {"class": data["classes"].index(path.stem), "file": path.relative_to(PAGE).as_posix()}
        for path in sorted((PAGE / "samples" / pair.key).glob("*.png"))
    ]
    return {"key": pair.key, "title": pair.title, "about": pair.about, **data, "samples": samples, "models": models}


def build(folder: Path, pairs: Sequence[Pair] = PAIRS) -> str | None:
    """Writes the whole page into `folder`; returns why the runtime is not in it, or None."""
    missing = None
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    for name in SHARED:
        shutil.copy(REPORT / name, folder)
    try:
        shutil.copytree(fetch_runtime(), folder / "runtime", dirs_exist_ok=True)
    except (OSError, HTTPException) as error:
        missing = f"{RUNTIME} {VERSION} could not be downloaded ({error})"
    models = folder / "models"
    models.mkdir(exist_ok=True)
    sets = [data_set(pair, read_index(INDEX), models) for pair in pairs]
    runtime = None if missing else f"{RUNTIME} {VERSION}"
    (folder / "manifest.json").write_text(json.dumps({"version": __version__, "runtime": runtime, "sets": sets}))
    return missing


if __name__ == "__main__":
    try:
        why = build(Path(sys.argv[1]))
    except LrfdynError as error:  # an sdist has no weights
        why = str(error)
    if why:
        print(f"live page: {why}; it says so in place of running", file=sys.stderr)
