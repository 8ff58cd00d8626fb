"""Draw image, ground truth and the masks of several models side by side.

MODEL is the folder of a run or of a saved model, with a title in front if wanted: "LRF-Dyn=runs/lrf_dyn". The scenes
are validation pairs of a data set in ADE20K's layout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lrfdyn.errors import require
from lrfdyn.files import finite, writable_folder
from lrfdyn.segmentation.predict import choose_pairs, segmentation_figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="[TITLE=]MODEL", help="one column each")
    add("--root", type=Path, required=True, help="folder of the data set, ADEChallengeData2016")
    add("--scenes", nargs="*", default=[], metavar="NAME", help="file names without ending; none: some of the set")
    add("--count", type=int, default=4, help="how many scenes, where none are named")
    add("--out", type=Path, default=Path("segmentation.png"), help="the picture to write, .png or the smaller .jpg")
    add("--device", help="cpu or cuda; by default a GPU where there is one")
    add("--json", action="store_true", help="print the pixel accuracies as JSON")


def run(arguments: argparse.Namespace) -> None:
    require(arguments.count >= 1, f"count: expected an integer >= 1, got {arguments.count}")
    writable_folder(arguments.out.parent, "out")
    require(not arguments.out.is_dir(), f"out: expected a file, got the folder {arguments.out}")
    models: dict[str, str] = {}
    for title, model in map(titled, arguments.models):
        require(title not in models, f"models: several are called {title!r}; put a title in front: A={model}")
        models[title] = model
    pairs = choose_pairs(arguments.root, arguments.scenes, arguments.count)
    accuracy = segmentation_figure(models, pairs, arguments.out, device=arguments.device)
    if arguments.json:
        scenes = [pair.image.stem for pair in pairs]
        found = {"figure": str(arguments.out), "scenes": scenes, "pixel_accuracy": accuracy}
        print(json.dumps(finite(found), indent=1))
        return
    print(f"{arguments.out}: {len(pairs)} scenes, {', '.join(models)}")


def titled(text: str) -> tuple[str, str]:
    title, equals, model = text.partition("=")
    return (title, model) if equals else (Path(text).name, text)
