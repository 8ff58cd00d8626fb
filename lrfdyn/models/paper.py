"""What the paper's ImageNet table says of the models; none of these numbers was measured here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """Millions of parameters and top-1 accuracy in percent of a method."""

    parameters: float
    accuracy: float


# By model and method: "base" is the host as published, with its own attention or none.
PAPER: dict[str, dict[str, PaperRow]] = {
    "spikformer_8_512": {
        "base": PaperRow(29.68, 73.38),
        "lrf_ssa": PaperRow(29.71, 74.62),
        "lrf_dyn": PaperRow(29.71, 74.51),
    },
    "spikformer_8_768": {
        "base": PaperRow(66.34, 74.81),
        "lrf_ssa": PaperRow(66.53, 75.66),
        "lrf_dyn": PaperRow(66.53, 75.58),
    },
    "qkformer_10_384": {
        "base": PaperRow(16.47, 78.80),
        "lrf_ssa": PaperRow(16.55, 79.24),
        "lrf_dyn": PaperRow(16.44, 79.21),
    },
    "qkformer_10_512": {
        "base": PaperRow(29.08, 82.04),
        "lrf_ssa": PaperRow(29.18, 82.52),
        "lrf_dyn": PaperRow(29.18, 82.48),
    },
    "sdt_v3_s": {
        "base": PaperRow(5.11, 75.30),
        "lrf_ssa": PaperRow(5.24, 76.22),
        "lrf_dyn": PaperRow(5.24, 76.12),
    },
    "sdt_v3_l": {
        "base": PaperRow(18.99, 79.80),
        "lrf_ssa": PaperRow(19.25, 80.31),
        "lrf_dyn": PaperRow(19.25, 80.24),
    },
    "sdt_v1_8_512": {"base": PaperRow(29.68, 74.57)},
    "sdt_v2_15m": {"base": PaperRow(15.08, 74.10)},
    "sdt_v2_55m": {"base": PaperRow(55.35, 79.70)},
    "sew_resnet34": {"base": PaperRow(21.79, 67.04)},
    "ms_resnet34": {"base": PaperRow(21.80, 69.42)},
}


def paper_accuracy(name: str, method: str = "base") -> float | None:
    row = PAPER.get(name, {}).get(method)
    return None if row is None else row.accuracy
