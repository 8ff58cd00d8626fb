"""Devices by name."""

from __future__ import annotations

import torch

from lrfdyn.errors import LrfdynError, first_line


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device of a name; for None or "auto" a GPU where there is one."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # which meta, a device without memory, refuses
    except (RuntimeError, AssertionError) as error:  # what torch says of a device that is not there
        raise LrfdynError(f"device: cannot use {str(name)!r} ({first_line(error)})") from None
    return device


def device_name(device: torch.device) -> str:
    """The name by which a record calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
