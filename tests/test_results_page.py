"""The results page: made from the runs that exist, honest about those that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
from docs import make_results as page
from docs.results_claims import CONTRARY
from lrfdyn.errors import LrfdynError
from lrfdyn.training.recipes import dump_yaml, list_recipes, load_recipe

ROOT = Path(__file__).parent.parent


def record(folder: Path, recipe: str, top1: float, seed: int = 0, epochs: int = 4, ended: bool = True) -> None:
    """The files of a run, with made-up numbers."""
    name = f"cifar100_spikformer_4_384_{recipe}"
    config = load_recipe(list_recipes()[name], {"run.seed": str(seed), "schedule.cooldown_epochs": "0"})
    values = config.as_dict()
    values["schedule"] |= {"epochs": epochs, "warmup_epochs": 1}
    out = folder / f"{recipe}_seed{seed}_{epochs}"
    out.mkdir(parents=True)
    (out / "recipe.yaml").write_text(dump_yaml(values))
    count = epochs if ended else epochs - 1
    lines: list[dict[str, Any]] = [{"kind": "step", "step": 1, "loss": 4.6}]
    for epoch in range(1, count + 1):
        accuracy = top1 * epoch / count
        lines.append({"kind": "epoch", "step": epoch, "epoch": epoch, "train_loss": 4.0 / epoch, "top1": accuracy})
        lines[-1] |= {"wall_s": 2.0 * epoch}
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ep')
    if ended:
        kind = config.model.attention
        dilations = {"ssa": None}.get(
            str(kind), list((3, 5) if config.model.dilations is None else config.model.dilations)
        )
        summary = {"recipe": name, "attention": kind, "dilations": dilations, "top1": top1, "parameters": 9_000_000}
        summary |= {"images_per_s": 14_000.4, "wall_s": 390.6, "device": "NVIDIA H200", "seed": seed}
        (out / "summary.json").write_text(json.dumps(summary))


def rows(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {first: rest for first, *rest in cells}


def test_partial_set(tmp_path):
    record(tmp_path / "runs", "ssa", 70.0)
    record(tmp_path / "runs", "lrf_ssa_omega1", 71.0)
    record(tmp_path / "runs", "lrf_dyn_omega3", 72.0)
    record(tmp_path / "runs", "lrf_dyn_omega3", 73.0, seed=1)
    record(tmp_path / "runs", "lrf_dyn", 74.25)
    record(tmp_path / "runs", "lrf_dyn_qkv", 69.5)
    record(tmp_path / "runs", "causal_ssa", 65.0, ended=False)
    page.main(tmp_path / "runs", tmp_path)
    text = (tmp_path / "results.md").read_text()
    table = rows(text)
    assert table["LRF-SSA, here"] == ["70.00", "71.00", "not run", "not run", "not run"]
    assert table["LRF-SSA, paper"] == ["77.86", "78.26", "78.52", "78.64", ""]
    assert table["LRF-Dyn, here"] == ["not run", "not run", "72.50 ± 0.50 (2 seeds)", "not run", "74.25"]
    assert table["LRF-Dyn (qkv token), here"][-1] == "69.50"
    assert "LRF-Dyn with the qkv token minus that with the value, dilations [3, 5]: -4.75." in text
    assert table["causal SSA, here"] == ["not run"] * 5, "a run that did not end has no result"
    (stopped,) = (row for name, row in table.items() if "causal_ssa" in name)
    assert "stopped at 3 of 4" in stopped
    absent = text.partition("## Not run yet")[2].partition("##")[0]
    assert "`cifar100_spikformer_4_384_causal_ssa_omega0`" in absent
    assert "`cifar100_spikformer_4_384_lrf_ssa_omega3`" in absent
    assert "lrf_ssa_omega0" not in absent, "ssa is that"
    assert "lrf_dyn_omega3`" not in absent
    assert "Seeds: 2 here (0, 1)" in text
    assert "Epochs: 4 here" in text
    assert "| 74.25 | 74.25 | 9,000,000 | 14,000 |  | 391 | NVIDIA H200 |" in text
    assert "The highest here: 74.25, LRF-Dyn (3, 5), seed 0, after 4 epochs. In the paper: 78.64, LRF-SSA Ω<=5." in text
    figure = (tmp_path / "images" / "cifar100_curves.svg").read_text()
    for label in ("4 epochs", "LRF-Dyn (1, 3), seed 1", "causal SSA"):
        assert label in figure
    assert "causal SSA" in (tmp_path / "runs" / "causal_ssa_seed0_4" / "curve.svg").read_text()
    page.draw(page.read_runs(tmp_path / "runs"), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == figure


def test_other_lengths_are_not_compared_with_each_other(tmp_path):
    record(tmp_path, "ssa", 70.0, epochs=4)
    record(tmp_path, "ssa", 60.0, epochs=2, seed=1)
    text = page.render(page.read_runs(tmp_path))
    long, _, short = text.partition("## Accuracy after 2 epochs")
    assert "## Accuracy after 4 epochs" in long
    assert rows(long)["LRF-SSA, here"][0] == "70.00"
    assert rows(short.partition("## What")[0])["LRF-SSA, here"][0] == "60.00"


def test_changed_settings_are_a_table_of_their_own_that_says_what_changed(tmp_path):
    record(tmp_path, "lrf_dyn", 70.0)
    record(tmp_path, "lrf_dyn_strong", 75.0)
    text = page.render(page.read_runs(tmp_path))
    strong, _, published = text.partition("## Accuracy after 4 epochs\n")
    assert "## Accuracy after 4 epochs, strong augmentation" in strong
    assert rows(strong)["LRF-Dyn, here"][-1] == "75.00"
    assert rows(published.partition("## What")[0])["LRF-Dyn, here"][-1] == "70.00"
    assert "- augmentation.crop: none published, pad here" in strong
    assert "- augmentation.cutmix: 0.0 published, 0.5 here" in strong
    assert "published, " not in published


def test_what_a_recipe_adds_to_all_attentions_is_not_taken_for_theirs(tmp_path):
    record(tmp_path, "ssa_strong", 78.86)
    assert "minus the paper" not in page.render(page.read_runs(tmp_path)), "one row has nothing in common with others"
    record(tmp_path, "lrf_dyn_omega5_strong", 79.07)
    text = page.render(page.read_runs(tmp_path))
    assert "Here minus the paper: SSA +1.00, LRF-Dyn Ω<=5 +0.50. What they have in common, 0.50, is no" in text
    record(tmp_path, "lrf_dyn_omega0_strong", 77.28)
    text = page.render(page.read_runs(tmp_path))
    assert "Here minus the paper: SSA +1.00, LRF-Dyn w/o LRF -0.50, LRF-Dyn Ω<=5 +0.50.\n" in text


def test_runs_that_stopped_mixing_before_their_end_are_a_table_of_their_own(tmp_path):
    record(tmp_path, "ssa", 70.0)
    record(tmp_path, "lrf_dyn", 71.0)
    path = tmp_path / "ssa_seed0_4" / "recipe.yaml"
    path.write_text(path.read_text().replace("mix_epochs: null", "mix_epochs: 3"))
    text = page.render(page.read_runs(tmp_path))
    early, _, whole = text.partition("## Accuracy after 4 epochs\n")
    assert "## Accuracy after 4 epochs, mixed until epoch 3" in early
    assert rows(early)["LRF-SSA, here"][0] == "70.00"
    assert "- schedule.mix_epochs: None published, 3 here" in early
    assert rows(whole.partition("## What")[0])["LRF-Dyn, here"][-1] == "71.00"
    assert page.NOT_YET not in text
    shutil.rmtree(tmp_path / "lrf_dyn_seed0_4")
    record(tmp_path, "lrf_dyn_strong", 72.0)
    assert page.NOT_YET in page.render(page.read_runs(tmp_path))


def test_best_and_fastest_epoch_stand_beside_the_last_and_the_mean(tmp_path):
    record(tmp_path, "ssa", 70.0)
    log = tmp_path / "ssa_seed0_4" / "log.jsonl"
    epochs = [
        {"epoch": 1, "step": 10, "wall_s": 30.0},
        {"epoch": 2, "step": 20, "wall_s": 35.0, "top1": 72.0},
        {"epoch": 3, "step": 30, "wall_s": 45.0},
        {"epoch": 4, "step": 40, "wall_s": 47.0, "top1": 70.0},
    ]
    log.write_text("".join(json.dumps({"kind": "epoch", "train_loss": 1.0} | epoch) + "\n" for epoch in epochs))
    text = page.render(page.read_runs(tmp_path))
    assert "| 70.00 | 72.00 | 9,000,000 | 14,000 | 128 | 391 |" in text, "of the epochs without a test the third"


def test_what_the_weights_do_elsewhere_is_told(tmp_path):
    record(tmp_path, "ssa", 70.0)
    record(tmp_path, "lrf_dyn", 71.0)
    assert "## The same weights elsewhere" not in page.render(page.read_runs(tmp_path))
    path = tmp_path / "ssa_seed0_4" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"precision": "bf16"}))
    for precision, top1 in (("bf16", 70.25), ("fp32", 69.5)):
        said = {"device": "cpu", "precision": precision, "top1": top1}
        (tmp_path / "ssa_seed0_4" / f"evaluate_cpu_{precision}.json").write_text(json.dumps(said))
    text = page.render(page.read_runs(tmp_path))
    assert "The same weights elsewhere:" not in text, "the highest has none"
    table = rows(text)
    assert table["ssa_seed0_4"] == ["70.00 (NVIDIA H200, bf16)", "70.25", "69.50"]
    assert "lrf_dyn_seed0_4" not in table
    shutil.rmtree(tmp_path / "lrf_dyn_seed0_4")
    text = " ".join(page.render(page.read_runs(tmp_path)).split())
    assert "The same weights elsewhere: 70.25 (cpu, bf16), 69.50 (cpu, fp32)." in text
    assert "Rounding alone moves an accuracy by up to 0.50 (below)." in text


def test_run_that_was_stopped_before_its_first_test_is_drawn(tmp_path):
    record(tmp_path, "ssa", 70.0)
    record(tmp_path, "lrf_dyn", 70.0, ended=False)
    log = tmp_path / "lrf_dyn_seed0_4" / "log.jsonl"
    log.write_text(json.dumps({"kind": "epoch", "step": 1, "epoch": 1, "train_loss": 4.0}) + "\n")
    page.main(tmp_path, tmp_path)
    assert "LRF-Dyn" in (tmp_path / page.FIGURE).read_text()
    assert "stopped at 1 of 4" in (tmp_path / "results.md").read_text()


def test_runs_that_shared_the_gpu_say_so(tmp_path):
    record(tmp_path, "ssa", 70.0)
    record(tmp_path, "lrf_dyn", 70.0)
    path = tmp_path / "ssa_seed0_4" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"beside": "another"}))
    text = page.render(page.read_runs(tmp_path))
    assert text.count("NVIDIA H200, shared |") == 1
    assert "- ssa_seed0_4 beside another" in text


def test_without_runs_everything_is_missing(tmp_path):
    text = page.render(page.read_runs(tmp_path / "none"))
    assert "No run is recorded yet" in text
    assert text.count("- `cifar100_spikformer_4_384_") == 13
    for name in page.missing([]):
        assert name in list_recipes()


def test_the_papers_conclusions_are_held_against_our_runs(tmp_path):
    accuracies = {"ssa": 70.0, "lrf_ssa_omega5": 70.3, "causal_ssa": 71.0, "lrf_dyn_omega0": 69.0}
    for recipe, top1 in accuracies.items():
        record(tmp_path, recipe, top1)
    text = page.render(page.read_runs(tmp_path))
    table = rows(text)
    assert table["LRF helps SSA"][1:] == ["+0.30", "+0.30", "+0.78", "too small to tell"]
    assert table["SSA loses by being causal"][1:] == ["+1.00", "+1.00", "-3.56", CONTRARY]
    assert table["LRF-Dyn without LRF does as well as SSA"][1:] == ["-1.00", "-1.00", "-0.08", CONTRARY]
    assert "LRF helps LRF-Dyn" not in table, "one of its two runs is not there"
    assert text.count("\n- SSA loses by being causal: ") == 1
    record(tmp_path, "lrf_dyn_omega5", 70.1)
    table = rows(page.render(page.read_runs(tmp_path)))
    assert table["LRF helps LRF-Dyn"][1:] == ["+1.10", "+1.10", "+0.79", "as in the paper"]
    assert table["LRF-Dyn does as well as LRF-SSA"][-1] == "as in the paper: no difference to speak of"


def test_a_last_epoch_that_the_tests_before_it_do_not_bear_out_shows_nothing(tmp_path):
    for recipe in ("ssa", "lrf_ssa_omega5"):
        record(tmp_path, recipe, 70.0, epochs=10)
    path = tmp_path / "lrf_ssa_omega5_seed0_10"

    def rewrite(ninth: float, last: float) -> list[str]:
        """What the page says where one run is at 63 and 70, the other at these two."""
        lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()[:11]]
        lines[-2]["top1"], lines[-1]["top1"] = ninth, last
        (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "top1": last}))
        return rows(page.render(page.read_runs(tmp_path)))["LRF helps SSA"][1:]

    assert rewrite(63.0, 70.8) == ["+0.80", "+0.40", "+0.78", "too small to tell"]
    assert rewrite(61.0, 70.8) == ["+0.80", "-0.60", "+0.78", "too small to tell"]
    assert rewrite(64.0, 70.3) == ["+0.30", "+0.65", "+0.78", "too small to tell"]
    assert rewrite(64.0, 70.8) == ["+0.80", "+0.90", "+0.78", "as in the paper"]
    assert rewrite(62.0, 69.2) == ["-0.80", "-0.90", "+0.78", CONTRARY]
    text = page.render(page.read_runs(tmp_path))
    assert "the mean over 2 tests, of epoch 9 to 10" in text
    assert "The highest here: 70.00 (66.50 on average over its last 2 tests), SSA, seed 0" in text


def test_only_epochs_that_all_runs_tested_are_averaged(tmp_path):
    for recipe in ("ssa", "lrf_ssa_omega5"):
        record(tmp_path, recipe, 70.0, epochs=10)
    path = tmp_path / "lrf_ssa_omega5_seed0_10" / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:11]]
    del lines[-2]["top1"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    late, epochs = page.late_accuracies(page.read_runs(tmp_path))
    assert epochs == [10]
    assert {*map(tuple, late.values())} == {(70.0,)}


def test_page_is_up_to_date():
    runs = page.read_runs(ROOT / "results" / "cifar100")
    assert page.render(runs) == (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), (
        "python docs/make_results.py"
    )
    assert not runs or (ROOT / "docs" / page.FIGURE).exists()


def test_runs_that_differ_in_more_than_the_table_shows_are_refused(tmp_path):
    """A mean over two rates of learning would pass for one over seeds."""
    record(tmp_path, "ssa", 70.0)
    record(tmp_path, "lrf_dyn", 72.0)
    record(tmp_path, "ssa", 60.0, seed=1)
    page.render(page.read_runs(tmp_path))
    path = tmp_path / "ssa_seed1_4" / "recipe.yaml"
    text = path.read_text()
    path.write_text(text.replace("learning_rate: 0.0005", "learning_rate: 0.001"))
    with pytest.raises(LrfdynError, match=r"ssa_seed1_4 and .* do not compare: optimizer.learning_rate: 0.0005 there"):
        page.render(page.read_runs(tmp_path))
    path.write_text(text.replace("seed: 1", "seed: 0"))
    with pytest.raises(LrfdynError, match="ssa_seed1_4 and ssa_seed0_4 are both SSA, seed 0"):
        page.render(page.read_runs(tmp_path))
