"""Runs a model that `lrfdyn export` wrote, with ONNX Runtime, NumPy and Pillow: neither torch nor lrfdyn is needed.

    python predict_onnx.py model.onnx photo.jpg other.png
    python predict_onnx.py model.onnx photo.jpg --json

Everything that the model expects of an image is in the file itself.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def load_image(path: str, preprocessing: dict) -> np.ndarray:
    """`[C, size, size]`: the shorter side scaled to size / crop_share, the centre, then (levels / 255 - mean) / std."""
    size, mean, std = preprocessing["size"], preprocessing["mean"], preprocessing["std"]
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):  # 16-bit levels
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    image = image.convert("RGB" if len(mean) == 3 else "L")
    scale = round(size / preprocessing["crop_share"]) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    levels = np.asarray(image, np.float32).reshape(size, size, len(mean)).transpose(2, 0, 1)
    mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (mean, std))
    return (levels / np.float32(255) - mean) / std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a file of lrfdyn export --format onnx")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    description = session.get_modelmeta().custom_metadata_map.get("lrfdyn")
    if description is None:
        parser.error(f"model: {arguments.model} was not exported by lrfdyn")
    facts = json.loads(description)
    names = facts["class_names"] or [f"class {i}" for i in range(facts["num_classes"])]
    images = np.stack([load_image(path, facts["preprocessing"]) for path in arguments.images])
    (logits,) = session.run(["logits"], {"images": images})

    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    results = []
    for path, row in zip(arguments.images, scores, strict=True):
        best = np.argsort(-row, kind="stable")[: arguments.top]
        results.append({"image": path, "predictions": [{"name": names[i], "score": float(row[i])} for i in best]})
    if arguments.json:
        print(json.dumps({"model": facts["model"], "attention": facts["attention"], "images": results}, indent=1))
        return
    for result in results:
        best = ", ".join(f"{p['name']} {p['score']:.1%}" for p in result["predictions"])
        print(f"{result['image']}: {best}")


if __name__ == "__main__":
    main()
