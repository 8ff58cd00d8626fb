"""ONNX and ExecuTorch files: how they are written, and how they are run.

An ONNX file holds its own description. An ExecuTorch program, convolutions and matrix products in XNNPACK and the rest
in portable kernels, has no room for other data, so what describes it lies beside it: `model.pte` and `model.pte.json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lrfdyn.errors import LrfdynError, first_line, require
from lrfdyn.files import discard_stderr, json_object, plain_file, read_json, write_json
from lrfdyn.ops.dispatch import plain_operations

METADATA_KEY = "lrfdyn"  # one JSON object, which a reader in any language can take apart
INPUT, OUTPUT = "images", "logits"
MOST_BYTES = 2**31  # of a protobuf message
NO_DIGEST = 64 * "0"  # stands in a file while its checksum is computed


@contextmanager
def without_remarks() -> Iterator[None]:
    """Drops the exporters' remarks about packages and deprecations that no caller can act on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


@contextmanager
def importing(what: str, extra: str) -> Iterator[None]:
    """For imports: silent, and a package that is missing is an error that names the `extra` which has it."""
    try:
        with discard_stderr(), without_remarks():
            yield
    except ImportError as error:
        raise LrfdynError(f"{what} needs {error.name}; pip install 'lrfdyn[{extra}]'") from None


def write_onnx(form: nn.Module, sample: torch.Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes `form`, traced with the images `sample` `[2, C, H, W]`, as one file with its weights, for any number of
    images. `facts` go into its metadata."""
    with importing("format: onnx", "export"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    size = sum(t.nbytes for t in form.state_dict().values())
    require(size < MOST_BYTES, f"model: {size / 2**30:.1f} GiB of weights are more than one ONNX file can hold (2 GiB)")
    batch = torch.export.Dim("batch")
    with without_remarks(), plain_operations():  # a file for machines that do not have our kernels
        program = torch.export.export(form, (sample,), dynamic_shapes=({0: batch},), strict=False)
        names: Any = {"input_names": [INPUT], "output_names": [OUTPUT], "dynamic_shapes": ({0: "batch"},)}
        exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    model = exported.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces of this machine
        node.doc_string = ""
    for value in [*model.graph.value_info, *model.graph.initializer]:
        del value.metadata_props[:]
    model.producer_name, model.producer_version = "lrfdyn", str(facts.get("lrfdyn_version", ""))
    save_onnx(model, path, facts)


def save_onnx(model: Any, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a graph with `facts` in its metadata, and among them the checksum of the file."""
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps({**facts, "sha256": NO_DIGEST})
    data = model.SerializeToString()
    path.write_bytes(data.replace(NO_DIGEST.encode(), onnx_digest(data, NO_DIGEST).encode(), 1))


def onnx_digest(data: bytes, written: str) -> str:
    """The checksum of a file but for the place in which it is `written` itself."""
    return hashlib.sha256(data.replace(written.encode(), NO_DIGEST.encode(), 1)).hexdigest()


class OnnxRunner:
    """An exported file in ONNX Runtime: images `[B, C, H, W]`, or films `[B, T, C, H, W]` where it takes these, to
    logits `[B, classes]`, both in float32."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        with importing("runtime: onnx", "export"):
            import onnxruntime
        self.path, options = path, onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            name = str(plain_file(path))
            self.session = onnxruntime.InferenceSession(name, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime has many kinds
            raise LrfdynError(f"model: {path} is not an ONNX file that can be run ({first_line(error)})") from None
        found = self.session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        require(found is not None, f"model: {path} was not exported by lrfdyn: it has no metadata {METADATA_KEY!r}")
        try:
            self.facts: Any = json_object(found)
        except ValueError as error:
            raise LrfdynError(f"model: {path}: its metadata {METADATA_KEY!r} is no JSON ({error})") from None
        written = self.facts.pop("sha256", None)  # files of earlier versions have none
        same = written is None or onnx_digest(path.read_bytes(), str(written)) == written
        require(same, f"model: {path} is damaged or was changed (its checksum does not fit)")

    def __call__(self, images: np.ndarray) -> np.ndarray:
        try:
            return self.session.run([OUTPUT], {INPUT: images})[0]
        except Exception as error:  # the runtime has many kinds
            raise LrfdynError(f"model: {self.path} cannot be run ({first_line(error)})") from None


def sidecar(path: Path) -> Path:
    """The file beside the program `path` that describes it."""
    return path.with_name(path.name + ".json")


def write_executorch(form: nn.Module, sample: torch.Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes the program of `form`, traced with the images `sample` `[2, C, H, W]`, and its description `facts`. Memory
    is planned for `facts["most_images"]`, and no more can be shown at once."""
    with importing("format: executorch", "executorch"):
        from executorch.backends.xnnpack.partition import config
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    # What is worth a call into the library: sums of spikes in between would tear the graph into hundreds of pieces.
    worthwhile = ("AddmmConfig", "BMMConfig", "ConvolutionConfig", "LinearConfig", "MaxPool2dConfig", "MMConfig")
    partitioner = XnnpackPartitioner(configs=[getattr(config, name) for name in worthwhile])
    most = facts["most_images"]
    # A dimension of one size is refused.
    shapes, shown = (None, sample[:1]) if most == 1 else (({0: torch.export.Dim("batch", min=1, max=most)},), sample)
    with without_remarks(), plain_operations():  # a file for machines that do not have our kernels
        program = torch.export.export(form, (shown,), dynamic_shapes=shapes, strict=False)
        # While a program is lowered, PyTorch asks which of its own convolutions would run; some take fewer than 16
        # images only, and the answer for the sample would rule out larger batches although none of them will be used.
        sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
        traced = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        with nullcontext() if traced is None else traced.node.shape_env.suppress_guards():
            built = to_edge_transform_and_lower(program, partitioner=[partitioner]).to_executorch()
    with open(path, "wb") as file:
        built.write_to_file(file)
    write_json(sidecar(path), dict(facts))


class ExecutorchRunner:
    """An exported file in ExecuTorch: images `[B, C, H, W]` to logits `[B, classes]`, both in float32; B is at most
    `facts["most_images"]`."""

    def __init__(self, path: Path) -> None:
        with importing("runtime: executorch", "executorch"):
            from executorch.runtime import Runtime, Verification
        self.path, beside = path, sidecar(path)
        require(beside.is_file(), f"model: {path} needs its description {beside.name} beside it, which is not there")
        self.facts: Any = read_json(beside, "model")
        known = isinstance(self.facts.get("most_images"), int)
        require(known, f"model: {beside} is not the description of an exported model")
        try:
            with discard_stderr():
                program = plain_file(path)
                self.program = Runtime.get().load_program(program, verification=Verification.InternalConsistency)
                self.method = self.program.load_method("forward")
        except (RuntimeError, ValueError, OSError) as error:
            raise LrfdynError(f"model: {path} is not an ExecuTorch program that can be run ({error})") from None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        try:
            (logits,) = self.method.execute([torch.from_numpy(images)])
        except (RuntimeError, ValueError) as error:
            raise LrfdynError(f"model: {self.path} cannot be run ({first_line(error)})") from None
        return logits.numpy().copy()
