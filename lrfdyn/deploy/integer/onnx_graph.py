"""An integer model as an ONNX graph that gives the same bits.

Spikes and their sums are uint8, currents int32, tensors `[T, B, H, W, C]`: convolutions are products of bytes with
8-bit matrices, which ONNX Runtime computes fast. Attention and dendrites are computed in floating point, to whose exact
integers their numbers keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.deploy.export.formats import INPUT, OUTPUT, OnnxRunner, importing, save_onnx
from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer.operations import POOL, Operation, Value
from lrfdyn.deploy.integer.program import IntegerModel, random_pictures
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import expanded, temporary_folder, writable_folder
from lrfdyn.sources import EXPORTED

OPSET, IR_VERSION = 17, 8  # from 2022: what runtimes on boards have too
SIGN = 2**15  # added to numbers of 16 bits to have none below zero


class Graph:
    """The nodes and constants of a graph in the making; results are named one after the other."""

    def __init__(self, model: IntegerModel) -> None:
        from onnx import helper, numpy_helper

        self.helper, self.numpy_helper = helper, numpy_helper
        self.model, self.count = model, 0
        self.nodes: list[Any] = []
        self.constants: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self.initializers: list[Any] = []

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        out = f"v{self.count}"
        self.nodes.append(self.helper.make_node(kind, inputs, [out], **attributes))
        return out

    def constant(self, values: Any, dtype: str = "int32") -> str:
        array = np.asarray(values.numpy() if isinstance(values, Tensor) else values, dtype=dtype, order="C")
        key = array.tobytes(), dtype, array.shape
        if key not in self.constants:
            self.constants[key] = f"c{len(self.constants)}"
            self.initializers.append(self.numpy_helper.from_array(array, self.constants[key]))
        return self.constants[key]

    def cast(self, x: str, dtype: str) -> str:
        return self("Cast", x, to=self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, x: str, *shape: int) -> str:
        return self("Reshape", x, self.constant(shape, "int64"))

    def reshaped(self, x: str, value: Value, *inner: int) -> str:
        """As `[T, B, ...]`; without `inner` sizes as `[T, B, H, W, C]`."""
        steps = self.model.time_steps if value.timed else 1
        return self.reshape(x, steps, -1, *(inner or (value.height, value.width, value.channels)))

    def window(self, x: str, start: tuple[int, int], out: Value, stride: int = 1) -> str:
        """The pixels of `x` on the grid of `out`, each moved by `start`."""
        end = [first + stride * (side - 1) + 1 for first, side in zip(start, (out.height, out.width), strict=True)]
        places = [self.constant(each, "int64") for each in (start, end, (2, 3), (stride, stride))]
        return self("Slice", x, *places)

    def padded(self, x: str, pad: int) -> str:
        return self("Pad", x, self.constant([0, 0, pad, pad, 0] * 2, "int64")) if pad else x

    def weighted(self, windows: Sequence[tuple[tuple[int, int], Tensor]], x: str, out: Value, stride: int = 1) -> str:
        """The sum of windows, each times a weight `[C]`."""
        total = ""
        for start, weight in windows:
            part = self("Mul", self.window(x, start, out, stride), self.constant(weight))
            total = self("Add", total, part) if total else part
        return total


Observe = Callable[[Graph, Sequence[str]], Mapping[str, str]]


@singledispatch
def emit(operation: Operation, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    """Adds an operation on the inputs `xs`, which are `values`; what it gives is `out`, uint8 or int32."""
    raise LrfdynError(f"operation {operation.name}: {type(operation).__name__} has no ONNX form")


def _wide(g: Graph, xs: list[str], values: list[Value]) -> list[str]:
    """The inputs in int32."""
    return [x if value.kind == "int" else g.cast(x, "int32") for x, value in zip(xs, values, strict=True)]


def _fit(g: Graph, x: str, out: Value) -> str:
    """An int32 result in the type of its value."""
    return x if out.kind == "int" else g.cast(x, "uint8")


@emit.register
def _(operation: ops.Conv, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    x, kernel = xs[0], operation.weight.shape[2:]
    if operation.border is not None:
        border = g.constant(operation.border)
        x = g("Sub", g.cast(x, "int32"), border)
        x = g.cast(g("Add", g.padded(x, operation.padding), border), "uint8")
    else:
        x = g.padded(x, operation.padding)
    starts = [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]
    if operation.groups > 1:
        operation.check(operation.groups == values[0].channels == out.channels, "depth-wise groups in ONNX")
        (x,) = _wide(g, [x], values)
        taps = operation.weight.squeeze(1).flatten(1).unbind(1)
        y = g.weighted(list(zip(starts, taps, strict=True)), x, out, operation.stride)
    else:
        windows = [x] if kernel == (1, 1) == (operation.stride,) * 2 else [
            g.window(x, start, out, operation.stride) for start in starts
        ]  # fmt: skip
        x = windows[0] if len(windows) == 1 else g("Concat", *windows, axis=4)
        weight = operation.weight.permute(2, 3, 1, 0).flatten(0, 2)
        high_bytes, _ = _bytes(weight)
        reach = torch.maximum(-values[0].low, values[0].high).max() * 256 * high_bytes.abs().sum(0).max()
        operation.check(int(high_bytes.max()) < 128 and int(reach) <= ops.MOST, "smaller weights in ONNX")
        if values[0].kind != "int":
            y = _matmul(g, x, weight, 0, int(values[0].high.max()))
        else:  # 16 bits as two bytes, the upper one around 128
            narrow = int(values[0].low.min()) >= -SIGN and int(values[0].high.max()) < SIGN
            operation.check(narrow, "inputs of 16 bits in ONNX")
            moved = g("Add", x, g.constant(SIGN))
            upper = g("Div", moved, g.constant(256))
            lower = g.cast(g("Sub", moved, g("Mul", upper, g.constant(256))), "uint8")
            upper = _matmul(g, g.cast(upper, "uint8"), weight, 128, 255)
            y = g("Add", g("Mul", upper, g.constant(256)), _matmul(g, lower, weight, 0, 255))
    return _fit(g, g("Add", y, g.constant(operation.bias)), out)


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of 16-bit weights, both with a sign: 256 times the first, and the second, from -128 to 127."""
    lower = ((weight.long() + 128) & 255) - 128
    return (weight.long() - lower) >> 8, lower


def _matmul(g: Graph, x: str, weight: Tensor, zero: int, most: int) -> str:
    """Bytes up to `most`, of which `zero` stands for 0, times weights `[in, out]` of 8 or 16 bits."""
    if weight.dtype == torch.int16:
        upper, lower = (_matmul(g, x, part.to(torch.int8), zero, most) for part in _bytes(weight))
        return g("Add", g("Mul", upper, g.constant(256)), lower)
    # Where a processor adds two products of a byte and one with a sign in 16 bits, larger ones are cut off in ONNX
    # Runtime; products of bytes without a sign never are.
    if 2 * 128 * most < 2**15:
        return g("MatMulInteger", x, g.constant(weight, "int8"))
    zeros = g.constant(zero, "uint8"), g.constant(128, "uint8")
    return g("MatMulInteger", x, g.constant(weight.short() + 128, "uint8"), *zeros)


@emit.register
def _(operation: ops.Stencils, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    taps: dict[tuple[int, int], Tensor] = {}
    for stencil, dilation in zip(operation.weight.long(), operation.dilations, strict=True):
        for a, b in product(range(3), repeat=2):
            place = ((a - 1) * dilation, (b - 1) * dilation)
            if abs(place[0]) < out.height and abs(place[1]) < out.width:
                taps[place] = taps.get(place, torch.zeros(())) + stencil[:, a, b]
    reach = max(abs(step) for place in taps for step in place)
    (x,) = _wide(g, xs, values)
    windows = [((reach + dy, reach + dx), weight) for (dy, dx), weight in taps.items()]
    return _fit(g, g("Add", g.weighted(windows, g.padded(x, reach), out), g.constant(operation.bias)), out)


@emit.register
def _(operation: ops.Fire, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    """With a membrane that is shifted to the left as steps go by, in the place of one that is shifted to the right."""
    (x,), steps, a = _wide(g, xs, values), g.model.time_steps, operation.kept_shift
    threshold, zero, membrane, spikes = operation.threshold.long(), g.constant(0), "", []
    for t in range(steps):
        current = g("Gather", x, g.constant([t if values[0].timed else 0], "int64"), axis=0) if steps > 1 else x
        current = g("Mul", current, g.constant(1 << a * t)) if a * t else current
        membrane = g("Add", membrane, current) if membrane else current
        left = operation.fraction_bits(steps) - a * t
        level = threshold >> left if operation.strict else -(-threshold >> left)
        fired = g("Greater" if operation.strict else "GreaterOrEqual", membrane, g.constant(level))
        membrane = g("Where", fired, zero, membrane) if t + 1 < steps else ""
        spikes.append(g.cast(fired, "uint8"))
    return g("Concat", *spikes, axis=0) if steps > 1 else spikes[0]


@emit.register
def _(operation: ops.Levels, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    (x,) = _wide(g, xs, values)
    reached = [g("GreaterOrEqual", x, g.constant(level)) for level in operation.thresholds.unbind(1)]
    total = g.cast(reached[0], "int32")
    for level in reached[1:]:
        total = g("Add", total, g.cast(level, "int32"))
    return _fit(g, total, out)


@emit.register
def _(operation: ops.MaxPool, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    kernel, stride, padding = POOL
    how = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
    before, dtype = values[0], "uint8" if out.kind != "int" else _exact_float(out)
    x = g.reshape(g.cast(xs[0], dtype), -1, before.height, before.width, before.channels)
    pooled = g("MaxPool", g("Transpose", x, perm=[0, 3, 1, 2]), **how)
    y = g.reshaped(g("Transpose", pooled, perm=[0, 2, 3, 1]), out)
    return y if dtype == "uint8" else g.cast(y, "int32")


def _exact_float(value: Value) -> str:
    largest = int(torch.maximum(-value.low, value.high).max())
    return "float32" if largest < 2**24 else "float64"


@emit.register
def _(operation: ops.Add, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    return _fit(g, g("Add", *_wide(g, xs, values)), out)


@emit.register
def _(operation: ops.ScaleAdd, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    x, y = _wide(g, xs, values)
    return _fit(g, g("Add", g("Mul", x, g.constant(operation.multiplier)), y), out)


@emit.register
def _(operation: ops.Rescale, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    shift = operation.shift.long()
    operation.check(int(shift.max()) <= 60, "shifts of at most 60 in ONNX")
    reach = torch.maximum(-values[0].low, values[0].high) * operation.multiplier.long()
    operation.check(int(reach.max()) < 2**61, "products of at most 61 bits in ONNX")
    x = g("Mul", g.cast(xs[0], "int64"), g.constant(operation.multiplier, "int64"))
    # ONNX has no shift of numbers with a sign, and division cuts towards zero: from above zero it rounds down.
    x = g("Add", x, g.constant(((1 << shift) >> 1) + 2**61, "int64"))
    x = g("Sub", g("Div", x, g.constant(1 << shift, "int64")), g.constant(2**61 >> shift, "int64"))
    limit = [g.constant(sign * operation.limit, "int64") for sign in (-1, 1)]
    return _fit(g, g.cast(g("Min", g("Max", x, limit[0]), limit[1]), "int32"), out)


@emit.register
def _(operation: ops.Ssa, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    dtype, heads = _exact_float(out), operation.heads
    split = [
        g("Transpose", g.reshape(g.cast(x, dtype), -1, value.tokens, heads, value.channels // heads), perm=perm)
        for x, value, perm in zip(xs, values, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    ]
    q, k, v = split  # [T * B, heads, tokens, channels], and k with its last axes changed round
    if operation.causal:
        seen = np.tril(np.ones((out.tokens, out.tokens)))
        mixed = g("MatMul", g("Mul", g("MatMul", q, k), g.constant(seen, dtype)), v)
    else:
        mixed = g("MatMul", q, g("MatMul", k, v))
    return g.reshaped(_fit(g, g.cast(g("Transpose", mixed, perm=[0, 2, 1, 3]), "int32"), out), out)


@emit.register
def _(operation: ops.Gate, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    least = min(value.channels for value in values)
    parts = [
        g.reshaped(x, value, value.height, value.width, least, value.channels // least)
        for x, value in zip(_wide(g, xs, values), values, strict=True)
    ]
    y = g.reshaped(g("Mul", *parts), out)
    return _fit(g, y if operation.bias is None else g("Add", y, g.constant(operation.bias)), out)


@emit.register
def _(operation: ops.SumTokens, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    return _fit(g, g("ReduceSum", *_wide(g, xs, values), g.constant([2, 3], "int64"), keepdims=1), out)


@emit.register
def _(operation: ops.SumChannels, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    (x,) = _wide(g, xs, values)
    x = g.reshaped(x, values[0], out.height, out.width, operation.groups, values[0].channels // operation.groups)
    return _fit(g, g("ReduceSum", x, g.constant([5], "int64"), keepdims=0), out)


@emit.register
def _(operation: ops.Dendrites, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    """A `Scan` over the tokens, whose states are whole numbers in float64."""
    u = g.reshape(g.cast(xs[0], "float64"), -1, out.tokens, out.channels, 1)
    tokens = g("Transpose", g("Unsqueeze", u, g.constant([0], "int64")), perm=[2, 0, 1, 3, 4])
    powers = 2.0 ** operation.shift.double()
    enters = torch.stack((powers, powers if operation.real else 0 * powers)).unsqueeze(1)  # [2, 1, C, M]
    tokens = g("Mul", tokens, g.constant(enters, "float64"))  # [N, 2, T * B, C, M]: re and im
    rest = g("Mul", g("Gather", tokens, g.constant(0, "int64"), axis=0), g.constant(0.0, "float64"))
    half, outside = g.constant(0.5, "float64"), g.nodes
    a, b = (operation.coefficient.double() / 2**15).unbind(-1)

    def rounded(x: str, coefficient: Tensor) -> str:
        return g("Floor", g("Add", g("Mul", x, g.constant(coefficient, "float64")), half))

    g.nodes = []
    if operation.real:
        kept = rounded("state", torch.stack((a, b)).unsqueeze(1))
    else:
        crossed = rounded(g("Gather", "state", g.constant([1, 0], "int64"), axis=0), b)
        signs = g.constant(np.array([-1.0, 1.0]).reshape(2, 1, 1, 1), "float64")
        kept = g("Add", rounded("state", a), g("Mul", crossed, signs))
    after = g("Add", kept, "entering")
    again = g("Identity", after)
    kind = g.helper.np_dtype_to_tensor_dtype(np.dtype("float64"))
    described = [g.helper.make_tensor_value_info(n, kind, None) for n in ("state", "entering", after, again)]
    body = g.helper.make_graph(g.nodes, "dendrites", described[:2], described[2:])
    g.nodes, way = outside, [int(operation.reverse)]
    how = {"num_scan_inputs": 1, "scan_input_directions": way, "scan_output_directions": way, "body": body}
    g.count += 2
    last, states = f"v{g.count - 1}", f"v{g.count}"
    g.nodes.append(g.helper.make_node("Scan", [rest, tokens], [last, states], **how))
    weight = operation.weight.double().permute(2, 0, 1).unsqueeze(1)  # [2, 1, C, M]
    read = g("ReduceSum", g("Mul", states, g.constant(weight, "float64")), g.constant([4], "int64"), keepdims=0)
    read = g("ReduceSum", read, g.constant([1], "int64"), keepdims=0)
    soma = g("Floor", g("Add", g("Mul", read, g.constant(0.5 ** operation.out_shift.double(), "float64")), half))
    return g.reshaped(_fit(g, g.cast(g("Transpose", soma, perm=[1, 0, 2]), "int32"), out), out)


@emit.register
def _(operation: ops.Head, g: Graph, xs: list[str], values: list[Value], out: Value) -> str:
    total = g("ReduceSum", *_wide(g, xs, values), g.constant([0, 2, 3], "int64"), keepdims=0)
    return g("Add", g("MatMul", total, g.constant(operation.weight.T)), g.constant(operation.bias))


@checked
def write_integer_onnx(model: IntegerModel, out: str | os.PathLike[str], images: Tensor | None = None) -> Path:
    """Writes `model` as one ONNX file, which takes uint8 `images` `[B, C, H, W]` and gives int32 `logits`
    `[B, classes]`; the model's facts and `scale` are in its metadata.

    ONNX Runtime must give the bits of the definition for `images` (without any, two of random pixels): a file for which
    it does not is an error, and none is left. Returns the path of the file.
    """
    path = expanded(out, "out")
    require(path.suffix == EXPORTED["onnx"], f"out: expected a name that ends in {EXPORTED['onnx']}, got {path}")
    require(not path.is_dir(), f"out: expected a file, got the folder {path}")
    writable_folder(path.parent, "out")
    images = random_pictures(model) if images is None else images
    expected = model(images).numpy()
    try:
        with temporary_folder(path.parent) as folder:
            made = folder / path.name
            write_graph(model, made)
            found = OnnxRunner(made).session.run([OUTPUT], {INPUT: images.numpy()})[0]
            require(np.array_equal(found, expected), "export: ONNX Runtime gives other integers; the file was not kept")
            made.replace(path)
    except OSError as error:
        raise LrfdynError(f"out: cannot write {path} ({error.strerror or error})") from None
    return path


def write_graph(model: IntegerModel, path: Path, observe: Observe = lambda *_: {}) -> None:
    """Writes the program, unchecked. `observe` is called with the graph and the names of all values in it, the pixels
    first, and returns by name what the file gives beside the logits, in float32."""
    with importing("format: onnx", "export"):
        import onnx
    g = Graph(model)
    names = [g("Unsqueeze", g("Transpose", INPUT, perm=[0, 2, 3, 1]), g.constant([0], "int64"))]
    for operation, value in zip(model.operations, model.values[1:], strict=True):
        inputs = [names[i] for i in operation.inputs], [model.values[i] for i in operation.inputs]
        names.append(emit(operation, g, *inputs, value))
    g.nodes[-1].output[0] = OUTPUT  # the head is the last
    types = onnx.TensorProto
    images = g.helper.make_tensor_value_info(INPUT, types.UINT8, ["batch", *model.shape])
    logits = g.helper.make_tensor_value_info(OUTPUT, types.INT32, ["batch", model.values[-1].channels])
    seen = observe(g, names)
    g.nodes += [g.helper.make_node("Identity", [value], [name]) for name, value in seen.items()]
    more = [g.helper.make_tensor_value_info(name, types.FLOAT, None) for name in seen]
    graph = g.helper.make_graph(g.nodes, "integer", [images], [logits, *more], g.initializers)
    made = g.helper.make_model(graph, opset_imports=[g.helper.make_opsetid("", OPSET)], producer_name="lrfdyn")
    made.ir_version = IR_VERSION
    save_onnx(made, path, {**model.facts, "scale": model.scale})
