"""The HTML report in a browser: every figure is drawn, tables sort, files come out."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from lrfdyn.analysis.report.write import render_report, write_report
from lrfdyn.analysis.theory_report import TheorySettings, theory_results
from tests.analysis.browser import FLAGS, find_browser
from tests.analysis.made_up import HOSTILE, Page, attention, layer, make_results

FIGURES = {
    "accuracy-memory",
    "learning-curves",
    "attention-distance",
    "short-range-share",
    "attention-entropy",
    "attention-scores",
    "attention-maps",
    "receptive-fields",
    "receptive-field-share",
    "energy-parts",
    "firing-rates",
}


def dump_dom(path: Path, profile: Path, width: int = 800) -> str:
    """Return the page as headless Chromium leaves it after running its scripts in a window of this width."""
    size = [f"--user-data-dir={profile}", "--virtual-time-budget=3000", f"--window-size={width},600"]
    command = [find_browser(), *FLAGS, *size, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def drawn(page: Page) -> set[str]:
    """Return the ids of the figures, checking that each has its chart."""
    charts = [item for tag, item in page.elements if tag == "svg" and item.get("class") == "chart"]
    figures = {item["id"] or "" for tag, item in page.elements if tag == "figure"}
    assert len(charts) == len(figures)
    return figures


def error_count(page: Page) -> str | None:
    return next(item for tag, item in page.elements if tag == "body").get("data-errors")


def bare_results() -> dict[str, Any]:
    """Return results without any optional section and with gaps in the rest."""
    results = make_results(("only",), seeds=1)
    results["notes"] = []
    for run in results["runs"]:
        del run["curve"]
    for values in results["attentions"].values():
        for part in ("locality", "receptive_field", "energy", "firing_by_layer", "attention_maps"):
            del values[part]
        values["images_per_second"] = float("nan")
    return results


def mixed_results() -> dict[str, Any]:
    """Return results in which only the first attention has the optional sections."""
    results = make_results()
    for part in ("locality", "receptive_field", "attention_maps"):
        del results["attentions"]["kind1"][part]
    for run in results["runs"]:
        if run["attention"] == "kind1":
            run["curve"] = []
    return results


def equal_results() -> dict[str, Any]:
    """Return eight attentions with a hostile name and the same numbers each."""
    results = make_results((HOSTILE, *"bcdefgh"))
    for key in results["attentions"]:
        results["attentions"][key] = attention(HOSTILE if key == "kind0" else key, [0.9, 0.9], 4096)
    return results


@pytest.mark.parametrize(
    ("results", "figures"),
    [
        pytest.param(make_results(), FIGURES, id="all"),
        pytest.param(bare_results(), set(), id="bare"),  # one model would be a lone dot
        pytest.param(mixed_results(), FIGURES, id="mixed"),
        pytest.param(equal_results(), FIGURES, id="equal"),
    ],
)
def test_browser_draws_every_figure(tmp_path: Path, results: dict[str, Any], figures: set[str]) -> None:
    path = tmp_path / "report.html"
    write_report(results, path)
    page = Page(dump_dom(path, tmp_path / "profile"))
    assert error_count(page) == "0"
    assert drawn(page) == figures
    assert not any(item.get("id") == "broken" for _, item in page.elements)
    # A number that could not be computed must not be drawn.
    for tag, item in page.elements:
        for name in [
            "d",
            "x",
            "y",
            "cx",
            "cy",
            "x1",
            "x2",
            "y1",
            "y2",
            "width",
            "height",
            "transform",
            "viewbox",
            "style",
        ]:
            assert not re.search(r"NaN|undefined|Infinity", item.get(name) or ""), (tag, item)
    texts = "\n".join(text for name, text in page.texts if not name.startswith("script"))
    assert not re.search(r"\b(NaN|undefined|Infinity|null)\b|\[object", texts)
    for values in results["attentions"].values():
        assert values["label"] in texts
        assert f"{100 * values['accuracy_mean']:.2f}" in texts
        assert f"{values['parameters']:,}" in texts
        assert values["state_terms"][0]["formula"] in texts
    assert ("±" in texts) == (len(results["runs"]) > len(results["attentions"]))


def different_grids() -> dict[str, Any]:
    """Return two models on grids and images of different sizes, one with a cross in its receptive field."""
    results = make_results(("small", "large"))
    _, large = results["attentions"].values()
    large["locality"]["entropy_uniform"] = math.log(64)
    large["locality"]["entropy_histogram"]["edges"] = [3.0, 3.1, 3.2, 3.3, 3.4]
    large["receptive_field"] |= {"pixels_per_cell": 4, "centre": [16, 16]}
    return results


def test_browser_draws_no_common_line_for_different_grids(tmp_path: Path) -> None:
    pages = []
    for name, results in (("same", make_results()), ("different", different_grids())):
        path = tmp_path / f"{name}.html"
        write_report(results, path)
        pages.append(Page(dump_dom(path, tmp_path / "profile")))
    same, different = ("\n".join(text for name, text in page.texts if not name.startswith("script")) for page in pages)
    assert error_count(pages[1]) == "0"
    assert "uniform, 2.77" in same
    assert "uniform, 2.77" not in different
    assert "uniform, 4.16" not in different
    assert "each of the 8 × 8 input pixels moves" in same
    assert "images of different sizes" in different
    crosses = [item for _, item in pages[1].elements if item.get("class") == "cross"]
    assert len(crosses) == 1


def test_browser_speaks_of_recordings(tmp_path: Path) -> None:
    """Where the data are recordings no word of the page says that they are images."""
    results = make_results()
    results["data"]["kind"] = "recording"
    results["batch"] = 16
    results |= {"lead": "", "pictures": [{**results["pictures"][0], "name": "recording 1"}]}
    path = tmp_path / "report.html"
    write_report(results, path)
    page = Page(dump_dom(path, tmp_path / "profile"))
    assert error_count(page) == "0"
    texts = "\n".join(text for name, text in page.texts if not name.startswith(("script", "style")))
    for words in ("Energy per recording", "recordings/s", "a batch of 16 recordings", "the sum of all frames"):
        assert words in texts
    assert "image" not in texts


def test_browser_shows_a_share_of_the_whole_track(tmp_path: Path) -> None:
    """A bar of 31 % is 31 % of its track, also where it is the longest; the caption has what order alone would give."""
    path = tmp_path / "report.html"
    results = make_results()
    results["attentions"]["kind1"] |= {"kind": "lrf_dyn"}
    results["attentions"]["kind1"]["locality"]["uniform_over_past"] = {"short_range_share": 0.4321}
    write_report(results, path)
    page = Page(dump_dom(path, tmp_path / "profile"))
    start = next(i for i, (_, item) in enumerate(page.elements) if item.get("id") == "short-range-share")
    rects = [item for tag, item in page.elements[start:] if tag == "rect"]
    track = next(float(item["width"] or 0) for item in rects if item.get("class") == "track")
    bar = next(float(item["width"] or 0) for item in rects if (item.get("class") or "").startswith("bar"))
    assert bar / track == pytest.approx(0.31, abs=0.001)
    assert "have 43.2%" in "".join(text for name, text in page.texts if not name.startswith("script"))


def test_browser_draws_the_theorems(tmp_path: Path) -> None:
    results = theory_results(TheorySettings(n=16))
    path = tmp_path / "report.html"
    write_report(results, path)
    page = Page(dump_dom(path, tmp_path / "profile"))
    assert error_count(page) == "0"
    assert drawn(page) == {chart["id"] for chart in results["charts"]}
    texts = "\n".join(text for name, text in page.texts if not name.startswith("script"))
    assert f"{results['checks'][0]['sum']:.9f}" in texts
    for chart in results["charts"]:
        assert all(name in texts for name in chart.get("classes", []))
    assert "undefined" not in texts
    assert "NaN" not in texts


# Leaves what a reader would see in the page, after the frames in which it reacts to the sizes of its parts.
LOOKS = """
<script>
for (const folded of document.querySelectorAll("details")) folded.open = true;
const all = (part) => [...document.querySelectorAll(part)];
const cue = () => {
  const frame = document.querySelector("#summary .frame");
  const text = getComputedStyle(frame.querySelector(".cue"));
  return [text.display !== "none" && text.visibility === "visible",
    getComputedStyle(frame.querySelector(".edge"), "::after").opacity === "1"];
};
setTimeout(() => {
  const wide = cue();
  const scroll = document.querySelector("#summary .scroll");
  scroll.scrollLeft = scroll.scrollWidth;
  scroll.dispatchEvent(new Event("scroll"));
  setTimeout(() => {
    const order = all("#attention-distance .chart *").map((node) => node.getAttribute("class") ?? "");
    document.body.append(html("pre", {}, JSON.stringify({
      wide, atEnd: cue(),
      contents: all("#contents a").map((link) => link.getAttribute("href")),
      parts: all("main > section").map(({ id }) => `#${id}`),
      anchors: all("a").filter((link) => !document.getElementById(link.hash.slice(1))).length,
      headings: all("h2, figure h3").filter((title) => !title.querySelector("a.anchor")).length,
      above: order.lastIndexOf("ref") > order.findLastIndex((name) => /^(line|mark)/.test(name)),
      colours: all("#summary tbody .mark").map((mark) => mark.getAttribute("class").trim()),
      sizes: all("#learning-curves .mark").filter((mark) => mark.matches("svg.chart *"))
        .filter((mark, _, [first]) => mark.getAttribute("transform") === first.getAttribute("transform"))
        .map((mark) => mark.getBBox().width),
      points: all("#accuracy-memory .chart .mark").map((mark) => getComputedStyle(mark).fillOpacity),
      fractions: all("#state mfrac").map((node) => [...node.children].map((part) => part.textContent)),
      powers: all("#state msup, .notes msup").map((node) => node.textContent),
      layers: all("#energy details tbody th").map((name) => name.textContent),
      sides: all("#receptive-field-share text").map((node) => node.textContent),
      speed: document.querySelector("#summary > p").textContent,
    })));
  }, 300);
}, 300);
</script>
"""


def test_browser_shows_what_is_there(tmp_path: Path) -> None:
    """On a narrow window: the cue beside a table, links to all parts, formulas, and nothing that covers another."""
    results = make_results(("SSA", "LRF-Dyn"))
    one, two = results["attentions"].values()
    results["attentions"]["kind1"] = two = {**one, "label": "LRF-Dyn", "place": 4, "energy": {**one["energy"]}}
    one["place"] = 1
    one["state_terms"][0]["formula"] = "(a + b) / h"
    two["energy"]["layers"] = [layer("stem.conv", "3x3 convolution", 0.0, 1000.0), layer("blocks.0.attn.lrf", "", 1, 0)]
    two["energy"]["layers"].append(layer("blocks.0.attn.k^T v", "attention", 1e6, 0.0))
    results["runs"] = [{**run, "curve": results["runs"][0]["curve"]} for run in results["runs"]]
    results |= {"notes": ["It holds `N^2` numbers, <b>`"], "batch": 16}
    path = tmp_path / "report.html"
    path.write_text(render_report(results) + LOOKS, encoding="utf-8")
    page = Page(dump_dom(path, tmp_path / "profile", width=500))
    assert error_count(page) == "0"
    seen = json.loads(page.text("pre"))
    assert seen["wide"] == [True, True]
    assert seen["atEnd"] == [False, False]
    assert seen["contents"] == seen["parts"]
    assert {"#summary", "#energy", "#notes"} <= set(seen["parts"])
    assert seen["anchors"] == seen["headings"] == 0
    assert seen["above"]
    assert seen["colours"] == ["mark s1", "mark s4"]
    assert seen["sizes"][0] > seen["sizes"][1]
    assert float(seen["points"][0]) > 0.5
    assert float(seen["points"][1]) == 0
    assert seen["fractions"] == [["a+b", "h"], ["a+b", "h"]]
    assert seen["powers"] == ["N2"]
    names = ["stem.conv", "blocks.0.attn.lrf", "blocks.0.attn.q.conv", "blocks.0.attn.kTvk^T v"]
    assert seen["layers"] == names
    assert "8" in seen["sides"]
    assert "9" not in seen["sides"]
    assert "passes over a batch of 16 images" in seen["speed"]


# Clicks what a reader would click, and leaves what came of it in the page.
CLICKS = """
<script>
const saved = {};
save = (name, type, text) => { saved[name] = text; };
for (const part of [".save button", ".legend button", ".choice input", ".unfold"]) {
  for (const button of document.querySelectorAll(part)) button.click();
}
const rows = () => [...document.querySelectorAll("#summary tbody th")].map((name) => name.textContent);
const orders = [...document.querySelectorAll("#summary .sort")].slice(0, 2).flatMap((button) =>
  [0, 1].map(() => { button.click(); return rows(); }));
const column = document.querySelector("#energy .scroll .sort:nth-of-type(1)").closest("tr").cells[3];
const energies = [0, 1, 2].map(() => {
  column.querySelector("button").click();
  return [...document.querySelectorAll("#energy .scroll tbody")][0].rows[0].cells[0].textContent;
});
for (const button of document.querySelectorAll(".legend button")) button.click();
const charts = [...document.querySelectorAll("#attention-distance .chart")];
charts[0].focus();
charts[0].dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
const read = document.getElementById("tip").textContent;
const bar = document.querySelector("#energy-parts .chart rect.bar[tabindex]");
bar.dispatchEvent(new PointerEvent("pointermove", { clientX: 5, clientY: 5 }));
const energyTip = document.getElementById("tip").textContent;
document.getElementById("theme").click();
const theme = document.documentElement.dataset.theme;
document.body.append(html("pre", {}, JSON.stringify({ saved, orders, theme, energies, read, energyTip })));
</script>
"""


def test_browser_downloads_sorts_and_switches(tmp_path: Path) -> None:
    results = make_results(("SSA", 'LRF, "Dyn"'))
    results["attentions"]["kind1"]["energy"]["energy_pj"] = 5e6
    path = tmp_path / "report.html"
    path.write_text(render_report(results) + CLICKS, encoding="utf-8")
    page = Page(dump_dom(path, tmp_path / "profile"))
    assert error_count(page) == "0"
    outcome = json.loads(page.text("pre"))
    files = outcome["saved"]
    assert len(files) == 2 * len(FIGURES)
    for figure in FIGURES:
        picture = next(text for name, text in files.items() if re.fullmatch(rf"{figure}(-[a-z_]+)?\.svg", name))
        root = ElementTree.fromstring(picture)
        # The file must not lean on the style sheet of the page, and shows the light theme.
        assert "var(" not in picture
        assert "class=" not in picture
        assert root[0].get("fill") == "rgb(255, 255, 255)"
        assert "SSA" in "".join(root.itertext())
    with io.StringIO(files["accuracy-memory-state.csv"], newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["attention"] for row in table] == ["SSA", 'LRF, "Dyn"']
    assert [float(row["accuracy_mean"]) for row in table] == [
        values["accuracy_mean"] for values in results["attentions"].values()
    ]
    first, second = ["SSA", 'LRF, "Dyn"'], ['LRF, "Dyn"', "SSA"]
    # By name upwards and downwards, then by accuracy from the best and from the worst.
    assert outcome["orders"] == [second, first, second, first]
    assert outcome["theme"] == "dark"
    # Down, up, and back to the order of the results; the two models are made apart here.
    assert outcome["energies"] == [second[0], first[0], first[0]]
    assert "Distance 0" in outcome["read"]
    assert "projections" in outcome["energyTip"] or "stem" in outcome["energyTip"]
    assert "share" in outcome["energyTip"]
