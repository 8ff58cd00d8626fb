"""The HTML report: self-contained, safe against its own data, written whole or not at all."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lrfdyn.analysis.report.drawings import attention_distance_layers, energy, theory_chart
from lrfdyn.analysis.report.look import KINDS, line_of, places, pyplot
from lrfdyn.analysis.report.plots import plot_memory
from lrfdyn.analysis.report.write import figures, render_report, write_report
from lrfdyn.analysis.theory_report import TheorySettings, theory_results
from lrfdyn.errors import LrfdynError
from tests.analysis.made_up import HOSTILE, Page, make_results


def test_page_is_self_contained() -> None:
    page = render_report(make_results())
    parsed = Page(page)
    # Without a scheme or a protocol-relative address there is nothing the page could fetch from elsewhere.
    assert not re.search(r"(https?|wss?|ftp):", page)
    assert not re.search(r"""["'(]//""", page)
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|importScripts", page)
    for tag, attributes in parsed.elements:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), tag
    policy = next(item for _, item in parsed.elements if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_data_is_embedded_exactly() -> None:
    results = make_results(("SSA", "causal SSA", "LRF-SSA", "LRF-Dyn", "VSA"))
    assert Page(render_report(results)).data() == results


def test_hostile_strings_stay_text() -> None:
    expected = [tag for tag, _ in Page(render_report(make_results())).elements]
    results = make_results((HOSTILE, "LRF-Dyn"))
    results["title"] = results["command"] = HOSTILE
    results["notes"] = [HOSTILE]
    results["attentions"]["kind0"]["firing_by_layer"] = {HOSTILE: 0.1}
    parsed = Page(render_report(results))
    assert [tag for tag, _ in parsed.elements] == expected
    assert parsed.data() == results
    assert parsed.text("title") == HOSTILE


def test_template_signs_in_data_are_left_alone() -> None:
    results = make_results(("$title ${data}", "$$"))
    results["title"] = "$script"
    parsed = Page(render_report(results))
    assert parsed.text("title") == "$script"
    assert parsed.data() == results


def test_numbers_without_json_form_become_null() -> None:
    results = make_results()
    results["attentions"]["kind0"]["images_per_second"] = float("nan")
    results["attentions"]["kind1"]["locality"]["weight"][0] = float("inf")
    data = Page(render_report(results)).data()
    assert data["attentions"]["kind0"]["images_per_second"] is None
    assert data["attentions"]["kind1"]["locality"]["weight"][0] is None


def test_an_attention_has_one_colour_in_every_report() -> None:
    assert places(["lrf_dyn"]) == places(["vsa", "ssa", "lrf_dyn"])[2:] == [KINDS.index("lrf_dyn")]
    # One of another package has its own, too, and leaves those of the known ones to them.
    assert places(["mean"]) == places(["sdsa", "mean"])[1:]
    assert places(["mean"])[0] >= len(KINDS)
    # A second one of a kind never takes the colour of another that is there.
    twice = places(["ssa", "ssa", "causal_ssa"])
    assert (twice[0], twice[2]) == tuple(places(["ssa", "causal_ssa"]))
    assert len({place % 8 for place in twice}) == 3
    many = places(["ssa"] * 9)
    assert len(set(many)) == 9
    assert len({place % 8 for place in many[:8]}) == 8
    for chart in theory_results(TheorySettings(n=16))["charts"]:
        found = {series["label"]: series["place"] for series in chart.get("series", [])}
        known = {"VSA": "vsa", "SSA": "ssa", "H of SSA": "ssa", "H of LRF-SSA": "lrf_ssa"}
        assert all(found[label] == KINDS.index(kind) for label, kind in known.items() if label in found)


def test_figures_leave_out_lone_dots() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    several, alone = make_results(), make_results(("only",))
    for run in alone["runs"]:
        run["curve"] = run["curve"][:1]
    for name in ("memory_accuracy", "convergence"):
        draw = figures(several)[name].draw
        assert draw is not None
        plt.close(draw(plt))
        one = figures(alone)[name]
        assert one.draw is not None
        assert one.draw(plt) is None
        assert len(one.rows) > 1  # the table stays


def test_figures_show_what_would_be_covered() -> None:
    """Of markers at one place a rim or an outline of each is visible, and references are above the curves."""
    plt = pytest.importorskip("matplotlib.pyplot")
    results = make_results(("a", "b", "c"))
    first = results["attentions"]["kind0"]
    first["locality"] |= {"grid": [4, 4], "share": first["locality"]["weight"]}
    for key, entry in results["attentions"].items():
        results["attentions"][key] = {**first, "label": entry["label"]}
    made = {}
    for name in ("attention_distance", "memory_accuracy", "receptive_field_share"):
        draw = figures(results)[name].draw
        assert draw is not None
        made[name] = draw(plt)
        plt.close(made[name])
    sizes = [line.get_markersize() for line in made["receptive_field_share"].axes[0].lines]
    assert sizes[0] > sizes[1] > sizes[2]
    assert [len(points.get_facecolor()) for points in made["memory_accuracy"].axes[0].collections[1::2]] == [1, 0, 0]
    lines = made["attention_distance"].axes[0].lines
    assert lines[-1].get_zorder() > max(line.get_zorder() for line in lines[:-1])


def test_figures_are_drawn_without_a_screen() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")
    pyplot("figures")
    assert matplotlib.get_backend().lower() == "agg"


def test_figures_name_their_axes_and_models() -> None:
    pytest.importorskip("matplotlib")
    plt, results = pyplot("figures"), make_results()
    for entry in results["attentions"].values():
        entry["locality"] |= {"grid": [4, 4], "share": entry["locality"]["weight"]}
    drawn = {name: figure.draw(plt) for name, figure in figures(results).items() if figure.draw}
    plt.close("all")
    labels = [entry["label"] for entry in results["attentions"].values()]
    left, right = drawn["convergence"].axes
    assert [axis.get_xlabel() for axis in (left, right)] == ["epoch", "epoch"]
    assert [axis.get_ylabel() for axis in (left, right)] == ["test accuracy (%)", "train loss"]
    assert [text.get_text() for text in left.get_legend().get_texts()] == labels
    (*models, uniform) = drawn["attention_distance"].axes[0].lines
    assert [line.get_label() for line in (*models, uniform)] == [*labels, "uniform"]
    assert set(uniform.get_ydata()) == {1 / 16}


def test_a_layer_that_was_silent_has_noline_of() -> None:
    pytest.importorskip("matplotlib")
    plt, entries = pyplot("figures"), list(make_results()["attentions"].values())
    for place, entry in enumerate(entries):
        entry["place"] = place
    silent, short = (entry["locality"]["weight_by_layer"] for entry in entries)
    silent[0] = None
    short.pop()
    lines = [[line.get_ydata() for line in axis.lines] for axis in attention_distance_layers(plt, entries).axes]
    plt.close("all")
    assert [[list(weights) for weights in axis] for axis in lines] == [[short[0]], [silent[1]]]


def test_regions_of_the_theorems_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    plt = pyplot("figures")
    chart = next(c for c in theory_results(TheorySettings(n=16))["charts"] if c["id"] == "inequality-local")
    figure = theory_chart(plt, chart)
    plt.close(figure)
    (cells,) = figure.axes[0].collections
    assert cells.get_array().tolist() == chart["cells"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == chart["classes"]


def test_lines_of_many_models_differ() -> None:
    """Eight colours with a marker each, then the same with another kind of line: 64 in all."""
    lines = [line_of({"label": "", "place": place}) for place in range(64)]
    assert len({(line["color"], line["marker"], line["linestyle"]) for line in lines}) == 64
    assert len({line["linestyle"] for line in lines[:8]}) == 1
    for line, again in zip(lines, (line_of({"label": "", "place": place}) for place in range(64, 128)), strict=True):
        assert line == again


def test_bars_of_energy_begin_at_nothing_and_end_at_the_sum() -> None:
    pytest.importorskip("matplotlib")
    plt = pyplot("figures")
    entries = list(make_results()["attentions"].values())
    (axis,) = energy(plt, entries).axes
    for i, entry in enumerate(entries):
        bars = [container[i] for container in axis.containers]
        assert bars[0].get_x() == 0
        for before, after in pairwise(bars):
            assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
        total = sum(layer["energy_pj"] for layer in entry["energy"]["layers"]) / 1e6
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(total)
    plt.close("all")


def test_bars_of_memory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plt, kept = pyplot("plot"), []
    monkeypatch.setattr(plt, "close", kept.append)
    peaks = [{"group": "GPU", "label": "SSA", "implementation": name, "mib": 4.0} for name in ("eager", "low-memory")]
    plot_memory({"SSA": [{"name": "k^T v matrix", "bytes": 2048}]}, peaks, tmp_path / "memory.svg")
    state, measured = kept[0].axes
    assert [label.get_text() for label in state.get_xticklabels()] == ["SSA"]
    assert [label.get_text() for label in measured.get_xticklabels()] == ["SSA\neager", "SSA\nlow-memory"]
    assert [bar.get_height() for bar in measured.patches] == [4.0, 4.0]
    assert [(bar.get_y(), bar.get_height()) for bar in state.patches] == [(0.0, 2.0)]


def test_unknown_format_is_refused() -> None:
    results = make_results()
    results["format"] = "lrfdyn-results/2"
    with pytest.raises(LrfdynError, match="results: expected the format 'lrfdyn-results/1'"):
        render_report(results)


def test_write_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_report(make_results(("old",)), path)
    write_report(make_results(("new",)), path)
    assert Page(path.read_text(encoding="utf-8")).data() == make_results(("new",))
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]


def test_failing_render_leaves_old_report(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    results = make_results()
    results["recipe"]["optimizer"] = object()
    with pytest.raises(TypeError):
        write_report(results, path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_failing_write_keeps_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")

    def fail_replace(source: Path, target: Path) -> None:
        raise OSError("no")

    def fail_write(self: Path, text: str, **_: Any) -> int:
        with self.open("w", encoding="utf-8") as file:
            file.write(text[:100])
        raise OSError("disk full")

    if broken == "replace":
        monkeypatch.setattr("lrfdyn.files.os.replace", fail_replace)
    else:
        monkeypatch.setattr(Path, "write_text", fail_write)
    with pytest.raises(OSError, match=r"^no$|^disk full$"):
        write_report(make_results(), path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
