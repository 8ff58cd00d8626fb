"""The page in examples/space: its folder is whole, and a client gets from it what Python gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lrfdyn
from lrfdyn.deploy import Predictor
from tests.test_zoo import NAME, ROOT, stored

pytest.importorskip("PIL")
yaml = pytest.importorskip("yaml")
pytestmark = stored


@pytest.fixture(scope="module")
def space(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "space"
    subprocess.run(["make", "--silent", "space", f"SPACE={folder}"], cwd=ROOT, check=True)
    return folder


def environment(space: Path) -> dict[str, str]:
    """As in a space: no other copy of the package is nearer, nothing is downloaded and nothing told to anyone."""
    cache = {"LRFDYN_CACHE": str(space / "cache"), "HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    return {**os.environ, **cache, "GRADIO_TEMP_DIR": str(space / "uploads"), "PYTHONUNBUFFERED": "1"}


def test_the_folder_has_all_that_it_needs(space):
    _, front, _ = (space / "README.md").read_text("utf-8").split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["sdk"] == "gradio"
    assert (space / facts["app_file"]).is_file()
    package = tomllib.loads((space / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {*package["dependencies"], *package["optional-dependencies"]["data"]}
    assert needed == {line for line in (space / "requirements.txt").read_text().split("\n") if re.match(r"\w", line)}
    code = f"import lrfdyn; print(lrfdyn.__file__); lrfdyn.from_pretrained('lrfdyn/{NAME}')"
    command = [sys.executable, "-c", code]  # with the folder first on its path
    result = subprocess.run(command, cwd=space, env=environment(space), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == space / "lrfdyn" / "__init__.py"


@pytest.fixture(scope="module")
def client(space) -> Iterator:
    pytest.importorskip("gradio")
    from gradio_client import Client

    command = [sys.executable, "app.py"]
    with subprocess.Popen(command, cwd=space, env=environment(space), stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout.readline, "")
            address = next((found[0] for line in lines if (found := re.search(r"http://\S+", line))), None)
            assert address is not None, "the page did not start"
            yield Client(address, verbose=False)
        finally:
            server.terminate()


def ask(client, picture: Path | None, *model: str) -> tuple[dict, str | None]:
    from gradio_client import handle_file

    return client.predict(picture and handle_file(picture), *model, api_name="/predict")


@pytest.mark.parametrize("model", [NAME, "spikformer_digits_ssa"])
def test_a_client_gets_the_scores_of_python(client, space, model):
    from PIL import Image

    scores, attention = ask(client, space / "seven.png", model)
    (record,) = Predictor.open(model).predict([space / "seven.png"])
    assert scores["label"] == "7"
    assert [best["label"] for best in scores["confidences"]] == [best["name"] for best in record["predictions"]]
    expected = [best["score"] for best in record["predictions"]]
    assert [best["confidence"] for best in scores["confidences"]] == pytest.approx(expected, abs=1e-5)
    with Image.open(attention) as shown:
        assert shown.size == (320, 320)
        assert len(shown.convert("RGB").getcolors(320 * 320)) > 8  # a map, and no even colour


def test_without_a_choice_it_is_the_default_model(client, space):
    (default,) = re.findall(r'^DEFAULT = "(\w+)"', (space / "app.py").read_text("utf-8"), re.MULTILINE)
    scores, _ = ask(client, space / "raccoon.jpg")
    assert scores == ask(client, space / "raccoon.jpg", default)[0]
    assert scores["label"] == "raccoon"


def test_models_are_those_of_the_zoo_that_take_images(client):
    parameters = client.view_api(return_format="dict", print_info=False)["named_endpoints"]["/predict"]["parameters"]
    choices = parameters[1]["type"]["enum"]
    known = {entry.name: entry for entry in lrfdyn.list_pretrained()}
    assert NAME in choices
    assert set(choices) <= set(known)
    assert not any(known[name].data == "nmnist" for name in choices)


def test_what_is_wrong_is_one_line(client, space, tmp_path):
    from gradio_client.exceptions import AppError

    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((space / "seven.png").read_bytes()[:200])
    for picture, message in (
        (tmp_path / "text.png", "Cannot read the picture: UnidentifiedImageError: "),
        (tmp_path / "cut.png", "Cannot read the picture: OSError: image file is truncated"),
        (None, "Choose a picture first."),
    ):
        with pytest.raises(AppError, match=f"^{re.escape(message)}[^\n]*$"):
            ask(client, picture, NAME)
