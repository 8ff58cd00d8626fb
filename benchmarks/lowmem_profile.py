"""Where the time of low-memory inference goes: by section of the network and by kernel.

    python benchmarks/lowmem_profile.py --batch 64 > results/performance/profile_lowmem.txt

Without a CUDA graph, so that kernels can be told by section; the gaps between launches are not in the sums.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn import create_model
from lrfdyn.deploy import compile_for_inference

SECTION = "section "


def measure(
    model: torch.nn.Module, images: torch.Tensor, calls: int
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Milliseconds of a call by section, and by kernel with its launches."""
    cuda = images.is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as recorded:
        for _ in range(calls):
            model(images)
        if cuda:
            torch.cuda.synchronize()
    sections: dict[str, float] = {}
    kernels: dict[str, tuple[float, float]] = {}
    for event in recorded.key_averages():
        on_device = "CUDA" in str(event.device_type)
        if event.key.startswith(SECTION) and not on_device:
            total = event.device_time_total if cuda else event.cpu_time_total
            sections[event.key.removeprefix(SECTION)] = total / calls / 1e3
        elif on_device == cuda and not event.key.startswith(SECTION):
            own = event.self_device_time_total if cuda else event.self_cpu_time_total
            kernels[event.key] = (own / calls / 1e3, event.count / calls)
    return sections, kernels


def grouped(sections: Mapping[str, float]) -> dict[str, float]:
    """Blocks of the same kind together."""
    sums: dict[str, float] = defaultdict(float)
    for name, ms in sections.items():
        sums[".".join("*" if part.isdigit() and "blocks" in name else part for part in name.split("."))] += ms
    return dict(sums)


def main(given: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="spikformer_8_512")
    parser.add_argument("--attention", nargs="+", default=["ssa", "lrf_dyn"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images-at-once", type=int)
    parser.add_argument("--tile-mib", type=float)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--kernels", type=int, default=25, help="how many to name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    images = torch.randn(arguments.batch, 3, *[arguments.image_size] * 2, device=arguments.device)
    for attention in arguments.attention:
        torch.manual_seed(0)
        model = create_model(arguments.model, attention=attention, image_size=arguments.image_size)
        compiled = compile_for_inference(
            model.to(arguments.device).eval(), images_at_once=arguments.images_at_once, tile_mib=arguments.tile_mib,
            graph=False,
        )  # fmt: skip
        compiled.span = lambda name: record_function(f"{SECTION}{name}")
        for _ in range(2):
            compiled(images)
        sections, kernels = measure(compiled, images, arguments.calls)
        print(f"\n{arguments.model} {attention}, batch {arguments.batch}, ms of a call")
        cuts = {planned.section.name: planned for planned in compiled.plan(images).sections}
        for name, ms in grouped(sections).items():
            cut = cuts.get(name)
            print(f"{ms:10.3f}  {name}" + (f", {cut.tiles} tiles of {cut.rows} rows" if cut else ""))
        print(f"{sum(sections.values()):10.3f}  all sections")
        for name, (ms, launches) in sorted(kernels.items(), key=lambda item: -item[1][0])[: arguments.kernels]:
            print(f"{ms:10.3f}  {launches:7.0f} x {name[:140]}")
        print(f"{sum(ms for ms, _ in kernels.values()):10.3f}  {sum(n for _, n in kernels.values()):7.0f} in all")


if __name__ == "__main__":
    main()
