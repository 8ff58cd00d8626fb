"""Calls with wrong types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lrfdyn
from lrfdyn import analysis, deploy, ops
from lrfdyn.data import Augmentation, Preprocessing, create_data
from lrfdyn.deploy.predict import expand_images
from lrfdyn.models.base import SpikingModel
from lrfdyn.sources import find_source, find_sources
from lrfdyn.training.recipes import load_recipe, parse_config
from tests.hostile.case import Case, short
from tests.training.runs import TINY


def values(case: Case) -> list[Any]:
    """What can come instead of an argument."""
    return [
        None, True, False, -1, 0, 1, 3, 2.5, -0.5, float("nan"), float("inf"), 2**63, 10**30, 1j, "", " ", "x" * 1000,
        "a\nb", "\0", "\ud800", "~nosuchuser/x", "x" * 300, "../..", "[red]x", "cuda", "cpu", "false", "abcd", b"bytes",
        Path("nowhere"), case.folder, object(), int, len, [], (), {}, set(), [1, 2], (1, "a"), {"a": 1}, ["a"], [None],
        range(3), np.float64(3), np.zeros(3), torch.zeros(0), torch.zeros(3), torch.zeros(2, 1, 16, 16),
        torch.device("cpu"),
        torch.nn.Identity(), Augmentation(), "lrf_dyn", "spikformer_4_384", 3.0, -(10**6), "1", "１",
    ]  # fmt: skip


@cache
def _loaded(path: Path) -> SpikingModel:
    return lrfdyn.from_pretrained(path)


def calls(case: Case) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions with arguments that are right."""
    own = {"dim": 16, "depth": 1, "heads": 2, "mlp_ratio": 1, "num_classes": 3, "image_size": 16, "time_steps": 1}
    own |= {"attention": "ssa", "in_channels": 1, "pooling": (False,) * 4, "qkv_bias": False, "drop_path": 0.1}
    meta = {"widths": (4, 4, 8, 8), "depths": (1,) * 5, "image_size": 32, "time_steps": 1, "heads": 2, "mlp_ratio": 1}
    model, image = _loaded(case.ground / "saved"), torch.zeros(2, 1, 16, 16)
    image_files = [case.ground / "images" / "0.jpg"]
    layer = next(module for module in model.modules() if isinstance(module, lrfdyn.attention.Attention))

    def batches(batch_size: Any = 2, rank: Any = 0, world_size: Any = 1, **how: Any) -> Any:
        source = create_data(**{"name": "folder", "root": case.ground / "folder", "augment": Augmentation(), **how})
        return next(iter(source.test_batches(batch_size=batch_size, rank=rank, world_size=world_size)))

    def predictions(top: Any = 2, batch: Any = 2, paths: Any = image_files, **how: Any) -> Any:
        opened = deploy.Predictor.open(**{"model": str(case.ground / "saved"), **how})
        return list(opened.predict(paths, top, batch))

    def compiled(images: Any = image, **how: Any) -> Any:
        return deploy.compile_for_inference(**{"model": model, **how})(images)

    def swapped(**how: Any) -> Any:
        return lrfdyn.swap_attention(**{"model": lrfdyn.from_pretrained(case.ground / "saved"), **how})

    def recipe(key: Any = "model.dilations", value: Any = (3, 5), epochs: Any = 2, name: Any = "digits") -> Any:
        return load_recipe(name, {key if isinstance(key, str) else "x": value}, epochs)

    augmentation = {
        "crop": "pad", "crop_padding": 1, "crop_scale": (0.1, 1.0), "crop_ratio": (0.8, 1.2), "flip": 0.5, "erase": 0.1,
        "rand_augment_layers": 1, "rand_augment_magnitude": 9.0, "rand_augment_operations": None, "mixup": 0.1,
        "erase_fill": "mean", "cutmix": 0.1, "label_smoothing": 0.1, "repeats": 1, "scale": (1.0, 1.0),
    }  # fmt: skip
    loading = {"source": case.ground / "saved", "device": "cpu", "revision": None, "local_files_only": True}
    theory = {"n": 20, "beta": 0.1, "alpha": None, "share": 0.5, "dilations": (3, 5)}
    load_images = {"name": "random", "root": None, "count": 2, "batch_size": 2, "image_size": 16}
    return {
        "create_model": (lrfdyn.create_model, {"name": "spikformer_4_384", **own}),
        "create_model meta": (lrfdyn.create_model, {"name": "sdt_v3_t", "attention": "lrf_dyn", **meta}),
        "create_model resnet": (
            lrfdyn.create_model, {"name": "sew_resnet34", "widths": (4, 4), "depths": (1, 1), "num_classes": 3}
        ),
        "create_attention": (
            lrfdyn.create_attention,
            {"kind": "lrf_dyn", "dim": 8, "heads": 2, "grid": (4, 4), "host": None, "dilations": (3, 5),
            "dendrites": 2},
        ),
        "swap_attention": (swapped, {"kind": "ssa", "grid": (4, 4), "model": model}),
        "create_segmenter": (
            lrfdyn.create_segmenter,
            {"name": "sdt_v3_t", **meta, "attention": "ssa", "num_classes": 3, "head_options": {"width": 8}},
        ),
        "list_models": (lrfdyn.list_models, {"pattern": "*"}),
        "from_pretrained": (lrfdyn.from_pretrained, {**loading, "time_steps": 1, "drop_path": 0.1}),
        "load_official": (
            lrfdyn.load_official, {"model": small_again(case), "path": case.ground / "official.pth", "strict": True}
        ),
        "register_attention": (lrfdyn.register_attention, {"name": "own", "label": "Own"}),
        "register_model": (lrfdyn.register_model, {"name": "own"}),
        "register_data": (lrfdyn.register_data, {"name": "own"}),
        "forward": (model, {"images": image}),
        "save_pretrained": (model.save_pretrained, {"folder": case.folder / "s", "description": "", "license": "mit"}),
        "find_source": (find_source, {"text": case.ground / "run", "argument": "model"}),
        "find_source name": (find_source, {"text": "spikformer_4_384", "time_steps": 1, "image_size": 32}),
        "find_sources": (find_sources, {"text": case.ground / "run"}),
        "data": (batches, {"name": "folder", "root": case.ground / "folder", "augment": Augmentation(), "batch_size": 2,
                           "rank": 0, "world_size": 1, "image_size": 16, "workers": 0}),
        "Augmentation": (Augmentation, augmentation),
        "Preprocessing": (Preprocessing, {"size": 16, "mean": (0.1,), "std": (0.2,), "crop_share": 0.8,
                                          "interpolation": "bicubic"}),
        "Predictor": (predictions, {"model": str(case.ground / "saved"), "runtime": None, "device": "cpu", "top": 2,
                                    "batch": 2, "paths": image_files}),
        "expand_images": (expand_images, {"inputs": image_files}),
        "compile_for_inference": (
            compiled, {"images": image, "model": model, "images_at_once": 1, "tile_mib": 1.0, "steps": "all",
                       "mixing": "parallel", "buffers": "spikes", "graph": False},
        ),
        "streaming": (deploy.StreamingAttention, {"attention": layer, "buffers": "spikes"}),
        "row_stream": (deploy.RowStream, {"attention": layer, "time_steps": 1, "batch": 1, "grid": (4, 4),
                                          "buffers": "spikes"}),
        "export": (deploy.export_model, {"model": model, "out": case.folder / "x.nothing", "format": "nothing",
                                         "tolerance": 0.1}),
        "energy": (analysis.energy, {"model": model, "images": image, "costs": None}),
        "EnergyModel": (analysis.EnergyModel, {"accumulate_pj": 1.0, "multiply_accumulate_pj": 2.0, "mac_layers": (),
                                               "repeat_first": False}),
        "firing_rates": (analysis.firing_rates, {"model": model, "images": image}),
        "locality": (analysis.locality, {"model": model, "images": image}),
        "attention_maps": (analysis.attention_maps, {"model": model, "images": image, "queries": [(1, 1)]}),
        "receptive_field": (analysis.receptive_field, {"model": model, "images": image}),
        "attention_state": (analysis.attention_state, {"model": model, "buffers": "spikes"}),
        "inference_peak": (analysis.inference_peak, {"model": model, "images": image}),
        "load_images": (lambda **how: analysis.load_images(device=torch.device("cpu"), **how), load_images),
        "theory": (lambda **how: analysis.theory_results(analysis.TheorySettings(**how)), theory),
        "recipe": (recipe, {"name": "digits", "key": "model.dilations", "value": (3, 5), "epochs": 2}),
        "parse_config": (parse_config, {"values": TINY, "overrides": {"run.seed": 3}}),
    }  # fmt: skip


def small_again(case: Case) -> SpikingModel:
    """As `_loaded`, for what changes its model."""
    return lrfdyn.from_pretrained(case.ground / "saved")


def api(case: Case) -> None:
    if case.draw.random() < 0.1:
        return shapes(case)
    known = calls(case)
    name = case.draw.choice(list(known))
    function, arguments = known[name]
    changed = {
        key: case.draw.choice(values(case))
        for key in case.draw.sample(list(arguments), case.draw.choice([1, 1, 2]) if len(arguments) > 1 else 1)
    }
    case.notes.append(f"{name}({', '.join(f'{key}={short(value)}' for key, value in changed.items())})")
    case.call(lambda: function(**{**arguments, **changed}))
    return None


def shapes(case: Case) -> None:
    """Operations on tensors whose shapes do not fit, which may raise what PyTorch raises but must not give something of
    another shape."""
    n, c, dendrites = 5, 3, 2
    u, weight = torch.rand(2, n, c), torch.rand(c, dendrites)
    step = {"u": torch.rand(2, c), "decay": weight, "frequency": weight, "weight": weight}
    q = {key: torch.ones(2, 4, 2) for key in "qkv"}
    known: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "dendrite": (ops.dendrite, {"u": u, "decay": weight, "frequency": weight, "weight": weight}),
        "dendrite_step": (ops.dendrite_step, {**step, "state": torch.zeros(2, c, dendrites, dtype=torch.complex64)}),
        "lif": (lambda x: ops.lif(x, ops.Dynamics()), {"x": u}),
        "lrf": (
            lambda **how: ops.lrf(dilations=(1,), **how),
            {"x": torch.ones(1, 2, 4, 4), "weight": torch.ones(2, 1, 3, 3)},
        ),
        "integer_spike": (ops.integer_spike, {"x": u, "levels": 4}),
        "spike_attention": (lambda **how: ops.spike_attention(scale=0.5, **how), q),
        "causal_spike_attention": (lambda **how: ops.causal_spike_attention(scale=0.5, **how), q),
    }
    name = case.draw.choice(list(known))
    function, arguments = known[name]
    key = case.draw.choice(list(arguments))
    shape = [case.draw.choice([0, 1, 2, 3, 4, 7]) for _ in range(case.draw.randrange(5))]
    case.notes.append(f"{name}({key}={shape})")
    case.call(lambda: function(**{**arguments, key: torch.ones(shape)}), lean=True)
