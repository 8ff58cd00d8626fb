"""Command lines with words left out, put in or replaced."""

from __future__ import annotations

from lrfdyn.cli import COMMANDS
from tests.hostile.case import Case, tree


def commands(case: Case) -> None:
    draw, ground = case.draw, case.ground
    right = {
        "models": [[], ["spikformer_4_384"], ["sdt_*", "--json"], ["spikformer_4_384", "--depth", "1", "--attention",
        "ssa"]],
        "recipes": [[], ["digits"], ["digits", "--attention", "ssa"]],
        "train": [[ground / "recipe.yaml", "--dry-run"], ["digits", "--dry-run", "--epochs", "2", "--json"]],
        "sweep": [[ground / "sweep.yaml", "--dry-run", "--out", "s", "--together", "2"]],
        "evaluate": [[ground / "run"], [ground / "run", "--json"], [ground / "recipe.yaml", "--weights",
        ground / "run"]],
        "analyze": [[ground / "saved", "--images", "2", "--batch-size", "2", "--figures", "none", "--out", "a",
        "--device", "cpu"]],
        "theory": [["--tokens", "9", "--figures", "none", "--out", "t", "--beta", "0.1", "--dilations", "3,5"]],
        "tune": [[ground / "saved", "--batch", "1", "--precision", "fp32", "--attention", "ssa", "--json"]],
        "profile": [[ground / "saved", "--batch", "1", "--repeats", "1", "--device", "cpu", "--json"]],
        "export": [[ground / "saved", "--out", "x.nothing", "--check", "1", "--tolerance", "0.1"]],
        "predict": [[ground / "images", "--model", ground / "saved", "--top", "2", "--batch", "1", "--json", "-"],
        [ground / "recordings", "--model", ground / "camera", "--exit", "0.5", "--steps"],
        [ground / "recordings" / "a.bin", "--model", ground / "camera", "--exit", "0.5", "--page", "p.html"]],
        "figure-segmentation": [[f"a={ground / 'segmenter'}", "--root", ground / "shapes", "--count", "1", "--out",
        "f.png"]],
        "data": [["pack", "ade20k", "--data.root", ground / "shapes", "--data.options", "{num_classes: 3}", "--out",
        "p", "--short-side", "9", "--workers", "0", "--quality", "50"], ["check", ground / "shapes"], ["check", "p"]],
        "completion": [["bash"], ["zsh"], []],
        "reproduce": [["--out", "d", "--seeds", "x", "--attentions", "ssa"]],
    }  # fmt: skip
    name = draw.choice(COMMANDS)
    argv = [str(part) for part in draw.choice(right[name])]
    words = [
        "", " ", "-", "--", "-x", "--nothing", "--nothing=1", "x" * 5000, "x" * 300, "a\nb", "[/red]", "[red]x",
        "~nosuchuser/x", "~",
        "-1", "0", "1.5", "nan", "inf", "1e999", "1000000000", "9" * 5000, "é", "１", "/", "/dev/null", "/dev/null/x",
        "/proc/x/y",
        ".", "..", "*", "[", "a:b", "spikformer_4_384:", "spikformer_4_384:nothing", ":", "a/b", "a/b/c", ",",
        "1,2,x", "http://x/y",
        "--help", "--version", "--out", "--json", "--device", "cuda", "cuda:99", "meta", "nothing", "--out=/proc/x",
        "--out=r[/a]",
        "--model.options={a: 1}", "--optimizer.lr=1", "--resume", "--restart", "None", "true", "\udcff",
        str(ground / "run"),
        str(ground), str(ground / "images" / "0.jpg"), str(ground / "recordings"), str(ground / "run" / "log.jsonl"),
        "x.onnx", "x.pte", "x.nir",
        "x.safetensors", "x.yaml",
    ]  # fmt: skip
    for _ in range(draw.choice([1, 1, 2, 3])):
        at, word = draw.randrange(len(argv) + 1), draw.choice(words)
        match draw.randrange(4):
            case 0:
                argv.insert(at, word)
            case 1 if argv:
                del argv[at % len(argv)]
            case _ if argv:
                argv[at % len(argv)] = word
    before = tree(ground / "run")
    if (name == "train" and "--dry-run" not in argv) or (name in ("sweep",) and "--dry-run" not in argv):
        argv.append("--dry-run")
    if name == "reproduce" and not any(word in argv for word in ("x", "--help")):
        argv += ["--seeds", "x"]
    case.command(*([name, *argv] if draw.random() < 0.97 else argv), codes=(0, 1, 2))
    if tree(ground / "run") != before:
        case.find("the run was changed")
