"""What the registered operators share.

Every kernel is an operator `torch.ops.lrfdyn.*` too, with a fake form (the shapes and strides of its results) and a
registered gradient, so that `torch.compile`, `torch.export` and modes that look at every operator take it as it is. An
operator calls the same launch functions as the autograd function of the eager mode, and always gives all of its
results: one that was not asked for has no elements. `dispatch.as_operator` says when operators are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lrfdyn"  # of `torch.ops`


def operator(name: str, schema: str, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as `torch.ops.<NAMESPACE>.<name>`."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=tuple(mutates), schema=schema)


def or_nothing(result: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`result`, or a tensor without elements where there is none."""
    return like.new_empty(0, dtype=dtype) if result is None else result
