"""How long runs trained, and what came of it: a record of run folders that `lrfdyn train` filled.

    python benchmarks/time_to_accuracy.py results/cifar100/fast/lrf* --json results/cifar100/time_to_accuracy.json

Seconds are `train_s` of a summary: the time of all training steps, with the batches and the augmentation in them, on
the clock of the host and to the end of the work on the GPU. Not counted are the first step of every stage, and of every
start where a run went on, which compile kernels and capture the step, the tests after epochs, and checkpoints. The
seconds that a teacher was trained for, which `teacher_seconds` says, are in them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import read_json, write_json

KEYS = ("recipe", "seed", "top1", "epochs", "device")


def record(folder: Path) -> dict[str, Any]:
    """The line of one run, which had the device to itself and was tested on the test images."""
    summary = read_json(folder / "summary.json", "folders")
    teacher = summary.get("teacher")
    require(not summary.get("held_out"), f"folders: {folder} was tested on held-out training images")
    for trained, whose in ((summary, ""), *([(teacher, "the teacher of ")] if teacher else [])):
        require(not trained.get("beside"), f"folders: {whose}{folder} shared its device")
        require(trained.get("train_s") is not None, f"folders: {whose}{folder} does not say how long it trained")
    before = teacher["train_s"] if teacher else 0
    line = {key: summary[key] for key in KEYS} | {"seconds": round(summary["train_s"] + before, 3)}
    return {**line, "teacher_seconds": before} if teacher else line


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs that ended")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args(argv)
    try:
        records = sorted(map(record, options.folders), key=lambda line: (line["recipe"], line["seed"]))
    except LrfdynError as error:
        parser.error(str(error))
    for line in records:
        result = f"{line['top1']:.2f} % in {line['seconds']:,.1f} s"
        print(f"{line['recipe']}, seed {line['seed']}: {result} on {line['device']}")
    if options.json is not None:
        write_json(options.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
