"""lrfdyn analyze: every source, every host, what it writes and what it refuses."""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import replace

import pytest
import torch

import lrfdyn
from lrfdyn.analysis.analyze import analyze, measure_model, model_label, sources_for
from lrfdyn.analysis.measure.inference import images_per_second
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.analysis.report.look import places
from lrfdyn.analysis.report.write import write_all
from lrfdyn.attention import ATTENTIONS
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.models import Spikformer
from lrfdyn.training.sweep import Sweep
from tests.analysis.made_up import make_results
from tests.training.runs import tiny, train

CPU = torch.device("cpu")
TINY = ["--attentions", "ssa,lrf_dyn", "--epochs", "1", "--figures", "none", "--model.options",
        "{dim: 8, depth: 1, heads: 1}", "--model.time_steps", "1", "--run.batch_size", "256"]  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")

    def each_end(sweep, waiting, _reporter):
        """Here, since a process for each run would take seconds to start."""
        for run in waiting:
            assert main(run.command(sweep.folder(run))) == 0
            yield run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, "_each_end", each_end)
        assert main(["reproduce", "--out", str(out), *TINY]) == 0
    return out


def digits(count=8):
    return load_images("digits", None, count, 4, CPU)


def small(**options):
    arguments = {"dim": 16, "depth": 1, "heads": 2, "image_size": 8, "in_channels": 1, "num_classes": 10}
    return Spikformer(**{**arguments, "pooling": (False,) * 4, "time_steps": 2, **options})


def test_a_model_in_float64_is_measured_on_the_images(tmp_path, capsys):
    small().double().save_pretrained(tmp_path / "model")
    found = ["analyze", str(tmp_path / "model"), "--data", "DIGITS", "--images", "2", "--figures", "none"]
    assert main([*found, "--out", str(tmp_path / "out")]) == 0
    assert "Spikformer on digits" in capsys.readouterr().out


def test_command_writes_everything(demo, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["analyze", str(demo), "--data", "digits", "--images", "6", "--out", str(out), "--figures", "svg,png"]
    assert main([*arguments, "--maps", "2", "--queries", "1:2"]) == 0
    results = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    assert list(results["attentions"]) == ["ssa", "lrf_dyn"]  # the order of the report of lrfdyn reproduce
    for entry in results["attentions"].values():
        assert len(entry["accuracy_values"]) == 2  # two seeds are one entry
        assert entry["energy"]["energy_pj"] > 0
        assert entry["locality"]["layers"] == ["blocks.0.attn"]
        assert entry["receptive_field"]["half_side"] >= 1
        assert 0 <= entry["accuracy_on_images"] <= 1
        assert entry["attention_maps"]["queries"] == [[1, 2]]
        assert len(entry["attention_maps"]["maps"]) == 2
    assert [picture["name"] for picture in results["pictures"]] == ["image 1", "image 6"]
    assert len(results["runs"]) == 4
    assert all(run["curve"] for run in results["runs"])
    assert [entry["place"] for entry in results["attentions"].values()] == places(["ssa", "lrf_dyn"])
    assert results["batch"] == 6
    names = {"attention_distance", "attention_entropy", "receptive_fields", "energy", "memory_accuracy"}
    names |= {"attention_scores", "attention_maps", "attention_maps_layers"}
    written = {path.name for path in (out / "figures").iterdir()}
    assert {f"{name}.{form}" for name in names for form in ("svg", "png")} <= written
    assert "convergence.png" not in written  # one epoch would be lone dots
    text = (out / "figures" / "captions.txt").read_text()
    assert [line.split(":")[0] for line in text.splitlines() if line] == sorted(
        {name.split(".")[0] for name in written - {"captions.txt"}}, key=text.index
    )
    assert "absolute values" in text
    assert "6 test images of digits" in text
    with (out / "tables" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["SSA", "LRF-Dyn"]
    assert float(rows[0]["energy_pj"]) == results["attentions"]["ssa"]["energy"]["energy_pj"]
    text = capsys.readouterr().out
    assert "0.9 pJ per accumulate and 4.6 pJ per multiply-accumulate" in text
    assert "SSA is counted as q (k^T v)." in text  # formulas are marked in the report only
    assert "LRF-Dyn" in (out / "report.html").read_text()


def test_reproduce_and_analyze_measure_the_same(demo):
    made = json.loads((demo / "results.json").read_text())["attentions"]["lrf_dyn"]
    model = sources_for(str(demo / "runs" / "lrf_dyn-seed0"), digits())[0].load()
    again = measure_model(model, load_images("digits", None, 360, 50, CPU).of(model))
    assert again["locality"]["entropy_mean"] == pytest.approx(made["locality"]["entropy_mean"])
    assert again["energy"]["energy_pj"] == pytest.approx(made["energy"]["energy_pj"])
    assert again["firing_rate"] == pytest.approx(made["firing_rate"])


def test_folder_and_file_of_save_pretrained(tmp_path):
    torch.manual_seed(0)
    model = small(attention="lrf_ssa", attention_options={"dilations": (1, 3)})
    model.save_pretrained(tmp_path)
    images = digits()
    bare = tmp_path / "elsewhere.safetensors"
    bare.write_bytes((tmp_path / "model.safetensors").read_bytes())
    loaded = [sources_for(str(path), images)[0].load() for path in (tmp_path, tmp_path / "model.safetensors", bare)]
    for other in loaded:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert model_label(loaded[0])[0] == "LRF-SSA, dilations (1, 3)"
    # The same model twice, without seeds: two entries that are told apart.
    began = time.perf_counter()
    results = analyze([sources_for(str(path), images)[0] for path in (tmp_path, bare)], images)
    assert 0 < results["wall_seconds"] < time.perf_counter() - began
    assert results["model"]["grid"] == [8, 8]
    labels = [entry["label"] for entry in results["attentions"].values()]
    assert len(set(labels)) == 2
    assert all(entry["trained"] for entry in results["attentions"].values())
    for entry in results["attentions"].values():
        assert entry["accuracy_mean"] == entry["accuracy_on_images"]
    assert "is that on the 8 images of this analysis" in results["notes"][0]


def test_a_seed_without_accuracy_takes_none_of_another(demo):
    images = digits()
    first, second = (s for s in sources_for(str(demo), images) if "ssa" in s.origin)
    results = analyze([replace(first, accuracy=None), replace(second, accuracy=None)], images)
    (entry,) = results["attentions"].values()
    assert entry["accuracy_values"] == [entry["accuracy_on_images"]]
    assert [run["test_accuracy"] is None for run in results["runs"]] == [False, True]


def test_run_of_lrfdyn_train(tmp_path):
    out = tmp_path / "run"
    summary = train(tiny(), out)
    images = digits()
    (source,) = sources_for(str(out), images)
    assert source.accuracy == pytest.approx(summary["top1"] / 100)
    assert source.seed == summary["seed"]
    assert [record["epoch"] for record in source.curve] == list(range(1, len(source.curve) + 1))
    assert source.curve[-1]["test_accuracy"] == pytest.approx(source.accuracy)
    whole = source.load()
    checkpoint = sorted((out / "checkpoints").iterdir())[-1]
    (from_checkpoint,) = sources_for(str(checkpoint), images)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), from_checkpoint.load().parameters(), strict=True))
    # An unfinished run has checkpoints only.
    for path in (out / "model").iterdir():
        path.unlink()
    (unfinished,) = sources_for(str(out), images)
    assert torch.equal(next(iter(unfinished.load().parameters())), next(iter(whole.parameters())))


def test_runs_that_trained_differently_are_two_entries(tmp_path):
    """Another seed alone is the same entry; another recipe never is, whatever its seed."""
    runs = {"first": {}, "seed": {"run": {"seed": 1}}, "other": {"run": {"seed": 2}, "augmentation": {"mixup": 0.2}}}
    short = {"epochs": 1, "warmup_epochs": 0}
    for name, changed in runs.items():
        train(tiny(schedule=short, **changed), tmp_path / name)
    images = digits(4)
    results = analyze([sources_for(str(tmp_path / name), images)[0] for name in runs], images)
    assert [run["seed"] for run in results["runs"]] == [0, 1, 2]
    assert [len(entry["accuracy_values"]) for entry in results["attentions"].values()] == [2, 1]
    assert [entry["label"] for entry in results["attentions"].values()] == ["LRF-Dyn, first", "LRF-Dyn, other"]


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_attention_by_name(kind):
    images = digits(1)
    results = analyze(sources_for(f"spikformer_4_384:{kind}", images), images)
    (entry,) = results["attentions"].values()
    assert entry["label"].endswith("(random weights)")
    assert not entry["trained"]
    assert entry["accuracy_mean"] is None
    assert "Random weights, not trained" in results["notes"][0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qkformer_4_384", {"dim": 64}),
        ("sdt_v1_2_512", {"dim": 32}),
        ("spikformer_dvs_2_256", {"dim": 32, "image_size": 32}),
        ("qkformer_dvs_2_256", {"dim": 32, "image_size": 32}),
        ("sdt_v1_dvs_2_256", {"dim": 32, "image_size": 32}),
        ("sdt_v2_15m", {"widths": (8, 16, 16, 32), "image_size": 32}),
        ("sdt_v3_t", {"widths": (8, 16, 16, 32), "image_size": 32}),
        ("sew_resnet18", {"widths": (8, 8, 8, 8)}),
        ("ms_resnet18", {"widths": (8, 8, 8, 8)}),
    ],
)
def test_every_host(name, options):
    model = lrfdyn.create_model(name, time_steps=2, num_classes=3, **options)
    record = measure_model(model, [torch.randn(2, model.in_channels, 32, 32)])
    assert ("locality" in record) == ("attention" in model.config)
    assert record["peak_inference_bytes"] > 0
    assert record["energy"]["multiply_accumulates"] > 0
    assert len(record["receptive_field"]["map"]) == 32


def test_noise_takes_the_size_of_the_model():
    images = load_images("random", None, 3, 2, CPU)
    model = small()
    assert [list(batch.shape) for batch in images.of(model)] == [[2, 1, 8, 8], [1, 1, 8, 8]]
    assert torch.equal(images.of(model)[0], images.of(model)[0])
    assert images.accuracy(model) is None


def test_noise_of_another_size():
    images = load_images("random", None, 2, 2, CPU, image_size=20)
    for name in ("spikformer_4_384", "sew_resnet18"):  # one is laid out for a size, the other takes any
        model = sources_for(name, images)[0].load()
        assert [list(batch.shape) for batch in images.of(model)] == [[2, 3, 20, 20]]
    with pytest.raises(LrfdynError, match="data: random has images of 20 pixels, the model was made for 8"):
        images.of(small())
    with pytest.raises(LrfdynError, match="image_size: expected an integer >= 1, got 0"):
        load_images("random", None, 2, 2, CPU, image_size=0)


def test_event_frames_are_measured_by_image():
    """`[T, B, C, H, W]`: one image is all its frames."""
    model, frames = small(), torch.randn(2, 3, 1, 8, 8)
    record = measure_model(model, [frames])
    assert record["peak_inference_bytes"] == measure_model(model, [frames[:, :1]])["peak_inference_bytes"]

    class Slow(torch.nn.Module):
        def forward(self, _frames):
            time.sleep(0.05)

    assert 100 < images_per_second(Slow(), torch.zeros(2, 30, 1, 1, 1)) <= 30 / 0.05


def test_images_are_spread_over_the_test_set():
    images = digits(10)
    assert [len(batch) for batch in images.batches] == [4, 4, 2]
    labels = torch.cat(images.labels)
    from lrfdyn.data import Augmentation, create_data

    expected = create_data("digits", None, Augmentation()).splits["test"][1]
    assert (labels[0], labels[-1]) == (expected[0], expected[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing_here"], "model: 'nothing_here' is no file or folder here and no model; known: "),
        (
            ["spikfomer_4_384"],
            "no file or folder here and no model; did you mean spikformer_4_384",
        ),
        (["spikformer_4_384:lrf_dym"], "attention: unknown name 'lrf_dym'; did you mean lrf_dyn"),
        (["ms_resnet18:ssa"], "model: ms_resnet18 has no attention"),
        (["spikformer_4_384", "--data", "digit"], "data: unknown name 'digit'; did you mean digits"),
        (["spikformer_4_384", "--data", "cifar100"], "root: cifar100 needs the folder of its files"),
        (["spikformer_4_384", "--data", "digits", "--images", "5000"], "images: digits has 360 test images, got 5000"),
        (["spikformer_4_384", "--images", "0"], "images: expected an integer >= 1, got 0"),
        (["spikformer_4_384", "--figures", "gif"], "figures: unknown name 'gif'"),
        (["spikformer_4_384", "--mac-pj", "-1"], "multiply_accumulate_pj: expected a number >= 0, got -1.0"),
        (["spikformer_4_384", "--device", "tpu"], "device: cannot use 'tpu'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments, message, capsys, tmp_path):
    assert main(["analyze", *arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_images_that_do_not_fit_the_model(tmp_path):
    model = small(image_size=16)
    model.save_pretrained(tmp_path)
    with pytest.raises(LrfdynError, match="data: digits has images of 8 pixels, the model was made for 16"):
        analyze(sources_for(str(tmp_path), digits()), digits())
    (tmp_path / "empty").mkdir()
    with pytest.raises(LrfdynError, match=r"model: .*empty holds no model: no config.json"):
        sources_for(str(tmp_path / "empty"), digits())


def test_long_names_stay_on_the_figure():
    """Nothing that is drawn may leave the page, with nine models of long names."""
    import matplotlib.pyplot as plt

    from lrfdyn.analysis.report.look import STYLE
    from lrfdyn.analysis.report.write import figures

    images = digits(2)
    results = analyze(sources_for("spikformer_4_384:lrf_dyn", images), images)
    (entry,) = results["attentions"].values()
    results["attentions"] = {
        str(i): {**entry, "label": f"spikformer_4_384, LRF-Dyn, dilations (1, 3), token qkv, {i}"} for i in range(9)
    }
    drawn = {name: figure.draw for name, figure in figures(results).items() if figure.draw}
    assert {"attention_distance", "energy", "receptive_field_share", "attention_entropy"} <= set(drawn)
    for name, draw in drawn.items():
        with plt.rc_context(STYLE):
            figure = draw(plt)
            figure.canvas.draw()
            page, box = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
            plt.close(figure)
        assert box.x0 >= page.x0 - 1, name
        assert box.x1 <= page.x1 + 1, name
        assert box.y0 >= page.y0 - 1, name
        assert box.y1 <= page.y1 + 1, name


def test_models_on_different_grids_have_no_common_line():
    plt = pytest.importorskip("matplotlib.pyplot")
    from lrfdyn.analysis.report.write import figures

    results = make_results()
    one, two = results["attentions"].values()
    for entry, grid in ((one, [4, 4]), (two, [4, 4])):
        entry["locality"] |= {"grid": grid, "share": entry["locality"]["weight"]}

    def dashed() -> int:
        figure = figures(results)["attention_entropy"].draw(plt)
        plt.close(figure)
        return len(figure.axes[0].lines)

    assert dashed() == 1
    assert "at most 2;" in figures(results)["attention_distance"].caption
    two["locality"] |= {"entropy_uniform": 4.16, "short_distance": 3}
    assert dashed() == 0
    assert "at most a quarter of the largest" in figures(results)["attention_distance"].caption


def test_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("lrfdyn.analysis.report.write.has_matplotlib", lambda: False)
    assert main(["analyze", "spikformer_4_384", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'lrfdyn[analysis]'" in capsys.readouterr().err


def test_images_of_files(tmp_path, monkeypatch):
    from tests.data.make import write_cifar, write_folder

    write_cifar(tmp_path, "cifar100", monkeypatch)
    images = load_images("cifar100", tmp_path, 5, 2, CPU)
    assert images.facts == {"num_classes": 100, "image_size": 32, "in_channels": 3}
    assert [list(batch.shape) for batch in images.batches] == [[2, 3, 32, 32], [2, 3, 32, 32], [1, 3, 32, 32]]
    write_folder(tmp_path / "folder")
    images = load_images("imagenette", tmp_path / "folder", 3, 8, CPU, image_size=32)
    assert torch.cat(images.labels).tolist() == [0, 1, 2]  # one of every class, not the first three files
    assert list(images.batches[0].shape) == [3, 3, 32, 32]


def test_epochs_of_the_learning_curves_are_whole_numbers():
    plt = pytest.importorskip("matplotlib.pyplot")
    from lrfdyn.analysis.report.drawings import convergence

    curve = [{"epoch": e, "test_accuracy": 0.3 * e, "train_loss": 2.0 - e} for e in (1, 2)]
    runs = [{"attention": "ssa", "curve": curve}]
    figure = convergence(plt, [{"label": "SSA", "place": 0, "runs": runs}])
    for axis in figure.axes:
        assert all(float(tick).is_integer() for tick in axis.get_xticks())
    plt.close(figure)


@pytest.mark.parametrize("kind", ["ssa", "lrf_dyn"])
@pytest.mark.parametrize("size", [8, 11])
def test_a_grid_of_one_token_and_of_odd_sizes(kind, size, tmp_path):
    """Entropy and distance of a single token are 0, and everything can still be written and drawn."""
    model = small(attention=kind, image_size=size, in_channels=3, pooling=(True, True, True, False)).eval()
    for bn in model.modules():
        if isinstance(bn, torch.nn.BatchNorm2d):
            torch.nn.init.constant_(bn.bias, 2.0)
    images = load_images("random", None, 2, 2, CPU, image_size=size)
    model.save_pretrained(tmp_path / "model")
    results = analyze(sources_for(str(tmp_path / "model"), images), images)
    write_all(results, tmp_path, ("svg",))
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    local = next(iter(results["attentions"].values()))["locality"]
    assert (local["entropy_mean"] == 0) == (size == 8)
    assert local["grid"] == ([1, 1] if size == 8 else [2, 2])
