"""What the figures for papers show and how it was measured: a caption for each, in one text file beside them."""

from __future__ import annotations

from typing import Any

WEIGHTS = (
    "Weights are absolute values, averaged over heads (channels for LRF-Dyn), added up over the time steps and "
    "normalised to sum 1 for every query"
)


def captions(results: dict[str, Any]) -> dict[str, str]:
    """Captions by the names of the figures (`plots.figures`)."""
    made = {
        chart["id"].replace("-", "_"): f"{chart['title']}. {chart['caption']}" for chart in results.get("charts", [])
    }
    entries = list(results.get("attentions", {}).values())
    if not entries:
        return made
    data = results.get("data") or {}
    what = f"{data.get('test', 'the')} {'images of noise' if data.get('name') == 'noise' else 'test images'}"
    if data.get("name") not in (None, "noise"):
        what += f" of {data['name']}"
    nears = {entry["locality"].get("short_distance") for entry in entries if (entry.get("locality") or {}).get("share")}
    near = nears.pop() if len(nears) == 1 else "a quarter of the largest on the grid of each model"
    cross = any((entry.get("receptive_field") or {}).get("centre") for entry in entries)
    energy: dict[str, Any] = next((entry["energy"] for entry in entries if entry.get("energy")), {})
    several = any(len(entry.get("accuracy_values") or []) > 1 for entry in entries)
    spread = f" Bars are ± {results.get('spread', 'the spread over the seeds')}." if several else " One run per model."
    return made | {
        "attention_distance": f"Mean attention weight against Manhattan distance on the token grid, averaged over "
        f"layers, and the share of attention at a distance of at most {near}; {what}. {WEIGHTS}.",
        "attention_distance_layers": f"Mean attention weight against Manhattan distance, layer by layer; {what}. "
        f"{WEIGHTS}.",
        "attention_entropy": f"Distribution of the entropy (natural logarithm) of the attention of single queries, "
        f"averaged over layers, each curve divided by its largest value; {what}. {WEIGHTS}; queries without any weight "
        "are left out.",
        "receptive_fields": f"Effective receptive fields: absolute gradient of the centre position of the last feature "
        f"map with respect to the input, through the surrogate gradients, averaged over {what}, each map divided by "
        f"its largest value; the colour is the square root{' and the cross the pixel under that position' * cross}.",
        "receptive_field_share": f"Share of the effective receptive field inside centred squares; {what}.",
        "energy": f"Energy of the synaptic operations of one image over all time steps, counted from the spikes that "
        f"were sent; {what}. {' '.join(energy.get('assumptions', []))}",
        "firing_rates": f"Firing rate of every neuron layer: spikes per neuron and time step; {what}.",
        "memory_accuracy": "Test accuracy against memory: left, the derived state of one attention layer for one image "
        "and time step; right, the measured peak of an evaluation pass at batch 1. The area of a point is proportional "
        f"to the number of parameters.{spread}",
        "convergence": "Test accuracy and training loss after every epoch"
        + ("; the line is the mean over the seeds, the band runs from the lowest to the highest." if several else "."),
    }
