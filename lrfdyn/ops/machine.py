"""The facts of a GPU that launches depend on, and what follows from them.

Block sizes were measured on an H200 and are kept in units that mean the same elsewhere: lanes instead of warps, which
are 32 lanes wide on GPUs of NVIDIA and 64 on the large ones of AMD, and programs per multiprocessor. On an H200 they
are what was measured. Nothing else is assumed of a machine that nobody has measured on; `tuning.py` measures there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Machine:
    """A GPU as launches see it."""

    name: str
    architecture: str  # what kernels are compiled for: sm_90, gfx942
    multiprocessors: int
    lanes: int  # of a warp
    shared: int  # bytes of shared memory that a program may have

    def warps(self, lanes: int) -> int:
        """Warps that have so many lanes together; one at least."""
        return max(1, lanes // self.lanes)

    @property
    def shared_operands(self) -> bool:
        """Whether matrix units read their operands from shared memory, so that registers hold little but the sums."""
        return self.architecture.startswith(("sm_9", "sm_10"))

    def channels(self, count: int) -> int:
        """So many channels for a program of one warp, or more where that would leave lanes without one."""
        return max(count, self.lanes)

    @property
    def reducers(self) -> int:
        """Programs of a kernel that reduces and reads as fast as it can."""
        return 8 * self.multiprocessors

    @property
    def walkers(self) -> int:
        """Programs of one warp each that walk over sequences: nearly 24 per multiprocessor, in steps of 256."""
        return 256 * max(1, 24 * self.multiprocessors // 256)


H200 = Machine("NVIDIA H200", "sm_90", 132, 32, 227 * 1024)
NO_GPU = H200  # Triton's interpreter, and tensors without memory, take what was measured


def programs_for(count: int, block: int) -> int:
    """How many programs of `block` elements have `count` together. Triton's own takes a hundred times as long on the
    host, and every launch asks."""
    return -(-count // block)


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is not less than `count` >= 1; see above."""
    return 1 << (count - 1).bit_length()


def _shared_memory(index: int) -> int:
    from triton.runtime.driver import driver

    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


@cache
def _machine(index: int | None) -> Machine:
    if not torch.cuda.is_available():  # a compiler may ask for a device that is not there
        return NO_GPU
    index = torch.cuda.current_device() if index is None else index
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        architecture, lanes = facts.gcnArchName.split(":")[0], 64
    else:
        architecture, lanes = f"sm_{facts.major}{facts.minor}", 32
    lanes = getattr(facts, "warp_size", lanes)  # older versions of torch do not tell
    return Machine(facts.name, architecture, facts.multi_processor_count, lanes, _shared_memory(index))


def machine_of(device: torch.device) -> Machine:
    """The machine that the kernels of this device run on. Nothing of it changes while a process runs."""
    return _machine(device.index) if device.type == "cuda" else NO_GPU
