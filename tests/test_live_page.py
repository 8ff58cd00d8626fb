"""The live page in a browser: its numbers are Python's, and it follows keys, pointer and files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx", reason="the live page needs onnx")
pytest.importorskip("sklearn", reason="the live page has scikit-learn's digits")

from docs import live
from lrfdyn.analysis import attention_maps, attention_state, firing_rates
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy import IntegerModel
from lrfdyn.deploy.integer.operations import Fire
from lrfdyn.deploy.integer.quantize import quantize_with_twin
from lrfdyn.io.hub import from_pretrained
from lrfdyn.models import SpikingModel
from tests.analysis.browser import Tab, open_browser

pytestmark = pytest.mark.skipif((live.ROOT / "PKG-INFO").is_file(), reason="an sdist has no weights")
CIFAR100, DIGITS = live.PAIRS
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")  # a moving test picture
STATUS = "byId('status').textContent"
DROP = """((content, name, type) => {
  const data = new DataTransfer();
  data.items.add(new File([content], name, { type }));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
})"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "missing").write_text(live.build(folder, [DIGITS]) or "")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.fixture(scope="module")
def address(built) -> Iterator[str]:
    missing = (built / "missing").read_text()
    if missing:
        pytest.skip(missing)
    with served(built) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(tmp_path_factory.mktemp("profile"), *CAMERA) as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser, address) -> Tab:
    browser.open(address, 1280)  # once: the runtime is large
    return browser


@pytest.fixture
def tab(opened) -> Iterator[Tab]:
    """The page with its fourth sample in a wide window, which must have no errors in the end."""
    opened.show(1280)
    opened.ask("live.token = 36")
    show_sample(opened, 3)
    yield opened
    assert opened.problems == []
    assert opened.ask("document.body.dataset.errors") == "0"


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """Levels `[360, 1, 8, 8]` and labels of the test images."""
    source = create_data("digits", None, Augmentation())
    batch = source.pick_test_images(np.arange(source.test_images))
    return torch.from_numpy(Preprocessing.of_data(source).levels(batch.images.numpy())), batch.labels


@pytest.fixture(scope="module")
def models() -> list[tuple[SpikingModel, IntegerModel, SpikingModel]]:
    """Of both attentions the model, its integers and these in real numbers."""
    loaded = [from_pretrained(name, host=SpikingModel) for name in DIGITS.models]
    return [(model, *quantize_with_twin(model)) for model in loaded]


def images(model: SpikingModel, levels: Tensor) -> Tensor:
    """What a model in float64 takes."""
    assert model.preprocessing is not None
    return (levels.double() / 255 - model.preprocessing.mean[0]) / model.preprocessing.std[0]


def show_sample(tab: Tab, number: int) -> None:
    tab.ask("live.shown.label = null")  # the page may show this very sample, from before
    tab.ask(f"byId('samples').children[{number}].click()")
    tab.wait(f"live.shown.label === {number}")


def test_samples_are_the_first_test_image_of_every_class(digits):
    pillow = pytest.importorskip("PIL.Image")
    levels, labels = digits
    for number in range(10):
        sample = np.asarray(pillow.open(live.PAGE / "samples" / "digits" / f"{number}.png"))
        assert np.array_equal(sample, levels[labels == number][0, 0])


def test_manifest_has_the_package_s_own_numbers(built, models):
    (facts,) = json.loads((built / "manifest.json").read_text())["sets"]
    for (model, integer, _), entry in zip(models, facts["models"], strict=True):
        assert entry["state"] == attention_state(model)
        assert entry["scale"] == integer.scale
        assert entry["bytes"] == (built / "models" / entry["file"]).stat().st_size
        fires = [operation.name for operation in integer.operations if isinstance(operation, Fire)]
        assert [layer["name"] for layer in entry["layers"]] == fires
    assert [entry["label"] for entry in facts["models"]] == ["SSA", "LRF-Dyn"]


def test_files_give_logits_spikes_and_attention_in_onnx_runtime(built, digits, models):
    runtime = pytest.importorskip("onnxruntime")
    levels = digits[0][:2]
    for name, (_, integer, _) in zip(DIGITS.models, models, strict=True):
        session = runtime.InferenceSession(built / "models" / f"{name}.onnx")
        names = [output.name for output in session.get_outputs()]
        given = dict(zip(names, session.run(None, {"images": levels.numpy()}), strict=True))
        assert np.array_equal(given["logits"], integer(levels))
        for n, operation in enumerate(integer.operations, 1):
            if isinstance(operation, Fire):
                spikes = integer.run(levels, [n])[0]
                assert np.array_equal(given[f"spikes/{operation.name}"], spikes.sum(2)), operation.name
        for layer in ("blocks.0.attn", "blocks.1.attn"):
            assert given[f"attention/{layer}"].shape[1:] == (64, 64)


def test_samples_are_predicted_as_in_python(tab, digits, models):
    """Logits bit for bit, and what the page writes of them."""
    levels, labels = digits
    for number in range(10):
        show_sample(tab, number)
        picture = levels[labels == number][:1]
        assert tab.ask("[...live.shown.levels]") == picture.flatten().tolist()
        for i, (_, integer, _) in enumerate(models):
            logits = integer(picture)[0]
            scores = (logits.double() * integer.scale).softmax(0)
            assert tab.ask(f"live.shown.results[{i}].logits") == logits.tolist()
            assert tab.ask(f"live.shown.results[{i}].scores") == pytest.approx(scores.tolist(), abs=1e-9)
            best = int(scores.argmax())
            written = tab.ask(f"document.querySelectorAll('.card .says')[{i}].innerText").split()
            assert written == [str(best), f"{float(scores[best]):.1%},", "right" if best == number else "wrong"]


def test_a_batch_of_test_images_has_the_same_bits(tab, digits, models):
    levels = digits[0][::4]
    tensor = f"new ort.Tensor('uint8', Uint8Array.from({levels.flatten().tolist()}), {[*levels.shape]})"
    for i, (_, integer, _) in enumerate(models):
        run = f"live.set.models[{i}].session.run({{ images: {tensor} }})"
        found = torch.tensor(tab.ask(f"{run}.then((given) => [...given.logits.data])"))
        assert torch.equal(found, integer(levels).long().flatten())


def test_attention_is_that_of_the_analysis(tab, digits, models):
    """SSA's with the spikes of the integers, which are those of the twin, and LRF-Dyn's, which has no spikes in it."""
    picture = digits[0][digits[1] == 3][:1]
    places = [(row, column) for row in range(8) for column in range(8)]
    for i, (model, _, twin) in enumerate(models):
        measured = twin if i == 0 else model.double()
        maps = attention_maps(measured, images(model, picture), places)
        assert tab.ask(f"live.set.models[{i}].attention") == maps["layers"]
        for layer in ("average", 0, 1):
            one = f"weightsOf(live.set.models[{i}], live.shown.results[{i}], n, {layer!r})"
            shown = tab.ask(f"Array.from({{ length: 64 }}, (_, n) => {one})")
            expected = [q["average"] if layer == "average" else q["by_layer"][layer] for q in maps["maps"][0]]
            for found, wanted in zip(shown, expected, strict=True):
                assert (found is None) == (wanted is None)
                assert wanted is None or np.allclose(found, np.ravel(wanted), atol=2e-6)


def test_spikes_are_those_of_python(tab, digits, models):
    show_sample(tab, 5)
    picture = digits[0][digits[1] == 5][:1]
    for i, (model, integer, twin) in enumerate(models):
        fires = {n: op.name for n, op in enumerate(integer.operations, 1) if isinstance(op, Fire)}
        shown = tab.ask(
            f"Object.fromEntries(Object.entries(live.shown.results[{i}].spikes).map(([k, v]) => [k, [...v]]))"
        )
        assert shown.keys() == set(fires.values())
        for name, spikes in zip(fires.values(), integer.run(picture, [*fires]), strict=False):
            assert shown[name] == spikes.sum(2).flatten().tolist(), name
        if i == 0:  # whose integers round nothing
            rates = firing_rates(twin, images(model, picture))["by_layer"]
            neurons = tab.ask(f"Object.fromEntries(live.set.models[{i}].layers.map((l) => [l.name, l.neurons]))")
            assert {name: sum(shown[name]) / neurons[name] / 4 for name in shown} == pytest.approx(rates)
    parts = "[...document.querySelectorAll('#parts input')]"
    tab.ask(f"{parts}[1].click()")
    labels = tab.ask("[...document.querySelectorAll('#spikes > b')].map((name) => name.textContent)")
    assert labels == ["", "q", "k", "v", "attention", "projection", "MLP, first", "MLP, second"]
    assert tab.ask("document.querySelectorAll('#spikes .none').length") == 2  # q and k of LRF-Dyn


def test_keys_reach_and_move_everything(tab):
    stops = []
    tab.ask("document.querySelector('.brand').focus()")
    for _ in range(40):
        tab.press("Tab")
        stops.append(
            tab.ask("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
        if stops[-1] == "maps":
            break
    assert stops.count("BUTTON") == 10  # samples
    assert [stop for stop in stops if stop in ("theme", "file", "camera", "draw", "layers", "maps")] == [
        "theme", "file", "camera", "draw", "layers", "maps",
    ]  # fmt: skip
    assert tab.ask("getComputedStyle(byId('maps')).outlineStyle") == "solid"
    for key, token in (("ArrowUp", 28), ("ArrowLeft", 27), ("ArrowDown", 35), ("ArrowRight", 36)):
        tab.press(key)
        assert tab.ask("live.token") == token
    assert tab.ask("byId('token').textContent").startswith("The token in row 5, column 5 looks: SSA most at row ")
    for _ in range(9):
        tab.press("ArrowDown")
    assert tab.ask("live.token") == 60, "the last row is the last"
    tab.ask("document.querySelector('#layers input').focus()")
    tab.press("ArrowRight")
    assert tab.ask("live.layer") == 0
    tab.ask("byId('samples').children[7].focus()")
    tab.press("Space")
    tab.wait("live.shown.label === 7")
    tab.ask("document.querySelector('#layers input').click()")


def test_nothing_is_loaded_from_elsewhere(tab, address):
    loaded = tab.ask("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert sum(name.endswith((".wasm", ".onnx")) for name in loaded) >= 2
    assert {name.startswith((address.rpartition("/")[0], "data:", "blob:")) for name in loaded} == {True}


def test_pointer_chooses_the_token(tab):
    tab.ask("byId('map-1').scrollIntoView({ block: 'center' })")
    area = tab.ask("byId('map-1').getBoundingClientRect().toJSON()")
    tab.point(area["x"] + area["width"] * 2.5 / 8, area["y"] + area["height"] * 6.5 / 8)
    assert tab.ask("live.token") == 6 * 8 + 2


def test_drawing_by_keys(tab):
    tab.ask("byId('draw').click()")
    tab.wait("live.shown.name === 'Your drawing'")
    assert tab.ask("Math.max(...live.shown.levels)") == 0
    for key in (*["ArrowUp"] * 5, "Space", *["ArrowDown"] * 10):
        tab.press(key)
    tab.wait("live.shown.levels[6 * 8 + 4] > 0 && !live.working")
    assert [tab.ask(f"live.shown.levels[{n}]") for n in (0, 4 * 8, 4 * 8 + 7)] == [0, 0, 0]
    assert tab.ask("document.querySelector('.card .says b').textContent") == "1"


def test_files_are_looked_at_or_refused_in_a_line(tab, built):
    known = tab.ask("live.shown.results.map((result) => result.logits)")
    show_sample(tab, 4)
    content = [*(built / "samples" / "digits" / "3.png").read_bytes()]
    tab.ask(f"{DROP}(Uint8Array.from({content}), 'three.png', 'image/png')")
    tab.wait("live.shown.name === 'three.png'")
    assert tab.ask("live.shown.results.map((result) => result.logits)") == known
    # Ink on paper, large and wide: turned round, scaled, and the middle taken.
    paper = (
        "new Promise((done) => { const c = document.createElement('canvas'); c.width = 400; c.height = 200;"
        "const x = c.getContext('2d'); x.fillStyle = '#fff'; x.fillRect(0, 0, 400, 200); x.fillStyle = '#333';"
        "x.fillRect(185, 20, 40, 160); c.toBlob((blob) => done(blob)); })"
    )
    tab.ask(f"{paper}.then((blob) => {DROP}(blob, 'paper.png', 'image/png'))")
    tab.wait("live.shown.name === 'paper.png'")
    levels = np.array(tab.ask("[...live.shown.levels]")).reshape(8, 8)
    assert (levels[2:6, 3:5].min() > 128, levels[:, 0].max(), levels.max()) == (True, 0, 255)
    tab.ask(f"{DROP}('no picture', 'note.txt', 'text/plain')")
    tab.wait(f"{STATUS}.includes('note.txt')")
    assert tab.ask(STATUS) == "note.txt is not a picture that the browser can read."
    assert tab.ask("live.shown.name") == "paper.png"


def test_the_camera_is_followed_until_it_is_stopped(tab):
    assert tab.ask("camera.stream") is None
    tab.ask("byId('camera').click()")
    tab.wait("live.shown.moving && live.shown.results[0].times.length > 2")
    assert tab.ask("[byId('video').hidden, byId('camera').textContent]") == [False, "Stop the camera"]
    assert tab.ask("Math.max(...live.shown.levels)") == 255
    tab.ask("track = camera.stream.getTracks()[0]; byId('camera').click()")
    assert tab.ask("[track.readyState, byId('video').hidden]") == ["ended", True]


def test_without_a_camera_a_line_says_so(tab):
    for name, line in (("NotFoundError", "No camera was found."), ("NotAllowedError", "was not allowed to use it.")):
        tab.ask(f"navigator.mediaDevices.getUserMedia = async () => {{ throw new DOMException('', '{name}'); }}; 0")
        tab.ask("byId('camera').click()")
        tab.wait(f"{STATUS}.endsWith('{line}')")
    tab.ask("delete navigator.mediaDevices.getUserMedia; 0")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_fits_the_window(tab, width, dark):
    tab.show(width, dark=dark)
    for state in ("0", "byId('draw').click()"):
        tab.ask(state)
        assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ink, paper = tab.ask("['color', 'backgroundColor'].map((part) => getComputedStyle(document.body)[part])")
    assert (sum(map(int, re.findall(r"\d+", ink))) > sum(map(int, re.findall(r"\d+", paper)))) == dark


def test_without_the_runtime_the_page_says_so(browser, tmp_path, monkeypatch):
    """And is built all the same. It has the colours that were chosen in the documentation."""

    def unreachable(*_: Any) -> Path:
        raise OSError("no network")

    monkeypatch.setattr(live, "fetch_runtime", unreachable)
    assert live.build(tmp_path, [DIGITS]) == f"{live.RUNTIME} {live.VERSION} could not be downloaded (no network)"
    with served(tmp_path) as address:
        for scheme, theme in (("slate", "dark"), ("default", "light")):
            browser.open(address, 390)
            chosen = json.dumps({"index": 1, "color": {"scheme": scheme}})
            browser.ask(f"localStorage.setItem('/lrfdyn/.__palette', {chosen!r})")
            browser.open(address, 390)
            assert browser.ask("document.documentElement.dataset.theme") == theme
        assert browser.ask(STATUS).startswith("The runtime (onnxruntime-web) was not there when this page was built")
        assert browser.ask("byId('answer').hidden")
    assert browser.problems == []


def test_photos_are_named_as_in_python(browser, tmp_path):
    """The photos of the page, by models of nine million parameters: the same logits as Python's, and right. The data
    sets of the page can be chosen from."""
    pillow = pytest.importorskip("PIL.Image")
    missing = live.build(tmp_path, live.PAIRS)
    if missing:
        pytest.skip(missing)
    onnxruntime = pytest.importorskip("onnxruntime")
    sessions = [onnxruntime.InferenceSession(tmp_path / "models" / f"{name}.onnx") for name in CIFAR100.models]
    names = json.loads((tmp_path / "manifest.json").read_text())["sets"][0]["classes"]
    with served(tmp_path) as address:
        browser.open(address, 390)
        for number, path in enumerate(sorted((live.PAGE / "samples" / CIFAR100.key).glob("*.png"))):
            levels = torch.from_numpy(np.array(pillow.open(path))).permute(2, 0, 1).unsqueeze(0)
            browser.ask(f"byId('samples').children[{number}].click()")
            browser.wait(f"live.shown?.label === {names.index(path.stem)}")
            assert browser.ask("[...live.shown.levels]") == levels.flatten().tolist()
            for i, session in enumerate(sessions):  # other tests hold such files against the definition
                logits = session.run(["logits"], {"images": levels.numpy()})[0][0].tolist()
                assert browser.ask(f"live.shown.results[{i}].logits") == logits
                assert names[int(np.argmax(logits))] == path.stem
        assert browser.ask("document.documentElement.scrollWidth") <= 390
        browser.ask("[...document.querySelectorAll('#sets input')].at(-1).click()")
        browser.wait("live.shown?.levels.length === 64")
    assert browser.problems == []


def test_a_changed_download_is_refused(tmp_path, monkeypatch):
    (tmp_path / live.RUNTIME / "-").mkdir(parents=True)
    (tmp_path / live.RUNTIME / "-" / f"{live.RUNTIME}-{live.VERSION}.tgz").write_bytes(b"something else")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", tmp_path.as_uri())
    with pytest.raises(OSError, match="another checksum"):
        live.fetch_runtime(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
