"""What every data source promises, for each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn import LrfdynError
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.cli import main
from lrfdyn.data import DATA, Augmentation, DataSource, create_data, data_class, register_data
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.resident import ResidentData
from lrfdyn.training.estimate import estimate
from lrfdyn.training.recipes import load_recipe
from tests.data.make import (
    EVERYTHING,
    assert_equal,
    joined,
    write_cifar,
    write_folder,
    write_pets,
    write_shards,
    write_tiny_imagenet,
)
from tests.data.recordings import write_nmnist

Create = Callable[..., DataSource]
RESIZED = replace(EVERYTHING, crop="resized")
MOVED = replace(EVERYTHING, rand_augment_layers=0, erase=0, event_operations=("identity", "shear_x", "cut_out"))


@pytest.fixture(
    params=["digits", "cifar10", "cifar100", "imagenette", "webdataset", "nmnist", "tiny_imagenet", "oxford_pets"]
)
def create(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Create:
    name = request.param
    if name.startswith("cifar"):
        write_cifar(tmp_path, name, monkeypatch)
        return lambda augment=EVERYTHING: create_data(name, tmp_path, augment)
    if name == "digits":
        pytest.importorskip("sklearn")
        return lambda augment=EVERYTHING: create_data(name, None, augment)
    if name == "nmnist":
        write_nmnist(tmp_path)
        return lambda augment=MOVED: create_data(name, tmp_path, augment, frames=3)
    pytest.importorskip("PIL")
    if name == "tiny_imagenet":
        write_tiny_imagenet(tmp_path, train=9)
        return lambda augment=EVERYTHING: create_data(name, tmp_path, augment, workers=0)
    writers = {"imagenette": write_folder, "webdataset": write_shards, "oxford_pets": write_pets}
    writers[name](tmp_path)

    def decoded(augment: Augmentation = RESIZED, **options) -> DataSource:
        return create_data(name, tmp_path, augment, image_size=24, **options)

    return decoded


def test_batches(create: Create) -> None:
    data = create()
    batches = list(data.train_batches(epoch=0, seed=0, batch_size=8))[:5]
    for batch in batches:
        assert batch.images.shape[-4:] == (8, data.in_channels, data.image_size, data.image_size)
        assert batch.images.shape[:-4] == ((3,) if data.framed else ())
        assert data.framed or batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.images.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        assert batch.targets.shape == (8, data.num_classes)
        assert torch.allclose(batch.targets.sum(1), torch.ones(8))
        assert batch.count == 8


def test_same_seed_and_epoch_same_batches(create: Create) -> None:
    first = list(create().train_batches(epoch=1, seed=3, batch_size=8))
    assert_equal(first, list(create().train_batches(epoch=1, seed=3, batch_size=8)))
    for other in ({"epoch": 2, "seed": 3}, {"epoch": 1, "seed": 4}):
        assert not torch.equal(first[0].images, next(create().train_batches(batch_size=8, **other)).images)


def test_every_epoch_and_seed_has_its_own_order(create: Create) -> None:
    data = create(Augmentation())
    first = data.order(0, 0)
    assert sorted(first) == list(range(data.train_images))
    for seed, epoch in ((0, 1), (0, 2), (1, 0)):
        assert sorted(data.order(seed, epoch)) == sorted(first)
        assert (data.order(seed, epoch) != first).any()


def test_held_out_images_are_the_last_of_every_class(create: Create) -> None:
    """They take the test images' place, and nothing of them is trained on; the rest keeps its order."""
    whole, data = create(Augmentation()), create(Augmentation())
    if whole.num_classes == 100:  # the 40 images have fewer
        with pytest.raises(
            LrfdynError, match=r"held_out: expected less than the \d images of class \d+, got 1 of each"
        ):
            data.hold_out(100)
        return

    def loaded(source: DataSource, split: str, samples: np.ndarray) -> list[torch.Tensor]:
        (batch,) = source.load(split, [Keys(0, 0, samples, np.zeros_like(samples))], torch.device("cpu"))
        return list(batch)

    everything = loaded(whole, "train", np.arange(whole.train_images))
    labels, classes = everything[1].numpy(), whole.num_classes
    held, share = np.zeros(len(labels), bool), min(5, np.bincount(labels).min() - 1)
    for c in range(classes):
        held[np.nonzero(labels == c)[0][-share:]] = True
    data.hold_out(int(share) * classes)
    assert (data.train_images, data.test_images) == (len(labels) - share * classes, share * classes)
    for split, mask in (("train", ~held), ("test", held)):
        for there, here in zip(loaded(data, split, np.arange(mask.sum())), everything, strict=True):
            rows = torch.from_numpy(np.flatnonzero(mask))
            assert torch.equal(there, here.index_select(max(here.dim() - 4, 0), rows))
    assert sorted(data.order(0, 0)) == list(range(data.train_images))
    assert sum(batch.count for batch in data.test_batches(batch_size=8)) == share * classes
    with pytest.raises(LrfdynError, match=f"held_out: expected a multiple of the {classes} classes, got {classes + 1}"):
        data.hold_out(classes + 1)


def test_global_random_numbers_are_left_alone(create: Create) -> None:
    torch.manual_seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1]
    data = create()
    list(data.train_batches(epoch=0, seed=0, batch_size=8))
    list(data.test_batches(batch_size=8))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_starts_at_any_step(create: Create) -> None:
    data = create()
    steps = min(5, data.steps_per_epoch(8))
    whole = list(data.train_batches(epoch=0, seed=0, batch_size=8))
    assert len(whole) == data.steps_per_epoch(8)
    for start in (*range(1, steps), len(whole)):
        rest = data.train_batches(epoch=0, seed=0, batch_size=8, start_step=start)
        assert_equal(list(rest), whole[start:])


@pytest.mark.parametrize("repeats", [1, 3])
def test_ranks_share_the_batch(create: Create, repeats: int) -> None:
    base = create()
    data = create(replace(base.augment, repeats=repeats))
    whole = list(data.train_batches(epoch=0, seed=0, batch_size=12))
    for ranks in (2, 3):
        parts = [
            list(data.train_batches(epoch=0, seed=0, batch_size=12 // ranks, rank=r, world_size=ranks))
            for r in range(ranks)
        ]
        assert_equal(joined(parts), whole)


def test_an_epoch_uses_every_image_at_most_once(create: Create) -> None:
    data = create()
    order = data.order(0, 0)
    assert sorted(order.tolist()) == list(range(data.train_images))
    assert (order != data.order(0, 1)).any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_test_image_once(create: Create, ranks: int) -> None:
    data = create()
    reference = list(data.test_batches(batch_size=data.test_images))
    assert [b.count for b in reference] == [data.test_images]
    parts = [list(data.test_batches(batch_size=4, rank=r, world_size=ranks)) for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    batches = [b for step in zip(*parts, strict=True) for b in step]
    assert all(b.images.shape[-4] == 4 for b in batches)
    images = torch.cat([b.images.narrow(-4, 0, b.count) for b in batches], -4)
    assert torch.equal(images, reference[0].images)
    assert torch.equal(torch.cat([b.labels[: b.count] for b in batches]), reference[0].labels)
    assert torch.equal(reference[0].targets.argmax(1), reference[0].labels)
    assert (reference[0].targets.sum(1) == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 7}, "batch_size: mixup and cutmix pair"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1"),
        ({"batch_size": 10_000}, "batch_size: 10000 images x 1 processes are more than"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank: expected 0..1"),
        ({"batch_size": 4, "start_step": 10_000}, "start_step: "),
        ({"batch_size": 4, "start_step": -1}, "start_step: "),
    ],
)
def test_bad_arguments_fail_at_once(create: Create, arguments: dict, message: str) -> None:
    with pytest.raises(LrfdynError, match=message):
        create().train_batches(**{"epoch": 0, "seed": 0, **arguments})


def test_odd_batches_without_mixing(create: Create) -> None:
    assert next(create(Augmentation()).train_batches(epoch=0, seed=0, batch_size=7)).count == 7


def test_unaugmented_training_images_are_normalised_like_test_images(tmp_path: Path, monkeypatch) -> None:
    folder = write_cifar(tmp_path, "cifar10", monkeypatch)
    data = create_data("cifar10", folder, Augmentation())
    batch = next(data.train_batches(epoch=0, seed=0, batch_size=4))
    samples = data.order(0, 0)[:4]
    raw = data.splits["train"][0][samples].float() / 255
    mean, deviation = torch.tensor(data.mean), torch.tensor(data.deviation)
    expected = (raw - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    assert torch.allclose(batch.images, expected, atol=1e-5)
    assert torch.equal(batch.labels, data.splits["train"][1][samples])


def test_training_after_a_test_in_inference_mode() -> None:
    """What is kept on the device must not carry the mode in which it was first asked for into training."""
    pytest.importorskip("sklearn")
    data = create_data("digits", None, Augmentation(flip=0.5, mixup=0.8))
    with torch.inference_mode():
        assert len(list(data.test_batches(batch_size=360))) == 1
        next(data.train_batches(epoch=0, seed=0, batch_size=8))
    batch = next(data.train_batches(epoch=0, seed=0, batch_size=8))
    model = torch.nn.Conv2d(1, 10, 8)
    torch.nn.functional.cross_entropy(model(batch.images).flatten(1), batch.targets).backward()
    assert model.weight.grad is not None


def test_steps_together_or_alone(tmp_path: Path, monkeypatch) -> None:
    write_cifar(tmp_path, "cifar10", monkeypatch)
    data = create_data("cifar10", tmp_path, replace(EVERYTHING, repeats=2))
    together = list(data.train_batches(epoch=0, seed=0, batch_size=4))
    for at_once in (1, 8, 12):
        data.images_at_once = at_once
        assert_equal(list(data.train_batches(epoch=0, seed=0, batch_size=4)), together)


def test_repeated_augmentation(tmp_path: Path, monkeypatch) -> None:
    write_cifar(tmp_path, "cifar10", monkeypatch)
    data = create_data("cifar10", tmp_path, Augmentation(crop="pad", flip=0.5, repeats=3))
    for batch in data.train_batches(epoch=0, seed=0, batch_size=12):
        labels = batch.labels.view(3, 4)
        assert (labels == labels[0]).all()
        a, b, c = batch.images.reshape(3, 4, -1)
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)


def test_digits_are_the_fixed_split() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    data, raw = create_data("digits", None, Augmentation()), load_digits()
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    (batch,) = data.test_batches(batch_size=360)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(raw.images)[order].float(), torch.tensor(raw.target)[order]
    assert torch.equal(batch.labels, labels[:360])
    expected = (images[:360] - images[360:].mean()) / images[360:].std()
    assert torch.allclose(batch.images[:, 0], expected, atol=0.01)


def test_unknown_names() -> None:
    with pytest.raises(LrfdynError, match="did you mean cifar10"):
        create_data("cifar-10", None, Augmentation())
    with pytest.raises(LrfdynError, match="data: digits has no option 'workers'"):
        create_data("digits", None, Augmentation(), workers=2)


@pytest.mark.parametrize("name", [name for name in DATA if DATA[name].needs_root])
def test_no_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(LrfdynError, match="root: "):
        create_data(name, None, Augmentation())
    with pytest.raises(LrfdynError, match=r"root: no such folder .*absent"):
        create_data(name, tmp_path / "absent", Augmentation())
    with pytest.raises(LrfdynError, match=str(tmp_path)):
        create_data(name, tmp_path, Augmentation())


def test_a_folder_that_is_not_read_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command line replaces
    with pytest.warns(UserWarning, match=f"root: digits is read from no folder, so {tmp_path} is not used"):
        create_data("digits", tmp_path, Augmentation())
    with pytest.raises(LrfdynError, match="data-root: random images are read from no folder"):
        load_images("random", tmp_path, 1, 1, torch.device("cpu"))
    with pytest.warns(UserWarning, match="root: digits is read from no folder, so here is not used"):
        assert main(["train", "digits", "--dry-run", "--data.root", "here"]) == 0
    assert warnings.formatwarning("text", UserWarning, "tasks.py", 1) == "lrfdyn: text\n", "one line, for a command"


def test_own_data_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered class is created by its name, its options are checked, and a recipe can name it."""
    monkeypatch.setattr(DATA, "_items", dict(DATA._items))

    @register_data("stripes")
    class Stripes(ResidentData):
        num_classes, image_size, in_channels, train_images = 2, 8, 1, 12
        mean, deviation = (0.5,), (0.5,)
        needs_root = False

        def __init__(self, root: Path | None, augment: Augmentation, *, level: int = 255) -> None:
            images = torch.zeros(12, 1, 8, 8, dtype=torch.uint8)
            images[::2, :, ::2] = level
            split = images, torch.arange(12) % 2
            super().__init__(split, split, augment)

    assert data_class("stripes") is Stripes
    data = create_data("stripes", None, Augmentation(flip=0.5), level=100)
    assert {batch.images.shape for batch in data.train_batches(epoch=0, seed=0, batch_size=4)} == {(4, 1, 8, 8)}
    with pytest.raises(LrfdynError, match="option of stripes: unknown name 'lever'; did you mean level"):
        create_data("stripes", None, Augmentation(), lever=1)
    with pytest.raises(LrfdynError, match=r"augmentation.scale: is not for images of stripes, got \(0.5, 2.0\)"):
        create_data("stripes", None, Augmentation(scale=(0.5, 2.0)))
    with pytest.raises(LrfdynError, match="data: the name 'stripes' is taken"):
        register_data("stripes")(type("Other", (Stripes,), {}))
    with pytest.raises(LrfdynError, match="expected a subclass of"):
        register_data("number")(int)
    config = load_recipe("digits", {"data.name": "stripes", "run.batch_size": 4, "attention": "lrf_dyn"})
    assert estimate(config, memory=False)["train_images"] == 12
