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
    with Bar(Console(file=text, width=80)) as bar:
        bar.start(SimpleNamespace(is_main=True, total_steps=2, done=0, graph_obstacle="not on a GPU", parameters=1,
                                  processes=1, device=SimpleNamespace(type="cpu"), config=tiny(),
                                  task=SimpleNamespace(headline="top1")))  # fmt: skip
        for epoch, loss, top1 in ((1, 0.75, 40.0), (2, 0.25, 50.0)):
            bar.step(SimpleNamespace(done=epoch, steps=1, speed=10.0))
            bar.epoch({"epoch": epoch, "train_loss": loss, "images_per_s": 10.0, "top1": top1, "top5": 90.0})
    assert "epoch 2: loss 0.2500, top-1 50.00 %, top-5 90.00 %" in text.getvalue()
    last = text.getvalue().splitlines()[-1]
    assert "2/2 10 images/s, top-1 50.00 %" in last
    assert last.split()[-1].count(":") == 2, "the time left is there in 80 columns"
