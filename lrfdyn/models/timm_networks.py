"""Networks of timm, by a name and options that may come from a stranger's file."""

from __future__ import annotations

import re
from typing import Any

from lrfdyn.errors import LrfdynError, first_line, needs, require, unknown_name

# timm's other options name files, repositories and addresses, which it would read, and older versions unpickle.
OPTIONS = ("depth", "depths", "drop_path_rate", "drop_rate", "embed_dim", "img_size", "mlp_ratio", "num_heads",
           "out_indices", "output_stride", "patch_size", "window_size")  # fmt: skip


def create_timm(argument: str, name: str, options: dict[str, Any], **how: Any) -> Any:
    """The network `name` of timm's own registry. `options` are some of `OPTIONS`, numbers all of them, `how` what the
    caller itself decides; errors name `argument`."""
    known = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)  # "hf-hub:" and "local-dir:" lead elsewhere
    require(bool(known), f"{argument}: expected a name in timm's registry, got {name!r}")
    for key, value in options.items():
        if key not in OPTIONS:
            raise unknown_name(f"{argument}: option of timm/{name}", key, OPTIONS)
        values = value if isinstance(value, (list, tuple)) else [value]
        numbers = all(isinstance(item, (int, float)) for item in values)
        require(numbers, f"{argument}: {key}: expected a number or several, got {value!r}")
    with needs(f"{argument}: timm/{name} needs timm; pip install 'lrfdyn[timm]'"):
        import timm
    try:
        return timm.create_model(name, **how, **options)
    except (RuntimeError, TypeError, ValueError, OSError) as error:  # no such model, option or connection
        raise LrfdynError(f"{argument}: timm cannot build {name!r} ({first_line(error)})") from None
