"""The loop learns, and an interruption leaves no trace in the weights."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.data.digits import Split, load_digits
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import load_tensors, load_weights, save_tensors, save_weights
from lrfdyn.training.engine import Recipe, evaluate, fit, load_training, save_training
from tests.models.host_checks import digits_model


@pytest.fixture(scope="module")
def split() -> Split:
    digits = load_digits()
    return Split(digits.train_images[:192], digits.train_labels[:192], digits.test_images, digits.test_labels)


def test_split_is_fixed_and_disjoint():
    digits = load_digits()
    assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
    assert digits.test_labels[:5].tolist() == load_digits().test_labels[:5].tolist()
    assert digits.train_images.mean().abs() < 1e-5
    assert digits.train_images.std() == pytest.approx(1, abs=1e-5)


def test_schedule_warms_up_and_ends_at_zero():
    recipe = Recipe(learning_rate=1.0, warmup=0.2)
    assert recipe.rate_at(0.1) == pytest.approx(0.5)
    assert recipe.rate_at(0.2) == pytest.approx(1.0)
    assert recipe.rate_at(0.6) == pytest.approx(0.5)
    assert recipe.rate_at(1.0) == pytest.approx(0.0)


def test_learns(split):
    trained = digits_model("ssa")
    for module in trained.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.constant_(module.bias, 0.5)  # a narrow network is nearly silent at first
    before, _ = evaluate(trained, split.test_images, split.test_labels)
    curve = fit(trained, split, Recipe(epochs=6, batch_size=8, learning_rate=0.02), seed=0)
    assert [r["epoch"] for r in curve] == [1, 2, 3, 4, 5, 6]
    assert curve[-1]["train_loss"] < curve[0]["train_loss"] - 0.2
    assert evaluate(trained, split.test_images, split.test_labels) == (
        curve[-1]["test_loss"],
        curve[-1]["test_accuracy"],
    )
    assert curve[-1]["test_loss"] < before


def test_interrupted_run_ends_with_the_same_bits(split, tmp_path):
    recipe = Recipe(epochs=3, batch_size=32)
    whole = digits_model()
    curve = fit(whole, split, recipe, seed=7)

    class StopError(Exception):
        pass

    def stop(record):
        if record["epoch"] == 2:
            raise StopError

    checkpoint = tmp_path / "run.safetensors"
    with pytest.raises(StopError):
        fit(digits_model(), split, recipe, 7, checkpoint, stop)
    torch.manual_seed(99)  # what happened in between must not matter
    resumed = digits_model()
    seen = []
    second = fit(resumed, split, recipe, 7, checkpoint, seen.append)
    assert [r["epoch"] for r in seen] == [1, 2, 3]
    assert [r["test_accuracy"] for r in second] == [r["test_accuracy"] for r in curve]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_seeds_differ(split):
    recipe = Recipe(epochs=1, batch_size=32)
    assert (
        fit(digits_model(), split, recipe, 0)[0]["train_loss"] != fit(digits_model(), split, recipe, 1)[0]["train_loss"]
    )


def test_loss_that_is_not_finite_stops_with_a_reason(split):
    broken = digits_model()
    torch.nn.init.constant_(broken.head.weight, float("nan"))
    with pytest.raises(LrfdynError, match="learning_rate: the loss is nan in epoch 1"):
        fit(broken, split, Recipe(epochs=1), 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"epochs": 0}, "epochs"), ({"batch_size": 1}, "batch_size"), ({"learning_rate": 0}, "learning_rate")],
)
def test_bad_recipe(options, name):
    with pytest.raises(LrfdynError, match=f"^{name}: "):
        Recipe(**options)


def test_batch_larger_than_the_data(split):
    with pytest.raises(LrfdynError, match="batch_size"):
        fit(digits_model(), split, Recipe(batch_size=500), 0)


def test_weights_round_trip_with_meta(tmp_path):
    first, second = digits_model(), digits_model()
    torch.nn.init.normal_(first.head.weight)
    save_weights(tmp_path / "w.safetensors", first, {"seed": 3})
    assert load_weights(tmp_path / "w.safetensors", second) == {"seed": 3}
    assert torch.equal(first.head.weight, second.head.weight)


def test_damaged_and_foreign_weights_are_refused_untouched(tmp_path):
    path = tmp_path / "w.safetensors"
    target = digits_model("ssa")
    kept = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(LrfdynError, match="weights: no such file"):
        load_weights(path, target)
    save_weights(path, target)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LrfdynError, match=r"weights: .*w\.safetensors is damaged"):
        load_weights(path, target)
    path.write_bytes(b"not weights at all")
    with pytest.raises(LrfdynError, match="damaged or not a safetensors file"):
        load_tensors(path)
    save_weights(path, digits_model("lrf_ssa"))
    with pytest.raises(LrfdynError, match=r"does not fit the model: .*lrf\.weight is unknown"):
        load_weights(path, target)
    save_tensors(path, {**kept, "head.weight": torch.zeros(2, 2)})
    with pytest.raises(LrfdynError, match=r"head\.weight expected \[10, 16\], got \[2, 2\]"):
        load_weights(path, target)
    assert all(torch.equal(value, kept[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize("entry", ["model.stem.extra", "optimizer.first.step", "teacher.weight"])
def test_foreign_checkpoints_are_refused(entry, tmp_path):
    network = digits_model()
    optimizer = torch.optim.AdamW(network.parameters())
    path = tmp_path / "run.safetensors"
    save_training(path, network, optimizer, {})
    assert load_training(path, network, optimizer) == {}
    tensors, _ = load_tensors(path)
    save_tensors(path, {**tensors, entry: torch.zeros(1)})
    with pytest.raises(LrfdynError, match=rf"run\.safetensors .*{entry.removeprefix('model.')}"):
        load_training(path, network, optimizer)
    save_tensors(path, {"weight": torch.zeros(1)})
    with pytest.raises(LrfdynError, match=r"run\.safetensors .*weight"):
        load_training(path, network, optimizer)
