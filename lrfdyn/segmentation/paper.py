"""The paper's segmentation table (ADE20K, 150 classes); none of these numbers was measured here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentationRow:
    """Millions of parameters as they are printed, backbone + head where they are apart, and mIoU in percent."""

    name: str
    recipe: str  # ours for the same row
    parameters: str
    time_steps: int
    miou: float


PAPER = (
    SegmentationRow("ResNet-18", "ade20k_resnet18", "15.5", 1, 32.9),
    SegmentationRow("ResNet-50", "ade20k_resnet50", "28.5", 1, 36.7),
    SegmentationRow("PVT-Small", "ade20k_pvt_v2_b2", "28.2", 1, 39.8),
    SegmentationRow("PVT-Medium", "ade20k_pvt_v2_b3", "48.0", 1, 41.6),
    SegmentationRow("SDT-V3-S", "ade20k_sdt_v3_s_ssa", "5.1 + 1.4", 4, 33.6),
    SegmentationRow("SDT-V3-L", "ade20k_sdt_v3_l_ssa", "18.99 + 1.4", 4, 41.3),
    SegmentationRow("SDT-V3-S, LRF-SSA", "ade20k_sdt_v3_s_lrf_ssa", "5.1 + 1.4", 4, 36.2),
    SegmentationRow("SDT-V3-L, LRF-SSA", "ade20k_sdt_v3_l_lrf_ssa", "10.0 + 1.4", 4, 43.5),
    SegmentationRow("SDT-V3-S, LRF-Dyn", "ade20k_sdt_v3_s_lrf_dyn", "5.24 + 1.4", 4, 36.3),
    SegmentationRow("SDT-V3-L, LRF-Dyn", "ade20k_sdt_v3_l_lrf_dyn", "19.25 + 1.4", 4, 43.1),
)
