"""Models as ONNX files, written by PyTorch's exporter and run by ONNX Runtime."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lrfdyn.errors import LrfdynError, first_line, require

METADATA_KEY = "lrfdyn"  # one JSON object, which a reader in any language can take apart
INPUT, OUTPUT = "images", "logits"
MOST_BYTES = 2**31  # of a protobuf message


def write_onnx(form: nn.Module, sample: torch.Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes `form`, traced with the images `sample` `[2, C, H, W]`, as one file with its weights, for any number of
    images. `facts` go into its metadata."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise LrfdynError(f"format: onnx needs {error.name}; pip install 'lrfdyn[export]'") from None
    size = sum(t.numel() * t.element_size() for t in form.state_dict().values())
    require(size < MOST_BYTES, f"model: {size / 2**30:.1f} GiB of weights are more than one ONNX file can hold (2 GiB)")
    batch = torch.export.Dim("batch")
    with without_remarks():
        program = torch.export.export(form, (sample,), dynamic_shapes=({0: batch},), strict=False)
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], dynamic_shapes=({0: "batch"},),
            verbose=False,
        )  # fmt: skip
    assert exported is not None
    model = exported.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces of this machine
        node.doc_string = ""
    for value in [*model.graph.value_info, *model.graph.initializer]:
        del value.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(dict(facts))
    model.producer_name, model.producer_version = "lrfdyn", str(facts.get("lrfdyn_version", ""))
    onnx.save_model(model, path)


@contextmanager
def without_remarks() -> Iterator[None]:
    """Drops the exporters' remarks about packages and deprecations that no caller can act on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class OnnxRunner:
    """An exported file in ONNX Runtime: images `[B, C, H, W]` to logits `[B, classes]`, both in float32."""

    most_images: int | None = None

    def __init__(self, path: Path, threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise LrfdynError("runtime: onnx needs onnxruntime; pip install 'lrfdyn[export]'") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime has many kinds
            raise LrfdynError(f"model: {path} is not an ONNX file that can be run ({first_line(error)})") from None
        found = self.session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        require(found is not None, f"model: {path} was not exported by lrfdyn: it has no metadata {METADATA_KEY!r}")
        try:
            self.facts: Any = json.loads(found)
        except ValueError as error:
            raise LrfdynError(f"model: {path}: its metadata {METADATA_KEY!r} is no JSON ({error})") from None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.session.run([OUTPUT], {INPUT: images})[0]
