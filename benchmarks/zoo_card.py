"""The text of the cards of the zoo."""

from __future__ import annotations

import math
from typing import Any

from lrfdyn.attention import attention_label
from lrfdyn.io.hub import WEIGHTS_FILE
from lrfdyn.io.zoo import Pretrained

# Data by name: what it is, and its terms.
TERMS = {
    "digits": (
        "scikit-learn's digits, 8 x 8 (the test set of the UCI repository's Optical Recognition of Handwritten Digits)",
        "CC BY 4.0",
    ),
    "nmnist": ("N-MNIST, recordings of MNIST by an event camera (Orchard et al., 2015)", "CC BY-SA 4.0"),
    "cifar10": ("CIFAR-10 (Krizhevsky, 2009)", "no licence is stated; its author asks to be cited"),
    "cifar100": ("CIFAR-100 (Krizhevsky, 2009)", "no licence is stated; its author asks to be cited"),
}


def card_header(entry: Pretrained) -> dict[str, Any]:
    """What the hub reads."""
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": entry.data, "type": entry.data},
        "metrics": [{"type": "accuracy", "value": round(entry.bf16 / 100, 6)}],
    }
    return {
        "license": "apache-2.0",
        "datasets": [entry.data],
        "metrics": ["accuracy"],
        "model-index": [{"name": entry.name, "results": [result]}],
    }


def card_text(entry: Pretrained, command: str, no_integer: str) -> str:
    """Data, recipe, numbers, limits and licences in Markdown. `no_integer` says why there is no integer form."""
    data, terms = TERMS[entry.data]
    over = f"mean and standard deviation of seeds {', '.join(entry.top1)}"
    over = f"seed {entry.seed}" if entry.deviation is None else over
    spread = "" if entry.deviation is None else f" ± {entry.deviation:.2f}"
    share = entry.bf16 / 100
    error = 100 * math.sqrt(share * (1 - share) / entry.test_images)
    integer = no_integer if entry.integer is None else f"{entry.integer:.2f} %"
    rows = {
        f"top-1 after training ({entry.precision}), {over}": f"{entry.mean:.2f}{spread} %",
        "top-1 of these weights as they were trained, float32": f"{entry.float32:.2f} %",
        "top-1 of these weights as they are stored, bf16": f"{entry.bf16:.2f} %",
        "top-1 of what is stored, in integers": integer,
        "parameters": f"{entry.parameters:,}",
        "state of an attention layer": "-" if entry.state_bytes is None else f"{entry.state_bytes / 1024:,.1f} KiB",
        "energy of an image, counted": f"{entry.energy_pj / 1e6:.2f} µJ",
    }
    limits = [
        f"Trained on {entry.train_images:,} images or recordings of {entry.data} and tested on "
        f"{entry.test_images:,}: one is {100 / entry.test_images:.2f} points, the standard error of the accuracy about "
        f"{error:.1f} points.",
        "It knows the classes of this data and names one of them whatever it is shown. It was tested on nothing else.",
        "The file holds weights that were rounded to bfloat16; a loaded model computes in float32.",
        "State is derived for one image and time step, energy counted from spikes with the usual costs of operations "
        "(0.9 pJ for an accumulate, 4.6 pJ for a multiply-accumulate); neither was measured on a chip.",
    ]
    logs = ", ".join(f"`{log}`" for log in entry.logs)
    kind = f" with {attention_label(entry.attention)}" if entry.attention else ""
    return f"""## {entry.name}

`{entry.model}`{kind}, trained on {data}.

| | |
|---|---|
{"".join(f"| {key} | {value} |" + chr(10) for key, value in rows.items())}
These are the weights of seed {entry.seed}, the first, whatever its accuracy. Recipe `{entry.recipe}`, in
`recipe.yaml`; {entry.epochs:g} epochs; the logs of all seeds are in the repository: {logs}.

    {command}

## Limits

{"".join(f"- {line}" + chr(10) for line in limits)}
## Licence

The weights are under Apache-2.0, as lrfdyn is. The data has its own terms: {terms}.

sha256 of `{WEIGHTS_FILE}`: `{entry.files[WEIGHTS_FILE]["sha256"]}`"""
