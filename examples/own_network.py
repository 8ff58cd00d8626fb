"""LRF-Dyn in a network of one's own, trained on event frames: which way does a bar move?

    python examples/own_network.py [--attention lrf_ssa] [--steps 60]

Any data loader that gives event frames [T, B, 2, H, W] (ON and OFF events) can take the place of `moving_bars`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lrfdyn
from lrfdyn.nn.neurons import LIF

STEPS, SIZE, DIRECTIONS = 4, 16, 4


def moving_bars(batch: int) -> tuple[Tensor, Tensor]:
    """Frames [T, B, 2, H, W]: a bar in a random place moves right, left, down or up; 2 % of the pixels are noise."""
    labels = torch.randint(DIRECTIONS, (batch,))
    frames = (torch.rand(STEPS, batch, 2, SIZE, SIZE) < 0.02).float()
    starts = torch.randint(SIZE, (batch,))
    for i, (label, start) in enumerate(zip(labels.tolist(), starts.tolist(), strict=True)):
        sign = 1 if label % 2 == 0 else -1
        for t in range(STEPS):
            frame = frames[t, i] if label < 2 else frames[t, i].mT
            frame[0, :, (start + sign * (t + 1)) % SIZE] = 1  # ON where the bar comes to
            frame[1, :, (start + sign * t) % SIZE] = 1  # OFF where it was
    return frames, labels


class Network(nn.Module):
    def __init__(self, attention: str, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, dim, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(dim))
        self.fire = LIF()
        self.attn = lrfdyn.create_attention(attention, dim, heads=4, grid=(SIZE // 2, SIZE // 2))
        self.head = nn.Linear(dim, DIRECTIONS)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=list(lrfdyn.ATTENTIONS), default="lrf_dyn")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Network(arguments.attention)
    optimizer = torch.optim.AdamW(groups(model), lr=5e-3, weight_decay=0.02)
    for step in range(arguments.steps):
        frames, labels = moving_bars(32)
        loss = F.cross_entropy(model(frames), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    frames, labels = moving_bars(256)
    with torch.inference_mode():
        right = (model(frames).argmax(1) == labels).float().mean().item()
    print(f"accuracy on new bars: {right:.1%}")
    for term in model.attn.state_terms():
        print(f"held at inference: {term.name}, {term.formula}: {term.bytes} bytes")


if __name__ == "__main__":
    main()
