"""The runs of the CIFAR-100 table (Spikformer-4-384, the paper's Table 3), each by `lrfdyn train` with its recipe.

    python benchmarks/cifar100.py --root DATA --epochs 100
    python docs/fill.py --figures

Runs live in --work, with checkpoints; started again, the script goes on where it stopped. What the results page reads
is copied to --out when a run ends. Two runs --together on one GPU use it better than one, most of all under NVIDIA's
multi-process service (`nvidia-cuda-mps-control -d`); the images/s of a run are then those of its share, and its summary
says beside what it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lrfdyn.files import write_json

KEPT = ("summary.json", "log.jsonl", "recipe.yaml")
RUNS = {
    "ssa": {"attention": "ssa"},
    "lrf_dyn": {"attention": "lrf_dyn"},
    "lrf_ssa": {"attention": "lrf_ssa"},
    "causal_ssa": {"attention": "causal_ssa"},
    "lrf_dyn_omega5": {"attention": "lrf_dyn", "dilations": "1,3,5"},
    "lrf_ssa_omega5": {"attention": "lrf_ssa", "dilations": "1,3,5"},
    "lrf_dyn_omega0": {"attention": "lrf_dyn", "dilations": "[]"},
    "lrf_dyn_qkv": {"attention": "lrf_dyn", "token": "qkv"},
}
REPOSITORY = Path(__file__).parents[1]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--root", required=True, help="folder that holds cifar-100-python")
    add("--runs", nargs="+", default=list(RUNS), help=f"of {', '.join(RUNS)}, or the name of an attention")
    add("--recipe", default="cifar100_spikformer")
    add("--epochs", type=int, default=100)
    add("--seed", type=int, default=0)
    add("--together", type=int, default=1, help="runs at a time")
    add("--beside", help="what else used the GPU, for the record; default: the other runs of --together")
    add("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="a key of all recipes")
    add("--work", type=Path, default=Path("runs/cifar100"))
    add("--out", type=Path, default=Path("results/cifar100"))
    return parser.parse_args(argv)


def beside(args: argparse.Namespace, run: str) -> str | None:
    """None where a run had the GPU for itself."""
    others = [other for other in args.runs if other != run] if args.together > 1 else []
    return args.beside or (f"{args.together - 1} of {', '.join(others)}" if others else None)


def train(args: argparse.Namespace, run: str) -> bool:
    name = f"{run}_{args.epochs}" + (f"_seed{args.seed}" if args.seed else "")
    folder = args.work / name
    given = ["--epochs", str(args.epochs), "--run.seed", str(args.seed)]
    for key, value in [*RUNS.get(run, {"attention": run}).items(), *args.set]:
        given += [f"--{key}", value]
    command = [sys.executable, "-m", "lrfdyn", "train", args.recipe, "--data.root", args.root, *given]
    command += ["--out", str(folder), "--resume", "auto"]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    with (args.work / f"{name}.txt").open("a") as console:
        status = subprocess.run(
            command, stdout=console, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}, check=False
        ).returncode
    if status:
        print(f"{name}: ended with status {status}, see {console.name}", flush=True)
        return False
    target = args.out / name
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        # Where the files lay is nobody's business but this machine's.
        text = (folder / file).read_text(encoding="utf-8").replace(args.root, "DATA")
        (target / file).write_text(text.replace(str(folder), f"results/{args.out.name}/{name}"), encoding="utf-8")
    summary = json.loads((target / "summary.json").read_text(encoding="utf-8"))
    write_json(target / "summary.json", {**summary, "beside": beside(args, run)})
    print(f"{name}: {target}, {time.perf_counter() - began:.0f} s", flush=True)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    with ThreadPoolExecutor(args.together) as pool:
        ended = list(pool.map(lambda run: train(args, run), args.runs))
    sys.exit(not all(ended))


if __name__ == "__main__":
    main()
