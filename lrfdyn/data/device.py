"""From the host to the device without waiting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for (which it would for memory that is not pinned)."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
