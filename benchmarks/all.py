"""Every table of docs/performance.md, and the other records of a GPU in results/performance, measured in one go.

    python benchmarks/all.py               # that is `make bench`; needs a GPU and SpikingJelly
    python benchmarks/all.py --dry-run     # prints the commands
    python benchmarks/all.py --only kernels inference_cifar

All records are of one revision, the last commit that changed lrfdyn/ or benchmarks/; a tree with other changes there is
refused. A step writes into build/bench, and its file replaces the one in results/performance when the step has ended
well. So a run that was interrupted goes on where it was: a step whose records are of this revision and GPU is not run
again. In the end the pages are filled. The table of a CPU in docs/performance.md is not measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common

OUT = Path("results/performance")
PARTIAL = Path("build/bench")
BEFORE = "f212e5b14f304b519e49a49deb3474d3498f95f0"  # the last commit of version 0.1
CHECKOUT = PARTIAL / "before"
CIFAR = "benchmarks/train_step.py --models spikformer_4_384"
PEERS = "spikingjelly spikingjelly-compiled"
STEPS = {
    # file in results/performance: what makes it
    "train_step_cifar_ours": f"{CIFAR} --implementations lrfdyn",
    "train_step_cifar": f"{CIFAR} --attentions ssa lrf_ssa --implementations lrfdyn spikingjelly-compiled",
    "train_step_cifar_peers": f"{CIFAR} --implementations lrfdyn {PEERS}",
    "train_step_cifar_reference": f"{CIFAR} --implementations lrfdyn reference reference-compiled {PEERS}",
    "train_step_224": "benchmarks/train_step.py --models spikformer_8_512 qkformer_10_512 sdt_v3_s "
    "--implementations lrfdyn spikingjelly",
    "train_step_224_ours": "benchmarks/train_step.py --models qkformer_10_512 sdt_v3_s spikformer_8_512 "
    "--implementations lrfdyn",
    "train_step_imagenet": "benchmarks/train_step.py --models spikformer_8_768 qkformer_10_384 sdt_v3_l "
    "--implementations lrfdyn",
    "train_step_compiled": f"{CIFAR} --attentions ssa lrf_dyn --implementations lrfdyn lrfdyn-compiled "
    "lrfdyn-compiled-graphs",
    "inference_cifar": f"benchmarks/inference.py --models spikformer_4_384 --implementations lrfdyn reference {PEERS}",
    "kernels": "benchmarks/kernels.py --implementations kernel reference reference-compiled",
    "tricks": "benchmarks/tricks.py",
    "tokens_h200": "benchmarks/tokens.py",
    "before_after": f"benchmarks/before_after.py --before {CHECKOUT} --rounds 3",
    "memory_h200": "benchmarks/memory.py",
    "memory_h200_32": "benchmarks/memory.py --batches 64 --images-at-once 32 "
    "--only spikingjelly:ssa eager:ssa low-memory:ssa low-memory:lrf_dyn",
    "augment": "benchmarks/augment.py",
}
FILL = ["python", "docs/fill.py"]


def commands(name: str) -> Iterator[list[str]]:
    """What a step runs, in the root of the repository."""
    if name == "before_after" and not CHECKOUT.exists():
        yield ["git", "worktree", "add", "--force", "--detach", str(CHECKOUT), BEFORE]
    yield ["python", *shlex.split(STEPS[name]), "--json", str(PARTIAL / f"{name}.json")]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, or the one that it is."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return found if isinstance(found, list) else [found]


def current(records: Sequence[dict[str, Any]], revision: str | None, gpu: str | None) -> bool:
    """Whether there are records, and all are of this revision and GPU."""
    told = [(record.get("revision"), record["machine"]["gpu"]) for record in records]
    return revision is not None and bool(told) and set(told) == {(revision, gpu)}


def missing(name: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """The implementations that a step was asked for and has no record of: a peer must not drop out of a table."""
    _, _, named = STEPS[name].partition("--implementations ")
    asked = {"spikingjelly"} if name.startswith("memory") else set(named.split())
    return sorted(asked - {record.get("implementation") for record in records})


def measure(name: str, revision: str, gpu: str) -> str | None:
    """Runs a step; what went wrong, if anything."""
    made = PARTIAL / f"{name}.json"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    for words in commands(name):
        print("$", shlex.join(words), flush=True)
        run = [sys.executable, *words[1:]] if words[0] == "python" else words
        code = subprocess.run(run, env={**os.environ, "LRFDYN_REVISION": revision}, check=False).returncode
        if code:
            return f"{' '.join(words[:2])} ended with {code}"
    records = read(made)
    if not current(records, revision, gpu):
        return "has no records of this revision and GPU"
    if lacking := missing(name, records):
        return f"has no record of {', '.join(lacking)}"
    made.replace(OUT / made.name)
    return None


def by_hand(names: Sequence[str]) -> list[str]:
    """The pages that name one of these files in text that is not filled."""
    from docs import fill

    pages = {page.name: fill.MARKED.sub("", page.read_text(encoding="utf-8")) for page in fill.pages()}
    return [page for page, text in pages.items() if any(f"{name}.json" in text for name in names)]


def refusal(revision: str | None) -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if importlib.util.find_spec("spikingjelly") is None:
        return "needs SpikingJelly to compare with: pip install --no-deps spikingjelly loguru"
    if revision is None:
        return "there is no git revision here; --revision names it"
    if revision.endswith(common.CHANGED):
        return f"{' or '.join(f'{name}/' for name in common.MEASURED)} has changes that are not committed"
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), metavar="NAME", help="of the steps, these")
    parser.add_argument("--revision", help="of this tree, where it has no git metadata")
    options = parser.parse_args(argv)
    os.chdir(common.ROOT)
    revision = options.revision or common.revision()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    names = [name for name in STEPS if name in (options.only or STEPS)]
    old = [name for name in names if not current(read(OUT / f"{name}.json"), revision, gpu)]
    if options.dry_run:
        lines = [shlex.join(words) for name in names for words in commands(name)] + [shlex.join(FILL)]
        print("\n".join(lines), f"# {len(names) - len(old)} of {len(names)} steps have records of {revision}", sep="\n")
        return
    if reason := refusal(revision):
        sys.exit(f"all.py: {reason}")
    assert revision is not None
    assert gpu is not None
    failed, started = [], time.perf_counter()
    for name in names:
        if name not in old:
            print(f"{name}: is of this revision already")
            continue
        if not options.revision and common.revision() != revision:
            sys.exit(f"all.py: the code is not of revision {revision} any more; what was measured stays")
        start = time.perf_counter()
        problem = measure(name, revision, gpu)
        failed += [name] if problem else []
        print(f"{name}: {problem or 'done'}, {time.perf_counter() - start:,.0f} s", flush=True)
    subprocess.run([sys.executable, *FILL[1:]], check=True)
    print(f"{time.perf_counter() - started:,.0f} s in all, revision {revision}")
    if pages := by_hand([name for name in old if name not in failed]):
        print(f"read again, text by hand names a file that changed: {', '.join(pages)}")
    if failed:
        sys.exit(f"all.py: not measured: {', '.join(failed)}; run it again")


if __name__ == "__main__":
    main()
