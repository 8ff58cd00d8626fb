"""One run from a configuration to its summary: where it begins, what it leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lrfdyn.attention import attention_options
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import writable_folder, write_atomic, write_json, write_table
from lrfdyn.hub import save_pretrained
from lrfdyn.models import SpikingModel
from lrfdyn.training import state
from lrfdyn.training.build import data_model
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.processes import gather, restarts
from lrfdyn.training.recipes import dump_yaml
from lrfdyn.training.reporter import Reporter
from lrfdyn.training.trainer import Trainer


def run_training(
    config: TrainConfig,
    out: Path,
    *,
    recipe: str,
    command: str = "",
    resume: str = "no",
    restart: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Trains and returns the summary, written to `out` as summary.json beside log.jsonl, log.csv, the checkpoints and
    the model. `resume`: "no", "auto" (from the newest whole checkpoint, if there is one) or the path of one."""
    if restarts():
        resume, restart = "auto", False
    trainer = Trainer(config, out, reporter)
    if trainer.is_main:
        claim_folder(out, resume, restart)
        text = dump_yaml(config.as_dict())
        write_atomic(out / "recipe.yaml", lambda file: file.write_text(text, encoding="utf-8"))
    path = _choose(trainer, resume)
    if path is not None:
        trainer.resume(path)
        trainer.say(f"resuming at step {trainer.done} of {trainer.total_steps} from {path}")
    records = trainer.train()
    if trainer.processes > 1:
        dist.barrier()  # nobody leaves while another still needs it; see `leave_together`
    if not trainer.is_main:
        return {}
    require(trainer.last_checkpoint is not None, "schedule.epochs: nothing was trained")
    assert trainer.last_checkpoint is not None
    model = trained_model(trainer, trainer.last_checkpoint)
    description = f"Trained with `{command or recipe}`."
    save_pretrained(model, out / "model", description=description, pipeline_tag=trainer.task.pipeline)
    if "classes" in trainer.tested:
        write_table(out / "classes.csv", trainer.tested["classes"])
    summary = summarise(trainer, model, records[-1], recipe, command)
    write_json(out / "summary.json", summary)
    return summary


def claim_folder(out: Path, resume: str, restart: bool) -> None:
    """An earlier run in `out` is continued or discarded, and only if that was asked for."""
    checkpoints = out / "checkpoints"
    writable_folder(out, "out")
    for stale in checkpoints.glob(".*.tmp"):
        stale.unlink(missing_ok=True)  # of a process that was killed while it wrote
    if restart:
        # All of it: a summary that outlived its run would pass for that of the next one.
        for folder in ("checkpoints", "tensorboard", "model"):
            shutil.rmtree(out / folder, ignore_errors=True)
        for name in ("summary.json", "log.jsonl", "log.csv", "classes.csv"):
            (out / name).unlink(missing_ok=True)
    elif resume == "no" and (state.list_checkpoints(checkpoints) or (out / "summary.json").exists()):
        raise LrfdynError(
            f"out: {out} holds a run; --resume auto continues it, --restart discards it, --out takes another folder"
        )


def _choose(trainer: Trainer, resume: str) -> Path | None:
    """The checkpoint to go on from. The first process decides, so that all of them take the same."""
    path: str | None = None
    if trainer.is_main and resume == "auto":
        found = state.newest_checkpoint(trainer.out / "checkpoints", trainer.reporter.say)
        path = None if found is None else str(found[0])
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
    model.load_state_dict(state.model_weights(state.read_checkpoint(checkpoint)[0]))
    source = trainer.source
    names = getattr(source, "class_names", None)  # not every data set has them
    model.class_names = None if names is None else tuple(names)
    model.preprocessing = Preprocessing.of_data(source)
    return model


def attention_facts(model: SpikingModel) -> dict[str, Any]:
    """Kind and options of a model's attention; None where it has no such thing."""
    kind = model.config.get("attention")
    options = {} if kind is None else {**attention_options(kind), **(model.config.get("attention_options") or {})}
    dilations = options.get("dilations")
    return {
        "attention": kind,
        "token": options.get("token"),
        "dilations": None if dilations is None else list(dilations),
    }


def summarise(trainer: Trainer, model: SpikingModel, last: dict[str, Any], recipe: str, command: str) -> dict[str, Any]:
    config = trainer.config
    return {
        "recipe": recipe,
        "model": config.model.name,
        **attention_facts(model),
        "time_steps": model.time_steps,
        "data": config.data.name,
        "epochs": config.schedule.total_epochs,
        "seed": config.run.seed,
        **{key: last[key] for key in trainer.task.results},  # percent, of the last epoch and never of the best
        "parameters": trainer.parameters,
        "images_per_s": last["images_per_s"],
        "wall_s": last["wall_s"],
        "processes": trainer.processes,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else trainer.device.type,
        "precision": config.run.precision,
        "cuda_graph": not trainer.graph_obstacle,
        "ema": config.optimizer.ema_decay is not None,
        "fingerprint": config.fingerprint(),
        "command": command,
    }
