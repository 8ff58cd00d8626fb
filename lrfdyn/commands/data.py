"""Write a data set as shards that are quick to read, or check such shards.

lrfdyn data pack oxford_pets --data.root DIR --short-side 192 --out SHARDS
lrfdyn data check SHARDS
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lrfdyn.commands.shared import MIB, bar, data_options, print_json
from lrfdyn.data import DATA, Augmentation, Shard, check_shards, create_data, pack_shards
from lrfdyn.files import expanded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, add_own, act in (("pack", add_pack, pack), ("check", add_check, check)):
        doc = (act.__doc__ or "").strip()
        how: dict[str, Any] = {"help": doc.splitlines()[0], "description": doc}
        sub = actions.add_parser(name, formatter_class=parser.formatter_class, **how)
        add_own(sub)
        sub.add_argument("--json", action="store_true", help="print the manifest as JSON")
        sub.set_defaults(act=act, options=list(sub._option_string_actions))


def add_pack(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    add = parser.add_argument
    add("source", help=f"a data set of pictures: {', '.join(name for name in DATA if not DATA[name].framed)}")
    add("--data.root", "--root", dest="root", metavar="DIR", help="the folder of its files")
    add("--data.options", dest="source_options", metavar="YAML", default="{}", help="its further arguments")
    add("--out", type=Path, required=True, metavar="SHARDS", help="a new folder for the shards")
    add("--short-side", type=int, metavar="N", help="scale larger pictures to it; none: they stay as they are")
    add("--quality", type=int, default=95, metavar="Q", help="of the JPEG files, 1 to 100")
    add("--shard-mib", type=int, default=256, metavar="M", help="the largest size of a shard, in MiB")
    add("--workers", type=int, metavar="N", help="processes that encode; by default one a core")
    add("--restart", action="store_true", help="discard what an interrupted pack has left, and begin anew")


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", type=Path, help="a folder that lrfdyn data pack has written")


def run(args: argparse.Namespace) -> None:
    args.act(args)


def pack(args: argparse.Namespace) -> None:
    """Write the pictures of a data set as WebDataset shards, scaled once.

    Classes or masks come with them, and a manifest. The data sets webdataset and mask_shards read them. The same
    command goes on with a pack that was interrupted.
    """
    options = data_options(args.source_options)
    source = create_data(args.source, args.root, Augmentation(), **options)
    root = None if args.root is None else expanded(args.root, "root")
    how = {key: getattr(args, key) for key in ("short_side", "quality", "shard_mib", "workers", "restart")}
    name, out = DATA.name_of(args.source), expanded(args.out, "out")
    with bar(not args.json) as progress:
        task = progress.add_task("images", total=source.train_images + source.test_images)

        def say(shard: Shard) -> None:
            progress.update(task, advance=shard.images)

        manifest = pack_shards(source, out, name=name, root=root, options=options, say=say, **how)
    if args.json:
        print_json(manifest.as_dict())
    else:
        size = sum(shard.bytes for shard in manifest.shards) / MIB
        images = " + ".join(f"{count:,}" for count in manifest.images.values())
        print(f"{out}: {images} images of {name} in {len(manifest.shards)} shards, {size:,.1f} MiB")


def check(args: argparse.Namespace) -> None:
    """Check that shards are as they were written, by their sizes and sha256."""
    with bar(not args.json) as progress:
        task = progress.add_task("shards", total=None)
        manifest = check_shards(expanded(args.shards, "shards"), lambda shard: progress.update(task, advance=1))
    if args.json:
        print_json(manifest.as_dict())
    else:
        images = " + ".join(f"{count:,}" for count in manifest.images.values())
        print(f"{args.shards}: {len(manifest.shards)} shards with {images} images of {manifest.source} are whole")
