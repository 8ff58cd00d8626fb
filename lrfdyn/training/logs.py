"""Who hears of a run, and what it writes: log.jsonl (everything), log.csv (epochs), TensorBoard where installed."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrfdyn.files import finite, read_json_lines, write_atomic, write_table

if TYPE_CHECKING:
    from lrfdyn.training.trainer import Trainer


class Reporter:
    """Hears of a run; this one is silent."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def step(self, trainer: Trainer) -> None:
        """After every step."""

    def epoch(self, record: dict[str, Any]) -> None:
        """After every epoch, with its line of the log."""

    def say(self, message: str) -> None:
        """A line for the reader."""


class RunLog:
    """Records go to the file at once. What an interrupted run logged behind its checkpoint is dropped, because the
    resumed run says it again."""

    def __init__(self, folder: Path, step: int) -> None:
        path, self.table = folder / "log.jsonl", folder / "log.csv"
        records = [record for record in read_json_lines(path) if record["step"] <= step]
        self.epochs = [record for record in records if record["kind"] == "epoch"]
        text = "".join(json.dumps(finite(record)) + "\n" for record in records)
        write_atomic(path, lambda file: file.write_text(text, encoding="utf-8"))
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, **values: Any) -> None:
        record = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "total_steps":
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "epoch":
            self.epochs.append(record)
            columns = list(dict.fromkeys(key for entry in self.epochs for key in entry if key != "kind"))
            write_table(self.table, [{key: entry.get(key) for key in columns} for entry in self.epochs])

    def sync(self) -> None:
        """What was written survives the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # every record was flushed; what a full disk refused, it refuses again
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def discard_run(out: Path) -> None:
    """Removes what a run leaves in its folder, and nothing else. All of it: a summary that outlived its run would pass
    for that of the next one."""
    for folder in ("checkpoints", "tensorboard", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for name in ("recipe.yaml", "summary.json", "log.jsonl", "log.csv", "classes.csv"):
        (out / name).unlink(missing_ok=True)
