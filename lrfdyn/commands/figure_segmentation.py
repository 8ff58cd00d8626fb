"""Draw image, ground truth and the masks of several models side by side.

MODEL is the folder of a run or of a saved model, with a title in front if wanted: "LRF-Dyn=runs/lrf_dyn". The scenes
are test pictures of a data set with masks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lrfdyn.commands.shared import data_options, print_json
from lrfdyn.data import DATA, Augmentation, create_data, data_class
from lrfdyn.errors import require, require_integer
from lrfdyn.files import writable_folder
from lrfdyn.segmentation.data import MaskedData
from lrfdyn.segmentation.model import Segmenter
from lrfdyn.segmentation.predict import choose_scenes, load_segmenter, segmentation_figure


def with_masks() -> list[str]:
    """The names of the data sets whose pictures have masks."""
    return [name for name in DATA if issubclass(DATA[name], MaskedData)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="[TITLE=]MODEL", help="one column each")
    add(
        "--data.name", "--data", dest="data", metavar="NAME", default="ade20k", help=f"any of {', '.join(with_masks())}"
    )
    add("--data.root", "--root", dest="root", metavar="DIR", help="the folder of its files")
    add("--data.options", dest="data_options", metavar="YAML", default="{}", help="its further arguments")
    add("--scenes", nargs="*", default=[], metavar="NAME", help="file names without ending; none: some of the set")
    add("--count", type=int, default=4, help="how many scenes, where none are named")
    add("--out", type=Path, default=Path("segmentation.png"), help="the picture to write, .png or the smaller .jpg")
    add("--device", help="cpu or cuda; by default a GPU where there is one")
    add("--json", action="store_true", help="print the pixel accuracies as JSON")


def run(args: argparse.Namespace) -> None:
    require_integer("count", args.count, 1)
    writable_folder(args.out.parent, "out")
    require(not args.out.is_dir(), f"out: expected a file, got the folder {args.out}")
    known = issubclass(data_class(args.data), MaskedData)
    require(known, f"data: expected one with masks ({', '.join(with_masks())}), got {args.data}")
    models: dict[str, str] = {}
    for text in args.models:
        whole = "=" not in text or Path(text).exists()
        title, _, model = (Path(text).name, "", text) if whole else text.partition("=")
        require(title not in models, f"models: several are called {title!r}; put a title in front: A={model}")
        models[title] = model
    networks = {title: load_segmenter(model, args.device) for title, model in models.items()}
    source = open_data(args.data, args.root, data_options(args.data_options), next(iter(networks.values())))
    scenes = choose_scenes(source, args.scenes, args.count)
    accuracy = segmentation_figure(networks, source, scenes, args.out)
    if args.json:
        names = [source.test_pairs[scene].image.stem for scene in scenes]
        print_json({"figure": str(args.out), "scenes": names, "pixel_accuracy": accuracy})
    else:
        print(f"{args.out}: {len(scenes)} scenes, {', '.join(models)}")


def open_data(name: str, root: str | None, options: dict[str, Any], model: Segmenter) -> MaskedData:
    """The data set; one that can be told how many classes it has gets those of the model, if nothing else is said."""
    if "num_classes" in data_class(name).options():
        options = {"num_classes": model.num_classes, **options}
    source = create_data(name, root, Augmentation(), **options)
    assert isinstance(source, MaskedData)
    return source
