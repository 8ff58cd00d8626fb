"""A model in integers on emulated boards: are its logits those of the definition, bit for bit, and what does it take?

    python benchmarks/edge_boards.py                       # make edge-test: the digits model with LRF-Dyn
    python benchmarks/edge_boards.py --images 360 --json results/performance/edge_boards.json
    python benchmarks/edge_boards.py --run RUN             # a run of `lrfdyn train digits`

Without --run, the model of `make demo` is trained, or taken where it lies already. Test images run as C on Cortex-M
microcontrollers (qemu-system-arm) and on 64-bit Arm with NEON (qemu-aarch64); examples/boards has what such a board
needs. A board whose tools are not installed is skipped, with their names. The exit code is 1 where a logit differs.

Flash is code, constants and initial values, without the test images; RAM is static memory; stack is what was used of it
by the whole program. On a Cortex-M flash and RAM are those of the whole program too, on Linux of the model and the
kernels alone. Instructions are the most that an image took, as the emulator of a Cortex-M counts them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.data import Augmentation, create_data
from lrfdyn.deploy import IntegerModel, quantize, write_c
from lrfdyn.deploy.c.native import KERNELS
from lrfdyn.errors import LrfdynError
from lrfdyn.sources import find_source

PROGRAM = Path(__file__).parents[1] / "examples" / "boards"
RUN = Path("demo/runs/lrf_dyn-seed0")
TRAIN = ("train", "digits", "--model.attention", "lrf_dyn", "--run.seed", "0", "--resume", "auto", "--out", str(RUN))
INSTRUCTIONS_PER_TICK = 40  # the clock has 25 MHz, and the emulator a nanosecond for an instruction
COLUMNS = ("board", "images", "bit_exact", "flash_bytes", "ram_bytes", "stack_bytes", "instructions")


@dataclass(frozen=True)
class Board:
    """What `make` in examples/boards calls it, which tools it needs, and the prefix of those of the compiler."""

    target: str
    prefix: str
    emulator: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def compiler(self) -> str:
        return f"{self.prefix}gcc"

    def missing(self) -> list[str]:
        """What is not installed."""
        found = [tool for tool in ("make", self.compiler, self.emulator) if shutil.which(tool) is None]
        if shutil.which(self.compiler):  # which may have come without a library
            path = printed([self.compiler, "-print-file-name=libc.a"])
            found += [] if os.path.isabs(path) else [f"the C library of {self.compiler}"]
        return found


def cortex_m(core: str, machine: str) -> Board:
    return Board("cortex_m", "arm-none-eabi-", "qemu-system-arm", {"CPU": core, "MACHINE": machine})


BOARDS = {
    "cortex-m3": cortex_m("cortex-m3", "mps2-an385"),
    "cortex-m4": cortex_m("cortex-m4", "mps2-an386"),
    "cortex-m7": cortex_m("cortex-m7", "mps2-an500"),
    "aarch64": Board("aarch64", "aarch64-linux-gnu-", "qemu-aarch64", {"OPTIMISE": "-O3"}),
}


def printed(command: Sequence[str]) -> str:
    """What a command prints; an error with its complaint where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise LrfdynError(f"{command[0]}: not done after ten minutes") from None
    if done.returncode:
        raise LrfdynError(f"{command[0]}: exit code {done.returncode} ({(done.stderr or done.stdout).strip()[-200:]})")
    return done.stdout.strip()


def measure(model: IntegerModel, images: Tensor, board: Board) -> dict[str, Any]:
    """Runs `images` on a board and compares the logits that it prints with those of the definition."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_c(model, Path(folder) / "model.c", images)
        options = {"MODEL": str(written.path), "BUILD": folder, **board.options}
        make = ["make", "-s", "-C", str(PROGRAM), *(f"{name}={value}" for name, value in options.items())]
        printed([*make, f"{folder}/{board.target}.elf"])
        output = printed([*make, "-i", board.target])  # which fails where a logit differs
        end = re.search(r"^stack (\d+) bytes\nlongest (\d+) ticks$", output, re.M)
        if end is None:
            raise LrfdynError(f"{board.target}: the program did not reach its end ({output[-100:]})")
        logits = [[int(number) for number in row.split()] for row in output[: end.start()].splitlines()]
        stack, longest = map(int, end.groups())
        return {
            "images": len(images), "bit_exact": logits == model(images).tolist(),
            **sizes(board, Path(folder) / f"{board.target}.elf"), "weight_bytes": written.weight_bytes,
            "arena_bytes": written.memory_bytes, "stack_bytes": stack or None,
            "instructions": longest * INSTRUCTIONS_PER_TICK or None,
        }  # fmt: skip


def sizes(board: Board, program: Path) -> dict[str, int]:
    """Bytes of flash and of static memory."""
    if board.target == "cortex_m":
        table = printed([f"{board.prefix}size", "-A", str(program)])
        found = {name: int(size) for name, size in re.findall(r"^\.(\w+)\s+(\d+)\s", table, re.M)}
        return {
            "flash_bytes": found["vectors"] + found["text"] + found["data"],
            "ram_bytes": found["data"] + found["bss"],
        }
    objects = [str((program.with_suffix("") / name).with_suffix(".o")) for name in ("lrfdyn_model.c", *KERNELS)]
    rows = printed([f"{board.prefix}size", *objects]).splitlines()[1:]
    text, data, bss = (sum(int(row.split()[i]) for row in rows) for i in range(3))
    return {"flash_bytes": text + data, "ram_bytes": data + bss}


def digits(run: Path) -> tuple[IntegerModel, Tensor, Tensor]:
    """The model of a run in integers, with the test images and labels."""
    data: Any = create_data("digits", None, Augmentation())
    images, labels = data.splits["test"]
    return quantize(find_source(run).load().float().eval()), images.to(torch.uint8), labels


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--run", type=Path, help="folder of a run of lrfdyn train digits")
    parser.add_argument("--images", type=int, default=20, help="so many of the 360 test images")
    parser.add_argument("--boards", nargs="+", default=list(BOARDS), choices=list(BOARDS))
    parser.add_argument("--json", help="file for the records")
    arguments = parser.parse_args()
    missing = {name: BOARDS[name].missing() for name in arguments.boards}
    for name, tools in missing.items():
        if tools:
            print(f"{name}: skipped, there is no {' and no '.join(tools)}", flush=True)
    if all(missing.values()):
        return
    if arguments.run is None:
        subprocess.run([sys.executable, "-m", "lrfdyn", *TRAIN], check=True)
    model, images, labels = digits(arguments.run or RUN)
    top1 = 100 * (model(images).argmax(1) == labels).double().mean().item()
    print(f"{top1:.2f} % of all {len(images)} test images are right in integers", flush=True)
    chosen = images[: arguments.images]
    records, failed = [], False
    for name in (name for name in arguments.boards if not missing[name]):
        board = BOARDS[name]
        try:
            record = {"benchmark": "edge_boards", "model": "digits", "board": name, **measure(model, chosen, board)}
        except LrfdynError as error:
            print(f"{name}: failed: {error}", flush=True)
            failed = True
            continue
        tools = {tool: printed([tool, "--version"]).splitlines()[0] for tool in (board.compiler, board.emulator)}
        records.append({**record, "top1": top1, "machine_emulated": board.options.get("MACHINE"), "tools": tools})
        common.write(records, arguments.json)
    print(common.table(records, COLUMNS))
    sys.exit(failed or not all(record["bit_exact"] for record in records))


if __name__ == "__main__":
    main()
