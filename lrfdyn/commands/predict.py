"""Say what is in images, or in recordings of an event camera: class names and scores, from a model or an exported file.

FILE is a file, a folder or a pattern: of recordings where the model was trained on these, else of images. Files that
cannot be read are named, the others go on; the exit code is then 1. A recording is followed step by step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.recording import write_recording_page
from lrfdyn.commands.shared import bar, command_line, print_json
from lrfdyn.data import data_class
from lrfdyn.data.recordings import READERS, read_events
from lrfdyn.deploy.follow import Step
from lrfdyn.deploy.predict import PICTURES, Predictor, expand_files
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import expanded, writable_folder, write_json
from lrfdyn.io.zoo import general_model
from lrfdyn.segmentation.predict import predict_segmentation

Found = tuple[str, list[Path], Iterator[dict[str, Any]]]  # what the files are, these, and the record of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="files, folders and patterns such as 'photos/*.jpg'")
    add(
        "--model",
        help="folder of a model or of C, .safetensors, .onnx, .pte or .nir file, zoo's name or hub repository; without "
        "it the zoo's model that knows the most classes",
    )
    add("--runtime", metavar="torch|onnx|executorch|nir|native", help="default: by the ending of --model")
    add("--top", type=int, default=5, help="how many classes to name")
    add("--batch", type=int, default=16, help="images at once")
    add("--exit", type=float, metavar="0..1", help="torch: stop at the time step at which this confidence is passed")
    add("--threads", type=int, default=0, help="onnx: 0 takes all that there are; native: 0 takes one")
    add("--steps", action="store_true", help="recordings, torch: print every time step, as of a single recording")
    add("--page", type=Path, metavar="FILE", help="one recording, torch: write a page of its events, scores and firing")
    add("--device", help="of PyTorch; default: the GPU where there is one")
    add("--json", metavar="FILE|-", help="write JSON to a file, or to the output instead of text")
    add("--task", default="classification", metavar="classification|segmentation", help="what the model does")
    add("--out", type=Path, metavar="FOLDER", help="segmentation: where the maps go")
    add("--flip", action="store_true", help="segmentation: average with the mirrored image")
    add("--window", type=int, metavar="PIXELS", help="segmentation: side of a sliding window")


def run(args: argparse.Namespace) -> int:
    if args.task not in TASKS:
        raise unknown_name("task", args.task, TASKS)
    for name, given in (("json", args.json), ("page", args.page)):
        if given not in (None, "-"):  # told before the work is done
            require(not Path(given).is_dir(), f"{name}: expected a file, got the folder {given}")
            writable_folder(Path(given).parent, name)
    for file in args.files:
        expanded(file, "files")  # told before a model is opened
    if args.model is None:
        args.model = default_model(args)
    kind, paths, found = TASKS[args.task](args)
    records, bad = [], 0
    with bar(len(paths) > 1) as shown:
        for record in shown.track(found, total=len(paths), description=f"{kind}s"):
            records.append(record)
            if "error" in record:
                bad += 1
                print(f"lrfdyn predict: cannot read {record[kind]} ({record['error']})", file=sys.stderr)
            elif args.json != "-":
                print(f"{record[kind]}: {record.get('overlay') or named(record)}{taken(args, record)}")
                if "page" in record:
                    print(f"page: {record['page']}")
    result = {"model": args.model, "task": args.task, "unreadable": bad, f"{kind}s": records}
    if args.json == "-":
        print_json(result)
    elif args.json:
        try:
            write_json(Path(args.json), result)
        except OSError as error:
            raise LrfdynError(f"json: cannot write {args.json} ({error.strerror})") from None
    if bad:
        print(f"lrfdyn predict: {bad} of {len(records)} {kind}s could not be read", file=sys.stderr)
    return 1 if bad else 0


def default_model(args: argparse.Namespace) -> str:
    """That of the zoo which knows the most classes, said on the error stream."""
    require(args.task == "classification", f"model: --task {args.task} needs one")
    require(args.runtime in (None, "torch"), f"model: --runtime {args.runtime} needs one")
    entry = general_model(recordings=all(Path(file).suffix.lower() in READERS for file in args.files))
    known = f"{data_class(entry.data).num_classes} classes of {entry.data}, {entry.bf16:.1f} % of its test set right"
    print(f"lrfdyn predict: no --model, so the zoo's {entry.name} is taken: {known}", file=sys.stderr)
    return entry.name


def named(record: dict[str, Any]) -> str:
    """The classes of a record or of one of its steps."""
    return ", ".join(f"{p['name']} {p['score']:.1%}" for p in record["predictions"])


def taken(args: argparse.Namespace, record: dict[str, Any]) -> str:
    """How many time steps it took, where it could have been fewer than all."""
    steps = record.get("steps")
    return "" if args.exit is None else f" (time step {len(steps) if isinstance(steps, list) else steps})"


def classify(args: argparse.Namespace) -> Found:
    for option in ("out", "flip", "window"):
        require(not getattr(args, option), f"{option}: only with --task segmentation")
    predictor = Predictor.open(args.model, args.runtime, args.device, args.threads, args.exit)
    one = "takes images" if predictor.framing is None else "gives the logits of all steps at once"
    for option in ("steps", "page"):
        asked = bool(getattr(args, option))
        require(predictor.follows or not asked, f"{option}: only for recordings in torch; {args.model} {one}")
    if predictor.facts.get("preprocessing_assumed") and predictor.preprocessing is not None:
        assumed = predictor.preprocessing.as_dict()
        print(
            f"lrfdyn predict: the model does not say how images are preprocessed; taken is {assumed}", file=sys.stderr
        )
    paths = expand_files(args.files, PICTURES if predictor.framing is None else tuple(READERS), f"{predictor.kind}s")
    shown = args.json != "-" and (args.steps or len(paths) == 1)
    watch = partial(print_step, predictor) if shown else None
    found = predictor.predict(paths, args.top, args.batch, watch)
    if args.page is not None:
        require(len(paths) == 1, f"page: expected one recording, got {len(paths)}")
        found = with_page(args, predictor, found)
    return predictor.kind, paths, found


def with_page(
    args: argparse.Namespace, predictor: Predictor, found: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Passes the record of one recording on, and writes its page where it could be read."""
    runner: Any = predictor.run
    for record in found:
        if "error" not in record:
            path, how = Path(record["recording"]), {"exit": args.exit, "command": command_line()}
            write_recording_page(args.page, runner.model, read_events(path), name=path.name, **how)
            record["page"] = str(args.page)
        yield record


def print_step(predictor: Predictor, step: Step) -> None:
    """A line with the two best classes, which a reader of a pipe gets at once."""
    assert predictor.framing is not None
    best = named({"predictions": predictor.best(step.logits.cpu().numpy(), 2)})
    print(f"step {step.number} of {predictor.framing.steps}, {step.time_ms:7.1f} ms: {best}", flush=True)


def segment(args: argparse.Namespace) -> Found:
    require(args.out is not None, "out: --task segmentation needs the folder that the maps go to")
    require(args.runtime in (None, "torch"), f"runtime: segmentation runs in torch, got {args.runtime!r}")
    require(args.exit is None, "exit: only with --task classification")
    for option in ("threads", "steps", "page"):
        require(not getattr(args, option), f"{option}: only with --task classification")
    paths, how = expand_files(args.files, PICTURES, "images"), {"flip": args.flip, "window": args.window}
    return "image", paths, predict_segmentation(args.model, paths, args.out, device=args.device, **how)


TASKS = {"classification": classify, "segmentation": segment}
