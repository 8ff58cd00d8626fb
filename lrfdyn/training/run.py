"""One run from a configuration to its summary: where it begins, what it leaves behind."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lrfdyn.devices import device_name
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import sole_user, write_atomic, write_json, write_table
from lrfdyn.io.weights import find_checkpoint, list_checkpoints, model_weights, read_checkpoint
from lrfdyn.models import SpikingModel
from lrfdyn.training.build import attention_facts, data_model
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.logs import discard_run
from lrfdyn.training.processes import gather, launch_name
from lrfdyn.training.recipes import dump_yaml
from lrfdyn.training.reporter import Reporter
from lrfdyn.training.stopping import Stop, Stopped
from lrfdyn.training.trainer import Trainer

CLAIMED: set[Path] = set()  # folders that this process has begun a run in


def run_training(
    config: TrainConfig,
    out: Path,
    *,
    recipe: str,
    command: str = "",
    resume: str = "no",
    restart: bool = False,
    reporter: Reporter | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Trains and returns the summary, written to `out` as summary.json beside log.jsonl, log.csv, the checkpoints and
    the model. `resume`: "no", "auto" (from the newest whole checkpoint, if there is one) or the path of one. A `stop`
    that comes into effect ends it with a checkpoint and raises `Stopped`."""
    trainer = Trainer(config, out, reporter, stop)
    with sole_user(out) if trainer.is_main else nullcontext():
        _begin(trainer, resume, restart)
        try:
            records = trainer.train()
        except Stopped:
            _wait_for_all(trainer)
            raise
        _wait_for_all(trainer)
        return _finish(trainer, records, recipe, command) if trainer.is_main else {}


def _wait_for_all(trainer: Trainer) -> None:
    if trainer.processes > 1:
        dist.barrier()  # nobody leaves while another still needs it; see `leave_together`


def _begin(trainer: Trainer, resume: str, restart: bool) -> None:
    """The folder is claimed and the checkpoint to go on from read."""
    if trainer.is_main:
        if began_here(trainer.out):
            resume, restart = "auto", False
        with trainer.writing():
            claim_folder(trainer.out, resume, restart)
    path = _choose(trainer, resume)
    if path is not None:
        trainer.resume(path)
        trainer.say(f"resuming at step {trainer.done} of {trainer.total_steps} from {path}")
    if trainer.is_main:
        # Not before the checkpoint is known to be of these settings: the file says what made the log beside it.
        text = dump_yaml(trainer.config.as_dict())
        with trainer.writing():
            write_atomic(trainer.out / "recipe.yaml", lambda file: file.write_text(text, encoding="utf-8"))


def _finish(trainer: Trainer, records: list[dict[str, Any]], recipe: str, command: str) -> dict[str, Any]:
    out, last = trainer.out, trainer.last_checkpoint
    assert last is not None
    require(
        bool(records) and set(trainer.task.results) <= set(records[-1]),
        f"resume: {last} is the end of its run, and the results of it are not in {out / 'log.jsonl'}; "
        f"lrfdyn evaluate {last} measures them",
    )
    model = trained_model(trainer, last)
    description = f"Trained with `{command or recipe}`."
    summary = summarise(trainer, model, records[-1], recipe, command)
    with trainer.writing():
        model.save_pretrained(out / "model", description=description, pipeline_tag=trainer.task.pipeline)
        if "classes" in trainer.tested:
            write_table(out / "classes.csv", trainer.tested["classes"])
        write_json(out / "summary.json", summary)
    return summary


def began_here(out: Path) -> bool:
    """Whether torchrun has begun again what an earlier try of the same launch began in this folder. A try that failed
    before that leaves the question of an older run in the folder as it was."""
    launch = out / "checkpoints" / "launch"
    earlier = launch.read_text(encoding="utf-8") if launch.is_file() and out.resolve() not in CLAIMED else ""
    return bool(earlier) and earlier == launch_name()


def claim_folder(out: Path, resume: str, restart: bool) -> None:
    """An earlier run in `out` is continued or discarded, and only if that was asked for."""
    checkpoints = out / "checkpoints"
    for stale in (*checkpoints.glob(".*.tmp"), *checkpoints.glob(".tmp*")):  # ours, and those of safetensors
        stale.unlink(missing_ok=True)  # of a process that was killed while it wrote
    if restart:
        require(
            bool(launch_name()) or "TORCHELASTIC_RUN_ID" not in os.environ,
            "restart: torchrun does not share its store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), so a process that died "
            f"and came back would discard the run again; delete {out} instead",
        )
        discard_run(out)
    elif resume == "no" and (list_checkpoints(checkpoints) or (out / "summary.json").exists()):
        raise LrfdynError(
            f"out: {out} holds a run; --resume auto continues it, --restart discards it, --out takes another folder"
        )
    elif resume == "auto" and (out / "summary.json").exists() and not list_checkpoints(checkpoints):
        raise LrfdynError(
            f"out: {out} holds a run that ended, and not its checkpoints; --restart discards it, "
            "--out takes another folder"
        )
    CLAIMED.add(out.resolve())
    launch = launch_name()
    if launch:
        write_atomic(checkpoints / "launch", lambda file: file.write_text(launch, encoding="utf-8"))


def _choose(trainer: Trainer, resume: str) -> Path | None:
    """The checkpoint to go on from. The first process decides, so that all of them take the same."""
    path: str | None = None
    if trainer.is_main and resume == "auto":
        found = find_checkpoint(trainer.out / "checkpoints", trainer.reporter.say)
        path = None if found is None else str(found)
    elif resume not in ("auto", "no"):
        path = resume
    path = gather(path, trainer.processes)[0]
    if path is None:
        return None
    require(
        Path(path).is_file(),
        f"resume: no such file: {path}" + (" here; several machines need one shared folder" if trainer.rank else ""),
    )
    return Path(path)


def trained_model(trainer: Trainer, checkpoint: Path) -> SpikingModel:
    """The model that was evaluated, read back from the disk."""
    model = data_model(trainer.config, trainer.source).to(trainer.dtype)
    model.load_state_dict(model_weights(read_checkpoint(checkpoint)[0]))
    return model


def summarise(trainer: Trainer, model: SpikingModel, last: dict[str, Any], recipe: str, command: str) -> dict[str, Any]:
    config = trainer.config
    return {
        "recipe": recipe,
        "model": config.model.name,
        **attention_facts(model),
        "time_steps": model.time_steps,
        "data": config.data.name,
        "num_classes": trainer.source.num_classes,
        "epochs": config.schedule.total_epochs,
        "seed": config.run.seed,
        **{key: last[key] for key in trainer.task.results},  # percent, of the last epoch and never of the best
        "parameters": trainer.parameters,
        "images_per_s": last["images_per_s"],
        "wall_s": last["wall_s"],
        "processes": trainer.processes,
        "device": device_name(trainer.device),
        "precision": config.run.precision,
        "cuda_graph": not trainer.graph_obstacle,
        "ema": config.optimizer.ema_decay is not None,
        "fingerprint": config.fingerprint(),
        "command": command,
    }
