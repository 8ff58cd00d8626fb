"""Which form of an operation runs: the fused kernels on a GPU, the plain definitions everywhere else."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor

from lrfdyn.errors import require

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_thread = local()  # `plain` is of a thread, not of the process, and what compilers can read

# Before PyTorch 2.9 its Triton does not compile all kernels: 3.2 has no tuples that grow, 3.3 no constants made of
# several, and 3.4 fails at the stencils.
_triton_present = (
    os.environ.get("LRFDYN_TRITON", "1") != "0"
    and torch.__version__ >= "2.9"
    and importlib.util.find_spec("triton") is not None
)


def triton_present() -> bool:
    """Whether kernels can be built here. `LRFDYN_TRITON=0` turns them off."""
    return _triton_present  # looked up once, and by a compiler never: it only reads the answer


def _on_kernel_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def use_triton(*tensors: Tensor | None) -> bool:
    """Whether an operation on these tensors takes its kernel: all on a GPU, in a type that the kernels know."""
    if getattr(_thread, "plain", False) or transformed():
        return False
    given = [t for t in tensors if t is not None]
    return all(_on_kernel_device(t) and t.dtype in KERNEL_DTYPES and t.numel() > 0 for t in given) and triton_present()


def transformed() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...) is at work. It must take apart what it meets, and
    neither the kernels nor functions that write into their own results can be."""
    return torch._C._are_functorch_transforms_active()


# A compiler asks while it traces and keeps the answer, not the question (see `torch.compiler.assume_constant_result`).
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def as_operator() -> bool:
    """Whether a kernel must be called as a registered operator: a compiler traces the call, or a mode looks at every
    operator (tensors without memory, FLOP counters). Everywhere else it is an autograd function, which may do what an
    operator must not: return its input, write into a gradient that nobody else holds."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def require_shape(name: str, given: Tensor | None, shape: Sequence[int]) -> None:
    """The argument `name`, if it is given, must have this shape."""
    if given is not None:
        require(given.shape == tuple(shape), f"{name}: expected {list(shape)}, got {list(given.shape)}")


def first_derivative_only() -> None:
    """For the backward pass of a kernel: gradients are on there only if it is to be differentiated again."""
    require(
        not torch.is_grad_enabled(),
        "create_graph: the kernels have no second derivative; run the forward pass inside plain_operations()",
    )


@contextmanager
def plain_operations() -> Iterator[None]:
    """Inside this context every operation takes its plain definition, on GPUs too. Other threads are not affected."""
    before = getattr(_thread, "plain", False)
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = before


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`."""
    return _autocast(x.device.type) is not None


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type that a convolution of `x` would compute in: autocast's where it is on, else that of `x`."""
    return _autocast(x.device.type) or x.dtype
