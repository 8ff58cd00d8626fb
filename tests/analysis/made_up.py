"""Results with made-up numbers in every section, and a reader of the page that shows them."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from typing import Any

# One pixel of PNG, black.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)
HOSTILE = '</script><b id="broken">&<!-- <script>'


def layer(name: str, kind: str, accumulates: float, macs: float) -> dict[str, Any]:
    picojoule = 0.9 * accumulates + 4.6 * macs
    return {
        "name": name,
        "kind": kind,
        "accumulates": accumulates,
        "multiply_accumulates": macs,
        "energy_pj": picojoule,
    }


def attention(label: str, accuracy: list[float], state: int) -> dict[str, Any]:
    """Return the results of one attention on a 4 by 4 grid of tokens."""
    weight = [0.2, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02]
    side = 8
    field = [[math.exp(-((row - 3.5) ** 2 + (column - 3.5) ** 2) / 4) for column in range(side)] for row in range(side)]
    tokens = [[(4 * row + column) / 120 for column in range(4)] for row in range(4)]
    mean = sum(accuracy) / len(accuracy)
    return {
        "label": label,
        "options": {"kernel": 3},
        "parameters": 20_000 + state,
        "accuracy_mean": mean,
        "accuracy_spread": max(accuracy) - mean,
        "accuracy_values": accuracy,
        "state_terms": [
            {"name": "kv matrix", "formula": "d^2/h", "elements": state // 8, "bytes": state // 2},
            {"name": "line buffers", "formula": "K W d", "elements": state // 8, "bytes": state // 2},
        ],
        "state_bytes": state,
        "peak_inference_bytes": 1_000_000 + state,
        "firing_rate": 0.18,
        "firing_by_layer": {"stem.neuron": 0.2, "blocks.0.neuron": 0.16},
        "images_per_second": 812.5,
        "energy": {
            "accumulates": 2.5e6,
            "multiply_accumulates": 1000.0,
            "energy_pj": 2.25e6 + 4600.0,
            "assumptions": ["0.9 pJ per accumulate."],
            "layers": [
                layer("stem.conv", "3x3 convolution", 0.0, 1000.0),
                layer("blocks.0.attn.q.conv", "1x1 convolution", 1.5e6, 0.0),
                layer("blocks.0.attn.k^T v", "attention", 1e6, 0.0),
            ],
        },
        "locality": {
            "distance": list(range(7)),
            "weight": weight,
            "weight_by_layer": [weight, weight[::-1]],
            "short_distance": 2,
            "short_range_share": 0.31,
            "short_range_share_uniform": 0.2,
            "mean_distance": 2.1,
            "entropy_mean": 2.4,
            "entropy_uniform": math.log(16),
            "entropy_by_layer": [2.3, 2.5],
            "entropy_histogram": {
                "edges": [2.0, 2.25, 2.5, 2.75, 3.0],
                "density": [0.4, 1.6, 1.2, 0.8],
                "density_by_layer": [[0.4, 1.6, 1.2, 0.8], None],
            },
            "score_histogram": {
                "edges": [0.5, 0.7, 1.0, 1.4, 2.0],
                "zero": 0.1,
                "share": [0.0, 0.3, 0.5, 0.1],
                "share_by_layer": [[0.0, 0.3, 0.5, 0.1], None],
            },
        },
        "attention_maps": {
            "grid": [4, 4],
            "layers": ["blocks.0.attn", "blocks.1.attn"],
            "queries": [[2, 2], [1, 3]],
            "maps": [[{"average": tokens, "by_layer": [tokens, None]}, {"average": None, "by_layer": [None, None]}]],
        },
        "receptive_field": {
            "map": field,
            "share_inside": [{"side": size, "share": size / 8} for size in (1, 3, 5, 7, 8)],
        },
    }


def make_results(labels: tuple[str, ...] = ("SSA", "LRF-Dyn"), seeds: int = 2) -> dict[str, Any]:
    """Return small results with every section."""
    attentions = {}
    runs = []
    for index, label in enumerate(labels):
        key = f"kind{index}"
        accuracy = [0.9 + 0.01 * index + 0.004 * seed for seed in range(seeds)]
        attentions[key] = attention(label, accuracy, 4096 * (index + 1))
        for seed in range(seeds):
            curve = [
                {
                    "epoch": epoch,
                    "train_loss": 2 / epoch,
                    "train_accuracy": 0.8,
                    "test_loss": 1.0,
                    "test_accuracy": accuracy[seed] - 0.3 / epoch,
                    "seconds": 0.5,
                }
                for epoch in range(1, 8)
            ]
            weights = f"weights/{key}-seed{seed}.safetensors"
            runs.append(
                {
                    "attention": key,
                    "seed": seed,
                    "parameters": 20_000,
                    "test_accuracy": accuracy[seed],
                    "train_seconds": 21.0,
                    "weights": weights,
                    "curve": curve,
                }
            )
    return {
        "format": "lrfdyn-results/1",
        "title": "Spikformer on digits",
        "lead": "Two models, analysed on 360 test images of digits.",
        "command": "lrfdyn reproduce --out demo",
        "created": "2026-11-15T08:00:00",
        "version": "0.1.0",
        "machine": {"cpu": "some CPU", "cores": 2, "threads": 2, "python": "3.11.7", "torch": "2.13.0"},
        "data": {"name": "digits", "train": 1437, "test": 360, "classes": 10},
        "model": {"name": "spikformer", "config": {"dim": 64, "depth": 2}, "grid": [4, 4], "time_steps": 4},
        "recipe": {"epochs": 7, "batch_size": 64, "learning_rate": 0.002},
        "wall_seconds": 190.3,
        "runs": runs,
        "pictures": [{"name": "image 1", "source": PICTURE}],
        "attentions": attentions,
        "notes": ["A small task."],
    }


class Page(HTMLParser):
    """What a browser would make of the page: its elements, its texts per element, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self._open = f"script {dict(attrs).get('type', '')}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open, data))

    def text(self, element: str) -> str:
        return "".join(text for name, text in self.texts if name == element)

    def data(self) -> dict[str, Any]:
        return json.loads(self.text("script application/json"))
