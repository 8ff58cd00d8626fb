"""The page of one recording: its events as they arrive, what a model says after every frame, and how its layers fire;
one HTML file that needs no network."""

from __future__ import annotations

import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrfdyn.analysis.measure.maps import BRIGHTER, DARKER
from lrfdyn.analysis.measure.recording import follow_recording
from lrfdyn.analysis.report.write import plural, render_page, results_head
from lrfdyn.attention import attention_label
from lrfdyn.checks import checked
from lrfdyn.data.recordings import Events, Framing
from lrfdyn.errors import LrfdynError, explain, require
from lrfdyn.files import write_atomic
from lrfdyn.models import SpikingModel

MOST_EVENTS = 500_000  # that a page holds: about three bytes each
SCRIPTS = ("recording_player", "recording_charts", "recording")
DIGITS = 6  # of scores and rates: more would only make the file larger


@checked
def write_recording_page(
    path: Path, model: SpikingModel, events: Events, *, name: str, exit: float | None = None, command: str = ""
) -> dict[str, Any]:
    """Write the page of a recording that is called `name`, as `model` sees it, which must be a classifier that was
    trained on recordings. Return what it predicts: `class`, `name`, `score` and the `steps` that it took.

    With `exit` the page shows at which step the model would stop, the first whose confidence is above it, and the
    prediction is that of this step. The page shows `command`.

        write_recording_page(Path("page.html"), model, read_events("recording.bin"), name="recording.bin")
    """
    results = recording_results(model, events, name, exit)
    page = render_page({**results, "command": command}, ("report", "recording"), SCRIPTS)
    try:
        write_atomic(path, lambda file: file.write_text(page, encoding="utf-8", newline="\n"))
    except OSError as error:
        raise LrfdynError(f"page: cannot write {path} ({explain(error)})") from None
    return results["predicted"]


def recording_results(model: SpikingModel, events: Events, name: str, exit: float | None) -> dict[str, Any]:
    """What the page holds, as plain values."""
    framing = model.framing
    if framing is None:
        raise LrfdynError("model: expected one that was trained on recordings, which says how their frames are made")
    require(exit is None or 0 <= exit <= 1, f"exit: expected a number from 0 to 1, got {exit}")
    require(len(events) > 0, "events: expected at least one event, got none")
    frames, ends = framing.frames(events), framing.ends(events)
    like = next(model.parameters())
    measured = follow_recording(model, frames.to(like))
    scores, alone = (torch.tensor(measured[key], dtype=torch.float64).softmax(-1) for key in ("logits", "step_logits"))
    require(bool(scores.isfinite().all()), f"model: its logits of {name} are not finite")
    sure = [step for step, row in enumerate(scores) if exit is not None and row.max() > exit]
    last = sure[0] if sure else len(scores) - 1
    classes = list(model.class_names or (f"class {i}" for i in range(scores.shape[1])))
    best = int(scores[last].argmax())
    predicted = {"class": best, "name": classes[best], "score": float(scores[last, best]), "steps": last + 1}
    stop = {} if exit is None else {"exit": {"threshold": exit, "step": last, "sure": bool(sure)}}
    return {
        **results_head(f"Recording {name}", "", ""),
        "facts": _facts(model, events, framing, predicted, measured["state_bytes"], exit),
        "colours": {"darker": DARKER, "brighter": BRIGHTER},
        "recording": _recording(events, framing, ends),
        "frames": _pictures(frames),
        "classes": classes,
        "predicted": predicted,
        "scores": _rounded(scores),
        "step_scores": _rounded(alone),
        "firing": {layer: [round(rate, DIGITS) for rate in rates] for layer, rates in measured["firing"].items()},
        **stop,
    }


def _facts(
    model: SpikingModel, events: Events, framing: Framing, predicted: dict[str, Any], state: int, exit: float | None
) -> list[list[str]]:
    """What the top of the page says, as names and values."""
    kind, brighter, (height, width) = model.config.get("attention"), int(events.p.sum()), framing.sensor
    stops = []
    if exit is not None:
        sure = predicted["score"] > exit
        when = f"after frame {predicted['steps']} of {framing.steps}, above" if sure else "never above"
        stops = [["Stops", f"{when} {exit:g}"]]
    return [
        ["Prediction", f"{predicted['name']}, {predicted['score']:.1%}"],
        *stops,
        ["Events", f"{len(events):,}: {brighter:,} brighter, {len(events) - brighter:,} darker"],
        ["Duration", _time(int(events.t[-1] - events.t[0]))],
        ["Sensor", f"{width} x {height} pixels"],
        ["Frames", _how(events, framing)],
        ["Model", model.name or type(model).__name__],
        *([["Attention", attention_label(kind)]] if kind else []),
        ["Carried from frame to frame", f"{state:,} bytes"],
    ]


def _how(events: Events, framing: Framing) -> str:
    """How the frames are made, in words."""
    span = int(events.t[-1] - events.t[0])
    number = plural(len(events) // framing.steps, "event")
    each = number if framing.by == "number" else _time(span // framing.steps)
    scaled = "" if framing.sensor == (framing.size, framing.size) else f", scaled to {framing.size} x {framing.size}"
    return f"{framing.steps} of {each} each{scaled}"


def _time(microseconds: int) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 10**6 else f"{microseconds / 1e3:.3g} ms"


def _recording(events: Events, framing: Framing, ends: np.ndarray) -> dict[str, Any]:
    """The events, of which at most `MOST_EVENTS` are drawn, and when every frame is complete."""
    every = -(-len(events) // MOST_EVENTS)
    fields = {name: getattr(events, name)[::every] for name in "xyp"}
    fields["t"] = np.diff(events.t[::every], prepend=events.t[0])
    return {
        "count": len(events),
        "shown": len(fields["t"]),
        "sensor": list(framing.sensor),
        "ends": np.maximum(ends, 0).tolist(),
        "taken": _how(events, framing),
        "events": {name: packed(values) for name, values in fields.items()},
    }


def _pictures(frames: Tensor) -> dict[str, Any]:
    """Frames `[T, 2, size, size]` in 256 levels: their counts, where these are not more, else in steps of `scale`."""
    most = float(frames.max())
    whole = most <= 255 and bool((frames == frames.round()).all())
    scale = 1.0 if whole else most / 255
    levels = (frames / scale).round().clamp(0, 255).byte().numpy()
    return {"size": frames.shape[-1], "scale": scale, **packed(levels)}


def packed(values: np.ndarray) -> dict[str, str]:
    """Whole numbers >= 0 in as few bytes as they need, as the page unpacks them: base64 of zlib, and their type."""
    most = int(values.max())
    kind = next((name for name in ("uint8", "uint16", "uint32") if most <= np.iinfo(name).max), "float64")
    data = np.ascontiguousarray(values, np.dtype(kind).newbyteorder("<")).tobytes()
    return {"type": kind, "data": b64encode(zlib.compress(data, 6)).decode()}


def _rounded(rows: Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in row] for row in rows.tolist()]
