"""A model as a backbone: images to the feature maps of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lrfdyn.errors import require
from lrfdyn.models.base import FeatureInfo, SpikingModel


def stage_indices(stages: int, indices: int | Sequence[int] | None) -> tuple[int, ...]:
    """The indices of the wanted stages: all for None, the last n for an integer n, else those of the sequence, in which
    -1 is the last."""
    if indices is None:
        return tuple(range(stages))
    wanted = range(-indices, 0) if isinstance(indices, int) else indices
    require(
        len(wanted) > 0 and all(-stages <= i < stages for i in wanted),
        f"out_indices: expected some of the {stages} stages (0 to {stages - 1}), got {indices}",
    )
    return tuple(i % stages for i in wanted)


class Backbone(nn.Module):
    """A model without classifier: `forward` takes images `[B, C, H, W]` and gives the maps `[B, C, H, W]` of the stages
    `out_indices`, each the mean over the time steps.

    `stages` describes all stages. The classifier is removed; stages behind the last wanted one still run.
    """

    def __init__(self, model: SpikingModel, out_indices: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.stages: list[FeatureInfo] = list(model.feature_info)
        self.out_indices = stage_indices(len(self.stages), out_indices)
        model.reset_classifier(0)
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.model.feature_maps(images)
        return [maps[i].mean(0) for i in self.out_indices]
