"""The numbers that the paper (arXiv 2603.19290) reports; none of them was measured here."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A model of the ImageNet table: millions of parameters, and top-1 accuracy in percent."""

    parameters: float
    accuracy: float


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

# ADE20K, 150 classes, by our model and attention: name, millions of parameters as printed (backbone + head where they
# are apart), time steps, and mIoU in percent.
SEGMENTATION: dict[tuple[str, str | None], tuple[str, str, int, float]] = {
    ("timm/resnet18", None): ("ResNet-18", "15.5", 1, 32.9),
    ("timm/resnet50", None): ("ResNet-50", "28.5", 1, 36.7),
    ("timm/pvt_v2_b2", None): ("PVT-Small", "28.2", 1, 39.8),
    ("timm/pvt_v2_b3", None): ("PVT-Medium", "48.0", 1, 41.6),
    ("sdt_v3_s", "ssa"): ("SDT-V3-S", "5.1 + 1.4", 4, 33.6),
    ("sdt_v3_l", "ssa"): ("SDT-V3-L", "18.99 + 1.4", 4, 41.3),
    ("sdt_v3_s", "lrf_ssa"): ("SDT-V3-S, LRF-SSA", "5.1 + 1.4", 4, 36.2),
    ("sdt_v3_l", "lrf_ssa"): ("SDT-V3-L, LRF-SSA", "10.0 + 1.4", 4, 43.5),
    ("sdt_v3_s", "lrf_dyn"): ("SDT-V3-S, LRF-Dyn", "5.24 + 1.4", 4, 36.3),
    ("sdt_v3_l", "lrf_dyn"): ("SDT-V3-L, LRF-Dyn", "19.25 + 1.4", 4, 43.1),
}

NEAR_IN_VIT = 76.8  # percent of a ViT's attention that go to nearby tokens (Fig. 2a)
MEMORY_SAVED = 49.4  # percent of the memory of inference
