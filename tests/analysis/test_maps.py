"""Attention maps of single queries, and the pictures that they are laid over."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest
import torch

from lrfdyn.analysis import attention_maps
from lrfdyn.analysis.measure.maps import BRIGHTER, DARKER, choose_pictures, parse_queries
from lrfdyn.analysis.measure.observe import Images, load_images, observe, watch_attentions
from lrfdyn.attention import ATTENTIONS
from lrfdyn.cli import main
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.errors import LrfdynError
from lrfdyn.models import Spikformer
from tests.models.host_checks import digits_model

CPU = torch.device("cpu")
QUERIES = [(4, 4), (1, 6)]


class Mixing:
    """The whole mixing matrix of the last attention layer, `[B, N, N]`."""

    def watch(self, model):
        def note(_name, layer, x, spikes):
            self.found = torch.cat([weights for _, weights in layer.mixing_weights(spikes, x.shape[3:], 2**24)], 1)

        return watch_attentions(model, note)

    def record(self):
        return {"weights": self.found}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_maps_are_rows_of_the_mixing_matrix(kind):
    model, images = digits_model(kind), torch.randn(3, 1, 8, 8)
    (whole,) = observe(model, images, Mixing())
    found = attention_maps(model, images.split(2), QUERIES)
    assert found["grid"] == [8, 8]
    assert found["layers"] == ["blocks.0.attn"]
    for i, image in enumerate(found["maps"]):
        for (row, column), query in zip(QUERIES, image, strict=True):
            weights = whole["weights"].expand(3, -1, -1)[i, 8 * row + column].double()
            if weights.sum() == 0:
                assert query == {"average": None, "by_layer": [None]}
                continue
            (layer,) = query["by_layer"]
            torch.testing.assert_close(
                torch.tensor(layer).flatten(), (weights / weights.sum()).float(), atol=1e-6, rtol=0
            )
            assert query["average"] == layer


def test_the_average_leaves_layers_without_weight_out():
    torch.manual_seed(0)
    model = Spikformer(**{**digits_model("ssa").config, "depth": 2})
    silent = model.blocks[1].attn.q
    silent.register_forward_hook(lambda _module, _args, spikes: torch.zeros_like(spikes))
    ((query,),) = attention_maps(model, torch.randn(1, 1, 8, 8), [(0, 0)])["maps"]
    assert query["by_layer"][1] is None
    assert query["average"] == query["by_layer"][0]


def test_queries_without_being_asked_for_are_the_middle_and_a_quarter():
    assert attention_maps(digits_model(), torch.randn(1, 1, 8, 8))["queries"] == [[4, 4], [2, 2]]


@pytest.mark.parametrize("place", [(8, 0), (0, 8), (-1, 0)])
def test_a_query_outside_of_the_grid_is_an_error(place):
    with pytest.raises(LrfdynError, match="queries: expected places on the grid of 8 x 8"):
        attention_maps(digits_model(), torch.randn(1, 1, 8, 8), [place])


@pytest.mark.parametrize("text", ["4", "4:", "4:x", "1:2:3", "-1:2"])
def test_queries_as_text(text):
    assert parse_queries(["4:2", "0:11"]) == [(4, 2), (0, 11)]
    with pytest.raises(LrfdynError, match="queries: expected ROW:COLUMN"):
        parse_queries([text])


def pixels(source: str):
    image = pytest.importorskip("PIL.Image")
    return torch.tensor(list(image.open(BytesIO(b64decode(source.partition(",")[2]))).tobytes()), dtype=torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_hold_the_levels_of_the_images(channels):
    levels = torch.randint(256, (3, channels, 5, 7), dtype=torch.uint8)
    how = Preprocessing(7, (0.3,) * channels, (0.2,) * channels, 1.0)
    batches = list(((levels / 255 - 0.3) / 0.2).split(2))
    pictures = choose_pictures(Images("made up", 3, 2, CPU, {}, batches, [], preprocessing=how), ["2"])
    assert [shown["name"] for shown in pictures.shown] == ["image 1", "image 3"]
    torch.testing.assert_close(pictures.images, torch.cat(batches)[[0, 2]])
    for shown, image in zip(pictures.shown, levels[[0, 2]], strict=True):
        assert torch.equal(pixels(shown["source"]), image.permute(1, 2, 0).flatten())


def test_a_recording_is_the_sum_of_its_frames_in_two_colours():
    frames = torch.zeros(3, 2, 2, 1, 3)  # [T, recordings, channels, H, W]
    frames[:, 1, 0, 0, 0] = 4  # darker
    frames[1, 1, 1, 0, 1] = 6  # brighter
    images = Images("made up", 2, 2, CPU, {"time_steps": 3}, list(frames.split(1, 1)), [])
    pictures = choose_pictures(images, ["2"])
    assert [shown["name"] for shown in pictures.shown] == ["recording 1", "recording 2"]
    assert torch.equal(pictures.images, frames)
    none, seen = (pixels(shown["source"]).tolist() for shown in pictures.shown)
    assert none == [0] * 9
    assert seen == [*DARKER, *(round(level / 2) for level in BRIGHTER), 0, 0, 0]
    with pytest.raises(LrfdynError, match="maps: expected 1 to 2 of the recordings, got 3"):
        choose_pictures(images, ["3"])


def test_files_are_read_as_test_images_are(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "grey.png"
    image.new("L", (20, 12), 120).save(path)
    pictures = choose_pictures(load_images("digits", None, 2, 2, CPU), [str(path)])
    assert pictures.images.shape == (1, 1, 8, 8)
    assert [shown["name"] for shown in pictures.shown] == ["grey"]
    assert set(pixels(pictures.shown[0]["source"]).tolist()) == {120}


def test_bad_pictures_are_one_line(tmp_path):
    pytest.importorskip("PIL")
    images, broken = load_images("digits", None, 2, 2, CPU), tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    for wanted, words in ((["3"], "1 to 2 of the images"), (["0"], "1 to 2"), ([str(broken)], "cannot read"),
                          ([str(tmp_path / "none.png")], "cannot read")):  # fmt: skip
        with pytest.raises(LrfdynError, match=rf"^maps: .*{words}"):
            choose_pictures(images, wanted)
    with pytest.raises(LrfdynError, match="maps: need images of a data set"):
        choose_pictures(load_images("random", None, 2, 2, CPU), ["1"])


def test_queries_without_maps_are_an_error(capsys, tmp_path: Path):
    assert main(["analyze", "spikformer_4_384", "--queries", "1:1", "--out", str(tmp_path)]) == 2
    assert "queries: only with --maps" in capsys.readouterr().err
