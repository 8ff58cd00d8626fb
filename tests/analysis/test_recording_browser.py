"""The page of a recording in a browser: it plays, follows keys and pointer, and fits a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrfdyn.analysis.report.recording import recording_results, write_recording_page
from lrfdyn.data.recordings import Events
from tests.analysis.browser import Tab, open_browser
from tests.analysis.made_up import HOSTILE
from tests.analysis.test_recording import trained
from tests.data.recordings import recording

TIP = "document.getElementById('tip').textContent"
FAST = "document.querySelector('.controls select').value = '1'"
STILL = "clock.playing === false && clock.time === wholeTime"
SEEN = """({
  step: clock.step + 1,
  marks: [...document.querySelectorAll(".chart .now")].map((mark) => Number(mark.dataset.step)),
  titles: [...document.querySelectorAll("#player h3")].map((title) => title.textContent),
  bars: [...document.querySelectorAll("#player .chart [role=img]")].map((bar) => bar.getAttribute("aria-label")),
  slider: document.getElementById("time").getAttribute("aria-valuetext"),
  part: [...document.querySelectorAll(".parts span")].findIndex((part) => part.classList.contains("now")) + 1,
})"""
LIT = """(() => {
  const canvas = document.querySelectorAll("#player canvas")[%d];
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const night = [13, 16, 24];
  const places = Array.from({ length: pixels.length / 4 }, (_, i) => i);
  return places.filter((i) => night.some((value, part) => pixels[4 * i + part] !== value));
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Events, dict[str, Any]]:
    """A page with the step at which the model would stop, its events and what it holds."""
    path, events, model = tmp_path_factory.mktemp("page") / "page.html", recording(7, 600), trained()
    events = Events(100 * events.t, events.x, events.y, events.p)  # 180 ms, of which the page makes some seconds
    threshold = max(recording_results(model, events, "a", None)["scores"][1]) - 1e-3
    predicted = write_recording_page(path, model, events, name="a.bin", exit=threshold, command="lrfdyn predict a.bin")
    results = recording_results(model, events, "a.bin", threshold)
    assert results["predicted"] == predicted
    return path, events, results


def check_errors(tab: Tab) -> None:
    assert tab.problems == []
    assert tab.ask("document.body.dataset.errors") == "0"


def test_plays_by_itself_to_the_end(tab, made):
    path, _, results = made
    tab.open(path, 1280)
    assert tab.ask("clock.playing && clock.time < wholeTime")
    seen = "seen = []; followers.push((step) => seen.push([step + 1, " + SEEN + ".marks]))"
    tab.ask(f"{seen}; {FAST}")
    tab.wait(STILL)
    tab.press("Space")
    tab.wait(STILL)
    steps = tab.ask("seen.slice(seen.findIndex(([step]) => step === 1))")
    assert [step for step, _ in steps] == sorted({step for step, _ in steps})
    assert (steps[0], steps[-1]) == ([1, [1, 1]], [3, [3, 3]]), "the marks go along"
    assert tab.ask("document.querySelector('#intro .facts b').textContent") == (
        f"{results['predicted']['name']}, {results['predicted']['score']:.1%}"
    )
    check_errors(tab)


def test_keys_move_every_part(tab, made):
    path, _, results = made
    tab.open(path, 1280, still=True)
    assert tab.ask(STILL), "nothing moves for a reader who wants no motion"
    for key, step in (("ArrowLeft", 2), ("ArrowLeft", 1), ("ArrowLeft", 1), ("ArrowRight", 2)):
        tab.press(key)
        seen = tab.ask(SEEN)
        assert (seen["step"], seen["part"], seen["marks"]) == (step, step, [step, step])
        assert seen["titles"][1] == f"Frame {step} of 3"
        assert seen["slider"].endswith(f"frame {step} of 3")
        scores = dict(zip(results["classes"], results["scores"][step - 1], strict=True))
        shown = dict(bar.split(",")[0].split(": ") for bar in seen["bars"])
        assert shown == {name: f"{score:.1%}" for name, score in scores.items()}
    tab.ask("addEventListener('keydown', (event) => { taken = event.defaultPrevented; })")
    tab.press("Space")
    assert tab.ask("clock.playing && taken"), "and the page does not scroll"
    tab.press("Space")
    assert not tab.ask("clock.playing")
    tab.ask(f"{FAST}; document.getElementById('play').focus()")
    tab.press("Space")
    assert tab.ask("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    tab.wait(STILL)
    check_errors(tab)


def test_shows_the_events_and_the_frame(tab, made):
    path, events, _ = made
    tab.open(path, 1280, still=True)
    time = events.t - events.t[0]
    for now in (int(time[-1]), int(time[-1]) // 2):
        tab.ask(f"clock.go({now})")
        recent = (time <= now) & (time > now - time[-1] / 10)
        assert tab.ask(LIT % 0) == np.unique(events.y[recent] * 34 + events.x[recent]).tolist()
        step = tab.ask("clock.step")
        frame = trained().framing.frames(events)[step].sum(0).flatten()
        lit = set(tab.ask(LIT % 1))
        assert set((frame > frame.max() / 100).nonzero()[:, 0].tolist()) <= lit <= set(frame.nonzero()[:, 0].tolist())


def test_pointer_and_keys_read_the_firing(tab, made):
    path, _, results = made
    tab.open(path, 1280, still=True)
    layers = list(results["firing"].items())
    tab.ask("document.querySelector('#firing-steps .chart').focus()")
    tab.press("ArrowLeft")
    assert tab.ask(TIP).startswith(f"{layers[0][0]}frame 2{layers[0][1][1]:.2%}")
    assert tab.ask("clock.step") == 2, "the chart has the keys while it is focused"
    place = "document.querySelectorAll('#firing-steps .chart rect')[%d].getBoundingClientRect().toJSON()"
    tab.ask("document.getElementById('firing-steps').scrollIntoView({ block: 'center' })")
    cell = tab.ask(place % 3)  # the second layer at the first step
    tab.point(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2, click=True)
    assert tab.ask(TIP).startswith(f"{layers[1][0]}frame 1{layers[1][1][0]:.2%}")
    assert tab.ask(SEEN)["marks"] == [1, 1]
    texts = ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows = tab.ask(f"[...document.querySelectorAll('#fires tbody tr')]{texts}")
    assert [name for name, *_ in rows] == [name for name, _ in layers]
    for (_, *cells), (_, rates) in zip(rows, layers, strict=True):
        expected = [100 * rate for rate in (*rates, sum(rates) / 3)]
        assert [float(cell[:-1]) for cell in cells] == pytest.approx(expected, abs=0.006)
    check_errors(tab)


def test_marks_move_on_after_a_download_and_a_choice(tab, made):
    """Both draw the charts anew, and a file has a drawing of its own."""
    path, _, results = made
    tab.open(path, 1280, still=True)
    saved = tab.ask(
        "(() => { const files = []; save = (name, type, text) => files.push(text);"
        "for (const button of document.querySelectorAll('.save button, #scores .choice input')) button.click();"
        "return files; })()"
    )
    assert [text[:4] for text in saved] == ["<svg", "clas", "<svg", "laye"]
    rows = dict(line.split(",", 1) for line in saved[3].splitlines()[1:])
    assert {name: [*map(float, rates.split(","))] for name, rates in rows.items()} == results["firing"]
    tab.press("ArrowLeft")
    assert tab.ask(SEEN)["marks"] == [2, 2]
    check_errors(tab)


def test_the_exit_is_marked(tab, made):
    path, _, results = made
    tab.open(path, 1280, still=True)
    stop = results["exit"]["step"] + 1
    assert stop < 3
    assert (
        tab.ask("document.querySelector('#scores .chart').textContent").count(f"stops: {results['predicted']['name']}")
        == 1
    )
    assert (
        tab.ask("[...document.querySelectorAll('.parts span')].findIndex((p) => p.className.includes('exit'))")
        == stop - 1
    )
    assert f"stopped at {stop}" in tab.ask(SEEN)["titles"][2]
    tab.ask(f"clock.go(ends[{stop - 1}], {stop - 1})")
    assert "stopped" not in tab.ask(SEEN)["titles"][2]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_fits_the_window(tab, made, width, dark):
    tab.open(made[0], width, still=True, dark=dark)
    tab.ask("for (const folded of document.querySelectorAll('details')) folded.open = true")
    tab.wait("document.querySelector('#scores .chart').viewBox.baseVal.width <= innerWidth")
    assert tab.ask("innerWidth") == width
    assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ink, paper = tab.ask("['color', 'backgroundColor'].map((part) => getComputedStyle(document.body)[part])")
    assert (sum(map(int, re.findall(r"\d+", ink))) > sum(map(int, re.findall(r"\d+", paper)))) == dark
    check_errors(tab)


@pytest.mark.parametrize("case", ["one", "hostile"])
def test_odd_recordings(tab, tmp_path, case):
    """One event alone, and names that look like markup, many classes among them."""
    model, events, path = trained(by="time" if case == "one" else "number"), recording(8, 400), tmp_path / "page.html"
    if case == "one":
        events = Events(*(np.array([value]) for value in (5, 3, 4, 1)))
    else:
        model.class_names = tuple(f"{HOSTILE} {i}" for i in range(5))
    write_recording_page(path, model, events, name=HOSTILE, exit=0.99)
    tab.open(path, 390)
    tab.wait(STILL)
    texts = tab.ask("document.body.innerText")
    assert not re.search(r"\b(NaN|undefined|Infinity|null)\b|\[object", texts)
    numbers = tab.ask(
        "[...document.querySelectorAll('.chart *')].flatMap((n) => [...n.attributes].map((a) => a.value)).join(' ')"
    )
    assert not re.search(r"NaN|undefined|Infinity", numbers)
    assert tab.ask("document.getElementById('broken')") is None
    assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    check_errors(tab)
