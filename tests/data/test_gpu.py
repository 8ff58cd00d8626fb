"""The same batches on a GPU, and a host that never waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.augment import EVENT_OPERATIONS
from lrfdyn.data.event_augment import augment_frames
from tests.data.make import EVERYTHING, keys, write_cifar, write_folder, write_tiny_imagenet

pytestmark = pytest.mark.gpu(needed=True)


@pytest.mark.parametrize("name", ["cifar100", "tiny_imagenet"])
def test_resident_images_as_on_the_cpu_without_waiting(name: str, tmp_path: Path, monkeypatch) -> None:
    if name == "cifar100":
        write_cifar(tmp_path, name, monkeypatch, train=512)
    else:
        pytest.importorskip("PIL")
        write_tiny_imagenet(tmp_path, train=48)
    data = create_data(name, tmp_path, EVERYTHING)
    arguments = {"epoch": 0, "seed": 0, "batch_size": 32}
    next(data.train_batches(**arguments, device="cuda"))  # copies the images
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(data.train_batches(**arguments, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(batches, data.train_batches(**arguments), strict=True):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        assert torch.allclose(ours.targets.cpu(), theirs.targets)
        # Rounding may take a few interpolated pixels to the next level.
        difference = (ours.images.cpu() - theirs.images).abs()
        assert (difference > 1e-3).float().mean() < 0.02


def test_ranks_share_the_batch(tmp_path: Path, monkeypatch) -> None:
    write_cifar(tmp_path, "cifar100", monkeypatch, train=256)
    data = create_data("cifar100", tmp_path, EVERYTHING)
    arguments = {"epoch": 0, "seed": 0, "device": "cuda"}
    whole = next(data.train_batches(**arguments, batch_size=64)).images
    halves = [next(data.train_batches(**arguments, batch_size=32, rank=r, world_size=2)).images for r in (0, 1)]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_decoded_images(workers: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_folder(tmp_path)
    data = create_data("imagenette", tmp_path, replace(EVERYTHING, crop="resized"), image_size=24, workers=workers)
    arguments = {"epoch": 0, "seed": 0, "batch_size": 8}
    for ours, theirs in zip(
        data.train_batches(**arguments, device="cuda"), data.train_batches(**arguments), strict=True
    ):
        assert ours.images.is_cuda
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        assert ((ours.images.cpu() - theirs.images).abs() > 1e-3).float().mean() < 0.02


def test_event_frames_as_on_the_cpu_without_waiting() -> None:
    frames = torch.poisson(torch.full((3, 48, 2, 34, 34), 0.7))
    settings = Augmentation(flip=0.5, event_operations=EVENT_OPERATIONS)
    there = frames.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmented = augment_frames(there, settings, keys(48))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A point in the middle between two pixels may come to either.
    assert (augmented.cpu() != augment_frames(frames, settings, keys(48))).float().mean() < 1e-3
