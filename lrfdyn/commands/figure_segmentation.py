"""Draw image, ground truth and the masks of several models side by side.

MODEL is the folder of a run or of a saved model, with a title in front if wanted: "LRF-Dyn=runs/lrf_dyn". The scenes
are validation pairs of a data set in ADE20K's layout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lrfdyn.commands.shared import print_json
from lrfdyn.errors import require, require_integer
from lrfdyn.files import writable_folder
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


def run(args: argparse.Namespace) -> None:
    require_integer("count", args.count, 1)
    writable_folder(args.out.parent, "out")
    require(not args.out.is_dir(), f"out: expected a file, got the folder {args.out}")
    models: dict[str, str] = {}
    for text in args.models:
        whole = "=" not in text or Path(text).exists()
        title, _, model = (Path(text).name, "", text) if whole else text.partition("=")
        require(title not in models, f"models: several are called {title!r}; put a title in front: A={model}")
        models[title] = model
    pairs = choose_pairs(args.root, args.scenes, args.count)
    accuracy = segmentation_figure(models, pairs, args.out, device=args.device)
    if args.json:
        found = {"figure": str(args.out), "scenes": [pair.image.stem for pair in pairs], "pixel_accuracy": accuracy}
        print_json(found)
    else:
        print(f"{args.out}: {len(pairs)} scenes, {', '.join(models)}")
