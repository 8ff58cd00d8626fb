"""The linear dendrites of LRF-Dyn over a sequence of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.errors import require, unknown_name
from lrfdyn.ops.dendrite.modes import CHUNK, FORMS, dendrite_step, initial_dendrites, paired_modes, split_directions
from lrfdyn.ops.dendrite.operator import dendrite_operator
from lrfdyn.ops.dispatch import as_operator, require_shape, under_autocast, use_triton

__all__ = ["dendrite", "dendrite_step", "initial_dendrites", "paired_modes"]

# A lane holds ten to thirty numbers per mode in registers.
MOST_KERNEL_MODES = 4


def dendrite(
    u: Tensor,
    decay: Tensor,
    frequency: Tensor | None,
    weight: Tensor,
    *,
    form: str = "auto",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Soma potentials of a sequence of tokens: its causal convolution with the kernel of the modes, per channel.

    - `u`: Tokens `[B, N, C]`.
    - `decay`: `[C, M]`, >= 0, of each mode and token; `[C, M, 2]` of real modes.
    - `frequency`: `[C, M]`, in radians per token; None: the modes are real, two in the place of each.
    - `weight`: `[C, M, 2]`, real and imaginary part, or those of two real modes. With a leading axis of two,
      `[2, C, M, 2]`, as `decay` and `frequency` then have too, a second set of modes runs over the tokens from the last
      to the first, and potentials are the sum of both: the token itself, at lag 0, counts in both. The two directions
      take and give no state.
    - `form`: "fft", "scan" (in chunks), "step" (token by token), or "auto": the fastest here, on a GPU a kernel.
    - `initial_state`: The modes before the first token, `[B, C, M, 2]`: k = 2M numbers per channel, or zeros.
    - `output_final_state`: Whether the modes after the last token are wanted.
    - `packed`: `[B / T, N, C]` bytes, bit t for time step t of the same tokens, B = T * images: on a GPU these are
      kept for the backward pass instead of `u`.

    Returns potentials `[B, N, C]`, computed in float32 at least, and the last state `[B, C, M, 2]` or None.

    Example:

        >>> decay, frequency, weight = paired_modes(*initial_dendrites(channels=16, dendrites=8, width=6))
        >>> soma, state = dendrite(torch.rand(2, 36, 16), decay, frequency, weight, output_final_state=True)
        >>> soma.shape, state.shape
        (torch.Size([2, 36, 16]), torch.Size([2, 16, 4, 2]))
    """
    require(u.dim() == 3 and u.shape[1] >= 1, f"u: expected [B, N, C] with N >= 1, got {list(u.shape)}")
    known, stateful = weight.dim() in (3, 4), initial_state is not None or output_final_state
    require(known, f"weight: expected [C, M, 2] or [2, C, M, 2], got {list(weight.shape)}")
    channels, modes, directions = u.shape[2], weight.shape[-2], (2,) * (weight.dim() - 3)
    real = (2,) if frequency is None else ()
    require_shape("decay", decay, (*directions, channels, modes, *real))
    require_shape("frequency", frequency, (*directions, channels, modes))
    require_shape("weight", weight, (*directions, channels, modes, 2))
    require_shape("initial_state", initial_state, (u.shape[0], channels, modes, 2))
    require(not (directions and stateful), f"weight: expected [C, M, 2] with a state, got {list(weight.shape)}")
    fused = form == "auto" and modes <= MOST_KERNEL_MODES and not (stateful and torch.is_grad_enabled())
    if fused and use_triton(u, decay, frequency, weight, initial_state):
        # Under autocast the potentials are stored in its type, like any other activation.
        out = u.dtype if under_autocast(u) else torch.promote_types(u.dtype, weight.dtype)
        given = (u, decay, frequency, weight, out, packed, initial_state, output_final_state)
        if as_operator():
            soma, state = dendrite_operator(*given)
            return soma, state if output_final_state else None
        from lrfdyn.ops.dendrite.triton import Dendrite

        return Dendrite.apply(*given)
    if form == "auto":
        # Measured on CPUs: products win at every length. On a GPU going from chunk to chunk costs a launch for each.
        form = "fft" if u.is_cuda and u.shape[1] > 4 * CHUNK else "scan"
    if form not in FORMS:
        raise unknown_name("form", form, ["auto", *FORMS])
    out = torch.promote_types(u.dtype, weight.dtype)
    dtype = torch.promote_types(out, torch.float32)
    before = None if initial_state is None else initial_state.to(dtype)
    cast = (decay.to(dtype), None if frequency is None else frequency.to(dtype), weight.to(dtype))
    with torch.autocast("cpu" if u.is_meta else u.device.type, enabled=False):  # meta has no autocast of its own
        if directions:
            there, back = split_directions(cast)
            soma, state = FORMS[form](u.to(dtype), there, None, False)
            soma = soma + FORMS[form](u.to(dtype).flip(1), back, None, False)[0].flip(1)
        else:
            soma, state = FORMS[form](u.to(dtype), cast, before, output_final_state)
    return soma.to(out), state
