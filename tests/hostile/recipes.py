"""Recipes with hostile values, in files and on the command line."""

from __future__ import annotations

import shutil
from typing import Any

from lrfdyn.training.config import key_types
from lrfdyn.training.recipes import dump_yaml, merge
from lrfdyn.training.sweep import load_sweep
from tests.hostile.case import TRAINING, Case
from tests.training.runs import TINY

OPTIONS = ("dim", "depth", "heads", "mlp_ratio", "pooling", "qkv_bias", "name", "nothing", "attention_options")


def texts(case: Case) -> list[str]:
    """What can stand for a value in YAML."""
    return [
        ".inf", "-.inf", ".nan", '"3"', "-1", "0", "1", "1e999", "2.5", "!!float x", "!!int x", "!!timestamp x",
        "!!bool x",
        "!!null x", "!!binary x", "!!set {a}", "!!omap [a]", "!!pairs [a]",
        f"!!python/object/apply:os.mkdir ['{case.canary}']",
        "!!python/name:os.system", "!unknown x", "&a [*a]", "&a {b: *a}", "*undefined", "9" * 5000, "0." + "3" * 5000,
        "[" * 2000 + "]" * 2000, "{a: " * 2000 + "1" + "}" * 2000, "{}", "[]", "null", "true", "off", '"a\\nb"',
        '"\\0"',
        "2001-01-01", "2001-99-99", "0x10", "1_000", "190:20:30", "{name: x}", "{1: 2}", "{[1]: 2}", "{a: 1, a: 2}",
        "9000000000000000", "1000000", "100000000000000000000000000", "x" * 5000, "x" * 300, '"\\ud800"', "é",
        "[1, a]", "[1, 2]",
        "[.nan, .inf]", "@x", "`x", "%x", "- x", "? x", "<<: x", "|", ">", "~", "~nosuchuser/x", "~/x", "../x.yaml",
        "[red]",
        "cuda", "cuda:9", "lrf_dyn", "timm/resnet18", "http://x/y", "imagenet", "ade20k", "webdataset", "sdt_v3_t",
        bomb(),
    ]  # fmt: skip


def bomb() -> str:
    """428 bytes that stand for 10 ** 9 entries."""
    levels = [f"&{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)]
    return f"[&a [x, x, x, x, x, x, x, x, x], {', '.join(levels)}]"


def recipe_text(case: Case) -> str:
    draw = case.draw
    keys = [
        *key_types(),
        *(f"model.options.{name}" for name in OPTIONS),
        "data.options.workers",
        "extends",
        "variants",
        "x",
    ]
    recipe: dict[str, Any] = merge(TINY, TRAINING)
    chosen = {f"HOSTILE{i}": draw.choice(texts(case)) for i in range(draw.choice([1, 1, 1, 2]))}
    for mark in chosen:
        parts, node = draw.choice(keys).split("."), recipe
        if draw.random() < 0.1:
            parts = parts[:1]
        for part in parts[:-1]:
            node = node[part] = dict(node.get(part) or {})
        node[parts[-1]] = mark
        case.notes.append(f"{'.'.join(parts)}: {chosen[mark][:60]}")
    text = dump_yaml(recipe)
    for mark, value in chosen.items():
        text = text.replace(mark, value)
    match draw.randrange(20):
        case 0:
            return text + draw.choice(
                ["\trun: 1", "model: {}", "---\nx: 1", "\0", "- x", "'", "{", "x: *y", "#" * 9999]
            )
        case 1:
            return draw.choice(["", "x", "[]", "1", "null", "--- a\n--- b", "{", "\t", *texts(case)])
    return text


def recipes(case: Case) -> None:
    path, draw = case.folder / "recipe.yaml", case.draw
    if draw.random() < 0.15:  # on the command line
        key, text = draw.choice(list(key_types())), draw.choice(texts(case))
        shutil.copy(case.ground / "recipe.yaml", path)
        case.command(*draw.choice([("recipes", path), ("train", path, "--dry-run")]), f"--{key}={text}")
        return
    data = recipe_text(case).encode("utf-8", "surrogatepass")
    if draw.random() < 0.05:
        data = draw.choice([data.decode("utf-8", "replace").encode("utf-16"), b"\xff" + data, b"\xef\xbb\xbf" + data])
    path.write_bytes(data)
    if draw.random() < 0.1:
        sweep = case.folder / "sweep.yaml"
        sweep.write_text(f"recipe: {path}\nruns: [{{attention: ssa}}]\n")
        case.command("sweep", sweep, "--dry-run")
    elif draw.random() < 0.05:
        (case.folder / "sweep.yaml").write_bytes(data)
        case.call(lambda: load_sweep(case.folder / "sweep.yaml"))
    else:
        case.command(
            *draw.choice([("recipes", path), ("train", path, "--dry-run"), ("train", path, "--dry-run", "--json")])
        )
