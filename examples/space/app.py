"""A page that classifies pictures with the models of the zoo, for a space of the Hugging Face hub or one's own machine.

    pip install '.[data]' gradio
    python examples/space/app.py

Then it says where the browser finds it. `make space` builds the folder for the hub.
"""

from functools import cache
from pathlib import Path

import gradio as gr
import numpy as np
import torch
from PIL import Image, ImageDraw

import lrfdyn
from lrfdyn.analysis import attention_maps
from lrfdyn.data import data_class
from lrfdyn.deploy import Predictor

DEFAULT = "spikformer_cifar100_lrf_dyn"
EXAMPLES = {"raccoon.jpg": DEFAULT, "seven.png": "spikformer_digits_lrf_dyn"}
HERE = Path(__file__).parent
SIDE = 320  # pixels of the map


def example(file: str) -> Path:
    """A picture beside this file, or among the photos of the examples."""
    own = HERE / file
    return own if own.is_file() else HERE.parent / "photos" / file


def image_models() -> list[str]:
    """The models of the zoo that name the class of an image."""
    kinds = {entry.name: data_class(entry.data) for entry in lrfdyn.list_pretrained()}
    return [name for name, data in kinds.items() if data.task == "classification" and not data.framed]


@cache
def opened(name: str) -> tuple[Predictor, torch.nn.Module]:
    return Predictor.open(name), lrfdyn.from_pretrained(f"lrfdyn/{name}")


def attention_picture(predictor: Predictor, model: torch.nn.Module, path: Path) -> Image.Image:
    """Where the token in the middle looks, averaged over the layers: in orange over the picture, the token framed."""
    image = predictor.load(path)
    found = attention_maps(model, torch.from_numpy(image)[None])
    (row, column), (height, width) = found["queries"][0], found["grid"]
    weights = found["maps"][0][0]["average"]
    if weights is None:
        raise lrfdyn.LrfdynError("maps: the token in the middle gives no token any weight in this picture")
    levels = predictor.preprocessing.levels(image[None])[0].transpose(1, 2, 0)
    strength = (np.array(weights) / np.max(weights) * 190).astype(np.uint8)
    size, nearest = (SIDE, SIDE), Image.Resampling.NEAREST
    picture = Image.fromarray(np.broadcast_to(levels, (*levels.shape[:2], 3)).copy()).resize(size, nearest)
    picture.paste("#ff9c42", (0, 0), Image.fromarray(strength).resize(size, nearest))
    corners = [(column + i) * SIDE // width for i in (0, 1)], [(row + i) * SIDE // height for i in (0, 1)]
    ImageDraw.Draw(picture).rectangle([*zip(*corners, strict=True)], outline="#58acff", width=4)
    return picture


def classify(picture: str | None, model: str) -> tuple[dict[str, float], Image.Image | None]:
    """The five best classes with their scores, and where the model looks."""
    if picture is None:
        raise gr.Error("Choose a picture first.")
    try:
        predictor, network = opened(model)
        (record,) = predictor.predict([Path(picture)])
    except lrfdyn.LrfdynError as error:
        raise gr.Error(str(error)) from None
    if "error" in record:
        raise gr.Error(f"Cannot read the picture: {record['error']}")
    scores = {best["name"]: best["score"] for best in record["predictions"]}
    try:
        return scores, attention_picture(predictor, network, Path(picture))
    except lrfdyn.LrfdynError as error:  # a model may have no map; it has scores
        gr.Warning(str(error))
        return scores, None


# The file comes unopened: the model's own reader takes it, and says in one line what is wrong with it.
upload = gr.Image(type="filepath", label="Picture")
upload.preprocess = lambda file: file and file.path
demo = gr.Interface(
    classify,
    [upload, gr.Dropdown(image_models(), value=DEFAULT, label="Model")],
    [gr.Label(label="Class"), gr.Image(label="Where the framed token looks")],
    title="lrfdyn",
    description="Spiking vision transformers of the zoo. Those of CIFAR-100 know a hundred things in photos, those of "
    "the digits white figures on black.",
    examples=[[str(example(file)), model] for file, model in EXAMPLES.items()],
    cache_examples=False,
    flagging_mode="never",
    api_name="predict",
)

if __name__ == "__main__":
    demo.launch()
