"""How image files become the numbers that a model was tested on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.data import Augmentation
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.resident import Digits
from lrfdyn.errors import LrfdynError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size: expected an integer >= 1"),
        ({"std": [0.0]}, "a positive std of every channel"),
        ({"mean": [0.1, 0.2]}, "a positive std of every channel"),
        ({"mean": "x"}, "preprocessing: "),
        ({"mean": [float("nan")]}, "mean: expected a sequence of finite numbers"),
        ({"mean": [10**400]}, "int too large to convert to float"),
        ({"crop_share": True}, "crop_share: expected a finite number, got True"),
        ({"crop_share": 2}, "crop_share: expected 0 < x <= 1"),
        ({"interpolation": "nearest"}, "interpolation: expected bicubic or bilinear"),
        ({"flip": True}, "unknown entry 'flip'"),
    ],
)
def test_damaged_preprocessing(change, message):
    values = {**Preprocessing(16, (0.3,), (0.4,)).as_dict(), **change}
    with pytest.raises(LrfdynError, match=f"here: preprocessing: .*{message}|here: {message}"):
        Preprocessing.from_dict(values, "here")


def test_preprocessing_is_that_of_the_test_images():
    """Digits as files come out as the numbers that a model is tested on."""
    source = Digits(None, Augmentation())
    batch = next(source.test_batches(batch_size=4))
    preprocessing = Preprocessing.of_data(source)
    raw = source.splits["test"][0][:4]
    found = [preprocessing.apply(Image.fromarray(levels[0].numpy().astype(np.uint8))) for levels in raw]
    torch.testing.assert_close(torch.from_numpy(np.stack(found)), batch.images, rtol=0, atol=1e-6)
