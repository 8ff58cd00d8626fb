"""The zoo of trained models: adds one to it, and builds the folders that are uploaded to the Hugging Face hub.

    python benchmarks/zoo.py add runs/digits/runs/ssa-seed0 --logs results/digits/zoo/ssa-seed*
    python benchmarks/zoo.py integers --data-root DIR   # after a change of `quantize`
    python benchmarks/zoo.py build build/zoo      # that is `make zoo`; no network

`add` stores the model of a run in weights/NAME, rounded to bfloat16, with its recipe and a card, and its entry in
lrfdyn/zoo.json. --logs are the kept runs of all seeds, in results/: the accuracy over the seeds is theirs. On all test
images are measured, of the one that is stored: the weights as they were trained (float32), as they are stored (bf16),
and in integers, by the C of the model, where it has such a form, which `integers` measures again. Energy is that of 64
test images.

`build` writes OWNER/NAME with model.safetensors, config.json, recipe.yaml, the card, model.onnx and, where the model
has an integer form, integer.safetensors and integer.onnx. Each is loaded again and compared with the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.zoo_card import TERMS, card_header, card_text
from lrfdyn.analysis.measure.inference import attention_state
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.analysis.measure.spikes import energy
from lrfdyn.attention import Attention
from lrfdyn.deploy import NativeModel, export_model, load_integer, quantize, write_c, write_integer_onnx
from lrfdyn.deploy.export.formats import OnnxRunner
from lrfdyn.deploy.integer.program import random_pictures
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import file_digest, read_json, read_summary, write_json
from lrfdyn.io.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, from_pretrained, model_card, model_config
from lrfdyn.io.zoo import INDEX, OWNER, Pretrained, hub_owner, list_pretrained, read_index, zoo_folder
from lrfdyn.models import SpikingModel, list_models
from lrfdyn.models.summary import count_parameters
from lrfdyn.sources import find_source
from lrfdyn.training.config import TrainConfig, differences
from lrfdyn.training.recipes import dump_yaml, load_recipe
from lrfdyn.training.run import evaluate_weights
from lrfdyn.training.tasks import build_data

ROOT = Path(__file__).parents[1]
RECIPE_FILE = "recipe.yaml"
ENERGY_IMAGES = 64
HERE = {"run.precision": "fp32", "run.test_batch_size": 32}  # batches that a CPU's cache can hold
SAME = ("model", "attention", "dilations", "token", "data", "recipe", "epochs", "parameters", "precision")


def integer_top1(model: SpikingModel, config: TrainConfig, count: int) -> tuple[float | None, str]:
    """The accuracy in integers on all test images, or None and why there is none."""
    if model.framing is not None:
        return None, "none: it takes event frames"
    try:
        integer = quantize(model)
    except LrfdynError as error:
        return None, f"none: {error}"
    root = None if config.data.root is None else Path(config.data.root)
    shown = load_images(config.data.name, root, count, count, torch.device("cpu"), config.data.image_size)
    assert shown.preprocessing is not None
    levels = shown.preprocessing.levels(shown.batches[0].numpy())
    with tempfile.TemporaryDirectory() as place:
        made = write_c(integer, Path(place) / "model.c", torch.from_numpy(levels[:4]), verify=True)
        native = NativeModel(made.path)
        found = np.concatenate([native(some) for some in np.array_split(levels, -(-count // 64))])
    return 100 * float((found.argmax(1) == shown.labels[0].numpy()).mean()), ""


def measure(model: SpikingModel, config: TrainConfig) -> dict[str, Any]:
    """What the index says of a model that is about to be stored, but for its files."""
    root = None if config.data.root is None else Path(config.data.root)
    data = build_data(config)
    frames = None if model.framing is None else model.time_steps
    count = min(ENERGY_IMAGES, data.test_images)
    some = load_images(config.data.name, root, count, 16, torch.device("cpu"), config.data.image_size, frames)
    has_state = any(isinstance(module, Attention) for module in model.modules())
    return {
        "train_images": data.train_images,
        "test_images": data.test_images,
        "parameters": count_parameters(model),
        "state_bytes": sum(term["bytes"] for term in attention_state(model)) if has_state else None,
        "energy_pj": energy(model, some.of(model))["energy_pj"],
        "model": model.name,
        "attention": model.config.get("attention"),
        "data": config.data.name,
    }


def top1(config: TrainConfig, model: SpikingModel, name: str) -> float:
    return evaluate_weights(config, model.state_dict(), Path(name), lambda *_: None)["top1"]


def read_logs(folders: Sequence[Path]) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Folder and summary of every kept run by its seed; they must differ in nothing but that."""
    found = {}
    for folder in sorted(folders):
        summary = read_summary(folder / "summary.json", "logs")
        require(summary.get("top1") is not None, f"logs: {folder} has no summary.json of a classifier")
        require(summary["seed"] not in found, f"logs: seed {summary['seed']} is there twice")
        found[summary["seed"]] = (folder, summary)
    same = {str([summary.get(key) for key in SAME]) for _, summary in found.values()}
    require(len(same) == 1, f"logs: expected runs that differ in their seed only, got {' and '.join(sorted(same))}")
    return dict(sorted(found.items()))


def add(run: Path, logs: Sequence[Path], data_root: str | None, name: str | None, weights: Path, index: Path) -> str:
    """Stores the model of a run; returns its name."""
    source, found = find_source(run), read_logs(logs)
    seed, recipe = source.seed, source.recipe
    require(
        seed in found and recipe is not None, f"run: {run} has no recipe, or a seed that is not in the logs: {seed}"
    )
    assert seed is not None
    log, summary = found[seed]
    values = load_recipe(recipe)
    require(values.data.held_out is None, f"run: {run} has held out training images, and so was not tested on others")
    kept = load_recipe(log / RECIPE_FILE).as_dict()
    # The folder of a teacher has another path among what was kept.
    other = [line for line in differences(values.as_dict(), kept) if not line.startswith("distill.teacher:")]
    require(not other, f"logs: {log} has other settings than {run}: {'; '.join(other)}")
    # Measured in float32 on this machine's data, whatever the run had.
    config = load_recipe(recipe, {**HERE, **({} if data_root is None else {"data.root": data_root})})
    if summary["data"] not in TERMS:
        raise unknown_name("data: add its terms to benchmarks/zoo_card.py", summary["data"], TERMS)
    model = source.load().float()
    name = name or f"{type(model).__name__.lower()}_{summary['data']}_{summary['attention'] or 'none'}"
    require(name not in list_models(), f"name: {name} is the name of a network")
    facts = measure(model, config) | {"float32": top1(config, model, name)}
    distance = abs(facts["float32"] - summary["top1"])  # another machine may round a few images over
    require(distance <= 0.5, f"logs: {log} says {summary['top1']:.2f} %, the model has {facts['float32']:.2f} %")
    folder = weights / name
    shutil.rmtree(folder, ignore_errors=True)
    about = f"Trained on {summary['data']} by `{summary['command']}`: top-1 {summary['top1']:.2f} % after training."
    model.save_pretrained(folder, description=about, source=f"{OWNER}/{name}", dtype=torch.bfloat16)
    kept["data"]["root"] = None  # that of one machine is nobody else's
    (folder / RECIPE_FILE).write_text(dump_yaml(kept), encoding="utf-8")
    stored = from_pretrained(folder, host=SpikingModel)
    facts["bf16"] = top1(config, stored, name)
    facts["integer"], why = integer_top1(stored, config, facts["test_images"])
    paths = [folder / part for part in (CONFIG_FILE, WEIGHTS_FILE, RECIPE_FILE)]
    entry = Pretrained(
        name,
        recipe=summary["recipe"],
        epochs=summary["epochs"],
        seed=seed,
        precision=summary["precision"],
        top1={str(number): s["top1"] for number, (_, s) in found.items()},
        logs=tuple(place.resolve().relative_to(ROOT).as_posix() for place, _ in found.values()),
        files={path.name: {"sha256": file_digest(path), "bytes": path.stat().st_size} for path in paths},
        **facts,
    )
    write_card(entry, stored, folder, summary["command"], why)
    store_entry(entry, index)
    return name


def write_card(entry: Pretrained, stored: SpikingModel, folder: Path, command: str, no_integer: str) -> None:
    text = card_text(entry, command, no_integer)
    card = model_card(stored, model_config(stored), f"{OWNER}/{entry.name}", text, card_header(entry))
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def measure_integers(entry: Pretrained, data_root: str | None, weights: Path, index: Path) -> Pretrained:
    """Measures a stored model in integers again, after `quantize` changed, and says it in index and card."""
    folder = weights / entry.name
    stored = from_pretrained(folder, host=SpikingModel)
    changes = {} if stored.framing is not None or data_root is None else {"data.root": data_root}
    config = load_recipe(folder / RECIPE_FILE, {**HERE, **changes})
    found, why = integer_top1(stored, config, entry.test_images)
    entry = dataclasses.replace(entry, integer=found)
    write_card(entry, stored, folder, read_logs([ROOT / log for log in entry.logs])[entry.seed][1]["command"], why)
    store_entry(entry, index)
    return entry


def store_entry(entry: Pretrained, index: Path) -> None:
    known = read_json(index, "index")["models"] if index.is_file() else {}
    for other, facts in known.items():
        alike = all(facts[key] == getattr(entry, key) for key in ("model", "attention", "data"))
        require(not alike or other == entry.name, f"name: {other} is of the same network, attention and data")
    known[entry.name] = {key: value for key, value in dataclasses.asdict(entry).items() if key != "name"}
    write_json(index, {"format": 1, "models": dict(sorted(known.items()))})
    read_index.cache_clear()


def shown_images(model: SpikingModel, count: int = 4) -> torch.Tensor:
    """Images, or films of counts, that are the same for every runtime."""
    generator = torch.Generator().manual_seed(0)
    if model.framing is None:
        return torch.randn(count, *model.input_size, generator=generator)
    return torch.randint(0, 3, (model.time_steps, count, *model.input_size), generator=generator).float()


@torch.inference_mode()
def build(entry: Pretrained, out: Path) -> Path:
    """Writes the folder that is uploaded, every file compared with the model that the zoo gives."""
    source, folder = zoo_folder(entry), out / hub_owner() / entry.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (*entry.files, CARD_FILE):
        shutil.copy(source / name, folder / name)
    model = from_pretrained(source, host=SpikingModel)
    images = shown_images(model)
    again = from_pretrained(folder, host=SpikingModel)(images)
    require(torch.equal(again, model(images)), f"build: {folder} gives other logits than {source}")
    weights = f"{hub_owner()}/{entry.name}"
    made = export_model(model, folder / "model.onnx", weights=weights, frames=model.framing is not None)
    print(f"{made.path}: verified on {made.check}")
    if entry.integer is not None:
        integer = quantize(model, weights=weights)
        levels = random_pictures(integer, 4)
        integer.save(folder / "integer.safetensors")
        write_integer_onnx(integer, folder / "integer.onnx", levels)
        runs = {"integer.safetensors": load_integer(folder / "integer.safetensors")(levels).numpy()}
        runs["integer.onnx"] = OnnxRunner(folder / "integer.onnx")(levels.numpy())
        for name, logits in runs.items():
            require(np.array_equal(logits, integer(levels).numpy()), f"build: {folder / name} gives other integers")
            print(f"{folder / name}: the same bits as the definition, {len(levels)} images")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="store the model of a run")
    adding.add_argument("run", type=Path, help="folder of the run")
    adding.add_argument("--logs", type=Path, nargs="+", required=True, help="kept runs of all seeds, in results/")
    adding.add_argument("--data-root", help="folder of the data's files")
    adding.add_argument("--name", help="default: HOST_DATA_ATTENTION")
    adding.add_argument("--weights", type=Path, default=ROOT / "weights", help="folder of the models")
    adding.add_argument("--index", type=Path, default=INDEX, help="file of the index")
    measuring = commands.add_parser("integers", help="measure stored models in integers again")
    measuring.add_argument("--data-root", help="folder of the data's files")
    building = commands.add_parser("build", help="folders for the hub")
    building.add_argument("out", type=Path)
    for each in (measuring, building):
        each.add_argument("--names", default="*", help="a shell pattern")
    args = parser.parse_args(argv)
    if args.command == "add":
        print(add(args.run, args.logs, args.data_root, args.name, args.weights, args.index))
        return 0
    for entry in list_pretrained(args.names):
        if args.command == "build":
            print(build(entry, args.out))
        else:
            again = measure_integers(entry, args.data_root, ROOT / "weights", INDEX)
            print(f"{entry.name}: {entry.integer} -> {again.integer} %", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
