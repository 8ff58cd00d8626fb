"""How the results page reads runs: what compares, what several seeds show, what a difference says of the paper's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
import yaml

from benchmarks import time_to_accuracy
from docs.parts import readme, times
from docs.parts import results as page
from lrfdyn.errors import LrfdynError
from lrfdyn.training.sweep import plan_runs

ROOT = Path(__file__).parent.parent
RECIPE = yaml.safe_load((ROOT / "results" / "cifar100" / "ssa_100" / "recipe.yaml").read_text())
RUNS = {
    "ssa": {"attention": "ssa"},
    "lrf_ssa_1": {"attention": "lrf_ssa", "dilations": [1]},
    "lrf_ssa_5": {"attention": "lrf_ssa", "dilations": [1, 3, 5]},
    "lrf_dyn": {"attention": "lrf_dyn"},
    "lrf_dyn_0": {"attention": "lrf_dyn", "dilations": []},
    "lrf_dyn_3": {"attention": "lrf_dyn", "dilations": [1, 3]},
    "lrf_dyn_5": {"attention": "lrf_dyn", "dilations": [1, 3, 5]},
    "lrf_dyn_qkv": {"attention": "lrf_dyn", "token": "qkv"},
    "lrf_dyn_both": {"attention": "lrf_dyn", "directions": 2},
    "causal_ssa": {"attention": "causal_ssa"},
    "lrf_ssa_norm": {"attention": "lrf_ssa", "dilations": [1, 3, 5], "norm": True},
    "ssa_frozen": {"attention": "ssa", "train_qk": False},
}


def run(kind: str, top1: float, seed: int = 0, length: int = 10, late: float | None = None, **changed: Any) -> page.Run:
    """A run with made-up numbers: `late` at the test before the last. `changed` are keys as `section__key`."""
    recipe = copy.deepcopy(RECIPE)
    recipe["model"] |= RUNS[kind]
    recipe["run"]["seed"] = seed
    published = page.published(length)["schedule"]
    recipe["schedule"] = {**recipe["schedule"], **published}
    for key, value in changed.items():
        section, _, name = key.partition("__")
        recipe[section][name] = value
    tests = [(length - 1, top1 if late is None else late), (length, top1)]
    epochs = [{"epoch": e, "step": e, "train_loss": 1.0, "top1": value} for e, value in tests]
    summary = {"top1": top1, "parameters": 9_000_000, "images_per_s": 14_000.4, "wall_s": 390.6, "device": "H200"}
    return page.Run(f"{kind}_{seed}", recipe, epochs, summary)


def rows(text: str) -> dict[str, list[str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {first: rest for first, *rest in cells}


def test_cells_of_the_table():
    runs = [run("ssa", 70.0), run("lrf_ssa_1", 71.0), run("lrf_dyn_3", 72.0), run("lrf_dyn_3", 73.0, seed=1)]
    runs += [run("lrf_dyn", 74.25), run("lrf_dyn_qkv", 69.5), run("lrf_dyn_both", 74.0)]
    runs += [run("lrf_ssa_norm", 71.5), run("ssa_frozen", 69.0)]
    table = rows(page.comparison(runs))
    assert table["LRF-SSA, here"] == ["70.00", "71.00", "not run", "not run", "not run"]
    assert table["LRF-SSA (norm), here"] == ["not run", "not run", "not run", "71.50", "not run"]
    assert table["SSA (q, k frozen), here"] == ["69.00", "not run", "not run", "not run", "not run"]
    assert table["LRF-SSA, paper"] == ["77.86", "78.26", "78.52", "78.64", ""]
    assert table["LRF-Dyn, here"] == ["not run", "not run", "72.50 ± 0.71 (n = 2)", "not run", "74.25"]
    assert table["LRF-Dyn (qkv token), here"][-1] == "69.50"
    assert table["LRF-Dyn (two directions), here"][-1] == "74.00"
    assert "causal SSA, here" not in table
    assert rows(page.highest(runs))["paper"][0] == "78.64"
    assert rows(page.highest(runs))["here"][:3] == ["74.25", "74.25 over 2", "LRF-Dyn (3, 5)"]


def test_time_to_accuracy(tmp_path, capsys):
    """From the folders of runs that had their device to themselves, and were tested on test images."""
    lines = [{"recipe": "fast", "seed": s, "top1": 70.0 + s, "train_s": 290.0 + s, "epochs": 9, "device": "H200"}
             for s in (1, 0)]  # fmt: skip
    for line in lines:
        (tmp_path / str(line["seed"])).mkdir()
        (tmp_path / str(line["seed"]) / "summary.json").write_text(json.dumps({**line, "wall_s": 400.0}))
    out = tmp_path / "time.json"
    assert time_to_accuracy.main([str(tmp_path / "1"), str(tmp_path / "0"), "--json", str(out)]) == 0
    records = json.loads(out.read_text())
    assert records[0] == {"recipe": "fast", "seed": 0, "top1": 70.0, "seconds": 290.0, "epochs": 9, "device": "H200"}
    found = rows(times.time_to_accuracy(records))["`fast`"]
    assert found == ["0, 1", "70.50 ± 0.71 (n = 2)", "290.5", "0.0", "9", "H200"]
    assert times.time_to_accuracy([]) == "Not measured yet."
    for wrong, message in (("held_out", "was tested on held-out training images"), ("beside", "shared its device")):
        (tmp_path / "0" / "summary.json").write_text(json.dumps({**lines[1], wrong: 3}))
        with pytest.raises(SystemExit):
            time_to_accuracy.main([str(tmp_path / "0")])
        assert message in capsys.readouterr().err


def test_when_runs_first_passed_the_accuracy_of_the_paper():
    """By seconds: those of the log with the teacher's, or the images over their mean speed where it has none."""
    soon, late, never = run("lrf_dyn_5", 78.0, late=78.6), run("ssa", 79.0, late=78.5), run("lrf_dyn_0", 78.56)
    for record in (*soon.epochs, *late.epochs):
        record["images_per_s"] = 64.0
    late.epochs[1]["train_s"] = 2.5
    late.summary.update(teacher={"train_s": 10.0}, beside="another")
    first, second, *rest = times.first_passed([soon, late, never]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, second)]
    assert [row[0].partition("]")[0] for row in cells] == ["[ssa_0", "[lrf_dyn_5_0"]
    assert cells[0][1:] == ["10 of 10", "79.00", "12", "10", "79.00", "shared: another"]
    assert cells[1][1:] == ["9 of 10", "78.60", "about 18", "0", "78.00", "alone"]
    assert rest == ["", "The other run never did; the highest of its tests is 78.56 %."]
    assert times.first_passed([never]).startswith("No run has passed it yet.")


def test_a_sweep_has_tables_of_its_own():
    """The same cell and seed may have been run before."""
    runs = [run("ssa", 70.0), page.replace(run("ssa", 71.0), name="fast/ssa-seed0")]
    assert [settings for _, settings in page.groups(runs)] == [", sweep fast", ""]
    assert rows(page.accuracy(runs))["LRF-SSA, here"][0] == "70.00"  # the last one
    assert "### 10 epochs, sweep fast\n" in page.accuracy(runs)


def test_the_training_of_a_teacher_counts(tmp_path, capsys):
    line = {"recipe": "taught", "seed": 0, "top1": 70.0, "train_s": 200.5, "epochs": 9, "device": "H200"}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**line, "teacher": {"name": "t", "top1": 80.0, "train_s": 80.0}}))
    assert time_to_accuracy.main([str(tmp_path), "--json", str(tmp_path / "time.json")]) == 0
    records = json.loads((tmp_path / "time.json").read_text())
    assert (records[0]["seconds"], records[0]["teacher_seconds"]) == (280.5, 80.0)
    assert rows(times.time_to_accuracy(records))["`taught`"][2:4] == ["280.5", "80.0"]
    for teacher, message in (({"name": "timm's"}, "does not say how long"), ({"train_s": 1, "beside": "x"}, "shared")):
        path.write_text(json.dumps({**line, "teacher": teacher}))
        with pytest.raises(SystemExit):
            time_to_accuracy.main([str(tmp_path)])
        assert f"the teacher of {tmp_path} {message}" in capsys.readouterr().err


def test_runs_with_stages_stand_apart_and_those_on_held_out_images_are_not_there(tmp_path):
    stages = [{"epochs": 8, "time_steps": 1, "tau": 1.5}]
    staged = run("ssa", 70.0, schedule__stages=stages)
    assert staged.settings == ", other settings, 8 with T = 1"
    taught = run("ssa", 70.0, distill__teacher="results/t")
    assert taught.settings == ", other settings, with a teacher"
    assert ("distill.teacher", None, "results/t") in page.changes(taught)
    (tmp_path / "held").mkdir()
    for out, held in ((tmp_path, None), (tmp_path / "held", 5000)):
        recipe = {**staged.recipe, "data": {**staged.recipe["data"], "held_out": held}}
        (out / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert [found.name for found in page.read_runs(tmp_path)] == ["."]


def test_a_run_that_did_not_end_is_listed_and_drawn_but_not_compared(tmp_path):
    stopped = page.Run("stopped", run("causal_ssa", 0.0).recipe, run("causal_ssa", 60.0).epochs[:1], None)
    runs = [run("ssa", 70.0), stopped]
    assert "causal SSA" not in page.accuracy(runs)
    (listed,) = [line for line in page.every_run(runs).splitlines() if "causal SSA" in line]
    assert "stopped at 9" in listed
    page.draw_curves(runs, tmp_path / "curves.svg")
    figure = (tmp_path / "curves.svg").read_text()
    assert "causal SSA" in figure
    page.draw_curves(runs, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == figure
    no_test = page.Run("new", stopped.recipe, [{"epoch": 1, "step": 1, "train_loss": 4.0}], None)
    page.draw_curves([no_test], tmp_path / "new.svg")
    assert page.accuracy([]) == page.highest([]) == "No run is recorded yet."


def test_lengths_and_settings_are_tables_of_their_own_that_say_what_changed():
    runs = [run("ssa", 70.0), run("ssa", 60.0, length=20), run("ssa", 65.0, schedule__mix_epochs=7)]
    runs.append(run("lrf_dyn", 75.0, augmentation__crop="pad", augmentation__cutmix=0.5))
    text = page.accuracy(runs)
    titles = [line for line in text.splitlines() if line.startswith("###")]
    assert titles == [
        "### 20 epochs", "### 10 epochs, strong augmentation", "### 10 epochs, mixed until epoch 7", "### 10 epochs",
    ]  # fmt: skip
    strong = text.partition("strong augmentation")[2].partition("###")[0]
    assert rows(strong)["LRF-Dyn, here"][-1] == "75.00"
    assert rows(strong)["`augmentation.crop`"] == ["`none`", "`pad`"]
    assert rows(strong)["`augmentation.cutmix`"] == ["`0.0`", "`0.5`"]
    assert "published" not in text.rpartition("### 10 epochs\n")[2]
    assert run("ssa", 1.0, optimizer__learning_rate=1.0).settings == ", other settings"


def test_runs_that_differ_in_more_than_the_table_shows_are_refused():
    """A mean over two precisions would pass for one over seeds."""
    runs = [run("ssa", 70.0), run("lrf_dyn", 72.0), run("ssa", 60.0, seed=1)]
    page.comparison(runs)
    with pytest.raises(LrfdynError, match=r"ssa_2 and ssa_0 do not compare: run.precision: bf16 there, fp32 here"):
        page.comparison([*runs, run("ssa", 60.0, seed=2, run__precision="fp32")])
    with pytest.raises(LrfdynError, match="ssa_1 and ssa_1 are the same"):
        page.comparison([*runs, run("ssa", 61.0, seed=1)])


def test_settings_that_only_one_version_knows_do_not_count():
    new = run("ssa", 70.0, seed=1)
    new.recipe["model"]["something_new"] = 3
    page.comparison([run("ssa", 70.0), new])


def test_a_run_with_the_loss_of_every_step_stands_apart():
    """Also from runs of before, whose recipes do not know that loss."""
    tet = run("ssa", 70.0, seed=1)
    tet.recipe["loss"] = {"tet": 0.001}
    plain = run("ssa", 70.0, seed=2)
    plain.recipe["loss"] = {"tet": None}
    assert plain.settings == ""
    assert tet.settings == ", other settings"
    page.comparison([run("ssa", 70.0), plain])
    with pytest.raises(LrfdynError, match=r"do not compare: loss.tet: None there, 0.001 here"):
        page.comparison([run("ssa", 70.0), tet])


def test_the_papers_conclusions_are_held_against_our_runs():
    runs = [run("ssa", 70.0), run("lrf_ssa_5", 70.3), run("causal_ssa", 71.0), run("lrf_dyn_0", 69.0)]
    table = rows(page.readings(runs))
    assert table["LRF helps SSA"] == ["+0.30", "+0.30", "0.50", "+0.78", page.NOT_SEEN]
    assert table["SSA loses by being causal"] == ["+1.00", "+1.00", "0.50", "-3.56", page.CONTRARY]
    assert table["LRF-Dyn without LRF does as well as SSA"][-1] == page.CONTRARY
    assert "LRF helps LRF-Dyn" not in table, "one of its two runs is not there"
    table = rows(page.readings([*runs, run("lrf_dyn_5", 70.1)]))
    assert table["LRF helps LRF-Dyn"] == ["+1.10", "+1.10", "0.50", "+0.79", page.SEEN]
    assert table["LRF-Dyn does as well as LRF-SSA"][-1] == "as in the paper: no difference to speak of"
    assert page.readings(runs[:1]) == ""


def test_a_small_difference_is_still_one_that_the_paper_expects():
    """More kernels bring it 0.38, less than one seed tells; several may tell it."""
    runs = [run(kind, top1 + 0.05 * seed, seed=seed) for seed in range(3)
            for kind, top1 in (("lrf_ssa_1", 70.0), ("lrf_ssa_5", 70.4))]  # fmt: skip
    assert rows(page.readings(runs))["More kernels help LRF-SSA"][-1] == page.SEEN
    assert rows(page.readings(runs[:2]))["More kernels help LRF-SSA"][-1] == page.NOT_SEEN


def test_what_the_paper_does_not_ask_is_better_or_worse():
    base = [run("lrf_dyn_5", 70.0), run("ssa", 70.0)]
    for top1, word in ((71.0, "**better**"), (69.0, "**worse**"), (70.2, page.NOT_SEEN)):
        both = run("lrf_dyn_both", top1, model__dilations=[1, 3, 5])
        table = rows(page.readings([*base, both, run("ssa_frozen", top1)]))
        assert table["Two directions against one"][-2:] == ["", word]
        assert table["q and k as they were drawn"][-2:] == ["", word]


def test_a_spread_that_hides_half_a_percent_shows_no_equality():
    for spread, seen in ((0.1, True), (1.0, False)):
        runs = [run(kind, 70.0 + spread * seed, seed=seed) for kind in ("ssa", "lrf_dyn_0") for seed in range(3)]
        reading = rows(page.readings(runs))["LRF-Dyn without LRF does as well as SSA"][-1]
        assert reading.startswith(page.SEEN) == seen


def test_every_conclusion_is_listed_with_the_papers_difference():
    table = rows(page.conclusions())
    assert {*page.CLAIMS} <= {*table}
    assert table["More kernels help causal SSA"] == ["causal SSA Ω<=5 minus causal SSA Ω<=1", "+1.20", "more"]
    for claim, (_, _, expected) in page.CLAIMS.items():
        paper = float(table[claim][1] or 0)
        assert expected == 0 or (expected or 0) * paper > 0 or (expected is None and not table[claim][1]), claim


def whole(length: int = 10, **changed: Any) -> list[page.Run]:
    """A run of every cell of the paper's table."""
    runs = [run("ssa", 60.0, length=length, **changed)]
    for kind in ("lrf_ssa_1", "lrf_dyn", "causal_ssa"):
        for d in ([], [1], [1, 3], [1, 3, 5])[kind == "lrf_ssa_1" :]:
            runs.append(run(kind, 60.0 + len(d), length=length, model__dilations=d, **changed))
    return runs


def test_the_table_that_is_whole_comes_first_and_no_table_of_the_readme_has_two_schedules():
    partial = [run("ssa", 70.0, length=20), run("lrf_dyn", 69.0, length=30)]
    assert [length for length, _ in page.groups([*partial, *whole()[1:]])] == [30, 20, 10]
    assert [length for length, _ in page.groups([*partial, *whole()])] == [10, 30, 20]
    first, second = readme.cifar100([*partial, *whole()]).split("\n\n20 epochs:\n\n")
    assert first.startswith("10 epochs:")
    assert rows(first)["LRF-Dyn, here"] == ["60.00", "61.00", "62.00", "63.00"]
    assert rows(second)["SSA"][1] == "70.00"
    assert "LRF-Dyn" not in second
    assert "10 epochs" not in readme.cifar100([*partial, *whole()[1:]]), "neither whole nor the best"
    assert readme.cifar100([]) == "No run is recorded yet."


def test_a_line_for_every_cell_has_all_of_its_runs():
    runs = [run("ssa", 70.0, seed=seed) for seed in range(3)] + [run("lrf_dyn", 71.0)]
    lines = [line for line in page.every_run(runs).splitlines() if "results/cifar100" in line]
    assert len(lines) == 2
    (ssa,) = [line for line in lines if line.startswith("| SSA ")]
    assert all(f"cifar100/ssa_{seed}/{file}" in ssa for seed in range(3)
               for file in ("recipe.yaml", "summary.json", "log.jsonl"))  # fmt: skip


def test_batch_and_course_of_the_rate_are_among_what_changed():
    changed = {"run__batch_size": 512, "schedule__rates": [[0, 1], [10, 0]], "schedule__warmup_epochs": 20}
    keys = [key for key, _, _ in page.changes(run("ssa", 70.0, **changed))]
    assert keys == ["schedule.rates", "run.batch_size"]
    assert page.brief([{"epochs": 8, "tau": None}]) == [{"epochs": 8}]


@pytest.mark.parametrize(
    ("ninth", "last", "reading"),
    [(70.0, 70.8, "NOT_SEEN"), (68.0, 70.8, "NOT_SEEN"), (71.0, 70.3, "NOT_SEEN"), (71.0, 70.8, "SEEN"),
     (69.0, 69.2, "CONTRARY")],
)  # fmt: skip
def test_a_last_epoch_that_the_tests_before_it_do_not_bear_out_shows_nothing(ninth, last, reading):
    runs = [run("ssa", 70.0), run("lrf_ssa_5", last, late=ninth)]
    assert rows(page.readings(runs))["LRF helps SSA"][-1] == getattr(page, reading)


def test_several_seeds_decide_by_their_own_spread():
    steady = [run("ssa", 70.0 + 0.1 * seed, seed=seed) for seed in range(3)]
    steady += [run("lrf_ssa_5", 70.4 + 0.1 * seed, seed=seed) for seed in range(3)]
    found = page.accuracies(steady)
    assert page.seed_deviation(found) == (pytest.approx(0.1), 4)
    row = rows(page.readings(steady))["LRF helps SSA"]
    assert row == ["+0.40", "+0.40", "0.23", "+0.78", page.SEEN]
    noisy = [run("ssa", 70.0 + seed, seed=seed) for seed in range(3)]
    noisy += [run("lrf_ssa_5", 71.0 + seed, seed=seed) for seed in range(3)]
    assert rows(page.readings(noisy))["LRF helps SSA"][-1] == page.NOT_SEEN
    two = page.accuracies([*steady[:2], *steady[3:5]])
    assert page.least_difference(two, *two) == page.TELLS, "too few seeds to know their spread"
    assert page.seed_deviation(page.accuracies([run("ssa", 70.0)])) == (0.0, 0)
    many = page.accuracies([run(kind, 70.0 + seed, seed=seed) for kind in ("ssa", "lrf_dyn") for seed in range(8)])
    deviation, freedom = page.seed_deviation(many)
    assert freedom == 14
    assert page.least_difference(many, *many) == pytest.approx(page.STUDENT[12] * deviation / 2), "the larger quantile"


def test_only_epochs_that_all_runs_tested_are_averaged():
    late, epochs = page.late_accuracies([run("ssa", 70.0, late=60.0), run("lrf_ssa_5", 71.0)])
    assert epochs == [9, 10]
    assert late[("LRF-SSA", ())] == [65.0]
    untested = run("lrf_ssa_5", 71.0)
    del untested.epochs[0]["top1"]
    assert page.late_accuracies([run("ssa", 70.0, late=60.0), untested])[1] == [10]


def test_other_models_have_tables_and_curves_of_their_own(tmp_path):
    """As benchmarks/qkformer.yaml leaves them: none is a run of Spikformer, and the settings are the published ones."""
    values = {**yaml.safe_load((ROOT / "benchmarks" / "qkformer.yaml").read_text()), "seeds": [0, 1]}
    for number, planned in enumerate(plan_runs(values, {"data.root": "/data"})):
        made, folder = run("ssa", 60.0 + number, length=40), tmp_path / planned.name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(planned.config.as_dict()))))
        lines = [json.dumps({"kind": "epoch", **record}) for record in made.epochs]
        (folder / "log.jsonl").write_text("\n".join(lines))
        (folder / "summary.json").write_text(json.dumps(made.summary))
    assert page.read_runs(tmp_path) == []
    runs = page.read_runs(tmp_path, "qkformer_4_384")
    assert {found.settings for found in runs} == {""}
    page.check_comparable(runs)
    text = page.other_models({"qkformer_4_384": runs})
    assert [row[:2] for row in rows(text).values()][2:] == [["1, 3, 5", "40"], ["1, 3, 5", "40"], ["", "40"]]
    assert text.count("images/cifar100_qkformer_4_384_curves.svg") == 1
    assert text.endswith("### `vit_4_384`\n\nNot measured yet.")
    pytest.importorskip("matplotlib")
    page.draw_curves(runs, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(label in drawn for label in ("SSA", "LRF-SSA (norm) (1, 3, 5)", "LRF-Dyn (1, 3, 5)", "40 epochs"))


def test_runs_are_read_from_folders(tmp_path):
    """Also from folders of a sweep, and with a last line that was cut off."""
    folder = tmp_path / "sweep" / "runs" / "ssa-seed1"
    folder.mkdir(parents=True)
    made = run("ssa", 70.0, seed=1)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(made.recipe))
    lines = [json.dumps({"kind": "epoch", **record}) for record in made.epochs]
    (folder / "log.jsonl").write_text("\n".join([json.dumps({"kind": "step", "step": 1}), *lines, '{"kind": "ep']))
    (one,) = page.read_runs(tmp_path)
    assert (one.name, one.seed, one.summary) == ("sweep/runs/ssa-seed1", 1, None)
    assert one.tests == made.tests
    (folder / "summary.json").write_text(json.dumps(made.summary))
    (folder / "evaluate_cpu_fp32.json").write_text(json.dumps({"device": "cpu", "precision": "fp32", "top1": 69.5}))
    page.read_runs.cache_clear()
    (one,) = page.read_runs(tmp_path)
    assert one.summary == made.summary
    assert one.evaluations[0]["top1"] == 69.5
    page.read_runs.cache_clear()
