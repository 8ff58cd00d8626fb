"""LRF-Dyn in a network of one's own, trained on recordings of an event camera: which way does a bar move?

    python examples/own_network.py [--attention lrf_ssa] [--steps 60]
    python examples/own_network.py --data nmnist --root ~/data [--steps 300]   # real recordings

Without `--data` it writes recordings of moving bars and reads them as it would read yours.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lrfdyn
from lrfdyn.data import Augmentation, Batch, DataSource, create_data
from lrfdyn.nn.neurons import LIF

STEPS, SIZE = 4, 16
DIRECTIONS = ("right", "left", "down", "up")


def write_bars(root: Path, random: np.random.Generator) -> None:
    """Recordings `root/{train,test}/DIRECTION/N.npz`: a bar in a random place moves in one direction, among noise."""
    for part, number in (("train", 64), ("test", 32)):
        for label, direction in enumerate(DIRECTIONS):
            (root / part / direction).mkdir(parents=True)
            for i in range(number):
                # One row for every event: its time, then along the bar, across it, and the polarity.
                noise = random.integers(0, (STEPS * 1000, SIZE, SIZE, 2), (40, 4))
                step, along, on = (grid.ravel() for grid in np.indices((STEPS, SIZE, 2)))
                sign, start = 1 if label % 2 == 0 else -1, random.integers(SIZE)
                across = (start + sign * (step + on)) % SIZE  # brighter where the bar comes to, darker where it was
                t, a, c, p = np.concatenate((noise, np.stack((step * 1000 + 500, along, across, on), 1))).T
                x, y = (c, a) if label < 2 else (a, c)
                np.savez(root / part / direction / f"{i}.npz", t=t, x=x, y=y, p=p)


class Network(nn.Module):
    def __init__(self, attention: str, size: int, classes: int, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, dim, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(dim))
        self.fire = LIF()
        self.attn = lrfdyn.create_attention(attention, dim, heads=4, grid=(-(-size // 2), -(-size // 2)))
        self.head = nn.Linear(dim, classes)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.stem(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])  # convolutions see time in the batch
        x = self.fire(x)  # spikes [T, B, C, H, W]; nothing has to be reset between batches
        x = x + self.attn(x)
        return self.head(x.mean((0, 3, 4)))


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Norms and biases are not decayed, nor what a layer says, such as the decays and frequencies of dendrites."""
    kept = {getattr(m, name) for m in model.modules() for name in getattr(m, "without_weight_decay", ())}
    kept |= {p for p in model.parameters() if p.dim() <= 1}
    rest = [p for p in model.parameters() if p not in kept]
    return [{"params": rest}, {"params": [p for p in model.parameters() if p in kept], "weight_decay": 0.0}]


def batches(source: DataSource) -> Iterator[Batch]:
    """Batches of frames [T, B, 2, H, W], epoch after epoch."""
    for epoch in count():
        yield from source.train_batches(epoch=epoch, seed=0, batch_size=32)


def train(attention: str, source: DataSource, steps: int) -> Network:
    torch.manual_seed(0)
    model = Network(attention, source.image_size, source.num_classes)
    optimizer = torch.optim.AdamW(groups(model), lr=5e-3, weight_decay=0.02)
    for step, batch in enumerate(islice(batches(source), steps)):
        loss = F.cross_entropy(model(batch.images), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=list(lrfdyn.ATTENTIONS), default="lrf_dyn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", help="a data set of recordings, such as nmnist")
    parser.add_argument("--root", help="its folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data is None:
            write_bars(Path(folder), np.random.default_rng(0))
            how = {"frames": STEPS, "split_by": "time", "sensor_size": (SIZE, SIZE)}
            source = create_data("event_folder", folder, Augmentation(), **how)
        else:
            source = create_data(arguments.data, arguments.root, Augmentation(), frames=STEPS)
        model = train(arguments.attention, source, arguments.steps)
        right = 0
        with torch.inference_mode():
            for batch in source.test_batches(batch_size=64):
                right += int((model(batch.images).argmax(1) == batch.labels)[: batch.count].sum())
    print(f"accuracy on {source.test_images} new recordings: {right / source.test_images:.1%}")
    for term in model.attn.state_terms():
        print(f"held at inference: {term.name}, {term.formula}: {term.bytes} bytes")


if __name__ == "__main__":
    main()
