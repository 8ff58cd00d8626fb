"""Speed of two versions of the package in one run: training steps and inference of one model, in turn.

Each version is a checkout. A process of its own measures it, with the checkout first on the path, in the order before,
after, before, after, ...; so both meet the same machine. The numbers are images per second, the median over the rounds.

    python benchmarks/before_after.py --before OTHER_CHECKOUT --json results/performance/before_after.json

On a GPU a step is captured as a CUDA graph and computed in bfloat16, as `lrfdyn train` does; on a CPU it is float32 and
the batch is small, and PyTorch's operations are counted too, since times are less steady there. Where a checkout has
no git metadata, --before-commit and --after-commit name the versions.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
if "--worker" not in sys.argv:  # which finds lrfdyn in its checkout
    sys.path.append(str(Path(__file__).parents[1]))

import common

SIDES = ("before", "after")


def training_step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], Any]:
    """A step of forward, backward and AdamW, as this version of the package does it."""
    from lrfdyn.training.step import TrainStep, capturable_adamw

    amp = torch.bfloat16 if images.is_cuda else None
    step = TrainStep(model.train(), capturable_adamw(model, 1e-3), F.cross_entropy, amp=amp, graph=images.is_cuda)
    kinds = [parameter.kind for parameter in inspect.signature(step.__call__).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # from 0.2 on: any number of (images, targets)
        return lambda: step((images, labels))
    return lambda: step(images, labels)  # type: ignore[call-arg,arg-type]


def inference_call(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], Any]:
    """A forward pass with folded norms, captured on a GPU."""
    try:
        from lrfdyn.convert.fold import fold_batch_norm
    except ImportError:  # before 0.2
        from lrfdyn.models.fold import fold_batch_norm  # type: ignore[import-not-found,no-redef]
    folded = fold_batch_norm(model.eval())  # type: ignore[arg-type]
    if not images.is_cuda:
        return lambda: folded(images)
    return common.captured(lambda: folded(images))


def operations(call: Callable[[], Any]) -> int:
    """How many of PyTorch's operations a call is made of."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """What the worker measures of the version that its path leads to: images per second by name."""
    import lrfdyn

    found = Path(lrfdyn.__file__).resolve()
    assert found.is_relative_to(Path(options.worker).resolve()), f"lrfdyn comes from {found}"
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speeds, counts = {}, {}
    for attention in options.attentions:
        torch.manual_seed(0)
        model = lrfdyn.create_model(options.model, attention=attention).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        size = options.image_size
        images = torch.randn(options.batch, 3, size, size, device=device)
        labels = torch.randint(model.num_classes, (options.batch,), device=device)
        step = training_step(model, images, labels)
        speeds[f"training {attention}"] = 1e3 * options.batch / common.elapsed(step, options.repeats)
        counts[f"training {attention}"] = None if device == "cuda" else operations(step)
        half = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if device == "cuda" else nullcontext()
        with torch.inference_mode(), half:
            call = inference_call(model, images)
            speeds[f"inference {attention}"] = 1e3 * options.batch / common.elapsed(call, options.repeats)
            counts[f"inference {attention}"] = None if device == "cuda" else operations(call)
    return {"speeds": speeds, "operations": counts, "version": lrfdyn.__version__}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One round of one version, in a process of its own."""
    command = [sys.executable, __file__, "--worker", str(folder), "--model", options.model, "--attentions"]
    command += [*options.attentions, "--batch", str(options.batch), "--repeats", str(options.repeats)]
    command += ["--image-size", str(options.image_size)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{folder}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def commit_of(folder: Path, given: str | None) -> str | None:
    if given:
        return given
    if not (folder / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--before", type=Path, help="folder of the other checkout")
    add("--after", type=Path, default=Path(__file__).parents[1], help="default: this one")
    add("--before-commit", help="its name, where the folder has no git metadata")
    add("--after-commit")
    add("--model", default="spikformer_4_384")
    add("--image-size", type=int, default=32)
    add("--attentions", nargs="+", default=["ssa", "lrf_ssa", "lrf_dyn"])
    add("--batch", type=int, default=256 if gpu else 4)
    add("--repeats", type=int, default=50 if gpu else 3)
    add("--rounds", type=int, default=3)
    add("--json", type=Path)
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.before is None and options.worker is None:
        parser.error("--before: expected the folder of the other checkout")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    if options.worker:
        result = work(options)
        print(json.dumps(result))
        return result
    folders = {"before": options.before.resolve(), "after": options.after.resolve()}
    commits = {side: commit_of(folders[side], getattr(options, f"{side}_commit")) for side in SIDES}
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            rounds[side].append(measure(folders[side], options))
            print(f"round {number + 1}, {side}: {rounds[side][-1]['speeds']}", flush=True)
    records = []
    for name in rounds["before"][0]["speeds"]:
        values = {side: [one["speeds"][name] for one in rounds[side]] for side in SIDES}
        what, attention = name.split()
        sides: dict[str, Any] = {side: {"median": median(values[side]), "values": values[side]} for side in SIDES}
        for side in SIDES:
            if count := rounds[side][0]["operations"][name]:
                sides[side]["operations"] = count
        ratio = sides["after"]["median"] / sides["before"]["median"]
        records.append({"what": what, "attention": attention, "batch": options.batch, **sides, "ratio": ratio})
        print(f"{name}: {sides['before']['median']:,.1f} before, {sides['after']['median']:,.1f} after, {ratio:.3f}")
    words = sys.argv[1:] if argv is None else list(argv)
    shown = ["CHECKOUT" if word == str(options.before) else word for word in words]
    versions = {side: {"commit": commits[side], "version": rounds[side][0]["version"]} for side in SIDES}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = {
        "benchmark": "before_after", "command": shlex.join(["python", "benchmarks/before_after.py", *shown]),
        "model": options.model, "image_size": options.image_size, "rounds": options.rounds,
        "repeats": options.repeats, "dtype": "bfloat16" if gpu else "float32",
        "machine": {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "revision": common.revision(), **versions, "records": records,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
