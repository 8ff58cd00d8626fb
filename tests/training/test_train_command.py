"""What `lrfdyn train` shows."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from lrfdyn.commands.train import Bar
from tests.training.runs import tiny


def test_progress_bar_ends_with_the_last_epoch():
    """And not with the one before, which was the news while the last was running."""
    text = io.StringIO()
    with Bar(Console(file=text, width=200)) as bar:
        bar.start(SimpleNamespace(is_main=True, total_steps=2, done=0, graph_obstacle="not on a GPU", parameters=1,
                                  processes=1, device=SimpleNamespace(type="cpu"), config=tiny()))  # fmt: skip
        for epoch, loss in ((1, 0.75), (2, 0.25)):
            bar.step(SimpleNamespace(done=epoch, steps=1, speed=10.0))
            bar.epoch({"epoch": epoch, "train_loss": loss, "images_per_s": 10.0, "top1": 50.0, "top5": 90.0})
    assert "loss 0.250, top-1 50.00 %" in text.getvalue().splitlines()[-1]
