"""Writes docs/segmentation.md: counts from results/segmentation, measurements from results/ade20k_subset."""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import table
from lrfdyn.attention import LABELS
from lrfdyn.errors import require
from lrfdyn.paper import SEGMENTATION

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SHARED = ("model", "train_images", "test_images", "crop", "epochs", "batch_size", "seed", "device", "precision")
ORDER = ("ssa", "lrf_ssa", "lrf_dyn")

TEXT = """\
# Semantic segmentation

<!-- Made by docs/make_segmentation.py from results/; `python docs/make_segmentation.py` writes it anew. -->

From images to coloured masks on ADE20K (150 classes): any host as a backbone, a spiking FPN head on its stages, the
same training engine as for classification.

{state}

    pip install 'lrfdyn[train,segmentation]'

```python
import lrfdyn

model = lrfdyn.create_segmenter("sdt_v3_s", attention="lrf_dyn")  # images [B, 3, H, W] -> logits [B, 150, H, W]
```

## The network

The backbone gives the maps of its stages, for SDT-V3 at strides 2, 4, 8 and 16. The head is Semantic FPN with a neuron
in front of every convolution: a 1x1 convolution with batch norm per stage, sums from coarse to fine (nearest), a 3x3
convolution with batch norm per stage, all 128 channels wide; then 3x3 convolutions and doublings bring every stage to
stride 4, where they are added, fire once more and are classified. The logits are scaled to the image. With SDT-V3 the
neurons are integer spikes up to 4, which is T = 4 binary steps in one; with other hosts they are LIF neurons over the
host's time steps, and the firing rate is classified.

The paper gives the head 1.4 M parameters. Fused at stride 4, as in Semantic FPN, it has that many. The code published
with SDT-V3 fuses at stride 2, with two convolutions more (last column); `--model.head '{{output_stride: 2}}'` builds
that one.

{parameters}
The paper's column is as printed. Its backbones are counted with the last layer of the ImageNet classifier, which is
gone here, and "10.0" in the row of SDT-V3-L with LRF-SSA is the size of SDT-V3-M. With LRF-Dyn ours
has fewer parameters than SSA because the default token, the value, needs no queries and keys; `--model.token qkv` keeps
them. timm has no PVT of the first version, so PVT-v2 of about the size stands in; the ANN heads have a neck of 256
channels, batch norm behind the other convolutions and ReLU, as they were published.

## Full data set

Unpack `ADEChallengeData2016` as it comes (`images/` and `annotations/`, each with `training/` and `validation/`). In a
mask 0 is ignored and 1..150 are the classes 0..149. A mask without its image's size, with larger values, or that is
missing is an error that names the file; those of validation are all looked at before training begins. Pictures are read
as they are stored, because masks are drawn on the stored pixels: a turn that EXIF asks for is made by `lrfdyn predict`,
and not in training, tests and the figure. With `--dry-run` the command below counts the pictures and says how many
steps they make.

    lrfdyn train ade20k_sdt_v3 --attention lrf_dyn --model sdt_v3_s --data.root /data/ADEChallengeData2016 \\
        --model.backbone results/training/imagenet_sdt_v3-sdt_v3_s-lrf_dyn/seed0

`--model.backbone` is the folder of a classifier that was trained on ImageNet first: a run of `lrfdyn train`, or a model
saved with `save_pretrained` (`lrfdyn.models.official.load_official` reads the published weights). Its last layer is
left out. On eight GPUs the same command runs under `torchrun --standalone --nproc_per_node 8 -m lrfdyn train ...`;
batch norm and the confusion matrix are over all processes.

The recipe is SDT-V3's published one: AdamW 1e-3, weight decay 0.005, twice the rate in the head, 1,500 steps of
warm-up, then a straight line to zero (`schedule.decay: poly`, `power: 1`) over 160,000 steps of 16 crops of 512. The
short side is scaled to 0.5 to 2 times the crop, then crop, flip and photometric distortion; pictures smaller than the
crop are padded. What differs from it is said in `lrfdyn/recipes/ade20k_sdt_v3.yaml`. Recipes are
`ade20k_sdt_v3_{{s,m,l}}_{{ssa,lrf_ssa,lrf_dyn}}`, and through timm (`pip install 'lrfdyn[timm]'`)
`ade20k_{{resnet18,resnet50,pvt_v2_b2,pvt_v2_b3,poolformer_s12,poolformer_s24}}`.

| `data.options` | meaning |
|---|---|
| `workers: 8` | processes that decode while training runs |
| `resident: true` | decode everything once and keep it in the device's memory |
| `test_size: 512` | short side of the test images; the prediction is scaled back to the mask. `null`: as they are |
| `window: 512` | test in overlapping squares of that side instead of on the whole image |
| `flip: true` | test together with the mirror image |
| `num_classes: 20` | another data set in the same layout |

## Results of a run

`summary.json` has `miou`, `mean_accuracy` and `pixel_accuracy` in percent, of the last epoch, over the whole validation
set from one confusion matrix; classes that neither occur nor are predicted are left out of the mean. `classes.csv` has
the same for every class. `test_loss` is per labelled pixel; `train_loss` counts pixels without a class, and what is
padded, as zeros, so it is the smaller of two that are alike.

    lrfdyn evaluate RUN --classes                                    # again, with a line per class
    lrfdyn evaluate RUN --data.options '{{flip: true, window: 512}}'   # other ways to look

Whole test images have many sizes, for which the fused kernels would be compiled one by one; tests and predictions
take the plain operations. Bilinear scaling adds up gradients in no fixed order on a GPU, so two runs there differ in
the last bits; on a CPU they do not.

## Pictures

    lrfdyn predict --task segmentation --model RUN --out masks photo.jpg     # photo_mask.png, photo_overlay.png
    lrfdyn figure-segmentation SSA=RUN1 LRF-Dyn=RUN2 --root DATA --out figure.png

`lrfdyn.segmentation.predict.predict_segmentation` is the same as a function. A mask is a palette picture: its numbers
are the classes, its colours ADE20K's usual ones. An image is seen with the short side that the model was trained on.

## Measured on a small part of ADE20K

{measured}
## The paper's numbers

On the full data set, from ImageNet weights. None of them was measured here.

{paper}"""

STATE = (
    "Trained here, on [a small part](#measured-on-a-small-part-of-ade20k) of the data set: {runs}. Not trained here: "
    "anything on the full data set or from ImageNet weights; [the paper's numbers](#the-papers-numbers) for that stand "
    "apart. Parameters are counted on the networks as they are built."
)

PENDING = """\
**Pending: not measured yet.** The runs are SDT-V3-S with SSA, LRF-SSA and LRF-Dyn on 2,300 training and 400 validation
pairs with a short side of 256, the same recipe (`ade20k_subset_sdt_v3_s_*`) and the same number of epochs for all.
`python benchmarks/ade20k_subset.py --root DATA` trains and tests them on one GPU and writes `results/ade20k_subset`,
from which this section is made.
"""

MEASURED = """\
{model} on {train} training and {test} validation pairs with a short side of 256, {start}, {epochs} epochs with {batch}
crops of {crop} pixels a step, the same recipe and seed for all, on one {device} in {precision}. **These are numbers of
little data and short training, one seed each: they show no order of the attentions, and do not compare with the
paper's.** mIoU is the mean over {occurring} classes; "classes found" are those with an IoU above 0, and all others
count as 0 in the mean.

{table}
{shared}`{command}`
measured it: `results/ade20k_subset` has the logs, the numbers per class and the recipes.
{figure}"""

SHARED_GPU = "The GPU was shared, so the speeds are of a share and do not compare: {beside}."


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def parameter_table(rows: list[dict[str, Any]]) -> str:
    paper = {row.recipe: row.parameters for row in SEGMENTATION}
    body = []
    for row in sorted(rows, key=order):
        name = row["model"].removeprefix("timm/") + (" (timm)" if row["model"].startswith("timm/") else "")
        total = millions(row["backbone"] + row["head"])
        stride_2 = millions(row["head_stride_2"]) if "head_stride_2" in row else ""
        kind = LABELS.get(row["attention"], "")
        body.append(
            [
                name,
                kind,
                millions(row["backbone"]),
                millions(row["head"]),
                total,
                paper.get(row["recipe"], ""),
                stride_2,
            ]
        )
    return table(
        ["backbone", "attention", "backbone (M)", "head (M)", "together", "paper (M)", "head at stride 2 (M)"], body
    )


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    """The ANNs, then ours by size and attention."""
    if row["model"].startswith("timm/"):
        return 0, row["backbone"]
    return 1, "sml".index(row["model"][-1]), ORDER.index(row["attention"])


def read_runs(folder: Path) -> list[dict[str, Any]]:
    summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))]
    return sorted(
        (run for run in summaries if run["attention"] in ORDER), key=lambda run: ORDER.index(run["attention"])
    )


def state(folder: Path) -> str:
    runs = ", ".join(f"{run['model']} with {LABELS[run['attention']]}" for run in read_runs(folder))
    return wrap(STATE.format(runs=runs or "nothing yet"))


def wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def measured(folder: Path) -> str:
    """The section on the subset; it says so where nothing was measured yet."""
    runs = read_runs(folder)
    if not runs:
        return PENDING
    first = runs[0]
    ious = {run["attention"]: class_ious(folder / f"{run['model']}_{run['attention']}" / "classes.csv") for run in runs}
    for key in SHARED:
        found = [run[key] for run in runs]
        require(len(set(found)) == 1, f"{folder}: {key}: expected the same in all runs, got {found}")
    backbones = [run["backbone"] for run in runs if run["backbone"] is not None]
    require(len(backbones) in (0, len(runs)), f"{folder}: backbone: expected one in all runs or in none")
    body = [
        [LABELS[run["attention"]], f"{run['miou']:.2f}", f"{run['mean_accuracy']:.2f}", f"{run['pixel_accuracy']:.2f}",
         str(sum(iou > 0 for iou in ious[run["attention"]])), f"{run['parameters']:,}",
         f"{run['images_per_s']:,.0f}", f"{run['wall_s']:,.0f}"]
        for run in runs
    ]  # fmt: skip
    header = ["attention", "mIoU %", "mean accuracy %", "pixel accuracy %", "classes found", "parameters",
              "training images/s", "wall s"]  # fmt: skip
    beside = [f"{LABELS[run['attention']]} beside {run['beside']}" for run in runs if run.get("beside")]
    drawn = (folder / "figure.jpg").is_file()
    figure = "\n![image, ground truth and three models](../results/ade20k_subset/figure.jpg)\n" if drawn else ""
    return MEASURED.format(
        model=first["model"],
        train=f"{first['train_images']:,}",
        test=f"{first['test_images']:,}",
        start=f"from the backbones {', '.join(backbones)}" if backbones else "from scratch",
        epochs=first["epochs"],
        occurring=max(map(len, ious.values())),
        batch=first["batch_size"],
        crop=first["crop"],
        device=first["device"],
        precision=first["precision"],
        table=table(header, body),
        command=first["command"],
        shared=wrap(SHARED_GPU.format(beside="; ".join(beside))) + "\n\n" if beside else "",
        figure=figure,
    )


def class_ious(path: Path) -> list[float]:
    """Of the classes that occur or were predicted."""
    with path.open(encoding="utf-8") as file:
        return [float(row["iou"]) for row in csv.DictReader(file) if row["iou"]]


def render(results: Path = RESULTS) -> str:
    paper = [[row.name, row.parameters, str(row.time_steps), f"{row.miou:.1f}"] for row in SEGMENTATION]
    return TEXT.format(
        parameters=parameter_table(json.loads((RESULTS / "segmentation" / "parameters.json").read_text())),
        state=state(results / "ade20k_subset"),
        measured=measured(results / "ade20k_subset"),
        paper=table(["model", "parameters (M)", "T", "mIoU %"], paper),
    )


if __name__ == "__main__":
    (ROOT / "docs" / "segmentation.md").write_text(render(), encoding="utf-8")
