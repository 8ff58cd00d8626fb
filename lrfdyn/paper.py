"""The numbers that the paper (arXiv 2603.19290) reports; none of them was measured here."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A model of the ImageNet table: millions of parameters, and top-1 accuracy in percent."""

    parameters: float
    accuracy: float


class SegmentationRow(NamedTuple):
    """A model of the segmentation table: millions of parameters as they are printed, backbone + head where they are
    apart, and mIoU in percent. `model` and `attention` are ours of the same row."""

    name: str
    model: str
    attention: str | None
    parameters: str
    time_steps: int
    miou: float


# ImageNet-1k, by model and method: "base" is the host as published, with its own attention or none.
IMAGENET: dict[str, dict[str, Row]] = {
    "spikformer_8_512": {"base": Row(29.68, 73.38), "lrf_ssa": Row(29.71, 74.62), "lrf_dyn": Row(29.71, 74.51)},
    "spikformer_8_768": {"base": Row(66.34, 74.81), "lrf_ssa": Row(66.53, 75.66), "lrf_dyn": Row(66.53, 75.58)},
    "qkformer_10_384": {"base": Row(16.47, 78.80), "lrf_ssa": Row(16.55, 79.24), "lrf_dyn": Row(16.44, 79.21)},
    "qkformer_10_512": {"base": Row(29.08, 82.04), "lrf_ssa": Row(29.18, 82.52), "lrf_dyn": Row(29.18, 82.48)},
    "sdt_v3_s": {"base": Row(5.11, 75.30), "lrf_ssa": Row(5.24, 76.22), "lrf_dyn": Row(5.24, 76.12)},
    "sdt_v3_l": {"base": Row(18.99, 79.80), "lrf_ssa": Row(19.25, 80.31), "lrf_dyn": Row(19.25, 80.24)},
    "sdt_v1_8_512": {"base": Row(29.68, 74.57)},
    "sdt_v2_15m": {"base": Row(15.08, 74.10)},
    "sdt_v2_55m": {"base": Row(55.35, 79.70)},
    "sew_resnet34": {"base": Row(21.79, 67.04)},
    "ms_resnet34": {"base": Row(21.80, 69.42)},
}

# Table 3: top-1 accuracy in percent of Spikformer-4-384 on CIFAR-100, by method, in the columns of `TABLE3_DILATIONS`.
TABLE3_DILATIONS: dict[str, tuple[int, ...]] = {"w/o LRF": (), "Ω<=1": (1,), "Ω<=3": (1, 3), "Ω<=5": (1, 3, 5)}
TABLE3 = {
    "LRF-SSA": (77.86, 78.26, 78.52, 78.64),
    "LRF-Dyn": (77.78, 78.16, 78.50, 78.57),
    "causal SSA": (74.30, 75.30, 76.20, 76.50),
}

# ADE20K, 150 classes.
SEGMENTATION = (
    SegmentationRow("ResNet-18", "timm/resnet18", None, "15.5", 1, 32.9),
    SegmentationRow("ResNet-50", "timm/resnet50", None, "28.5", 1, 36.7),
    SegmentationRow("PVT-Small", "timm/pvt_v2_b2", None, "28.2", 1, 39.8),
    SegmentationRow("PVT-Medium", "timm/pvt_v2_b3", None, "48.0", 1, 41.6),
    SegmentationRow("SDT-V3-S", "sdt_v3_s", "ssa", "5.1 + 1.4", 4, 33.6),
    SegmentationRow("SDT-V3-L", "sdt_v3_l", "ssa", "18.99 + 1.4", 4, 41.3),
    SegmentationRow("SDT-V3-S, LRF-SSA", "sdt_v3_s", "lrf_ssa", "5.1 + 1.4", 4, 36.2),
    SegmentationRow("SDT-V3-L, LRF-SSA", "sdt_v3_l", "lrf_ssa", "10.0 + 1.4", 4, 43.5),
    SegmentationRow("SDT-V3-S, LRF-Dyn", "sdt_v3_s", "lrf_dyn", "5.24 + 1.4", 4, 36.3),
    SegmentationRow("SDT-V3-L, LRF-Dyn", "sdt_v3_l", "lrf_dyn", "19.25 + 1.4", 4, 43.1),
)

MEMORY_SAVED = 49.4  # percent of the memory of inference
