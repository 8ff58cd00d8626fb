"""Runs a model that `lrfdyn export` wrote, with ONNX Runtime, NumPy and Pillow: neither torch nor lrfdyn is needed.

    python predict_onnx.py model.onnx photo.jpg other.png
    python predict_onnx.py model.onnx photo.jpg --json

Everything that the model expects of an image is in the file itself.
"""

import argparse
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def load_image(path: str, preprocessing: dict) -> np.ndarray:
    """`[C, size, size]`: the shorter side scaled to size / crop_share, the centre, then (levels / 255 - mean) / std."""
    size, mean, std = preprocessing["size"], preprocessing["mean"], preprocessing["std"]
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode == "F":
        raise ValueError("expected 8 or 16 bits a level, got floating-point numbers")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a file of lrfdyn export --format onnx")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    try:
        session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime has many kinds
        parser.error(f"model: cannot run {arguments.model} ({error})")
    description = session.get_modelmeta().custom_metadata_map.get("lrfdyn")
    if description is None:
        parser.error(f"model: {arguments.model} was not exported by lrfdyn")
    facts = json.loads(description)
    names = facts["class_names"] or [f"class {i}" for i in range(facts["num_classes"])]
    results, unreadable = [], 0
    for path in arguments.images:  # one at a time; the file takes [B, C, size, size] too
        try:
            image = load_image(path, facts["preprocessing"])
        except Exception as error:  # damaged files make decoders fail in any way
            print(f"cannot read {path} ({error})", file=sys.stderr)
            results.append({"image": path, "error": str(error)})
            unreadable += 1
            continue
        (logits,) = session.run(["logits"], {"images": image[None]})[0]
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        best = np.argsort(-scores, kind="stable")[: arguments.top]
        results.append({"image": path, "predictions": [{"name": names[i], "score": float(scores[i])} for i in best]})
        if not arguments.json:
            print(f"{path}: {', '.join(f'{names[i]} {scores[i]:.1%}' for i in best)}")
    if arguments.json:
        print(json.dumps({"model": facts["model"], "attention": facts["attention"], "images": results}, indent=1))
    return 1 if unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
