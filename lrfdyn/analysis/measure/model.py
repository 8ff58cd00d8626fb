"""Everything that is measured on one model, as the report and the tables show it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrfdyn.analysis.measure.inference import attention_state, images_per_second, inference_peak, state_notes
from lrfdyn.analysis.measure.locality import Locality
from lrfdyn.analysis.measure.observe import observe
from lrfdyn.analysis.measure.receptive_field import receptive_field_record
from lrfdyn.analysis.measure.spikes import EnergyModel, FiringRates, SynapticOperations
from lrfdyn.attention import Attention
from lrfdyn.models import SpikingModel

Progress = Callable[[str, int], None]  # what is measured, and how many images of it are done now
PASSES = 3  # over the images: one that observes, two for the gradients, with and without those of attention


def measure_model(
    model: SpikingModel,
    batches: Sequence[Tensor],
    energy: EnergyModel | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measure a model on batches `[B, C, H, W]` of images (or of event frames, `[T, B, C, H, W]`) and return a record
    of parameters, memory, firing, energy, speed, locality and receptive field.

    A model without attention layers has no locality and no attention state; `notes` are lines about what an attention
    does not say. `progress(what, images)` is called while images are measured.
    """
    local = Locality()
    observers = FiringRates(), SynapticOperations(energy), local
    rates, operations, distances = observe(
        model, batches, *observers, on_batch=lambda n: progress("spikes and attention", n)
    )
    terms = attention_state(model) if any(isinstance(module, Attention) for module in model.modules()) else []
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_terms": terms,
        "state_bytes": sum(term["bytes"] for term in terms) if terms else None,
        "peak_inference_bytes": inference_peak(model, batches[0].narrow(-4, 0, 1)),
        "firing_rate": rates["mean"],
        "firing_by_layer": rates["by_layer"],
        "energy": operations,
        "images_per_second": images_per_second(model, batches[0]),
        "receptive_field": receptive_field_record(model, batches, lambda n: progress("receptive field", n)),
        "notes": [*operations["notes"], *local.notes, *state_notes(model)],
        **({"locality": distances} if distances else {}),
    }


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the machine and the software that a measurement is made on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    software = {"python": platform.python_version(), "torch": torch.__version__}
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device is not None and device.type == "cuda" else {}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), **software, **gpu}
