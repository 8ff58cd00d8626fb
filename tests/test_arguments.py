"""Every public function, those of `docs/api`, answers an argument of a wrong type with one short line that names it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lrfdyn
from lrfdyn.checks import UNIONS, checked, fits, hints_of
from lrfdyn.errors import LONGEST, LrfdynError
from lrfdyn.ops import dendrite_step

PAGES = Path(__file__).parent.parent / "docs" / "api"
# What functions give back, abstract classes, and what a forward pass calls or a host builds.
NOT_CALLED = {
    "Attention", "Batch", "CausalSSA", "ConvBN", "DataSource", "EventData", "Exported", "HubMixin", "MaskedData",
    "LRFDyn", "LRFSSA", "LowMemoryModel", "LrfdynError", "MembraneBlock", "MembraneConv", "MembraneMLP",
    "Neuron", "Operations", "Predictor", "Reporter", "RowStream", "SDSA", "SSA", "Source", "SpikingConv",
    "SpikingModel", "SpikingNeuron", "StateTerm", "SwapReport", "SweepReporter",
    "SweepRun", "Task", "TrainStep", "VSA", "fold_time", "WrittenC",
}  # fmt: skip
WRONG = (object(), 3.5, "nonsense\n" * 1000, {1: 2}, float("nan"), b"bytes", ["a", 1], True)


def public() -> dict[str, Any]:
    """The functions and classes of the reference, without the operations, which check tensors and stay lean."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        for path in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = path.rpartition(".")
            thing = getattr(importlib.import_module(module), name)
            if callable(thing) and name not in NOT_CALLED and page.stem != "ops":
                found[f"{thing.__module__}.{name}"] = thing
    return found


def types_of(thing: Any) -> dict[str, Any]:
    """The types of the arguments of a function or a constructor."""
    if dataclasses.is_dataclass(thing):
        return hints_of(thing)
    return hints_of(inspect.unwrap(thing.__init__ if isinstance(thing, type) else thing))


def cases() -> list[Any]:
    """A function, one of its arguments that has a type, and values that do not have it."""
    given = []
    for path, thing in public().items():
        hints = types_of(thing)
        for name, parameter in inspect.signature(thing).parameters.items():
            wrong = [value for value in WRONG if not fits(value, hints.get(name, Any))]
            if wrong and parameter.kind is not parameter.VAR_KEYWORD:
                given.append(pytest.param(thing, name, wrong, id=f"{path}-{name}"))
    return given


def good(hint: Any) -> Any:
    """A value that has a type and nothing more: the function itself never runs."""
    plain = {str: "x", int: 1, float: 1.0, bool: False, Any: None, Path: Path("x"), torch.Tensor: torch.zeros(1)}
    plain[np.ndarray] = np.zeros(1, int)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in plain:
        return plain[hint]
    if origin in UNIONS:
        return good(inner[0])
    if origin is typing.Literal:
        return inner[0]
    if origin is tuple and inner[-1] is not ...:
        return tuple(map(good, inner))
    if origin is not None:
        return {} if issubclass(origin, Mapping) else len if origin is Callable else ()
    return torch.device("cpu") if hint is torch.device else hint.__new__(hint)


@pytest.mark.parametrize(("function", "name", "wrong"), cases())
def test_a_wrong_type_is_one_line_that_names_the_argument(function, name, wrong):
    parameters = inspect.signature(function).parameters.values()
    others = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    hints = types_of(function)
    for value in wrong:
        arguments = {p.name: good(hints.get(p.name, Any)) for p in others} | {name: value}
        with pytest.raises(LrfdynError) as error:
            function(**arguments)
        line = str(error.value)
        assert re.match(rf"(\w+\.)?{name}: expected ", line), line
        assert line.isprintable()
        assert len(line) < 300


def test_new_functions_are_on_a_page():
    assert len(public()) > 60


@pytest.mark.parametrize("argument", ["u", "decay", "frequency", "weight", "state"])
def test_a_dendrite_step_takes_no_shape_that_would_broadcast(argument):
    shapes = {"u": (2, 3), "decay": (3, 4), "frequency": (3, 4), "weight": (3, 4, 2), "state": (2, 3, 4, 2)}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    dendrite_step(**tensors)
    with pytest.raises(LrfdynError, match=": expected "):
        dendrite_step(**tensors | {argument: tensors[argument][:1]})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("qkv_bias", "false"), ("pooling", "abcd"), ("pooling", (1, 1, 1, 1)), ("mlp_ratio", float("inf")),
        ("mlp_ratio", float("nan")), ("mlp_ratio", "3"), ("mlp_ratio", 1e308), ("depth", 1_000_000),
        ("attention_options", 3), ("attention", 3), ("time_steps", 10**9), ("dim", 10**12), ("image_size", 10**9),
    ],
)  # fmt: skip
def test_a_model_takes_no_option_of_a_wrong_kind_or_size(option, value):
    with pytest.raises(LrfdynError, match=f"^{option}: expected "):
        lrfdyn.create_model("spikformer_4_384", **{option: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_model_cannot_go_to_a_gpu_that_is_not_there():
    with pytest.raises(LrfdynError, match="device: cannot use 'cuda'"):
        lrfdyn.from_pretrained("anywhere", device="cuda")


def test_an_error_is_one_short_line_whatever_is_put_into_it():
    line = str(LrfdynError("name: got " + "a\n\x1b[31m\u2028\ud800" * 10_000 + " at the end"))
    assert len(line) < 4 * LONGEST
    assert line.isprintable()
    assert line.startswith("name: got a")
    assert line.endswith("at the end")
    with pytest.raises(LrfdynError, match="depth: expected an integer >= 1, got a very long integer"):
        lrfdyn.create_model("spikformer_4_384", depth=-(10**5000))


def test_a_checked_class_and_function_keep_their_face():
    @checked
    def scale(x: float, *rest: int, by: "Missing" = None, **options: int) -> float:  # noqa: F821, UP037
        """Doc."""
        return x

    assert scale.__doc__ == "Doc."
    assert scale(2, "a", by=3, c="d") == 2
    with pytest.raises(LrfdynError, match="x: expected a finite number, got '2'"):
        scale("2")
