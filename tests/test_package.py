"""What a user meets first: the import, the README, the command line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import lrfdyn
from lrfdyn.cli import COMMANDS, build_parser, main
from lrfdyn.sources import find_source
from lrfdyn.training.recipes import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_quick_and_lean():
    code = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import lrfdyn
print(time.perf_counter() - start)
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    seconds, modules = python(code).splitlines()
    assert float(seconds) < 2
    for heavy in ("matplotlib", "sklearn", "triton", "timm", "torchvision", "spikingjelly", "rich", "scipy"):
        assert f"'{heavy}'" not in modules


def test_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    output = python(code)
    assert "dendrites k d" in output
    assert "sdt_v3_s" in output


def test_help_of_every_command(capsys):
    for command in ("reproduce", "models"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert "--help" in capsys.readouterr().out
    assert build_parser().prog == "lrfdyn"


def test_package_is_typed():
    assert (Path(lrfdyn.__file__).parent / "py.typed").is_file()


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"lrfdyn {lrfdyn.__version__}\n"
    assert f"\nversion: {lrfdyn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {lrfdyn.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["trian"], "unknown name 'trian'; did you mean train?"),
        (["train", "digits", "--optimizer.lr", "1"], "did you mean --optimizer.learning_rate?"),
        (["train", "digits", "--optimizer.wd", "1"], "did you mean --optimizer.weight_decay?"),
        (["train", "digits", "--batch-size", "1"], "did you mean --run.batch_size?"),
        (["models", "--sort", "parametres"], "did you mean parameters?"),
        (["models", "spikfomer*"], "no model matches 'spikfomer*'; did you mean spikformer_"),
    ],
)
def test_suggestions(arguments, suggested, capsys):
    with suppress(SystemExit):
        main(arguments)
    assert suggested in capsys.readouterr().err


def test_without_a_command_the_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n    {command}" in said for command in COMMANDS)


def test_an_option_without_a_command(capsys):
    assert main(["--vresion"]) == 2
    assert capsys.readouterr().err == "lrfdyn: error: option: unknown name '--vresion'; did you mean --version?\n"


def test_names_with_capitals():
    model = lrfdyn.create_model("Spikformer_4_384", attention="SSA", depth=1)
    assert (model.name, model.config["attention"]) == ("spikformer_4_384", "ssa")
    assert lrfdyn.list_models("SDT_V3_*") == lrfdyn.list_models("sdt_v3_*") != []
    assert find_source("SDT_v3_t:SSA").trained is False
    assert load_recipe("digits", {"optimizer.name": "AdamW"}).optimizer.name == "adamw"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [("tra", "train"), ("train dig", "digits"), ("train --optimizer.l", "--optimizer.learning_rate")],
)
def test_completion(words, completed, capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    given = ["lrfdyn", *words.split()]
    call = f"COMP_WORDS=({' '.join(given)}); COMP_CWORD={len(given) - 1}; _lrfdyn; echo ${{COMPREPLY[@]}}"
    script = capsys.readouterr().out + call
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split() == [
        completed
    ]


def test_completion_of_other_shells(capsys):
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit\n_lrfdyn() {" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(COMMANDS)
    assert "'__fish_seen_subcommand_from train' -a '" in lines[4]


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "lrfdyn", "modles"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "modles" in done.stderr
