"""A trained model in integers."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
from torch import nn

from lrfdyn.checks import checked
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.export.write import model_facts
from lrfdyn.deploy.integer.lower import lower_model
from lrfdyn.deploy.integer.lowering import INT8, Lowering
from lrfdyn.deploy.integer.operations import RangeError, Rescale
from lrfdyn.deploy.integer.program import IntegerModel
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.weights import not_finite
from lrfdyn.models import SpikingModel

# Both are tried from the first to the last until no sum can leave 32 bits.
POTENTIAL_BITS = (14, 12, 10, 8, 6)  # behind the point
PIXEL_WEIGHTS = (4095, 511, INT8)  # largest of the first layer: an error there comes 255-fold, and it has few weights


@checked
def quantize(model: SpikingModel, *, weights: str | None = None) -> IntegerModel:
    """A trained classifier in integers.

    Weights have 8 bits, those of the first layer 13 where 32 bits hold its sums, and a unit for each output channel.
    Thresholds and biases are integers in these units, neurons are exact. Pictures go in as levels from 0 to 255: the
    model's preprocessing is in its first layer. Dendrites have 16 bits, and potentials on shortcuts as many bits behind
    the point (`facts["potential_bits"]`, at most 14) as leave no sum beyond 32 bits; both are rounded to the nearest.
    No images are needed: units follow from the weights.

    - `model`: A trained classifier in evaluation mode.
    - `weights`: Where the weights are from, for the model's own description.

    Example:

        integer = quantize(model)
        classes = integer(images).argmax(1)  # uint8 [B, C, H, W]
        integer.save("model.safetensors")
    """
    return quantize_with_twin(model, weights)[0]


def quantize_with_twin(model: SpikingModel, weights: str | None = None) -> tuple[IntegerModel, SpikingModel]:
    """The integer model, and a folded one in float64 with the weights that its integers stand for."""
    require(not model.training, "model: expected evaluation mode")
    require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
    require_statistics(model)
    preprocessing = model.preprocessing or Preprocessing.usual(*model.input_size[:2])
    shape = (model.in_channels, preprocessing.size, preprocessing.size)
    require(preprocessing.channels == shape[0], f"model: expected a mean of all {shape[0]} channels")
    level = all(0 <= mean <= 1 for mean in preprocessing.mean)
    require(level, f"model: expected a mean from 0 to 1, a level of pixels outside, got {preprocessing.mean}")
    for name in not_finite(model.state_dict()):
        raise LrfdynError(f"model: {name} holds numbers that are not finite")
    folded = fold_batch_norm(copy.deepcopy(model).cpu().double()).requires_grad_(False)
    for bits, pixel_weight in product(POTENTIAL_BITS, PIXEL_WEIGHTS):
        twin = copy.deepcopy(folded)
        lowering = Lowering(shape, model.time_steps, preprocessing, bits, pixel_weight)
        try:
            with torch.no_grad():
                lower_model(twin, lowering)
            break
        except RangeError as error:
            if (bits, pixel_weight) == (POTENTIAL_BITS[-1], PIXEL_WEIGHTS[-1]):
                raise RangeError(f"model: {error}") from None
    facts = {**model_facts(model, weights), "integer": True}
    if any(isinstance(operation, Rescale) for operation in lowering.operations):
        facts["potential_bits"] = bits
    return IntegerModel(shape, model.time_steps, lowering.scale, lowering.operations, facts), twin


def require_statistics(model: nn.Module) -> None:
    """An error where a batch norm has never seen data."""
    for name, norm in model.named_modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
            fresh: Any = mean is None or variance is None or not (mean.any() or (variance != 1).any() or count)
            require(not fresh, f"model: expected a trained one; the norm {name} has no statistics")
