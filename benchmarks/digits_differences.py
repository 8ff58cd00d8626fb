"""The training loop of 0.1 on the digits, and loops that differ from it in one point each as the recipe `digits` does.

    python benchmarks/digits_differences.py --seeds 5 --json results/digits/differences.jsonl

One line for every seed and loop: test accuracy in percent after each of 8 epochs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import lrfdyn

LOOPS = (
    "as in 0.1", "no weight decay on norms and biases", "rate at the beginning of a step",
    "grey values rounded to 8 bits",
)  # fmt: skip
SIZE = {"dim": 48, "depth": 2, "heads": 4, "mlp_ratio": 2, "pooling": [False] * 4, "qkv_bias": False, "time_steps": 4}
EPOCHS, BATCH, RATE, DECAY, WARM_UP = 8, 32, 0.01, 0.02, 0.2


def rate_at(progress: float) -> float:
    """Linear warm-up, then half a cosine to zero; `progress` runs from 0 to 1."""
    if progress < WARM_UP:
        return RATE * progress / WARM_UP
    return RATE * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


def train(attention: str, seed: int, loop: str, epochs: int = EPOCHS) -> list[float]:
    raw = load_digits()
    images, labels = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1), torch.tensor(raw.target)
    images = (images * (255 / 16)).round() if loop == LOOPS[3] else images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, rest = order[:360], order[360:]
    images = (images - images[rest].mean()) / images[rest].std()
    torch.manual_seed(seed)
    model = lrfdyn.create_model(
        "spikformer_4_384", attention=attention, image_size=8, in_channels=1, num_classes=10, **SIZE
    )
    spared = {getattr(m, name) for m in model.modules() for name in getattr(m, "without_weight_decay", ())}
    spared |= {p for p in model.parameters() if p.dim() <= 1}
    spared = spared if loop == LOOPS[1] else set()
    groups = [
        {"params": [p for p in model.parameters() if (p in spared) == kept], "weight_decay": 0.0 if kept else DECAY}
        for kept in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    steps, late, accuracies = len(rest) // BATCH, loop != LOOPS[2], []
    for epoch in range(epochs):
        shuffled = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed * 100_003 + epoch))]
        model.train()
        for step in range(steps):
            batch = shuffled[step * BATCH : (step + 1) * BATCH]
            for group in optimizer.param_groups:
                group["lr"] = rate_at((epoch * steps + step + late) / (EPOCHS * steps))
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            hit = model(images[test]).argmax(1) == labels[test]
        accuracies.append(round(100 * float(hit.float().mean()), 2))
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="ssa")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        for loop in LOOPS:
            began = time.perf_counter()
            record = {"attention": given.attention, "seed": seed, "loop": loop}
            record["top1_by_epoch"] = train(given.attention, seed, loop)
            record["seconds"] = round(time.perf_counter() - began)
            with given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
