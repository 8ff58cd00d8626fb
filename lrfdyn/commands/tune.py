"""Measure block sizes of the kernels on this GPU, for the layers of a network, and keep them for later runs.

A training step and a pass of inference of the network run, and every kind of launch that is met for the first time is
measured with several sizes on copies of its arguments. Sizes that change a bit of a result are never taken, so a run
gives the same numbers before and after. What was fastest is kept in a file of this GPU, in the folder LRFDYN_TUNING
(usually `tuning` in the cache); LRFDYN_TUNING=0 turns it off. Nothing else measures, no training and no other command.
"""

from __future__ import annotations

import argparse
import copy

import torch

from lrfdyn.attention import ATTENTIONS, attention_label
from lrfdyn.commands.shared import make_table, plain_console, print_json
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.convert.swap import swap_attention
from lrfdyn.devices import choose_device, device_name
from lrfdyn.errors import require, require_integer
from lrfdyn.files import writable_folder
from lrfdyn.models.base import SpikingModel
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.machine import machine_of
from lrfdyn.sources import find_source

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or of a saved model, .safetensors file, zoo's name, NAME[:ATTENTION]")
    add("--attention", nargs="+", metavar="KIND", help=f"of {', '.join(ATTENTIONS)}; default: the model's own")
    add("--batch", type=int, default=64, help="images at once: sizes belong to the shapes that were measured")
    add("--time-steps", type=int, help="instead of the model's own (with a name)")
    add("--image-size", type=int, help="instead of the model's own (with a name)")
    add("--precision", choices=PRECISIONS, default="bf16", help="of training and inference")
    add("--again", action="store_true", help="also what was measured before")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    require_integer("batch", args.batch, 1)
    device = choose_device(None)
    source = find_source(args.model, time_steps=args.time_steps, image_size=args.image_size)
    ready = use_triton(torch.zeros(1, device=device))
    got = f"{device} and {torch.__version__}"
    require(ready, f"device: the kernels need a GPU, Triton, and PyTorch 2.9 or newer, got {got}")
    from lrfdyn.ops.tuning import measured
    from lrfdyn.ops.tuning_file import folder, path_of

    if (place := folder()) is not None:  # before minutes are spent on what cannot be kept
        writable_folder(place, "LRFDYN_TUNING")
    model = source.load().float()
    own: str = model.config.get("attention", "")
    kinds = [ATTENTIONS.name_of(kind) for kind in args.attention or ()] or [own]
    with measured(again=args.again) as found:
        for kind in kinds:
            network = copy.deepcopy(model)  # what is swapped has lost the options of the model's own attention
            if kind != own:
                swap_attention(network, kind)
            launch_all(network.to(device), args.batch, PRECISIONS[args.precision])
    records = [{"machine": machine.name, **record._asdict()} for machine in found for record in found[machine].values()]
    if args.json:
        print_json(records)
        return
    table = make_table("kernel", "sizes", ">us", ">first, us", ">tried", title=f"Measured on {device_name(device)}")
    for r in records:
        sizes = " ".join(f"{name}={value}" for name, value in r["options"].items())
        table.add_row(r["key"].split()[0], sizes, f"{1e3 * r['ms']:.1f}", f"{1e3 * r['first_ms']:.1f}", str(r["tried"]))
    console = plain_console(80)
    console.print(table)
    labels = ", ".join(map(attention_label, kinds)) or "no attention"
    path = path_of(machine_of(device))
    kept = "kept nowhere, LRFDYN_TUNING is 0" if path is None else f"kept in {path}"
    console.print(f"{len(records)} kinds of launches of {source.origin} ({labels}), {kept}", soft_wrap=True)
    if dropped := sum(r["other_bits"] for r in records):
        console.print(f"{dropped} sizes gave other bits and were not taken: please report this", soft_wrap=True)


def launch_all(model: SpikingModel, batch: int, dtype: torch.dtype | None) -> None:
    """Whatever training and inference of a model launch, once."""
    device = next(model.parameters()).device
    images = torch.randn(batch, *model.input_size, device=device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        model.train()(images).float().sum().backward()
        model.zero_grad()
        with torch.inference_mode():
            fold_batch_norm(model.eval())(images)
