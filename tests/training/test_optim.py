"""Optimisers against their definition, the rate's course, the moving average, distillation, synchronised norms."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.data import Augmentation
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.resident import Digits
from lrfdyn.errors import LrfdynError
from lrfdyn.io.hub import from_pretrained
from lrfdyn.models import PlainResNet, create_model
from lrfdyn.training.config import DistillConfig, OptimizerConfig, ScheduleConfig
from lrfdyn.training.optim import (
    Lamb,
    MovingAverage,
    Muon,
    build_optimizer,
    orthogonalize,
    parameter_groups,
    rate_at,
    set_rate,
)
from lrfdyn.training.processes import SyncBatchNorm2d
from lrfdyn.training.tasks import build_distill


@pytest.mark.parametrize("trust_clip", [False, True])
def test_lamb(trust_clip):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    expected = weight.detach().clone()
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = Lamb(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6, trust_clip=trust_clip)
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        weight.grad = torch.randn(4, 3, dtype=torch.float64)
        mean = 0.9 * mean + 0.1 * weight.grad
        square = 0.99 * square + 0.01 * weight.grad**2
        direction = (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-6) + 0.1 * expected
        trust = expected.norm() / direction.norm()
        expected = expected - 0.01 * (trust.clamp(max=1) if trust_clip else trust) * direction
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def newton_schulz(x: Tensor) -> Tensor:
    """As Jordan et al. (2024) write it down, for one matrix."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon():
    """Against its definition, with matrices of one shape, of its transpose and of others in a step; AdamW beside it."""
    torch.manual_seed(0)
    shapes = [(6, 3, 1, 1), (6, 3, 1, 1), (3, 6), (4, 2, 3, 3), (5, 5)]
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    rest, same = (nn.Parameter(torch.arange(3.0, dtype=torch.float64)) for _ in range(2))
    expected, means = [w.detach().clone() for w in weights], [torch.zeros_like(w) for w in weights]
    groups = [{"params": weights, "matrices": True, "weight_decay": 0.1}, {"params": [rest], "weight_decay": 0.3}]
    optimizer = Muon(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6, momentum=0.95)
    plain = torch.optim.AdamW([same], lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3)
    for _ in range(3):
        for i, weight in enumerate(weights):
            weight.grad = grad = torch.randn_like(weight)
            means[i] = 0.95 * means[i] + 0.05 * grad
            ahead = 0.05 * grad + 0.95 * means[i]
            step = newton_schulz(ahead.flatten(1)).view(weight.shape) * 0.2 * max(ahead.flatten(1).shape) ** 0.5
            expected[i] = (1 - 0.01 * 0.1) * expected[i] - 0.01 * step
        rest.grad = torch.randn_like(rest)
        same.grad = rest.grad.clone()
        optimizer.step()
        plain.step()
        for weight, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.detach(), value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(rest, same, rtol=1e-12, atol=1e-12)


def test_muon_is_torch_s_for_matrices():
    """Both iterate in bfloat16, with the same roundings."""
    theirs_class = getattr(torch.optim, "Muon", None)
    if theirs_class is None:
        pytest.skip("this torch has none")
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(24, 16)) for _ in range(2))
    groups = [{"params": [ours], "matrices": True, "weight_decay": 0.1}]
    pair = (
        Muon(groups, lr=0.02, betas=(0.9, 0.99), eps=1e-8, momentum=0.9),
        theirs_class([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        ours.grad = torch.randn(24, 16)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * float(theirs.detach().sub(1).abs().max()))
    assert torch.linalg.svdvals(orthogonalize(torch.randn(1, 16, 24))[0]).sub(1).abs().max() < 0.4


def test_muon_takes_the_matrices_inside_the_network():
    """All of them decay alike, whatever their rates are; what is not a matrix of it is AdamW's."""
    model = create_model("spikformer_4_384", dim=8, depth=1, heads=2, attention="lrf_dyn", dilations=(1, 3))
    config = OptimizerConfig(name="muon", learning_rate=0.01, muon_rate=0.02, weight_decay=0.1)
    decayed, spared, matrices = parameter_groups(model, config)
    names = {p: name for name, p in model.named_parameters()}
    chosen = {names[p] for p in matrices["params"]}
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert chosen == {name for name, layer in layers.items() if layer.groups == 1}
    assert {"head.weight", "blocks.0.attn.dendrites.weight"} <= {names[p] for p in decayed["params"]}
    assert len(chosen) + len(decayed["params"]) + len(spared["params"]) == len(names)
    optimizer = build_optimizer(model, config, 0.01)
    set_rate(optimizer, 0.005)
    assert [g["lr"] for g in optimizer.param_groups] == [0.005, 0.005, 0.01]
    assert [g["lr"] * g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([5e-4, 0, 5e-4])


def test_decay_spares_norms_biases_and_time_constants():
    model = create_model("spikformer_4_384", dim=8, depth=1, heads=2, attention="lrf_dyn")
    decayed, spared = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    kept = {names[id(p)] for p in spared["params"]}
    dendrites = {n for n, _ in model.named_parameters() if ".dendrites." in n}
    assert dendrites - kept == {"blocks.0.attn.dendrites.weight"}
    assert all(p.dim() > 1 for p in decayed["params"])
    assert "head.weight" in {names[id(p)] for p in decayed["params"]}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_frozen_queries_and_keys_are_not_the_optimisers(tmp_path):
    """Nor are they after the model was saved and loaded; whatever else moves, their weights stay."""
    options = {"dim": 8, "depth": 1, "heads": 2, "image_size": 8, "time_steps": 1, "norm": True, "train_qk": False}
    create_model("spikformer_4_384", attention="lrf_ssa", **options).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path).train()
    frozen = {name for name, p in model.named_parameters() if ".q." in name or ".k." in name}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    assert len(frozen) == 2 * 4  # convolution with its bias, norm
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1), 0.1)
    assert {names[id(p)] for group in optimizer.param_groups for p in group["params"]} == {*names.values()} - frozen
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not moved & frozen
    assert {f"blocks.0.attn.{part}.bn.running_mean" for part in "qkv"} <= moved
    assert {"blocks.0.attn.v.conv.weight", "blocks.0.attn.lrf.weight"} <= moved


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
def test_optimizer_by_name(name):
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimizerConfig(name=name), 0.1)
    set_rate(optimizer, 0.05)
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not before.equal(model.weight)


def test_rate():
    schedule = ScheduleConfig(epochs=100, warmup_epochs=20, warmup_rate=0.1, minimum_rate=0.2, cooldown_epochs=5)
    assert rate_at(schedule, 1.0, 0) == 0.1
    assert rate_at(schedule, 1.0, 10) == pytest.approx(0.55)
    assert rate_at(schedule, 1.0, 50) == pytest.approx(0.6)  # half of a cosine that began at epoch 0
    assert rate_at(schedule, 1.0, 103) == 0.2
    late = ScheduleConfig(epochs=100, warmup_epochs=20, minimum_rate=0.2, cosine="after_warmup")
    assert rate_at(late, 1.0, 20) == pytest.approx(1.0)
    assert rate_at(late, 1.0, 60) == pytest.approx(0.6)
    assert rate_at(ScheduleConfig(epochs=10, warmup_epochs=0), 1.0, 0) == 1.0
    knots = ScheduleConfig(epochs=10, warmup_epochs=0, rates=((0, 0.5), (2, 1), (4, 1), (4, 0.25), (10, 0)))
    expected = {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.0, 3.5: 2.0, 4: 0.5, 7: 0.25, 9: 0.5 / 6, 10: 0.0}
    assert [rate_at(knots, 2.0, epoch) for epoch in expected] == pytest.approx(list(expected.values()))


def test_moving_average():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    start = model[0].weight.detach().clone()
    average = MovingAverage(model, 0.75)
    nn.init.constant_(model[0].weight, 1.0)
    model[1].num_batches_tracked.fill_(3)
    average.update(1000)
    with average.swapped():
        torch.testing.assert_close(model[0].weight.detach(), 0.75 * start + 0.25)
        assert model[1].num_batches_tracked == 3
    assert (model[0].weight == 1).all()


def test_moving_average_of_a_short_run_forgets_the_untrained_weights():
    model = nn.Linear(2, 2)
    average = MovingAverage(model, 0.9999)
    nn.init.constant_(model.weight, 1.0)
    for step in range(1, 101):
        average.update(step)
    with average.swapped():
        torch.testing.assert_close(model.weight.detach(), torch.ones(2, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation_is_the_sum_of_two_losses(kind, monkeypatch):
    torch.manual_seed(0)
    teacher, images = nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), torch.randn(4, 1, 1, 5)
    teacher.num_classes = 3
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda name, pretrained: teacher))
    source = SimpleNamespace(num_classes=3, in_channels=1, mean=(0.0,), deviation=(1.0,))
    targets, logits = torch.eye(3)[[0, 1, 2, 0]], torch.randn(4, 3)
    config = DistillConfig(teacher="t", weight=0.3, kind=kind)
    mixed = build_distill(config, source, torch.device("cpu"))(images, targets)
    answers = teacher(images)
    second = answers.argmax(1) if kind == "hard" else answers.softmax(1)
    expected = 0.7 * F.cross_entropy(logits, targets) + 0.3 * F.cross_entropy(logits, second)
    torch.testing.assert_close(F.cross_entropy(logits, mixed), expected)


def test_a_teacher_is_one_of_timm_s_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=pytest.fail))
    with pytest.raises(LrfdynError, match=r"distill.teacher: expected a name in timm's registry, got"):
        build_distill(DistillConfig(teacher="hf-hub:some/one"), None, torch.device("cpu"))


def test_teacher_sees_images_as_it_was_trained_on(monkeypatch):
    """timm's models differ in the statistics that they expect; the data's are those of the student."""
    source = Digits(None, Augmentation())
    assert build_distill(DistillConfig(), source, torch.device("cpu")) is None

    class Teacher(nn.Module):
        num_classes, pretrained_cfg = 10, {"mean": (0.5,), "std": (0.25,)}

        def forward(self, images):
            seen.append(images)
            return torch.zeros(len(images), 10)

    seen: list[Tensor] = []
    fake = SimpleNamespace(create_model=lambda name, pretrained: Teacher())
    monkeypatch.setitem(sys.modules, "timm", fake)
    distill = build_distill(DistillConfig(teacher="t"), source, torch.device("cpu"))
    levels = torch.rand(2, 1, 8, 8)
    targets = torch.full((2, 10), 0.1)
    mixed = distill((levels - source.mean[0]) / source.deviation[0], targets)
    torch.testing.assert_close(seen[0], (levels - 0.5) / 0.25)
    assert mixed[:, 0].allclose(torch.tensor(0.55))
    Teacher.num_classes = 3
    with pytest.raises(LrfdynError, match=r"distill.teacher: expected 10 classes, t has 3"):
        build_distill(DistillConfig(teacher="t"), source, torch.device("cpu"))


def test_a_teacher_of_our_own(tmp_path):
    """A folder of a trained model: its answers with the norms folded are its answers."""
    source = Digits(None, Augmentation())
    torch.manual_seed(0)
    teacher = PlainResNet(in_channels=1, num_classes=10, depths=(1, 1), widths=(4, 8)).eval()
    teacher.stem.bn.running_mean.normal_()
    teacher.preprocessing = Preprocessing(8, (0.5,), (0.25,))
    teacher.save_pretrained(tmp_path / "teacher")
    config = DistillConfig(teacher=str(tmp_path / "teacher"), weight=1.0, kind="soft")
    levels = torch.rand(2, 1, 8, 8)
    mixed = build_distill(config, source, torch.device("cpu"))(
        (levels - source.mean[0]) / source.deviation[0], torch.full((2, 10), 0.1)
    )
    torch.testing.assert_close(mixed, teacher((levels - 0.5) / 0.25).softmax(1).detach(), rtol=1e-4, atol=1e-5)
    teacher.reset_classifier(3)
    teacher.save_pretrained(tmp_path / "other")
    for name, error in (("other", "expected 10 classes, .* has 3"), ("none", "no such file or folder")):
        with pytest.raises(LrfdynError, match=rf"distill.teacher: {error}"):
            build_distill(DistillConfig(teacher=str(tmp_path / name)), source, torch.device("cpu"))


def assert_same_norms(plain: nn.Module, synced: nn.Module, x: torch.Tensor, tolerance: float) -> None:
    """In value and every gradient."""
    outgoing = torch.randn_like(x)
    results = []
    for norm in (plain, synced):
        y = norm(x)
        results.append([y, *torch.autograd.grad((y * outgoing).sum(), [x, norm.weight, norm.bias])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_synchronised_norm_of_one_process_is_batch_norm(monkeypatch):
    """Two processes are tested with real ones; here the sum over all is this process's own."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    torch.manual_seed(0)
    plain, synced = nn.BatchNorm2d(3).double(), SyncBatchNorm2d(3).double()
    for norm in (plain, synced):
        norm.load_state_dict({**norm.state_dict(), "weight": torch.tensor([1.0, 2.0, 0.5]), "bias": torch.ones(3)})
    x = torch.randn(4, 3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert_same_norms(plain, synced, x, 1e-10)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, synced.state_dict()[name])
    torch.testing.assert_close(plain.eval()(x), synced.eval()(x))
    assert math.isfinite(float(synced.running_var.sum()))


def test_synchronised_norm_of_half_precise_input_is_batch_norm(monkeypatch):
    """As autocast gives it. Statistics, and the sum of 30,000 numbers that they need, are single precise."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    torch.manual_seed(0)
    plain, synced = nn.BatchNorm2d(2), SyncBatchNorm2d(2)
    x = (torch.randn(30, 2, 100, 10) + 1).bfloat16().requires_grad_()
    assert_same_norms(plain, synced, x, 1e-2)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, synced.state_dict()[name], rtol=1e-4, atol=1e-4)
