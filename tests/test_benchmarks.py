"""What the benchmarks share, and that every script starts; the scripts are also tested with what they measure."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import all as bench
from benchmarks import before_after, common, integers, loader, train_step
from docs.parts import deployment, imagenet_costs, performance, read
from lrfdyn import create_model
from lrfdyn.errors import LrfdynError
from tests.data.make import write_pets, write_tiny_imagenet

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "benchmarks").glob("*.py")
    if path.stem not in ("__init__", "common", "kernel_cases", "zoo_card")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    """As `python benchmarks/SCRIPT --help`, in this process."""
    path = str(ROOT / "benchmarks" / script)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code == 0
    assert f"usage: {script}" in capsys.readouterr().out


def test_records_of_an_earlier_run_keep_their_machine(tmp_path):
    path = tmp_path / "records.json"
    earlier = {"ms": 1.0, "machine": {"gpu": "another"}, "versions": {"torch": "1.0"}}
    common.write([earlier, {"ms": 2.0}], str(path))
    first, second = json.loads(path.read_text())
    assert first == earlier
    assert second == {"ms": 2.0, **common.about()}
    assert second["versions"]["torch"] != "1.0"


@pytest.mark.parametrize("name", ["tiny_imagenet", "oxford_pets", "oxford_pets_trimaps"])
def test_loader(name, tmp_path, monkeypatch, capsys):
    """With and without augmentation, for every number of processes."""
    pytest.importorskip("PIL")
    (write_tiny_imagenet if name == "tiny_imagenet" else write_pets)(tmp_path)
    out, size = tmp_path / "out.json", [] if name == "tiny_imagenet" else ["--image-size", "24"]
    argv = ["loader.py", name, "--root", str(tmp_path), "--workers", "0", "1", "--batches", "2", "--steps", "2", *size]
    monkeypatch.setattr(sys, "argv", [*argv, "--device", "cpu", "--json", str(out)])
    loader.main()
    records = json.loads(out.read_text())
    assert [(r["workers"], r["augmentation"]) for r in records] == [(0, "none"), (0, "full"), (1, "none"), (1, "full")]
    assert all(record["images_per_s"] > 0 and record["steps"] == 2 for record in records)
    assert "images_per_s" in capsys.readouterr().out


def test_loader_forms(tmp_path, monkeypatch, capsys):
    """The same pictures as files, shards and mapped levels; of what is elsewhere the record has no folder."""
    pytest.importorskip("PIL")
    root, out = tmp_path / "pets", tmp_path / "out.json"
    write_pets(root)
    argv = ["loader.py", "oxford_pets", "--root", str(root), "--forms", str(tmp_path / "forms"), "--image-size", "24"]
    monkeypatch.setattr(sys, "argv", [*argv, "--batches", "2", "--steps", "2", "--device", "cpu", "--json", str(out)])
    threads = torch.get_num_threads()
    try:
        loader.main()
    finally:
        torch.set_num_threads(threads)
    records = json.loads(out.read_text())
    forms = [(record["form"], record["short_side"]) for record in records]
    assert forms == [("one file a picture", "as it is"), ("one file a picture, draft", "as it is"),
                     ("shards", "256"), ("shards", "192"), ("mapped levels", "256")]  # fmt: skip
    assert all(record["images_per_s"] == record["images_per_s_core"] > 0 for record in records)
    assert records[-1]["bytes"] == 256 * 256 * 3
    assert str(tmp_path) not in out.read_text()
    assert "mapped levels" in capsys.readouterr().out


def test_one_that_fails_is_told_and_left_behind(capsys):
    with common.attempt("this one"):
        raise ValueError("no")
    assert "this one: failed: ValueError: no" in capsys.readouterr().out


def test_two_versions_are_measured_in_turn(tmp_path, monkeypatch):
    """Medians of three rounds each; the order alternates; versions are named without git metadata too."""
    order = []

    def measure(folder, options):
        order.append(folder.name)
        speed = {"old": [10.0, 30.0, 20.0], "new": [40.0, 44.0, 48.0]}[folder.name][order.count(folder.name) - 1]
        counts = {"training ssa": {"old": 7, "new": None}[folder.name]}
        return {"speeds": {"training ssa": speed}, "operations": counts, "version": folder.name}

    monkeypatch.setattr(before_after, "measure", measure)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    out = tmp_path / "out.json"
    given = ["--before", str(tmp_path / "old"), "--after", str(tmp_path / "new"), "--before-commit", "abc"]
    before_after.main([*given, "--json", str(out)])
    assert order == ["old", "new"] * 3
    result = json.loads(out.read_text())
    (record,) = result["records"]
    assert (record["before"]["median"], record["after"]["median"], record["ratio"]) == (20.0, 44.0, 2.2)
    assert record["before"]["operations"] == 7
    assert "operations" not in record["after"]
    assert result["before"] == {"commit": "abc", "version": "old"}
    assert result["after"]["commit"] is None
    assert str(tmp_path / "old") not in result["command"]


def test_what_is_measured_of_a_version():
    model = create_model("spikformer_4_384", dim=32, depth=1, heads=4, num_classes=5, image_size=16)
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 4])
    assert before_after.training_step(model, images, labels)().isfinite()
    with torch.inference_mode():
        assert before_after.inference_call(model, images)().shape == (2, 5)
    assert before_after.operations(lambda: images + images) == 1
    assert before_after.operations(lambda: images + images * images) == 2


def test_integers_are_the_same_everywhere_and_a_run_goes_on(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(integers, "PART", 4)
    out = tmp_path / "found.json"
    command = ["spikformer_digits_ssa", "--data", "digits", "--images", "10", "--every", "3", "--json", str(out)]
    integers.main(command)
    (record,) = json.loads(out.read_text())
    assert [record[key] for key in ("images", "same", "of", "defined")] == [10, 10, 10, 5]  # 2 + 2 + 1 of 4 + 4 + 2
    assert record["top1"] == 10 * record["right"] >= 80
    out.write_text(json.dumps([{**record, "images": 8, "same": 7, "right": 8}]))  # as if the last part were to come
    with pytest.raises(LrfdynError, match="same: spikformer_digits_ssa gives other integers elsewhere"):
        integers.main(command)
    (record,) = json.loads(out.read_text())
    assert (record["images"], record["same"]) == (10, 9)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a file in each of three folders, and git itself as a function."""
    monkeypatch.delenv("LRFDYN_REVISION", raising=False)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    for folder in ("lrfdyn", "benchmarks", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    return tmp_path, git


def test_a_revision_is_of_the_code_and_says_what_is_not_committed(repository, monkeypatch):
    root, git = repository
    first = git("rev-parse", "HEAD")
    assert common.revision(root) == first
    (root / "results" / "a.txt").write_text("2")  # as every step does
    assert common.revision(root) == first
    git("commit", "--quiet", "-a", "-m", "two")
    assert common.revision(root) == first
    (root / "lrfdyn" / "new.py").write_text("")  # nobody has added it yet
    assert common.revision(root) == first + common.CHANGED
    git("add", ".")
    git("commit", "--quiet", "-m", "three")
    assert common.revision(root) == git("rev-parse", "HEAD") != first
    monkeypatch.setenv("LRFDYN_REVISION", "named")
    assert common.revision(root) == "named"


def test_there_is_no_revision_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("LRFDYN_REVISION", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.revision(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert common.revision(tmp_path) is None


def test_the_dry_run_prints_commands_that_exist(capsys, monkeypatch):
    """Each step makes the file of its name by a script that is there."""
    monkeypatch.chdir(ROOT)
    bench.main(["--dry-run"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-2] == ["python", "docs/fill.py"]
    made = {Path(line[-1]).stem: line for line in lines if "--json" in line}
    assert made.keys() == bench.STEPS.keys()
    assert all((ROOT / line[1]).is_file() for line in made.values())
    bench.main(["--dry-run", "--only", "kernels"])
    assert "train_step" not in capsys.readouterr().out


def test_every_file_of_a_gpu_that_pages_read_is_made_by_a_step(monkeypatch):
    """Also one that is not measured yet; files of a CPU, and what is compiled or counted, are made elsewhere."""
    asked = {f"performance/{name}.json" for name in imagenet_costs.SPEEDS}

    def noted(name):
        asked.add(name)
        return read(name)

    for module in (performance, deployment):
        monkeypatch.setattr(module, "read", noted)
        for part in module.PARTS.values():
            part()
    names = {Path(name).stem for name in asked if name.startswith("performance/")}
    assert {*performance.FILES, "before_after", "memory_h200"} <= names

    def of_a_gpu(name):
        records = bench.read(bench.OUT / f"{name}.json")
        return any(record.get("machine", {}).get("gpu") for record in records) if records else "cpu" not in name

    monkeypatch.chdir(ROOT)
    assert {name for name in names if of_a_gpu(name)} <= bench.STEPS.keys()


def test_what_was_not_measured_has_no_revision(monkeypatch):
    loaded = {"kernels": [record("a" * 40)], "tricks": []}
    assert "of one revision" in performance.revision(loaded)
    monkeypatch.setattr(performance, "load", lambda name: [])
    assert performance.tricks() == "Not measured yet (`results/performance/tricks.json`)."
    facts = {"model": "m", "attention": "ssa", "batch": 2, "peak_mib": 1234.5, "eager_ms": 30}
    rows = [{**facts, "without": "nothing", "ms": 2.0, "slower_percent": 0.0}]
    rows += [{**facts, "without": "bits", "ms": 2.5, "slower_percent": 25.0}]
    monkeypatch.setattr(performance, "load", lambda name: rows)
    assert "| m | ssa | bits | 2 | 2.50 | 25.0 % | 1,234 | 30.0 |" in performance.tricks()


@pytest.mark.parametrize("name", [name for name, line in bench.STEPS.items() if "train_step.py" in line])
def test_options_of_the_steps_are_known(name, tmp_path, monkeypatch):
    """The shared command line takes them; nothing is measured."""
    asked = []
    out = tmp_path / "out.json"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which the script sets
    monkeypatch.setattr(sys, "argv", [*shlex.split(bench.STEPS[name]), "--json", str(out)])
    common.drive(None, lambda *words: asked.append(words), train_step.IMPLEMENTATIONS)
    assert {words[2] for words in asked} == set(bench.STEPS[name].partition("--implementations ")[2].split())


def record(revision, gpu="a GPU", **more):
    return {"revision": revision, "machine": {"gpu": gpu}, "versions": {"lrfdyn": "1"}, **more}


def test_a_step_is_current_with_this_revision_and_gpu_alone():
    assert bench.current([record("a"), record("a")], "a", "a GPU")
    assert not bench.current([], "a", "a GPU")
    assert not bench.current([record("a"), record("b")], "a", "a GPU")
    assert not bench.current([record("a", gpu="another")], "a", "a GPU")
    assert not bench.current([{"machine": {"gpu": "a GPU"}}], None, "a GPU")  # of before there were revisions


def test_what_cannot_be_measured_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        bench.main([])
    assert end.value.code == "all.py: needs a GPU"
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert "needs SpikingJelly" in bench.refusal("a")
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)
    assert bench.refusal("a") is None
    assert "--revision names it" in bench.refusal(None)
    assert bench.refusal(f"a{common.CHANGED}") == "lrfdyn/ or benchmarks/ has changes that are not committed"


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Steps of this revision are left out; one without a peer's record keeps its old file and is run again."""
    out, ran, lacking = tmp_path / "results", [], {"inference_cifar"}
    out.mkdir()
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "revision", lambda: "a")
    monkeypatch.setattr(bench, "OUT", out)
    monkeypatch.setattr(bench, "refusal", lambda revision: None)
    monkeypatch.setattr(bench, "by_hand", lambda names: [f"page of {len(names)}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.chdir(tmp_path)  # which is undone

    def run(words, env=None, check=False):
        if "--json" in words:
            name = Path(words[-1]).stem
            ran.append(name)
            asked = bench.STEPS[name].partition("--implementations ")[2].split()
            records = [record(env["LRFDYN_REVISION"], implementation=each) for each in asked]
            Path(words[-1]).write_text(json.dumps(records[: 1 if name in lacking else None]))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(bench.subprocess, "run", run)
    names = ["kernels", "inference_cifar"]
    (out / "kernels.json").write_text(json.dumps([record("a")]))
    (out / "inference_cifar.json").write_text(json.dumps([record("before")]))
    with pytest.raises(SystemExit, match="not measured: inference_cifar"):
        bench.main(["--only", *names])
    said = capsys.readouterr().out
    assert ran == ["inference_cifar"]
    assert "kernels: is of this revision already" in said
    assert "has no record of reference, spikingjelly, spikingjelly-compiled, 0 s" in said
    assert bench.read(out / "inference_cifar.json") == [record("before")]
    lacking.clear()
    bench.main(["--only", *names])
    assert bench.current(bench.read(out / "inference_cifar.json"), "a", "a GPU")
    assert "inference_cifar: done, 0 s" in (said := capsys.readouterr().out)
    assert "page of 1" in said
    bench.main(["--only", *names])
    assert ran == ["inference_cifar"] * 2
    assert bench.missing("memory_h200", [record("a", implementation="eager")]) == ["spikingjelly"]


def test_pages_that_name_a_file_by_hand_are_told():
    assert "imagenet.md" in bench.by_hand(["train_step_224_ours"])
    assert bench.by_hand(["no_such"]) == []


def test_the_page_says_of_which_revisions_its_tables_are():
    one, other = "a" * 40, "b" * 40
    same = {"kernels": [record(one)], "inference_cifar": [record(one)]}
    assert f"of one revision, `{one}`" in performance.revision(same)
    assert performance.earlier(same) == ""
    unknown = {"kernels": [{}], "inference_cifar": [{}]}
    assert "not recorded" in performance.revision(unknown)
    assert "`kernels.json`, `inference_cifar.json`" in performance.earlier(unknown)
    several = performance.revision({"kernels": [record(one), {}], "inference_cifar": [record(other)]})
    assert "of several revisions" in several
    assert f"| `kernels.json` | `{one[:12]}`, not recorded |" in several
    assert f"| `inference_cifar.json` | `{other[:12]}` |" in several
