"""Batched augmentation of event frames `[T, B, 2, H, W]`: what happens to a recording happens to all its frames.

The operations and their strengths are those of the official CIFAR10-DVS code of Spikformer and QKFormer (there in
torchvision). Counts are moved to the nearest pixel, so they stay whole, and nothing moves in from outside."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
from torch import Tensor

from lrfdyn.data.augment import EVENT_OPERATIONS, Augmentation, erase, erase_boxes, laid_out, random_window
from lrfdyn.data.hashed_random import EVENT_OPERATION, Keys
from lrfdyn.data.loading import to_device
from lrfdyn.data.randaugment import about_centre, old_points, rotations, sample

# The settings of the augmentation that are for recordings, and those that are not.
USED = (
    "crop", "crop_padding", "flip", "event_operations", "mixup", "cutmix", "mix_probability", "cutmix_share",
    "label_smoothing", "repeats",
)  # fmt: skip
UNUSED = tuple(field.name for field in fields(Augmentation) if field.name not in USED)

STRENGTHS = 15  # steps from none to the most, in either direction
SHEAR, SHIFT, ANGLE = 0.3, 5, 30  # the most: an angle of the vertical in radians, whole pixels, degrees
CUT_OUT = (0.001, 0.11)  # share of the area of the square that is emptied


def augment_frames(frames: Tensor, settings: Augmentation, keys: Keys) -> Tensor:
    """All that happens to a recording by itself: window, mirror image, then one operation."""
    steps = frames.shape[0]
    images = frames.float().transpose(0, 1).flatten(1, 2)  # every frame and sign is a channel of its recording
    images = random_window(images, settings, keys)
    if settings.event_operations is not None:
        number, strength = keys.uniform(EVENT_OPERATION, 2).T
        names = np.array([EVENT_OPERATIONS.index(name) for name in settings.event_operations])
        operation = names[np.floor(number * len(names)).astype(int)]
        strength = (np.floor(strength * (2 * STRENGTHS + 1)) - STRENGTHS) / STRENGTHS
        images = apply_operations(images, operation, strength, keys)
    return laid_out(images.unflatten(1, (steps, -1)).transpose(0, 1))


def apply_operations(images: Tensor, operation: np.ndarray, strength: np.ndarray, keys: Keys) -> Tensor:
    """Recording i, `[B, T * 2, H, W]`, gets `EVENT_OPERATIONS[operation[i]]` with `strength[i]` in -1..1."""
    height, width = images.shape[-2:]
    matrices = to_device(event_matrices(operation, strength, height, width).astype(np.float32), images.device)
    images = sample(images, *old_points(matrices, height, width), "nearest", "zeros")
    boxes = erase_boxes(keys, 1.0, CUT_OUT, height, width, narrowest=1)
    return erase(images, boxes * (operation == EVENT_OPERATIONS.index("cut_out"))[:, None], None)


def event_matrices(operation: np.ndarray, strength: np.ndarray, height: int, width: int) -> np.ndarray:
    """`[B, 2, 3]`: from a point of the new frames to the point of the old ones, in pixels from the top left corner."""
    shear, shift_x, shift_y, turn = (
        np.where(operation == EVENT_OPERATIONS.index(name), strength, 0)
        for name in ("shear_x", "shift_x", "shift_y", "rotate")
    )
    linear = rotations(math.radians(ANGLE) * turn)
    linear[:, 0, 1] += np.tan(SHEAR * shear)
    matrices = about_centre(linear, height, width)
    matrices[:, :, 2] -= np.trunc(SHIFT * np.stack((shift_x, shift_y), 1))
    return matrices
