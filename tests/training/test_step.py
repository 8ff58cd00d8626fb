"""One training step: the forms that a CUDA graph can hold, what it says where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lrfdyn.training.config import OptimizerConfig
from lrfdyn.training.optim import build_optimizer, set_rate
from lrfdyn.training.step import TrainStep, capturable_adamw, capture_obstacle


def make(graph: bool = True, device: str = "cpu") -> tuple[torch.nn.Module, TrainStep]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
    return model, TrainStep(model, capturable_adamw(model, 1e-2), F.cross_entropy, graph=graph)


def test_without_a_gpu_the_step_is_eager_and_says_why():
    _, step = make()
    losses = [step((torch.eye(6), torch.tensor([0, 1, 2, 0, 1, 2]))).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not step.captured
    assert step.why_not == "not on a GPU"


@pytest.mark.gpu(needed=True)
def test_captured_step_equals_the_eager_one_and_other_shapes_fall_back():
    x, y = torch.eye(6, device="cuda"), torch.tensor([0, 1, 2, 0, 1, 2], device="cuda")
    models = []
    for graph in (False, True):
        model, step = make(graph, "cuda")
        for _ in range(5):
            step((x, y))
        assert step.captured == graph
        step((x[:3], y[:3]))
        assert not step.captured
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Net(torch.nn.Module):
    """Weights, a norm, and dropout: everything that a throw-away step changes."""

    def __init__(self) -> None:
        super().__init__()
        first = torch.nn.Linear(6, 8, bias=False)  # the norm would leave a bias nothing but rounding errors to learn
        rest = torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        self.layers = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


OPTIMIZERS = {
    "adamw": OptimizerConfig(learning_rate=0.02),
    "sgd": OptimizerConfig(name="sgd", learning_rate=0.1),
    "sgd-plain": OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.0),
    "lamb": OptimizerConfig(name="lamb", learning_rate=0.02, trust_clip=True),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def run(name: str, *, capturable: bool, graph: bool = False, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """Twelve steps with a rate that changes; the step and the final state."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = build_optimizer(model, OPTIMIZERS[name], 0.02, capturable=capturable)
    step = TrainStep(model, optimizer, F.cross_entropy, graph=graph, **options)
    x, y = torch.eye(6, device=device).repeat(4, 1), torch.arange(24, device=device) % 3
    torch.manual_seed(1)
    losses = []
    for i in range(12):
        set_rate(optimizer, 0.02 * (i + 1))
        losses.append(float(step((x, y))))
    return step, [torch.tensor(losses), *(v.cpu() for v in model.state_dict().values())]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@optimizers
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_the_form_that_can_be_captured_computes_the_same(name, clip_norm):
    step, ours = run(name, capturable=True, clip_norm=clip_norm)
    assert_same(ours, run(name, capturable=False, clip_norm=clip_norm)[1])
    assert all(isinstance(group["lr"], torch.Tensor) for group in step.optimizer.param_groups)
    if clip_norm is not None:
        length = torch.stack([p.grad.norm() for p in step.model.parameters()]).norm()
        assert length <= clip_norm * 1.001


def test_clipping_is_that_of_torch():
    _, ours = run("sgd", capturable=False, clip_norm=0.01)
    _, free = run("sgd", capturable=False)
    assert (ours[1] - free[1]).abs().max() > 1e-3


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_scaled_gradients_lead_to_the_same_weights_and_overflow_leaves_them(clip_norm):
    """A power of two as scale changes no digit in float32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step, ours = run("adamw", capturable=True, scaler=scaler, clip_norm=clip_norm)
    assert_same(ours, run("adamw", capturable=True, clip_norm=clip_norm)[1])
    before = {k: v.clone() for k, v in step.model.state_dict().items() if "running" not in k and "num" not in k}
    step((torch.full((24, 6), 1e38), torch.arange(24) % 3))
    assert all(torch.equal(step.model.state_dict()[k], v) for k, v in before.items())
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    ("reason", "name", "given"),
    [
        ("", "lamb", {}),
        ("", "sgd", {"amp": torch.float16, "scaled": True}),
        ("run.cuda_graph is off", "sgd", {"wanted": False}),
        ("not on a GPU", "sgd", {"device": torch.device("cpu")}),
        ("gradients are accumulated", "sgd", {"parts": 2}),
        ("Lamb with a gradient scaler decides on the host", "lamb", {"amp": torch.float16, "scaled": True}),
        ("float16 needs a gradient scaler", "lamb", {"amp": torch.float16}),
    ],
)
def test_what_no_graph_can_hold_is_named(reason, name, given):
    optimizer = build_optimizer(Net(), OPTIMIZERS[name], 0.1, capturable=True)
    facts = {"device": torch.device("cuda"), "amp": None, "scaled": False, **given}
    assert capture_obstacle(optimizer=optimizer, **facts) == reason


@optimizers
def test_an_optimiser_that_decides_on_the_host_is_named(name):
    plain = build_optimizer(Net(), OPTIMIZERS[name], 0.1)
    assert capture_obstacle(torch.device("cuda"), plain, None, False) == "the optimiser is not capturable"


def test_group_of_one_process_counts_as_several(monkeypatch):
    """As the step itself sees it, or the summary would speak of a graph that there never was."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    optimizer = build_optimizer(Net(), OPTIMIZERS["sgd"], 0.1, capturable=True)
    assert capture_obstacle(torch.device("cuda"), optimizer, None, False) == "several processes"


@pytest.mark.gpu(needed=True)
@optimizers
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("half", [False, True])
def test_captured_step_of_every_kind(name, clip_norm, half):
    """Equal to the eager one in weights, statistics and random numbers: the throw-away steps leave no trace."""
    if half and name == "lamb":
        pytest.skip("decides on the host")

    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if half else None
        return {"clip_norm": clip_norm, "scaler": scaler, "amp": torch.float16 if half else None, "device": "cuda"}

    step, ours = run(name, capturable=True, graph=True, **options())
    assert step.captured, step.why_not
    for a, b in zip(ours, run(name, capturable=True, **options())[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
