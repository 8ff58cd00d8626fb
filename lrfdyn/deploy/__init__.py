"""Trained models outside of training: in little memory (attention row by row, whole models piece by piece), frame by
frame along a camera, in integers, and as files that run elsewhere."""

from lrfdyn.attention.row_stream import RowStream
from lrfdyn.deploy.c.native import NativeModel
from lrfdyn.deploy.c.write import WrittenC, write_c
from lrfdyn.deploy.export.write import Exported, export_model
from lrfdyn.deploy.integer.onnx_graph import write_integer_onnx
from lrfdyn.deploy.integer.program import IntegerModel, load_integer
from lrfdyn.deploy.integer.quantize import quantize
from lrfdyn.deploy.lowmem import LowMemoryModel, compile_for_inference
from lrfdyn.deploy.predict import Predictor
from lrfdyn.deploy.streaming_attention import StreamingAttention
from lrfdyn.deploy.time_stream import TimeStream

__all__ = [
    "Exported",
    "IntegerModel",
    "LowMemoryModel",
    "NativeModel",
    "Predictor",
    "RowStream",
    "StreamingAttention",
    "TimeStream",
    "WrittenC",
    "compile_for_inference",
    "export_model",
    "load_integer",
    "quantize",
    "write_c",
    "write_integer_onnx",
]
