"""Writes docs/deployment.md and its figure from results/performance; the part on exported files is make_export.py's."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs import make_export
from docs.pages import table
from lrfdyn.analysis.measure.memory import attention_state
from lrfdyn.attention import attention_label
from lrfdyn.attention.lrf_dyn import BUFFERS
from lrfdyn.deploy.lowmem.model import IMAGES
from lrfdyn.models.summary import meta_model

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "performance"
FIGURE = ROOT / "docs" / "images" / "memory.png"
FILES = {"memory_h200": "GPU", "memory_cpu": "CPU"}
MODEL = "spikformer_8_512"

TEXT = """\
# Deployment

<!-- Made by docs/make_deployment.py from results/performance; `python docs/make_deployment.py` writes it anew. -->

- [Attention row by row](#streaming-lrf-dyn-okd) and [whole models](#low-memory-inference-of-whole-models) in little
  memory, [measured](#measured), and [`lrfdyn profile`](#lrfdyn-profile), which shows where memory goes
- [Export](#export) to ONNX and ExecuTorch, [`lrfdyn predict`](#predict), and
  [files without torch](#running-without-torch)

Two things take memory when a spiking transformer runs: what attention must hold, which the paper is about, and the
feature maps of everything else, which are far larger. `lrfdyn.deploy` lowers both.

![State of one attention layer, and peak of inference](images/memory.png)

## Streaming LRF-Dyn: O(kd)

```python
from lrfdyn.deploy import RowStream, StreamingAttention

stream = RowStream(model.blocks[0].attn.eval(), time_steps=4, batch=1)  # all of its state is allocated here
stream.nbytes  # what state_terms() derives for one image and step, times time_steps * batch
for row in rows:  # spikes of v (or q, k and v), [T, B, C, W] each
    currents = stream.push(*row)  # normalised currents of the row that is complete now, or None
for currents in stream.drain():  # the last rows, which waited for rows below the image
    ...
stream.reset()  # before the next image
layer = StreamingAttention(model.blocks[0].attn)  # the same as a layer: forward(x), rows one after the other
```

`push` wants spikes (0 or 1; for SDT-V3 multiples of 1/4), since bits hold nothing else: on a CPU other numbers are an
error, on a GPU nothing looks at them.

The stencils of LRF-Dyn make an output row wait for rows below it: with dilations (3, 5) it needs potentials of the rows
0, ±3 and ±5 around it. Rows in between must be held somehow, and `buffers` says how. Dendrites and stencils are linear,
so potentials can be computed again from the spikes that caused them, and spikes are bits.

{buffers}
The numbers are derived (`state_terms`), and tests assert that streaming allocates exactly as many bytes. For
comparison, SSA holds {ssa} KiB in the same place: the matrix kᵀv and the spikes of q, k, v. While a row is computed, a
row of potentials and a row of sums exist beyond the state, and with `"spikes"` a second copy of the dendrites. All
three forms equal the parallel form (float64 to 1e-9, float32 to 1e-5), for both tokens, any dilations and every host.
`"spikes"` is the default since it holds least; where time counts more, `"potentials"` is the fastest.

## Low-memory inference of whole models

```python
from lrfdyn.deploy import compile_for_inference

compiled = compile_for_inference(model.eval())  # a copy; batch norms are folded into weights
logits = compiled(images)  # any batch
compiled.plan(images).map_bytes  # the buffer of all maps between layers
```

The peak of a plain forward pass lies in the stem, where a 224 x 224 image has 64 channels, T time steps and several
copies of all that. The compiled model never holds such a map:

- Images pass the network a few at a time (one on a CPU, {images} on a GPU).
- The network is a chain of pieces, and a piece is computed in tiles of rows. Convolutions read a few rows around a
  tile; those are computed twice.
- On a CPU the time steps follow each other, as many at a time as fit, and neurons carry their membrane along. On a GPU
  the fused kernels hold all steps of a neuron in registers, and the chain is one CUDA graph.
- Between pieces, maps are bits where they are spikes, 8-bit integers where they are sums of spikes (Spikformer,
  QKFormer) and numbers where they are potentials (SDT). They alternate between the two ends of one buffer whose size is
  planned. The integer spikes of SDT-V3 exist inside pieces only.
- `mixing="streaming"` runs LRF-Dyn as above inside the chain. The default is the parallel form, which is faster.

The compiled model is a module: it may be moved, copied and saved with `torch.save`. It stays in evaluation mode, and
calls from several threads wait for each other, since they share the buffer; for calls at the same time make copies.
Images may have any size that the plain model takes.

Attention is one piece and is not tiled: SSA needs all rows by its nature, LRF-Dyn in its parallel form too.

On a CPU every operation sees the numbers that the plain folded model computes with, and tests find the same bits in
float32 at their sizes; a library that picks another algorithm for another shape may round otherwise. In float64 logits
and last feature maps equal the plain model's to 1e-9 in all hosts. The path on a GPU uses the fused kernels and is as
exact as they are ([performance.md](performance.md)).

## Measured

{model}, 224 x 224, T = 4, float32, random weights. Peaks are of the allocator and leave out weights and input
images. The reference is official-style eager SSA, SpikingJelly's network with its own neuron; `eager` is our plain
model in evaluation mode. The paper reports 49.4 % less memory, which is 50.6 % of the reference.

Nearly all of the saving of a whole model comes from how its maps are held, and not from LRF-Dyn: low-memory SSA gets it
too, since the state of an attention layer is small beside a feature map of the stem. Low-memory inference against the
reference:

{comparison}

{larger}

{tables}
## `lrfdyn profile`

    lrfdyn profile spikformer_8_512 --attention ssa lrf_dyn --batch 1 64 --plot memory.png
    lrfdyn profile runs/mine --batch 1    # a trained model; other attentions can take its place

prints, for each attention, the derived terms of all its layers, what streaming really allocates, the measured peak of
every layer, plain and low-memory, and the totals: allocator, growth of the resident set (CPU) and the fastest call. The
peak of a layer counts what it holds beyond what was there when it began; the total has that too, such as the map that
the layer reads, and is at least as large as the largest. `--json` prints the same as JSON. The figure needs `pip
install 'lrfdyn[analysis]'`. Plain inference of 64 images takes several GB and, on a CPU, minutes; `--batch 1` is quick.

`python benchmarks/memory.py` measures the tables above again; `python benchmarks/lowmem_profile.py` says which pieces
and kernels take the time.

{export}"""


def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def derived(kind: str, **options: Any) -> list[dict[str, Any]]:
    return attention_state(meta_model(MODEL, attention=kind), **options)


def total_kib(terms: list[dict[str, Any]]) -> float:
    return sum(term["bytes"] for term in terms) / 1024


def buffers() -> str:
    held = {
        "spikes": ("dendrites once (k·d), bits of 11 rows", "11 times"),
        "states": ("dendrites for every row offset (5·k·d), bits of 11 rows", "5 times"),
        "potentials": ("dendrites once (k·d), potentials of 11 rows", "once"),
    }
    header = ["`buffers`", "held", "scans of a row", "Spikformer-8-512, one layer, image and step"]
    sizes = {name: f"{total_kib(derived('lrf_dyn', buffers=name)):.1f} KiB" for name in BUFFERS}
    return table(header, [[f'`"{name}"`', *held[name], sizes[name]] for name in BUFFERS])


def measured(name: str) -> str:
    rows = records(name)
    if not rows:
        return f"{FILES[name]}: not measured yet (`results/performance/{name}.json`).\n"
    machine = rows[0]["machine"]["gpu"] if rows[0]["device"] != "cpu" else f"CPU, {rows[0]['threads']} threads"
    header = ["batch", "attention", "implementation", "peak MiB", "of reference", "resident MiB", "ms", "processor ms"]
    body = []
    for r in rows:
        resident = "" if r["resident_mib"] is None else f"{r['resident_mib']:,.0f}"
        processor = "" if r["cpu_ms"] is None else f"{r['cpu_ms']:,.0f}"
        body.append([
            str(r["batch"]), attention_label(r["attention"]), r["implementation"], f"{r['peak_mib']:,.1f}",
            f"{r['of_reference']:.1%}", resident, f"{r['latency_ms']:,.1f}", processor,
        ])  # fmt: skip
    text = f"{machine}, torch {rows[0]['versions']['torch']}:\n\n{table(header, body)}"
    notes = list(dict.fromkeys(r["note"] for r in rows if r["note"]))
    parts = dict.fromkeys(part for note in notes for part in note.split("; "))
    if parts:
        note = "; ".join(parts)
        text += "\n" + textwrap.fill(f"{note[0].upper()}{note[1:]}.", 120) + "\n"
    return text


def comparison() -> str:
    """SSA and LRF-Dyn beside each other, wherever both were measured, or what there is."""
    lines = []
    for name, where in FILES.items():
        rows = records(name)
        for batch in dict.fromkeys(r["batch"] for r in rows):
            own = [r for r in rows if r["batch"] == batch]
            low = [r for r in own if r["implementation"] == "low-memory"]
            if not low:
                continue
            found = [f"{attention_label(r['attention'])} {r['of_reference']:.1%} ({ms(r)})" for r in low]
            lines.append(
                f"- {where}, batch {batch}: {' and '.join(found)} of the memory of the reference ({ms(own[0])})"
            )
    return "\n".join(lines)


def larger() -> str:
    """What to know about the times, with what more images at once buy on a GPU."""
    text = "".join(
        f"`images_at_once=32` instead of {IMAGES['cuda']} takes LRF-Dyn on the GPU to {ms(r)} for {r['batch']} images, "
        f"in {r['peak_mib']:,.0f} MiB. "
        for r in records("memory_h200_32")
        if (r["implementation"], r["attention"]) == ("low-memory", "lrf_dyn")
    )
    text += (
        "On a GPU, products run in TF32 where torch's convolutions do "
        "(`torch.backends.cudnn.allow_tf32`), in the reference as in ours. The times of the plain networks with one "
        "image are those of the host, which launches one kernel after the other; the low-memory path is one CUDA "
        "graph. Times are of the fastest of several calls, but for 64 images on the CPU, which are one call."
    )
    return textwrap.fill(text, 120)


def ms(row: dict[str, Any]) -> str:
    return f"{row['latency_ms']:,.1f} ms" if row["latency_ms"] < 1000 else f"{row['latency_ms'] / 1e3:,.1f} s"


def draw() -> None:
    from lrfdyn.analysis.report.memory_plot import plot_memory

    states: dict[str, Any] = {"SSA": derived("ssa")}
    states |= {f"LRF-Dyn\n{name}": derived("lrf_dyn", buffers=name) for name in BUFFERS}
    rows = [
        {
            "group": f"{where}, batch {r['batch']}",
            "label": attention_label(r["attention"]),
            "implementation": r["implementation"],
            "mib": r["peak_mib"],
        }
        for name, where in FILES.items()
        for r in records(name)
    ]
    plot_memory(states, rows, FIGURE)


def render() -> str:
    return TEXT.format(
        model="Spikformer-8-512",
        buffers=buffers(),
        images=IMAGES["cuda"],
        ssa=f"{total_kib(derived('ssa')):.1f}",
        comparison=comparison(),
        larger=larger(),
        tables="\n".join(measured(name) for name in FILES),
        export=make_export.render(),
    )


def write() -> None:
    (ROOT / "docs" / "deployment.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    write()
    draw()
