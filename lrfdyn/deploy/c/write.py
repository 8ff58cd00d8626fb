"""An integer model as a folder of C: the model's data, the kernels, a Makefile and a test.

- lrfdyn.h: `int lrfdyn_run(const uint8_t *pixels, int32_t *logits)`
- lrfdyn_model.c and .h: sizes, weights, memory and the order of the kernels
- lrfdyn_kernels.c, lrfdyn_stage.c, lrfdyn_conv.c and their headers: the kernels, the same for every model
- lrfdyn_vectors.h: pictures and the logits that they must give, bit for bit, which lrfdyn_test.c compares
- lrfdyn.json: what the model says about itself
- lrfdyn_classify.c: an example that says what is on pictures
- Makefile: liblrfdyn.a, the test, the example, and with `make shared` a library for other languages
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.deploy.c.native import KERNEL_HEADERS, KERNELS, LIBRARIES, MODEL_FILES, NativeModel, find_compiler
from lrfdyn.deploy.c.plan import Call, Map, Plan, Planner, Term, scratch_of, with_lanes
from lrfdyn.deploy.integer.operations import MOST, Dendrites, Fire, Head, Levels, Ssa
from lrfdyn.deploy.integer.program import IntegerModel, random_pictures
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import expanded, file_digest, temporary_folder, writable_folder, write_json
from lrfdyn.io.hub import class_names_of
from lrfdyn.sources import EXPORTED

PACKAGED = ("lrfdyn.h", *KERNEL_HEADERS, *KERNELS, "lrfdyn_test.c", "lrfdyn_classify.c", "Makefile")
TYPES = {torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.int32: "int32_t"}
ACROSS = 16  # numbers in a line
THREADS = """#if LRFDYN_THREADS < 1
#error "LRFDYN_THREADS: expected at least 1"
#elif LRFDYN_THREADS > 1 && !defined(_OPENMP)
#error "LRFDYN_THREADS: more than one needs OpenMP (-fopenmp)"
#endif
#ifdef _OPENMP
#include <omp.h>
#define WAIT _Pragma("omp barrier") /* for all threads: what they wrote is read next */
#else
#define WAIT
#endif

#ifdef __GNUC__
#define ALIGNED __attribute__((aligned(64))) /* vectors across two lines of a cache take longer */
#else
#define ALIGNED
#endif

static uint64_t memory[LRFDYN_MEMORY / 8] ALIGNED;
#define AT(offset) ((void *)(memory + (offset) / 8))
/* What a kernel needs meanwhile: the first thread has it among the maps, the others behind them. */
#define SCRATCH(offset) AT(share.part ? LRFDYN_ARENA + (share.part - 1) * LRFDYN_SCRATCH : (offset))
"""
RUN = """int lrfdyn_run(const uint8_t *pixels, int32_t *logits) {
    if (!pixels || !logits) return LRFDYN_NULL;
    map_0.data = (void *)(uintptr_t)pixels;
#ifdef _OPENMP
#pragma omp parallel num_threads(LRFDYN_THREADS)
    run(logits, (lrfdyn_share){omp_get_thread_num(), omp_get_num_threads()});
#else
    run(logits, (lrfdyn_share){0, 1});
#endif
    return LRFDYN_OK;
}

int lrfdyn_run_checked(const uint8_t *pixels, uint32_t pixels_count, int32_t *logits, uint32_t logits_count) {
    if (pixels_count != LRFDYN_PICTURE || logits_count != LRFDYN_CLASSES) return LRFDYN_SIZE;
    return lrfdyn_run(pixels, logits);
}
"""


@dataclass(frozen=True)
class WrittenC:
    """A folder that `write_c` wrote: the bytes of its weights, of the static memory beside them and of what each thread
    but the first adds to it, and whether it was `verified`."""

    path: Path
    weight_bytes: int
    memory_bytes: int
    thread_bytes: int
    verified: bool


@checked
def write_c(
    model: IntegerModel, out: str | os.PathLike[str], images: Tensor | None = None, verify: bool = False
) -> WrittenC:
    """Writes `model` as a folder of C99 without dependencies, allocation or floating point.

    - `model`: An integer model.
    - `out`: The folder, whose name ends in .c.
    - `images`: Levels from 0 to 255, uint8 `[N, C, H, W]`. They become the test of the folder, with the logits that the
      definition gives: `make test` compares them bit for bit. Without any, there are two of random pixels.
    - `verify`: Do the same here, where a C compiler is installed: a folder that gives other bits is an error, and none
      is left.

    Example:

        made = write_c(quantize(model), "model.c")
        print(made.weight_bytes, made.memory_bytes)
    """
    path = expanded(out, "out")
    ending = EXPORTED["native"]
    require(path.suffix == ending, f"out: expected the name of a folder that ends in {ending}, got {path}")
    require(not path.is_file(), f"out: expected a folder, got the file {path}")
    writable_folder(path.parent, "out")
    images = random_pictures(model) if images is None else images
    logits, plan = model(images), Planner(model).plan()
    text = ModelText(model, plan)
    contents = {
        "lrfdyn_model.h": header(model, plan),
        "lrfdyn_model.c": text.write(),
        "lrfdyn_vectors.h": vectors(images, logits),
        **{name: kernel_text(name) for name in PACKAGED},
    }
    memory = {"memory_bytes": plan.arena, "thread_bytes": plan.thread_bytes}
    verified = verify and find_compiler() is not None
    try:
        with temporary_folder(path.parent) as folder:
            for name, content in contents.items():
                (folder / name).write_text(content, encoding="utf-8")
            digests = {name: file_digest(folder / name) for name in MODEL_FILES}
            write_json(folder / "lrfdyn.json", {**description(model), **memory, "sha256": digests})
            if verified:
                same = np.array_equal(NativeModel(folder)(images.numpy()), logits.numpy())
                require(same, "export: the compiled C gives other integers; the folder was not kept")
            path.mkdir(exist_ok=True)
            for library in path.glob(LIBRARIES):  # of another model that was here
                library.unlink()
            for file in folder.iterdir():
                file.replace(path / file.name)
    except OSError as error:
        raise LrfdynError(f"out: cannot write {path} ({error.strerror or error})") from None
    return WrittenC(path, text.bytes, **memory, verified=verified)


def description(model: IntegerModel) -> dict[str, Any]:
    """What a reader of the folder must know, in any language."""
    return {**model.facts, "shape": list(model.shape), "classes": model.values[-1].channels, "scale": model.scale}


def kernel_text(name: str) -> str:
    return (files("lrfdyn.deploy.c") / name).read_text(encoding="utf-8")


def header(model: IntegerModel, plan: Plan) -> str:
    (channels, height, width), classes = model.shape, model.values[-1].channels
    names = class_names_of(model.facts, classes, "model") or [f"class {i}" for i in range(classes)]
    return f"""#ifndef LRFDYN_MODEL_H
#define LRFDYN_MODEL_H

#define LRFDYN_CHANNELS {channels}
#define LRFDYN_HEIGHT {height}
#define LRFDYN_WIDTH {width}
#define LRFDYN_PICTURE {channels * height * width} /* bytes */
#define LRFDYN_CLASSES {classes}
#ifndef LRFDYN_THREADS
#define LRFDYN_THREADS 1 /* more need OpenMP: make THREADS=2 */
#endif
#define LRFDYN_ARENA {plan.arena} /* bytes for one thread */
#define LRFDYN_SCRATCH {plan.thread_bytes} /* bytes for each further thread */
/* Bytes of static memory beside the weights. */
#define LRFDYN_MEMORY (LRFDYN_ARENA + (LRFDYN_THREADS - 1) * LRFDYN_SCRATCH)
/* A logit times this is what the network was trained to give; no class is ranked by it. */
#define LRFDYN_SCALE {float(model.scale)!r}
/* The names of the classes, which take no memory where nobody writes them into an array. */
#define LRFDYN_NAMES {", ".join(map(quoted, names))}

#endif
"""


class ModelText:
    """lrfdyn_model.c, piece by piece."""

    def __init__(self, model: IntegerModel, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.bytes = 0
        self.pieces: list[str] = []
        self.count = 0

    def write(self) -> str:
        self.pieces = [
            '#include "lrfdyn.h"\n#include "lrfdyn_kernels.h"\n',
            "#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__\n"
            '#error "the weights are stored for processors whose low byte comes first"\n#endif\n',
            THREADS,
        ]
        for i, stored in self.plan.maps.items():
            if i != self.plan.calls[-1].gives:
                self.pieces.append(self.map_text(i, stored))
        calls = [self.call_text(n, call) for n, call in enumerate(self.plan.calls)]
        names = [re.sub(r"[^A-Za-z0-9_.]", "_", call.operation.name) for call in self.plan.calls]
        body = "\n    WAIT\n".join(f"    {call} /* {name} */" for call, name in zip(calls, names, strict=True))
        self.pieces.append(f"static void run(int32_t *logits, lrfdyn_share share) {{\n{body}\n}}\n")
        self.pieces.append(RUN)
        return "\n".join(self.pieces)

    def map_text(self, i: int, stored: Map) -> str:
        data = f"AT({self.plan.offsets[i]})" if i else "0"
        sizes = f"{stored.height}, {stored.width}, {stored.channels}, {stored.steps}"
        const = "const " if i else ""
        return f"static {const}lrfdyn_map map_{i} = {{{data}, {sizes}, LRFDYN_{stored.kind}, {stored.planes}}};\n"

    def array(self, values: Tensor | None) -> str:
        """The name of a new array with these numbers, or 0."""
        if values is None:
            return "0"
        self.count += 1
        name, flat = f"data_{self.count}", values.contiguous().flatten().cpu()
        self.bytes += flat.numel() * flat.itemsize
        if flat.dtype == torch.int8 and flat.numel() % 8 == 0:
            # Eight at a time: a compiler takes a second for them and not a minute.
            words = flat.numpy().view("<u8").tolist()
            text = lines(map("0x{:x}".format, words))
            self.pieces.append(f"static const uint64_t {name}[{len(words)}] ALIGNED = {{\n{text}}};\n")
            return f"(const int8_t *)(const void *){name}"
        kind = TYPES[flat.dtype]
        self.pieces.append(f"static const {kind} {name}[{len(flat)}] = {{\n{lines(map(number, flat.tolist()))}}};\n")
        return name

    def call_text(self, n: int, call: Call) -> str:
        scratch = f"SCRATCH({self.plan.offsets[scratch_of(n)]}), share"
        maps = ", ".join(f"&map_{i}" for i in call.reads)
        if call.name == "stage":
            self.stage(n, call)
            return f"lrfdyn_run_stage(&stage_{n}, {scratch});"
        if call.name == "add_spikes":
            return f"lrfdyn_add_spikes({maps}, &map_{call.gives}, share);"
        operation = call.operation
        if isinstance(operation, Head):
            weight, bias = self.array(operation.weight), self.array(operation.bias)
            return f"lrfdyn_head({maps}, {weight}, {bias}, LRFDYN_CLASSES, logits, {scratch});"
        extra = ""
        if isinstance(operation, Ssa):
            extra = f"{operation.heads}, {int(operation.causal)}, "
        elif isinstance(operation, Dendrites):
            extra = f"&{self.modes(n, operation)}, "
        return f"lrfdyn_{call.name}({maps}, &map_{call.gives}, {extra}{scratch});"

    def modes(self, n: int, operation: Dendrites) -> str:
        parts = [self.array(t.permute(1, 2, 0)) for t in (operation.coefficient, operation.weight)]
        # A channel whose input is always 0 may have any shift; 2^14 is the largest power of two in 16 bits.
        unit = (1 << operation.shift.clamp(max=14).T).short()
        half = (1 << operation.out_shift) >> 1
        parts += [self.array(x) for x in (unit, half, operation.out_shift)]
        flags = f"{operation.shift.shape[1]}, {int(operation.real)}, {int(operation.reverse)}"
        self.pieces.append(f"static const lrfdyn_modes modes_{n} = {{{', '.join(parts)}, {flags}}};\n")
        return f"modes_{n}"

    def stage(self, n: int, call: Call) -> None:
        channels, (first, *others) = self.plan.maps[call.gives].channels, call.terms
        start = torch.zeros(channels, dtype=torch.int32)
        if first.kind in ("CONV", "DENSE", "STENCIL") and first.extra is not None:
            start, first = first.extra, replace(first, extra=None)
        assert all(term.kind != "CONV" for term in others)
        terms = ",\n".join(f"    {self.term(term)}" for term in (first, *others))
        self.pieces.append(f"static const lrfdyn_term terms_{n}[{len(call.terms)}] = {{\n{terms},\n}};\n")
        sink, threshold, numbers = "STORE", None, (0, 0, 0)
        operation = call.operation
        if isinstance(operation, Fire):
            bits = operation.fraction_bits(self.model.time_steps)
            require(bits <= 30, f"operation {operation.name}: {bits} fraction bits are more than the C engine has")
            # x > m is x >= m + 1, and nothing reaches the largest integer.
            threshold = (operation.threshold.long() + operation.strict).clamp(max=MOST).int()
            threshold = with_lanes(threshold)
            sink, numbers = "FIRE", (operation.kept_shift, bits, 0)
        elif isinstance(operation, Levels):
            sink, threshold, numbers = "LEVELS", operation.thresholds.T, (0, 0, operation.thresholds.shape[1])
        given = (f"terms_{n}", len(call.terms), self.array(with_lanes(start)), f"&map_{call.gives}", f"LRFDYN_{sink}")
        fields = ", ".join(map(str, (*given, self.array(threshold), *numbers)))
        self.pieces.append(f"static const lrfdyn_stage stage_{n} = {{{fields}}};\n")

    def term(self, term: Term) -> str:
        source = "0" if term.source is None else f"&map_{term.source}"
        wide = int(term.kind == "DENSE" and term.weight is not None and term.weight.dtype == torch.int16)
        arrays = [self.array(x) for x in (term.weight, term.extra, term.border)]
        numbers = (*term.kernel, term.stride, term.padding, term.dilation, term.groups, term.limit)
        return f"{{LRFDYN_{term.kind}, {wide}, {source}, {', '.join(arrays)}, {', '.join(map(str, numbers))}}}"


def number(value: int) -> str:
    """As C has it: the least integer of 32 bits has no literal of its own."""
    return "INT32_MIN" if value == -(2**31) else str(value)


def quoted(name: str) -> str:
    """A text as C has it, whatever its characters."""
    plain = (
        chr(byte) if byte == 32 or bytes([byte]).isalnum() else f"\\{byte:03o}"
        for byte in name.encode(errors="replace")
    )
    return f'"{"".join(plain)}"'


def lines(numbers: Iterable[str]) -> str:
    found = list(numbers)
    return "".join(",".join(found[i : i + ACROSS]) + ",\n" for i in range(0, len(found), ACROSS))


def vectors(images: Tensor, logits: Tensor) -> str:
    pixels, expected = (lines(map(number, x.flatten().tolist())) for x in (images, logits))
    return f"""#define LRFDYN_PICTURES {len(images)}

static const uint8_t lrfdyn_pictures[] = {{
{pixels}}};

static const int32_t lrfdyn_logits[] = {{
{expected}}};
"""
