"""One run from a configuration to its summary: where it begins, what it leaves behind; and a test of any weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.devices import device_name
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import sole_user, write_atomic, write_json, write_table
from lrfdyn.io.weights import check_fit, check_usable, find_checkpoint, list_checkpoints, model_weights, read_checkpoint
from lrfdyn.models import SpikingModel
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.logs import Reporter, discard_run
from lrfdyn.training.processes import Stop, Stopped, build_accelerator, gather, launch_name
from lrfdyn.training.recipes import dump_yaml
from lrfdyn.training.tasks import (
    TestRun,
    attention_facts,
    build_data,
    data_model,
    describe_results,
    held_out,
    task_of,
    teacher_facts,
)
from lrfdyn.training.trainer import Trainer

CLAIMED: set[Path] = set()  # folders that this process has begun a run in


@checked
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
        records, stopped = [], None
        try:
            records = trainer.train()
        except Stopped as reason:
            stopped = reason
        if trainer.processes > 1:
            dist.barrier()  # nobody leaves while another still needs it; see `leave_together`
        if stopped is not None:
            raise stopped
        return _finish(trainer, records, recipe, command) if trainer.is_main else {}


def _begin(trainer: Trainer, resume: str, restart: bool) -> None:
    """The folder is claimed and the checkpoint to go on from read."""
    path: str | None = None if resume in ("auto", "no") else resume
    if trainer.is_main:
        with trainer.writing():
            resume = claim_folder(trainer.out, resume, restart)
        if resume == "auto":
            found = find_checkpoint(trainer.out / "checkpoints", trainer.reporter.say)
            path = None if found is None else str(found)
    # The first process decides, so that all of them take the same.
    path = gather(path, trainer.processes)[0]
    if path is not None:
        elsewhere = " here; several machines need one shared folder" if trainer.rank else ""
        require(Path(path).is_file(), f"resume: no such file: {path}{elsewhere}")
        trainer.resume(Path(path))
        trainer.say(f"resuming at step {trainer.done} of {trainer.total_steps} from {path}")
    if trainer.is_main:
        # Not before the checkpoint is known to be of these settings: the file says what made the log beside it.
        text = dump_yaml(trainer.config.as_dict())
        with trainer.writing():
            write_atomic(trainer.out / "recipe.yaml", lambda file: file.write_text(text, encoding="utf-8"))


def claim_folder(out: Path, resume: str, restart: bool) -> str:
    """An earlier run in `out` is continued or discarded, and only if that was asked for. Returns `resume`, or "auto"
    where torchrun has begun again what an earlier try of the same launch began here."""
    checkpoints, launch = out / "checkpoints", launch_name()
    mark = checkpoints / "launch"
    if out.resolve() not in CLAIMED and mark.is_file() and mark.read_text(encoding="utf-8") == launch:
        resume, restart = "auto", False
    stored, ended = bool(list_checkpoints(checkpoints)), (out / "summary.json").exists()
    ways = "--restart discards it, --out takes another folder"
    if restart:
        require(
            bool(launch) or "TORCHELASTIC_RUN_ID" not in os.environ,
            "restart: torchrun does not share its store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), so a process that died "
            f"and came back would discard the run again; delete {out} instead",
        )
        discard_run(out)
    elif resume == "no":
        require(not stored and not ended, f"out: {out} holds a run; --resume auto continues it, {ways}")
    elif resume == "auto":
        require(stored or not ended, f"out: {out} holds a run that ended, and not its checkpoints; {ways}")
    CLAIMED.add(out.resolve())
    if launch:
        write_atomic(mark, lambda file: file.write_text(launch, encoding="utf-8"))
    return resume


def _finish(trainer: Trainer, records: list[dict[str, Any]], recipe: str, command: str) -> dict[str, Any]:
    """Writes the model that was evaluated, read back from the disk, the classes and the summary."""
    config, out, checkpoint = trainer.config, trainer.out, trainer.last_checkpoint
    assert checkpoint is not None
    require(
        bool(records) and set(trainer.task.results) <= set(records[-1]),
        f"resume: {checkpoint} is the end of its run, and the results of it are not in {out / 'log.jsonl'}; "
        f"lrfdyn evaluate {checkpoint} measures them",
    )
    model, last = data_model(config, trainer.source).to(trainer.dtype), records[-1]
    model.load_state_dict(model_weights(read_checkpoint(checkpoint)[0]))
    summary = {
        "recipe": recipe,
        "model": config.model.name,
        **model.size,
        **attention_facts(model),
        "time_steps": model.time_steps,
        "data": config.data.name,
        "num_classes": trainer.source.num_classes,
        **held_out(config),
        "epochs": config.schedule.total_epochs,
        "seed": config.run.seed,
        **{key: last[key] for key in trainer.task.results},  # percent, of the last epoch and never of the best
        "parameters": trainer.parameters,
        "images_per_s": last["images_per_s"],
        "train_s": last.get("train_s"),
        "wall_s": last["wall_s"],
        "processes": trainer.processes,
        "device": device_name(trainer.device),
        "precision": config.run.precision,
        "cuda_graph": not trainer.graph_obstacle,
        "ema": config.optimizer.ema_decay is not None,
        **teacher_facts(config.distill),
        "fingerprint": config.fingerprint(),
        "command": command,
    }
    shown = describe_results(summary, trainer.source.num_classes)
    images = "held-out training images" if held_out(config) else "test images"
    tested = f"{shown} on the {trainer.source.test_images:,} {images} of {config.data.name}"
    how = f"{summary['epochs']:g} epochs, seed {config.run.seed}"
    description = f"Trained with `{command or recipe}`.\n\nAfter training ({how}): {tested}."
    with trainer.writing():
        model.save_pretrained(out / "model", description=description, pipeline_tag=trainer.task.pipeline)
        if "classes" in trainer.tested:
            write_table(out / "classes.csv", trainer.tested["classes"])
        write_json(out / "summary.json", summary)
    return summary


def prepare_test(
    config: TrainConfig, weights: Mapping[str, Tensor], name: Path, progress: Callable[[int, int], None]
) -> tuple[SpikingModel, TestRun, dict[str, Any]]:
    """The model of a configuration with these weights, its test images, and what a record of the test begins with.
    `progress` is called behind every batch with the number of its images, over all processes, and with that of all
    images."""
    accelerator, source = build_accelerator(config.run), build_data(config)
    model = data_model(config, source)
    check_usable(name, weights)
    try:
        check_fit(name, model, weights)
    except LrfdynError as error:  # the shape of a head tells not everybody that the data is another
        raise LrfdynError(f"{error} (the model is for the {source.num_classes} classes of the data)") from None
    model.load_state_dict(dict(weights))
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    model.to(accelerator.device, dtype)
    factor, total = accelerator.num_processes, source.test_images
    run = TestRun(source, config.run.test_batch_size, accelerator, dtype, lambda n: progress(n * factor, total))
    facts = {"device": device_name(accelerator.device), "precision": config.run.precision}
    return model, run, {"num_classes": source.num_classes, **facts, **held_out(config)}


def evaluate_weights(
    config: TrainConfig, weights: Mapping[str, Tensor], name: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """The accuracy of weights in the model and on the data of a configuration; arguments as those of `prepare_test`."""
    model, run, facts = prepare_test(config, weights, name, progress)
    tested = task_of(config.data.name).test(model, run)
    loss = tested.get("test_loss", 0.0)
    require(math.isfinite(loss), f"weights: {name} is of no use: the loss on the test images is {loss}")
    return {**facts, **tested}
