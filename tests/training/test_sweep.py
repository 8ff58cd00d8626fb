"""A list of runs: how it is read, that it goes on where it stopped, and what it leaves behind."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from lrfdyn.cli import main
from lrfdyn.commands.shared import bars
from lrfdyn.commands.sweep import Bars
from lrfdyn.errors import LrfdynError
from lrfdyn.files import sole_user
from lrfdyn.io.weights import list_checkpoints
from lrfdyn.training.config import ATTENTION_KEYS, TrainConfig, differences
from lrfdyn.training.processes import PARENT, Stop
from lrfdyn.training.recipes import dump_yaml, load_recipe, read_yaml
from lrfdyn.training.sweep import Sweep, SweepReporter, group_rows, load_sweep, plan_runs
from tests.training.runs import STEPS, assert_same_end, tiny, train, write_recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def names(values, **keys):
    return [run.name for run in plan_runs(values, **keys)]


@pytest.fixture
def recipe(tmp_path):
    return str(write_recipe(tmp_path / "tiny.yaml"))


def test_names_come_from_what_tells_runs_apart(recipe):
    runs = [{"attention": "ssa"}, {"attention": "lrf_dyn", "dilations": [1, 3]}, {"attention": "ssa", "name": "mine"}]
    values = {"recipe": recipe, "seeds": [0, 2], "epochs": 1, "runs": runs}
    assert names(values) == ["ssa-seed0", "lrf_dyn-dilations_1_3-seed0", "mine-seed0",
                             "ssa-seed2", "lrf_dyn-dilations_1_3-seed2", "mine-seed2"]  # fmt: skip
    assert names({"runs": [recipe]}) == ["tiny-seed0"]
    with pytest.raises(LrfdynError, match="two runs are called ssa-seed0; give one of them a `name`"):
        names({"recipe": recipe, "runs": [{"attention": "ssa"}, {"attention": "ssa"}]})


def test_a_run_has_the_settings_of_its_recipe_its_entry_and_the_command(recipe):
    values = {"recipe": recipe, "epochs": 1, "model.time_steps": 2, "runs": [{"attention": "ssa", "seeds": [3]}]}
    (run,) = plan_runs(values, {"optimizer.learning_rate": "0.1"})
    assert (run.config.model.attention, run.config.model.time_steps) == ("ssa", 2)
    assert (run.config.run.seed, run.config.schedule.epochs) == (3, 1)
    assert run.config.optimizer.learning_rate == 0.1
    assert run.options == "time_steps 2, learning_rate 0.1"
    assert run.command(Path("out"))[:4] == ["train", recipe, "--epochs", "1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"runs": []}, "runs: expected a list of at least one"),
        ({"runs": [3]}, "runs: expected keys with values, got 3"),
        ({"runs": [{"attention": "ssa"}]}, "ssa: expected the name of a recipe, got None"),
        ({"runs": [{"recipe": "tiny", "atention": "ssa"}]}, "key: unknown name 'atention'; did you mean attention"),
        ({"runs": [{"recipe": "tiny", "seeds": 3}]}, "seeds: expected at least one integer >= 0, got 3"),
        ({"runs": [{"recipe": "tiny", "seeds": [1, 1]}]}, r"seeds: expected different ones"),
        ({"runs": [{"recipe": "tiny", "run.seed": 1}]}, "run.seed: has a key of its own, seeds"),
        ({"runs": [{"recipe": "tiny", "epochs": "two"}]}, "epochs: expected an integer, got 'two'"),
        ({"runs": [{"recipe": "tiny", "token": "qkv", "model.token": "value"}]}, "token: stands there under its long"),
        ({"runs": ["nothing"]}, "recipe: unknown name 'nothing'"),
        ({"runs": [{"recipe": "tiny", "teacher": 3}]}, "teacher: expected the name of a run, got 3"),
        ("text", "expected a list of runs, or keys and `runs`, got 'text'"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(values, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "tiny.yaml")
    (tmp_path / "sweep.yaml").write_text(json.dumps(values))
    with pytest.raises(LrfdynError, match=message):
        load_sweep(tmp_path / "sweep.yaml")


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        ({"a": "b"}, "sweep: a-seed0: teacher: unknown name 'b'; known: a-seed0"),
        ({"a": "a-seed0"}, "sweep: teacher: a-seed0 <- a-seed0 goes in a circle"),
        ({"a": "b-seed0", "b": "c-seed0", "c": "b-seed0"}, "a-seed0 <- b-seed0 <- c-seed0 <- b-seed0 goes in a circle"),
    ],
)
def test_a_teacher_is_another_run_of_the_list(teachers, message, recipe):
    with pytest.raises(LrfdynError, match=message):
        plan_runs([{"recipe": recipe, "name": name, "teacher": teacher} for name, teacher in teachers.items()])
    with pytest.raises(LrfdynError, match=r"a: teacher: stands there beside distill\.teacher"):
        plan_runs([{"recipe": recipe, "name": "a", "teacher": "b"}], {"distill.teacher": "folder"})


def test_the_runs_of_the_cifar100_table_have_their_recipe():
    runs = load_sweep(BENCHMARKS / "cifar100.yaml", {"data.root": "/data"})
    assert [run.group for run in runs] == [
        "ssa_100", "lrf_dyn_100", "lrf_ssa_100", "causal_ssa_100", "lrf_dyn_omega5_100", "lrf_ssa_omega5_100",
        "lrf_dyn_omega0_100", "lrf_dyn_qkv_100",
    ]  # fmt: skip
    assert {run.config.schedule.total_epochs for run in runs} == {100}
    assert {run.config.model.name for run in runs} == {"spikformer_4_384"}
    assert [run.config.model.dilations for run in runs][4:7] == [(1, 3, 5), (1, 3, 5), ()]


def test_table_3_is_one_recipe_and_three_seeds():
    values = read_yaml(BENCHMARKS / "table3.yaml")
    assert values["seeds"] == [0, 1, 2]
    runs = plan_runs({**values, "seeds": [0]}, {"data.root": "/data"})
    first, *_ = runs
    allowed = {f"model.{key}" for key in ATTENTION_KEYS}
    for run in runs:
        changed = {line.partition(":")[0] for line in differences(first.config.as_dict(), run.config.as_dict())}
        assert changed <= allowed, run.name
    assert [stage.epochs for stage, _ in first.config.in_stages()] == [8, 2]
    cells = {(run.config.model.attention, run.config.model.dilations) for run in runs[:12]}
    steps = [(1,), (1, 3), (1, 3, 5)]
    assert cells == {("ssa", None), ("lrf_dyn", ()), ("causal_ssa", ()),
                     *product(("lrf_ssa", "lrf_dyn", "causal_ssa"), steps)}  # fmt: skip
    assert len({run.config.fingerprint() for run in runs}) == len(runs) == 17


@pytest.mark.parametrize(
    ("file", "model", "epochs"), [("qkformer.yaml", "qkformer_4_384", 40), ("nmnist.yaml", "spikformer_dvs_2_256", 20)]
)
def test_three_attentions_by_one_schedule(file, model, epochs):
    values = read_yaml(BENCHMARKS / file)
    assert values["seeds"] == [0, 1, 2]
    first, *others = runs = plan_runs({**values, "seeds": [0]}, {"data.root": "/data"})
    assert [run.config.model.attention for run in runs] == ["ssa", "lrf_ssa", "lrf_dyn"]
    assert {run.config.model.name for run in runs} == {model}
    assert {run.config.schedule.total_epochs for run in runs} == {epochs}
    for run in others:
        changed = {line.partition(":")[0] for line in differences(first.config.as_dict(), run.config.as_dict())}
        assert changed <= {"model.attention", "model.dilations", "model.norm"}


@pytest.mark.parametrize(
    ("file", "runs"),
    [
        ("table3", 51),
        ("cifar100", 8),
        ("qkformer", 9),
        ("fast", 7),
        ("flagship", 13),
        ("vit", 6),
        ("nmnist", 9),
        ("digits", 9),
        ("tiny_imagenet", 12),
        ("ade20k", 3),
        ("pets", 6),
        ("qkformer_long", 3),
    ],
)
def test_a_dry_run_of_every_sweep(file, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(BENCHMARKS / f"{file}.yaml"), "--data.root", "/data", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == runs
    assert all(f"--out results/sweeps/{file}/runs/" in line for line in lines)
    assert not list(tmp_path.iterdir())


def chosen(file: str, seed: int = 0) -> dict[str, TrainConfig]:
    """The settings of a sweep's runs with this seed, by the name of the row, as they are trained."""
    sweep = Sweep(load_sweep(BENCHMARKS / f"{file}.yaml", {"data.root": "/data"}), Path("out"))
    return {run.group: run.config for run in sweep.runs if run.config.run.seed == seed}


def changed_keys(first: TrainConfig, second: TrainConfig) -> set[str]:
    return {line.partition(":")[0] for line in differences(first.as_dict(), second.as_dict())}


def test_the_sweep_for_time_is_made_of_the_recipes():
    """All seeds learn from one teacher, which is trained once."""
    rows = chosen("fast")
    taught, alone = rows["lrf_dyn_omega5_distilled"], rows["lrf_dyn_omega5_fast"]
    assert [row.schedule.total_epochs for row in rows.values()] == [80, 128, 150]
    assert {*chosen("fast", seed=2)} == {"lrf_dyn_omega5_distilled", "lrf_dyn_omega5_fast"}
    same = chosen("fast", seed=2)["lrf_dyn_omega5_distilled"]
    assert changed_keys(taught, same) == {"run.seed"}
    assert taught.distill.teacher == str(Path("out", "runs", "resnet-seed0"))
    attention = {"attention": "lrf_dyn", "dilations": (1, 3, 5)}
    assert changed_keys(alone, load_recipe("cifar100_spikformer_fast", attention)) == set()
    assert changed_keys(taught, load_recipe("cifar100_spikformer_distilled", attention)) == {"distill.teacher"}


def test_the_flagship_runs_come_in_pairs_of_one_schedule():
    rows = chosen("flagship")
    first, second, teacher, *taught = rows.values()
    for pair in ((first, second), taught):
        assert changed_keys(*pair) == {"model.attention", "model.dilations"}
    assert {row.schedule.total_epochs for row in (first, second, *taught)} == {300}
    assert (teacher.model.name, teacher.schedule.total_epochs) == ("resnet18_cifar", 240)
    assert taught[0].distill.teacher == str(Path("out", "runs", "resnet-seed0"))
    kept = load_recipe(BENCHMARKS.parent / "results" / "cifar100" / "lrf_dyn_omega5_strong_300" / "recipe.yaml")
    assert changed_keys(first, kept) == set()


def test_the_vit_has_the_settings_of_spikformer():
    rows = chosen("vit")
    strong = load_recipe("cifar100_spikformer_strong", epochs=300)
    assert changed_keys(rows["vit"], load_recipe("cifar100_vit")) == set()
    assert changed_keys(rows["vit_strong"], strong) == {"model.name", "model.attention", "model.time_steps"}


@pytest.mark.parametrize(
    ("file", "models", "epochs", "runs"),
    [
        ("tiny_imagenet.yaml", {"sdt_v3_s", "spikformer_8_384", "qkformer_10_384"}, 100, 12),
        ("ade20k.yaml", {"sdt_v3_s"}, 60, 3),
        ("pets.yaml", {"sdt_v3_s"}, 100, 6),
        ("qkformer_long.yaml", {"qkformer_4_384"}, 410, 3),
    ],
)
def test_every_host_has_three_attentions_by_one_schedule(file, models, epochs, runs):
    """Runs differ in host, attention, backbone and seed alone."""
    planned = plan_runs(read_yaml(BENCHMARKS / file), {"data.root": "/data"})
    assert len(planned) == len({run.config.fingerprint() for run in planned}) == runs
    rows = {(run.config.model.name, run.config.model.attention) for run in planned}
    assert rows == set(product(models, ("ssa", "lrf_ssa", "lrf_dyn")))
    assert {run.config.schedule.total_epochs for run in planned} == {epochs}
    first, *others = (run.config.as_dict() for run in planned)
    for other in others:
        changed = {line.partition(":")[0] for line in differences(first, other)}
        assert all(key.startswith("model.") or key == "run.seed" for key in changed), changed
    lrf = {(run.config.model.attention, run.config.model.dilations) for run in planned if run.config.model.dilations}
    assert file == "pets.yaml" or lrf == {("lrf_ssa", (1, 3, 5)), ("lrf_dyn", (1, 3, 5))}


def test_the_backbones_of_ade20k_are_runs_of_tiny_imagenet():
    """With the same attention and its options, so that their weights fit."""
    known = {run.name: run.config.model for run in plan_runs(read_yaml(BENCHMARKS / "tiny_imagenet.yaml"))}
    for run in plan_runs(read_yaml(BENCHMARKS / "ade20k.yaml")):
        own, source = run.config.model, known[Path(run.config.model.backbone).name]
        assert Path(own.backbone).parent == Path("results/sweeps/tiny_imagenet/runs")
        for key in ("name", "attention", "dilations", "norm", "token", "directions", "time_steps"):
            assert getattr(own, key) == getattr(source, key), key


def write_sweep(path: Path, **values):
    path.write_text(dump_yaml(values), encoding="utf-8")
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes")
def test_runs_side_by_side_and_one_that_fails(tmp_path, recipe, capsys, monkeypatch):
    pytest.importorskip("accelerate")
    root, out, keep = str(tmp_path / "data"), tmp_path / "out", tmp_path / "keep"
    runs = [{"name": "good", "seeds": [0, 1]}, {"name": "bad", "model.weights": "nowhere.safetensors"}]
    file = write_sweep(tmp_path / "sweep.yaml", recipe=recipe, epochs=1, runs=runs)
    command = ["sweep", file, "--out", str(out), "--together", "2", "--keep", str(keep), "--data.root", root]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("lrfdyn train") == 3
    assert not out.exists()
    assert main(command) == 1
    text = capsys.readouterr().out.replace("\n", "")
    assert f"bad-seed0: failed, see {out / 'runs' / 'bad-seed0' / 'console.txt'}" in text
    assert "nowhere.safetensors" in (out / "runs" / "bad-seed0" / "console.txt").read_text()
    found = json.loads((out / "sweep.json").read_text())
    assert [row["state"] for row in found["runs"]] == ["ended", "failed", "ended"]
    first, _, second = (row["accuracy"] for row in found["runs"])
    assert found["groups"][0]["accuracy_mean"] == pytest.approx((first + second) / 2)
    assert "good, mean of 2" in text
    with (out / "table.csv").open() as table:
        assert [row["name"] for row in csv.DictReader(table)] == ["good-seed0", "bad-seed0", "good-seed1"]
    assert sorted(path.name for path in keep.iterdir()) == ["good-seed0", "good-seed1"]
    summary = json.loads((keep / "good-seed0" / "summary.json").read_text())
    assert summary["beside"] == "1 of bad-seed0, good-seed1"
    assert str(out) not in summary["command"]
    assert "--out results/keep/good-seed0" in summary["command"]
    assert all(root not in path.read_text() for path in (keep / "good-seed0").iterdir())

    # Again, without the one that fails: nothing is trained a second time, and no process is started.
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    file = write_sweep(tmp_path / "sweep.yaml", recipe=recipe, epochs=1, runs=runs[:1])
    assert main(["sweep", file, "--out", str(out), "--json"]) == 0
    assert [row["accuracy"] for row in json.loads(capsys.readouterr().out)["runs"]] == [first, second]
    # Other settings under the same name are an error before anything else happens.
    assert main(["sweep", file, "--out", str(out), "--optimizer.learning_rate", "0.5"]) == 2
    assert "optimizer.learning_rate: 0.005 there, 0.5 here" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes")
def test_a_teacher_is_trained_first(tmp_path, recipe, capsys):
    """Wherever it stands in the list; whom a teacher that fails was to teach is not started."""
    pytest.importorskip("accelerate")
    out, keep = tmp_path / "out", tmp_path / "keep"
    bad = {"name": "bad", "model.weights": "nowhere.safetensors"}
    runs = [{"name": "pupil", "teacher": "good-seed0"}, {"name": "lost", "teacher": "bad-seed0"}, {"name": "good"}, bad]
    file = write_sweep(tmp_path / "sweep.yaml", recipe=recipe, epochs=1, runs=runs)
    command = ["sweep", file, "--out", str(out), "--together", "2", "--keep", str(keep)]
    assert main([*command, "--dry-run"]) == 0
    assert f"--distill.teacher {out / 'runs' / 'good-seed0'}" in capsys.readouterr().out
    ended: list[str] = []

    class Watch(SweepReporter):
        def end(self, run, row):
            ended.append(f"{run.group} {row['state']}, {row['options']}".replace("nowhere.safetensors", "-"))

    sweep = Sweep(load_sweep(Path(file)), out, together=2)
    sweep.run(Watch(), keep=keep)
    assert sorted(ended) == ["bad failed, weights -", "good ended, ", "lost failed, teacher bad-seed0",
                             "pupil ended, teacher good-seed0"]  # fmt: skip
    assert ended.index("good ended, ") < ended.index("pupil ended, teacher good-seed0")
    assert sweep.console(sweep.runs[1]).read_text() == "not started: its teacher, bad-seed0, failed\n"
    summary = json.loads((keep / "pupil-seed0" / "summary.json").read_text())
    good = json.loads((keep / "good-seed0" / "summary.json").read_text())
    assert summary["teacher"] == {"name": "results/keep/good-seed0", **{key: good[key] for key in ("top1", "train_s")}}
    kept = load_recipe(keep / "pupil-seed0" / "recipe.yaml")
    assert kept.distill.teacher == "results/keep/good-seed0"
    assert summary["fingerprint"] == kept.fingerprint()

    # Again: only what failed is tried, and what has ended stands as it is.
    ended.clear()
    Sweep(load_sweep(Path(file)), out).run(Watch())
    assert [line.partition(",")[0] for line in ended] == ["pupil ended", "good ended", "bad failed", "lost failed"]


def end_run(sweep, run):
    """Leaves what a run does that has ended."""
    folder = sweep.folder(run)
    folder.mkdir(parents=True)
    command = f"lrfdyn train tiny --data.root data --out {folder}"
    facts = {"data": "digits", "fingerprint": run.config.fingerprint(), "command": command, "top1": 90.0}
    (folder / "summary.json").write_text(json.dumps(facts))
    (folder / "recipe.yaml").write_text(dump_yaml(run.config.as_dict()))
    (folder / "log.jsonl").write_text("")


def test_a_run_is_kept_as_soon_as_it_ends(tmp_path, recipe, monkeypatch):
    """Under the path that it has then, without that of the data."""
    monkeypatch.chdir(tmp_path)
    runs = plan_runs([{"recipe": recipe, "name": name, "data.root": "data"} for name in "ab"])
    sweep, kept = Sweep(runs, tmp_path / "out"), Path("results") / "some" / "table"

    def each_end(waiting, reporter):
        for run in waiting:
            end_run(sweep, run)
            yield run
            assert (kept / run.name / "log.jsonl").is_file()

    monkeypatch.setattr(sweep, "_each_end", each_end)
    sweep.run(keep=kept)
    summary = json.loads((kept / "a-seed0" / "summary.json").read_text())
    assert summary["command"] == "lrfdyn train tiny --data.root DATA --out results/some/table/a-seed0"
    assert summary["data"] == "digits"
    assert load_recipe(kept / "a-seed0" / "recipe.yaml").data.root == "DATA"


def test_every_run_is_kept_once(tmp_path, recipe, monkeypatch):
    """What ended before, when the sweep begins, with one table; then each run when it ends, and no other."""
    sweep = Sweep(plan_runs([{"recipe": recipe, "name": name} for name in "abcd"]), tmp_path / "out")
    for run in sweep.runs[:2]:
        end_run(sweep, run)
    kept, done = [], []
    monkeypatch.setattr(sweep, "keep", lambda run, target: kept.append(run.group))

    def write_table(path, rows):
        done.append([row["group"] for row in rows if row["state"] == "ended"])

    def each_end(waiting, reporter):
        for run in waiting:
            end_run(sweep, run)
            yield run

    monkeypatch.setattr("lrfdyn.training.sweep.write_table", write_table)
    monkeypatch.setattr(sweep, "_each_end", each_end)
    rows = sweep.run(keep=tmp_path / "keep")
    assert kept == ["a", "b", "c", "d"]
    assert done == [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    assert [row["accuracy"] for row in rows] == [90.0] * 4


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes")
def test_ctrl_c_and_again_gives_the_same_weights(tmp_path):
    pytest.importorskip("accelerate")
    recipe = str(write_recipe(tmp_path / "tiny.yaml"))
    file = write_sweep(tmp_path / "sweep.yaml", runs=[{"recipe": recipe, "name": "tiny"}])
    out = tmp_path / "out"
    folder = out / "runs" / "tiny-seed0"
    process = subprocess.Popen(
        [sys.executable, "-m", "lrfdyn", "sweep", file, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # A shell without job control starts what is in the background deaf to Ctrl-C, and that is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list_checkpoints(folder / "checkpoints") and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(LrfdynError, match="another process is using"), sole_user(out):
        pass
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, output
    assert "goes on from here" in output
    assert "Traceback" not in output
    assert not list(out.glob("**/.lrfdyn-*"))
    assert f"of {STEPS} (SIGTERM)" in (folder / "console.txt").read_text()
    assert not (folder / "summary.json").exists()

    train(tiny(), tmp_path / "whole")
    ended: list[str] = []

    class Watch(SweepReporter):
        def end(self, run, row):
            ended.append(row["state"])

    Sweep(load_sweep(Path(file)), out, threads=1).run(Watch())  # as many as before: sums keep their order
    assert ended == ["ended"]
    assert "resuming at step" in (folder / "console.txt").read_text()
    assert_same_end(folder, tmp_path / "whole")


def test_a_run_does_not_outlive_its_sweep(monkeypatch):
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert Stop().reason == 0
    monkeypatch.setenv(PARENT, "1" if os.getppid() != 1 else "2")
    assert Stop().reason == signal.SIGTERM


def test_restart_removes_what_is_of_its_runs(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(Sweep, "_each_end", lambda *_: iter(()))
    sweep = Sweep(plan_runs({"runs": [{"recipe": recipe, "name": "a"}]}), tmp_path / "out")
    ours, mine = ["summary.json", "model/config.json"], ["notes.txt", "../b-seed0/summary.json"]
    for name in (*ours, *mine):
        path = sweep.folder(sweep.runs[0]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    sweep.run(restart=True)
    assert [(sweep.folder(sweep.runs[0]) / name).exists() for name in (*ours, *mine)] == [False, False, True, True]


def test_bars_of_what_has_begun(recipe, tmp_path):
    runs = plan_runs({"recipe": recipe, "epochs": 2, "runs": [{"name": name} for name in "abc"]})
    shown = bars(Console(file=io.StringIO()))
    told = Bars(Sweep(runs, tmp_path), shown)
    (whole, *each) = shown.tasks
    assert (whole.total, [task.visible or task.started for task in each]) == (6, [False] * 3)
    told.end(runs[0], {"state": "ended", "measure": "top1", "accuracy": 90.0, "wall_s": 3})  # in an earlier call
    told.begin(runs[1])
    told.progress(runs[1], {"kind": "step", "epoch": 1, "step": 3, "total_steps": 24, "loss": 1.0})
    assert (whole.completed, whole.total) == (0.25, 4)
    told.progress(runs[1], {"kind": "step", "epoch": 1, "step": 3, "total_steps": 24, "loss": None})  # inf, in fp16
    assert each[1].fields["news"].startswith("loss - ")
    assert [(task.visible, task.started, task.completed) for task in each[1:]] == [
        (True, True, 0.25),
        (False, False, 0),
    ]
    told.end(runs[1], {"state": "ended", "measure": "top1", "accuracy": 90.0, "wall_s": 3})
    told.begin(runs[2])
    told.end(runs[2], {"state": "failed"})
    assert whole.completed == whole.total == 2


def test_the_second_ctrl_c_stops_runs_now(recipe, tmp_path, monkeypatch):
    """A run that is asked to stop finishes its step; asked twice, it is killed."""
    told: list[str] = []

    class Process:
        poll, terminate, kill = (lambda self, word=word: told.append(word) for word in ("poll", "terminate", "kill"))

        def wait(self):
            raise KeyboardInterrupt

    class Watch(SweepReporter):
        def stopping(self):
            told.append("stopping")

        def progress(self, run, record):
            raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "_start", lambda *_: Process())
    monkeypatch.setattr("lrfdyn.training.sweep.read_json_lines", lambda *_: [{}])
    monkeypatch.setattr("lrfdyn.training.sweep.POLL_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        list(Sweep(plan_runs([recipe]), tmp_path)._each_end(plan_runs([recipe]), Watch()))
    assert told == ["poll", "terminate", "stopping", "kill"]


def test_spread_over_seeds():
    rows = [{"group": g, "accuracy": a} for g, a in (("x", 1.0), ("y", None), ("x", 3.0))]
    assert group_rows(rows) == [
        {"group": "x", "runs": 2, "accuracy_mean": 2.0, "accuracy_std": pytest.approx(2**0.5)},
        {"group": "y", "runs": 0, "accuracy_mean": None, "accuracy_std": None},
    ]
