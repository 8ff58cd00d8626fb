"""The HTML report: self-contained, safe against its own data, written whole or not at all, drawn right."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lrfdyn.analysis.report import render_report, write_report
from lrfdyn.analysis.theorems import TheorySettings, theory_results
from lrfdyn.errors import LrfdynError

HOSTILE = '</script><b id="broken">&<!-- <script>'
FIGURES = {
    "accuracy-memory",
    "learning-curves",
    "attention-distance",
    "short-range-share",
    "attention-entropy",
    "receptive-fields",
    "receptive-field-share",
    "energy-parts",
    "firing-rates",
}


def layer(name: str, kind: str, accumulates: float, macs: float) -> dict[str, Any]:
    picojoule = 0.9 * accumulates + 4.6 * macs
    return {
        "name": name,
        "kind": kind,
        "accumulates": accumulates,
        "multiply_accumulates": macs,
        "energy_pj": picojoule,
    }


def attention(label: str, accuracy: list[float], state: int) -> dict[str, Any]:
    """Return the results of one attention on a 4 by 4 grid of tokens."""
    weight = [0.2, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02]
    side = 8
    field = [[math.exp(-((row - 3.5) ** 2 + (column - 3.5) ** 2) / 4) for column in range(side)] for row in range(side)]
    mean = sum(accuracy) / len(accuracy)
    return {
        "label": label,
        "options": {"kernel": 3},
        "parameters": 20_000 + state,
        "accuracy_mean": mean,
        "accuracy_spread": max(accuracy) - mean,
        "accuracy_values": accuracy,
        "state_terms": [
            {"name": "kv matrix", "formula": "d^2/h", "elements": state // 8, "bytes": state // 2},
            {"name": "line buffers", "formula": "K W d", "elements": state // 8, "bytes": state // 2},
        ],
        "state_bytes": state,
        "peak_inference_bytes": 1_000_000 + state,
        "firing_rate": 0.18,
        "firing_by_layer": {"stem.neuron": 0.2, "blocks.0.neuron": 0.16},
        "images_per_second": 812.5,
        "energy": {
            "accumulates": 2.5e6,
            "multiply_accumulates": 1000.0,
            "energy_pj": 2.25e6 + 4600.0,
            "assumptions": ["0.9 pJ per accumulate."],
            "layers": [
                layer("stem.conv", "3x3 convolution", 0.0, 1000.0),
                layer("blocks.0.attn.q.conv", "1x1 convolution", 1.5e6, 0.0),
                layer("blocks.0.attn.k^T v", "attention", 1e6, 0.0),
            ],
        },
        "locality": {
            "distance": list(range(7)),
            "weight": weight,
            "weight_by_layer": [weight, weight[::-1]],
            "short_distance": 2,
            "short_range_share": 0.31,
            "short_range_share_uniform": 0.2,
            "mean_distance": 2.1,
            "entropy_mean": 2.4,
            "entropy_uniform": math.log(16),
            "entropy_by_layer": [2.3, 2.5],
            "entropy_histogram": {
                "edges": [2.0, 2.25, 2.5, 2.75, 3.0],
                "density": [0.4, 1.6, 1.2, 0.8],
                "density_by_layer": [[0.4, 1.6, 1.2, 0.8], None],
            },
        },
        "receptive_field": {
            "map": field,
            "share_inside": [{"side": size, "share": size / 9} for size in (1, 3, 5, 7, 9)],
        },
    }


def make_results(labels: tuple[str, ...] = ("SSA", "LRF-Dyn"), seeds: int = 2) -> dict[str, Any]:
    """Return small results with every section."""
    attentions = {}
    runs = []
    for index, label in enumerate(labels):
        key = f"kind{index}"
        accuracy = [0.9 + 0.01 * index + 0.004 * seed for seed in range(seeds)]
        attentions[key] = attention(label, accuracy, 4096 * (index + 1))
        for seed in range(seeds):
            curve = [
                {
                    "epoch": epoch,
                    "train_loss": 2 / epoch,
                    "train_accuracy": 0.8,
                    "test_loss": 1.0,
                    "test_accuracy": accuracy[seed] - 0.3 / epoch,
                    "seconds": 0.5,
                }
                for epoch in range(1, 8)
            ]
            weights = f"weights/{key}-seed{seed}.safetensors"
            runs.append(
                {
                    "attention": key,
                    "seed": seed,
                    "parameters": 20_000,
                    "test_accuracy": accuracy[seed],
                    "train_seconds": 21.0,
                    "weights": weights,
                    "curve": curve,
                }
            )
    return {
        "format": "lrfdyn-results/1",
        "title": "Spikformer on digits",
        "command": "lrfdyn reproduce --out demo",
        "created": "2026-11-15T08:00:00",
        "version": "0.1.0",
        "machine": {"cpu": "some CPU", "cores": 2, "threads": 2, "python": "3.11.7", "torch": "2.13.0"},
        "data": {"name": "digits", "train": 1437, "test": 360, "classes": 10, "note": "Small."},
        "model": {"name": "spikformer", "config": {"dim": 64, "depth": 2}, "grid": [4, 4], "time_steps": 4},
        "recipe": {"epochs": 7, "batch_size": 64, "learning_rate": 0.002},
        "wall_seconds": 190.3,
        "runs": runs,
        "attentions": attentions,
        "notes": ["A small task."],
    }


class Page(HTMLParser):
    """What a browser would make of the page: its elements, its texts per element, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self._open = f"script {dict(attrs).get('type', '')}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open, data))

    def text(self, element: str) -> str:
        return "".join(text for name, text in self.texts if name == element)

    def data(self) -> dict[str, Any]:
        return json.loads(self.text("script application/json"))


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


def dump_dom(path: Path, profile: Path) -> str:
    """Return the page as headless Chromium leaves it after running its scripts."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((found for found in map(shutil.which, names) if found), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=3000",
        "--dump-dom",
        path.as_uri(),
    ]
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
        del values["locality"], values["receptive_field"], values["energy"], values["firing_by_layer"]
        values["images_per_second"] = float("nan")
    return results


def mixed_results() -> dict[str, Any]:
    """Return results in which only the first attention has the optional sections."""
    results = make_results()
    del results["attentions"]["kind1"]["locality"], results["attentions"]["kind1"]["receptive_field"]
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
        pytest.param(bare_results(), {"accuracy-memory"}, id="bare"),
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
