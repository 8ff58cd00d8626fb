"""What a run writes of itself: log.jsonl (everything), log.csv (a row per epoch), TensorBoard where it is installed."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from lrfdyn.files import read_json_lines, write_atomic, write_table


class RunLog:
    """Records go to the file at once. What an interrupted run logged behind its checkpoint is dropped, because the
    resumed run says it again."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = True) -> None:
        self.path, self.table = folder / "log.jsonl", folder / "log.csv"
        records = [record for record in read_json_lines(self.path) if record["step"] <= step]
        self.epochs = [record for record in records if record["kind"] == "epoch"]
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, lambda file: file.write_text("".join(map(_line, records)), encoding="utf-8"))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        record = {"kind": kind, "step": step, **values}
        self._file.write(_line(record))
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "epoch":
            self.epochs.append(record)
            columns = list(dict.fromkeys(key for entry in self.epochs for key in entry if key != "kind"))
            write_table(self.table, [{key: entry.get(key) for key in columns} for entry in self.epochs])

    def sync(self) -> None:
        """What was written survives the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # every record was flushed; what a full disk refused, it refuses again
            self._file.close()
        if self._board is not None:
            self._board.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def discard_run(out: Path) -> None:
    """Removes what a run leaves in its folder, and nothing else. All of it: a summary that outlived its run would pass
    for that of the next one."""
    for folder in ("checkpoints", "tensorboard", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for name in ("recipe.yaml", "summary.json", "log.jsonl", "log.csv", "classes.csv"):
        (out / name).unlink(missing_ok=True)
