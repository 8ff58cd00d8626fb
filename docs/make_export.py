"""The part of docs/deployment.md on exported files, from results/performance/export_*.json."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import table
from lrfdyn.deploy.predict import PICTURES

RESULTS = Path(__file__).parent.parent / "results" / "performance"

TEXT = """\
## Export

    lrfdyn train digits --attention lrf_dyn --epochs 5 --out run  # a small model to try it with
    lrfdyn export run --out model.onnx
    lrfdyn export run/model --out model.pte --max-batch 4
    lrfdyn export spikformer_8_512 --attention lrf_dyn --out size_and_speed.onnx

The ending of `--out` says what is written. The model is the folder of `lrfdyn train`, a folder of `save_pretrained`, a
repository of the Hugging Face hub, or the name of a model: then the weights are random, and the command says so. ONNX
needs `pip install 'lrfdyn[export]'`, ExecuTorch `pip install 'lrfdyn[executorch]'`. From Python it is
`lrfdyn.deploy.export.write.export_model(model, "model.onnx")`.

| | ONNX | ExecuTorch |
|---|---|---|
| batch | any | 1 to `--max-batch` (memory is planned for it) |
| image size | that of the model's preprocessing | the same |
| weights | in the file, up to 2 GiB | in the file |
| description | metadata `lrfdyn` in the file | `model.pte.json` beside the file |
| kernels | ONNX Runtime, or another runtime of opset 20 | convolutions, products, pools in XNNPACK, the rest portable |

The description is one JSON object: `model`, `host`, `attention`, `attention_options`, `time_steps`, `weights` (where
they are from), `class_names`, and `preprocessing` (`size`, `crop_share`, `mean`, `std`, `interpolation`). `lrfdyn
train` writes class names and preprocessing into the saved model; a folder that lacks them is exported with the usual
preprocessing (ImageNet's statistics, or levels from -1 to 1 for other channels than three) and
`"preprocessing_assumed": true`.

What is written is the model in few plain operations:

- Norms are folded into the convolutions before them (also the three of a RepConv of SDT-V2).
- A neuron is five operations a time step. Potentials are divided by the gain, so that currents enter as they are; gains
  of the hosts are powers of two, so no rounding changes.
- The dendrites of LRF-Dyn are constant matrices, worked out in float64: a Toeplitz matrix inside a row of tokens, and
  between rows the 2M numbers of the modes, carried over with log2(rows) products. No complex numbers, no Fourier
  transform, no loop. The matrices cost W x W numbers a channel and not N x N: in the table below a tenth of the file of
  Spikformer-8-512 (rows of 14 tokens), more on wider grids.
- The first convolution of a static image is computed once for all time steps.

In float64 this form equals the model within 1e-9 for all hosts with all attentions
(`tests/deploy/test_export_form.py`). QKFormer with `legacy_neuron_axis=True` cannot be exported: its neuron mixes the
images of a batch.

### What the check means

Every file is run against PyTorch in float32 before it is kept, in batches of 1, 3 and more, on real images (`--images`;
else scikit-learn's digits) and on random ones. The command prints the result; a file that fails is removed and the exit
code is 2.

A spiking network is not continuous. Two programs add the same numbers in another order, so potentials differ in the
last bits, and where one lies that close to its threshold, the spike flips; from there on the two compute with different
spikes. So the logits of an image are either equal to rounding, or visibly different. The check therefore says:

- Without a flip all logits of an image are within 1e-3 of the largest logit (`--tolerance`); most are within 1e-6.
- An image beyond that counts as one with a flip. Such images must be the minority, or PyTorch itself must be as far
  from its own float64 result on the same images (a factor of 4 is allowed), which the command prints beside it.
- The argmax must be the same on at least 90 % of the images; where PyTorch's own float64 result changes it more often
  (networks that were never trained), twice as many changes and one more are allowed.

A wrong file is far from passing: its logits differ on all images.

{export_cpu}
Measured by `python benchmarks/export.py` (results/performance/export_cpu.json has the versions). One image, one thread;
the time that the core worked, the least of several calls, file and PyTorch (eager, norms folded) in turn. Weights are
random, the norms have the statistics of random images, half of the checked images are from Imagenette. The column of
float64 is PyTorch in float32 against itself in float64 on the same images: large networks that were never trained flip
spikes, and even change the class, by rounding alone.

Small networks of all hosts with all attentions (`ssa`, `causal_ssa`, `vsa`, `lrf_ssa`, `lrf_dyn` with both tokens,
`sdsa`), written and run in both formats (`python benchmarks/export.py --matrix`):

{export_matrix}

{flips}

Trained models, on test images of their data (`lrfdyn train`, then `python benchmarks/export.py --runs`):

{export_runs}
{trained}

## Predict

    lrfdyn predict photo.jpg folder/ 'more/*.png' --model run
    lrfdyn predict folder/ --model model.onnx --top 3 --json scores.json
    lrfdyn predict folder/ --model model.pte --json - | jq '.images[0]'

Images are files, folders (with the folders in them) and patterns; in folders those count that end in
{endings}.
The runtime follows from the ending of `--model` (`.onnx`, `.pte`, else PyTorch) or from
`--runtime torch|onnx|executorch`. Preprocessing and class names are the model's own: the shorter side is scaled to
`size / crop_share` (bicubic), the centre is taken, then (levels / 255 - mean) / std, as for the test images in
training. Pictures are turned as the camera was held, 16-bit levels are scaled to 8 bits, transparency is left out, and
of moving pictures the first is taken.

An image that cannot be read is named on the error stream with the reason and the others go on; at the end there is a
count, and the exit code is 1 (2 for bad arguments, 0 if all went well). The JSON has one record for every image, in
order:

    {{"model": "model.onnx", "task": "classification", "unreadable": 1, "images": [
      {{"image": "a.jpg", "predictions": [{{"class": 3, "name": "church", "score": 0.93}}, ...]}},
      {{"image": "b.jpg", "error": "UnidentifiedImageError: cannot identify image file 'b.jpg'"}}]}}

`--task segmentation --out FOLDER [--flip] [--window PIXELS]` writes label maps instead.

## Running without torch

[examples/predict_onnx.py](../examples/predict_onnx.py) needs onnxruntime, NumPy and Pillow, and nothing else: it reads
preprocessing and class names from the file. What it cannot read it names, as `lrfdyn predict` does.

    pip install onnxruntime pillow
    python examples/predict_onnx.py model.onnx photo.jpg

A test runs it in a process in which torch cannot be imported and compares the scores with PyTorch's.
"""


def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def export_cpu() -> str:
    header = [
        "model, attention, image", "file", "operations", "MiB", "ms", "PyTorch, ms", "largest logit difference",
        "images within tolerance (float64)", "equal argmax (float64)",
    ]  # fmt: skip
    rows = []
    for r in sorted(records("export_cpu"), key=lambda r: (r["image_size"], r["model"], r["attention"], r["format"])):
        count = "" if r["operations"] is None else f"{r['operations']:,}"
        within, argmax = f"{r['within_tolerance']} of {r['images']}", f"{r['argmax_agreement']:.0%}"
        if r["float64_within_tolerance"] is not None:
            within += f" ({r['float64_within_tolerance']})"
        if r.get("float64_argmax_agreement") is not None:
            argmax += f" ({r['float64_argmax_agreement']:.0%})"
        difference = f"{r['max_logit_difference']:.1g} of {r['largest_logit']:.2g}"
        rows.append([
            f"{r['model']}, {r['attention']}, {r['image_size']}", r["format"], count, f"{r['file_mib']:.1f}",
            f"{r['latency_ms']:.0f}", f"{r['torch_latency_ms']:.0f}", difference, within, argmax,
        ])  # fmt: skip
    return table(header, rows, numbers=True)


def export_matrix() -> str:
    header = [
        "host",
        "attentions as ONNX",
        "as ExecuTorch",
        "images",
        "within tolerance",
        "equal argmax",
        "without a flip",
    ]
    rows = []
    found = records("export_matrix")
    for host in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == host]
        counts = [len({(r["attention"], r["token"]) for r in own if r["format"] == f}) for f in ("onnx", "executorch")]
        images, within = (sum(r[key] for r in own) for key in ("images", "within_tolerance"))
        agree = sum(r["argmax_agreement"] * r["images"] for r in own)
        clean = [r["max_logit_difference"] for r in own if r["within_tolerance"] == r["images"]]
        numbers = [*map(str, (*counts, images, within)), f"{agree:.0f}", f"{max(clean, default=0):.0e}"]
        rows.append([host.removeprefix("small "), *numbers])
    return table(header, rows, numbers=True)


def flips() -> str:
    """What the last column of the matrix is, and what is to be said of the images with a flip."""
    text = "The last column is the largest logit difference among the files in which no image had a flip."
    off = [r for r in records("export_matrix") if r["within_tolerance"] < r["images"]]
    if not off:
        return text
    assert all(r["float64_within_tolerance"] == r["within_tolerance"] for r in off)
    where = " and ".join(sorted({f"{r['model'].removeprefix('small ')} with `{r['attention']}`" for r in off}))
    return textwrap.fill(f"{text} The flips are of {where}, where PyTorch's own float64 result has as many.", 120)


def export_runs() -> str:
    header = [
        "recipe, epochs", "file", "accuracy (PyTorch; float64)", "equal argmax (float64)", "within tolerance (float64)",
        "largest logit difference", "without a flip",
    ]  # fmt: skip
    rows = [
        [
            f"{r['recipe']}, {r['epochs']}", r["format"],
            f"{r['file_top1']:.1f}% ({r['top1']:.1f}%; {r['float64_top1']:.1f}%)",
            f"{r['equal_argmax']} of {r['images']} ({r['float64_equal_argmax']})",
            f"{r['within_tolerance']} ({r['float64_within_tolerance']})",
            f"{r['max_logit_difference']:.1g} of {r['largest_logit']:.2g}", f"{r['max_without_flip']:.0e}",
        ]
        for r in records("export_runs")
    ]  # fmt: skip
    return table(header, rows, numbers=True)


def trained() -> str:
    """What flips do to the accuracy of trained models."""
    found = records("export_runs")
    files = max((abs(r["file_top1"] - r["top1"]) for r in found), default=0.0)
    own = max((abs(r["float64_top1"] - r["top1"]) for r in found), default=0.0)
    return textwrap.fill(
        "A flip changes the logits of an image and seldom its class: the accuracy of a file is within "
        f"{files:.1f} percentage points of that of PyTorch in float32, and PyTorch's own in float64 within {own:.1f}.",
        120,
    )


def render() -> str:
    return TEXT.format(
        export_cpu=export_cpu(),
        export_matrix=export_matrix(),
        flips=flips(),
        export_runs=export_runs(),
        trained=trained(),
        endings=", ".join(f"`{ending}`" for ending in PICTURES),
    )


if __name__ == "__main__":
    from docs import make_deployment

    make_deployment.write()
